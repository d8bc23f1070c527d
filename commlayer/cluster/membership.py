"""Who takes part: decisions as functions of (state, request, now). Knows no clock, lock or socket.

A seat belongs to one process, known by its token. Until everyone is in, a seat whose process falls silent is cleared, so that
a restarted one can take it; from then on a silent process is dead for good and the others are told.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from commlayer.cluster.messages import (
    ANY,
    FINISHED,
    Gone,
    Heartbeat,
    Join,
    Overdue,
    Pulse,
    Seat,
    digest_of,
    dropped_by,
    incompatible,
    named_at,
    names,
)
from commlayer.errors import coded, one_line, without_code
from commlayer.records import Member, Record, ServerInfo, View
from commlayer.transport.protocol import SERVER_BASE

PAUSE_S = 2.0
"""A longer gap between two ticks means that the coordinator itself was stopped, so silence in it is nobody's fault."""

LISTED = 8
"""How many of those who are missing are named."""


class Place(Record, frozen=True):
    """A taken seat: the request it was given for, when its process was last heard, and why it is gone."""

    join: Join
    rank: int
    seen_s: float
    dead: str = ""
    left: str = ""
    exchanges: int = -1
    """How many it had made when it left."""
    missed_by: tuple[str, ...] = ()
    """Tokens of those whose data connection with it was ended by its machine."""
    parted: bool = False
    """A server says that it has closed its data connection in order."""
    blames: str = ""
    """Of one that has left because of another that is here: that one, until it is heard again."""
    in_force: int = 0
    """Of a worker: generation of the view that it has gone over to, as it says."""
    without: int = 0
    """Of a worker that is gone: generation of the first view without it; 0 for none (regrouping.py)."""
    overdue: Overdue | None = None
    """Of a server: what it said last of sums that wait, and"""
    hangs: tuple[int, ...] = ()
    """who was missing in the same step already when it was heard before (regrouping.py)."""

    @property
    def here(self) -> bool:
        return not self.dead and not self.left

    @property
    def peer(self) -> str:
        return f"{self.join.kind} {self.rank}"


class State(Record, frozen=True):
    """All that the coordinator knows. `workers` is 0 until somebody says how many there are."""

    workers: int
    servers: int
    places: Mapping[str, Place] = msgspec.field(default_factory=dict)
    """By token."""
    view: View | None = None
    plan: bytes = b""
    ticked_s: float | None = None
    refused: tuple[tuple[str, str], ...] = ()
    """Peer and reason, so that those who wait learn why someone is missing."""
    min_workers: int = 0
    """While so many workers are left, they go on without the others (regrouping.py). 0: all must stay."""
    held: tuple[int, int, float] | None = None
    """A step, the worker whom alone all others wait for there while somebody joins, and since when (regrouping.py)."""


class Taken(NamedTuple):
    """A decision: the state after it and what the asker is told."""

    state: State
    reply: Seat


def join(state: State, request: Join, now: float) -> Taken:
    """Seats the process, refuses it, or answers one that is seated. The last one in makes the view of generation 1."""
    place = state.places.get(request.token)
    if place is not None:
        if not place.here:
            return Taken(state, Seat(error=f"{place.peer} is no longer of this job: {place.dead or place.left}"))
        # A server that takes up its seat may do so with another certificate than the one that it was given it for.
        said = msgspec.structs.replace(place.join, certificate=request.certificate, serial=request.serial)
        state = _lives(_with(state, msgspec.structs.replace(place, seen_s=now, join=said)), place)
        return Taken(state, _seat(state, place))
    problem = _problem(state, request)
    if problem:
        asked = request.kind if request.rank == ANY else f"{request.kind} {request.rank}"
        line = f"{asked} on {_who(request)}: {problem}"
        kept = tuple(entry for entry in state.refused if entry[0] != asked)[-7:]
        return Taken(msgspec.structs.replace(state, refused=(*kept, (asked, without_code(problem)))), Seat(error=line))
    if request.rank in (0, ANY) and request.plan_digest and not request.plan:
        return Taken(state, Seat(missing=missing(state), plan_wanted=True))
    rank = request.rank if request.rank != ANY else _free(state, request.kind)
    place = Place(request, rank, now)
    workers = state.workers or request.world if request.kind == "worker" else state.workers
    state = _completed(msgspec.structs.replace(_with(state, place), workers=workers))
    return Taken(state, _seat(state, place))


