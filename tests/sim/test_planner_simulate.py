"""The simulation: hand-made steps whose times can be checked by eye, and the native loop against its Python twin."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle.fifo import TimedTask as Task
from oracle.schedule import PortableSchedule
from support.schedules import Load, Pace, chain, flatten, one_node, random_problem

from commlayer.native import core
from commlayer.planner.problem import Problem
from commlayer.planner.simulation import native_schedule

LOOPS = [PortableSchedule, *([core.Schedule] if core else [])]


def load(*tasks: Task, urgency: float = 0.0, stale: bool = False) -> Load:
    return Load((tasks,), urgency, stale)


def times(problem: Problem) -> tuple[float, list[tuple[float, float]]]:
    step_s, starts, ends = native_schedule(problem).trace([0] * problem.buckets)
    return step_s, list(zip(starts, ends, strict=True))


def test_chain_begins_when_its_gradient_is_ready() -> None:
    problem = flatten([load(*chain(("cpu:a", 1.0), ("up:a", 2.0)))], one_node((1.0,), 2.0))
    assert times(problem) == (4.0, [(1.0, 2.0), (2.0, 4.0)])


def test_lane_runs_one_task_at_a_time() -> None:
    problem = flatten([load(*chain(("up:a", 2.0))), load(*chain(("up:a", 2.0)))], one_node((0.0, 1.0), 1.0))
    assert times(problem) == (4.0, [(0.0, 2.0), (2.0, 4.0)])


@pytest.mark.parametrize(("priority", "expected"), [(True, [(2.0, 3.0), (3.0, 4.0)]), (False, [(3.0, 4.0), (2.0, 3.0)])])
def test_waiting_tasks_run_by_urgency_or_by_readiness(priority: bool, expected: list[tuple[float, float]]) -> None:
    """Instances stand by urgency: the blocker, then the one that is ready last, then the one that is ready first."""
    loads = [
        load(*chain(("up:a", 2.0)), urgency=0), load(*chain(("up:a", 1.0)), urgency=2), load(*chain(("up:a", 1.0)), urgency=1),
    ]
    _, spans = times(flatten(loads, one_node((0.0, 0.5, 1.0), 1.0), priority=priority))
    assert spans == [(0.0, 2.0), *expected]


def test_codec_on_the_gpu_delays_later_gradients() -> None:
    loads = [load(*chain(("compute:a", 0.5))), load(*chain(("up:a", 1.0)))]
    assert times(flatten(loads, one_node((1.0, 2.0), 3.0))) == (3.5, [(1.0, 1.5), (2.5, 3.5)])


ENDS = (Pace("a", (0.0, 0.0), 0.0), Pace("b", (0.0, 0.0), 0.0))


def push(*lanes: tuple[str, float], latency_s: float = 0.0) -> tuple[Task]:
    return (Task(lanes, latency_s=latency_s, op="net.push"),)


def test_transfer_ends_with_its_slowest_lane() -> None:
    """The receiver's fast down-link serves it by the way; latency comes behind both."""
    loads = [load(*push(("up:a", 2.0), ("down:b", 0.5), latency_s=0.1)), load(*push(("up:a", 1.0), ("down:b", 1.0)), urgency=1)]
    step_s, spans = times(flatten(loads, ENDS))
    assert spans == [(0.0, 2.1), (2.0, 3.0)], "latency does not hold the connection"
    assert step_s == 3.0


def test_connections_share_a_link() -> None:
    """Both are on a's up-link: the short one is through at 2 s having had 1 s of it, then the long one is alone."""
    loads = [load(*push(("up:a", 1.0), ("down:b", 1.0))), load(*push(("up:a", 2.0), ("down:c", 2.0)), urgency=1)]
    assert times(flatten(loads, ENDS))[1] == [(0.0, 2.0), (0.0, 3.0)]


def test_upload_and_download_are_separate_connections() -> None:
    """Of one connection the more urgent bucket goes first; a result going the same way has a connection of its own."""
    pull = (Task((("up:a", 1.0), ("down:b", 1.0)), op="net.pull"),)
    loads = [load(*push(("up:a", 1.0), ("down:b", 1.0)), urgency=i) for i in (1, 0)] + [load(*pull, urgency=2)]
    paces = tuple(Pace(name, (0.0,) * 3, 0.0) for name in "ab")
    assert times(flatten(loads, paces))[1] == [(0.0, 2.0), (2.0, 3.0), (0.0, 2.0)]


