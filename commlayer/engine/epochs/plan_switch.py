"""Switches a running job to another plan, between two steps, on all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from commlayer import records
from commlayer.cluster.calls.messages import MAX_PLAN_NBYTES
from commlayer.cluster.processes.collectives import Groups, all_or_none, gather
from commlayer.engine.buckets.bucket_layout import trim
from commlayer.engine.components import Component, ComponentOrder, Pending
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.job.plan_agreement import OfferedPlan, encode_lowered_plan, plan_in
from commlayer.engine.sync.sync_modes import with_modes
from commlayer.engine.worker.plan_handover import hand_over
from commlayer.engine.worker.worker import Worker
from commlayer.errors import CommError, InvalidInput
from commlayer.records import Member, Plan, group_by_site, plan_for_members, with_updates


def switch(context: DistributedJob, plan: Plan | None, *, by_itself: bool = False, requested: bool = False) -> None:
    """Switches to another plan between two steps. All ranks call it together; rank 0's plan is used, and other ranks can pass
    None.

    Codecs restart, but old residuals are sent under the new plan. A server keeps the residuals of elements that stay on this
    server in the same unit; other residuals of servers are dropped. If the plan does not fit some rank, all ranks raise
    ValueError, and the old plan continues, perhaps with a new outer step.

    If members are lost before servers receive the plan, the CommError is raised, which `drop_call` then handles; a switch that
    the script `requested` is repeated with the remaining ranks. From then on the remaining ranks complete the switch.

    `by_itself`: True if the script did not request exactly this plan. Parts of the plan that are impossible after local steps
    are then left out. If local steps end among the job's first steps, the optimizers restart instead, and the plan is used
    unchanged. Between two plans of local steps, remaining steps are then exchanged under the new plan; until then weights can
    differ between ranks.
    """
    former = context.uplink.epoch.members

    def prepare() -> _Prepared | None:
        members = context.uplink.epoch.members
        return _prepare(context, _plan_for_remaining(plan, former, members), by_itself=by_itself, again=members != former)

    prepared = context.retry_on_epoch_change(prepare, ends_job=True) if requested else prepare()
    if prepared is not None:
        _complete(context, prepared)


def _plan_for_remaining(plan: Plan | None, before: Sequence[Member], now: Sequence[Member]) -> Plan | None:
    """Returns the plan for the remaining members: where the plan names one codec per worker, the codecs of lost workers are
    removed."""
    if plan is None or now == before or any(b.by_node and len(b.by_node) != len(group_by_site(before)) for b in plan.buckets):
        return plan
    return plan_for_members(plan, before, now)


class _Prepared(NamedTuple):
    """A switch on which all ranks agree: the new plan's worker, and what servers have to know."""

    worker: Worker
    undone: dict[int, int]
    note: str
    restarts: bool
    """True: the optimizers lose their states, which differ between ranks."""


def _prepare(context: DistributedJob, plan: Plan | None, *, by_itself: bool, again: bool) -> _Prepared | None:
    """Agrees with all ranks on the plan, and completes exchanges. `again`: True for a repetition, in which rank 0 might be
    another worker than before, and have no plan; then returns None."""
    context.components.complete(Pending.DUE)
    if again and not gather(context.groups, [plan is not None])[0][0]:
        context.log_decision("the plan switch was cancelled: its proposer, the former rank 0, has left")
        return None
    old, groups = context.worker, context.groups
    offer = OfferedPlan(
        lambda: encode_lowered_plan(context.site.shards.cut(
            with_modes(_checked(plan), context.terms.requested), old.job,
            {*map(len, groups.sites), *context.members.joining_sizes})), context.rank)
    rows = _check_equal_rows(context, old, groups, len(offer.data), restarts=by_itself and context.can_restart_optimizer())
    agreed = plan_in(offer.taken(groups.share_bytes(offer.data, MAX_PLAN_NBYTES, "a plan", rows[0].plan_nbytes)))
    note, returns = "", old.plan.steps_locally and not agreed.steps_locally
    restarting = [row.memory == RESTARTS for row in rows]
    if returns and any(restarting) and not all(restarting):
        unlike = context.called(restarting.index(False))
        raise InvalidInput("E-PLAN-SWITCH", f"plan: it averages gradients, but the optimizer of {unlike} cannot restart: its "
                                            "state is older than the job's first steps")
    if returns and len({row.memory for row in rows}) > 1:
        agreed, note = _updates_still(agreed, by_itself=by_itself)
    # Under another automatic plan of local steps, the steps so far belong to its first exchange.
    if by_itself and agreed.steps_locally:
        context.withdraw()  # what waits to be sent does not delay the switch
        context.components.complete(Pending.SENT)
    else:
        context.components.complete(Pending.ALL_STEPS)
    with all_or_none(groups, "switch()"):  # after it no message to a server is in flight
        if agreed.steps_locally and context.norms_differ and context.matched:
            raise InvalidInput("E-SHARDED", "plan: it has local steps whose averages are scaled to a norm, which would differ "
                                            "in the last bit between sites of unlike sizes: pass LocalSteps(..., "
                                            "outer=OuterSGD()) to attach()")
        context.check_plan(agreed)
    if context.local is not None:  # from here on, no rank refuses
        context.local.end_early(old)
    new = context.worker_for(agreed, old.job, old.device, old.now.generation + 1)
    restarts = returns and all(restarting)
    if restarts and context.memory.has_optimizer_state:
        note = (f"the optimizers start again without a state: after {context.passes} local steps their states differ between "
                "ranks, and averaged gradients need equal ones")
    return _Prepared(new, context.all_undone(old.roll_back()), note, restarts)


