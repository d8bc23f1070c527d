"""Input of planning for a running job: combines measured work, links and codec costs, and starts the search.

Codecs of this machine are measured once after each measurement of the job.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from msgspec import structs

from commlayer import loss_budget
from commlayer.autotune.measure import calibration
from commlayer.autotune.measure.calibration import CollectiveCosts, load_of, under
from commlayer.autotune.measuring import Measurements, RankMeasurement, server_nodes_of
from commlayer.autotune.plan_policy import Candidate, SearchRequest
from commlayer.autotune.planning_process import PlanningProcess
from commlayer.autotune.search import SearchOrder
from commlayer.balance import loss_model
from commlayer.balance.loss_model import LossModel
from commlayer.compressors import build, parse
from commlayer.engine import plan_choice
from commlayer.engine.connection import JobContext
from commlayer.errors import InvalidState
from commlayer.planner.convergence import measured_local_steps
from commlayer.planner.model import Cluster, Line, Link, Node, PlanInputs, Policy, Profile, bare
from commlayer.planner.tables import learning_rows
from commlayer.records import Plan

T = TypeVar("T")

class Replanner:
    """Searches for plans with the latest measurements."""

    def __init__(self, connection: JobContext) -> None:
        self._connection = connection
        self._measured: Measurements | None = None
        self._profile: Profile | None = None
        self._energy: tuple[float, ...] = ()
        """From the first measurement: under a sparse plan the received averages are not complete gradients."""
        self._contention = 0.0
        """Slowdown of work on processors relative to work measured alone; 0 before it was fitted."""
        self._process = PlanningProcess()
        self._over = False

    def start(self) -> None:
        """Starts the child process in advance. A failure is ignored here; the first search reports it."""
        with contextlib.suppress(OSError):
            self._process.start()

    def stop(self) -> None:
        """Ends a search in progress, which raises an error."""
        self._process.stop()

    def close(self) -> None:
        """Ends planning permanently. A thread in `find` soon raises RuntimeError."""
        self._over = True
        self._process.close()

    def measured(self, measurements: Measurements) -> None:
        """Sets new measurements, made under the active plan."""
        self._measured, self._profile, self._contention = measurements, None, 0.0
        self._energy = self._energy or measurements.energy

    @property
    def rows(self) -> list[RankMeasurement]:
        return self._begun().rows

    def find(self, request: SearchRequest, allowed: PlanLimits) -> Candidate:
        """The best plan within the script's limits (`allowed`)."""
        connection, measurements, current = self._connection, self._begun(), request.current
        if self._profile is None:
            self._profile = structs.replace(self._measured_here(current, measurements, codecs(connection)),
                                            energy=self._energy)
        server_nodes, worker = tuple(server_nodes_of(connection)), connection.worker
        cuda = worker is not None and worker.device.type == "cuda"
        cluster = cluster_of(request.links, measurements.rows, measurements.collectives, server_nodes, cuda=cuda,
                             reachable=connection.groups is None or connection.groups.members.reachable)
        profile = structs.replace(self._profile, learning=learning_rows(connection.terms.learning))
        profile, policy = bounded(connection, profile, allowed.policy)
        order = SearchOrder(current, request.known, server_nodes, PlanInputs(measurements.job, cluster, profile, policy),
                            measurements.step_s, self._contention, current.steps_locally and remembers(connection),
                            allowed.suggests, allowed.young)
        candidate, self._contention = self._process.search(order)
        return candidate

    def _measured_here(self, current: Plan, measured: Measurements, codecs: Sequence[str]) -> Profile:
        """Costs on this machine during training. Codec names are in full, as in plans."""
        active_codecs = {codec for b in current.buckets for codec in (b.codec, b.down) if codec}
        names = sorted({str(build(bare(codec))) for codec in (*codecs, *active_codecs)})
        alone = [cost for name in names for cost in self._go_on(functools.partial(calibration.measure_codecs, [name]))]
        load = load_of(measured.steps, current, alone)
        costs = tuple(under(load, cost) for cost in alone)
        overheads, copy = self._go_on(_overheads), _copies()
        return Profile(costs, overheads.server, overheads.bucket.floor_s, copy or Line(0.0), across=measured.collectives.across,
                       source="measured")

    def _go_on(self, measure: Callable[[], T]) -> T:
        if self._over:
            raise InvalidState("E-SESSION-CLOSED", "the session is over")
        return measure()

    def _begun(self) -> Measurements:
        assert self._measured is not None, "planning follows measuring"
        return self._measured


