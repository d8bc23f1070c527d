"""The plan that nobody asked for: measures the first steps, plans on rank 0, goes over to it, and again when it is stale.

All ranks count steps alike, so what they do together (probes, the exchange of what they measured, the word whether there is a
plan) happens at steps that each knows by itself. Planning runs on a thread of rank 0 beside the training; where a step has
become so slow that planning takes less, all wait for it. A change of the links needs no new measuring: the costs known before
are planned with again, at the rates that transfers were seen to go at.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from statistics import median

import torch

from commlayer.errors import CommError
from commlayer.job.autoplan.link_probes import Measured, gathered, homes_of, links_of, meter_of, pace, probed
from commlayer.job.autoplan.replan import Replan, Replanner, ReplanVerdict, cluster_of
from commlayer.job.start import Connection, switch
from commlayer.job.step_reports import StepReport, StepReports
from commlayer.measure import collective_costs
from commlayer.measure.recorded_times import timing_of
from commlayer.observe import LinkWatch, PredictionCheck, Rates, ReprobeSchedule, differ, spelled
from commlayer.planner.model.cluster import Cluster, Link
from commlayer.records import Job, Plan, digest
from commlayer.runtime.worker import Worker

log = logging.getLogger("commlayer")

WARM_STEPS = 2
"""They find thresholds, buffers and the forward order: their times are no model of later ones."""
MEASURED_STEPS = 5
PROBE_S = 2.0
"""Of all probes together."""
WORTH = 0.05
"""A plan must shorten the step by this fraction to replace another: it is made from measurements that err."""
SHARES_WORTH = 0.1
"""The same for a change of shares: of the step's computing."""
GROUPS_SHARE = 0.2
"""Of the probes' time, for collectives."""
PROBE_AGAIN_S = 1.2
"""Of all probes of a link that may have become faster."""
TRIED = 5
"""Steps under a new plan that tell what came of it, after one that warms up."""
WORSE = 0.1
"""If they take longer than before by this fraction, all go back."""
PLAIN = 0.5
"""If a plan without compression would be longer by no more than this fraction, by prices that err as much, it is tried."""

NOTHING, SWITCH, MEASURE, PROBE = 0, 1, 2, 3


def auto_of(connection: Connection) -> AutoPlan | None:
    """For a job whose plan was left to commlayer and which has a network to plan for: one of several nodes."""
    worker, groups = connection.worker, connection.groups
    single = groups is None or groups.world == groups.ranks_per_node
    if not connection.auto or worker is None or groups is None or single or not worker.plan.servers:
        return None
    return AutoPlan(connection, worker.job)


