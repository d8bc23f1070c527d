"""Join lines of sites, the next action of `commlayer up`, and progress messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.site_groups import asked

from commlayer.cli import serve
from commlayer.cli.join import Facts, in_order, next_step
from commlayer.cli.main import run
from commlayer.cli.options import stored_keys
from commlayer.cluster.keys import home_keys
from commlayer.cluster.keys.home_keys import HomeLine, Token
from commlayer.cluster.membership import sites
from commlayer.cluster.processes.script_host import joins_again
from commlayer.errors import CommError, PeerLost

TOKEN = Token(bytes(range(32)), bytes(range(100, 116)))


@pytest.mark.parametrize("line", [HomeLine("home-1", "203.0.113.1:7000", TOKEN), HomeLine("anna", "[::1]:7000", TOKEN),
                                  HomeLine("b.c_d-9", "hub.example.org:1")])
def test_join_line_round_trips(line: HomeLine) -> None:
    assert home_keys.parse(str(line)) == line
    assert home_keys.is_invitation(str(line))
    assert line.token is None or len(str(line.token)) == home_keys.TOKEN_CHARACTERS == 64
    assert not home_keys.is_invitation("203.0.113.1:7000")


GOOD = f"home-1@203.0.113.1:7000#{TOKEN}"


@pytest.mark.parametrize(("line", "code"), [
    (GOOD[:-1], "E-INVITATION"), (GOOD + "A", "E-INVITATION"), (GOOD[:-1] + "*", "E-INVITATION"),
    (GOOD[:-1] + "é", "E-INVITATION"), ("home-1@203.0.113.1:7000#", "E-INVITATION"),
    (f"203.0.113.1:7000#{TOKEN}", "E-INVITATION"), ("@1.2.3.4:7000", "E-INVITATION"),
    ("../x@1.2.3.4:7000", "E-INVITATION"), ("a b@1.2.3.4:7000", "E-INVITATION"), ("home-1@203.0.113.1", "E-ADDRESS"),
    ("home-1@203.0.113.1:0", "E-ADDRESS"), ("home-1@:7000", "E-ADDRESS"),
])
def test_malformed_join_line_is_one_error_line_without_the_token(line: str, code: str) -> None:
    with pytest.raises(ValueError, match=rf"\[{code}\]$") as caught:
        home_keys.parse(line)
    assert "\n" not in str(caught.value)
    assert str(TOKEN)[:20] not in str(caught.value)


def test_keys_of_different_jobs_and_sites_have_different_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    lines = ["a@1.2.3.4:7000", "b@1.2.3.4:7000", "a@1.2.3.4:7001", "a@[::1]:7000"]
    folders = {home_keys.parse(line).folder for line in lines}
    assert len(folders) == len(lines)
    assert {folder.parent for folder in folders} == {tmp_path / "commlayer"}


ONE, TWO = (HomeLine(name, "1.2.3.4:7000") for name in ("home-1", "home-2"))
BASE = Facts((ONE,), False, "train.py", workers=3)


@pytest.mark.parametrize(("facts", "words"), [
    (BASE, ""),
    (BASE._replace(begun=True, free_seats=1), ""),
    (BASE._replace(begun=True), "with all its 3 workers"),
    (BASE._replace(begun=True, script=""), "with all its 3 workers"),
    (BASE._replace(script=""), "`commlayer up SCRIPT`"),
    (BASE._replace(problem="no answer"), "(no answer)"),
    (BASE._replace(problem="no answer", script=""), f"`commlayer doctor --join {ONE}`"),
    (BASE._replace(homes=()), "commlayer join NAME@HOST:PORT#TOKEN SCRIPT"),
    (BASE._replace(homes=(), has_ca=True), "`commlayer serve --bind HOST:PORT --workers N`"),
    (BASE._replace(homes=(ONE, TWO)), f"commlayer join {ONE} train.py or commlayer join {TWO} train.py"),
])
def test_next_step(facts: Facts, words: str) -> None:
    line = next_step(facts)
    assert words in line
    assert bool(words) == bool(line)
    assert "\n" not in line


@pytest.mark.parametrize(("given", "wanted", "invites"), [
    ({}, True, True), ({"insecure": True}, True, True), ({"insecure": True}, False, False), ({"bind": "10.0.0.1"}, False, True),
    ({"bind": "10.0.0.1", "insecure": True}, True, True),
])
def test_invited_sites_use_keys_even_if_the_page_is_plain_text(given: dict[str, Any], wanted: bool, invites: bool) -> None:
    assert serve.read_settings(given, ["home-1"], wanted=wanted)[1] == invites


@pytest.mark.parametrize(("words", "workers", "names"), [
    (["--workers", "3"], 3, 3), (["--workers", "4", "--min-workers", "2"], 4, 4), (["--min-workers", "2"], 0, 2),
    (["--min-workers", "2", "--invite", "a,b,c"], 0, 3), (["--invite", "a,b,c"], 3, 3),
])
def test_server_invites_the_number_of_sites_it_waits_for(words: list[str], workers: int, names: int,
                                                         monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("commlayer.cluster.servers.server_process.run", lambda _, part: served.append(part))
    monkeypatch.setattr("sys.argv", ["commlayer", "serve", "--bind", "10.0.0.1:7000", *words])
    with pytest.raises(SystemExit, match="0"):
        run()
    assert [(part.workers, len(part.invited)) for part in served] == [(workers, names)]


HOME = "home-1@1.2.3.4:7000"


@pytest.mark.parametrize(("words", "checked"), [
    ([HOME, "--check"], "None"), ([HOME, "train.py", "--check"], "train.py"), (["--check", HOME], "None"),
    ([HOME, "--check", "train.py", "--lr", "1"], "train.py"),
    ([HOME, "--wait", "5", "train.py", "--check", "--wait", "x"], "train.py"),
    ([HOME, "train.py", "--", "--check"], ""), ([HOME, "train.py", "--lr", "1", "--", "-x"], ""),
    ([HOME, "--nproc-per-node", "2", "train.py", "--wait", "x"], ""),
])
def test_options_between_line_and_script_are_those_of_join(
        words: list[str], checked: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("commlayer.cli.join.examine", lambda address, **given: seen.append(str(given["script"])))
    monkeypatch.setattr("sys.argv", ["commlayer", "join", *words])
    with pytest.raises(SystemExit, match="0" if checked else "2"):  # 2: train.py does not exist
        run()
    assert seen == ([checked] if checked else [])


def test_script_arguments_are_passed_unchanged() -> None:
    valued = {"--wait"}
    for words in (["--wait", "9"], ["a", "--wait=9", "-h", "--help"], ["-x", "--", "y"]):
        assert in_order([HOME, "--insecure", "train.py", *words], valued) == ["--insecure", HOME, "train.py", *words]


def store(*lines: str) -> None:
    for line in lines:
        home = home_keys.parse(line)
        home.folder.mkdir(parents=True)
        (home.folder / home_keys.LINE).write_text(f"{line} 0\n")


@pytest.mark.parametrize(("stored", "keys", "insecure", "token", "used"), [
    (["a@1.2.3.4:7000"], "", False, "", True),
    (["a@1.2.3.4:7000", "a@1.2.3.4:7001"], "", False, "", True),
    (["a@1.2.3.4:7001"], "", False, "", False),
    (["a@1.2.3.4:7000", "b@1.2.3.4:7000"], "", False, "", False),
    (["a@1.2.3.4:7000"], "mine", False, "", False),
    (["a@1.2.3.4:7000"], "", True, "", False),
    (["a@127.0.0.1:7000"], "", False, "", True),
    (["a@127.0.0.1:7000"], "", False, "0123456789", False),
])
def test_address_uses_the_keys_of_its_only_site(stored: list[str], keys: str, insecure: bool, token: str, used: bool,
                                                monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("COMMLAYER_TOKEN", token)
    monkeypatch.chdir(tmp_path)
    store(*stored)
    address = f"{home_keys.parse(stored[0]).address.partition(':')[0]}:7000"
    expected = str(home_keys.parse(stored[0]).folder) if used else keys
    assert stored_keys(address, keys, insecure=insecure) == (address, expected)


@pytest.mark.parametrize(("words", "code"), [(["up", "train.py"], 2), (["up"], 0)])
def test_up_fails_if_it_does_not_start_the_script(words: list[str], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                  ) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["commlayer", *words])
    with pytest.raises(SystemExit, match=str(code)):
        run()


def test_progress_names_missing_sites() -> None:
    def line(state: sites.Sites, *names: str, workers: int = 1) -> str:
        for name in names:
            request = msgspec.structs.replace(asked(name, workers=workers), certificate=name)
            state, reply = sites.register(state, request, 0.0)
        return reply.missing

    invited = sites.Sites(3, invited=("home-1", "home-2", "home-3"))
    assert line(invited, "home-1", "home-3") == "2 of 3 homes have joined (home-1, home-3); waiting for home-2"
    assert line(invited, "home-3") == "1 of 3 homes have joined (home-3); waiting for home-1, home-2"
    assert line(invited, "home-2", "home-1", "home-3") == ""
    assert line(invited, "home-2", workers=2) == "2 of 3 workers have joined (home-2 with 2); waiting for 1 more"
    assert line(sites.Sites(3), "a") == "1 of 3 workers have joined (a); waiting for 2 more"


@pytest.mark.parametrize(("error", "least", "expected"), [
    (CommError("the job ended", code="E-JOB-ENDED"), 0, True), (CommError("the job is full", code="E-JOB-FULL"), 0, True),
    (PeerLost("declared this worker 1 dead", peer="coordinator 1.2.3.4:1", code="E-EPOCH-ENDED"), 2, True),
    (PeerLost("declared this worker 1 dead", peer="coordinator 1.2.3.4:1", code="E-EPOCH-ENDED"), 0, False),
    (PeerLost("declared this worker 1 dead: was dropped", peer="coordinator 1.2.3.4:1"), 2, False),
    (PeerLost("no heartbeat for 60.0 s", peer="server 0"), 2, True), (PeerLost("no heartbeat", peer="server 0"), 0, False),
    (PeerLost("1 worker is left", peer="worker 3"), 2, False), (ValueError("no room"), 2, False),
    (KeyboardInterrupt(), 2, False),
])
def test_site_joins_again_if_the_job_may_continue_without_it(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, least: int, *, expected: bool,
) -> None:
    monkeypatch.setenv("COMMLAYER_MIN_WORKERS", str(least))
    assert joins_again(error) is expected
