"""Switches a running job to another plan, between two steps, on all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from commlayer import records
from commlayer.cluster.collectives import Groups, all_or_none, gather
from commlayer.cluster.uplink import Uplink
from commlayer.engine.buckets import trim
from commlayer.engine.connection import JobContext
from commlayer.engine.plan_choice import OfferedPlan, bytes_of, check_plan, plan_in, stepping
from commlayer.engine.step import EpochChanged
from commlayer.engine.worker import Worker
from commlayer.errors import CommError, InvalidInput
from commlayer.records import Member, Plan, plan_of, with_updates


class _Told(Exception):
    """A switch broke off with `error` after some servers may have received the new plan. All ranks raise it at this point."""

    def __init__(self, error: CommError, plan: Plan) -> None:
        super().__init__(error)
        self.error, self.plan = error, plan


class _Entered(EpochChanged):
    """Members have gone, and the remaining ones have switched to the plan."""


def switch(context: JobContext, plan: Plan | None, *, by_itself: bool = False, requested: bool = False) -> None:
    """Switches to another plan between two steps. All ranks call it together; rank 0's plan counts, others may pass None.

    Codecs restart, but the new plan pays out old residuals. On servers that holds for elements that stay on their server, in
    the same unit; the rest of a server's residuals is dropped. If the plan does not fit some rank, all ranks raise ValueError
    and nothing changes.

    A failure after servers have received the plan ends the job, because only some of them may have switched. If members are
    lost, the remaining ones continue: before that point with the old plan, after it with the new one on all servers, in a new
    view. Both cases raise EpochChanged. If the script `requested` the switch, it is repeated where needed, and this
    function returns.

    `by_itself`: the script did not ask for this very plan, so its parts that cannot follow local steps are left out."""
    if context.worker is None or context.groups is None or context.uplink is None:
        raise InvalidInput("E-PLAN-SWITCH", "another plan needs other workers, and this job has none")
    again = False
    while True:
        before = context.uplink.view.members
        try:
            _all_go_over(context, plan, by_itself=by_itself, again=again)
            return
        except _Entered:
            if requested:
                return
            raise
        except EpochChanged:
            if not requested:
                raise
            assert context.members is not None
            context.members.between()
            plan, again = _of_those_left(plan, before, context.uplink.view.members), True


def _all_go_over(context: JobContext, plan: Plan | None, *, by_itself: bool, again: bool) -> None:
    """One attempt. `again`: rank 0 may be another worker than before, and without a plan."""
    assert context.groups is not None
    assert context.uplink is not None
    try:
        for act in context.catch_up:
            act()
        assert context.worker is not None
        if again and not gather(context.groups, [plan is not None])[0][0]:
            context.say("the new plan was lost with rank 0, the only rank that had it: keeping the current plan")
            return
        _go_over(context, context.worker, context.groups, context.uplink, plan, by_itself=by_itself)
        for hook in context.after_switch:
            hook()
        trim()
    except _Told as broken:
        try:
            context.broke(broken.error)
        except EpochChanged:
            assert context.members is not None
            context.members.between(broken.plan)
            for hook in context.after_switch:
                hook()
            raise _Entered from broken.error
    except CommError as error:
        context.broke(error)


def _of_those_left(plan: Plan | None, before: Sequence[Member], now: Sequence[Member]) -> Plan | None:
    """The plan for the remaining members, where it names a codec for each worker."""
    if plan is None or any(b.by_node and len(b.by_node) != len(before) for b in plan.buckets):
        return plan
    return plan_of(plan, [place for place, member in enumerate(before) if member in now])


def _go_over(
    context: JobContext, old: Worker, groups: Groups, link: Uplink, plan: Plan | None, *, by_itself: bool,
) -> None:
    offer = OfferedPlan(lambda: bytes_of(stepping(_given(plan), context.terms.requested)), context.rank)
    stands = _stand_alike(context, old, groups, len(offer.data))
    agreed = plan_in(offer.taken(groups.share_bytes(offer.data, stands[0].plan_nbytes)))
    note = ""
    if old.plan.steps_locally and not agreed.steps_locally and len({stand.memory for stand in stands}) > 1:
        agreed, note = _updates_still(agreed, by_itself=by_itself)
    servers = len(link.view.servers)
    with all_or_none(groups, "switch()"):
        if agreed.servers > servers:
            raise InvalidInput("E-PLAN-SWITCH", f"plan: for {agreed.servers} servers, the job has {servers}")
        if by_itself and context.terms.balanced and agreed.steps_locally and not old.plan.steps_locally:
            raise InvalidInput("E-PLAN-SWITCH",
                               "plan: has local steps, but a Controller adjusts shares from the times of averaged steps; only "
                               "a plan that the script requests may have them")
        if context.members is not None and (why := context.members.unfit(agreed)):
            raise InvalidInput("E-PLAN-SWITCH", f"plan: {why}")
        per_node = groups.ranks_per_node
        check_plan(agreed, old.job, groups.world // per_node, per_node, old.device, context.terms.forbids,
                   reachable=groups.members.reachable)
    for act in context.before_switch:
        act()
    if context.worker is not old:
        raise EpochChanged  # members were lost in an exchange of these callbacks
    new = context.worker_for(agreed, old.job, old.device, old.generation + 1)
    sent, undone = False, old.undone()
    try:
        if old.plan.steps_locally:
            groups.barrier()  # the last exchange has ended on all ranks: no message to a server is in flight
        sent = True
        with all_or_none(groups, "switch()"):
            for server in range(servers):
                if server % context.world == context.rank:
                    mine = {b.id: undone[b.id] for b in old.plan.buckets if b.server == server and b.id in undone}
                    link.send_plan(server, records.encode(agreed), new.generation, mine)
    except Exception as error:
        new.close()
        if sent and context.members is not None and isinstance(broken := error.__cause__ or error, CommError):
            raise _Told(broken, agreed) from error
        if sent and not isinstance(error, CommError):
            raise CommError(f"the switch to another plan failed: {error}") from error
        raise
    context.plan, context.terms.basis = agreed, None
    context.hand_on(old, new)
    context.follow(new)
    old.close()
    old.forget_states()
    if note:
        context.say(note)


class _Stand(NamedTuple):
    """A rank's state for the others, in one exchange, because each exchange costs a round trip of the link."""

    step: int
    taken: int
    """Local steps so far toward the next exchange."""
    plan_nbytes: int
    memory: int
    """A digest of the optimizer's state. Where it is equal, equal gradients keep ranks equal."""
    matched: int


