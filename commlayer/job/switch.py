"""From one plan to another between two steps of a running job, on all ranks together. Knows no model; decides no plan."""

from __future__ import annotations

from commlayer import records
from commlayer.control.uplink import Uplink
from commlayer.errors import CommError
from commlayer.job.agreed_plan import agreed_plan, check_plan
from commlayer.job.connection import Connection
from commlayer.job.ways import stepping
from commlayer.records import Plan
from commlayer.runtime.plan_handover import hand_over
from commlayer.runtime.worker import Worker
from commlayer.transport.all_or_none import gather, together
from commlayer.transport.groups import Groups


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
        for act in made.before_switch:
            act()
        _go_over(made, old, groups, made.uplink, plan)
        for act in made.after_switch:
            act()
    except CommError as error:
        old.latch(error)
        old.check()


def _go_over(made: Connection, old: Worker, groups: Groups, link: Uplink, plan: Plan | None) -> None:
    _check_between(old, groups)
    agreed = agreed_plan(lambda: stepping(_given(plan), made.asked), groups)
    servers = len(link.view.servers)
    with together(groups, "switch()"):
        if agreed.servers > servers:
            raise ValueError(f"plan: for {agreed.servers} servers, the job has {servers}")
        if made.local is not None and any(b.stale for b in agreed.buckets):
            raise ValueError("plan: has results that are a step late, behind local steps, which left the ranks' optimizers in "
                             "different states: make it without staleness")
        per_node = groups.ranks_per_node
        check_plan(agreed, old.job, groups.world // per_node, per_node, old.device, made.forbids)
    new = made.worker_for(agreed, old.job, old.device, old.generation + 1)
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


def _given(plan: Plan | None) -> Plan:
    if plan is None:
        raise ValueError("plan: none given, allowed on rank 0: a Plan to go over to")
    return plan
