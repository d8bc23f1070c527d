"""What the controller does to a running job: it records and measures steps, probes links, searches for plans and switches."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from msgspec import structs

from commlayer.autotune.measure import calibration
from commlayer.autotune.measure.calibration import CollectiveCosts
from commlayer.autotune.measure.measurements import (
    Measurements,
    RankMeasurement,
    measured_cluster,
    measured_links,
    nonzero_fractions,
    number_server_nodes,
    remove_caps,
    squared_norms,
)
from commlayer.autotune.measure.probes import (
    communication_bound,
    gather_rows,
    known_links,
    make_traffic_meter,
    probe_own_link,
    raise_rates,
    read_traffic,
)
from commlayer.autotune.measure.step_times import median_timing
from commlayer.autotune.opening import FAR_S, is_no_slower, opening_plan
from commlayer.autotune.plan_limits import YOUNG, PlanLimits, codecs, collect_plan_limits, limit_to_budget
from commlayer.autotune.planning.candidate import Candidate
from commlayer.autotune.planning.planning_process import PlanningProcess
from commlayer.autotune.planning.search import SearchOrder, all_reduce_plan, number_servers_by_node
from commlayer.autotune.state import Measured, SearchRequest
from commlayer.cluster.calls.home_traffic import HOME
from commlayer.cluster.processes.collectives import all_or_none
from commlayer.compressors import build
from commlayer.config import host_port, is_loopback
from commlayer.engine.epochs.plan_switch import switch
from commlayer.engine.job.job import DistributedJob
from commlayer.errors import InvalidState
from commlayer.last_run import LastRun
from commlayer.native import core
from commlayer.observe.events import WhatIfEvent
from commlayer.observe.interface_counters import InterfaceCounters
from commlayer.observe.link_monitor import Rates
from commlayer.planner.data.tables import BUCKET_S, PCIE_COPY, SERVER_BYTE_S, learning_rows
from commlayer.planner.model import DENSE, Cluster, CodecCost, LinearCost, Link, Policy, Profile, Question, bare
from commlayer.records import Plan

PROBE_S = 1.0
"""Seconds of all probes together, without the waits between ranks."""
GROUPS_SHARE = 0.2
"""Fraction of the probes' time that is for collectives."""
SLOW_BPS = 200e6
"""If a node's link is slower than this many bit/s, collectives between nodes are not measured: the link determines their time,
and measuring would take long."""
WHAT_IF_S = 600.0
"""Shortest time between two what-if questions, each of which takes seconds of one core."""
CLOSE_S = 60.0
"""Seconds in which a what-if question ends when its process is killed."""
SLOWER = 0.8
"""Fraction of the planned upload rate below which steps show that a link without caps is slower than it was measured."""
PROBE_AGAIN_S = 1.2
"""Seconds of a probe of links that may have become faster."""


