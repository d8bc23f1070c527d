"""Who goes on when workers die, leave, hang or join: decisions over a coordinator's state. Knows no clock, lock or socket.

A view is made of those who are left, as long as they are at least `min_workers`; how they go over to it is engine/regroup.py's.
Where they are too few, or some cannot go on without others, a death is everyone's, as it is without `min_workers`. While
workers are missing, others may come in their place, each under a number that nobody had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from commlayer.cluster.homes import Door
from commlayer.cluster.membership import Place, State, Taken, conflict, cut, failure, over
from commlayer.cluster.messages import FINISHED, Gone, Join, Overdue, Pulse, Seat, incompatible
from commlayer.cluster.unmet import Unmet
from commlayer.errors import coded, without_code
from commlayer.records import Member, View
from commlayer.transport.protocol import SERVER_BASE

FORMER = 64
"""So many who are gone keep their seats once all have gone over to a view without them, and hear why if they come back. A job
that homes leave and join for weeks keeps no more than these."""
UNLESS = ", unless it is served with --min-workers"
"""Which helps homes alone."""


def regrouped(state: State) -> State:
    """With the view of those who are left, if somebody of the view is gone and they can go on."""
    view, workers = state.view, _workers(state)
    if view is None or not state.min_workers:
        return state
    stay = tuple(m for m in view.members if workers[m.rank].here)
    if not state.min_workers <= len(stay) < len(view.members) or unable(state):
        return state
    view = msgspec.structs.replace(view, generation=view.generation + 1, members=stay)
    places = {token: p if p.join.kind == "server" or p.here or p.without else
              msgspec.structs.replace(p, without=view.generation) for token, p in state.places.items()}
    return msgspec.structs.replace(state, view=view, places=_kept(places, settled(state)))


def _kept(places: Mapping[str, Place], settled: int) -> dict[str, Place]:
    """Without those whom nobody asks for any more, but for the last of them."""
    former = sorted((p.without, token) for token, p in places.items() if 0 < p.without <= settled)[:-FORMER]
    over = {token for _, token in former}
    return {token: p for token, p in places.items() if token not in over}


def waited(state: State, token: str, said: Overdue | None, now: float, patience_s: float) -> State:
    """As a server says now of sums that wait; without the workers that hang, if the others can go on.

    Blamed are those alone who are missing in the earliest step in which anybody waits, whichever server says it: whoever lacks
    that step's sums can have no part in a later one. A server must say it twice: what it had yet to read then is added now.
    `patience_s`: for so long the first of the view may keep its part back when all others have sent theirs.
    """
    place = state.places.get(token)
    if place is None or not place.here or place.join.kind != "server":
        return state
    before = place.overdue
    again = () if said is None or before is None or said.step != before.step else \
        tuple(rank for rank in said.missing if rank in before.missing)
    place = msgspec.structs.replace(place, overdue=said, hangs=again)
    state = msgspec.structs.replace(state, places={**state.places, token: place})
    state = msgspec.structs.replace(state, held=_held(state, now))
    workers = _workers(state)
    for rank, why in _hung(state, now - patience_s).items():
        state = cut(state, [workers[rank].join.token], why)
    return state


class _Late(NamedTuple):
    """Those of the view who are missing in the earliest step in which anybody waits, and who says so."""

    step: int
    ranks: set[int]
    said: list[tuple[Place, Overdue]]


def _late(state: State) -> _Late | None:
    told = [(p, p.overdue) for _, p in sorted(state.places.items()) if p.here and p.overdue is not None]
    if state.view is None or not told:
        return None
    step = min(overdue.step for _, overdue in told)
    said = [(p, overdue) for p, overdue in told if overdue.step == step]
    return _Late(step, _there(state) & {rank for _, overdue in said for rank in overdue.missing}, said)


def _first(state: State) -> int | None:
    """Who may keep its part of a step back now: while somebody joins the first of the view does, until all have come to that
    step (engine/regroup.py)."""
    view = state.view
    joining = view is not None and settled(state) < view.generation and any(m.rank >= state.workers for m in view.members)
    return view.members[0].rank if view is not None and joining else None


def _held(state: State, now: float) -> tuple[int, int, float] | None:
    """Whether that one alone is missing there, and since when. Then all have come, and have only to tell each other so."""
    late, first, before = _late(state), _first(state), state.held
    if late is None or first is None or late.ranks != {first}:
        return None
    return before if before is not None and before[:2] == (late.step, first) else (late.step, first, now)


def _hung(state: State, until: float) -> dict[int, str]:
    """By rank: who lives, does nothing, and is done without, and why. Who holds all others up since `until` does, too."""
    late = _late(state)
    if late is None or not state.min_workers or unable(state):
        return {}
    ranks = late.ranks
    if state.held is None or state.held[2] > until:
        ranks = ranks - {_first(state)}
    if len(_there(state)) - len(ranks) < state.min_workers:
        return {}
    return {rank: f"was dropped: sent nothing for {overdue.limit_s:g} s while others waited (step {late.step}, said by "
                  f"{p.peer}): it hangs, or its machine is far too slow for deadline_s"
            for p, overdue in reversed(late.said) for rank in p.hangs if rank in ranks}


def awaited(state: State, meetings: Sequence[Unmet], limit_s: float, ago_s: Mapping[int, float], patience_s: float
            ) -> dict[int, str]:
    """By rank: who lets others wait where homes meet, and is done without if it does so when this is asked again; and why.

    That is who waits for nobody itself, and for whom at least half of those who are here have waited for `limit_s`, or as long
    as they may if that is longer. While a sum waits anywhere, who is missing in that holds up all the others, unless all
    but those to be blamed wait where homes meet: then nobody waits in it.
    `ago_s`: how long ago each has waited itself, where it has. Others held it up until then, so it has `patience_s` to come.
    """
    if state.view is None or not state.min_workers or not meetings or unable(state):
        return {}
    there = _there(state)
    free = there - {rank for one in meetings for rank in one.waited_s}
    # By name: for how long each of those who are here has waited, the longest first.
    waits = [(one, sorted((one.waited_s[rank] for rank in there & one.waited_s.keys()), reverse=True))
             for one in meetings if one.rank in free]
    half = (len(there) + 1) // 2
    waits = [(one, waited_s) for one, waited_s in waits if len(waited_s) >= half]
    if len(there) - len({one.rank for one, _ in waits}) < state.min_workers:
        return {}
    found = {}
    for one, waited_s in waits:
        most_s = max(limit_s, one.limit_s)
        if waited_s[half - 1] >= most_s and ago_s.get(one.rank, most_s) >= min(patience_s, most_s):
            found[one.rank] = (f"was dropped: did not come for {most_s:g} s to where {len(waited_s)} others waited (a "
                               "collective, a save, a change of plans): it hangs, or its machine is far too slow for "
                               "deadline_s")
    summing = any(p.here and p.overdue is not None for p in state.places.values())
    return {} if summing and free - found.keys() else found


def door(state: State, now: float = 0.0, noticed_s: float = math.inf, patience_s: float = 0.0) -> Door:
    """Of the job, once it runs. A worker that has not been heard for `noticed_s` is silent, and dropped after `patience_s`."""
    view, workers = state.view, _workers(state)
    if view is None:
        return Door()
    seated = [workers[m.rank] for m in view.members]
    there = sum(p.here for p in seated)
    return msgspec.structs.replace(_shut(state, view, there), there=there, generation=view.generation,
                                   all_here=there == len(seated), wait=_wait(state, seated, now - noticed_s, patience_s))


def _wait(state: State, seated: Sequence[Place], noticed: float, patience_s: float) -> str:
    """Why a home that comes should ask again. `seated`: the view's workers; `noticed`: who was heard last before is silent."""
    if over(state):
        why = failure(state)
        return why and f"the job has ended ({without_code(why)}); the server begins another one"
    here = [p for p in seated if p.here]
    lost = next((p for p in seated if not p.here and p.left != FINISHED), None)
    goes_on = state.min_workers and not unable(state)
    if lost is not None and not (goes_on and len(here) >= state.min_workers):
        return f"the job is ending ({lost.peer}: {without_code(lost.dead or lost.left)}); the server begins another one"
    silent = [p for p in here if p.seen_s < noticed]
    if silent and (len(silent) == len(here) or not goes_on or len(here) >= state.workers):
        names = ", ".join(f"{p.peer} on {p.join.certificate or p.join.name}" for p in silent)
        return f"the job runs, but is without {names} now; a worker is dropped after {patience_s:g} s of silence"
    return ""


