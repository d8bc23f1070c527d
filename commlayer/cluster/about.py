"""The coordinator's reply to About, as a function of its state."""

from __future__ import annotations

from commlayer.cluster.membership import State
from commlayer.cluster.messages import ABOUT_NBYTES, PROTOCOL, About, Told, version
from commlayer.records import ServerInfo
from commlayer.transport import framing


def told(state: State, request: About, time_s: float) -> Told:
    """`time_s`: wall-clock time."""
    present = [place for place in state.places.values() if place.here]
    filler = b"" if state.view is not None else bytes(max(0, min(request.wanted, ABOUT_NBYTES)))
    return Told(version(), PROTOCOL, framing.VERSION, time_s, state.workers, sum(p.join.kind == "worker" for p in present),
                tuple(ServerInfo(p.rank, p.join.address, beside=p.join.beside, streams=p.join.streams)
                      for p in present if p.join.kind == "server"), state.view is not None,
                state.view.plan if state.view is not None else "", filler)
