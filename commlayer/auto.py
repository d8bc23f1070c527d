"""The plan that nobody asked for: measures the first steps, plans on rank 0, goes over to it, and again when it is stale.

All ranks count steps alike, so what they do together (probes, the exchange of what they measured, the word whether there is a
plan) happens at steps that each knows by itself. Planning runs on a thread of rank 0 beside the training.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
from msgspec import structs

from commlayer import bounds, planner
from commlayer.compressors import parse
from commlayer.connect import Connection, switch
from commlayer.errors import CommError
from commlayer.observe import Drift
from commlayer.planner.costs import bare
from commlayer.planner.model import Basis, Cluster, Inputs, Link, Node, Policy, Profile
from commlayer.planner.tables import codec_loss
from commlayer.price import communication
from commlayer.records import Job, Plan, digest
from commlayer.runtime import calibrate, grouped, overheads, probe
from commlayer.runtime.timing import timing_of
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
FIRST_ASK, LAST_ASK = 2, 64
"""Steps between two askings whether there is a plan: twice as many each time."""
GROUPS_SHARE = 0.2
"""Of the probes' time, for collectives."""

NOTHING, SWITCH, MEASURE = 0, 1, 2


class Row(NamedTuple):
    """What one rank measured."""

    compute_s: float
    step_s: float
    up_bps: float
    down_bps: float
    alpha_s: float


def auto_of(connection: Connection) -> Auto | None:
    """For a job whose plan was left to commlayer and which has a network to plan for: one of several nodes."""
    worker, groups = connection.worker, connection.groups
    single = groups is None or groups.world == groups.ranks_per_node
    if not connection.auto or worker is None or groups is None or single or not worker.plan.servers:
        return None
    return Auto(connection, worker.job)


class Verdict(NamedTuple):
    """What planning found: seconds of a step."""

    measured_s: float
    """Under the plan in force, as all ranks measured it."""
    priced_s: float
    """Under the same plan, by the prices that the new one was made with."""
    found_s: float
    """Under the best plan found, by those prices."""


