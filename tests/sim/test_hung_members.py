"""A member that lives and blocks the others: what servers report, and which member the coordinator blames."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from support.coordinators import Failures, Opened, all_opened, quick, until  # noqa: F401  (a fixture)
from support.membership import elastic, members, several, worker
from support.serving import PLAN, epoch_of
from support.summation import Doubles, hub_of_a_test, push  # noqa: F401  (a fixture)

from commlayer import records
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.messages import Overdue
from commlayer.cluster.membership import client, epoch_change, membership
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.membership.membership import State
from commlayer.cluster.servers.data_server import DataServer
from commlayer.cluster.servers.summation import Summation
from commlayer.cluster.servers.summation_server import SumServer
from commlayer.errors import CorruptFrame
from commlayer.transport.protocol import SERVER_BASE

WHY = ("was dropped: sent nothing for 300 s while others waited in step 7 (reported by server 0): it hangs, or its machine is "
       "too slow for deadline_s")


def hears(state: State, *reports: tuple[str, int | None, tuple[int, ...]]) -> State:
    """Heartbeats one after the other, by token; no step: nothing waits there."""
    for token, step, missing in reports:
        state, _ = membership.heartbeat(state, token, 1.0)
        state = epoch_change.record_overdue(state, token, None if step is None else Overdue(step, missing, 300.0))
    return epoch_change.next_epoch(state)


def gone(state: State) -> list[int]:
    return sorted(p.rank for p in state.registrations.values() if p.dead)


TWICE = [
    ("one server", [("s0", 7, (2,)), ("s0", 7, (2,))], [2]),
    ("once is not enough", [("s0", 7, (2,))], []),
    ("two at once", [("s0", 7, (1, 2)), ("s0", 7, (1, 2))], [1, 2]),
    ("the one that came meanwhile is not blamed", [("s0", 7, (1, 2)), ("s0", 7, (2,))], [2]),
    ("the sum came whole", [("s0", 7, (2,)), ("s0", None, ()), ("s0", 7, (2,))], []),
    ("another step", [("s0", 7, (2,)), ("s0", 8, (2,))], []),
    ("none has waited that long", [("s0", 7, ()), ("s0", 7, ())], []),
    ("other buckets elsewhere", [("s0", 7, (2,)), ("s1", 7, (1,)), ("s0", 7, (2,)), ("s1", 7, (1,))], [1, 2]),
    ("who waits in a later step has no say", [("s1", 6, ()), ("s0", 7, (1, 2)), ("s0", 7, (1, 2))], []),
    ("the earliest step", [("s0", 7, (0, 1)), ("s1", 6, (3,)), ("s0", 7, (0, 1)), ("s1", 6, (3,))], [3]),
    ("the earlier sum came whole", [("s1", 6, ()), ("s0", 7, (1,)), ("s1", None, ()), ("s0", 7, (1,))], [1]),
    ("all", [("s0", 7, (0, 1, 2, 3)), ("s0", 7, (0, 1, 2, 3))], []),
    ("all, by several sums", [("s0", 7, (0, 1)), ("s1", 7, (2, 3)), ("s0", 7, (0, 1)), ("s1", 7, (2, 3))], []),
    ("too few would be left", [("s0", 7, (0, 1, 2)), ("s0", 7, (0, 1, 2))], []),
    ("a worker's word", [("w1", 7, (2,)), ("w1", 7, (2,))], []),
    ("a stranger's", [("s9", 7, (2,)), ("s9", 7, (2,))], []),
    ("who is no member", [("s0", 7, (9,)), ("s0", 7, (9,))], []),
]


@pytest.mark.parametrize(("reports", "blamed"), [row[1:] for row in TWICE], ids=[row[0] for row in TWICE])
def test_member_missing_in_the_earliest_step_of_two_reports_is_blamed(
        reports: list[tuple[str, int | None, tuple[int, ...]]], blamed: list[int]) -> None:
    state = hears(several(), *reports)
    assert gone(state) == blamed
    assert members(state) == (1 + len(blamed), [rank for rank in range(4) if rank not in blamed])


def test_blamed_member_receives_the_reason_of_its_end() -> None:
    state = hears(elastic(), ("s0", 7, (2,)), ("s0", 7, (2,)))
    assert state.registrations["w2"].dead == WHY
    _, pulse = membership.heartbeat(state, "w2", 2.0)
    assert pulse.dead == WHY
    assert hears(state, ("s0", 7, (2,))).epoch == state.epoch, "said again it changes nothing"


@pytest.mark.parametrize("state", [several(least=0), several(unable=3), several(least=4)], ids=["all", "unable", "least"])
def test_no_member_is_blamed_with_fixed_members(state: State) -> None:
    assert gone(hears(state, ("s0", 7, (2,)), ("s0", 7, (2,)))) == []


def test_member_that_died_in_the_meantime_does_not_count_as_remaining() -> None:
    state = membership.evict(several(least=3), ["w0"], "its home was switched off")
    assert gone(hears(state, ("s0", 7, (0, 2)), ("s0", 7, (0, 2)))) == [0]


def test_departed_server_delays_no_verdict() -> None:
    state = membership.evict(hears(several(), ("s1", 6, ())), ["s1"], "killed")
    assert 2 in gone(hears(state, ("s0", 7, (2,)), ("s0", 7, (2,))))


@pytest.mark.parametrize("rank", [0, 4])
def test_first_and_joining_members_are_blamed_like_any_other(rank: int) -> None:
    state = hears(membership.evict(several(), ["w3"], "killed"))
    state = epoch_change.admit(state, worker(4, world=4, elastic=True), 0.0)[0]
    assert members(state) == (3, [0, 1, 2, 4])
    assert gone(hears(state, ("s0", 7, (rank,)), ("s0", 7, (rank,)))) == sorted([3, rank])


class Sums:
    """A server of buckets 5 and 6, and what its members have sent, each N seconds ago."""

    def __init__(self, hub: Any, members: int = 3) -> None:
        self.core = Summation(0, 1, {5: Doubles(), 6: Doubles()}, dict.fromkeys((5, 6), tuple(range(members))))
        ends = hub[0].mesh([SERVER_BASE, *range(members)])
        self.server = SumServer(self.core, ends[0], range(members), stall_s=60.0)
        hub[1].extend((self.server, *ends[1:]))

    def sent(self, *parts: tuple[int, int, int, float]) -> Sums:
        for member, step, bucket, ago_s in parts:
            self.core.push(push(member, 1.0, step, bucket=bucket), time.monotonic() - ago_s)
        self.server._check_stalls()
        return self


SENT = [
    ("nothing", [], None),
    ("whole", [(0, 0, 5, 900.0), (1, 0, 5, 900.0), (2, 0, 5, 900.0)], None),
    ("not for so long", [(0, 0, 5, 90.0)], (0, ())),
    ("one", [(0, 0, 5, 900.0), (1, 0, 5, 90.0)], (0, (2,))),
    ("more than have sent it", [(0, 0, 5, 900.0)], (0, ())),
    ("in several sums", [(0, 0, 5, 900.0), (1, 0, 5, 90.0), (0, 0, 6, 900.0), (2, 0, 6, 900.0)], (0, (1, 2))),
    ("in one of several", [(0, 0, 5, 900.0), (1, 0, 5, 90.0), (0, 0, 6, 90.0), (2, 0, 6, 90.0)], (0, (2,))),
    ("in the earliest step", [*((m, 0, 5, 900.0) for m in range(3)), (0, 1, 5, 900.0), (1, 0, 6, 90.0)], (0, ())),
]


@pytest.mark.parametrize(("sent", "reports"), [row[1:] for row in SENT], ids=[row[0] for row in SENT])
def test_server_reports_members_overdue_in_the_earliest_step(
        hub: Any, sent: list[tuple[int, int, int, float]], reports: Any) -> None:
    assert Sums(hub).sent(*sent).server.overdue(300.0) == reports


@pytest.mark.parametrize(("senders", "dropped", "missing"), [((0, 1), 2, ()), ((0,), 1, (2,))])
def test_dropped_member_is_not_also_reported_as_overdue(hub: Any, senders: tuple[int, ...], dropped: int,
                                                        missing: tuple[int, ...]) -> None:
    sums = Sums(hub).sent(*((sender, 0, 5, 900.0) for sender in senders))
    sums.server._drop(CorruptFrame("another step", peer=f"worker {dropped}"))
    assert sums.server.overdue(300.0) == (0, missing)


def test_limit_is_multiplied_by_the_number_of_local_steps(opened: Opened) -> None:
    for steps in (1, 4):
        serving = opened.add(DataServer("127.0.0.1", 0, quick(deadline_s=0.001)))
        data = records.encode(msgspec.structs.replace(PLAN, local_steps=steps))
        serving.start(epoch_of(data, serving, 3), data, 0)
        assert serving.report().get("overdue") is None
        assert serving.sums is not None
        cell = serving.sums.cells[0]
        cell.begin(5, 0)
        cell.sum.handled += [0, 1]
        until(lambda serving=serving: serving.report()["overdue"] is not None, "the server has noticed that the sum waits")
        assert serving.report()["overdue"] == Overdue(5, (2,), 0.001 * steps)


def test_overdue_report_of_a_server_heartbeat_evicts_the_worker(opened: Opened) -> None:
    """The coordinator evicts the worker after the second report."""
    coordinator = opened.add(Coordinator(quick(min_workers=1), workers=2, servers=1))
    workers = (messages.worker_request("job", rank, 2, plan=b"plan", elastic=True) for rank in range(2))
    requests = [messages.server_request("127.0.0.1:1"), *workers]
    with ThreadPoolExecutor(3) as pool:
        seats = list(pool.map(lambda request: client.join(coordinator.address, request, quick(), Failures()), requests))
    opened.extend(seats)
    seats[0].report.fields = lambda: {"overdue": Overdue(3, (1,), 5.0)}
    until(lambda: seats[0].newest.generation > 1, "there is another epoch")
    assert [m.rank for m in seats[0].newest.members] == [0]
    dead = coordinator.state.registrations[requests[2].token].dead
    assert "sent nothing for 5 s while others waited in step 3 (reported by server 0)" in dead
