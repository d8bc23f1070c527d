"""Error codes: the table and the source agree, and codes cross process boundaries."""

from __future__ import annotations

import logging
import pickle
import re
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest
from support import ROOT

from commlayer import errors
from commlayer.cluster.processes.bounded_calls import ANY_PEER
from commlayer.engine.worker.root_cause import RootCause, WaitsFor
from commlayer.errors import (
    CommError,
    CorruptFrame,
    DeadlineExceeded,
    InvalidInput,
    InvalidState,
    PeerLost,
    RecordError,
    find_error_code,
)
from commlayer.observe.log_lines import LogLines


def test_table_lists_exactly_the_codes_of_the_source() -> None:
    source = [path.read_text() for path in (ROOT / "commlayer").rglob("*.py") if path.name != "errors.py"]
    classes = (ROOT / "commlayer/errors.py").read_text().partition("class Coded")[2]
    used = set(re.findall(r'"(E-[A-Z-]+)"', "\n".join([*source, classes])))
    assert used == tomllib.loads((ROOT / "docs/reference_pages/error_codes.toml").read_text("utf-8")).keys()


@pytest.mark.parametrize("error", [
    InvalidInput("E-ARGUMENT", "x: got 1"), InvalidState("E-COMPILED", "too early"), RecordError("E-RECORD", "x: got 1"),
    RecordError("E-SETTING", "x: got 1"), PeerLost("gone", peer="worker 2", step=3, bucket=4)])
def test_error_ends_with_its_code_and_crosses_processes(error: errors.Coded) -> None:
    assert str(error).endswith(f"[{error.code}]")
    assert find_error_code(error) == error.code
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code) == (type(error), str(error), error.code)


def test_code_of_a_quoted_error_is_kept() -> None:
    inner = PeerLost("gone", peer="worker 2")
    outer = InvalidInput("E-ARGUMENT", f"x: {inner}; try again")
    assert (outer.code, str(outer)) == ("E-PEER-LOST", "x: worker 2: gone; try again [E-PEER-LOST]")


def test_located_error_keeps_its_class_and_code() -> None:
    error = CorruptFrame("short", code="E-PAYLOAD").located(peer="server 0", step=5)
    assert (type(error), error.code, error.peer, error.step, error.bucket) == (CorruptFrame, "E-PAYLOAD", "server 0", 5, None)
    assert str(error) == "server 0: short (step 5) [E-PAYLOAD]"


def test_text_of_a_peer_cannot_control_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(PeerLost("a\x1b[2J\nforged", peer="worker 2\r")) == r"worker 2\r: a\x1b[2J\nforged [E-PEER-LOST]"
    lines = LogLines("commlayer join")
    monkeypatch.setattr(lines, "stream", SimpleNamespace(isatty=lambda: True))
    record = logging.LogRecord("commlayer", logging.WARNING, "", 0, "waiting: %s", ("home 2\x1b[2J\r",), None)
    assert lines.format(record) == r"commlayer join: waiting: home 2\x1b[2J\r"


def test_error_with_a_named_peer() -> None:
    error = CommError("gone", peer="worker 2")
    error.call("worker 2 (ben)")
    assert (str(error), error.peer) == ("worker 2 (ben): gone [E-COMM]", "worker 2")


MET = PeerLost("connection lost", peer="server 1", step=4, bucket=2)
TOLD = PeerLost(f"left the job: PeerLost: {MET}", peer="worker 2")
DEAD = PeerLost("no heartbeat for 10.0 s", peer="server 1")
LINK: Any = SimpleNamespace(display_name=str)
"""There is one, and it is not asked for a cause."""


@pytest.mark.parametrize(("met", "error", "named"), [
    (MET, TOLD, MET), (MET, DEAD, DEAD), (TOLD, TOLD, TOLD),
    (MET, PeerLost("left the job: ValueError: no room", peer="worker 2"), None),
    (DeadlineExceeded("no answer", peer="worker 3"), TOLD, TOLD), (CommError("timed out", peer=ANY_PEER), TOLD, TOLD),
    (CommError("the session is closed"), TOLD, TOLD), (ValueError("a mistake"), TOLD, None)])
def test_first_cause_is_named(met: Exception, error: CommError, named: CommError | None) -> None:
    verdict = RootCause(LINK, WaitsFor())
    verdict.record(error)
    verdict.record(PeerLost("came later", peer="worker 9"))
    expected = named if named is not None else error if isinstance(met, CommError) else met
    assert verdict.explain(met) is expected
