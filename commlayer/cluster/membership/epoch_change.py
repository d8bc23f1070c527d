"""Changes of members in a running job: decides who continues when workers die, leave, hang or join. Pure functions of the
state.

If at least `min_workers` workers are left, a new epoch starts with them, and servers close sums without the others. If fewer
are left, or some cannot continue without others, the death of a worker fails the job. Without `min_workers` every death fails
the job. New workers may join until the job has its largest number of workers, each under a rank that was never used before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from commlayer.cluster.calls.messages import (
    ANY,
    FINISHED,
    HeartbeatReply,
    Join,
    JoinReply,
    Overdue,
    PeerExit,
    find_incompatibility,
)
from commlayer.cluster.membership.membership import (
    Registration,
    State,
    evict,
    evict_workers,
    failure,
    find_conflict,
    over,
    site_missing,
    site_workers,
)
from commlayer.cluster.membership.sites import AdmissionState, PendingWait, too_many
from commlayer.errors import append_code, without_code
from commlayer.records import Epoch
from commlayer.transport.protocol import SERVER_BASE

MAX_FORMER = 64
"""Maximum number of departed workers whose registrations are kept after all others have switched to an epoch without them. A
departed worker that returns is sent the reason. The limit bounds the state of a job that sites leave and join for weeks."""
UNLESS = ", unless it is served with --min-workers"
"""Added to a reason for refusal only if the caller is a site, because `min_workers` has an effect only with sites."""


def next_epoch(state: State) -> State:
    """Starts an epoch with the remaining workers, if some of the present epoch's workers are gone and the others can continue.
    Otherwise returns the state unchanged.

    An epoch's generation is 1 plus the number of workers that were admitted or removed since epoch 1. Processes that know of
    the same changes therefore use the same generation.
    """
    if state.epoch is None or not state.min_workers or inelastic_workers(state):
        return state
    state = _without_broken_sites(state)
    epoch, workers = state.epoch, _workers(state)
    assert epoch is not None
    stay = tuple(m for m in epoch.members if workers[m.rank].present)
    if not state.min_workers <= len(stay) < len(epoch.members):
        return state
    epoch = msgspec.structs.replace(epoch, generation=epoch.generation + len(epoch.members) - len(stay), members=stay)
    places = {token: p if p.join.kind == "server" or p.present or p.removed_in else
              msgspec.structs.replace(p, removed_in=epoch.generation) for token, p in state.registrations.items()}
    return msgspec.structs.replace(state, epoch=epoch, registrations=_drop_old_registrations(places, _known_by_all(state)))


def _without_broken_sites(state: State) -> State:
    """Evicts the other workers of sites that have lost one: they exchange together. A worker that has finished is not lost,
    since the others may finish a moment later."""
    for lost in [p for p in _workers(state).values() if p.dead or p.left not in ("", FINISHED)]:
        if mates := [p.join.token for p in site_workers(state, lost) if p.present]:
            why = without_code(lost.dead or f"left the job: {lost.left}")
            state = evict(state, mates, f"its home ({lost.join.node_name}) has lost {lost.peer}: {why}",
                          silent=lost.silent)
    return state


def _drop_old_registrations(places: Mapping[str, Registration], known_generation: int) -> dict[str, Registration]:
    """Drops registrations of workers that left long ago. The last MAX_FORMER of them are kept."""
    former = sorted((p.removed_in, token) for token,
                    p in places.items() if 0 < p.removed_in <= known_generation)[:-MAX_FORMER]
    over = {token for _, token in former}
    return {token: p for token, p in places.items() if token not in over}


def record_overdue(state: State, token: str, report: Overdue | None) -> State:
    """Stores a server's report of sums that wait for contributions. Evicts workers that hang, if the others can continue.

    A worker is blamed only if it is missing in the earliest step for which any server waits. Without that step's sums no worker
    can contribute to a later step. Two successive reports are needed, because the server may not have read all contributions at
    the first.
    """
    place = state.registrations.get(token)
    if place is None or not place.present or place.join.kind != "server":
        return state
    before = place.overdue
    repeated = () if report is None or before is None or report.step != before.step else \
        tuple(rank for rank in report.missing if rank in before.missing)
    place = msgspec.structs.replace(place, overdue=report, hung=repeated)
    state = msgspec.structs.replace(state, registrations={**state.registrations, token: place})
    reports = [(p, p.overdue) for _, p in sorted(state.registrations.items()) if p.present and p.overdue is not None]
    if state.epoch is None or not reports:
        return state
    step = min(overdue.step for _, overdue in reports)
    reports = [(p, overdue) for p, overdue in reports if overdue.step == step]
    present = _present_ranks(state)
    late = present & {rank for _, overdue in reports for rank in overdue.missing}
    if not state.min_workers or inelastic_workers(state) or len(_present_ranks(state, active=True) - late) < state.min_workers:
        return state
    for server, overdue in reports:
        why = (f"was dropped: sent nothing for {overdue.limit_s:g} s while others waited in step {step} (reported by "
               f"{server.peer}): it hangs, or its machine is too slow for deadline_s")
        state = evict_workers(state, dict.fromkeys(late & {*server.hung}, why))
    return state


def hung_in_store(state: State, pending: Sequence[PendingWait], limit_s: float, ago_s: Mapping[int, float], patience_s: float
            ) -> dict[int, str]:
    """Finds workers for which others wait too long in the key-value store. Returns the reason by rank. The caller evicts a
    worker only if a later call returns that worker again.

    A blamed worker does not wait itself, and at least half of the workers that take part have waited for that worker for
    `limit_s`, or for their own limit if that is longer. While a sum waits on a server, the result is usually empty, because the
    worker missing in that sum may delay the others. The result is not empty if all workers except the blamed ones wait in the
    store.
    `ago_s`: maps a rank to the seconds since that worker itself last waited; it gets `patience_s` after that.
    """
    if state.epoch is None or not state.min_workers or not pending or inelastic_workers(state):
        return {}
    present, active = _present_ranks(state), _present_ranks(state, active=True)
    free = present - {rank for one in pending for rank in one.waited_s}
    # For each pending key: how long each of the present workers has waited, longest first.
    waits = [(one, sorted((one.waited_s[rank] for rank in active & one.waited_s.keys()), reverse=True))
             for one in pending if one.rank in free]
    half = (len(active) + 1) // 2
    waits = [(one, waited_s) for one, waited_s in waits if len(waited_s) >= half]
    if len(active - {one.rank for one, _ in waits}) < state.min_workers:
        return {}
    late = {}
    for one, waited_s in waits:
        most_s = max(limit_s, one.limit_s)
        if waited_s[half - 1] >= most_s and ago_s.get(one.rank, most_s) >= min(patience_s, most_s):
            late[one.rank] = (f"was dropped: {len(waited_s)} others waited {most_s:g} s for it (in a collective, a checkpoint "
                              "or a change of plans): it hangs, or its machine is too slow for deadline_s")
    summing = any(p.present and p.overdue is not None for p in state.registrations.values())
    return {} if summing and free - late.keys() else late


def admission(state: State, now: float = 0.0, noticed_s: float = math.inf, patience_s: float = 0.0, node: int = ANY
              ) -> AdmissionState:
    """Returns whether the running job admits sites, and if not, why. A worker counts as silent after `noticed_s`
    seconds without a sign of life; a silent worker is evicted after `patience_s`. `node`: the node of a site that asks itself;
    ANY: that of none."""
    epoch, workers = state.epoch, _workers(state)
    if epoch is None:
        return AdmissionState()
    seated = [workers[m.rank] for m in epoch.members]
    present, quiet = sum(p.present for p in seated), [p for p in seated if p.present and p.silent_s(now) > noticed_s]
    size = present + _count_registering(state, node)
    return msgspec.structs.replace(_closed(state, epoch, present, size), size=size, generation=epoch.generation,
                                   all_present=present == len(seated),
                                   retry_reason=_wait(state, seated, quiet, patience_s))


def _wait(state: State, seated: Sequence[Registration], silent: Sequence[Registration], patience_s: float) -> str:
    """Returns why a new site should ask again later; "" if it need not. `seated`: the epoch's workers; `silent`: those present
    that are silent."""
    if over(state):
        why = failure(state)
        return why and f"the job has ended ({without_code(why)}); the server is starting another one"
    present = [p for p in seated if p.present]
    lost = next((p for p in seated if not p.present and p.left != FINISHED), None)
    goes_on = state.min_workers and not inelastic_workers(state)
    if lost is not None and not (goes_on and len(present) >= state.min_workers):
        return f"the job is ending ({lost.peer}: {without_code(lost.dead or lost.left)}); the server will start another one"
    if silent and (len(silent) == len(present) or not goes_on or len(present) >= state.limit):
        names = ", ".join(f"{p.peer} on {p.join.node_name}" for p in silent)
        return f"the job is running, but {names} does not respond; a worker is dropped after {patience_s:g} s of silence"
    return ""


def _count_registering(state: State, node: int) -> int:
    """Returns the number of workers of sites that have registered some of their workers, but not yet all. `node`: a site that
    does not count."""
    epoch, workers = state.epoch, _workers(state)
    assert epoch is not None
    outside = [workers[rank] for rank in workers.keys() - {m.rank for m in epoch.members}]
    return sum({p.join.node: p.join.site_world for p in outside if p.present and p.join.node != node}.values())


def _closed(state: State, epoch: Epoch, present: int, size: int) -> AdmissionState:
    """Returns why the job admits no site; the reason is empty if it does."""
    reason, full = "", False
    if over(state):
        reason = "the job is over"
    elif not state.min_workers:
        reason = f"the job has begun with {len(epoch.members)} workers; a running job admits no new members{UNLESS}"
    elif inelastic_workers(state):
        reason = "the job has begun and admits no new members: " \
               f"{', '.join(inelastic_workers(state))} cannot continue after others leave"
    elif present < len(epoch.members):
        reason = f"the job is ending: {present} workers are left, and at least {state.min_workers} are needed (min_workers)"
    elif size >= state.limit:
        reason, full = f"the job is running with all its {state.limit} workers; it admits another when one has left", True
    return AdmissionState(reason, full=full)


def admit(state: State, request: Join, now: float) -> tuple[State, JoinReply]:
    """Registers a worker of the running job, or refuses it. The last worker of a site starts an epoch in which the site's
    workers are the last members."""
    epoch = state.epoch
    assert epoch is not None
    workers = _workers(state)
    first = workers[epoch.members[0].rank]
    differs = [f"{name} is {request.must_match.get(name, 'unknown')} here and {value} in the job; set the same on all ranks"
               for name, value in first.join.must_match.items() if request.must_match.get(name) != value]
    problem, closed = find_incompatibility(request, first.join.version), admission(state, node=request.node)
    if not problem and closed.closed_reason:
        why = closed.closed_reason.removesuffix("" if request.elastic else UNLESS)
        problem = append_code("E-JOB-FULL" if closed.full else "E-JOB-CLOSED", why)
    elif not problem:
        problem = too_many(request.site_world, state.limit, closed)
    if not problem and not (request.elastic and state.workers <= request.rank < SERVER_BASE):
        problem = append_code("E-JOB-CLOSED", "the job has begun and admits only processes of `commlayer join`")
    if not problem:
        problem = next(filter(None, (find_conflict(request, p) for p in workers.values())), "")
    if not problem and differs:
        problem = append_code("E-RANKS-DIFFER", differs[0])
    if problem:
        return state, JoinReply(error=f"worker on {request.label}: {problem}")
    place = Registration(msgspec.structs.replace(request, plan=b""), request.rank, now)
    state = msgspec.structs.replace(state, registrations={**state.registrations, request.token: place})
    site = [p for p in site_workers(state, place) if p.present]
    if len(site) < request.site_world:
        return state, JoinReply(rank=request.rank, missing=site_missing(state, place))
    epoch = msgspec.structs.replace(epoch, generation=epoch.generation + len(site),
                                    members=(*epoch.members, *(p.member for p in site)))
    return msgspec.structs.replace(state, epoch=epoch), JoinReply(rank=request.rank, epoch=epoch, plan=state.plan)


def inelastic_workers(state: State) -> list[str]:
    """Returns the names of the epoch's workers that cannot continue after other workers leave."""
    workers = _workers(state)
    return [] if state.epoch is None else [workers[m.rank].peer for m in state.epoch.members
                                           if not workers[m.rank].join.elastic]


