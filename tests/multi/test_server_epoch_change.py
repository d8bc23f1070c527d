"""Whom a server believes that the members of its job have changed: only the coordinator's view counts."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from support.coordinators import all_opened, quick  # noqa: F401  (a fixture)
from support.meshes import soon
from support.serving import JOB, PLAN, changed, view_of

from commlayer import records
from commlayer.cluster import messages
from commlayer.cluster.epoch_change import EpochChange, change_problem, wire_generation
from commlayer.cluster.summation_server import DataServer
from commlayer.config import host_port
from commlayer.errors import CommError
from commlayer.records import Member, View
from commlayer.transport.endpoint import StreamTransport
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, key

DATA = records.encode(PLAN)


class Asked:
    """A server of three, where worker 0 says that worker 2 is gone. `told`: so does the coordinator."""

    def __init__(self, opened: list[Any], *, told: bool = True, stays: bool = False) -> None:
        self.serving = DataServer("127.0.0.1", 0, quick(heartbeat_s=0.05))
        opened.append(self.serving)
        self.view = view_of(DATA, self.serving, 3)
        self.next = msgspec.structs.replace(self.view, generation=2, members=self.view.members[:2])
        newest = self.next if told else self.view
        self.serving.start(self.view, DATA, 0, newest=None if stays else lambda: newest)
        self._worker = StreamTransport(Hello(JOB.digest(), 0, messages.digest_of(DATA)))
        opened.append(self._worker)
        self._worker.dial(SERVER_BASE, host_port(self.serving.address), soon())

    def answer(self, view: View, plan: bytes = DATA, generation: int = 0) -> str:
        header = Header(Kind.PLAN, generation or wire_generation(view), flags=Flag.ABANDON)
        handle = self._worker.recv(SERVER_BASE, key(header._replace(kind=Kind.PLAN_OK)))
        self._worker.send(SERVER_BASE, header, msgspec.msgpack.encode(EpochChange(view, 7, {}, plan)))
        return bytes(self._worker.wait(handle, soon()).body).decode()

    @property
    def changed(self) -> bool:
        core = self.serving._server._core  # type: ignore[union-attr]
        return core.generation != 1 or any(cell.ended for cell in core.cells.values())


def test_a_server_goes_over_to_the_view_that_the_coordinator_made(opened: list[Any]) -> None:
    requested = Asked(opened)
    for _ in range(2):
        assert requested.answer(requested.next) == "", "said twice is done once"
    core = requested.serving._server._core  # type: ignore[union-attr]
    assert (core.generation, core.cells[0].members) == (wire_generation(requested.next), (0, 1))


@pytest.mark.parametrize(("plan", "told", "line"), [
    (DATA, False, "epoch 2 is not the coordinator's newest, which is 1"),
    (b"{", True, "plan of worker 0: "),
    (records.encode(changed(codec="zip()")), True, "codec 'zip()'"),
])
def test_what_cannot_be_done_is_refused_before_anything_has_ended(
    plan: bytes, told: bool, line: str, opened: list[Any],
) -> None:
    requested = Asked(opened, told=told)
    assert line in requested.answer(requested.next, plan)
    assert not requested.changed
    if told:
        assert requested.answer(requested.next) == ""


@pytest.mark.parametrize(("present", "then"), [
    ((0, 1, 5), (0, 1, 5, 4)),  # 4 and 5 are of one home, and 5 was ready first
    ((0, 1, 5), (0, 1, 4)),
    ((0, 1), (0, 1, 5, 4)),
    ((3,), (3, 0)),
])
def test_who_joins_stands_behind_all_others_whatever_their_numbers(present: tuple[int, ...], then: tuple[int, ...]) -> None:
    view, new = (View(n, tuple(Member(rank, rank, "host") for rank in ranks), ()) for n, ranks in ((1, present), (2, then)))
    assert change_problem(EpochChange(new, 7, {}, b""), wire_generation(new), then[0], view) == ""


WRONG = [
    ({"members": (0, 1, 3, 3)}, 0, "its members must be present members in their present order, followed by joining members"),
    ({"members": (0, 1, 0)}, 0, "its members must be present members in their present order, followed by joining members"),
    ({"members": ()}, 0, "its members must be present members"),
    ({"members": (0, 3, 2)}, 0, "its members must be present members in their present order, followed by joining members"),
    ({"members": (0, 1, 3)}, 0, "its epoch 2 differs from the coordinator's"),
    ({"members": (1, 2)}, 0, "its sender is not one of its members"),
    ({"members": (0, 2)}, 0, "its epoch 2 differs from the coordinator's"),
    ({"servers": ()}, 0, "its servers or its plan differ from the job's"),
    ({}, (1 << 32) - 1, "it announces epoch 2 with wire generation 4294967295, while epoch 1 is active"),
    ({"generation": 1}, 2, "it announces epoch 1 with wire generation 2, while epoch 1 is active"),
]


@pytest.mark.parametrize(("fields", "generation", "line"), WRONG)
def test_a_member_cannot_say_who_is_a_member(
    fields: dict[str, Any], generation: int, line: str, opened: list[Any], caplog: pytest.LogCaptureFixture,
) -> None:
    requested = Asked(opened)
    if "members" in fields:
        every = view_of(DATA, requested.serving, 4).members
        fields = {"members": tuple(every[rank] for rank in fields["members"])}
    with caplog.at_level(logging.WARNING, "commlayer"), pytest.raises(CommError):
        requested.answer(msgspec.structs.replace(requested.next, **fields), generation=generation)
    assert f"dropped worker 0: PLAN frame with a change of members is invalid: {line}" in caplog.text.replace(
        "CorruptFrame: ", "")
    assert not requested.changed


def test_where_members_stay_no_such_plan_is_taken(opened: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    requested = Asked(opened, stays=True)
    with caplog.at_level(logging.WARNING, "commlayer"), pytest.raises(CommError):
        requested.answer(requested.next)
    assert "sent a change of members, but the members of this job cannot change" in caplog.text
    assert not requested.changed
