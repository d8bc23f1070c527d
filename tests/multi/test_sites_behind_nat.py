"""Two sites behind NAT that accept no connections, and one reachable server: `commlayer join` trains there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import site_training, sites
from support.lab import needs_lab
from support.nat import SERVER, Nat, public

pytest.importorskip("cryptography", reason="cryptography is not installed")
from commlayer.cluster.keys import authority

pytestmark = needs_lab
COMMAND = [sys.executable, "-m", "commlayer.cli.main"]
PORT = 7000
WAIT_S = 60.0


def dial(place: str, port: int) -> str:
    return f"import socket; socket.create_connection(({place!r}, {port}), 1.0); print('let in')"


@pytest.mark.nightly
def test_two_unreachable_sites_train_together(tmp_path: Path) -> None:
    authority.init(tmp_path / "keys", 1)
    names = ("server", "home-a", "home-b")
    keys = [str(authority.add(tmp_path / "keys", name, 1, dials_only=name != "server")) for name in names]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMMLAYER_")}
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": sites.ROOT,
                             "env": environment | sites.QUICK | {"COMMLAYER_CONFIG": ""}}
    with Nat(2) as nat:
        server = nat.popen(0, [*COMMAND, "serve", "--bind", f"{SERVER}:{PORT}", "--workers", "2", "--keys", keys[0]], **piped)
        assert server.stdout is not None
        assert server.stderr is not None
        assert json.loads(server.stdout.readline()) == {"control": f"{SERVER}:{PORT}", "data": f"{SERVER}:{PORT + 1}"}
        line = next(lines for lines in server.stderr if "on each other machine run: " in lines)
        assert line.endswith(f" run: commlayer join --keys ITS-KEYS {SERVER}:{PORT} SCRIPT\n")
        script = [f"{SERVER}:{PORT}", site_training.__file__, "plain"]
        both = [nat.popen(1 + home, [*COMMAND, "join", "--keys", keys[1 + home], *script], **piped) for home in range(2)]
        report = []
        for home in both:
            out, errors = home.communicate(timeout=WAIT_S)
            assert home.returncode == 0, errors
            report.append(json.loads(out.splitlines()[-1]))
        assert sorted(one["rank"] for one in report) == [0, 1]
        assert {one["sha"] for one in report} == set(site_training.torchrun_digests("plain", 2))
        assert nat.dialled == [{(SERVER, PORT), (SERVER, PORT + 1)}] * 2, "nothing else was tried"
        assert nat.dropped == [0, 0]
        for home in range(2):  # the translator does what it is there for
            denied = nat.popen(0, [sys.executable, "-c", dial(public(home), PORT)], **piped)
            assert "let in" not in denied.communicate(timeout=WAIT_S)[0]
        assert min(nat.dropped) > 0
        _, lines = server.communicate(timeout=WAIT_S)
        assert "home-a (pid " in lines
        assert server.returncode == 0, lines