class Auto:
    """`after_step` is called by every rank after each step."""

    def __init__(self, connection: Connection, job: Job, *, probe_s: float = PROBE_S, keep: bool = False) -> None:
        """`keep`: looks for plans and changes none."""
        self._connection, self._job, self._probe_s, self._keep = connection, job, probe_s, keep
        self._steps, self._next, self._gap = 0, 0, FIRST_ASK
        self._measure_from = WARM_STEPS
        self._answer: Plan | None = None
        self._basis: Basis | None = None
        """Of the latest plan found."""
        self._thread: threading.Thread | None = None
        self._grouped = grouped.Grouped(grouped.NONE, grouped.NONE)
        self._drift: Drift | None = None
        self._stale = False
        self._ended = 0.0
        self._recent: list[float] = []
        self.verdicts: list[Verdict] = []
        """On rank 0. See `settle`."""
        self._price: tuple[float, float] | None = None
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
            worker.fail(error)
            worker.check()

    def _after_step(self, worker: Worker) -> None:
        self._steps += 1
        self._watch()
        if self._steps == self._measure_from:
            worker.recorder.switch(on=True)
        elif self._steps == self._measure_from + MEASURED_STEPS + 1:
            self._begin_planning(worker)
            self._next, self._gap = self._steps + FIRST_ASK, FIRST_ASK
        elif self._steps == self._next:
            self._ask()

    def shares_changed(self, part: float) -> None:
        """Work moves between the ranks with the next step, on all of them: where it matters, measures and plans anew."""
        if part < SHARES_WORTH:
            return
        self._stale = self._connection.rank == 0
        if self._steps < self._next:
            self._next, self._gap = self._steps + FIRST_ASK, FIRST_ASK

    def settle(self, deadline_s: float) -> list[Verdict]:
        """What planning has found, when it is over or that time is."""
        if self._thread is not None:
            self._thread.join(deadline_s)
        return self.verdicts

    # ---- measuring

    def _watch(self) -> None:
        """How long steps take now, against what was predicted; on rank 0 alone."""
        now = time.perf_counter()
        if self._ended:
            self._recent = [*self._recent[-2:], now - self._ended]
            if self._drift is not None and (stale := self._drift.observe(median(self._recent), self._steps)):
                self._stale = True
                self._connection.events.append(stale)
                self._say(stale.reason)
        self._ended = now

    def _begin_planning(self, worker: Worker) -> None:
        """All ranks: probe links one after the other, tell each other; rank 0 goes on alone."""
        made, groups = self._connection, self._connection.groups
        assert groups is not None
        steps = worker.recorder.steps
        worker.recorder.switch(on=False)
        timing = timing_of(steps, len(self._job.tensors), worker.places)
        self._grouped = grouped.measure(groups, GROUPS_SHARE * self._probe_s)
        row = Row(timing.forward_s + timing.backward_s, median(s.marks["end"] for s in steps), *self._probe())
        rows = [Row(*r) for r in groups.gather_all(torch.tensor(row, dtype=torch.float64, device=groups.device)).tolist()]
        if made.rank == 0:
            job = Job(self._job.tensors, self._job.batch, timing, self._job.name)
            plan = worker.plan
            self._thread = threading.Thread(target=self._plan, args=(job, plan, rows), name="commlayer-planner", daemon=True)
            self._thread.start()

    def _probe(self) -> tuple[float, float, float]:
        """(up, down, latency) of this node's link: the nodes' first ranks measure in turn, so none measures another's.

        A node asks the servers of the others; zeros, where there are none.
        """
        made, groups = self._connection, self._connection.groups
        assert groups is not None
        assert made.uplink is not None
        found = (0.0, 0.0, 0.0)
        nodes = groups.world // groups.ranks_per_node
        away = [server.id for server in made.uplink.view.servers if server.node != groups.node]
        for node in range(nodes):
            if (groups.node, groups.local) == (node, 0) and away:
                budget_s = (1 - GROUPS_SHARE) * self._probe_s / nodes
                link = probe.link(probe.Asking(made.uplink.probe), away, budget_s, min(10 * budget_s + 10, groups.timeout_s))
                found = link.up_bps, link.down_bps, link.alpha_s
            groups.barrier()
        return found

    # ---- planning, on rank 0

    def _plan(self, job: Job, current: Plan, rows: list[Row]) -> None:
        try:
            cluster = self._cluster(rows)
            profile = _profile(current, self._grouped, bounds.codecs(self._connection))
            profile, policy = bounds.bounded(self._connection, profile, Policy(devices=("cpu",)))
            made = planner.plan(job, cluster, profile, policy)
            now_s = planner.simulate(self._at_home(current), job, cluster, profile, policy).step_s
            measured_s = median(row.step_s for row in rows)
            self._connection.price = _price(self._at_home(current), job, cluster, profile, policy)
            self._price = _price(made, job, cluster, profile, policy)
            answer = self._on_servers(made)
            basis = Basis(made, Inputs(job, cluster, profile, policy))
        except Exception as error:
            self._say(f"no plan: {type(error).__name__}: {error}")
            return
        self.verdicts.append(Verdict(measured_s, now_s, made.step_s))
        gain = 1.0 - made.step_s / now_s
        said = (f"a plan of {len(made.buckets)} buckets for {1e3 * made.step_s:.1f} ms a step; the one in force takes "
                f"{1e3 * measured_s:.1f} ms, {1e3 * now_s:.1f} ms by the same prices")
        if gain < WORTH or self._keep:
            self._drift = Drift(measured_s)
            self._connection.basis = basis._replace(plan=self._at_home(current))
            self._say(f"kept the plan in force: found {said}")
            return
        self._say(f"found {said}")
        self._basis, self._answer = basis, answer

    def _homes(self) -> list[int]:
        """The node of each server."""
        assert self._connection.uplink is not None
        return [s.node for s in self._connection.uplink.view.servers]

    def _at_home(self, plan: Plan) -> Plan:
        """Its servers as the planner counts them: one for each node that has any."""
        homes = self._homes()
        hosts = sorted(set(homes[: plan.servers]))
        buckets = tuple(structs.replace(b, server=hosts.index(homes[b.server]) if hosts else 0) for b in plan.buckets)
        return structs.replace(plan, buckets=buckets, servers=len(hosts), hosts=tuple(hosts))

    def _on_servers(self, plan: Plan) -> Plan:
        """The reverse: the planner's hosts as the numbers of servers that run."""
        if not plan.servers:
            return plan
        homes = self._homes()
        able = sorted(set(homes))
        hosts = plan.hosts or tuple(able[: plan.servers])
        number = [homes.index(host) for host in hosts]
        buckets = tuple(structs.replace(b, server=number[b.server]) for b in plan.buckets)
        return structs.replace(plan, buckets=buckets, servers=len(homes), hosts=())

    def _cluster(self, rows: list[Row]) -> Cluster:
        """Nodes as measured. One that hosts the only server saw no network: it gets the best of the others'."""
        groups = self._connection.groups
        assert groups is not None
        firsts = rows[:: groups.ranks_per_node]
        homes = self._homes()
        seen = [row for row in firsts if row.up_bps]
        best = Link(max(r.up_bps for r in seen), max(r.down_bps for r in seen), min(r.alpha_s for r in seen))
        fastest_s = min(r.compute_s for r in rows)
        inside = self._grouped.inside
        nodes = []
        for number, row in enumerate(firsts):
            link = Link(row.up_bps, row.down_bps, row.alpha_s) if row.up_bps else best
            mine = rows[number * groups.ranks_per_node : (number + 1) * groups.ranks_per_node]
            nodes.append(Node(
                f"node{number}", groups.ranks_per_node, "cpu", link,
                8 / inside.slope_s if inside.slope_s else 0.0, inside.floor_s,
                speed=fastest_s / max(r.compute_s for r in mine), server=number in homes,
            ))
        return Cluster(tuple(nodes))

    # ---- changing over

    def _ask(self) -> None:
        """All ranks: has rank 0 a plan, or does it want everything measured again?"""
        groups = self._connection.groups
        assert groups is not None
        word = torch.tensor([self._word()], dtype=torch.int64, device=groups.device)
        groups.broadcast_all(word).wait(time.monotonic() + groups.timeout_s)
        self._gap = min(2 * self._gap, LAST_ASK)
        self._next = self._steps + self._gap
        if int(word) == SWITCH:
            plan, self._answer = self._answer, None
            try:
                switch(self._connection, plan)
            except ValueError as error:  # on all ranks, and nothing has changed
                self._say(f"kept the plan in force: {error}")
                return
            assert self._connection.plan is not None
            self._drift = Drift(self._connection.plan.step_s) if self._connection.rank == 0 else None
            self._connection.basis = self._basis
            self._recent.clear()
            self._connection.price = self._price
            self._say(f"went over to plan {digest(self._connection.plan)}")
        elif int(word) == MEASURE:
            self._measure_from = self._steps + 1

    def _word(self) -> int:
        if self._connection.rank != 0:
            return NOTHING
        if self._answer is not None:
            return SWITCH
        if self._stale and not (self._thread is not None and self._thread.is_alive()):
            self._stale, self._drift = False, None
            return MEASURE
        return NOTHING

    def _say(self, what: str) -> None:
        self._connection.decisions.append(f"step {self._steps}: {what}")
        if self._connection.rank == 0:
            log.info("step %d: %s", self._steps, what)


def _price(plan: Plan, job: Job, cluster: Cluster, profile: Profile, policy: Policy) -> tuple[float, float]:
    priced = communication(plan, job, cluster, profile, policy)
    return priced.seconds(tuple(range(cluster.ranks))), priced.overlap


_overheads = functools.cache(overheads.measure)
"""Once in a process: they are this machine's."""


def _profile(current: Plan, collectives: grouped.Grouped, codecs: Sequence[str]) -> Profile:
    """Costs as they are here; codecs as plans spell them, in full. What these lose nobody can measure now: the tables guess."""
    used = {bare(codec) for b in current.buckets for codec in (b.codec, b.down) if codec}
    names = sorted({str(parse(codec)) for codec in (*codecs, *used)})
    costs = tuple(structs.replace(cost, loss=codec_loss(cost.codec)) for cost in calibrate.measure(names))
    besides = _overheads()
    return Profile(costs, besides.server, besides.bucket.floor_s, across=collectives.across, source="measured")
