"""From a Job to a running Worker: settles the plan, starts or finds the servers, joins, dials. Knows no model and no hooks."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from commlayer import loss_budget, planner, records
from commlayer.compressors import codec_of, kernels
from commlayer.config import Config, codec_threads, is_loopback
from commlayer.control import messages, uplink
from commlayer.control.embedded import Embedded
from commlayer.control.leaving import end as end_part
from commlayer.errors import CommError
from commlayer.job import requested_plan
from commlayer.job.fault import FaultVerdict
from commlayer.job.rendezvous import HEARD_S, Start, plan_kind
from commlayer.observe import StalePlan
from commlayer.planner.model import float64
from commlayer.planner.model.cluster import Basis
from commlayer.planner.model.gradients_only import without_buffers
from commlayer.records import Job, Plan
from commlayer.runtime.initial_sync import align as align_tensors
from commlayer.runtime.local_steps import LocalSteps
from commlayer.runtime.plan_check import unsuited
from commlayer.runtime.plan_handover import hand_over
from commlayer.runtime.worker import Worker
from commlayer.transport import secret
from commlayer.transport.all_or_none import gather, together
from commlayer.transport.groups import Groups

log = logging.getLogger("commlayer")

NOTICE_HEARTBEATS = 3
"""After an error servers stay as long as it takes the others to hear from the coordinator who left or died."""
REFUSED = b"!"
"""In front of the reason that rank 0 sends in place of a plan; a plan's bytes begin with a brace."""


class Connection:
    """What a session holds on to. `worker` is None where there is nobody to average with."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.worker: Worker | None = None
        self.groups: Groups | None = None
        self.uplink: uplink.Uplink | None = None
        self.embedded: list[Embedded] = []
        self.rank, self.world = 0, 1
        self.decisions: list[str] = []
        """What was decided in this run, at which step, and why."""
        self.beside: list[Callable[[], None]] = []
        """What else is to be closed with it."""
        self.on_shares: list[Callable[[float], None]] = []
        """Who wants to hear, on all ranks after the same step, that work moves: by what part a step's computing changes."""
        self.price: tuple[float, float] | None = None
        """On rank 0: seconds of communication under the plan in force, and the part of computing that hides it."""
        self.events: list[StalePlan] = []
        """The same as records, as far as there are any."""
        self.watchers: list[Callable[[], None]] = []
        """Called by every rank after each step. CommError, latched in the worker, if another rank is gone."""
        self.exchanged: list[Callable[[], None]] = []
        """The same after each exchange of local steps."""
        self.basis: Basis | None = None
        """On rank 0: what the plan in force was made from, where that is known."""
        self.auto = False
        """Whether the plan was left to commlayer."""
        self.loss, self.max_loss, self.floor = "", 0.0, 0.0
        """The loss model's file, the budget, and the level (runtime/codec_floor.py) below which the guard allows no codec."""
        self.local: LocalSteps | None = None
        """Under a plan of local steps."""
        self.steps_locally = False
        """Whether a plan of local steps can run: whoever made this connection steps weights and not only gradients."""
        self.leaving: Callable[[], None] = _nothing
        self.entered: Callable[[], None] = _nothing
        """Before, and after, a change of plan."""
        self.notice_s = self.verdict_s = self.stay_s = 0.0
        self._verdict = FaultVerdict()
        self._owner = os.getpid()
        self._closed = False

    def stats(self) -> dict[str, float]:
        return {} if self.worker is None else self.worker.counters.as_dict()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, reason: str = "") -> None:
        if self._closed or os.getpid() != self._owner:
            return  # a forked copy of the trainer has no part in the job
        self._closed = True
        atexit.unregister(self.at_exit)
        error: BaseException | None = self._verdict.error
        broken = ""
        if self.worker is not None:
            error = self.worker.error or error
            self.worker.close()
        if error is not None:
            broken = f"it had an error: {error}".splitlines()[0]
        exchanges = -1 if self.worker is None else self.worker.step
        end_part(self.uplink, self.embedded, reason or broken, exchanges, stay_s=self.stay_s, notice_s=self.notice_s)
        for end in self.beside:
            end()
        if self.groups is not None:
            self.groups.close()

    def at_exit(self) -> None:
        """The end of a script that did not close: the exception that ended it is the reason that others hear."""
        error = getattr(sys, "last_value", None)
        self.close("" if error is None else f"{type(error).__name__}: {error}".splitlines()[0])

    def say(self, what: str) -> None:
        """A decision of before the first step."""
        self.decisions.append(f"step 0: {what}")
        log.warning("%s", what)

    def follow(self, worker: Worker) -> None:
        """From now on what the coordinator says of the others goes to this worker, and is kept for `explain`."""
        assert self.uplink is not None
        self.worker = worker

        def fail(error: CommError) -> None:
            self._verdict.fall(error)
            worker.latch(error)

        def left(peer: str, exchanges: int) -> None:
            if (missed := worker.ended.hear(peer, exchanges)) is not None:
                fail(missed)

        self.uplink.follow(fail, worker.stalled, left, worker.generation)

    def explain(self, error: BaseException) -> BaseException:
        """Who is to blame for it, as the coordinator knows soon."""
        return self._verdict.explain(error, self.uplink, notice_s=self.notice_s, verdict_s=self.verdict_s)