def heartbeat(state: State, token: str, now: float, said: Heartbeat | None = None) -> tuple[State, Pulse]:
    """Notes that the process lives and tells it who does not. `said`: what else it tells."""
    place = state.places.get(token)
    if place is None:
        return state, Pulse(stranger=True)
    parent = said.parent if said is not None else ""
    if place.here and parent == "ended" and state.view is not None:
        place = msgspec.structs.replace(place, dead=f"{_silent(state, place, now)}; its machine says that it has ended")
        state = _with(state, place)
    elif place.here:
        in_force = max(place.in_force, 0 if said is None or parent else said.in_force)
        place = msgspec.structs.replace(place, seen_s=place.seen_s if parent else now, in_force=in_force)
        state = _with(state, place) if parent else _lives(_with(state, place), place)
    if said is not None and not parent:
        state = _missed(state, token, said.missed)
        if place.join.kind == "server":
            state = _parted(state, said.ended)
            state = _dropped(state, place, said.dropped) if place.here else state
    # Whoever has gone over to a view without somebody waits for nothing of that one. A server never waits for anybody itself.
    known = said.generation if said is not None and place.join.kind == "server" else place.in_force
    others = [p for t, p in sorted(state.places.items()) if t != token and not 0 < p.without <= known]
    lost = tuple(Gone(p.peer, p.dead) for p in others if p.dead and in_view(state, p))
    left = tuple(Gone(p.peer, p.left, p.exchanges) for p in others if p.left and not unjudged(state, p))
    newer = state.view is not None and said is not None and 0 < said.generation < state.view.generation
    return state, Pulse(dead=place.dead, lost=lost, left=left, over=over(state), failed=bool(failure(state)),
                        view=state.view if newer else None)


def in_view(state: State, place: Place) -> bool:
    """Whether it is of the newest view, where there is any, or serves."""
    return place.join.kind == "server" or state.view is None or any(m.rank == place.rank for m in state.view.members)


def leave(state: State, token: str, reason: str, exchanges: int = -1) -> State:
    """An orderly end, or an error's. Before the view is complete it frees the seat."""
    place = state.places.get(token)
    if place is None or not place.here:
        return state
    if state.view is None:
        return _without(state, {token})
    named = [p for t, p in state.places.items() if t != token and names(reason, p.peer)]
    first = min(named, key=lambda p: named_at(reason, p.peer), default=None)
    blames = "" if first is None else first.peer if first.here else first.blames
    return _with(state, msgspec.structs.replace(place, left=reason or FINISHED, exchanges=exchanges, blames=blames))


def unjudged(state: State, place: Place) -> bool:
    """Whether it has left because of one of whom nobody knows yet whether that is lost, or only the way between the two: it is
    told of once that one is heard again or dead. Else the first to miss somebody would be named in that one's place."""
    return bool(place.blames) and any(p.here and p.peer == place.blames for p in state.places.values())


def _lives(state: State, place: Place) -> State:
    """It is heard, so whoever has left because of it has left for a reason of its own."""
    for p in list(state.places.values()):
        if p.blames == place.peer:
            state = _with(state, msgspec.structs.replace(p, blames=""))
    return state


def _missed(state: State, token: str, peers: tuple[str, ...]) -> State:
    """As that process sees them now."""
    for p in list(state.places.values()):
        if (p.peer in peers) != (token in p.missed_by):
            others = tuple(t for t in p.missed_by if t != token)
            state = _with(state, msgspec.structs.replace(p, missed_by=(*others, token) if p.peer in peers else others))
    return state


def _parted(state: State, peers: tuple[str, ...]) -> State:
    for p in [p for p in state.places.values() if p.here and not p.parted and p.peer in peers]:
        state = _with(state, msgspec.structs.replace(p, parted=True))
    return state


def _dropped(state: State, server: Place, gone: tuple[Gone, ...]) -> State:
    """A server's word: no other process sees what came by its connections, and no worker's word counts against another."""
    for one in gone:
        tokens = [t for t, p in state.places.items() if p.join.kind == "worker" and p.peer == one.peer]
        state = cut(state, tokens, dropped_by(server.peer, one_line(one.reason)))
    return state