def cluster_of(
    links: Sequence[Link], rows: Sequence[RankMeasurement], inside: CollectiveCosts, server_nodes: Sequence[int], *,
    cuda: bool = False,
    reachable: bool = True,
) -> Cluster:
    """The measured cluster: one link per node, one row per rank. Servers on other machines get the best link.

    Speeds are relative to rank 0's, which plans with its own model times and codec costs.
    """
    per_node = len(rows) // len(links)
    line = inside.inside
    nodes = []
    for number, link in enumerate(links):
        mine = rows[number * per_node : (number + 1) * per_node]
        nodes.append(Node(
            f"node{number}", per_node, "gpu" if cuda else "cpu", link, 8 / line.slope_s if line.slope_s else 0.0, line.floor_s,
            speed=rows[0].compute_s / max(row.compute_s for row in mine), server=number in server_nodes,
        ))
    best = max(links, key=lambda link: link.up_bps + link.down_bps)
    nodes += [Node(f"node{number}", 0, "cpu", best) for number in range(len(links), max(server_nodes, default=0) + 1)]
    return Cluster(tuple(nodes), reachable)


_overheads = functools.cache(calibration.measure_overheads)
_copies = functools.cache(calibration.measure_copies)
"""Measured once per process, since they depend only on the machine."""


# ---- limits of planning for a running job: allowed sync modes, and codecs by loss budget and quality floor

YOUNG = 1000
"""Training steps. Early in a job sparse codecs cost more than the table of trainings predicts."""


class PlanLimits(NamedTuple):
    """Limits of a search."""

    policy: Policy
    suggests: bool = False
    """Whether the search also reports the benefit of local steps that the script has not allowed."""
    young: bool = False
    """Whether the job is in its first `YOUNG` steps, in which codecs stay at int4 or finer if links permit."""


def codecs(connection: JobContext) -> list[str]:
    """Codecs that are worth measuring."""
    return plan_choice.at_least(connection.terms.floor, loss_budget.names(_model(connection), _budget(connection)))


def remembers(connection: JobContext) -> bool:
    """Whether the optimizer has state, which local steps let diverge between ranks."""
    return connection.stepped is not None and connection.stepped.remembers


def limits_of(connection: JobContext, rows: Sequence[RankMeasurement] = ()) -> PlanLimits:
    """The script's limits as rank 0 sees them, with the rows of all ranks. A rank with other limits refuses the plan."""
    modes, terms = connection.terms.allowed_modes(), connection.terms
    # Controllers refuse local steps; samplers that weigh batches weigh outer steps in the same way.
    balanced = terms.balanced or any(row.balanced for row in rows)
    able = not balanced and {"updates", "local", "round"} <= modes
    # If workers might leave, an exchange must be complete before any part of it is applied.
    takes_fragments = terms.requested.fragments is None and connection.members is None
    policy = Policy(
        devices=("cpu",), optimizer=terms.optimizer, exact=not (able and terms.requested.exact is False),
        # Stale results would replace the gradients that scripts accumulate in `.grad` by older averages.
        forward="forward" in modes, staleness=False, fragments=takes_fragments,
    )
    return PlanLimits(policy, able and terms.requested.exact is None and not terms.suggested, connection.passes < YOUNG)


def bounded(connection: JobContext, profile: Profile, policy: Policy) -> tuple[Profile, Policy]:
    """Applies the loss budget (with the user's measured losses or the built-in ones), the quality floor, and the largest
    measured number of local steps."""
    if not policy.exact:
        policy = structs.replace(policy, max_local_steps=measured_local_steps(profile.learning))
    model = _model(connection)
    if model is not None or connection.terms.max_loss:
        policy = structs.replace(policy, max_loss=_budget(connection))
    if model is not None:
        profile, policy = loss_budget.priced(profile, policy, model)
    if not connection.terms.floor:
        return profile, policy
    names = policy.codecs or tuple(dict.fromkeys(cost.codec for cost in profile.codecs))
    fine = tuple(name for name in names if plan_choice.level(parse(name)) >= connection.terms.floor * plan_choice.EQUAL)
    return profile, structs.replace(policy, codecs=fine)


def _budget(connection: JobContext) -> float:
    return connection.terms.max_loss or loss_budget.BUDGET


def _model(connection: JobContext) -> LossModel | None:
    return loss_model.read(Path(connection.terms.loss)) if connection.terms.loss else None