def settled_generation(state: State) -> int:
    """Returns the generation of the newest epoch whose process groups, or later ones, all present workers use; 0 if one of them
    does not take part yet."""
    return min((p.active_generation for p in state.registrations.values() if p.present and p.join.kind == "worker"), default=0)


def _known_by_all(state: State) -> int:
    """Returns the generation up to which no present worker needs reports of workers that left."""
    return min((p.known_generation for p in state.registrations.values() if p.present and p.join.kind == "worker"), default=0)


def explain_end(state: State, pulse: HeartbeatReply) -> HeartbeatReply:
    """If too few workers are left, adds to each reported loss why the job does not continue."""
    if not (state.min_workers and state.epoch is not None and (pulse.failed or pulse.departed)) or inelastic_workers(state):
        return pulse
    workers = _workers(state)
    survivors = sum(workers[m.rank].present for m in state.epoch.members)
    if survivors >= state.min_workers:
        return pulse
    why = (f"; {survivors} {'worker is' if survivors == 1 else 'workers are'} left, "
           f"fewer than min_workers ({state.min_workers}): restart all from the last checkpoint")
    members = {f"worker {m.rank}" for m in state.epoch.members}

    def explain(gone: PeerExit) -> PeerExit:
        ours = gone.peer in members and gone.reason != FINISHED
        return msgspec.structs.replace(gone, reason=gone.reason + why) if ours else gone

    return msgspec.structs.replace(pulse, failed=tuple(map(explain, pulse.failed)),
                                   departed=tuple(map(explain, pulse.departed)))


def _present_ranks(state: State, *, active: bool = False) -> set[int]:
    """`active`: True: only workers that take part already."""
    workers = _workers(state)
    return set() if state.epoch is None else {m.rank for m in state.epoch.members if workers[m.rank].present
                                              and (workers[m.rank].active_generation or not active)}


def _workers(state: State) -> dict[int, Registration]:
    return {p.rank: p for p in state.registrations.values() if p.join.kind == "worker"}
