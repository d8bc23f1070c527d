"""From one plan to another between two steps of a running job, on all ranks together. Knows no model; decides no plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from commlayer import records
from commlayer.cluster.all_or_none import gather, together
from commlayer.cluster.groups import Groups
from commlayer.cluster.uplink import Uplink
from commlayer.engine.agreed_plan import Offer, bytes_of, check_plan, plan_in
from commlayer.engine.connection import Connection
from commlayer.engine.idle_memory import trim
from commlayer.engine.step import Regroup
from commlayer.engine.ways import in_updates, stepping
from commlayer.engine.worker import Worker
from commlayer.errors import CommError, InvalidInput
from commlayer.records import Member, Plan, plan_of


class _Told(Exception):
    """It broke off with `error` when servers may have been told to go over, some of them. So all ranks stand there."""

    def __init__(self, error: CommError, plan: Plan) -> None:
        super().__init__(error)
        self.error, self.plan = error, plan


class _Entered(Regroup):
    """Members have gone, and who is left has gone over to the plan."""


def switch(made: Connection, plan: Plan | None, *, by_itself: bool = False, asked: bool = False) -> None:
    """Goes over to another plan between two steps. All ranks call it together; rank 0's plan counts, others may give None.

    Codecs start afresh, but what residuals owe is paid under the new plan. On servers that holds for elements that stay on
    their server, in the same unit; what else they owe is dropped. ValueError, and nothing changed, if the plan fits some rank
    ill. What breaks off once servers have been told ends the job: some may have gone over, others not. Where that is since
    members have gone, those who are left take all servers over to the new plan, with their view; before that they keep the old
    one. Regroup in both cases, or if it is `asked` for by the script, it is done anew. `by_itself`: nobody asked for just this
    plan, so what cannot be behind local steps is left out of it.
    """
    if made.worker is None or made.groups is None or made.uplink is None:
        raise InvalidInput("E-PLAN-SWITCH", "there is nobody to go over to another plan with")
    again = False
    while True:
        before = made.uplink.view.members
        try:
            _all_go_over(made, plan, by_itself=by_itself, again=again)
            return
        except _Entered:
            if asked:
                return
            raise
        except Regroup:
            if not asked:
                raise
            assert made.members is not None
            made.members.between()
            plan, again = _of_those_left(plan, before, made.uplink.view.members), True


def _all_go_over(made: Connection, plan: Plan | None, *, by_itself: bool, again: bool) -> None:
    """Once. `again`: rank 0 is another one, perhaps, and has no plan to give."""
    assert made.groups is not None
    assert made.uplink is not None
    try:
        for act in made.catch_up:
            act()
        assert made.worker is not None
        if again and not gather(made.groups, [plan is not None])[0][0]:
            made.say("the plan to go over to is gone with rank 0, which alone had it: the plan of before goes on")
            return
        _go_over(made, made.worker, made.groups, made.uplink, plan, by_itself=by_itself)
        for behind in made.after_switch:
            behind()
        trim()
    except _Told as told:
        try:
            made.broke(told.error)
        except Regroup:
            assert made.members is not None
            made.members.between(told.plan)
            for behind in made.after_switch:
                behind()
            raise _Entered from told.error
    except CommError as error:
        made.broke(error)


def _of_those_left(plan: Plan | None, before: Sequence[Member], now: Sequence[Member]) -> Plan | None:
    """A plan that names each worker's codec, for fewer."""
    if plan is None or any(b.by_node and len(b.by_node) != len(before) for b in plan.buckets):
        return plan
    return plan_of(plan, [place for place, member in enumerate(before) if member in now])


