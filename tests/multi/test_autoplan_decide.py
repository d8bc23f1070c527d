"""What all ranks decide alike, through `decide`: when they measure, what rows say of links, and that all act together."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs
from support.autotuning import FIRST_PLANNING, LINKS, START, Rank, candidate, pick, plan_of, planning, proposing, row, said

from commlayer.autotune.plan import policy as decide_module
from commlayer.autotune.plan.policy import LINKS_HOLD, MEASURED_STEPS, SOON_S, WAITED_STEPS, WARM_STEPS
from commlayer.autotune.plan.state import (
    Action,
    AwaitPlan,
    Events,
    LogLine,
    Measure,
    MeasuringDone,
    PaceSenders,
    PlanningDone,
    PlanRequest,
    Probe,
    ProbeDone,
    Proposing,
    ReadReports,
    RecordSteps,
    ReportDue,
    ResetWindow,
    ShareReport,
    ShareStepTime,
    StartPlanning,
    StepDone,
    StepTimes,
    Switch,
    WaitDone,
    Warming,
    Watching,
)
from commlayer.observe import Rates
from commlayer.observe.link_monitor import FACTOR, IN_A_ROW, LONGER, PAYLOAD, SETTLED
from commlayer.planner.model import Link

QUICK = (row(0.4, bps=6e7, share=0.1), row(0.4, bps=6e7, share=0.1))
SLOW_BPS, SLOW_S = 5e6, 1.0
PURE = {"policy", "state"}


def watching(rank: int = 0, rows: int = SETTLED) -> Rank:
    """A rank that knows the links and, by so many rows, what steps usually take."""
    made = Rank(rank)
    made.step(1.0, times=FIRST_PLANNING)
    for order in pick(made.feed(MeasuringDone(LINKS, 1.0)), StartPlanning):
        made.step(1.0, PlanningDone(order, None, "no reason"))
    for _ in range(rows):
        assert made.hear(*QUICK) == []
    return made


# ---- no thread, clock, torch or connection


def test_decisions_are_pure() -> None:
    folder = Path(decide_module.__file__).parent
    allowed = {"__future__", "collections", "enum", "itertools", "msgspec", "statistics", "typing", "commlayer"}
    for name in PURE:
        tree = ast.parse((folder / f"{name}.py").read_text("utf-8"))
        imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {each.split(".")[0] for each in imported} <= allowed, name
    look = "import sys, commlayer.autotune.plan.policy; print(sorted({'torch', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# ---- measuring


@pytest.mark.parametrize(("computing_s", "line"), [
    ((0.3, 0.32, 0.3, 0.6), "rank 3 computes 2.0 times as long as the fastest, and all wait for it: a Sampler with a "
                            "Controller would give it a smaller share of the batch"),
    ((0.3, 0.4, 0.35, 0.3), ""),
    ((0.0003, 0.0004, 0.0009, 0.0003), ""),  # ratios of so little say nothing
    ((), ""),
])
def test_what_no_plan_mends_is_said_with_what_would(computing_s: tuple[float, ...], line: str) -> None:
    made = Rank(1)
    made.step(1.0, times=FIRST_PLANNING)
    names = tuple(f"rank {n}" for n in range(len(computing_s)))
    lines = said(made.feed(MeasuringDone(LINKS, 1.0, computing_s, names)))
    assert [each for each in lines.split(" | ") if "computes" in each] == ([line] if line else [])


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_that_it_does_not_hear_of_are_none_of_those_that_it_waits_for(rank: int) -> None:
    made, did = Rank(rank), dict[int, list[Action]]()
    heard = [*range(101, 101 + WARM_STEPS + 1), *range(900, 900 + MEASURED_STEPS)]  # a warm-up, and a plan of somebody's
    for step in heard:
        if actions := made.feed(StepDone(step, 1.0, Events(made.in_force, ()))):
            did[step] = [*actions, *(made.feed(StepTimes(0.0, 0.0)) if actions == [ShareStepTime(1.0, 0.0)] else [])]
    assert did == {100 + WARM_STEPS: [ShareStepTime(1.0, 0.0), RecordSteps()], heard[-1]: [Measure()]}
    assert made.state.step == heard[-1]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_steps_warm_up_and_are_measured(rank: int) -> None:
    made = Rank(rank)
    did = {step: actions for step in range(1, FIRST_PLANNING + 1) if (actions := made.step())}
    assert did == {WARM_STEPS: [ShareStepTime(1.0, 0.0), RecordSteps()], WARM_STEPS + MEASURED_STEPS + 1: [Measure()]}
    actions = made.feed(MeasuringDone(LINKS, 1.0))
    assert actions[:2] == [PaceSenders(LINKS), ResetWindow()]
    assert said(actions) == "links carry 100/100 Mb/s up/down"
    assert pick(actions, StartPlanning) == ([StartPlanning(START, None, LINKS, 1.0)] if rank == 0 else [])
    assert made.step() == [ReadReports()]


@pytest.mark.parametrize(("step_s", "waited", "then"), [
    (SOON_S, 1.0, Measure()),
    (SOON_S, LINKS_HOLD, Measure()),
    (SOON_S, 0.99 * LINKS_HOLD, RecordSteps()),  # they compute, which no plan shortens
    (0.99 * SOON_S, 1.0, RecordSteps()),
])
def test_steps_that_links_hold_up_are_measured_soon_and_by_all(step_s: float, waited: float, then: Action) -> None:
    """What counts is what all have heard, whatever this rank's own step took."""
    made = Rank(1)
    made.told_s, made.told_waited, made.waited_s = step_s, waited, 0.03
    assert made.step(0.1, times=WARM_STEPS) == [ShareStepTime(0.1, 0.03), then]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_where_links_hold_steps_up_all_wait_for_the_first_plan_a_while(rank: int, keep: bool) -> None:
    made = Rank(rank, keep=keep)
    made.told_s = SOON_S
    assert made.step(SOON_S, times=WARM_STEPS)[-1] == Measure()
    waits = [] if keep else [AwaitPlan(WAITED_STEPS * SOON_S)]
    assert pick(made.feed(MeasuringDone(LINKS, SOON_S)), AwaitPlan) == waits


