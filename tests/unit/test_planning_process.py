"""Plans are searched in a process of their own: the same plans, errors as they are, and an end with whoever started it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from msgspec import structs
from support.autotuning import JOB, plan_of

from commlayer.autotune.planning_process import PlanningProcess
from commlayer.autotune.search import NEARLY, SearchOrder, search, sped_up, step_s
from commlayer.errors import InvalidInput, InvalidState
from commlayer.planner.inputs import cluster_from_line
from commlayer.planner.model import Cluster, PlanInputs, Policy
from commlayer.planner.tables import profile_from_tables

CLUSTER = cluster_from_line("2xrtx3060@20/20Mb")
CURRENT = plan_of(0.0, "int4()")


def order(measured_s: float = 1.0) -> SearchOrder:
    inputs = PlanInputs(JOB, CLUSTER, profile_from_tables(CLUSTER), Policy(optimizer="adam", exact=True))
    return SearchOrder(CURRENT, None, (0, 1), inputs, measured_s)


@pytest.fixture
def process() -> Iterator[PlanningProcess]:
    planning_process = PlanningProcess()
    yield planning_process
    planning_process.close()


def test_what_it_finds_is_what_is_found_here(process: PlanningProcess) -> None:
    for measured_s in (0.5, 2.0):
        result, local = process.search(order(measured_s)), search(order(measured_s))
        assert result.candidate == local.candidate
        assert result.contention == local.contention


def test_an_error_there_is_the_error_here_and_the_next_search_goes_on(process: PlanningProcess) -> None:
    wrong = order()._replace(inputs=structs.replace(order().inputs, policy=Policy(max_local_steps=-1)))
    with pytest.raises(InvalidInput, match=r"max_local_steps is -1\b.*E-PLAN-INPUT"):
        process.search(wrong)
    assert process.search(order()).candidate.plan.buckets


def test_a_killed_process_is_named_and_another_takes_its_place(process: PlanningProcess) -> None:
    process.start()
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"exit code -9\b.*E-PLANNER-ENDED"):
        process.search(order())
    assert process.search(order()).candidate.plan.buckets


def test_closing_ends_a_search_under_way(process: PlanningProcess) -> None:
    lines: list[InvalidState] = []

    def searching() -> None:
        try:
            process.search(order())
        except InvalidState as error:
            lines.append(error)

    process.start()
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGSTOP)  # it never answers
    thread = threading.Thread(target=searching)
    thread.start()
    time.sleep(0.1)
    process.close()
    thread.join(10.0)
    assert not thread.is_alive()
    (error,) = lines
    assert error.code == "E-PLANNER-ENDED"
    assert "exit code -9" in error.what


def test_links_are_at_least_as_fast_as_the_measured_step_needs() -> None:
    alone = profile_from_tables(CLUSTER)
    copy = structs.replace(CURRENT, hosts=(0,))

    def seconds(cluster: Cluster) -> float:
        return step_s(copy, PlanInputs(JOB, cluster, alone, Policy()))

    true_s = seconds(CLUSTER)
    slow = structs.replace(CLUSTER, nodes=tuple(
        structs.replace(node, link=structs.replace(node.link, up_bps=node.link.up_bps / 1.4)) for node in CLUSTER.nodes))
    assert seconds(slow) > true_s * (1 + NEARLY)
    result = sped_up(slow, seconds, true_s)
    assert seconds(result) == pytest.approx(true_s, rel=0.1)
    assert [node.link.down_bps for node in result.nodes] == [node.link.down_bps for node in slow.nodes]
    assert sped_up(CLUSTER, seconds, 2 * true_s) == CLUSTER, "what is slower than the links is not explained by them"
    assert sped_up(slow, seconds, 1e-6) == slow, "no rate does"