def _shut(state: State, view: View, there: int) -> Door:
    """Why the job takes no home in, if it does not."""
    shut, full = "", False
    if over(state):
        shut = "the job is over"
    elif not state.min_workers:
        shut = f"the job has begun with {len(view.members)} workers; a running job takes no new members{UNLESS}"
    elif unable(state):
        shut = f"the job has begun, and takes no new members, since {', '.join(unable(state))} cannot change with others"
    elif there < len(view.members):
        shut = f"the job is ending: {there} workers are left, and fewer than {state.min_workers} do not go on (min_workers)"
    elif there >= state.workers:
        shut, full = f"the job runs and has its {state.workers} workers; one is taken in when another is gone", True
    return Door(shut, full=full)


def join(state: State, request: Join, now: float) -> Taken:
    """Of a worker who comes when the job runs: makes a view with it behind all others, or refuses it."""
    view = state.view
    assert view is not None
    workers = _workers(state)
    first = workers[view.members[0].rank]
    differs = [f"{name} is {request.alike.get(name, 'unknown')} here, and {value} in the job; allowed: the same on all ranks"
               for name, value in first.join.alike.items() if request.alike.get(name) != value]
    problem, closed = incompatible(request, first.join.version), door(state)
    if not problem and closed.shut:
        why = closed.shut.removesuffix("" if request.regroups else UNLESS)
        problem = coded("E-JOB-FULL" if closed.full else "E-JOB-CLOSED", why)
    if not problem and not (request.regroups and state.workers <= request.rank < SERVER_BASE):
        problem = coded("E-JOB-CLOSED", "the job has begun, and takes in homes alone, by `commlayer launch`")
    if not problem:
        problem = next(filter(None, (conflict(request, p) for p in workers.values())), "")
    if not problem and differs:
        problem = coded("E-RANKS-DIFFER", differs[0])
    if problem:
        return Taken(state, Seat(error=f"worker on {request.certificate or request.name} (pid {request.pid}): {problem}"))
    member = Member(request.rank, request.node, request.name, request.pid, request.certificate)
    view = msgspec.structs.replace(view, generation=view.generation + 1, members=(*view.members, member))
    place = Place(msgspec.structs.replace(request, plan=b""), request.rank, now)
    places = {**state.places, request.token: place}
    return Taken(msgspec.structs.replace(state, places=places, view=view), Seat(rank=request.rank, view=view, plan=state.plan))