def test_nobody_waits_for_the_plan_where_all_first_steps_were_measured() -> None:
    made = Rank(1)
    assert made.step(SOON_S, times=FIRST_PLANNING) == [Measure()]
    assert pick(made.feed(MeasuringDone(LINKS, SOON_S)), AwaitPlan) == []


def test_who_keeps_the_plan_hears_nothing() -> None:
    made, order = planning(keep=True)
    assert made.step(1.0, PlanningDone(order, candidate(plan_of(0.1))))
    assert not any(pick(made.step(), ReadReports) for _ in range(50))


@pytest.mark.parametrize("rank", [0, 1])
def test_measuring_again_begins_with_the_next_step(rank: int) -> None:
    made = watching(rank)
    assert made.hear(row(word=PlanRequest.MEASURE), row()) == []
    assert isinstance(made.state.phase, Warming)
    assert made.feed(ReportDue()) == [], "rows that are told now would be read behind steps that are measured"
    did = [action for _ in range(MEASURED_STEPS + 2) for action in made.step()]
    assert did == [RecordSteps(), Measure()]
    made.feed(MeasuringDone(LINKS, 1.0))
    assert isinstance(made.state.phase, Watching)


# ---- rows


def test_a_step_is_slow_by_what_is_usual() -> None:
    made = Rank(1)
    made.step(times=FIRST_PLANNING)
    made.feed(MeasuringDone(LINKS, 1.0))
    for _ in range(SETTLED):
        assert made.feed(ReportDue()) == [ShareReport(PlanRequest.NOTHING, 0.0, float("inf"))]
        made.hear(*QUICK)
    assert made.feed(ReportDue()) == [ShareReport(PlanRequest.NOTHING, 0.0, LONGER * 0.4)]


def test_rank_0_tells_how_long_it_takes_to_plan() -> None:
    made = proposing(candidate(plan_of(0.5), took_s=0.7))
    (tell,) = made.feed(ReportDue())
    assert (tell.word, tell.plan_s) == (PlanRequest.SWITCH, 0.7)