def _complete(context: DistributedJob, prepared: _Prepared) -> None:
    """Sends the plan to the servers, and switches to it."""
    old, new = context.worker, prepared.worker
    try:
        _send(context, prepared)
    except BaseException:
        new.close()
        raise
    context.terms.basis = None
    hand_over(old, new, context.memory.gradient_effect, context.memory.rate, world=context.world,
              pending=() if context.local is None else context.local.pending_residuals.slices)
    context.follow(new)
    old.close()
    old.forget_states()
    if prepared.restarts:
        context.memory.restart()
    if prepared.note:
        context.log_decision(prepared.note)
    context.components.new_plan()
    trim()


def _send(context: DistributedJob, prepared: _Prepared) -> None:
    """Sends the plan to the servers. If members are lost before the plan is complete, the remaining members send the plan
    again. This has no effect on a server that has the plan. Any other failure ends the job, because only some servers might
    have switched."""
    old, new, link = context.worker, prepared.worker, context.uplink
    plan, former = new.plan, link.epoch.members

    def send() -> None:
        new.plan = _plan_for_remaining(plan, former, link.epoch.members) or plan
        try:
            with all_or_none(context.groups, "switch()"):
                for server in range(len(link.epoch.servers)):
                    if server % context.world == context.rank:
                        mine = {b.id: prepared.undone[b.id] for b in old.plan.buckets
                                if b.server == server and b.id in prepared.undone}
                        link.send_plan(server, records.encode(new.plan), new.now.generation, mine)
        except Exception as error:
            if isinstance(error, CommError) or isinstance(error.__cause__, CommError):
                raise
            failed = CommError(f"the switch to another plan failed: {error}")
            old.latch(failed)
            raise failed from error

    context.retry_on_epoch_change(send, ends_job=True)


class Recut(Component):
    """Switches a sharded job to a plan that is also cut for sites of another size, before they join."""

    order = ComponentOrder.CONTROLLER

    def __init__(self, context: DistributedJob) -> None:
        self._context = context

    def end_step(self) -> None:
        members = self._context.members
        plan, members.next_plan = members.next_plan, None
        if plan is not None:
            switch(self._context, plan, by_itself=True, requested=True)
            self._context.note_plan("members")

    def end_exchange(self, *, early: bool) -> None:
        if not early:
            self.end_step()


RESTARTS = -1
"""Stands for the digest of an optimizer state that may be dropped; no digest is negative."""


class _RankRow(NamedTuple):
    """State of a rank that all ranks compare before a switch. All values are in one row, because each exchange of rows takes a
    round trip of the link."""

    step: int
    taken: int
    """Number of local steps since the last exchange."""
    plan_nbytes: int
    memory: int
    """Digest of the optimizer's state, or RESTARTS. Ranks with equal digests stay equal under equal gradients."""


def _check_equal_rows(
    context: DistributedJob, old: Worker, groups: Groups, plan_nbytes: int, *, restarts: bool,
) -> list[_RankRow]:
    """Checks that all ranks are between the same two steps, without an error, and with no message to a server on its way.
    Returns the states of all ranks. `restarts`: True: the optimizer of this rank may restart."""
    local = context.local
    with all_or_none(groups, "switch()", len(_RankRow._fields)) as exchange:
        old.check()
        if old.begun and (local is None or not local.under_way):
            raise InvalidInput("E-PLAN-SWITCH",
                               f"step {old.step} is running: switch to another plan between two steps, after backward() and "
                               "before the next backward()")
        old.drain()
        memory = RESTARTS if restarts else 0 if local is None else context.memory.digest()
        exchange.mine = [*_RankRow(old.step, 0 if local is None else local.taken, plan_nbytes, memory)]
    rows = [_RankRow(*row) for row in exchange.rows]
    if len({(row.step, row.taken) for row in rows}) > 1:
        steps = sorted(row.step for row in rows)
        what = f"steps {steps[0]} to {steps[-1]}" if steps[0] != steps[-1] else \
            f"local steps {min(row.taken for row in rows)} to {max(row.taken for row in rows)}"
        raise InvalidInput("E-PLAN-SWITCH", f"ranks are at different steps ({what}): all ranks must switch to another plan "
                                            "after the same step")
    return rows


def _updates_still(plan: Plan, *, by_itself: bool) -> tuple[Plan, str]:
    """Returns the plan, changed to compress weight changes instead of gradients, and a line for the log. Raises ValueError if a
    plan that the script requested does not allow that."""
    late = any(b.stale for b in plan.buckets)
    if (late or plan.overlap) and not by_itself:
        what = "averages that are applied one step late" if late else f"overlap={plan.overlap!r}"
        raise InvalidInput("E-PLAN-SWITCH",
                           f"plan: it has {what}, which is not possible after local steps, because they left the ranks' "
                           f"optimizers in different states: make the plan without {'staleness' if late else 'overlap'}")
    unpredicted = structs.replace(plan, step_s=0.0, steps=0.0, steps_high=0.0)
    return with_updates(unpredicted), (
        "the optimizers of the ranks have different states after local steps, so ranks continue to exchange weight "
        "changes, now after every step")


def _checked(plan: Plan | None) -> Plan:
    if plan is None:
        raise InvalidInput("E-PLAN-SWITCH", "plan: got None on rank 0, but rank 0 must pass the Plan to which the job "
                                            "switches")
    return plan
