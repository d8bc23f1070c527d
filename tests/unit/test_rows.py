"""The row of a step over a server: what all ranks read, in which order, and what they report."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.coordinators import until
from support.loopback import Hub
from support.summation import hub_of_a_test  # noqa: F401  (a fixture)

from commlayer.cluster.processes.rows import StepRows
from commlayer.cluster.servers.gather import GATHER, ROW_BUCKET, ROW_NBYTES, GatherOps
from commlayer.cluster.servers.served_rows import ServedRows
from commlayer.cluster.servers.summation import Summation
from commlayer.cluster.servers.summation_server import SumServer
from commlayer.engine.epochs.replica import GivenState
from commlayer.engine.start.result_follower import ResultFollower
from commlayer.engine.step.update_norms import LENGTHS
from commlayer.errors import CommError, CorruptFrame, DeadlineExceeded, find_error_code
from commlayer.records import Job, Plan
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, Message

WORLD, GENERATION = 3, 1
JOINS = 3
"""Number of the worker that joins."""
Site = tuple[Hub, list[Any]]


def members(count: int) -> Any:
    return SimpleNamespace(ranks=range(count))


def served(hub: Site, timeout_s: float = 20.0, *, may_leave: bool = False) -> tuple[SumServer, list[StepRows]]:
    """A server, and the rows of all ranks and of the worker that joins later."""
    core = Summation(0, GENERATION, {ROW_BUCKET: GatherOps(WORLD + 1)}, {ROW_BUCKET: tuple(range(WORLD))})
    ends = hub[0].mesh([SERVER_BASE, *range(WORLD + 1)])
    server = SumServer(core, ends[0], range(WORLD + 1), stall_s=60.0)
    hub[1].extend((server, *ends[1:]))
    result = [StepRows(ServedRows(end, rank, timeout_s), members(WORLD), may_leave=may_leave)
              for rank, end in enumerate(ends[1:])]
    for rows in result:
        rows.begin(GENERATION)
    return server, result


def ranks(hub: Site, timeout_s: float = 20.0) -> list[StepRows]:
    """The rows of all ranks, over a server."""
    return served(hub, timeout_s)[1][:WORLD]


def send(rows: list[StepRows], senders: Iterable[int], what: str = "members") -> None:
    """Each of the senders sends a row with its number in a section that stays."""
    for sender in senders:
        rows[sender].section(what, stays=True).start(float(sender))
        rows[sender].send()


def test_sections_of_one_step_are_one_row_of_all_ranks(hub: Site) -> None:
    rows = ranks(hub)
    for rank, each in enumerate(rows):
        each.section("norms").start(float(rank), 0.5)
        each.section("times").start(10.0 + rank)
        each.send()
    for each in rows:
        assert each.section("times").read() == [[10.0], [11.0], [12.0]]
        assert each.section("norms").read() == [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]
        assert not each.section("norms").under_way


def test_fast_rank_sends_its_next_rows_when_the_others_have_sent_theirs(hub: Site) -> None:
    """A server accepts only the next row of a bucket."""
    rows = ranks(hub)
    sections = [[each.section(f"step {step}") for step in range(4)] for each in rows]
    for rank, each in enumerate(rows):
        for step, section in enumerate(sections[rank]):
            section.start(10.0 * rank + step)
            each.send()
    for own in sections:
        for step, section in enumerate(own):
            assert section.read() == [[10.0 * rank + step] for rank in range(WORLD)]
            assert not section.arrived


def test_other_calls_of_a_rank_are_named(hub: Site) -> None:
    rows = ranks(hub)
    for rank, each in enumerate(rows):
        join, drift = each.section("join"), each.section("digests")
        (join if rank == 1 else drift).start(1.0)
    for each in rows:
        each.send()
    for rank, each in enumerate(rows):
        with pytest.raises(CommError) as error:
            each.section("join" if rank == 1 else "digests").read()
        assert find_error_code(str(error.value)) == "E-CALLS-DIFFER"
        assert all(name in str(error.value) for name in ("exchange of join", "exchange of digests"))


def test_missing_row_ends_at_the_deadline(hub: Site) -> None:
    rows = ranks(hub, timeout_s=0.05)[0]
    section = rows.section("digests")
    section.start(1.0)
    with pytest.raises(DeadlineExceeded, match="server 0.*exchange of digests"):
        section.read()


def test_wait_for_a_row_ends_with_the_failure_of_the_job(hub: Site) -> None:
    rows = ranks(hub)[0]
    rows.failed = lambda: CommError("worker 2 is lost")
    rows.section("digests").start(1.0)
    begin = time.monotonic()
    with pytest.raises(CommError, match="worker 2 is lost"):
        rows.section("digests").read()
    assert time.monotonic() - begin < 10.0


def test_row_of_a_member_that_has_left_is_missing(hub: Site) -> None:
    """The others wait for nothing else, and know from the row who has left."""
    server, rows = served(hub, may_leave=True)
    send(rows, (0, 1))
    server.remove({2})
    for each in rows[:2]:
        assert each.section("members").read_by_sender() == {0: [0.0], 1: [1.0]}


def test_row_of_a_member_that_leaves_afterwards_counts(hub: Site) -> None:
    server, rows = served(hub, may_leave=True)
    send(rows, (1, 2))
    server.remove({2})
    send(rows, (0,))
    assert rows[0].section("members").read() == [[0.0], [1.0], [2.0]]


def test_row_of_a_member_that_has_said_it_leaves_is_refused_and_named(hub: Site) -> None:
    server, rows = served(hub, may_leave=True)
    with ThreadPoolExecutor() as pool:
        left = pool.submit(rows[2].leave, 20.0)
        send(rows, (0, 1))
        assert not left.result()
    for each in rows[:2]:
        assert [*each.section("members").read_by_sender()] == [0, 1]
    send(rows, (2,))
    until(lambda: 2 in server.dropped(), "the breach")
    assert "not a member of this bucket's sum" in server.dropped()[2]
    send(rows, (0, 1))
    assert [*rows[0].section("members").read_by_sender()] == [0, 1]


def test_members_that_leave_after_the_same_row_may_send_rows_together(hub: Site) -> None:
    rows = ranks(hub)
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(lambda each: each.leave(20.0), rows)] == [True] * WORLD
    send(rows, range(WORLD))
    assert rows[0].section("members").read() == [[0.0], [1.0], [2.0]]


def test_missing_row_is_refused_if_members_cannot_leave(hub: Site) -> None:
    server, rows = served(hub)
    send(rows, (0, 1))
    server.remove({2})
    with pytest.raises(CorruptFrame, match=r"server 0: sends rows of 2 ranks, expected 3.*E-FRAME"):
        rows[0].section("members").read()


def test_rows_of_a_worker_that_joins_follow_those_of_its_members(hub: Site) -> None:
    server, rows = served(hub, may_leave=True)
    send(rows, range(WORLD))
    server.core.add(1, JOINS)
    for each in rows:
        each.transport.number = each.transport.joined = 1
    send(rows, range(WORLD + 1))
    for rank in (JOINS, 0):
        assert rows[rank].section("members").read_by_sender() == {sender: [float(sender)] for sender in range(WORLD + 1)}


def test_sections_that_stay_are_read_after_a_change_of_members(hub: Site) -> None:
    """Current members come first, in rank order. Any other section belongs to the former members."""
    rows = served(hub, may_leave=True)[1][:WORLD]
    for rank, each in enumerate(rows):
        each.section("lengths", stays=True).start(float(rank))
        each.section("times").start(float(rank))
        each.send()
    rows[0].change(members(2), (2, 0))
    assert not rows[0].section("times").under_way
    assert list(rows[0].section("lengths").read_by_sender().items()) == [(2, [2.0]), (0, [0.0]), (1, [1.0])]


def test_calls_of_a_worker_outside_the_members_are_named_by_its_number(hub: Site) -> None:
    rows = served(hub, may_leave=True)[1][:WORLD]
    send(rows, (0, 1))
    send(rows, (2,), "digests")
    rows[0].change(members(2), (0, 1))
    with pytest.raises(CommError, match=r"worker 2: is in the exchange of other values.*E-CALLS-DIFFER"):
        rows[0].section("members").read()


@pytest.mark.parametrize(("row", "code"), [(4, ""), (3, "E-JOIN-MISSED")])
def test_follower_does_not_need_rows_before_the_snapshot(hub: Site, row: int, code: str) -> None:
    """The server keeps rows 4 and 5. The follower requests them from row 0 on, and then receives the state before row `row`."""
    rows = served(hub)[1]
    for number in range(6):
        for rank in range(WORLD):
            rows[rank].section(LENGTHS).start(number, rank)
            rows[rank].send()
        for rank in range(WORLD):
            rows[rank].section(LENGTHS).read()
    link, nothing = SimpleNamespace(transport=hub[1][-1]), cast(Any, None)
    plan, job = Plan("", (), servers=1), Job(())
    follower = ResultFollower(cast(Any, link), job, plan, GivenState(matched=True, generation=GENERATION), nothing,
                              torch.device("cpu"), 20.0)
    stream = follower._rows
    assert stream is not None
    until(lambda: stream.has(5), "the last row has arrived")
    follower.check()
    follower.begin(0, row, [torch.zeros(1)], [None])
    if code:
        with pytest.raises(CommError) as caught:
            follower.check()
        assert find_error_code(str(caught.value)) == code
    else:
        follower.check()
        deadline = time.monotonic() + 20.0
        assert [follower._norms(deadline) for _ in range(2)] == [[[n, 0.0], [n, 1.0], [n, 2.0]] for n in (4.0, 5.0)]
    follower.stop()


def test_oversized_row_is_refused_and_named() -> None:
    core = Summation(0, GENERATION, {ROW_BUCKET: GatherOps(1)}, {ROW_BUCKET: (0,)})
    header = Header(Kind.PUSH, GENERATION, 0, ROW_BUCKET, codec=GATHER, sender=0)
    with pytest.raises(CorruptFrame, match="worker 0: .*a row has"):
        core.push(Message(0, header, memoryview(bytes(ROW_NBYTES + 1))), 0.0)


def test_row_is_not_aborted() -> None:
    """An aborted sum has the reason of one member as its result, which would replace the rows of all."""
    core = Summation(0, GENERATION, {ROW_BUCKET: GatherOps(1)}, {ROW_BUCKET: (0,)})
    header = Header(Kind.PUSH, GENERATION, 0, ROW_BUCKET, codec=GATHER, sender=0, flags=Flag.ABANDON)
    with pytest.raises(CorruptFrame) as error:
        core.push(Message(0, header, memoryview(b"\x90")), 0.0)
    assert (error.value.peer, error.value.code) == ("worker 0", "E-FRAME")


def test_missing_row_is_that_of_the_member_that_the_server_names(hub: Site) -> None:
    rows = ranks(hub, timeout_s=0.05)[0]
    section = rows.section("digests")
    section.start(1.0)
    rows.send()
    rows.transport.stalled = {ROW_BUCKET: (1, (2,))}  # of another row
    assert rows.transport.missing() == ()
    rows.transport.stalled = {ROW_BUCKET: (0, (1, 2))}
    assert rows.transport.missing() == ("worker 1", "worker 2")
    with pytest.raises(DeadlineExceeded) as error:
        section.read()
    assert error.value.peer == "worker 1, worker 2"