def test_task_of_one_node_waits_only_for_that_node() -> None:
    loads = [load(*chain(("up:a", 1.0))), load(Task((("up:a", 1.0), ("up:b", 1.0))), urgency=1)]
    _, spans = times(flatten(loads, (Pace("a", (0.0, 0.0), 0.0), Pace("b", (5.0, 5.0), 5.0))))
    assert spans == [(0.0, 1.0), (5.0, 6.0)]


def test_stale_bucket_is_due_at_the_end_of_the_next_step() -> None:
    """Computing takes 2 s and the transfer 2 s, ready at 2 s: in step it costs 4 s a step, a step late 2 s."""
    transfer = chain(("up:a", 2.0))
    assert times(flatten([load(*transfer)], one_node((2.0,), 2.0)))[0] == 4.0
    assert times(flatten([load(*transfer, stale=True)], one_node((2.0,), 2.0)))[0] == 2.0


def test_transfers_that_lengthen_every_other_step_are_priced_by_the_mean() -> None:
    """Steps take 6 s and 16 s alternately."""
    loads = [load(*chain(("up:a", 2.0), ("down:a", 6.0)), urgency=1, stale=True), load(*chain(("down:a", 4.0)), urgency=3),
             load(*chain(("up:a", 1.0)), urgency=3)]
    problem = flatten(loads, one_node((2.0, 2.0, 3.0), 4.0))
    for loop in LOOPS:
        assert loop(problem).run([0] * problem.buckets) == 11.0


def choice_of(problem: Problem, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(problem.bucket_options[b + 1] - problem.bucket_options[b]) for b in range(problem.buckets)]


def no_shorter_than(problem: Problem, choice: list[int]) -> list[tuple[str, float]]:
    """What a step takes at least, by what: its computing, each lane's work, each bucket's longest chain."""
    p, busy, bounds = problem, [0.0] * len(problem.lanes), []
    ready = [p.ready[n * (p.buckets + 1) : (n + 1) * (p.buckets + 1)] for n in range(p.nodes)]
    for b, chosen in enumerate(choice):
        option = p.bucket_options[b] + chosen
        tasks = range(p.option_tasks[option], p.option_tasks[option + 1])
        begins = [max((ready[n][b] for n in p.gate[p.task_gates[k] : p.task_gates[k + 1]]), default=0.0) for k in tasks]
        for i, k in enumerate(tasks):
            seconds = p.seconds[p.task_seconds[k] : p.task_seconds[k + 1]]
            line = p.task_line[k]
            lanes = p.line_lane[p.line_lanes[line] : p.line_lanes[line + 1]] if line >= 0 else []
            for lane, s in zip(lanes, seconds, strict=True):
                busy[lane] += s
            end = begins[i] + max(seconds, default=0.0) + p.latency[k]
            bounds.append((f"bucket {b} task {i}", end))
            for after in p.next[p.task_next[k] : p.task_next[k + 1]]:
                begins[after] = max(begins[after], end)
    bounds += [(f"lane {name}", s) for name, s in zip(p.lanes, busy, strict=True)]
    return [*bounds, *((f"node {n}", each[-1]) for n, each in enumerate(ready))]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_step_is_at_least_its_busiest_lane_and_its_longest_chain(seed: int) -> None:
    problem = random_problem(seed)
    problem = problem._replace(stale=0 * problem.stale, steps=1)
    choice = choice_of(problem, seed)
    step_s = native_schedule(problem).run(choice)
    for what, least_s in no_shorter_than(problem, choice):
        assert step_s >= least_s * (1 - 1e-9) + problem.tail, what


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.25, 2.0, 1024.0]))
def test_times_scale_exactly_and_simulations_are_independent(seed: int, factor: float) -> None:
    """Powers of two change no rounding, so times change by them to the bit; what ran before changes nothing."""
    problem = random_problem(seed)
    choice, other = choice_of(problem, seed), choice_of(problem, seed + 1)
    schedule = native_schedule(problem)
    step_s, starts, ends = schedule.trace(choice)
    schedule.run(other)
    schedule.sweep(other, [0], step_s)
    assert str(schedule.trace(choice)) == str((step_s, starts, ends))
    scaled = problem._replace(tail=problem.tail * factor, ready=problem.ready * factor,
                              seconds=problem.seconds * factor, latency=problem.latency * factor)
    longer_s, starts_too, ends_too = native_schedule(scaled).trace(choice)
    assert longer_s == step_s * factor
    assert str([*starts_too, *ends_too]) == str([t * factor for t in (*starts, *ends)])


