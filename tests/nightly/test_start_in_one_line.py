"""From `commlayer serve` to training with the printed lines: three sites as processes, each with its own user folder."""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from support.sites import WAIT_S, Process, Sites, all_ended, ended, next_row

pytest.importorskip("cryptography", reason="cryptography is not installed")
from commlayer.cluster.keys import authority

pytestmark = pytest.mark.timeout(300)
START_S = 60.0
"""From the server's start to the first step of the last home."""
SCRIPT = """
import json, sys, time
import torch
import commlayer

torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with commlayer.attach(model, optimizer) as session:
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if step == 0:
            print(json.dumps({"rank": session.rank, "world": session.world_size, "time": time.time()}), flush=True)
        time.sleep(float(sys.argv[2]))
"""


class Job(NamedTuple):
    """A server, and the lines that it has printed."""

    server: Process
    address: str
    data: str
    lines: list[list[str]]


class Homes:
    """Homes of different users on this machine."""

    def __init__(self, sites: Sites, folder: Path) -> None:
        self._sites, self._folder = sites, folder
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        sites.set(COMMLAYER_TOKEN="")

    def serve(self, *options: str) -> Job:
        server = self._sites.run("serve", "--bind", "127.0.0.1", "--dir", str(self._folder / "keys"), *options)
        assert server.stdout is not None
        assert server.stderr is not None
        row = json.loads(server.stdout.readline())
        assert "token" not in row, "the secret is in the keys"
        lines = list[list[str]]()
        names = options[options.index("--invite") + 1].split(",")
        for line in server.stderr:
            if found := re.search(r"^  (commlayer join .*|# .*)$", line):
                lines.append(shlex.split(found[1]))
            if len(lines) == len(names):
                break
        return Job(server, row["control"], row["data"], lines)

    def paste(self, home: str, line: list[str], *arguments: str) -> Process:
        """Runs the line as the user of this home, with its own script."""
        self._sites.set(XDG_CONFIG_HOME=str(self._folder / home))
        assert line[-1] == "train.py"
        return self._sites.run(*line[1:-1], str(self.script), *arguments)

    def run(self, home: str, *arguments: str) -> Process:
        self._sites.set(XDG_CONFIG_HOME=str(self._folder / home))
        return self._sites.run(*arguments)


@pytest.fixture
def homes(sites: Sites, tmp_path: Path) -> Homes:
    return Homes(sites, tmp_path)


def test_three_sites_train_within_a_minute_and_again_without_a_token(homes: Homes, tmp_path: Path) -> None:
    begin = time.time()
    job = homes.serve("--invite", "home-1,home-2,home-3")
    assert [line[2].partition("@")[0] for line in job.lines] == ["home-1", "home-2", "home-3"]
    started = [homes.paste(line[2].partition("@")[0], line, "3", "0.0") for line in job.lines]
    rows = [next_row(process) for process in started]
    assert sorted(row["rank"] for row in rows) == [0, 1, 2]
    first_s = max(row["time"] for row in rows) - begin
    print(f"from serve to the first step of three homes: {first_s:.1f} s")
    assert first_s <= START_S
    ends = all_ended(started)
    progress = [line for end in ends for line in end.errors.splitlines() if " of 3 homes have joined (" in line]
    assert any(re.search(r"waiting for home-\d(, home-\d)?, \d+ of 600 s$", line) for line in progress), progress
    assert all("fetched a certificate" in end.errors for end in ends)
    all_ended([job.server])

    again = homes.serve("--invite", "home-1,home-2,home-3", "--port", job.address.rpartition(":")[2])
    assert [line[2] for line in again.lines] == [f"home-{n}@{again.address}" for n in (1, 2, 3)], "all have keys"
    lines = [job.lines[0], again.lines[1], ["commlayer", "up", "train.py"]]  # with its token, without, and without a line
    ends = all_ended([homes.paste(f"home-{n}", line, "2", "0.0") for n, line in enumerate(lines, 1)])
    assert not any("fetched a certificate" in end.errors for end in ends)
    all_ended([again.server])
    issued = [one.name for one in authority.list_issued(tmp_path / "keys")]
    assert sorted(issued) == ["home-1", "home-2", "home-3", "server"]


