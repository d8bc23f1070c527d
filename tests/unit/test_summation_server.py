"""The summation service behind a transport: failures, refusals, awaited members, and duplicate requests."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.loopback import Hub
from support.summation import Doubles, ask, hub_of_a_test, next_stalled, push, served  # noqa: F401  (a fixture)

from commlayer.cluster.summation_server import Stalled
from commlayer.errors import PeerLost
from commlayer.transport.protocol import SERVER_BASE, Kind, key


class Broken(Doubles):
    def emit(self, r: int, acc: list[float], out: memoryview) -> int:
        raise MemoryError("no room")


def test_a_failure_of_the_server_itself_is_told_to_all_and_blamed_on_none(
    hub: tuple[Hub, list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("commlayer.cluster.summation_server.FAILURE_NOTICE_S", 0.0)
    members = served(hub, Broken())
    waiting = [m.recv(SERVER_BASE, key(push(0, 0.0).header._replace(kind=Kind.RESULT))) for m in members]
    for m, transport in enumerate(members):
        transport.send(SERVER_BASE, push(m, 1.0).header, push(m, 1.0).body)
    for transport, handle in zip(members, waiting, strict=True):
        assert next_stalled(transport) == Stalled(5, 0, (), failed="failed: MemoryError: no room")
        with pytest.raises(PeerLost, match="server 0: .*E-PEER-LOST"):
            transport.wait(handle, time.monotonic() + 30.0)
    (text,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert text.getMessage() == "server 0: failed: MemoryError: no room (step 0, bucket 5) [E-COMM]"
    assert text.exc_info, "with a traceback: this is for who mends the server"
    assert "dropped" not in caplog.text


class Picky(Doubles):
    def add(self, r: int, payload: memoryview, acc: list[float], first: bool) -> None:
        raise ValueError("not these bytes")


def test_a_payload_that_the_codec_refuses_is_blamed_on_its_sender(hub: tuple[Hub, list[Any]]) -> None:
    members = served(hub, Picky(), stall_s=0.0)
    members[1].send(SERVER_BASE, push(1, 1.0).header, push(1, 1.0).body)
    assert next_stalled(members[1]).missing == (0, 2)
    members[0].send(SERVER_BASE, push(0, 1.0).header, push(0, 1.0).body)
    while not (text := next_stalled(members[1])).dropped:
        pass
    assert (text.missing, text.dropped, text.failed) == ((0, 2), {0: "not these bytes [E-FRAME]"}, "")


class Noted(Doubles):
    """What was done, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def undo(self, slices: int) -> None:
        self.done.append(f"undo {slices}")

    def restore(self, data: bytes | memoryview) -> None:
        self.done.append("restore")


def test_a_numbered_request_that_comes_twice_is_done_once_and_answered_twice(hub: tuple[Hub, list[Any]]) -> None:
    ops = Noted()
    member = served(hub, ops, members=1)[0]
    requests = [ask(Kind.UNDO, 0, 0, b"", used=1, undone=3), ask(Kind.STATE, 0, 4, b"state", used=2),
                ask(Kind.STATE_GET, 0, 0, b"", used=3, undone=1)]
    for request in (*requests, *requests):
        member.send(SERVER_BASE, request.header, request.body)
    for kind, step in ((Kind.STATE_OK, 4), (Kind.STATE, 0)) * 2:
        answer = member.recv(SERVER_BASE, key(requests[1].header._replace(kind=kind, step=step)))
        assert member.wait(answer, time.monotonic() + 30.0).header.used in (2, 3)
    assert ops.done == ["undo 3", "restore", "undo 1"]
    member.send(SERVER_BASE, push(0, 1.0, 4).header, push(0, 1.0, 4).body)
    assert member.peers == (SERVER_BASE,), "no member was dropped"