def _go_over(
    made: Connection, old: Worker, groups: Groups, link: Uplink, plan: Plan | None, *, by_itself: bool,
) -> None:
    offer = Offer(lambda: bytes_of(stepping(_given(plan), made.terms.asked)), made.rank)
    stands = _stand_alike(made, old, groups, len(offer.data))
    agreed = plan_in(offer.taken(groups.share_bytes(offer.data, stands[0].plan_nbytes)))
    said = ""
    if old.plan.steps_locally and not agreed.steps_locally and len({stand.memory for stand in stands}) > 1:
        agreed, said = _updates_still(agreed, by_itself=by_itself)
    servers = len(link.view.servers)
    with together(groups, "switch()"):
        if agreed.servers > servers:
            raise InvalidInput("E-PLAN-SWITCH", f"plan: for {agreed.servers} servers, the job has {servers}")
        if by_itself and made.terms.balanced and agreed.steps_locally and not old.plan.steps_locally:
            raise InvalidInput("E-PLAN-SWITCH",
                               "plan: has local steps, and a Controller moves shares by what averaged steps take: only a plan "
                               "that the script asks for takes them")
        if made.members is not None and (why := made.members.unfit(agreed)):
            raise InvalidInput("E-PLAN-SWITCH", f"plan: {why}")
        per_node = groups.ranks_per_node
        check_plan(agreed, old.job, groups.world // per_node, per_node, old.device, made.terms.forbids,
                   reachable=groups.members.reachable)
    for act in made.before_switch:
        act()
    if made.worker is not old:
        raise Regroup  # members have gone in what they exchanged there
    new = made.worker_for(agreed, old.job, old.device, old.generation + 1)
    told, undone = False, old.undone()
    try:
        if old.plan.steps_locally:
            groups.barrier()  # what was exchanged last is over on all ranks, so nothing is on its way to a server
        told = True
        with together(groups, "switch()"):
            for server in range(servers):
                if server % made.world == made.rank:
                    mine = {b.id: undone[b.id] for b in old.plan.buckets if b.server == server and b.id in undone}
                    link.send_plan(server, records.encode(agreed), new.generation, mine)
    except Exception as error:
        new.close()
        if told and made.members is not None and isinstance(broken := error.__cause__ or error, CommError):
            raise _Told(broken, agreed) from error
        if told and not isinstance(error, CommError):
            raise CommError(f"the change of plans broke off: {error}") from error
        raise
    made.plan, made.terms.basis = agreed, None
    made.hand_on(old, new)
    made.follow(new)
    old.close()
    old.forget_states()
    if said:
        made.say(said)


class _Stand(NamedTuple):
    """What a rank tells the others of itself, all at once: each exchange takes as long as a link is."""

    step: int
    taken: int
    """Of the local steps to the next exchange."""
    plan_nbytes: int
    memory: int
    """A digest of what its optimizer remembers: where that is the same, equal gradients keep ranks together."""
    matched: int


def _stand_alike(made: Connection, old: Worker, groups: Groups, plan_nbytes: int) -> list[_Stand]:
    """All ranks stand between the same two steps, no error has latched, and nothing is on its way to a server."""
    local, stepped = made.local, made.stepped
    with together(groups, "switch()", len(_Stand._fields)) as told:
        old.check()
        if not old.begins() and (local is None or not local.under_way):
            raise InvalidInput("E-PLAN-SWITCH",
                               f"step {old.step} is half announced: go over to another plan between two steps, behind "
                               "backward() "
                               "and ahead of the next")
        old.drain()
        told.mine = [*_Stand(old.step, 0 if local is None else local.taken, plan_nbytes,
                             stepped.digest() if stepped is not None and local is not None else 0,
                             int(stepped is not None and stepped.matched))]
    stands = [_Stand(*row) for row in told.rows]
    made.matched = all(stand.matched for stand in stands)
    if len({(stand.step, stand.taken) for stand in stands}) > 1:
        steps = sorted(stand.step for stand in stands)
        what = f"steps {steps[0]} to {steps[-1]}" if steps[0] != steps[-1] else \
            f"local steps {min(stand.taken for stand in stands)} to {max(stand.taken for stand in stands)}"
        raise InvalidInput("E-PLAN-SWITCH", f"ranks stand at {what}: all go over to another plan at the same one")
    return stands


def _updates_still(plan: Plan, *, by_itself: bool) -> tuple[Plan, str]:
    """The same with coded updates, and a line that says so. ValueError where that cannot be, but is what was asked for."""
    late = any(b.stale for b in plan.buckets)
    if (late or plan.overlap) and not by_itself:
        what = "results that are a step late" if late else f"overlap={plan.overlap!r}"
        raise InvalidInput("E-PLAN-SWITCH",
                           f"plan: has {what}, behind local steps, which left the ranks' optimizers in different states: make "
                           "it "
                           f"without {'staleness' if late else 'overlap'}")
    unpredicted = structs.replace(plan, step_s=0.0, free_s=0.0, steps=0.0, steps_high=0.0)
    return in_updates(unpredicted), (
        "the ranks' optimizers are in different states since they stepped locally, so changes of weights are still what is "
        "exchanged, now every step")


def _given(plan: Plan | None) -> Plan:
    if plan is None:
        raise InvalidInput("E-PLAN-SWITCH", "plan: none given, allowed on rank 0: a Plan to go over to")
    return plan
