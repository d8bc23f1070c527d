"""Creates the controller of a job that starts, or whose members have changed."""

from __future__ import annotations

from commlayer.autotune.controller import TuningController
from commlayer.autotune.guard import guard_of
from commlayer.autotune.job_actions import JobActions
from commlayer.autotune.report import Reports
from commlayer.config import Config
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.observers.observers import Observer, ObserverOrder, Observers


def controller_of(connection: DistributedJob, config: Config) -> TuningController | None:
    """Returns the controller of a job of several nodes whose plan commlayer chooses, or whose codecs a quality guard checks;
    otherwise None."""
    worker, groups = connection.worker, connection.groups
    plans = connection.terms.auto and groups.world > groups.ranks_per_node and bool(worker.plan.servers)
    guard = guard_of(connection, config)
    if not plans and guard is None:
        return None
    actions, reports = JobActions(connection), Reports(connection.rows.rows())
    if plans:
        reports.meter = actions.count_traffic()
    controller = TuningController(connection, actions, reports, guard, plans=plans, per_node=groups.ranks_per_node)
    controller.start()
    return controller


def observe(observers: Observers, controller: TuningController) -> None:
    observers.add(Observer(
        ObserverOrder.CONTROLLER, controller, controller.after_step, before_commit=controller.compare,
        looks=controller.has_work, after_exchange=controller.after_exchange, after_drain=controller.after_drain))


def reporting(connection: DistributedJob, observers: Observers) -> TuningController:
    """Returns the job's controller; if there is none, creates one that only exchanges reports. Collective."""
    for controller in observers.at(ObserverOrder.CONTROLLER):
        assert isinstance(controller, TuningController)
        return controller
    controller = TuningController(connection, JobActions(connection), Reports(connection.rows.rows()), plans=False)
    observe(observers, controller)
    return controller