def test_ctrl_c_while_waiting_leaves_in_order_and_the_site_can_return(homes: Homes) -> None:
    job = homes.serve("--invite", "a,b")
    first = homes.paste("a", job.lines[0], "2", "0.0")
    assert first.stderr is not None
    assert any("1 of 2 homes have joined (a); waiting for b, " in line for line in iter(first.stderr.readline, ""))
    first.send_signal(signal.SIGINT)
    assert ended(first).code == 130
    all_ended([homes.paste(name, line, "2", "0.0") for name, line in zip("ab", job.lines, strict=True)])
    assert f" a (pid {first.pid}) has left" in all_ended([job.server])[0].errors


REFUSED = [
    ("used", "E-INVITATION-USED"), ("expired", "E-INVITATION-EXPIRED"), ("wrong", "E-INVITATION"),
    ("malformed", "E-INVITATION"), ("other name", "E-INVITATION"), ("other CA", "E-CERTIFICATE-CA"),
    ("no token", "E-INVITATION"), ("with keys", "E-CLI-OPTION"), ("no script", "E-CLI-OPTION"), ("data port", "E-INVITATION"),
]


def test_unusable_join_lines_are_one_coded_line_with_exit_code_2(homes: Homes, tmp_path: Path) -> None:
    job = homes.serve("--invite", "a,b,c")
    (address, a), (_, b) = ((line[2].partition("@")[2].partition("#")[0], line[2].partition("#")[2]) for line in job.lines[:2])
    made = homes.run("owner", "keys", "invite", "d", "--dir", str(tmp_path / "keys"), "--hours", "1e-9")
    (expired,) = [shlex.split(one)[2] for one in made.communicate(timeout=WAIT_S)[0].splitlines() if one.startswith("  ")]
    flipped = a[:50] + ("A" if a[50] != "A" else "B") + a[51:]
    other = ("A" if a[0] != "A" else "B") + a[1:]
    used = homes.paste("first", job.lines[2], "1", "0.0")
    assert used.stderr is not None
    assert any("fetched a certificate" in line for line in iter(used.stderr.readline, ""))
    texts = {
        "used": job.lines[2][2], "expired": expired, "wrong": f"a@{address}#{flipped}",
        "malformed": f"a@{address}#{a[:-3]}", "other name": f"a@{address}#{b}", "other CA": f"a@{address}#{other}",
        "no token": f"a@{address}", "with keys": f"a@{address}#{a}", "no script": f"a@{address}#{a}",
        "data port": f"a@{job.data}#{a}",
    }
    for kind, code in REFUSED:
        options = ("--keys", "somewhere") if kind == "with keys" else ()
        script = str(tmp_path / "nowhere.py") if kind == "no script" else str(homes.script)
        end = ended(homes.run(kind, "join", *options, texts[kind], script))
        (last,) = [one for one in end.errors.splitlines() if one.startswith("commlayer: ")]
        assert (end.code, last.rpartition(" ")[2]) == (2, f"[{code}]"), (kind, end.errors)
        assert "Traceback" not in end.errors
        assert "#" not in last or "'#'" in last, "no token in an error"
    used.kill()


def test_server_on_another_address_invites_and_reports_what_it_lacks(
    homes: Homes, tmp_path: Path, sites: Sites,
) -> None:
    line = ("serve", "--bind", "0.0.0.0", "--advertise", "127.0.0.1", "--dir", str(tmp_path / "keys"))
    end = ended(sites.run(*line))
    assert (end.code, end.errors.count("\n"), "--workers N" in end.errors) == (2, 1, True)
    assert end.errors.endswith("[E-PLAIN-TEXT]\n")
    assert not (tmp_path / "keys").exists()
    server = sites.run(*line, "--workers", "1")
    assert server.stderr is not None
    paste = next(shlex.split(one) for one in server.stderr if one.startswith("  commlayer join home-1@127.0.0.1:"))
    all_ended([homes.paste("one", paste, "1", "0.0"), server])
