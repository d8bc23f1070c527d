"""The controller on all ranks, run in threads with fabricated links, times and searches.

A barrier stands for each collective: a rank that calls something else fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.autotuning import FIRST_PLANNING, LINKS, START, candidate, local, plan_of

from commlayer.autotune import controller as controller_module
from commlayer.autotune.controller import TuningController
from commlayer.autotune.link_policy import LINKS_HOLD, SOON_S
from commlayer.autotune.planning.candidate import Candidate
from commlayer.autotune.report import Reports
from commlayer.autotune.state import MEASURED_STEPS, WARM_STEPS, Measured, Phase, SearchRequest
from commlayer.engine.job.plan_terms import PlanTerms
from commlayer.engine.job.run_events import RunEvents
from commlayer.errors import InvalidInput
from commlayer.observe.interface_counters import Direction, Throughput
from commlayer.observe.link_monitor import FACTOR, IN_A_ROW, PAYLOAD, SETTLED, Rates
from commlayer.observe.prediction_check import StalePlan
from commlayer.planner.model import Link
from commlayer.records import Plan

FAST_BPS, SLOW_BPS = 6e7, 5e6
BARRIER_S = 20.0


class World:
    """Shared state of the ranks: a barrier that checks that all call the same, and the fabricated cluster."""

    def __init__(self, world: int, nodes: int = 0) -> None:
        self.world, self.refuses = world, False
        self.links = tuple(LINKS[node % 2] for node in range(nodes or world))
        self.computing_s: tuple[float, ...] = ()
        self.uncapped: tuple[Link, ...] = ()
        self.search_result: Callable[[SearchRequest], Candidate | None] = lambda _: None
        self.opens: Plan | None = None
        self.done: list[str] = []
        self._barrier = threading.Barrier(world)
        self._calls: dict[int, tuple[str, Any]] = {}

    def meet(self, rank: int, what: str, value: Any) -> list[Any]:
        """All ranks' values, in rank order."""
        self._calls[rank] = what, value
        self._barrier.wait(BARRIER_S)
        calls = dict(self._calls)
        if rank == 0:
            self.done.append(what)
        self._barrier.wait(BARRIER_S)
        assert {name for name, _ in calls.values()} == {what}, calls
        return [calls[each][1] for each in range(self.world)]


