"""Makes the plan of `estimate` and `plan create` from their arguments, and the parts of their reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from commlayer.balance import LinearTime, loss_model, shares
from commlayer.cli import arguments
from commlayer.cli.output import Notes, Part
from commlayer.cli.plan import report
from commlayer.errors import InvalidInput, append_code
from commlayer.plan_file import PlanFileInputs
from commlayer.planner.baselines import Baseline, Gains, baselines, gains, noise_range, one_machine, planned_rows, verdict
from commlayer.planner.data.tables import LearningTable, gpus, learning_rows, with_job_speeds
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.memory import with_micro_batches
from commlayer.planner.model import Cluster, Policy, Profile
from commlayer.planner.search.plan_search import PlanSearch
from commlayer.planner.simulation import simulate
from commlayer.planner.tensors import uncompressed_notices
from commlayer.records import Job, Plan

UNEVEN = 1.2
"""From this ratio of speeds on, `estimate` gives the workers unequal shares of the batch."""


class PlannedJob(NamedTuple):
    """A plan with its inputs."""

    inputs: PlanFileInputs
    shared: Cluster
    """The machines with the speeds at which they compute their shares of the batch; `inputs.cluster` if shares are equal."""
    shares: tuple[int, ...]
    """Each worker's samples; empty if all have the same number."""
    policy: Policy
    plan: Plan
    synchronous: Plan | None
    """The best synchronous plan; None if `plan` is synchronous."""
    unfit: report.Unfit | None
    """Why the training does not fit into a machine's memory. None: the training fits."""
    assumptions: tuple[str, ...]

    def alternatives(self) -> tuple[tuple[Baseline, ...], Gains]:
        """The plan and its alternatives, and the gains over one machine alone. If the noise scale is unknown, the alternatives
        are those of a small one."""
        low, high = noise_range(checked_inputs(self.inputs.job, self.inputs.cluster, *self.inputs.costs()))
        rows = baselines(self.plan, low, self.synchronous)
        most = [*planned_rows(self.plan, high, self.synchronous), *one_machine(high)] if high is not low else ()
        return rows, gains(rows, most)

    def headline(self, gain: Gains) -> str:
        if self.unfit is None:
            return verdict(gain)
        return append_code("E-PLAN-MEMORY", f"DOES NOT FIT: {self.unfit.why}: {self.unfit.remedy}")

    def parts(self, rows: tuple[Baseline, ...], names: Mapping[str, str], steps: int = 0, *, table: LearningTable | None,
              buckets: bool, verbose: bool = False) -> Iterator[Part]:
        """The alternatives, the plan and the assumptions. `names`: what to call an alternative; `steps`: length of the
        training, 0 if unknown."""
        job, cluster, (costs, limits), known = self.inputs.job, self.inputs.cluster, self.inputs.costs(), self.plan.steps > 0
        timeline = simulate(self.plan, job, self.shared, costs, limits)
        yield from report.alternatives(rows, known, names, steps)
        if known and buckets:
            yield report.factor_error(table, self.policy.optimizer, job)
        yield report.title(self.plan, job, cluster)
        yield report.summary(self.plan, job, cluster, timeline)
        yield Notes("assumed", self.assumptions)
        if verbose:
            learning = costs.learning if costs is not None else learning_rows()
            yield Notes("sources of the convergence factors", tuple(report.provenance(
                job, self.policy.optimizer, cluster.ranks, self.plan, learning)))
        if buckets:
            yield report.decision_table(self.plan, job)
            yield from uncompressed_notices(self.plan, job)


def policy_for_sync(sync: str, optimizer: str) -> Policy:
    if sync not in ("step", "auto"):
        raise InvalidInput("E-CLI-OPTION", f"--sync {sync}: allowed are step and auto")
    # sync="auto" never takes stale results.
    return Policy(optimizer=arguments.optimizer_named(optimizer or "adamw"), exact=sync == "step", fragments=True,
                  staleness=False)


def planned_job(model: str, machines: Cluster, batch: int | None, optimizer: str, policy: Policy, profile: Profile | None,
                noise_scale: float | None, *, loss: str = "", learning: str = "", by_speed: bool = False) -> PlannedJob:
    """Makes a plan. `optimizer`: the user's name of the optimizer. `by_speed`: machines of different speed get shares of the
    batch by their speed."""
    job = arguments.with_noise_scale(arguments.job_named(model, batch), noise_scale)
    if job.timing is not None:
        info = job.timing.model
        if info is not None and (info.tokens or info.image_side):
            job = structs.replace(job, batch=job.batch or info.samples)
        devices = [node.device for node in machines.nodes if node.ranks and node.device in gpus()]
        job = with_micro_batches(job, devices, policy.optimizer)
    machines = structs.replace(machines, nodes=with_job_speeds(machines.nodes, job.timing))
    shared, samples = _shares_by_speed(job, machines) if by_speed else (machines, ())
    inputs = PlanFileInputs(job, machines, profile, policy, loss_model.read(Path(loss)) if loss else None,
                            learning_rows(learning) if learning else ())
    search = PlanSearch(job, shared, *inputs.costs())
    plan = search.with_explanation(search.best(exact=policy.exact))
    synchronous = None if plan.synchronous else search.with_explanation(search.best(exact=True))
    assumptions = report.assumptions(model, job, machines, policy, samples, named=bool(optimizer))
    return PlannedJob(inputs, shared, samples, policy, plan, synchronous,
                      report.memory_problem(job, machines, policy.optimizer),
                      tuple(assumptions))


def _shares_by_speed(job: Job, machines: Cluster) -> tuple[Cluster, tuple[int, ...]]:
    """The machines with speeds that express shares of the global batch which all workers compute in the same time, and these
    shares. Without shares if the workers are about equally fast, or the batch is unknown."""
    workers = [node.speed for node in machines.nodes for _ in range(node.ranks)]
    if not job.batch or max(workers) < UNEVEN * min(workers):
        return machines, ()
    samples = shares([LinearTime(1 / speed) for speed in workers], job.batch * len(workers))
    nodes, left = [], list(samples)
    for node in machines.nodes:
        own, left = left[: node.ranks], left[node.ranks :]
        nodes.append(structs.replace(node, speed=node.speed * job.batch / max(own)) if own else node)
    return structs.replace(machines, nodes=tuple(nodes)), tuple(samples)
