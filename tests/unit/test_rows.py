"""The row of a step over a server: what all ranks read, in which order, and what they report."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.loopback import Hub
from support.summation import hub_of_a_test  # noqa: F401  (a fixture)

from commlayer.cluster.processes.rows import StepRows
from commlayer.cluster.servers.gather import GATHER, ROW_BUCKET, ROW_NBYTES, GatherOps
from commlayer.cluster.servers.served_rows import ServedRows
from commlayer.cluster.servers.summation import Summation
from commlayer.cluster.servers.summation_server import SumServer
from commlayer.errors import CommError, CorruptFrame, DeadlineExceeded, code_of
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, Message

WORLD, GENERATION = 3, 1
Site = tuple[Hub, list[Any]]


def ranks(hub: Site, timeout_s: float = 20.0) -> list[StepRows]:
    """The rows of all ranks, over a server."""
    members = SimpleNamespace(ranks=range(WORLD))
    core = Summation(0, GENERATION, {ROW_BUCKET: GatherOps(WORLD)}, {ROW_BUCKET: tuple(range(WORLD))})
    ends = hub[0].mesh([SERVER_BASE, *range(WORLD)])
    hub[1].extend((SumServer(core, ends[0], range(WORLD), stall_s=60.0), *ends[1:]))
    result = [StepRows(ServedRows(end, rank, timeout_s), members) for rank, end in enumerate(ends[1:])]  # type: ignore[arg-type]
    for rows in result:
        rows.begin(GENERATION)
    return result


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
        assert code_of(str(error.value)) == "E-CALLS-DIFFER"
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


def test_rows_of_another_number_of_ranks_are_refused(hub: Site) -> None:
    rows = ranks(hub)
    for each in rows:
        each.section("times").start(1.0)
        each.send()
    rows[0].regroup(SimpleNamespace(ranks=range(2)))  # type: ignore[arg-type]
    rows[0].section("times").start(1.0)
    for each in rows[1:]:
        each.section("times").start(1.0)
        each.send()
    with pytest.raises(CorruptFrame, match="server 0: sends rows of 3 ranks, expected 2"):
        rows[0].section("times").read()


def test_oversized_row_is_refused_and_named() -> None:
    core = Summation(0, GENERATION, {ROW_BUCKET: GatherOps(1)}, {ROW_BUCKET: (0,)})
    header = Header(Kind.PUSH, GENERATION, 0, ROW_BUCKET, codec=GATHER, sender=0)
    with pytest.raises(CorruptFrame, match="worker 0: .*a row has"):
        core.push(Message(0, header, memoryview(bytes(ROW_NBYTES + 1))), 0.0)
