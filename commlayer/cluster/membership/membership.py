"""Membership of a job: registration, heartbeats, failure detection and orderly leave, as functions of (state, request, now).

A token identifies a process and its registration. Before the job begins, the registration of a silent process is removed, so
its restart can register. After the job has begun, a process that stays silent is permanently dead and its peers are notified.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import msgspec

from commlayer.cluster.calls.messages import (
    ANY,
    FINISHED,
    Heartbeat,
    HeartbeatReply,
    Join,
    JoinReply,
    Overdue,
    PeerExit,
    blame_position,
    blames_peer,
    dropped_by,
    find_incompatibility,
    hash_plan_bytes,
)
from commlayer.errors import append_code, join_names, one_line, without_code
from commlayer.records import Epoch, Member, Record, ServerInfo
from commlayer.transport.protocol import SERVER_BASE

PAUSE_S = 2.0
"""If two ticks are further apart than this, in seconds, the coordinator was suspended. Peers are not blamed for that gap."""

MAX_LISTED = 8
"""Maximum number of missing ranks that an error message lists."""


class Registration(Record, frozen=True):
    """The registration of one process: its request, when its last heartbeat arrived, and why it has left or died."""

    join: Join
    rank: int
    seen_s: float
    heard_s: float = 0.0
    """When the process or its machine was last noticed in another way: a server received data from the process, or its machine
    closed a data connection. Its heartbeats may be late, because its link is full or has just come back."""
    dead: str = ""
    silent: bool = False
    """True: dead because its heartbeats, or those of another worker of its site, stopped."""
    left: str = ""
    exchanges: int = -1
    """Number of exchanges that the worker had completed when it left; -1 if unknown."""
    missed_by: tuple[str, ...] = ()
    """Tokens of the processes that report a lost data connection to this process."""
    closed_cleanly: bool = False
    """Whether a server reports that this worker closed its data connection in order."""
    blamed_peer: str = ""
    """The peer that this worker named as the cause when it left. The field becomes "" when that peer sends a heartbeat or
    dies."""
    known_generation: int = 0
    active_generation: int = 0
    """For a worker: see Heartbeat; 0 before its first report."""
    removed_in: int = 0
    """For a worker that has left or died: generation of the first epoch without it; 0 if there is none (epoch_change.py)."""
    overdue: Overdue | None = None
    """For a server: its last report of waiting sums; None if no sum waits."""
    hung: tuple[int, ...] = ()
    """For a server: ranks of workers whose contributions to the same step were missing in the server's last two reports
    (epoch_change.py)."""

    @property
    def present(self) -> bool:
        return not self.dead and not self.left

    @property
    def peer(self) -> str:
        return f"{self.join.kind} {self.rank}"

    @property
    def member(self) -> Member:
        """The worker as a member of an epoch."""
        one = self.join
        return Member(self.rank, one.node, one.name, one.pid, one.certificate, one.site_world)

    def silent_s(self, now: float) -> float:
        """Seconds without a sign of life."""
        return now - max(self.seen_s, self.heard_s)


class State(Record, frozen=True):
    """The coordinator's state. `workers`: number of workers with which the job begins; 0 until the coordinator's command line
    or a worker gives that number."""

    workers: int
    servers: int
    registrations: Mapping[str, Registration] = msgspec.field(default_factory=dict)
    """Registrations, keyed by token."""
    epoch: Epoch | None = None
    plan: bytes = b""
    ticked_s: float | None = None
    refusals: tuple[tuple[str, str], ...] = ()
    """Pairs (peer, reason) of refused requests. Processes that wait for the peer are sent the reason."""
    min_workers: int = 0
    """The job continues without lost workers while at least this many workers are left (epoch_change.py). 0: the loss of any
    worker ends the job."""
    max_workers: int = 0
    """Largest number of workers of a job that begins with as many of them as are there; 0: `workers`."""

    @property
    def limit(self) -> int:
        """Largest number of workers that the job can have; 0 if it is not known yet."""
        return self.max_workers or self.workers


def join(state: State, request: Join, now: float) -> tuple[State, JoinReply]:
    """Registers a process, or refuses it. A registered process is sent its reply again. Epoch 1 starts with the last process
    that the job waits for."""
    place = state.registrations.get(request.token)
    if place is not None:
        if not place.present:
            error = f"{place.peer} is no longer in this job ({place.dead or place.left})"
            return state, JoinReply(error=error)
        # A restarted server may present another certificate than the one that it registered with.
        renewed = msgspec.structs.replace(place.join, certificate=request.certificate, serial=request.serial)
        state = _record_alive(_with_registration(state, msgspec.structs.replace(place, seen_s=now, join=renewed)), place)
        return state, _join_reply(state, place)
    problem = _problem(state, request)
    if problem:
        peer = request.kind if request.rank == ANY else f"{request.kind} {request.rank}"
        line = f"{peer} on {request.label}: {problem}"
        entries = tuple(entry for entry in state.refusals if entry[0] != peer)[-7:]
        return msgspec.structs.replace(state, refusals=(*entries, (peer, without_code(problem)))), JoinReply(error=line)
    if request.rank in (0, ANY) and request.plan_digest and not request.plan:
        return state, JoinReply(missing=missing(state), plan_wanted=True)
    rank = request.rank if request.rank != ANY else _lowest_free_rank(state, request.kind)
    place = Registration(request, rank, now)
    workers = state.workers or request.world if request.kind == "worker" else state.workers
    state = _start_first_epoch(msgspec.structs.replace(_with_registration(state, place), workers=workers))
    return state, _join_reply(state, place)


def heartbeat(state: State, token: str, now: float, report: Heartbeat | None = None) -> tuple[State, HeartbeatReply]:
    """Records a heartbeat. Returns the next state and the reply, which lists the peers that are gone. `report`: the contents of
    the heartbeat; None if only the reply is wanted."""
    place = state.registrations.get(token)
    if place is None:
        return state, HeartbeatReply(unknown_token=True)
    parent = report.parent if report is not None else ""
    if place.present and parent == "ended" and state.epoch is not None:
        place = msgspec.structs.replace(place,
                                        dead=f"{_describe_silence(state, place, now)}; its machine reports that it has ended",
                                        silent=True)
        state = _with_registration(state, place)
    elif place.present and not parent:
        place = msgspec.structs.replace(place, seen_s=now)
        if report is not None:
            place = msgspec.structs.replace(
                place, known_generation=max(place.known_generation, report.known_generation),
                active_generation=max(place.active_generation, report.active_generation))
        state = _record_alive(_with_registration(state, place), place)
    if report is not None and not parent:
        state = _record_disconnected(state, token, report.missed, now)
        if place.join.kind == "server":
            state = _update(state, lambda p: p.join.kind == "worker" and p.peer in report.heard, heard_s=now)
            state = _update(state, lambda p: p.present and p.peer in report.ended, closed_cleanly=True)
            state = _evict_protocol_breakers(state, place, report.dropped) if place.present else state
    return state, reply_to(state, token, 0 if report is None else report.generation)


def reply_to(state: State, token: str, generation: int = 0) -> HeartbeatReply:
    """Returns what a process should know: the peers that are gone, and the newest epoch if it is newer than `generation`, which
    the process knows. 0: the process needs no epoch."""
    place = state.registrations.get(token)
    if place is None:
        return HeartbeatReply(unknown_token=True)
    # A worker that has switched to an epoch without a peer needs no report about it. A server reports the epoch it knows.
    known = generation if place.join.kind == "server" else place.known_generation
    gone = sorted((t, p) for t, p in state.registrations.items() if p.dead or p.left)
    others = [p for t, p in gone if t != token and not 0 < p.removed_in <= known]
    failures = tuple(PeerExit(p.peer, p.dead) for p in others if p.dead and in_epoch(state, p))
    departures = tuple(PeerExit(p.peer, p.left, p.exchanges) for p in others if p.left and not verdict_pending(state, p))
    newer = state.epoch is not None and 0 < generation < state.epoch.generation
    return HeartbeatReply(dead=place.dead, silent=place.silent, failed=failures, departed=departures, job_done=over(state),
                          job_failed=bool(failure(state)), epoch=state.epoch if newer else None)


_news = attrgetter("dead", "left", "blamed_peer", "join.serial")


def has_news(before: State, after: State) -> bool:
    """Returns whether members or the epoch have changed. If not, only times and reports of processes have. The journal and
    replies to heartbeats contain these changes."""
    known, places = before.registrations, after.registrations
    return before.epoch is not after.epoch or known.keys() != places.keys() or any(
        place is not known[token] and _news(place) != _news(known[token]) for token, place in places.items())


def in_epoch(state: State, place: Registration) -> bool:
    """Returns whether the process is a server or a worker of the newest epoch. True for all processes before epoch 1."""
    return place.join.kind == "server" or state.epoch is None or any(m.rank == place.rank for m in state.epoch.members)


def leave(state: State, token: str, reason: str, exchanges: int = -1) -> State:
    """Records that a process leaves, in order or with an error. Before the job begins, a leave removes the registration."""
    place = state.registrations.get(token)
    if place is None or not place.present:
        return state
    if state.epoch is None:
        return _without_registrations(state, {token})
    culprits = [p for t, p in state.registrations.items() if t != token and blames_peer(reason, p.peer)]
    first = min(culprits, key=lambda p: blame_position(reason, p.peer), default=None)
    blames = "" if first is None else first.peer if first.present else first.blamed_peer
    return _with_registration(state,
                              msgspec.structs.replace(place, left=reason or FINISHED, exchanges=exchanges, blamed_peer=blames))


def verdict_pending(state: State, place: Registration) -> bool:
    """Returns whether the process named a lost peer when it left, and that peer is neither dead nor known to be alive.

    In this case either the peer or only the link between the two may be lost. The departure is not reported until the peer is
    dead or sends a heartbeat. Without this delay, the first process that lost the connection to the peer would be named as the
    cause.
    """
    return bool(place.blamed_peer) and any(p.present and p.peer == place.blamed_peer for p in state.registrations.values())


def _record_alive(state: State, place: Registration) -> State:
    """Records that the process is alive, so peers that named it when they left had other reasons."""
    peer = place.peer
    if any(p.blamed_peer == peer for p in state.registrations.values()):
        return _update(state, lambda p: p.blamed_peer == peer, blamed_peer="")
    return state


def _record_disconnected(state: State, token: str, peers: tuple[str, ...], now: float) -> State:
    """Records which peers this process currently reports as disconnected. Silence counts from the report: after an interruption
    the machine of a live process also closes the connection that broke, before the first heartbeat."""
    for p in list(state.registrations.values()):
        is_new = bool(peers) and p.peer in peers
        if is_new != (token in p.missed_by):
            others = tuple(t for t in p.missed_by if t != token)
            state = _with_registration(state, msgspec.structs.replace(p, missed_by=(*others, token) if is_new else others,
                                                                      heard_s=now if is_new else p.heard_s))
    return state


def _evict_protocol_breakers(state: State, server: Registration, gone: tuple[PeerExit, ...]) -> State:
    """Evicts workers that a server has disconnected for breaking the protocol. Only a server's report counts, because only the
    server sees the bytes of that connection."""
    for one in gone:
        tokens = [t for t, p in state.registrations.items() if p.join.kind == "worker" and p.peer == one.peer]
        state = evict(state, tokens, dropped_by(server.peer, one_line(one.reason)))
    return state


def tick(state: State, now: float, dead_after_s: float, patience_s: float = 0.0, ended_after_s: float = 0.0) -> State:
    """Detects failures by silence. Call it a few times per second.

    If a peer reports that a process's machine closed a connection, that process counts as dead after `dead_after_s` of silence.
    Without such a report, a silent process may return (after a broken link, or a laptop's sleep). Such a process counts as dead
    after `patience_s`, if that is longer. Data that a server receives breaks the silence, too.

    If servers report that all remaining workers closed in order, those workers count as finished after `ended_after_s` of
    silence. Such workers left while no coordinator was running.
    """
    paused_s, places = own_pause_s(state, now), state.registrations
    if paused_s:
        places = {t: msgspec.structs.replace(p, seen_s=min(now, p.seen_s + paused_s), heard_s=min(now, p.heard_s + paused_s))
                  for t, p in places.items()}
    state = msgspec.structs.replace(state, registrations=places, ticked_s=now)
    silent = {t: p for t, p in places.items() if p.present and p.silent_s(now) >= dead_after_s}
    if state.epoch is None:
        return _without_registrations(state, silent) if silent else state
    workers = {t: p for t, p in places.items() if p.present and p.join.kind == "worker"}
    if all(p.closed_cleanly and now - p.seen_s >= ended_after_s for p in workers.values()):
        state = _update(state, lambda p: p.join.token in workers, left=FINISHED)
        silent = {t: p for t, p in silent.items() if t not in workers}
    for p in silent.values():
        if (p.missed_by and not p.join.restartable) or p.silent_s(now) >= patience_s:
            state = _with_registration(state, msgspec.structs.replace(p, dead=_describe_silence(state, p, now), silent=True))
    return state


def own_pause_s(state: State, now: float) -> float:
    """Returns the seconds since the last tick if the coordinator itself was stopped in between; otherwise 0."""
    gap_s = 0.0 if state.ticked_s is None else now - state.ticked_s
    return gap_s if gap_s > PAUSE_S else 0.0


def _describe_silence(state: State, p: Registration, now: float) -> str:
    return f"no heartbeat for {now - p.seen_s:.1f} s from {_locate(state, p)}: it was killed or stopped, or its network failed"


def mark_exited(state: State, name: str, pid: int) -> State:
    """Records that a process on machine `name` has exited without leaving the job. Its registrations are dead at once."""
    mine = [p for p in state.registrations.values() if p.present and (p.join.name, p.join.pid) == (name, pid)]
    return state if state.epoch is None or not mine else evict(
        state, [p.join.token for p in mine], f"its process {mine[0].join.label} exited without leaving the job")


def evict(state: State, tokens: Iterable[str], why: str, *, silent: bool = False) -> State:
    """Evicts these processes. Before the job begins their registrations are removed; after that they are dead. `silent`: see
    Registration."""
    chosen = {token for token in tokens if token in state.registrations and state.registrations[token].present}
    return _without_registrations(state, chosen) if state.epoch is None else _update(
        state, lambda p: p.join.token in chosen, dead=why, silent=silent)


def evict_workers(state: State, why: Mapping[int, str]) -> State:
    """Evicts workers. `why`: the reasons by rank."""
    for token, place in state.registrations.items():
        if place.present and place.join.kind == "worker" and place.rank in why:
            state = evict(state, [token], why[place.rank])
    return state


def over(state: State) -> bool:
    """Returns whether the job has begun and all its workers have left or died."""
    return state.epoch is not None and not any(p.present for p in state.registrations.values() if p.join.kind == "worker")


def failure(state: State) -> str:
    """Returns why the job failed: how its last workers ended before they had finished. "" if they finished, or the job is not
    over."""
    if state.epoch is None or not over(state):
        return ""
    of = {m.rank for m in state.epoch.members}
    ends = [p for p in state.registrations.values() if p.join.kind == "worker" and p.rank in of and p.left != FINISHED]
    first = min(ends, key=lambda p: (not p.dead, bool(p.blamed_peer)),
                default=None)  # the root cause comes before the failures that followed from it
    return "" if first is None else f"{first.peer}: {first.dead or f'left the job: {first.left}'}"


def empty(state: State) -> bool:
    """Returns whether the job is over and its servers have left too, so no process will call again."""
    return over(state) and not any(p.present for p in state.registrations.values())


def missing(state: State) -> str:
    """Returns which processes have not joined yet, and why if known; "" after all have joined."""
    parts = []
    for kind, total, one in (("worker", state.workers, "rank"), ("server", state.servers, "server")):
        joined_ranks = _ranks(state, kind)
        absent = [str(rank) for rank in range(total) if rank not in joined_ranks]
        if absent or (kind == "worker" and not total):
            names = f"; missing: {one}{'s' if len(absent) > 1 else ''} {join_names(absent, MAX_LISTED)}" if absent else ""
            wanted = total or (f"at least {state.min_workers}" if state.min_workers else "?")
            parts.append(f"{len(joined_ranks)} of {wanted} {kind}{'' if total == 1 else 's'} joined{names}")
    seated = {p.peer for p in state.registrations.values()}
    parts += [f"{peer} was refused: {problem}" for peer, problem in state.refusals if parts and peer not in seated]
    return "; ".join(parts)


def missing_peers(state: State) -> tuple[str, ...]:
    """Returns the names of the first processes that have not joined yet; empty if the number of workers is unknown."""
    workers = state.workers or state.min_workers
    absent = (f"{kind} {rank}" for kind, total in (("worker", workers), ("server", state.servers))
              for rank in range(total) if rank not in _ranks(state, kind))
    return tuple(itertools.islice(absent, MAX_LISTED)) if workers else ()


def _problem(state: State, request: Join) -> str:
    """Returns why the registration request is refused; "" if it is not."""
    if problem := find_incompatibility(request, next((p.join.version for p in state.registrations.values()), "")):
        return problem
    if state.epoch is not None:
        return append_code("E-JOB-CLOSED",
                           f"the job has begun with {len(state.epoch.members)} workers; a running job admits no new "
                           "members")
    if request.kind == "server" and request.dials_only:
        return append_code("E-CERTIFICATE-USE", f"{request.certificate} was made with --dials-only, so it may not be used by a "
                           "server: use another node's keys, or replace them with `commlayer keys add "
                           f"{request.certificate} --again`")
    total = state.servers
    if request.kind == "worker":
        total = state.workers or request.world
        if not total:
            return append_code("E-WORKERS", "the number of workers is unknown: start the coordinator with commlayer serve "
                               "--workers N or --min-workers N")
        if total > state.limit > 0:
            return append_code("E-WORKERS",
                               f"expects {total} workers, allowed: at most {state.limit}: start the coordinator with a "
                               "larger --workers")
        if request.world not in (0, total):
            return append_code("E-WORKERS",
                               f"expects {request.world} workers, but the job has {total}: start all with the same "
                               "world size, or with `commlayer join` on machines that accept no connections")
    if not 0 <= total <= SERVER_BASE:
        return append_code("E-WORKERS", f"the job has {total} {request.kind}s, allowed: 1 to {SERVER_BASE}")
    if request.rank != ANY and not 0 <= request.rank < total:
        return append_code("E-RANK", f"rank {request.rank} is outside 0..{total - 1}")
    peers = [p for p in state.registrations.values() if p.join.kind == request.kind]
    if request.rank == ANY and len(peers) >= total:
        remedy = ": start the coordinator with a larger --servers" if request.kind == "server" else ""
        return append_code("E-JOB-FULL", f"the job has its {total} {request.kind}s already{remedy}")
    return next(filter(None, (find_conflict(request, p) for p in peers)), "")


def find_conflict(request: Join, place: Registration) -> str:
    """Returns why the request conflicts with a registered process of the same kind; "" if it does not. The text does not reveal
    the other process's digests."""
    other = place.join
    if place.rank == request.rank:
        return append_code("E-RANK",
                           f"rank {request.rank} is taken by {other.label}: give each {request.kind} a rank of its own")
    if (other.job, other.gradients, other.tensors, other.elements) != \
            (request.job, request.gradients, request.tensors, request.elements):
        counts = "" if request.gradients == other.gradients else \
            f" ({request.gradients} trained tensors here, {other.gradients} there)"
        return append_code("E-RANKS-DIFFER",
                           f"trains a different model than {place.peer} on {other.label}{counts}: names, shapes "
                           "and order of the parameters must be equal")
    if request.plan_digest and other.plan_digest and request.plan_digest != other.plan_digest:
        return append_code("E-RANKS-DIFFER",
                           f"has a different plan than {place.peer} on {other.label}: give all workers the same "
                           "plan")
    return ""


def _start_first_epoch(state: State) -> State:
    """Starts epoch 1 if all processes have joined. From then on the plan is in the state instead of the registrations."""
    if missing(state):
        return state
    seated = sorted(state.registrations.values(), key=attrgetter("rank"))
    workers = [p for p in seated if p.join.kind == "worker"]
    members = tuple(p.member for p in workers)
    servers = _placed([p for p in seated if p.join.kind == "server"], workers)
    first = workers[0].join
    run = hash_plan_bytes("".join(sorted(state.registrations)).encode())  # tokens are random, so no two runs are equal
    epoch = Epoch(1, members, servers, hash_plan_bytes(first.plan), gradients=first.gradients, tensors=first.tensors,
                  elements=first.elements, run=run)
    places = {t: msgspec.structs.replace(p, join=msgspec.structs.replace(p.join, plan=b"")) for t,
              p in state.registrations.items()}
    return msgspec.structs.replace(state, epoch=epoch, plan=first.plan, registrations=places)


def _placed(servers: list[Registration], workers: list[Registration]) -> tuple[ServerInfo, ...]:
    """Assigns servers to nodes: to the node that a server names, else to the node of workers with the same host name, else to a
    new node."""
    nodes = {p.join.name: p.join.node for p in reversed(workers) if not p.join.outbound_only}
    node_numbers = [p.join.node for p in (*servers, *workers)]
    infos = []
    for p in servers:
        node = p.join.node if p.join.node != ANY else nodes.setdefault(p.join.name, max(*node_numbers, *nodes.values()) + 1)
        infos.append(ServerInfo(p.rank, p.join.address, node, p.join.colocated, p.join.streams, restartable=p.join.restartable))
    return tuple(infos)


def _join_reply(state: State, place: Registration) -> JoinReply:
    if state.epoch is not None and not in_epoch(state, place):
        return JoinReply(rank=place.rank, missing=site_missing(state, place))
    return JoinReply(rank=place.rank, epoch=state.epoch, plan=state.plan,
                     missing="" if state.epoch is not None else missing(state))


def site_workers(state: State, place: Registration) -> list[Registration]:
    """Returns the workers of a worker's site, itself included, in the order of their ranks."""
    mates = [p for p in state.registrations.values() if p.join.kind == "worker" and p.join.site_world > 1
             and p.join.node == place.join.node]
    return sorted(mates, key=lambda p: p.rank) if place.join.site_world > 1 else [place]


def site_missing(state: State, place: Registration) -> str:
    """Returns how many workers of a worker's site have joined, as text."""
    here = sum(p.present for p in site_workers(state, place))
    return f"{here} of the {place.join.site_world} workers of this home have joined"


def _lowest_free_rank(state: State, kind: str) -> int:
    ranks = _ranks(state, kind)
    return next(rank for rank in range(len(ranks) + 1) if rank not in ranks)


def _ranks(state: State, kind: str) -> set[int]:
    return {p.rank for p in state.registrations.values() if p.join.kind == kind}


def _update(state: State, chosen: Callable[[Registration], bool], **changes: Any) -> State:
    """Changes these fields of the chosen registrations."""
    places = {t: msgspec.structs.replace(p, **changes) if chosen(p) else p for t, p in state.registrations.items()}
    return msgspec.structs.replace(state, registrations=places)


def _with_registration(state: State, place: Registration) -> State:
    return msgspec.structs.replace(state, registrations={**state.registrations, place.join.token: place})


def _without_registrations(state: State, tokens: Iterable[str]) -> State:
    gone = {*tokens}
    places = {t: p for t, p in state.registrations.items() if t not in gone}
    left = any(p.join.kind == "worker" for p in places.values())
    # If no worker is left after a failed start, the next start may have another number of workers.
    return msgspec.structs.replace(state, registrations=places, workers=state.workers if left or not state.max_workers else 0)


def _locate(state: State, place: Registration) -> str:
    """Returns the same text as Join.label, plus a server's node, since several processes may have the name of its machine."""
    servers = () if state.epoch is None or place.join.kind != "server" else state.epoch.servers
    return next((f"{place.join.label} on node {s.node}" for s in servers if s.id == place.rank), place.join.label)