class Job:
    """One rank's connection, its rows, and its actions."""

    def __init__(self, world: World, rank: int, **options: Any) -> None:
        self.world, self.rank, self.plan, self.generation = world, rank, START, 1
        self.local: Any = None
        self.worker = SimpleNamespace(step=0, plan=START, withdrawn=False, unsent_nbytes=0)
        self.members = SimpleNamespace(catching_up=False)
        self.terms, self.exchanges, self.passed_s = PlanTerms(), 0, 0.0
        self.terms.auto = True
        self.on_close: list[Any] = []
        self.events: list[StalePlan] = []
        self.lines: list[str] = []
        self.reasons: list[str] = []
        self.stream, self.groups = RunEvents(), SimpleNamespace(local=0, node=rank, first_ranks=range(world.world))
        self.paced: list[tuple[Link, ...]] = []
        self.recording = False
        self.remembered: list[Plan] = []
        self.measured: list[list[float]] = []
        """The step times from which it was measured."""
        self.bps, self.share, self.allowed = FAST_BPS, 0.1, 0.0
        self.thread = threading.current_thread()
        self._row: list[float] | None = None
        reports = Reports(self)  # type: ignore[arg-type]
        reports.meter = self  # type: ignore[assignment]
        self.controller = TuningController(self, self, reports, **options)  # type: ignore[arg-type]
        self.controller.start()

    def log_decision(self, text: str, level: int = 20) -> None:
        self.lines.append(text)

    def called(self, rank: int) -> str:
        return f"rank {rank}"

    def note_plan(self, reason: str) -> None:
        self.reasons.append(reason)

    def step(self, step_s: float = 0.4, waited_s: float = 0.04, times: int = 1) -> None:
        for _ in range(times):
            self.exchanges += 1
            self.controller.record_step_time(step_s, waited_s)

    # the exchange of rows, and the meter

    def start(self, *row: float) -> None:
        self._row = list(row)

    @property
    def under_way(self) -> bool:
        return self._row is not None

    def read(self) -> list[list[float]]:
        row, self._row = self._row, None
        return self.world.meet(self.rank, "rows", row)

    def look(self) -> Throughput:
        return Throughput(Direction(self.bps, self.share), Direction(self.bps, self.share))

    # actions

    def pace(self, links: Sequence[Link]) -> None:
        self.paced.append(tuple(links))

    def allowed_bps(self) -> float:
        return self.allowed

    def record(self, *, on: bool) -> None:
        self.recording = on

    def share_times(self, step_s: float, waited_s: float) -> tuple[float, float]:
        times = self.world.meet(self.rank, "times", (step_s, waited_s))
        return sorted(each for each, _ in times)[len(times) // 2], min(waited for _, waited in times)

    def measure(self, steps_s: Sequence[float]) -> Measured:
        self.world.meet(self.rank, "measure", None)
        self.measured.append(list(steps_s))
        names = tuple(f"rank {n}" for n in range(len(self.world.computing_s)))
        return Measured(self.world.links, 0.4, self.world.computing_s, names, uncapped=self.world.uncapped)

    def probe(self, planned: Sequence[Rates]) -> tuple[Link, ...]:
        self.world.meet(self.rank, "probe", None)
        return self.world.links

    def remember(self, links: Sequence[Link]) -> None:
        self.remembered.append(self.plan)

    def node_names(self) -> list[str]:
        return ["ann", "ben"]

    def result_of_rank_0(self, act: Callable[[], bool]) -> bool:
        try:
            result: Any = act()
        except Exception as error:
            result = error
        results = self.world.meet(self.rank, "await", result)
        if isinstance(result, Exception):
            raise result
        if any(isinstance(each, Exception) for each in results):
            raise InvalidInput("E-OTHER-RANK", "another rank failed")
        return bool(results[0])

    def switch(self, plan: Plan | None, *, by_itself: bool) -> None:
        offered = self.world.meet(self.rank, "switch", plan)[0]
        if self.world.refuses or offered is None:
            raise InvalidInput("E-PLAN-SWITCH", "for reasons")
        self.plan = offered

    def opening(self) -> Plan | None:
        return self.world.opens

    def prepare_search(self) -> None:
        """No process."""

    def limits(self) -> None:
        """Runs the script's optimizer and restores the random state of all threads."""
        assert self.rank == 0
        assert threading.current_thread() is self.thread

    def search(self, order: SearchRequest, limits: None) -> Candidate:
        result = self.world.search_result(order)
        if result is None:
            raise RuntimeError("nothing")
        return result._replace(current=order.known or order.current)

    def stop_search(self) -> None:
        """Searches end immediately."""

    close = stop_search


def together(world: World, script: Callable[[Job], None], **options: Any) -> list[Job]:
    """Runs the script on all ranks, each in its thread."""
    def rank(number: int) -> Job:
        job = Job(world, number, **options)
        script(job)
        return job

    with ThreadPoolExecutor(world.world) as threads:
        return list(threads.map(rank, range(world.world)))


def warm(job: Job, *, rows: int = SETTLED) -> None:
    """All have the links and usual step times."""
    job.step(times=FIRST_PLANNING)
    job.controller.settle(5.0)
    job.step(times=rows + 1)


def lines(jobs: list[Job], word: str) -> list[str]:
    """The line with this word, which all ranks have."""
    results = [[line for line in job.lines if word in line] for job in jobs]
    assert all(each == results[0] for each in results)
    return results[0]


def test_first_steps_are_warmup_and_then_measured() -> None:
    world, phases = World(2), []

    def script(job: Job) -> None:
        for _ in range(FIRST_PLANNING):
            job.step()
            phases.extend([job.controller.state.phase] if job.rank == 0 else [])

    jobs = together(world, script)
    assert phases == [Phase.WARMING] * (WARM_STEPS - 1) + [Phase.MEASURING] * (MEASURED_STEPS + 1) + [Phase.WATCHING]
    assert world.done == ["times", "measure"]
    assert [job.paced for job in jobs] == [[LINKS]] * 2
    assert lines(jobs, "links carry") == ["links carry 100/100 Mb/s up/down"]


@pytest.mark.parametrize(("allowed", "again"), [(1.2e6, False), (1.6e6, True)])
def test_all_ranks_measure_again_when_a_cap_has_changed(allowed: float, again: bool) -> None:
    world = World(2)
    world.search_result = lambda _: candidate(plan_of(0.5))

    def script(job: Job) -> None:
        job.allowed = 1e6 * job.rank
        job.step(times=FIRST_PLANNING)
        job.controller.settle(20.0)
        job.step(times=20)
        job.allowed = allowed * job.rank
        job.step(times=20)

    together(world, script)
    assert world.done.count("measure") == 1 + again


@pytest.mark.parametrize(("uncapped", "plan"), [((), START), (LINKS, plan_of(0.5))])
def test_all_ranks_wait_for_the_first_plan_under_a_cap(uncapped: tuple[Link, ...], plan: Plan) -> None:
    world = World(2)
    world.search_result, world.uncapped = lambda _: candidate(plan_of(0.5)), uncapped
    jobs = together(world, lambda job: job.step(times=FIRST_PLANNING))
    assert {job.plan for job in jobs} == {plan}


@pytest.mark.parametrize(("step_s", "waited", "soon"), [
    (SOON_S, 1.0, True), (SOON_S, LINKS_HOLD, True), (SOON_S, 0.99 * LINKS_HOLD, False), (0.99 * SOON_S, 1.0, False),
])
def test_link_bound_steps_are_measured_early_and_all_ranks_wait_for_the_plan(step_s: float, waited: float, soon: bool) -> None:
    world = World(3)
    world.search_result = lambda _: candidate(plan_of(0.5))

    def script(job: Job) -> None:
        slow_s = (step_s, 2 * step_s, 0.1)[job.rank]  # the median counts, and the shortest wait
        job.step(slow_s, waited * step_s if job.rank == 1 else 9.0, times=WARM_STEPS)

    jobs = together(world, script)
    assert world.done == (["times", "measure", "await", "switch"] if soon else ["times"])
    assert {job.plan for job in jobs} == {plan_of(0.5) if soon else START}
    if soon:
        assert world.done[-1] == "switch"


@pytest.mark.parametrize("refuses", [False, True])
def test_over_slow_links_training_begins_with_local_steps_and_waits_for_no_plan(refuses: bool) -> None:
    world = World(2)
    world.opens, world.refuses = local(0.0), refuses

    def script(job: Job) -> None:
        job.step(SOON_S, SOON_S, times=WARM_STEPS)

    jobs = together(world, script)
    assert {job.plan for job in jobs} == {START if refuses else world.opens}
    assert {job.controller.state.plan for job in jobs} == {job.plan for job in jobs}
    assert world.done == ["switch", *(["times", "measure", "await"] if refuses else ["measure"])]
    assert jobs[0].reasons == ([] if refuses else ["automatic"])


@pytest.mark.parametrize(("computing_s", "line"), [
    ((0.3, 0.32, 0.3, 0.6), "rank 3 computes 2.0 times as long as the fastest"), ((0.3, 0.4, 0.35, 0.3), ""),
    ((0.0003, 0.0004, 0.0009, 0.0003), ""), ((), ""),
])
def test_slow_rank_is_reported_on_all_ranks(computing_s: tuple[float, ...], line: str) -> None:
    world = World(2)
    world.computing_s = computing_s
    result = lines(together(world, lambda job: job.step(times=FIRST_PLANNING)), "computes")
    assert [line in each for each in result] == ([True] if line else [])


@pytest.mark.parametrize(("bps", "plans"), [(5e6, True), (1e8, False)])
def test_links_are_probed_after_an_exchange_was_withdrawn(bps: float, plans: bool) -> None:
    """All ranks wait for a plan if a link is slower. `bps`: what the probe finds on the second link."""
    world = World(2)

    def script(job: Job) -> None:
        warm(job)
        if job.rank == 0:
            world.links, world.search_result = (LINKS[0], Link(bps, 1e8)), lambda _: candidate(plan_of(0.5))
        world.meet(job.rank, "collapse", None)
        job.worker.withdrawn = True
        job.step(5.0, 4.0)
        job.worker.withdrawn = False

    jobs = together(world, script)
    after = [what for what in world.done[world.done.index("collapse") + 1 :] if what not in ("rows", "times")]
    assert after == ["probe", "await", *["switch"] * plans]
    assert {job.plan for job in jobs} == {plan_of(0.5) if plans else START}
    for job in jobs:
        assert job.controller.state.links is not None
        assert job.controller.state.links.watch.planned[1] == Rates(bps, 1e8)


@pytest.mark.parametrize("refuses", [False, True])
def test_all_ranks_switch_after_the_same_step_and_roll_back(refuses: bool) -> None:
    world = World(2)
    world.refuses = refuses
    world.search_result = lambda order: candidate(plan_of(0.1))

    def script(job: Job) -> None:
        warm(job, rows=4)
        assert job.plan == (START if refuses else plan_of(0.1))
        job.step(0.8, times=12)  # slower than before
        assert job.plan == START

    jobs = together(world, script)
    if refuses:
        assert lines(jobs, "kept the current plan")[0].startswith("kept the current plan: ")
    else:
        assert sum("switched " in line for line in jobs[1].lines) == 2
        assert jobs[0].reasons == ["automatic", "rollback"]


def test_no_search_outlives_the_session() -> None:
    """A thread in a codec's native code would crash the process at interpreter exit."""
    world, ended = World(1), threading.Event()

    def search(_: SearchRequest) -> None:
        ended.wait(5.0)

    world.search_result = search

    def script(job: Job) -> None:
        job.step(times=FIRST_PLANNING)
        job.stop_search = job.close = ended.set  # type: ignore[method-assign]
        for close in job.on_close:
            close()
        assert not [thread for thread in threading.enumerate() if thread.name == "commlayer-planner"]

    together(world, script)


@pytest.mark.parametrize("step_s", [0.7, 2.0])
def test_all_ranks_replan_for_slower_links_and_wait_if_steps_are_link_bound(step_s: float) -> None:
    world, slow = World(2), PAYLOAD * SLOW_BPS

    def script(job: Job) -> None:
        warm(job)
        job.bps, job.share = SLOW_BPS, 0.9
        job.step(step_s, 0.9 * step_s, times=IN_A_ROW + 2)

    jobs = together(world, script)
    assert len(lines(jobs, "links have changed from 100/100 Mb/s up/down to 4.75/100")) == 1
    assert [job.paced[-1] for job in jobs] == [tuple(Link(slow, 1e8, link.alpha_s) for link in LINKS)] * 2
    assert ("await" in world.done) is (step_s > SOON_S)
    assert jobs[0].controller.state.links.best == (Rates(1e8, 1e8),) * 2


@pytest.mark.parametrize(("up_bps", "faster"), [(FACTOR * 1e8, False), (FACTOR * 1e8 + 1, True), (1e6, False)])
def test_probe_has_an_effect_only_if_a_link_is_faster(up_bps: float, faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(controller_module, "time", SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now))
    world = World(2)

    def script(job: Job) -> None:
        warm(job)
        job.step(times=10)
        world.links = (Link(up_bps, 1e6), LINKS[1])
        clock.now = 1e6
        job.step(0.4, 0.3, times=SETTLED + 12)

    jobs = together(world, script)
    assert "probe" in world.done
    for job in jobs:
        links = job.controller.state.links
        assert links.watch.planned == ((Rates(up_bps, 1e8), Rates(1e8, 1e8)) if faster else (Rates(1e8, 1e8),) * 2)
    assert lines(jobs, "probed")[0].endswith("100/100 Mb/s up/down")


STEPS = st.lists(st.tuples(
    st.lists(st.sampled_from([0.3, 0.4, 0.5, 2.0]), min_size=3, max_size=3), st.booleans(),
    st.sampled_from([5e5, 5e6, 6e7]), st.sampled_from([0.0, 0.0, 0.0, 0.5]),
), min_size=FIRST_PLANNING + 12, max_size=60)


@settings(deadline=None, max_examples=25)
@given(STEPS, st.lists(st.sampled_from([0.0, 0.2, 0.4, 2.0]), min_size=1), st.integers(1, 3), st.booleans())
def test_ranks_with_equal_rows_act_together(
    steps: list[tuple[list[float], bool, float, float]], result: list[float], size: int, refuses: bool,
) -> None:
    """A rank that acts alone breaks the barrier."""
    world, results = World(size), iter(result * 100)
    world.refuses = refuses

    def search(_: SearchRequest) -> Candidate | None:
        step_s = next(results)
        return candidate(plan_of(step_s), plain=plan_of(1.2 * step_s, "identity()")) if step_s else None

    world.search_result = search

    def script(job: Job) -> None:
        for seconds, slow, bps, part in steps:
            job.bps, job.share = bps, 0.9
            if part:
                job.controller.shares_moved(part)
            job.step(2.0 if slow else seconds[job.rank], 1.5 if slow else 0.1)
        if job.under_way:  # another rank may already wait for the rows of the last step
            job.read()

    jobs = together(world, script)
    assert len({(job.controller.state.phase, job.plan) for job in jobs}) == 1
    assert all(job.paced == jobs[0].paced for job in jobs)