class JobActions:
    """Carries out what the controller decides. All ranks call a method together, except for `node_names`, `pace`, `record` and
    the search."""

    def __init__(self, context: DistributedJob, probe_s: float = PROBE_S) -> None:
        """`probe_s`: seconds of all probes together."""
        worker = context.worker
        self._context, self._job, self._probe_s = context, worker.job, probe_s
        self._meter: InterfaceCounters | None = None
        self._measured: Measurements | None = None
        """The latest measurements, under the plan that was active then; None before the first."""
        self._profile: Profile | None = None
        """Costs of codecs and collectives on this machine, from the latest measurements; None until a search has needed
        them."""
        self._energy: tuple[float, ...] = ()
        """Energy (squared norm) of each tensor's gradient, from the first measurement. Later averages may come from sparse
        codecs, and are then incomplete."""
        self._contention = 0.0
        """Slowdown of work on the CPU relative to work measured alone; 0 before it is known."""
        self._elsewhere_bps = 0.0
        """Upload rate of servers on other machines; 0 before a search has found it from the measured step time."""
        self._planned_up_bps = 0.0
        """This node's upload rate by its caps at the last measurement."""
        self._process = PlanningProcess()
        self._link: Link | None = None
        """This node's link, if it was measured before the first step."""
        self._collectives: CollectiveCosts | None = None
        """Costs of collectives, if they were measured before the first step and no measurement has followed."""
        self._young = context.plan if context.passes < YOUNG else None
        """The latest plan that became active while the job was young."""
        self._asked: Question | None = None
        self._asked_at = -math.inf
        self._asking: threading.Thread | None = None

    def start_traffic_meter(self) -> InterfaceCounters | None:
        """Starts reading this node's interface counters, on the node's first rank, if the system has them."""
        self._meter = make_traffic_meter(self._context)
        if self._meter is not None:
            self._context.on_close.append(self._meter.close)
        return self._meter

    def node_names(self) -> list[str]:
        """The display name of each node; "" for all if they have the same name."""
        uplink, groups = self._context.uplink, self._context.groups
        return [uplink.worker_name(uplink.epoch.members[first].rank) for first in groups.first_ranks]

    def pace(self, links: Sequence[Link]) -> None:
        """Paces uploads of this rank, and of the servers on its node, by the node's measured upload rate."""
        groups, uplink = self._context.groups, self._context.uplink
        up_bps = links[groups.node].up_bps
        if up_bps < SLOWER * min(self._planned_up_bps, HOME.allowed_bps(HOME.link_bps)):  # the link itself has become slower
            self._planned_up_bps = up_bps
            HOME.follow(up_bps, len(groups.site))
        uplink.pace(up_bps / len(groups.site))
        if groups.local == 0 and not self._context.elastic:  # no home has a server
            uplink.pace_servers(groups.node, up_bps)

    def remember(self, links: Sequence[Link]) -> None:
        """Stores the plan and this node's link for the next run of the job. A plan that the job switched to late is not stored,
        because such a plan does not suit the start of a job."""
        context = self._context
        if context.plan is self._young:
            # The next run's planner needs servers, even if this plan needs none. Homes may then join in another order, so the
            # plan is stored without codecs of single nodes.
            plan = structs.replace(context.plan, servers=len(context.uplink.epoch.servers),
                                   buckets=tuple(structs.replace(b, by_node=()) for b in context.plan.buckets))
            link = links[context.groups.node]
            if HOME.is_limited:
                link = structs.replace(link, up_bps=max(link.up_bps, HOME.link_bps))
            context.terms.last_runs.save(context.groups.sites, LastRun(plan, link))

    def record(self, *, on: bool) -> None:
        self._context.worker.recorder.switch(on=on)
        if self._context.local is not None:
            self._context.local.recorder.switch(on=on)

    def share_times(self, step_s: float, waited_s: float) -> tuple[float, float]:
        """Returns the median step time of all ranks, and the shortest wait for communication. A rank that waits for a slower
        rank waits longer than communication takes."""
        groups = self._context.groups
        rows = groups.gather_all(torch.tensor([step_s, waited_s], dtype=torch.float64, device=groups.device))
        return float(rows[:, 0].median()), float(rows[:, 1].min())

    def measure(self, steps_s: Sequence[float]) -> Measured:
        """Measures the job from the steps recorded so far, which ends recording, and from probes. Returns the result, equal on
        all ranks. `steps_s`: the times of these steps; under local steps, of steps between two exchanges."""
        context, worker = self._context, self._context.worker
        groups, local = context.groups, context.local
        with all_or_none(groups, "measuring steps"):
            seen = None if self._meter is None else read_traffic(self._meter)
            recorded = (worker if local is None else local).recorder.steps
            self.record(on=False)
            timing = median_timing(recorded, len(self._job.tensors), worker.places)
            timing = structs.replace(timing, noise_scale=(self._job.batch or 1) * worker.counters.noise_scale)
            if groups.ranks_per_node == 1:
                timing = structs.replace(timing, filled=nonzero_fractions(worker, groups.world))
            step_s = median(steps_s)
            # Records of local steps do not show what limited their exchanges.
            limited = seen if local is None and communication_bound(recorded) and not HOME.is_limited else None
        if local is None and not self._energy:  # an update of local steps is not a gradient
            self._energy = squared_norms(worker, context.site, groups.timeout_s)
        carried = None if seen is None else seen.carried
        own, self._link = self._link, None
        if own is None or local is None:  # otherwise the link was measured before the first step
            if own is None and self._measured is None and self._begins and (last := context.terms.last_runs.load(groups.sites)):
                own = last.link
            expected = Rates(carried.up.bps, carried.down.bps) if carried else Rates(0.0, 0.0)
            nodes = known_links(context, self._links_s, limited, (len(steps_s) + 1) * step_s, last=own)
            own = Link(*probe_own_link(context, nodes, self._links_s, expected=expected))
        link = raise_rates((own.up_bps, own.down_bps, own.alpha_s), carried, self._fastest_down_bps())
        row = RankMeasurement(timing.forward_s + timing.backward_s, step_s, *link, context.terms.balanced,
                              limited=float(HOME.is_limited))
        rows = self._capped(row)
        collectives, self._collectives = self._collectives or self._collective_costs(rows), None
        self._measured = Measurements(structs.replace(self._job, timing=timing), rows, collectives)
        self._profile = None
        if not self._limited:  # else caps have made the steps longer
            self._contention, self._elsewhere_bps = 0.0, 0.0
        links = measured_links(context, rows)
        return Measured(
            tuple(links), median(row.step_s for row in rows),
            () if any(row.balanced for row in rows) else tuple(row.compute_s for row in rows),
            tuple(map(context.called, range(len(rows)))), not context.site.shards,
            remove_caps(links, [rows[first].uplink_bps for first in groups.first_ranks]))

    @property
    def _links_s(self) -> float:
        """Seconds of the probes of links."""
        return (1 - GROUPS_SHARE) * self._probe_s

    @property
    def _begins(self) -> bool:
        return self._context.uplink.epoch.generation == 1

    def opening(self) -> Plan | None:
        """Measures links before the first step: near ones if ranks reach each other, far ones if the script allows local steps.
        Returns the plan with which to begin, or None for the current one. The result is the same on all ranks."""
        context, plan, reachable = self._context, self._context.plan, self._reachable
        averages = context.terms.requested.exact is not False
        # A plan with a prediction is that of the last run.
        if context.passes or plan.step_s or not self._begins or (averages and not reachable):
            return None
        nodes = known_links(context, self._links_s)
        far = max(node.round_trip_s for node in nodes) >= FAR_S
        if not any(node.can_probe for node in nodes) or (averages if far else not reachable):
            return None
        link = probe_own_link(context, nodes, self._links_s)
        allowed = None if averages else collect_plan_limits(context).policy
        # How long a step computes is not known: every rank counts as equally fast.
        rows = self._planned(RankMeasurement(1.0, 0.0, *link, averages=float(allowed is None or allowed.exact)))
        self._link, links = Link(*link), measured_links(context, rows)
        if far:
            if any(row.averages for row in rows):
                return None
            forward = self.result_of_rank_0(lambda: allowed is not None and allowed.forward)
            return opening_plan(self._job, plan, links, forward=forward)
        plain, measured = all_reduce_plan(self._job, plan), Measurements(self._job, rows, self._collective_costs(rows))
        self._collectives = measured.collectives

        def is_worthwhile() -> bool:
            if core is None:  # no predictions
                return False
            profile = self._measured_here(plan, (DENSE,), measured.collectives)
            inputs = Question(self._job, self._cluster(links, measured), profile, Policy())
            return is_no_slower(plain, number_servers_by_node(plan, number_server_nodes(context)), inputs)

        one_machine = all(is_loopback(host_port(server.address)[0]) for server in context.uplink.epoch.servers)
        # Rank 0 decides. The other ranks measure codecs at the same time, because some of them may share its machine.
        return plain if one_machine or self.result_of_rank_0(is_worthwhile) else None

    def _collective_costs(self, rows: Sequence[RankMeasurement]) -> CollectiveCosts:
        """Measures collectives, unless links determine their time; collective."""
        groups = self._context.groups
        if self._context.site.shards:
            return calibration.FREE_INSIDE
        if groups.ranks_per_node == 1 and any(0.0 < row.up_bps < SLOW_BPS for row in rows):
            return CollectiveCosts()
        return calibration.measure_collectives(groups, GROUPS_SHARE * self._probe_s)

    def _cluster(self, links: Sequence[Link], measured: Measurements) -> Cluster:
        context = self._context
        return measured_cluster(links, measured.rows, measured.collectives, number_server_nodes(context),
                                cuda=context.worker.device.type == "cuda", reachable=self._reachable,
                                elsewhere_bps=self._elsewhere_bps, sites=context.groups.sites)

    @property
    def _reachable(self) -> bool:
        """True: ranks of different nodes can exchange without servers, which the ranks of a sharded model never do."""
        return self._context.groups.members.reachable and not self._context.site.shards

    def probe(self, planned: Sequence[Rates]) -> tuple[Link, ...]:
        """Measures only the links. `planned`: known rates, which set the initial TCP windows."""
        context = self._context
        link = probe_own_link(context, known_links(context, PROBE_AGAIN_S), PROBE_AGAIN_S,
                              expected=planned[context.groups.node])
        up_bps, down_bps, _ = raise_rates(link, None, self._fastest_down_bps())
        row = self._measurements.rows[context.rank]._replace(up_bps=up_bps, down_bps=down_bps)
        return tuple(measured_links(context, self._capped(row, least_bps=HOME.link_bps)))  # a short probe shows no slower link

    def _capped(self, row: RankMeasurement, *, least_bps: float = 0.0) -> list[RankMeasurement]:
        """Limits this node's upload rate by its caps from now on. Returns the rows of all ranks; collective. `least_bps`: lower
        bound of the link's rate."""
        groups = self._context.groups
        rows = self._planned(row)
        mine = rows[groups.first_ranks[groups.node]]
        self._planned_up_bps = mine.up_bps
        HOME.follow(max(mine.uplink_bps, least_bps), len(groups.site))
        return rows

    def _planned(self, row: RankMeasurement) -> list[RankMeasurement]:
        """Returns the rows of all ranks, with the upload rates that the caps of homes allow; collective."""
        return gather_rows(self._context.groups, row._replace(up_bps=HOME.allowed_bps(row.up_bps), uplink_bps=row.up_bps))

    @property
    def _limited(self) -> bool:
        """Whether caps of some home held during the measured steps."""
        return any(row.limited for row in self._measurements.rows)

    def allowed_bps(self) -> float:
        """Returns at which rate this node may send by its caps; 0: it has none."""
        return HOME.allowed_bps(HOME.link_bps) if HOME.is_capped else 0.0

    def _fastest_down_bps(self) -> float:
        return 0.0 if self._meter is None else self._meter.fastest_down_bps()

    def result_of_rank_0(self, act: Callable[[], bool]) -> bool:
        """Runs `act` on all ranks, and returns the result of rank 0. If it fails on one rank, raises on all."""
        with all_or_none(self._context.groups, "planning", 1) as exchange:
            exchange.mine = [act()]
        return bool(exchange.rows[0][0])

    def switch(self, plan: Plan | None, *, by_itself: bool) -> None:
        switch(self._context, plan, by_itself=by_itself)
        if self._context.passes < YOUNG:
            self._young = self._context.plan

    def prepare_search(self) -> None:
        """Starts the planning process in advance. A failure is ignored here; the first search reports it."""
        with contextlib.suppress(OSError):
            self._process.start()

    def limits(self) -> PlanLimits:
        """Returns which plans the script allows. Runs on the training thread, because it tries the optimizer and restores the
        random state."""
        return collect_plan_limits(self._context)

    def search(self, request: SearchRequest, allowed: PlanLimits) -> Candidate:
        """Returns the best plan within the script's limits (`allowed`), from the latest measurements. Runs on the planner
        thread."""
        context, measurements, current = self._context, self._measurements, request.current
        if self._profile is None:
            self._profile = self._measured_here(current, codecs(context), measurements.collectives)
        server_nodes = tuple(number_server_nodes(context))
        profile = structs.replace(self._profile, learning=learning_rows(context.terms.learning))
        profile, policy = limit_to_budget(context, profile, allowed.policy)

        def found(links: Sequence[Link]) -> Candidate:
            inputs = Question(measurements.job, self._cluster(links, measurements), profile, policy)
            order = SearchOrder(current, request.known, server_nodes, inputs,
                                measurements.step_s, self._contention, context.stays_apart(current.local_steps),
                                allowed.suggests, allowed.young)
            candidate, self._contention, self._elsewhere_bps = self._process.search(order)
            return candidate

        if not request.uncapped or self._limited or self._contention:
            return found(request.links)
        # No cap limited the measured steps, so these steps show the speed of the machines on links without caps.
        free = found(request.uncapped)
        self._contention = self._contention or 1.0
        return found(request.links)._replace(uncapped_s=free.plan.step_s * free.steps)

    def _measured_here(self, current: Plan, codecs: Sequence[str], collectives: CollectiveCosts) -> Profile:
        """Returns the costs of codecs on this machine when it runs nothing else; the search adds the slowdown by other
        programs. Codec names are complete, as in plans."""
        active_codecs = {codec for b in current.buckets for codec in (b.codec, b.down) if codec}
        names = sorted({str(build(bare(codec))) for codec in (*codecs, *active_codecs)})
        costs: list[CodecCost] = []
        for name in names:
            if self._process.over:
                raise InvalidState("E-SESSION-CLOSED", "the session is over")
            costs += calibration.measure_codecs([name])
        copy = PCIE_COPY if torch.cuda.is_available() else LinearCost(0.0)
        return Profile(tuple(costs), LinearCost(0.0, SERVER_BYTE_S), BUCKET_S, copy, across=collectives.across,
                       source="measured", energy=self._energy)

    @property
    def _measurements(self) -> Measurements:
        assert self._measured is not None, "planning follows measuring"
        return self._measured

    def ask_what_if(self, inputs: Question) -> None:
        """Finds out which change would make the job faster, on a separate thread, and appends an event about it. Does nothing
        if that was asked about the same inputs, or a short time ago, or during a search."""
        now, uplink = time.monotonic(), self._context.uplink
        if inputs is self._asked or now - self._asked_at < WHAT_IF_S:
            return
        self._asked, self._asked_at = inputs, now
        names = [f"worker {uplink.epoch.members[first].rank}" for first in self._context.groups.first_ranks]

        def ask() -> None:
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # the job needs no answer
                if (gains := self._process.gains(inputs)) is not None:
                    slowest = tuple(names[home] for home in gains.homes)
                    self._context.stream.log.append(WhatIfEvent(
                        home_times=gains.home_times, uplink_times=gains.uplink_times, names=slowest))

        self._asking = threading.Thread(target=ask, name="commlayer-what-if", daemon=True)
        self._asking.start()

    def stop_search(self) -> None:
        """Ends a search in progress; `search` raises an error."""
        self._process.stop()

    def close(self) -> None:
        """Ends searches and what-if questions permanently. A search in progress soon raises RuntimeError; a question has ended
        then, because a thread in native code at interpreter exit would crash the process."""
        self._process.close()
        if self._asking is not None:
            self._asking.join(CLOSE_S)