def tick(state: State, now: float, dead_after_s: float, patience_s: float = 0.0, ended_after_s: float = 0.0) -> State:
    """Judges silence. Call it a few times per second.

    A process whose machine has ended a connection for it is dead after `dead_after_s`. One that is silent or stopped may come
    back (a cut link, a laptop that sleeps): it has `patience_s`, if that is longer. Where servers say of all who
    are left that they have ended in order, they have, once they are silent for `ended_after_s`: nobody was there to hear
    them leave.
    """
    paused_s, places = stood_still_s(state, now), state.places
    if paused_s:
        places = {t: msgspec.structs.replace(p, seen_s=min(now, p.seen_s + paused_s)) for t, p in places.items()}
    state = msgspec.structs.replace(state, places=places, ticked_s=now)
    silent = {t: p for t, p in places.items() if p.here and now - p.seen_s >= dead_after_s}
    if state.view is None:
        return _without(state, silent) if silent else state
    workers = {t: p for t, p in places.items() if p.here and p.join.kind == "worker"}
    if all(p.parted and now - p.seen_s >= ended_after_s for p in workers.values()):
        for t, p in workers.items():
            state = _with(state, msgspec.structs.replace(p, left=FINISHED))
            silent.pop(t, None)
    silent = {t: p for t, p in silent.items()
              if (p.missed_by and not p.join.returns) or now - p.seen_s >= patience_s}
    for p in silent.values():
        state = _with(state, msgspec.structs.replace(p, dead=_silent(state, p, now)))
    return state


def stood_still_s(state: State, now: float) -> float:
    """Seconds since the last tick, if so many that this process itself was stopped: nobody was silent in them. Otherwise 0."""
    gap_s = 0.0 if state.ticked_s is None else now - state.ticked_s
    return gap_s if gap_s > PAUSE_S else 0.0


def _silent(state: State, p: Place, now: float) -> str:
    return f"no heartbeat for {now - p.seen_s:.1f} s from {_where(state, p)}: it was killed, stopped or cut off"


def ended(state: State, name: str, pid: int) -> State:
    """The process of that machine has ended without a word: its seats are dead at once."""
    for p in state.places.values():
        if p.here and (p.join.name, p.join.pid) == (name, pid) and state.view is not None:
            why = f"its process {_who(p.join)} has ended without leaving the job"
            state = _with(state, msgspec.structs.replace(p, dead=why))
    return state


def cut(state: State, tokens: Iterable[str], why: str) -> State:
    """These may take part no longer: their seats are free, or dead where the job has begun."""
    for token in tokens:
        place = state.places.get(token)
        if place is not None and place.here:
            state = _without(state, {token}) if state.view is None else _with(state, msgspec.structs.replace(place, dead=why))
    return state


def over(state: State) -> bool:
    """The job began and no worker is left in it."""
    return state.view is not None and not any(p.here for p in state.places.values() if p.join.kind == "worker")


def failure(state: State) -> str:
    """Of a job that is over: why it ended before its last workers had finished; "" if they have."""
    if state.view is None or not over(state):
        return ""
    of = {m.rank for m in state.view.members}
    ends = [p for p in state.places.values() if p.join.kind == "worker" and p.rank in of and p.left != FINISHED]
    first = min(ends, key=lambda p: (not p.dead, bool(p.blames)), default=None)  # its cause, and not who failed with it
    return "" if first is None else f"{first.peer}: {first.dead or f'left the job: {first.left}'}"


def empty(state: State) -> bool:
    """The job is over and its servers have left too: nobody will ask again."""
    return over(state) and not any(p.here for p in state.places.values())


def missing(state: State) -> str:
    """Who has not joined yet, and why if that is known; empty when all are in."""
    parts = []
    for kind, total, one in (("worker", state.workers, "rank"), ("server", state.servers, "server")):
        here = _ranks(state, kind)
        absent = total - len(here)
        if absent or (kind == "worker" and not total):
            first = itertools.islice((rank for rank in range(total) if rank not in here), LISTED)
            names = f"; missing: {one}{'s' if absent > 1 else ''} {_listed(first, absent)}" if absent else ""
            parts.append(f"{len(here)} of {total or '?'} {kind}{'' if total == 1 else 's'} joined{names}")
    seated = {p.peer for p in state.places.values()}
    parts += [f"{asked} was refused: {problem}" for asked, problem in state.refused if parts and asked not in seated]
    return "; ".join(parts)