def connect(
    job: Job, device: torch.device, start: Start, *, plan: Any, config: Config, align: Sequence[torch.Tensor] = (),
    steps_locally: bool = False, whole: Job | None = None, must: Mapping[str, str] | None = None,
) -> Connection:
    """Joins the job that the environment names; all ranks call it together, inside `start`.

    `must`: what else is to be the same on all ranks.
    `whole`: this job and buffers that are not averaged here; a plan may be of either.
    """
    kernels.choose(config.backend)
    given = {"plan": plan_kind(plan), "optimizer": "given" if steps_locally else "not given"}
    met = start.meet(config, model=job.digest(), must=given | dict(must or {}))
    # A server child takes no more.
    config = msgspec.structs.replace(config, codec_threads=codec_threads(config, met.launch._replace(local_world=met.here)))
    kernels.threads(config.codec_threads)
    made = Connection()
    made.steps_locally = steps_locally
    made.auto = isinstance(plan, str) and plan == "auto"
    made.loss, made.max_loss = config.loss, config.max_loss or loss_budget.BUDGET
    made.notice_s = NOTICE_HEARTBEATS * config.heartbeat_s
    made.verdict_s, made.stay_s = config.dead_after_s + made.notice_s, config.deadline_s
    grouped, per_node = met.members is not None, met.per_node
    if met.members is not None:
        made.rank, made.world = met.members.rank, met.members.world
    if not grouped and not config.join:
        settled = _of(requested_plan.settle(plan, job, config, 1, 1), whole)
        # A mistake in it is one on a single process, too; how many nodes it is for is none.
        nodes = max((len(b.by_node) for b in settled.buckets), default=0)
        _check_plan(settled, job, nodes or 1, settled.ranks_per_node, device, steps_locally)
        if not isinstance(plan, Plan) or not settled.servers:
            return made
    try:
        if grouped:
            made.groups = Groups(per_node, config.deadline_s, device, met.members)
            align_tensors(align, made.groups, config.join_deadline_s)
        made.basis = requested_plan.basis(plan, made.say) if made.rank == 0 else None
        if met.note and made.rank == 0:
            made.say(met.note)
        nodes = made.world // per_node
        made.plan = _agree(lambda: _of(requested_plan.housed(
            requested_plan.settle(plan, job, config, made.world, per_node), made.basis, nodes, made.say), whole), made.groups)
        _check_plan(made.plan, job, made.world // per_node, per_node, device, steps_locally)
        if made.rank == 0 and (said := float64.told(job, nodes)):
            made.say(said)
        # Without servers, too: a broken collective does not say whose fault it was, the coordinator's heartbeats do.
        _join(made, job, _placed(config, met.address, made), per_node)
        made.follow(_worker(made, made.plan, job, device))
    except BaseException:
        made.close("failed to start")
        raise
    atexit.register(made.at_exit)
    return made


def _worker(made: Connection, plan: Plan, job: Job, device: torch.device, generation: int = 1) -> Worker:
    assert made.uplink is not None
    codecs = {b.id: codec_of(b, made.rank // plan.ranks_per_node) for b in plan.buckets}
    return Worker(
        job, plan, codecs, device, rank=made.rank, members=made.world, generation=generation, groups=made.groups,
        transport=made.uplink.transport, recycle=made.uplink.recycle, explain=made.explain,
    )


def switch(made: Connection, plan: Plan | None) -> None:
    """Goes over to another plan between two steps. All ranks call it together; rank 0's plan counts, others may give None.

    Codecs start afresh, but what residuals owe is paid under the new plan. On servers that holds for elements that stay on
    their server; what they owe on others is dropped. ValueError, and nothing changed, if the plan fits some rank ill. What
    breaks off once servers have been told ends the job: some may have gone over, others not.
    """
    old, groups = made.worker, made.groups
    if old is None or groups is None or made.uplink is None:
        raise ValueError("there is nobody to go over to another plan with")
    try:
        made.leaving()
        _go_over(made, old, groups, made.uplink, plan)
        made.entered()
    except CommError as error:
        old.latch(error)
        old.check()


def _go_over(made: Connection, old: Worker, groups: Groups, link: uplink.Uplink, plan: Plan | None) -> None:
    _check_between(old, groups)
    agreed = _agree(lambda: _given(plan), groups)
    servers = len(link.view.servers)
    with together(groups, "switch()"):
        if agreed.servers > servers:
            raise ValueError(f"plan: for {agreed.servers} servers, the job has {servers}")
        if made.local is not None and any(b.stale for b in agreed.buckets):
            raise ValueError("plan: has results that are a step late, behind local steps, which left the ranks' optimizers in "
                             "different states: make it without staleness")
        per_node = groups.ranks_per_node
        _check_plan(agreed, old.job, groups.world // per_node, per_node, old.device, made.steps_locally)
    new = _worker(made, agreed, old.job, old.device, old.generation + 1)
    told, undone = False, old.undone()
    try:
        groups.barrier()  # the last step is over on all ranks, so nothing is on its way to a server
        told = True
        with together(groups, "switch()"):
            for server in range(servers):
                if server % made.world == made.rank:
                    mine = {b.id: undone[b.id] for b in old.plan.buckets if b.server == server and b.id in undone}
                    link.send_plan(server, records.encode(agreed), new.generation, mine)
    except Exception as error:
        new.close()
        if told and not isinstance(error, CommError):
            raise CommError(f"the change of plans broke off: {error}") from error
        raise
    made.plan, made.basis = agreed, None
    hand_over(old, new)
    made.follow(new)
    old.close()


def _check_between(old: Worker, groups: Groups) -> None:
    """All ranks stand between the same two steps, and no error has latched."""
    with together(groups, "switch()"):
        old.check()
        if not old.begins():
            raise ValueError(f"step {old.step} is half announced: go over to another plan between two steps, behind backward() "
                             "and ahead of the next")
        old.drain()
    steps = [row[0] for row in gather(groups, [old.step])]
    if len(set(steps)) > 1:
        raise ValueError(f"ranks stand at steps {min(steps)} to {max(steps)}: all go over to another plan at the same one")


def _nothing() -> None:
    """Nobody has anything to do."""


def _given(plan: Plan | None) -> Plan:
    if plan is None:
        raise ValueError("plan: none given, allowed on rank 0: a Plan to go over to")
    return plan


def _of(plan: Plan, whole: Job | None) -> Plan:
    """A plan of the whole is one of the job, too."""
    return plan if whole is None else without_buffers(plan, whole)


def _check_plan(plan: Plan, job: Job, nodes: int, per_node: int, device: torch.device, steps_locally: bool) -> None:
    problems = planner.verify(plan, job) or unsuited(
        plan, nodes, per_node, cuda=device.type == "cuda", steps_locally=steps_locally)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"plan: {problems[0]}{more}")


def _agree(settle: Callable[[], Plan], groups: Groups | None) -> Plan:
    """Rank 0's plan, on every rank, or its reason for having none."""
    data = _from_rank_0(lambda: records.encode(planner.lower(settle())), groups)
    return records.decode(data, Plan, "plan of rank 0")


def _from_rank_0(make: Callable[[], bytes], groups: Groups | None, wait_s: float = 0.0) -> bytes:
    """What make() gives on rank 0, on every rank; or its reason for failing, raised on every rank.

    `wait_s`: of what is small and may take longer than a collective of a step.
    """
    if groups is None:
        return make()

    def share(data: bytes) -> bytes:
        return groups.members.tell(data, wait_s, "start")[0] if wait_s else groups.share_bytes(data)

    data = b""
    if groups.rank == 0:
        try:
            data = make()
        except (ValueError, CommError) as error:
            share(REFUSED + str(error).encode())
            raise
    data = share(data)
    if data.startswith(REFUSED):
        raise ValueError(f"rank 0: {data.removeprefix(REFUSED).decode()}")
    return data


def _join(made: Connection, job: Job, config: Config, per_node: int) -> None:
    """Starts the embedded servers where none were named, then joins and dials them."""
    assert made.plan is not None
    node, local = divmod(made.rank, per_node)
    address = config.join
    if not address:
        address, token = _start_embedded(made, config, per_node, node, local)
        config = msgspec.structs.replace(config, token=token)
    made.uplink = uplink.connect(address, messages.worker(
        job.digest(), made.rank, made.world, node=node, plan=records.encode(made.plan) if made.rank == 0 else b"",
        plan_digest=records.digest(made.plan),
    ), config)


def _placed(config: Config, address: str, made: Connection) -> Config:
    """Servers that listen on loopback serve one machine only: where ranks run on several, theirs listen on this address."""
    if not address or config.join or config.advertise or not is_loopback(config.bind):
        return config
    if made.rank == 0:
        made.say(f"servers of this node listen on {address}, this machine's address on the way to MASTER_ADDR; bind names "
                 "another")
    return msgspec.structs.replace(config, bind=address)


def _start_embedded(made: Connection, config: Config, per_node: int, node: int, local: int) -> tuple[str, str]:
    """Starts this node's `commlayer serve` processes: where the plan has its servers, else as the setting says.

    The coordinator's address, and the job's secret, which rank 0 makes and the group shares.
    """
    plan = made.plan
    assert plan is not None
    nodes = made.world // per_node
    config = msgspec.structs.replace(config, node=node)
    homes = plan.hosts or [number % nodes if config.servers == "each" else 0 for number in range(plan.servers)]
    mine = [number for number, home in enumerate(homes) if home == node] if local == 0 else []

    # Servers load codecs, a coordinator does not: where several start, it goes ahead alone and they start side by side. A port
    # that is set is for it and for a server in its process.
    alone = plan.servers > 1 and not config.port

    def first() -> bytes:
        number = mine.pop(0) if mine and not alone else None
        guarded = msgspec.structs.replace(config, token=config.token or secret.new())
        child = Embedded.start(guarded, workers=made.world, servers=plan.servers, number=number)
        made.embedded.append(child)
        return f"{child.control} {guarded.token}".encode()

    # The child has that long itself, and then says why it did not start.
    told = _from_rank_0(first, made.groups, config.join_deadline_s + HEARD_S).decode()
    address, _, token = told.partition(" ")
    config = msgspec.structs.replace(config, token=token)

    def start(number: int) -> None:
        made.embedded.append(Embedded.start(config, join=address, number=number))

    if mine:
        with ThreadPoolExecutor(len(mine), "commlayer-start") as starting:
            list(starting.map(start, mine))
    return address, token
