"""Input of planning for a running job: combines measured work, links and codec costs, and starts the search.

Codecs of this machine are measured once after each measurement of the job.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import structs

from commlayer.autotune.measure import calibration
from commlayer.autotune.measure.calibration import CollectiveCosts, load_of, under
from commlayer.autotune.plan import loss_limits
from commlayer.autotune.plan.candidate import Candidate
from commlayer.autotune.plan.link_probes import RankMeasurement, server_nodes_of
from commlayer.autotune.plan.loss_limits import PlanLimits
from commlayer.autotune.plan.measuring import Measurements
from commlayer.autotune.plan.plan_search import SearchOrder
from commlayer.autotune.plan.planning_process import PlanningProcess
from commlayer.codec_spec import parse_spec
from commlayer.compressors import build
from commlayer.engine.connection import JobContext
from commlayer.errors import InvalidState
from commlayer.planner.convergence import LearningRow
from commlayer.planner.costs import bare
from commlayer.planner.model import Cluster, Line, Link, Node, PlanInputs, Profile
from commlayer.planner.tables import learning_rows
from commlayer.records import Plan

T = TypeVar("T")

OBSERVED = "topk"
"""Codec family whose measured cosine predicts its cost in steps; none was fitted for other families."""


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

    def find(self, current: Plan, known: Plan | None, links: Sequence[Link], allowed: PlanLimits) -> Candidate:
        """The best plan for nodes with these links, within the script's limits (`allowed`).

        `current` is active; `known` is the planner's form of it, if the planner made it.
        """
        connection, measured = self._connection, self._begun()
        if self._profile is None:
            self._profile = structs.replace(self._measured_here(current, measured, loss_limits.codecs(connection)),
                                            energy=self._energy)
        server_nodes, worker = tuple(server_nodes_of(connection)), connection.worker
        cuda = worker is not None and worker.device.type == "cuda"
        cluster = cluster_of(links, measured.rows, measured.collectives, server_nodes, cuda=cuda,
                             reachable=connection.groups is None or connection.groups.members.reachable)
        rows = harder_by(learning_rows(connection.terms.learning), connection.terms.error_multiplier)
        profile, policy = loss_limits.bounded(connection, structs.replace(self._profile, learning=rows), allowed.policy)
        order = SearchOrder(current, known, server_nodes, PlanInputs(measured.job, cluster, profile, policy), measured.step_s,
                            self._contention, current.steps_locally and loss_limits.remembers(connection), allowed.suggests,
                            allowed.young)
        candidate, self._contention = self._process.search(order)
        return candidate

    def _measured_here(self, current: Plan, measured: Measurements, codecs: Sequence[str]) -> Profile:
        """Costs on this machine during training. Codec names are in full, as in plans."""
        used = {codec for b in current.buckets for codec in (b.codec, b.down) if codec}
        names = sorted({str(build(bare(codec))) for codec in (*codecs, *used)})
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


@functools.lru_cache(4)
def harder_by(rows: tuple[LearningRow, ...], times: float) -> tuple[LearningRow, ...]:
    """Multiplies the excess of `OBSERVED` codecs for a model that loses more than the median model; never reduces it. Other
    codecs and local steps were not observed."""
    if times <= 1.0:
        return rows
    return tuple(_harder(row, 1 + times * (row.steps - 1)) if parse_spec(row.codec).core.family == OBSERVED else row
                 for row in rows)


def _harder(row: LearningRow, steps: float) -> LearningRow:
    return structs.replace(row, steps=steps, steps_high=max(row.steps_high, steps))


_overheads = functools.cache(calibration.measure_overheads)
_copies = functools.cache(calibration.measure_copies)
"""Measured once per process, since they depend only on the machine."""