class AutoPlan:
    """`after_step` is called by every rank after each step."""

    def __init__(self, connection: Connection, job: Job, *, probe_s: float = PROBE_S, keep: bool = False) -> None:
        """`keep`: looks for plans and changes none."""
        self._connection, self._job, self._probe_s, self._keep = connection, job, probe_s, keep
        self._steps = 0
        self._measure_from = WARM_STEPS
        self._finder = Replanner(connection)
        self._found: Replan | None = None
        """On rank 0: what all are to go over to."""
        self._before: Replan | None = None
        """On rank 0, while a plan is on trial: what all left for it."""
        self._mine: tuple[Plan, Plan] | None = None
        """The plan that this put in force, and the same as the planner has it."""
        self._result: tuple[Plan, float, Replan | None, str] | None = None
        """What the planning thread leaves: the plan then in force, seconds of a step, what it found or why nothing."""
        self._moved = False
        """Shares have changed since work was last measured."""
        self._thread: threading.Thread | None = None
        self._grouped = collective_costs.Grouped(collective_costs.NONE, collective_costs.NONE)
        self._drift: PredictionCheck | None = None
        self._stale = False
        self._ended = 0.0
        self._recent: list[float] = []
        self._looks: StepReports | None = None
        self._timed = job
        """With what the first steps measured."""
        self._measured: list[Measured] = []
        self._nodes: list[Link] = []
        """The links that the plan in force is for, the same on all ranks."""
        self._links: LinkWatch | None = None
        self._best: list[Rates] = []
        """That were ever known."""
        self._plan_s = 0.0
        self._again = ReprobeSchedule()
        self._trial: list[float] | None = None
        """Seconds of the first steps since planning was over; what they say of it follows."""
        self._kept = False
        self._before_s, self._worse = 0.0, WORSE
        self._late = 1.0  # so many times as long as predicted steps took under the last plan that was tried
        self._plain: Replan | None = None
        """On rank 0: without compression, to be tried when the pace of what was found is known."""
        self.verdicts: list[ReplanVerdict] = []
        """On rank 0. See `settle`."""
        connection.on_shares.append(self.shares_changed)

    def after_step(self) -> None:
        """CommError, latched in the worker, if another rank is gone."""
        worker = self._connection.worker
        assert worker is not None
        if not (self._connection.auto or self._keep):
            return  # somebody has asked for a plan since
        try:
            self._after_step(worker)
        except CommError as error:
            worker.latch(error)
            worker.check()

    def _after_step(self, worker: Worker) -> None:
        self._steps += 1
        self._take_result()
        self._watch()
        if self._steps == self._measure_from:
            worker.recorder.switch(on=True)
        elif self._steps == self._measure_from + MEASURED_STEPS + 1:
            self._begin_planning(worker)
        elif self._looks is not None and not self._measuring:
            self._look(worker)
        self._ended = time.perf_counter()

    def shares_changed(self, part: float) -> None:
        """Work moves between the ranks with the next step, on all of them: where it matters, measures and plans anew."""
        if part >= SHARES_WORTH:
            self._moved = self._connection.rank == 0

    def settle(self, deadline_s: float) -> list[ReplanVerdict]:
        """What planning has found, when it is over or that time is."""
        if self._thread is not None:
            self._thread.join(deadline_s)
        self._take_result()
        return self.verdicts

    # ---- measuring

    def _watch(self) -> None:
        """How long steps take now, against what was predicted."""
        if not self._ended:
            return
        step_s = time.perf_counter() - self._ended
        if self._looks is not None:
            self._looks.step(step_s)
        self._recent = [*self._recent[-2:], step_s]
        if self._trial is not None:
            self._trial.append(step_s)
            if len(self._trial) > TRIED:
                self._came_of_it(median(self._trial[1:]))
        if self._drift is not None and (stale := self._drift.observe(median(self._recent), self._steps)):
            self._stale = True
            self._connection.events.append(stale)
            self._say(stale.reason)

    def _came_of_it(self, step_s: float) -> None:
        self._trial = None
        plan = self._connection.plan
        assert plan is not None
        if self._kept:
            self._drift = PredictionCheck(step_s, usual=True)
            self._try_plain(step_s)
            return
        worse = self._before is not None and step_s > (1 + self._worse) * self._before_s
        self._say(f"under plan {digest(plan)} steps take {1e3 * step_s:.1f} ms: {1e3 * plan.step_s:.1f} ms were predicted, "
                  f"{1e3 * self._before_s:.1f} ms were taken before{': back to that' if worse else ''}")
        if worse:
            self._found, self._drift, self._kept = self._before, None, True
        else:
            if self._worse == 0.0:  # tried for its pace, whatever was predicted
                self._drift = PredictionCheck(step_s, usual=True)
            self._try_plain(step_s)
        self._before, self._late = None, max(1.0, step_s / plan.step_s) if plan.step_s else 1.0

    def _try_plain(self, step_s: float) -> None:
        """What prices cannot tell apart, a few steps can."""
        plain, self._plain, basis = self._plain, None, self._connection.basis
        if plain is not None and basis is not None and plain.plan.step_s <= (1 + PLAIN) * step_s:
            self._say(f"tries the plan without compression, {1e3 * plain.plan.step_s:.1f} ms by the same prices")
            self._found = plain._replace(present=basis.plan, present_price=self._connection.price or plain.present_price)
            self._kept, self._before_s, self._worse = False, step_s, 0.0

    def _begin_planning(self, worker: Worker) -> None:
        """All ranks: probe links, tell each other; rank 0 goes on alone."""
        made = self._connection
        steps = worker.recorder.steps
        worker.recorder.switch(on=False)
        timing = timing_of(steps, len(self._job.tensors), worker.places)
        assert made.groups is not None
        self._grouped = collective_costs.measure(made.groups, GROUPS_SHARE * self._probe_s)
        self._timed = Job(self._job.tensors, self._job.batch, timing, self._job.name)
        step_s = median(s.marks["end"] for s in steps)
        row = Measured(timing.forward_s + timing.backward_s, step_s, *probed(made, (1 - GROUPS_SHARE) * self._probe_s))
        self._measured = gathered(made, row)
        self._finder.measured(steps, median(row.step_s for row in self._measured))
        self._say(f"links carry {spelled(self._plan_for(links_of(made, self._measured)))}")
        if made.rank == 0:
            self._start_planning(worker.plan)
        if self._looks is None and not self._keep:
            self._begin_looks()

    def _begin_looks(self) -> None:
        groups = self._connection.groups
        assert groups is not None
        self._looks = StepReports(groups.members, groups.timeout_s, meter_of(self._connection))
        self._connection.beside.append(self._looks.close)

    # ---- links that change

    def _look(self, worker: Worker) -> None:
        """All ranks: hear what all have seen, act upon it alike, and tell."""
        assert self._looks is not None
        self._act(worker, self._looks.heard())
        assert self._links is not None
        if self._looks.due and not self._measuring:
            self._act(worker, self._looks.tell(self._word(), self._plan_s, self._links.slow))

    @property
    def _measuring(self) -> bool:
        return self._steps <= self._measure_from + MEASURED_STEPS

    def _word(self) -> int:
        """What rank 0 wants of all."""
        if self._connection.rank != 0 or (self._thread is not None and self._thread.is_alive()):
            return NOTHING
        if self._found is not None:
            return SWITCH
        if self._stale or self._moved:
            self._stale, self._moved, self._drift = False, False, None
            return MEASURE
        assert self._links is not None
        lost = differ(self._best, self._links.planned)
        return PROBE if self._again.due(time.monotonic(), hinted=self._links.faster, lost=lost) else NOTHING

    def _act(self, worker: Worker, rows: list[StepReport]) -> None:
        if not rows:
            return
        groups, links = self._connection.groups, self._links
        assert groups is not None
        assert links is not None
        step_s = median(row.step_s for row in rows)
        if rows[0].word == SWITCH:
            self._switch()
        elif rows[0].word == MEASURE:
            self._measure_from = self._steps + 1
        elif rows[0].word == PROBE:
            self._probe_again(worker, rows[0].plan_s, step_s)
        elif found := links.observe(step_s, [row.carried for row in rows[:: groups.ranks_per_node]]):
            self._say(f"links have changed from {spelled(links.planned)} to {spelled(found)}, as seen in steps of "
                      f"{1e3 * step_s:.1f} ms that took {1e3 * links.usual_s:.1f} ms before")
            self._plan_anew(worker, found, rows[0].plan_s, step_s)

    def _probe_again(self, worker: Worker, plan_s: float, step_s: float) -> None:
        """A link carries little under a plan for a slow one, so nothing else tells that it is faster by now."""
        assert self._links is not None
        begin, made = time.monotonic(), self._connection
        up_bps, down_bps, _ = probed(made, PROBE_AGAIN_S)
        self._measured = gathered(made, self._measured[made.rank]._replace(up_bps=up_bps, down_bps=down_bps))
        cost_s = time.monotonic() - begin
        planned = self._links.planned
        rates = tuple(  # whether a link is slower is told by steps: a short probe may be
            Rates(max(link.up_bps, old.up_bps), max(link.down_bps, old.down_bps))
            for link, old in zip(links_of(made, self._measured), planned, strict=True)
        )
        faster = differ(rates, planned)
        self._again.probed(time.monotonic(), cost_s, found=faster)
        self._say(f"probed the links in {1e3 * cost_s:.0f} ms: " + (
            f"{spelled(rates)} instead of {spelled(planned)}" if faster else f"no faster than {spelled(planned)}"))
        if faster:
            self._plan_anew(worker, rates, plan_s, step_s)
        elif self._looks is not None:
            self._looks.afresh()  # a probe's bytes are no step's

    def _plan_anew(self, worker: Worker, rates: Sequence[Rates], plan_s: float, step_s: float) -> None:
        """All ranks: with what is known, for other rates. They wait for it where that takes less than a step."""
        groups = self._connection.groups
        assert groups is not None
        self._plan_for([Link(r.up_bps, r.down_bps, old.alpha_s) for r, old in zip(rates, self._nodes, strict=True)])
        wait = 0.0 < plan_s < step_s
        if self._connection.rank == 0:
            self._start_planning(worker.plan, step_s)
            if wait and self._thread is not None:
                self._thread.join()
                self._take_result()
        if wait:
            found = torch.tensor([self._found is not None], dtype=torch.int64, device=groups.device)
            groups.broadcast_all(found).wait(time.monotonic() + groups.timeout_s)
            if found:
                self._switch()

    def _plan_for(self, nodes: list[Link]) -> list[Rates]:
        """From now on these links are what is planned for. Their rates."""
        self._nodes = nodes
        rates = [Rates(link.up_bps, link.down_bps) for link in nodes]
        pace(self._connection, nodes)
        if self._links is None:
            self._links = LinkWatch(rates)
        self._links.planned = tuple(rates)
        self._best = [Rates(*map(max, zip(*both, strict=True))) for both in zip(self._best or rates, rates, strict=True)]
        self._again.changed(time.monotonic())
        if self._looks is not None:
            self._looks.afresh()
        return rates

    # ---- planning, on rank 0

    def _start_planning(self, current: Plan, step_s: float = 0.0) -> None:
        """`step_s`: what a step takes now, if it is not what was measured first."""
        if self._thread is not None:
            self._thread.join()
        self._found = self._result = self._drift = self._trial = None
        self._stale = False
        measured_s = step_s or median(row.step_s for row in self._measured)
        assert self._connection.worker is not None
        cuda = self._connection.worker.device.type == "cuda"
        cluster = cluster_of(self._nodes, self._measured, self._grouped, homes_of(self._connection), cuda=cuda)
        self._thread = threading.Thread(
            target=self._plan, args=(current, cluster, measured_s), name="commlayer-planner", daemon=True
        )
        self._thread.start()

    def _plan(self, current: Plan, cluster: Cluster, measured_s: float) -> None:
        """On a thread of its own, so it only leaves its result."""
        known = self._mine[1] if self._mine is not None and self._mine[0] is current else None
        found, why = None, ""
        try:
            found = self._finder.find(current, known, self._timed, cluster, self._grouped)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        self._result = current, measured_s, found, why

    def _take_result(self) -> None:
        """On the training's thread, between two steps."""
        if self._result is None:
            return
        (current, measured_s, found, why), self._result = self._result, None
        if found is None:
            self._say(f"no plan: {why}")
            self._kept, self._trial = True, []
            return
        if self._connection.plan is not current:
            self._say("found a plan, but meanwhile somebody has changed the one in force")
            self._stale = True
            return
        self._plan_s, self._worse, self._plain = found.took_s, WORSE, None if self._keep else found.without
        self._connection.price = found.present_price
        self.verdicts.append(ReplanVerdict(measured_s, found.alone_s, found.plan.step_s))
        said = (f"a plan of {len(found.plan.buckets)} buckets for {1e3 * found.plan.step_s:.1f} ms a step; the one in force "
                f"takes {1e3 * measured_s:.1f} ms, {1e3 * found.present_s:.1f} ms by the same prices")
        least_s = found.plan.step_s * self._late
        if least_s > (1.0 - WORTH) * found.present_s or self._keep:
            self._kept, self._trial = True, []
            self._connection.basis = found.basis._replace(plan=found.present)
            self._say(f"kept the plan in force: found {said}")
            return
        self._say(f"found {said}")
        self._kept, self._before_s, self._found = False, measured_s, found

    # ---- changing over

    def _switch(self) -> None:
        """All ranks, to what rank 0 has found."""
        found, self._found = self._found, None
        left, back = self._connection.plan, self._kept
        assert left is not None
        try:
            switch(self._connection, found.answer if found else None)
        except ValueError as error:  # on all ranks, and nothing has changed
            self._say(f"kept the plan in force: {error}")
            self._kept, self._trial = True, [] if found is not None else None
            return
        assert self._connection.plan is not None
        if found is not None:
            self._connection.basis, self._connection.price = found.basis, found.price
            self._before = None if back else found._replace(
                basis=found.basis._replace(plan=found.present), answer=left, price=found.present_price)
            self._drift = None if back else PredictionCheck(found.plan.step_s)
        self._recent.clear()
        assert self._looks is not None
        self._looks.afresh()
        self._links = LinkWatch([Rates(link.up_bps, link.down_bps) for link in self._nodes])
        self._mine = (self._connection.plan, found.plan) if found else None
        self._trial = [] if found is not None else None
        self._say(f"went {'back' if back else 'over'} to plan {digest(self._connection.plan)}")

    def _say(self, what: str) -> None:
        self._connection.decisions.append(f"step {self._steps}: {what}")
        if self._connection.rank == 0:
            log.info("step %d: %s", self._steps, what)
