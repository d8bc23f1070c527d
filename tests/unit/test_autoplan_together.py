"""Ranks that hear equal rows take equal collective actions, in the phases that state.py draws."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.autotuning import FIRST_PLANNING, START, Rank, basis_of, candidate, pick, plan_of, row

from commlayer.autotune.plan import state as state_module
from commlayer.autotune.plan.state import (
    COLLECTIVE,
    Action,
    ActivePlan,
    AwaitPlan,
    Events,
    Fact,
    Measure,
    MeasuringDone,
    PlanningDone,
    Probe,
    ProbeDone,
    Proposing,
    ReadReports,
    ReportDue,
    ReportsRead,
    ShareReport,
    SharesMoved,
    ShareStepTime,
    StartPlanning,
    StepDone,
    StepReport,
    StepTimes,
    Switch,
    SwitchDone,
    SwitchRefused,
    WaitDone,
)
from commlayer.planner.model import Link


def drawn() -> set[tuple[str, str]]:
    """The changes of rank 0's phase that state.py's table has."""
    rows = [line.split()[:2] for line in (state_module.__doc__ or "").splitlines() if line.startswith("    ")]
    names = {"Steady", "Planning", "Proposing", "Trying", "Settling"}
    pairs = {(a, b) for a, b in rows if b in names and a in {*names, "any"}}
    return pairs - {("any", "Planning")} | {(name, "Planning") for name in names}


DRAWN = drawn()


class Together:
    """Ranks in step: each is fed what its driver would feed it; what they do together is compared, then done for all."""

    def __init__(self, world: int, refuse: bool) -> None:
        self.ranks = [Rank(rank) for rank in range(world)]
        self.refuse = refuse
        self.rows: tuple[StepReport, ...] = ()
        self.done: list[type] = []
        self.seen: set[tuple[str, str]] = set()
        """Changes of rank 0's phase."""
        self.order: StartPlanning | None = None
        self.in_force = START

    def feed(self, facts: list[Fact]) -> None:
        """One of each rank."""
        before = self.phase
        did = [rank.feed(fact) for rank, fact in zip(self.ranks, facts, strict=True)]
        self.moved(before)
        for order in pick(did[0], StartPlanning):
            self.order = order
        assert not any(pick(each, StartPlanning) for each in did[1:])
        together = [[action for action in each if isinstance(action, COLLECTIVE)] for each in did]
        kinds = [[type(action) for action in each] for each in together]
        assert all(each == kinds[0] for each in kinds)
        for actions in zip(*together, strict=True):
            self.done.append(type(actions[0]))
            self.act(list(actions))

    @property
    def phase(self) -> str:
        lead = self.ranks[0].state.lead
        assert lead is not None
        return type(lead.phase).__name__

    def moved(self, before: str) -> None:
        """Rank 0's phase is another, or the same."""
        if self.phase != before:
            assert (before, self.phase) in DRAWN
            self.seen.add((before, self.phase))

    def all(self, fact: Fact) -> None:
        self.feed([fact] * len(self.ranks))

    def act(self, actions: list[Action]) -> None:
        """What all ranks do together, and what they hear of it."""
        first = actions[0]
        if isinstance(first, ShareStepTime):
            pace_s = sorted(self.seconds)[len(self.ranks) // 2]
            self.all(StepTimes(pace_s, pace_s))
        elif isinstance(first, Measure):
            self.all(MeasuringDone(self.links, 1.0))
        elif isinstance(first, ReadReports):
            rows, self.rows = self.rows, ()
            self.all(ReportsRead(rows))
            self.all(ReportDue())
        elif isinstance(first, ShareReport):
            told = [action for action in actions if isinstance(action, ShareReport)]
            self.rows = tuple(row(seconds, each.word, each.plan_s, bps=self.bps, share=0.9)
                              for each, seconds in zip(told, self.seconds, strict=True))
            if all(seconds > each.slow_s for seconds, each in zip(self.seconds, told, strict=True)):
                rows, self.rows = self.rows, ()
                self.all(ReportsRead(rows))
        elif isinstance(first, Probe):
            self.all(ProbeDone(self.links, 0.5, first.plan_s, first.step_s))
        elif isinstance(first, AwaitPlan):
            self.planned(self.found)
            lead = self.ranks[0].state.lead
            self.all(WaitDone(lead is not None and isinstance(lead.phase, Proposing)))
        elif isinstance(first, Switch):
            if first.candidate is None or self.refuse:
                self.all(SwitchRefused("for reasons"))
                return
            left, self.in_force = self.in_force, first.candidate.runnable
            self.all(SwitchDone(self.in_force, left))
            for rank in self.ranks:
                rank.in_force = ActivePlan(self.in_force, basis_of(self.in_force))

    def planned(self, found: float) -> None:
        """Rank 0's thread is done."""
        before = self.phase
        self.ranks[0].feed(Events(self.ranks[0].in_force, self.news(found)))
        self.moved(before)

    def news(self, found: float) -> tuple[PlanningDone, ...]:
        if self.order is None:
            return ()
        order, self.order = self.order, None
        plan = candidate(plan_of(found), plain=plan_of(1.2 * found, "identity()")) if found else None
        return (PlanningDone(order, plan, ""),)

    def step(self, seconds: list[float], bps: float, found: float | None, part: float, now: float) -> None:
        self.seconds, self.bps, self.found = seconds, bps, found or 0.0
        self.links = (Link(20 * bps + 1e6, 20 * bps + 1e6),) * len(self.ranks)
        for number, rank in enumerate(self.ranks):
            rank.now = now + number  # clocks differ
        shared: tuple[SharesMoved, ...] = (SharesMoved(part),) if part else ()
        self.feed([StepDone(rank.state.step + 1, s, Events(
                       rank.in_force, (*shared, *(self.news(found) if not i and found is not None else ()))))
                   for i, (rank, s) in enumerate(zip(self.ranks, seconds, strict=True))])


STEPS = st.lists(st.tuples(
    st.lists(st.sampled_from([0.3, 0.4, 0.5, 2.0]), min_size=3, max_size=3), st.sampled_from([0.0, 5e5, 5e6, 6e7]),
    st.sampled_from([None, None, 0.0, 0.2, 0.4, 2.0]), st.sampled_from([0.0, 0.0, 0.0, 0.5]), st.booleans(),
), min_size=FIRST_PLANNING + 12, max_size=60)


@settings(deadline=None, max_examples=40)
@given(STEPS, st.integers(1, 3), st.booleans())
def test_ranks_that_hear_equal_rows_act_together(
    steps: list[tuple[list[float], float, float | None, float, bool]], world: int, refuse: bool,
) -> None:
    ranks, now = Together(world, refuse), 0.0
    for seconds, bps, found, part, slow in steps:
        now += 20.0
        ranks.step([2.0] * world if slow else seconds[:world], bps, found, part, now)
    phases = {type(rank.state.phase) for rank in ranks.ranks}
    links = {rank.state.links.links if rank.state.links else () for rank in ranks.ranks}
    assert (len(phases), len(links)) == (1, 1)


def test_all_that_ranks_do_together_is_among_it() -> None:
    """Work moves, links become slow, and fast again."""
    ranks = Together(3, refuse=False)
    for number in range(140):
        slow = 100 < number < 120
        ranks.step([2.0 if slow else 0.4] * 3, 5e6 if slow else 6e7, 0.4, 0.5 * (number == 60), 20.0 * number)
    assert set(ranks.done) == set(COLLECTIVE)
    assert {("Planning", "Proposing"), ("Proposing", "Trying"), ("Trying", "Proposing"), ("Trying", "Steady")} <= ranks.seen


def test_the_table_of_phases_is_read() -> None:
    assert len(DRAWN) == 9 + 5