@pytest.mark.parametrize("loop", LOOPS)
def test_cyclic_tasks_are_refused(loop: type) -> None:
    circle = (Task((("up:a", 1.0),), (1,)), Task((("up:a", 1.0),), (0,)))
    with pytest.raises(ValueError, match="in a circle"):
        loop(flatten([load(*circle)], one_node((0.0,), 0.0))).run([0])


@pytest.mark.skipif(core is None, reason="without a compiler there is no native loop")
@settings(max_examples=150, deadline=None)
@example(367)  # a step of no seconds, which a limit of none is not above
@example(41643)  # a step of exactly the limit, which is above it once rounded
@given(st.integers(0, 10**6))
def test_native_loop_equals_the_portable_one_bit_for_bit(seed: int) -> None:
    problem = random_problem(seed)
    rng = random.Random(seed)
    choice = choice_of(problem, seed)
    native, twin = core.Schedule(problem), PortableSchedule(problem)
    ours, theirs = native.trace(choice), twin.trace(choice)
    assert ours[0] == theirs[0] == native.run(choice)
    for mine, other in ((ours[1], theirs[1]), (ours[2], theirs[2])):
        assert [None if math.isnan(t) else t for t in mine] == [None if math.isnan(t) else t for t in other]
    limit = ours[0] * rng.choice((0.5, 1.0, 2.0))
    swept = native.sweep(choice, [0], limit, rng.choice((math.nan, ours[0])))
    for mine, other in zip(swept, twin.sweep(choice, [0], limit), strict=True):
        assert mine == other or (mine == math.inf and other > limit * (1 - 1e-8))
    assert native.run(choice, limit) == ours[0] or limit < ours[0] * (1 + 1e-8)


@pytest.mark.skipif(core is None, reason="without a compiler there is no native loop")
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_sweep_returns_the_shortest_requested_options(seed: int, late: bool) -> None:
    """The shortest few among some options, by times multiplied by factors, right to the bit."""
    problem = random_problem(seed)
    if not late:
        problem = problem._replace(stale=0 * problem.stale, steps=1)
    rng, choice = random.Random(seed), choice_of(problem, seed)
    native, everything = core.Schedule(problem), PortableSchedule(problem).sweep(choice, [0], math.inf)
    only = sorted(rng.sample(range(len(everything)), rng.randint(1, len(everything))))
    factors = [rng.choice((1.0, rng.uniform(0.5, 3.0))) for _ in everything]
    prices = [step_s * factor for step_s, factor in zip(everything, factors, strict=True)]
    among = sorted(prices[o] for o in only)
    for most in (1, 2):
        result = native.sweep(choice, [0], math.inf, math.nan, most, only, factors)
        assert sorted(a * b for a, b in zip(result, factors, strict=True))[: min(most, len(only))] == among[:most]
        assert all(s == everything[o] if o in only else s == math.inf for o, s in enumerate(result) if s < math.inf)
    limit = sorted(prices)[len(prices) // 2]
    limited = native.sweep(choice, [0], limit, math.nan, 0, None, factors)
    assert all(limited[o] == everything[o] for o, price in enumerate(prices) if price < limit * (1 - 1e-8))


@pytest.mark.skipif(core is None, reason="without a compiler there is no native loop")
@pytest.mark.parametrize(
    ("field", "value"),
    [("line_lane", [99]), ("gate", [-1]), ("order", [1]), ("bucket_options", [0, 2]), ("most_tasks", 0), ("seconds", [-1.0]),
     ("ready", [math.nan, 0.0]), ("next", [5]), ("stale", []), ("task_seconds", [0, 3]),
     ("task_line", [7]), ("lane_shared", []), ("line_lanes", [0])],
)
def test_arrays_that_do_not_fit_are_refused(field: str, value: object) -> None:
    problem = flatten([load(*chain(("up:a", 1.0)))], one_node((0.0,), 0.0))
    if field == "next":
        problem = problem._replace(task_next=np.array([0, 1], np.int32))
    if isinstance(value, list):
        value = np.array(value, getattr(problem, field).dtype)
    with pytest.raises(ValueError, match="schedule: "):
        core.Schedule(problem._replace(**{field: value}))


@pytest.mark.skipif(core is None, reason="without a compiler there is no native loop")
def test_choices_that_do_not_exist_are_refused() -> None:
    schedule = core.Schedule(flatten([load(*chain(("up:a", 1.0)))], one_node((0.0,), 0.0)))
    for choice in ([1], [], [-1]):
        with pytest.raises(ValueError, match="choice does not fit"):
            schedule.run(choice)
    for buckets in ([1], [], [0, 0]):
        with pytest.raises(ValueError, match="buckets does not fit"):
            schedule.sweep([0], buckets, 1.0)