def _stand_alike(context: JobContext, old: Worker, groups: Groups, plan_nbytes: int) -> list[_Stand]:
    """Checks that all ranks are between the same two steps, without an error, and with no message to a server in flight."""
    local, stepped = context.local, context.stepped
    with all_or_none(groups, "switch()", len(_Stand._fields)) as exchange:
        old.check()
        if not old.begins() and (local is None or not local.under_way):
            raise InvalidInput("E-PLAN-SWITCH",
                               f"step {old.step} is in progress: switch to another plan between two steps, after backward() "
                               "and before the next")
        old.drain()
        exchange.mine = [*_Stand(old.step, 0 if local is None else local.taken, plan_nbytes,
                             stepped.digest() if stepped is not None and local is not None else 0,
                             int(stepped is not None and stepped.matched))]
    stands = [_Stand(*row) for row in exchange.rows]
    context.matched = all(stand.matched for stand in stands)
    if len({(stand.step, stand.taken) for stand in stands}) > 1:
        steps = sorted(stand.step for stand in stands)
        what = f"steps {steps[0]} to {steps[-1]}" if steps[0] != steps[-1] else \
            f"local steps {min(stand.taken for stand in stands)} to {max(stand.taken for stand in stands)}"
        raise InvalidInput("E-PLAN-SWITCH", f"ranks are at {what}: all must switch to another plan at the same step")
    return stands


def _updates_still(plan: Plan, *, by_itself: bool) -> tuple[Plan, str]:
    """The same plan with coded updates, and a line for the log. ValueError if that is impossible for a plan that the script
    asked for."""
    late = any(b.stale for b in plan.buckets)
    if (late or plan.overlap) and not by_itself:
        what = "results that are a step late" if late else f"overlap={plan.overlap!r}"
        raise InvalidInput("E-PLAN-SWITCH",
                           f"plan: has {what} after local steps, which left the ranks' optimizers in different states: make it "
                           f"without {'staleness' if late else 'overlap'}")
    unpredicted = structs.replace(plan, step_s=0.0, free_s=0.0, steps=0.0, steps_high=0.0)
    return with_updates(unpredicted), (
        "the ranks' optimizers are in different states since they stepped locally, so changes of weights are still what is "
        "exchanged, now every step")


def _given(plan: Plan | None) -> Plan:
    if plan is None:
        raise InvalidInput("E-PLAN-SWITCH", "plan: none given, allowed on rank 0: the Plan to switch to")
    return plan
