"""Starts the controller of a job, and starts another one when the members have changed."""

from __future__ import annotations

from commlayer.autotune.controller import TuningController
from commlayer.autotune.job_actions import JobActions
from commlayer.autotune.measure.probes import own_uplink
from commlayer.autotune.quality.guard import make_quality_guard
from commlayer.autotune.report import Reports
from commlayer.cluster.calls.home_traffic import HOME
from commlayer.config import Config
from commlayer.engine.components import Component, ComponentOrder
from commlayer.engine.job.job import DistributedJob

OWN_PROBE_S = 0.5
"""Seconds in which a home whose plan is not automatic measures its uplink, for a cap."""


class Tuning(Component):
    """Automatic tuning of one job."""

    order = ComponentOrder.CONTROLLER

    def __init__(self, context: DistributedJob, config: Config) -> None:
        self._context, self._config = context, config
        # A rank that has joined starts with the others, when its first step has ended.
        self._controller = None if context.fresh else _start_controller(context, config)
        if context.fresh and HOME.is_capped:  # until then it knows its link from its last run
            last = context.terms.last_runs.load(context.groups.sites)
            HOME.follow(last.link.up_bps if last else 0.0, len(context.groups.site))

    def reporting(self) -> TuningController:
        """Returns the job's controller; if there is none, creates one that only exchanges reports. Collective."""
        if self._controller is None:
            context = self._context
            self._controller = TuningController(
                context, JobActions(context), Reports(context.rows.section("measured times")), plans=False)
            context.components.add(self._controller)
        return self._controller

    def new_members(self) -> None:
        if self._controller is not None:
            self._controller.end()
            self._context.components.remove(self._controller)
        self._controller = _start_controller(self._context, self._config)


def start_tuning(context: DistributedJob, config: Config) -> None:
    context.components.add(Tuning(context, config))


def _start_controller(context: DistributedJob, config: Config) -> TuningController | None:
    """Starts the controller of a job of several nodes whose plan commlayer chooses, or whose codecs a quality guard checks;
    returns None for other jobs."""
    plans = context.terms.auto and len(context.groups.sites) > 1 and bool(context.worker.plan.servers)
    if HOME.is_capped and not plans:  # else the controller measures the link
        workers = len(context.groups.site)  # all of which probe at once
        HOME.follow(workers * own_uplink(context, OWN_PROBE_S) if HOME.needs_link else 0.0, workers)
    guard = make_quality_guard(context, config)
    if not plans and guard is None:
        return None
    if plans and context.norms_differ and context.matched and context.terms.requested.exact is False:
        context.log_decision("sites have unlike numbers of ranks and the averages of local steps are scaled to a norm, so "
                             "every step is averaged; pass sync=LocalSteps(..., outer=OuterSGD()) for local steps")
    actions, reports = JobActions(context), Reports(context.rows.section("measured times"))
    if plans:
        reports.meter = actions.start_traffic_meter()
    controller = TuningController(context, actions, reports, guard, plans=plans)
    controller.start()
    context.components.add(controller)
    return controller


def reporting(context: DistributedJob) -> TuningController:
    """See Tuning.reporting."""
    (tuning,) = context.components.of(Tuning)
    return tuning.reporting()
