"""Who goes on when workers die or leave: decisions as functions of a coordinator's state. Knows no clock, lock or socket.

A view is made of those who are left, as long as they are at least `min_workers`; how they go over to it is job/regroup.py's.
Where they are too few, or some cannot go on without others, a death is everyone's, as it is without `min_workers`.
"""

from __future__ import annotations

import msgspec

from commlayer.control.membership import Place, State
from commlayer.control.messages import FINISHED, Gone, Pulse


def regrouped(state: State) -> State:
    """With the view of those who are left, if somebody of the view is gone and they can go on."""
    view, workers = state.view, _workers(state)
    if view is None or not state.min_workers:
        return state
    stay = tuple(m for m in view.members if workers[m.rank].here)
    if not state.min_workers <= len(stay) < len(view.members) or unable(state):
        return state
    return msgspec.structs.replace(state, view=msgspec.structs.replace(view, generation=view.generation + 1, members=stay))


def unable(state: State) -> list[str]:
    """Workers of the view that cannot go on without others."""
    workers = _workers(state)
    return [] if state.view is None else [workers[m.rank].peer for m in state.view.members
                                          if not workers[m.rank].join.regroups]


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


def _workers(state: State) -> dict[int, Place]:
    return {p.rank: p for p in state.places.values() if p.join.kind == "worker"}