@pytest.mark.parametrize("rank", [0, 1])
def test_words_of_rank_0_are_for_all(rank: int) -> None:
    made = watching(rank)
    assert made.hear() == []
    assert made.hear(row(word=PlanRequest.SWITCH), row()) == [Switch(None)]
    assert made.hear(row(0.3, word=PlanRequest.PROBE, plan_s=0.2), row(0.5)) == [Probe(0.2, 0.4)]
    assert made.hear(row(), row(word=PlanRequest.PROBE)) == [], "others' words count for nothing"


# ---- links


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("plan_s", "waits"), [(0.0, False), (0.5, True), (SLOW_S - 1e-9, True), (SLOW_S, False)])
def test_slower_links_are_planned_for_and_all_wait_where_planning_is_quick(rank: int, plan_s: float, waits: bool) -> None:
    made = watching(rank)
    made.now = 100.0
    slow = [row(SLOW_S, plan_s=plan_s, bps=SLOW_BPS, share=0.9) for _ in range(2)]
    for _ in range(IN_A_ROW - 1):
        assert made.hear(*slow) == []
    actions = made.hear(*slow)
    found = (Link(PAYLOAD * SLOW_BPS, PAYLOAD * SLOW_BPS, 0.01), Link(PAYLOAD * SLOW_BPS, PAYLOAD * SLOW_BPS, 0.02))
    expected = [PaceSenders, ResetWindow, *([StartPlanning] if rank == 0 else []), *([AwaitPlan] if waits else [])]
    assert [type(each) for each in actions[1:]] == expected
    assert said(actions) == ("links have changed from 100/100 Mb/s up/down to 4.75/4.75 Mb/s up/down, as seen in steps of "
                             "1000.0 ms that took 400.0 ms before")
    assert pick(actions, PaceSenders) == [PaceSenders(found)]
    assert [order.step_s for order in pick(actions, StartPlanning)] == [SLOW_S] * (rank == 0)
    assert made.state.links.best == (Rates(1e8, 1e8),) * 2
    assert made.state.links.reprobe.since_s == 100.0
    assert made.hear(*slow) == [], "that is known"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("rows", "meanwhile", "seen"), [(SETTLED, False, True), (1, False, True), (0, False, False),
                                                         (SETTLED, True, False)])
def test_what_was_usual_under_a_plan_is_usual_again_where_all_go_back_to_it(
    rank: int, rows: int, meanwhile: bool, seen: bool,
) -> None:
    """Links may have become slower while another was tried."""
    made = watching(rank, rows)
    first = made.in_force.plan
    for plan in (plan_of(0.3, "int8()"), first):
        if rank == 0:
            phase = Proposing(candidate(plan), back=plan == first)
            made.state = structs.replace(made.state, lead=structs.replace(made.state.lead, phase=phase))
        made.switched(plan)
        if meanwhile and plan != first:  # what is planned for is another since
            made.feed(ProbeDone((Link(4e8, 4e8), LINKS[1]), 0.5, 0.0, 0.4))
    slow = [row(SLOW_S, bps=SLOW_BPS, share=0.9) for _ in range(2)]
    actions = [action for _ in range(IN_A_ROW) for action in made.hear(*slow)]
    assert bool(pick(actions, PaceSenders)) is seen


def test_all_go_over_where_rank_0_has_found_a_plan() -> None:
    for rank in (Rank(0), Rank(1)):
        assert rank.feed(WaitDone(found=False)) == []
        assert rank.feed(WaitDone(found=True)) == [Switch(None)]
    found = candidate(plan_of(0.5))
    assert proposing(found).feed(WaitDone(found=True)) == [Switch(found)]