def _problem(state: State, request: Join) -> str:
    """Why the request cannot be met, or an empty string."""
    if problem := incompatible(request, next((p.join.version for p in state.places.values()), "")):
        return problem
    if state.view is not None:
        return coded("E-JOB-CLOSED", f"the job has begun with {len(state.view.members)} workers; a running job takes no new "
                     "members")
    if request.kind == "server" and request.dials_only:
        return coded("E-CERTIFICATE-USE", f"{request.certificate} was made with --dials-only, so it may not serve: name "
                     f"another node's keys, or make them with `commlayer keys add {request.certificate} --again`")
    total = state.servers
    if request.kind == "worker":
        total = state.workers or request.world
        if not total:
            return coded("E-WORKERS", "neither it nor the coordinator says how many workers there are: commlayer serve "
                         "--workers N")
        if request.world not in (0, total):
            return coded("E-WORKERS", f"expects {request.world} workers, the job has {total}: start all with the same world "
                         "size, or with `commlayer launch --join` on machines that only dial out")
    if not 0 <= total <= SERVER_BASE:
        return coded("E-WORKERS", f"a job of {total} {request.kind}s, allowed: 1 to {SERVER_BASE}")
    if request.rank != ANY and not 0 <= request.rank < total:
        return coded("E-RANK", f"rank {request.rank} is outside 0..{total - 1}")
    peers = [p for p in state.places.values() if p.join.kind == request.kind]
    if request.rank == ANY and len(peers) >= total:
        remedy = ": start the coordinator with a larger --servers" if request.kind == "server" else ""
        return coded("E-JOB-FULL", f"the job has its {total} {request.kind}s already{remedy}")
    return next(filter(None, (conflict(request, p) for p in peers)), "")


def conflict(request: Join, place: Place) -> str:
    """Why the request does not go with a seated process of the same kind. Tells no digest of that one's."""
    other = place.join
    if place.rank == request.rank:
        return coded("E-RANK", f"rank {request.rank} is taken by {_who(other)}: give each {request.kind} a rank of its own")
    if (other.job, other.gradients) != (request.job, request.gradients):
        return coded("E-RANKS-DIFFER", f"trains another model than {place.peer} on {_who(other)}: names, shapes and order of "
                     "the parameters must be equal")
    if request.plan_digest and other.plan_digest and request.plan_digest != other.plan_digest:
        return coded("E-RANKS-DIFFER", f"holds another plan than {place.peer} on {_who(other)}: give all workers the same plan")
    return ""


def _completed(state: State) -> State:
    """With the view of generation 1 if everyone is in. From then on the plan is the state's, and no seat's."""
    if missing(state):
        return state
    seated = sorted(state.places.values(), key=lambda p: p.rank)
    workers = [p for p in seated if p.join.kind == "worker"]
    members = tuple(Member(p.rank, p.join.node, p.join.name, p.join.pid, p.join.certificate) for p in workers)
    servers = _placed([p for p in seated if p.join.kind == "server"], workers)
    first = workers[0].join
    view = View(1, members, servers, digest_of(first.plan), gradients=first.gradients)
    places = {t: msgspec.structs.replace(p, join=msgspec.structs.replace(p.join, plan=b"")) for t, p in state.places.items()}
    return msgspec.structs.replace(state, view=view, plan=first.plan, places=places)


def _placed(servers: list[Place], workers: list[Place]) -> tuple[ServerInfo, ...]:
    """On the nodes that they name; else where their machine's workers are, or on nodes behind all others."""
    nodes = {p.join.name: p.join.node for p in reversed(workers) if not p.join.dials}
    named = [p.join.node for p in (*servers, *workers)]
    made = []
    for p in servers:
        node = p.join.node if p.join.node != ANY else nodes.setdefault(p.join.name, max(*named, *nodes.values()) + 1)
        made.append(ServerInfo(p.rank, p.join.address, node, p.join.beside, p.join.streams, returns=p.join.returns))
    return tuple(made)


def _seat(state: State, place: Place) -> Seat:
    return Seat(rank=place.rank, view=state.view, plan=state.plan, missing="" if state.view is not None else missing(state))


def _free(state: State, kind: str) -> int:
    taken = _ranks(state, kind)
    return next(rank for rank in range(len(taken) + 1) if rank not in taken)


def _ranks(state: State, kind: str) -> set[int]:
    return {p.rank for p in state.places.values() if p.join.kind == kind}


def _with(state: State, place: Place) -> State:
    return msgspec.structs.replace(state, places={**state.places, place.join.token: place})


def _without(state: State, tokens: Iterable[str]) -> State:
    return msgspec.structs.replace(state, places={t: p for t, p in state.places.items() if t not in set(tokens)})


def _who(request: Join) -> str:
    return f"{request.certificate or request.name} (pid {request.pid})"


def _where(state: State, place: Place) -> str:
    """A server's node, too: its machine may run several processes that are named after it."""
    servers = () if state.view is None or place.join.kind != "server" else state.view.servers
    return next((f"{_who(place.join)} on node {s.node}" for s in servers if s.id == place.rank), _who(place.join))


def _listed(first: Iterable[int], count: int) -> str:
    shown = ", ".join(map(str, first))
    return f"{shown} and {count - LISTED} more" if count > LISTED else shown