def unable(state: State) -> list[str]:
    """Workers of the view that cannot go on without others."""
    workers = _workers(state)
    return [] if state.view is None else [workers[m.rank].peer for m in state.view.members
                                          if not workers[m.rank].join.regroups]


def settled(state: State) -> int:
    """Generation of the newest view that all workers who are here have gone over to. 0 for none."""
    return min((p.in_force for p in state.places.values() if p.here and p.join.kind == "worker"), default=0)


def explained(state: State, pulse: Pulse) -> Pulse:
    """With the reason why those who are left do not go on, where that is their number."""
    if not (state.min_workers and state.view is not None and (pulse.lost or pulse.left)) or unable(state):
        return pulse
    workers = _workers(state)
    left = sum(workers[m.rank].here for m in state.view.members)
    if left >= state.min_workers:
        return pulse
    why = (f"; {left} {'worker is' if left == 1 else 'workers are'} left, and fewer than {state.min_workers} do not go on "
           "(min_workers): start all again from the last save")
    members = {f"worker {m.rank}" for m in state.view.members}

    def said(gone: Gone) -> Gone:
        ours = gone.peer in members and gone.reason != FINISHED
        return msgspec.structs.replace(gone, reason=gone.reason + why) if ours else gone

    return msgspec.structs.replace(pulse, lost=tuple(map(said, pulse.lost)), left=tuple(map(said, pulse.left)))


def _there(state: State) -> set[int]:
    """Workers of the view who are here."""
    workers = _workers(state)
    return set() if state.view is None else {m.rank for m in state.view.members if workers[m.rank].here}


def _workers(state: State) -> dict[int, Place]:
    return {p.rank: p for p in state.places.values() if p.join.kind == "worker"}