def test_the_first_rank_of_a_node_tells_what_its_link_carried() -> None:
    made = Rank(1, per_node=2)
    made.step(times=FIRST_PLANNING)
    made.feed(MeasuringDone(LINKS, 1.0))
    silent = row(0.4)
    for _ in range(4):
        made.hear(QUICK[0], silent, QUICK[1], silent)
    slow = row(2.0, bps=SLOW_BPS, share=0.9)
    for _ in range(IN_A_ROW):
        actions = made.hear(slow, row(2.0, waited_s=1.0), row(2.0, bps=6e7, share=0.02, waited_s=1.8), row(2.0, waited_s=1.8))
    (pace,) = pick(actions, PaceSenders)
    assert [link.up_bps for link in pace.links] == [PAYLOAD * SLOW_BPS, 1e8]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("up_bps", "faster"), [(FACTOR * 1e8, False), (FACTOR * 1e8 + 1, True), (1e6, False)])
def test_a_probe_counts_where_a_link_is_faster(rank: int, up_bps: float, faster: bool) -> None:
    made = watching(rank)
    actions = made.feed(ProbeDone((Link(up_bps, 1e6), LINKS[1]), 0.5, 0.2, 0.4))
    if not faster:
        assert [type(each) for each in actions[1:]] == [ResetWindow]
        assert made.state.links.watch.planned == (Rates(1e8, 1e8),) * 2
        assert made.state.links.reprobe.cost_s == 0.5
    else:
        planning = [StartPlanning] if rank == 0 else []
        assert [type(each) for each in actions[1:]] == [PaceSenders, ResetWindow, *planning, AwaitPlan]
        # A short probe may find a link slower than it is; steps tell whether it has become slower.
        assert made.state.links.watch.planned == made.state.links.best == (Rates(up_bps, 1e8), Rates(1e8, 1e8))


@pytest.mark.parametrize("waited_s", [0.3, 1.8])
def test_a_rank_that_holds_the_others_up_does_not_wait_itself(waited_s: float) -> None:
    """Theirs is the time, its link may be busy with whatever it does, and it is no slower."""
    made = watching(1)
    busy, waits = row(2.0, bps=SLOW_BPS, share=0.9, waited_s=waited_s), row(2.0, bps=SLOW_BPS, share=0.9, waited_s=1.8)
    actions = [action for _ in range(IN_A_ROW) for action in made.hear(busy, waits)]
    assert bool(pick(actions, PaceSenders)) is (waited_s == 1.8)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_steps_show_of_faster_links_is_known_without_a_probe_and_planned_for_when_it_is_time(rank: int) -> None:
    made = watching(rank)
    made.step(0.4)
    more, schedule = row(0.4, bps=1.3e8 / PAYLOAD, share=0.2), made.state.links.reprobe
    actions = [action for _ in range(SETTLED) for action in made.hear(more, more)]
    links = tuple(Link(1e8, pytest.approx(1.3e8), link.alpha_s) for link in LINKS)
    assert actions == [LogLine("links carry 100/130 Mb/s up/down, as seen in steps, and not 100/100 Mb/s up/down"),
                       PaceSenders(links), ResetWindow()]
    assert made.state.links.reprobe == schedule, "they may be faster still"
    made.step(0.4, times=20)
    assert not pick(made.step(0.4), StartPlanning), "it is not so much more"
    more = row(0.4, bps=1.6e8 / PAYLOAD, share=0.2)
    for _ in range(2 * SETTLED):
        assert not pick(made.hear(more, more), AwaitPlan), "nobody waits"
    orders = pick(made.step(0.4), StartPlanning)
    assert [order.links[0].down_bps for order in orders] == [pytest.approx(1.6e8)] * (rank == 0)


def test_under_another_plan_what_is_usual_is_forgotten() -> None:
    made = watching(1)
    assert made.state.links.watch.seen
    actions = made.switched(plan_of(0.5))
    assert actions[0] == ResetWindow()
    assert said(actions).startswith("went over to plan ")
    assert made.state.links.watch.seen == ()
    assert made.state.links.watch.planned == (Rates(1e8, 1e8),) * 2


def test_a_plan_that_fits_some_rank_ill_changes_nothing() -> None:
    made = watching(1)
    before = made.state
    assert said(made.refused("for 3 servers")) == "kept the plan in force: for 3 servers"
    assert made.state == before
