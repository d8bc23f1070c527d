"""Simulates epochs: members, servers and a coordinator as state machines in a simulated network.

Members exchange the buckets of each step in fragments, with the real Summation on each server. By seed, members die, hang and
leave, workers join, plans change, connections break, frames arrive late, twice or never, and servers are killed and resume from
journals. Each process receives the coordinator's newest epoch at another time.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from commlayer.cluster.calls.messages import KvReply, KvRequest, site_request
from commlayer.cluster.membership.rendezvous_service import RendezvousService
from commlayer.cluster.membership.sites import AdmissionState
from commlayer.cluster.servers.gather import GATHER, ROW_BUCKET, GatherOps
from commlayer.cluster.servers.summation import Summation
from commlayer.config import Config
from commlayer.engine.epochs import schedule
from commlayer.engine.epochs.schedule import Joining, Proposal
from commlayer.errors import CorruptFrame
from commlayer.transport.handshake import RefusalLog
from commlayer.transport.protocol import Flag, Header, Kind, Message

STEPS, MOST_WORKERS = 9, 9
MOST_EVENTS, MOST_IDLE = 60_000, 400
"""MOST_IDLE: number of events in a row in which no frame is under way; after that no member will ever continue."""
_PART = struct.Struct("<iiiiixxxx")
"""Rank, step, bucket, round, number of the plan."""
_PROPOSAL = struct.Struct("<qqqq")
Until = Iterator[Callable[[], bool]]
"""What a member does, up to its end. It yields a condition whenever it waits."""


class Part(NamedTuple):
    """One member's contribution to one sum."""

    rank: int
    step: int
    bucket: int
    round: int
    plan: int


class Killed(Exception):
    """The server is killed in the middle of an operation."""


class RecordingOps:
    """Codec operations that record contributions. The result is the list of contributions."""

    codec, bound, means, in_means, assumes_total, senders, leavers = 7, 4096, False, True, True, (), ()

    def __init__(self, world: World) -> None:
        self.rounds, self._world = world.rounds, world

    def zeros(self, r: int) -> list[bytes]:
        return []

    def add(self, r: int, payload: memoryview, acc: list[bytes], first: bool) -> None:
        if first:
            acc.clear()
        acc.append(bytes(payload))

    def scale(self, acc: list[bytes], factor: float) -> None: ...

    def emit(self, r: int, acc: list[bytes], out: memoryview) -> int:
        data = b"".join(acc)
        out[: len(data)] = data
        return len(data)

    def undo(self, slices: int) -> bool:
        return False

    def skip(self) -> None: ...

    def begin_anew(self) -> None:
        self._world.problems.append("a residual was lost")

    def worth_giving_back(self, members: int) -> bool:
        return False

    def remember(self) -> bytes:
        return b""

    def recall(self, data: bytes, sent: memoryview) -> None: ...


class Frame(NamedTuple):
    """A message, or the answer to one. Frames of one stream stay in order; frames of different streams overtake each other."""

    stream: int | str
    """Number of the bucket, "joins" or "plan"."""
    header: Header | None = None
    body: bytes = b""
    about: tuple[Proposal, ...] | int = 0
    """The workers that join, or the number of the plan."""


class Journal(NamedTuple):
    """What a server has journaled."""

    joined: tuple[int, ...]
    plan: int
    entries: dict[int, tuple[bytes, bytes]]


class Server:
    """One server process: what DataServer and SumServer do around a Summation."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.journal = Journal((), 1, {})
        self.start()

    def start(self) -> None:
        """Starts the process, from the journal of the one before. It registers with the coordinator first."""
        self.newest, self.joined = self.registered(), [*self.journal.joined]
        core = self._summation(self.journal.plan)
        for bucket, entry in self.journal.entries.items():
            core.recall(bucket, *entry)
        self._write_down(core, starts=True)
        self.core = core

    def registered(self) -> int:
        return self.world.generation

    @property
    def all_members(self) -> tuple[int, ...]:
        return *self.world.first_members, *self.joined

    @property
    def gone(self) -> set[int]:
        return {*self.all_members} - {*self.world.epochs[self.newest]}

    def _summation(self, plan: int) -> Summation:
        buckets = [b for b in self.world.buckets_of(plan) if self.world.server_of(b) == self.number]
        ops: dict[int, Any] = {b: RecordingOps(self.world) for b in buckets}
        if self.number == 0:
            ops[ROW_BUCKET] = GatherOps(len(self.all_members))
        core = Summation(self.number, plan, ops, dict.fromkeys(ops, self.world.first_members))
        for number, member in enumerate(self.joined, 1):
            core.add(number, member)
        core.remove(self.gone)
        return core

    def _write_down(self, core: Summation, *, starts: bool = False) -> None:
        """Replaces the journal by a new one."""
        if not self.world.journal:
            return
        entries: dict[int, tuple[bytes, bytes]] = {}
        replaced = False

        def keep(bucket: int, words: bytes, state: bytes) -> None:
            if replaced:
                self.world.kill_sometimes()
            entries[bucket] = words, bytes(state)
            if replaced:
                self.world.kill_sometimes()

        core.remember(keep)
        if not starts:
            self.world.kill_sometimes()
        self.journal, replaced = Journal(tuple(self.joined), core.generation, entries), True
        if not starts:
            self.world.kill_sometimes()

    def take(self, peer: int, frame: Frame) -> None:
        if peer in self.gone:
            return  # its connection has ended
        if isinstance(frame.about, tuple):
            for joins in frame.about:
                self._admit(joins)
            self.world.send_down(self.number, peer, frame)
        elif frame.header is None:
            self._switch(frame.about)
            self.world.send_down(self.number, peer, frame)
        else:
            for reply in self.core.push(Message(peer, frame.header, memoryview(frame.body)), 0.0):
                self._reply(reply)

    def _admit(self, joins: Proposal) -> None:
        self.newest = max(self.newest, joins.generation)  # waits for the coordinator
        if joins.number <= len(self.joined) and self.joined[joins.number - 1] == joins.member:
            return
        if joins.number != len(self.joined) + 1 or joins.member in self.all_members or (
                self.newest == joins.generation and joins.member not in self.world.epochs[self.newest]):
            raise CorruptFrame(f"reports {joins}, but {self.joined} have joined", peer=f"server {self.number}")
        self.joined.append(joins.member)
        if self.number == 0:
            self.core.cells[ROW_BUCKET].ops.allow(len(self.all_members))  # type: ignore[attr-defined]
        self.core.add(joins.number, joins.member)
        self._remove()
        if self.world.journal:
            self.world.kill_sometimes()
            self.journal = self.journal._replace(joined=tuple(self.joined))
            self.world.kill_sometimes()

    def _switch(self, plan: int) -> None:
        if plan == self.core.generation:
            return
        if plan != self.core.generation + 1 or self.core.busy():
            raise CorruptFrame(f"got plan {plan} in plan {self.core.generation}, or during a sum", peer=f"server {self.number}")
        core = self._summation(plan)
        self._write_down(core)
        self.core = core

    def hear(self) -> None:
        """Receives the coordinator's newest epoch."""
        self.newest = self.world.generation
        self._remove()

    def _remove(self) -> None:
        for found in self.core.remove(self.gone):
            if isinstance(found, CorruptFrame):
                raise found
            self._reply(found)

    def _reply(self, reply: Any) -> None:
        self.world.emitted(reply)
        self.world.send_down(self.number, reply.peer, Frame(reply.header.bucket, reply.header, bytes(reply.body)))


class State(NamedTuple):
    """What a joining worker receives, apart from weights."""

    step: int
    members: tuple[int, ...]
    joined: int
    plan: int
    row: int
    totals: tuple[tuple[int, float], ...]
    new: int
    """Number of joining workers, which are the last members."""
    let_in: tuple[int, ...]
    """All workers that are or were members, or will be."""


class Transfer:
    """The transfer of the state to the workers that join in one step, on one member."""

    def __init__(self, joining: tuple[int, ...], state: State) -> None:
        self.joining, self.state = joining, state
        self.among: tuple[int, ...] = ()
        """The workers that this member knows to take part."""
        self.over = False


class Member:
    """One worker. Until it has the job's state it waits for that."""

    def __init__(self, world: World, rank: int, state: State | None) -> None:
        self.world, self.rank = world, rank
        self.newest, self.first = world.generation, STEPS
        self.alive, self.hung, self.done = True, False, False
        self.started = False
        self.joining = list[Joining]()
        self.acknowledged = set[int]()
        self.transfers: list[Transfer] = []
        self.inflight: dict[int, dict[int | str, Frame]] = {s: {} for s in range(world.servers)}
        self.committed: dict[int, dict[int, bytes]] = {}
        self.results: dict[int, bytes] = {}
        self.entering: tuple[int, ...] = ()
        self.sent, self.group = list[int](), 0
        """Buckets of the fragment in flight, and the number of the next fragment."""
        self.row_sent = False
        self.rows: bytes | None = None
        if state is not None:
            self.start(state)

    def start(self, state: State) -> None:
        self.started, self.first = True, state.step
        self.step, self.members, self.joined, self.plan, self.row, totals, _, let_in = state
        self.totals, self.let_in = dict(totals), {*let_in}
        self._work = self._train()
        self._until: Callable[[], bool] = lambda: True

    def go(self) -> None:
        """Continues if this member does not wait, up to the next wait."""
        while self.started and self.alive and not self.hung and not self.done and self._until():
            self._until = next(self._work)

    def _train(self) -> Until:
        overlap = self.world.overlap
        fresh = self.step > 0  # a joining worker begins in an exchange that the others have begun
        while True:
            if overlap:
                yield from self._merge()
            if self.group == 0 and not fresh:
                if self.step == STEPS:
                    self.done = True
                    yield lambda: False
                yield from self._begin()
            fresh = False
            yield self.world.some_time  # computes
            self._send()
            if not overlap:
                yield from self._merge()
            yield from self._end_exchange()

    # One exchange.

    def _begin(self) -> Until:
        if self.step in self.world.switches:
            yield from self._switch_plan()
        joining = self.joining
        if not joining or self.step in self.world.early or not self.is_due(joining[0]):
            return
        yield self.is_known
        yield self.can_give
        self.joining, self.joined = [], joining[-1].number
        self.newest = max(self.newest, *(one.generation for one in joining))  # waits for the coordinator
        self.entering = tuple(one.member for one in joining)
        state = self.state_for(self.entering)
        self.world.agree(f"state for workers {self.entering}", state)
        transfer = Transfer(self.entering, state)
        self.transfers.append(transfer)
        if not self.world.overlap:
            yield lambda: transfer.over

    def is_due(self, joining: Joining) -> bool:
        return self.step >= joining.first

    def is_known(self) -> bool:
        """Returns whether all servers know of the joining workers."""
        return len(self.acknowledged) == self.world.servers

    def can_give(self) -> bool:
        """Returns whether no row is in flight, so that the server accepts the joining workers' first row."""
        return self._is_read()

    def state_for(self, new: tuple[int, ...]) -> State:
        missing = self._missing()
        members = *(each for each in self.members if each not in missing), *new
        return State(self.step, members, self.joined, self.plan, self.row, tuple(sorted(self.totals.items())), len(new),
                     tuple(sorted(self.let_in)))

    def _send(self) -> None:
        self.sent = self.world.fragment_of(self.plan, self.group)
        self.group = (self.group + 1) % self.world.fragments_of(self.plan)
        for bucket in self.sent:
            self._push(bucket, 0)

    def _push(self, bucket: int, r: int) -> None:
        header = Header(Kind.PUSH, self.plan, self.step, bucket, round=r, codec=RecordingOps.codec, sender=self.rank,
                        weight=1.0, used=1, total=self.totals[bucket], joined=self.joined)
        body = _PART.pack(self.rank, self.step, bucket, r, self.plan)
        self._request(self.world.server_of(bucket), Frame(bucket, header, body))

    def _request(self, server: int, frame: Frame) -> None:
        self.inflight[server][frame.stream] = frame
        self.world.send_up(self.rank, server, frame)

    def _merge(self) -> Until:
        """Waits for the results of the fragment in flight."""
        yield lambda: all(bucket in self.results for bucket in self.sent)
        if self.sent and self.group == 0:
            self.committed[self.step], self.results = self.results, {}
            self.step += 1
        self.sent = []

    def _end_exchange(self) -> Until:
        yield from self._settle()
        self.members, self.entering = (*self.members, *self.entering), ()
        self.world.agree(f"members in row {self.row} of plan {self.plan}", self.members)
        self.row_step, self.row_members, self.row_sent, self.rows = self.step, self.members, True, None
        header = Header(Kind.PUSH, self.plan, self.row, ROW_BUCKET, codec=GATHER, sender=self.rank, joined=self.row_joined)
        self.row += 1
        self._request(0, Frame(ROW_BUCKET, header, b"".join(_PROPOSAL.pack(*p) for p in self._proposals())))

    @property
    def row_joined(self) -> int:
        return self.joined

    @property
    def is_occupied(self) -> bool:
        """Whether workers are let in, and have not begun."""
        return bool(self.joining)

    def _proposals(self) -> list[Proposal]:
        waits = self.is_occupied or not all(transfer.over for transfer in self.transfers)
        new = [] if waits else [(m,) for m in self.world.epochs[self.newest] if m not in self.let_in]
        return schedule.propose(self.joined, new, self.newest)

    def _is_read(self) -> bool:
        """Returns whether no row is in flight."""
        return not self.row_sent or self.rows is not None

    def _received(self) -> dict[int, bytes]:
        return dict(msgspec.msgpack.decode(self.rows or b"\x90", type=list[tuple[int, bytes]]))

    def _missing(self) -> list[int]:
        """Returns the members that have not sent the last row."""
        received = self._received()
        return [member for member in self.row_members if received and member not in received] if self.row_sent else []

    def _settle(self) -> Until:
        """Uses the row that was sent last."""
        yield self._is_read
        if not self.row_sent:
            return
        self._drop(self._missing())
        self.row_sent = False
        proposals = [Proposal(*numbers) for row in self._received().values() for numbers in _PROPOSAL.iter_unpack(row)]
        proposals = [p for p in proposals if p.member not in self.let_in]
        if self.is_occupied or not (joining := schedule.decide(self.joined, self.row_step + schedule.LEAD, proposals)):
            return
        self.world.agree(f"joining {joining[0].number}", joining)
        self.world.counts["joins at once"] += len(joining) > 1
        self.joining, self.acknowledged = joining, set()
        self.let_in |= {one.member for one in joining}
        for server in range(self.world.servers):
            self._request(server, Frame("joins", about=tuple(Proposal(*one[:3]) for one in joining)))

    def _drop(self, gone: list[int]) -> None:
        self.members = tuple(member for member in self.members if member not in gone)

    # Another plan.

    def _switch_plan(self) -> Until:
        plan = self.plan + 1
        yield self._is_read
        yield from self._together(f"plan {plan} is agreed", lambda: None)
        yield from self._together(f"plan {plan} is sent", lambda: self._send_plan(plan))
        self.plan, self.totals, self.row = plan, self.world.totals_of(plan), 0

    def _send_plan(self, plan: int) -> None:
        for server in range(self.world.servers):
            if server % len(self.members) == self.members.index(self.rank):
                self._request(server, Frame("plan", about=plan))

    def _together(self, what: str, act: Callable[[], None]) -> Until:
        """Acts together with all members. If members are lost, the others repeat it."""
        while True:
            act()
            yield lambda: not any("plan" in frames for frames in self.inflight.values())
            yield lambda: self.world.meet(what, self) is not None
            if self.world.meet(what, self):
                return
            yield from self._settle()
            self._drop(self._departed())

    def _departed(self) -> list[int]:
        return [member for member in self.members if member not in self.world.epochs[self.newest]]

    # What arrives.

    def take(self, server: int, frame: Frame) -> None:
        if not self.alive or self.hung:
            return
        request = self.inflight[server].get(frame.stream)
        if request is not None and frame.header is None and frame.about == request.about:
            del self.inflight[server][frame.stream]
            if frame.stream == "joins":
                self.acknowledged.add(server)
        elif request is not None and frame.header is not None and request.header is not None:
            self._result(server, frame.header, request.header, frame.body)
        self.go()

    def _result(self, server: int, header: Header, request: Header, body: bytes) -> None:
        if header.flags & Flag.ABANDON or (request.generation, request.step, request.round) != (
                header.generation, header.step, header.round):
            return
        del self.inflight[server][header.bucket]
        if header.bucket == ROW_BUCKET:
            self.rows = body
        elif header.round + 1 < self.world.rounds:
            self._push(header.bucket, header.round + 1)
        else:
            self.results[header.bucket], self.totals[header.bucket] = body, header.weight

    # The transfer of the state; see StateRelay.

    def relay(self) -> None:
        """Takes part in transfers. The coordinator's store ignores what is written after one of them was lost."""
        present = self.world.epochs[self.newest]
        for transfer in self.transfers:
            among = tuple(member for member in transfer.state.members if member in present)
            given = transfer.among in self.world.entered.get(transfer.joining, ())
            transfer.over = transfer.over or given or self.rank not in among or not {*transfer.joining} & {*among}
            if not transfer.over:
                self.world.counts["transfers begun again"] += bool(transfer.among and transfer.among != among)
                transfer.among = among
                if {*among} <= {*self.world.epochs[-1]}:
                    self.world.rendezvous(transfer.joining, among)[self.rank] = transfer.state
        if not self.started:
            self._receive(present)
        self.go()

    def _receive(self, present: tuple[int, ...]) -> None:
        """Receives the state together with the others that join: all who take part complete a transfer, or none does."""
        for joining, among, met in self.world.announced(self.rank):
            state, new = met.get(present[0]), [self.world.members[member] for member in joining if member in among]
            if state is None or not {*among} <= {*present} & {*self.world.epochs[-1]} or not {*among} - {*joining} <= {*met}:
                continue  # the store also ignores what a joining worker writes after one of them was lost
            if any(not one.alive or one.hung or not {*among} <= {*self.world.epochs[one.newest]} for one in new):
                continue
            self.world.entered.setdefault(joining, set()).add(among)
            for one in new:
                self.world.counts["joins"] += 1
                one.start(state)
                one.go()
            return


class World:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.problems: list[str] = []
        self.counts = Counter[str]()
        self.servers, self.rounds = chance.randint(1, 4), chance.choice((1, 1, 2))
        self.first_members = tuple(range(chance.randint(2, 6)))
        self.journal, self.kills = chance.random() < 0.7, chance.choice((0.0, 0.01))
        self.breaks, self.deaths = chance.choice((0.0, 0.01)), chance.choice((0.0, 0.001, 0.004))
        self.slow = chance.choice((0.0, 0.95))
        """Part of the tries in which a report of a joining worker does not arrive yet."""
        self.overlap = chance.random() < 0.5
        """True: the result of a fragment is awaited after the next one is computed. Members do not wait for a transfer."""
        self._buckets = [chance.randint(1, 8) for _ in range(STEPS + 2)]
        self._fragments = [min(chance.randint(1, 8), buckets) for buckets in self._buckets]
        self.switches = {step for step in range(1, STEPS) if chance.random() < 0.15}
        """Steps before which all members switch to another plan."""
        self.early = {step for step in range(STEPS) if chance.random() < 0.2}
        """Steps in which no worker can begin."""
        self.epochs: list[tuple[int, ...]] = [(), self.first_members]
        self.gone = set[int]()
        self.sums: dict[tuple[int, int, int, int], bytes] = {}
        self.up: dict[tuple[int, int], list[Frame]] = {}
        self.down: dict[tuple[int, int], list[Frame]] = {}
        self.entered: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        """Maps workers that join in one step to those who took part in the transfer in which they have received their state."""
        self._agreed: dict[str, object] = {}
        self._store = RendezvousService(
            len(self.first_members), Config(min_workers=1, last_call_s=1.0), self._lost, RefusalLog(),
            lambda: AdmissionState(generation=self.generation), clock=lambda: 0.0)
        self._sites = [self._register() for _ in self.first_members]
        self._store.begin()
        self._states: dict[tuple[int, ...], dict[tuple[int, ...], dict[int, State]]] = {}
        self._idle = 0
        self.server = [Server(self, number) for number in range(self.servers)]
        state = State(0, self.first_members, 0, 1, 0, tuple(self.totals_of(1).items()), 0, self.first_members)
        self.members = {rank: Member(self, rank, state) for rank in self.first_members}

    # What the plan says.

    def buckets_of(self, plan: int) -> range:
        return range(self._buckets[plan])

    def fragments_of(self, plan: int) -> int:
        return self._fragments[plan]

    def fragment_of(self, plan: int, group: int) -> list[int]:
        return [*self.buckets_of(plan)[group :: self._fragments[plan]]]

    def server_of(self, bucket: int) -> int:
        return bucket % self.servers

    def totals_of(self, plan: int) -> dict[int, float]:
        return dict.fromkeys(self.buckets_of(plan), float(len(self.first_members)))

    def some_time(self) -> bool:
        return self.chance.random() < 0.5

    # The coordinator.

    @property
    def generation(self) -> int:
        return len(self.epochs) - 1

    def rendezvous(self, joining: tuple[int, ...], among: tuple[int, ...]) -> dict[int, State]:
        """Returns what the members `among` give to joining workers, by member."""
        return self._states.setdefault(joining, {}).setdefault(among, {})

    def announced(self, worker: int) -> list[tuple[tuple[int, ...], tuple[int, ...], dict[int, State]]]:
        """Returns the transfers to this worker: all that join with it, who takes part, and what members give."""
        return [(joining, among, met) for joining, each in self._states.items() if worker in joining
                for among, met in each.items() if worker in among]

    def _register(self) -> str:
        """Registers the site of the next worker. Returns its token."""
        request = site_request(1)
        self._store.register(request)
        return request.token

    def _lost(self) -> dict[int, str]:
        return dict.fromkeys(self.gone, "it is lost")

    def meet(self, what: str, member: Member) -> bool | None:
        """Returns True if all members have called this; False if one of them is lost before, and the member knows that. None:
        the member must wait."""
        keys = {rank: (f"{what}, {member.members}", rank) for rank in member.members}
        reply = self._call(KvRequest(self._sites[member.rank], ((keys[member.rank], b""),), want=(*keys.values(),)))
        if not reply.error:
            return True if None not in reply.values else None
        return None if {*member.members} <= {*self.epochs[member.newest]} else False

    def _call(self, request: KvRequest) -> KvReply:
        """Calls the coordinator's store, without waiting."""
        try:
            self._store.handle(request).send(None)
        except StopIteration as over:
            reply: KvReply = over.value
            return reply
        raise AssertionError("a call that does not wait has waited")

    def agree(self, what: str, value: object) -> None:
        """Checks that all members have an equal value."""
        if self._agreed.setdefault(what, value) != value:
            self.problems.append(f"members differ, {what}: {self._agreed[what]}, {value}")

    # The network.

    def send_up(self, rank: int, server: int, frame: Frame) -> None:
        self.up.setdefault((rank, server), []).append(frame)

    def send_down(self, server: int, rank: int, frame: Frame) -> None:
        self.down.setdefault((server, rank), []).append(frame)

    def emitted(self, reply: Any) -> None:
        h = reply.header
        key, body = (h.generation, h.step, h.bucket, h.round), bytes(reply.body)
        if self.sums.setdefault(key, body) != body:
            self.problems.append(f"another result of {key} than before")

    def kill_sometimes(self) -> None:
        if self.chance.random() < self.kills:
            raise Killed

    def run(self) -> list[str]:
        for member in self.members.values():
            member.go()
        while not self.problems and (left := self._unfinished()):
            self.counts["events"] += 1
            if self.counts["events"] > MOST_EVENTS or self._idle > MOST_IDLE:
                self.problems.append(f"no member gets any further: {left}")
            else:
                self._event()
        self._check()
        return self.problems

    def _able(self) -> list[Member]:
        return [m for m in self.members.values() if m.alive and not m.hung and m.rank not in self.gone]

    def _unfinished(self) -> list[int]:
        """Returns the members that must still finish. A worker cannot join if no member is left that has the job's state."""
        return [m.rank for m in self._able() if m.started and not m.done]

    def _event(self) -> None:
        chance = self.chance
        if chance.random() < self.deaths:
            self._fault()
        if chance.random() < 0.004 and len(self.members) < MOST_WORKERS:
            self._admit()
        if chance.random() < 0.1:
            self._news()
        for one in chance.choices(list(self.members.values()), k=2):
            if one.alive and not one.hung:
                one.relay()
        ways = [("up", key) for key, way in self.up.items() if way] + [("down", key) for key, way in self.down.items() if way]
        self._idle = 0 if ways else self._idle + 1
        if not ways:
            return
        way, key = chance.choice(ways)
        if chance.random() < self.breaks:
            self._break(key if way == "up" else key[::-1])
            return
        frames = self.up[key] if way == "up" else self.down[key]
        stream = chance.choice(frames).stream
        if stream == "joins" and chance.random() < self.slow:
            return
        place = next(i for i, frame in enumerate(frames) if frame.stream == stream)
        frame = frames[place] if chance.random() < 0.05 else frames.pop(place)
        if way == "up":
            self._at_server(key[1], lambda server: server.take(key[0], frame))
        elif (member := self.members.get(key[1])) is not None:
            member.take(key[0], frame)

    def _at_server(self, number: int, act: Callable[[Server], None]) -> None:
        try:
            act(self.server[number])
        except Killed:
            self.counts["servers killed"] += 1
            self.server[number].start()
            for rank in self.members:
                self._break((rank, number))
        except CorruptFrame as error:
            self.problems.append(f"a breach: {error}")

    def _break(self, key: tuple[int, int]) -> None:
        """A connection breaks. Frames in flight are lost or not; the member sends all that is not answered again."""
        self.counts["connections broken"] += 1
        rank, server = key
        for frames in (self.up.get(key), self.down.get((server, rank))):
            if frames and self.chance.random() < 0.8:
                frames.clear()
        if (member := self.members[rank]).alive:
            for frame in member.inflight[server].values():
                self.send_up(rank, server, frame)

    def _admit(self) -> None:
        """A worker registers with the coordinator."""
        rank = len(self.members)
        self._sites.append(self._register())
        self.epochs.append((*self.epochs[-1], rank))
        self.members[rank] = Member(self, rank, None)

    def _fault(self) -> None:
        able = self._able()
        training = [m for m in able if m.started]
        if len(training) < 2:
            able = [m for m in able if not m.started]
        if not able:
            return
        member = self.chance.choice(able)
        kind = self.chance.choice(("dies", "hangs", "is dropped by mistake", "leaves"))
        self.counts[kind] += 1
        if kind in ("dies", "leaves"):
            member.alive = False
        elif kind == "hangs":
            member.hung = True
        if self.chance.random() < 0.5:
            for (rank, _), frames in self.up.items():
                if rank == member.rank:
                    frames.clear()
        self.gone.add(member.rank)
        self.epochs.append(tuple(rank for rank in self.epochs[-1] if rank != member.rank))

    def _news(self) -> None:
        """A process receives the coordinator's newest epoch."""
        processes: list[Server | Member] = [*self.server, *self._able()]
        if late := [one for one in processes if one.newest < self.generation]:
            one = self.chance.choice(late)
            if isinstance(one, Server):
                self._at_server(one.number, Server.hear)
            else:
                one.newest = self.generation

    # What must hold.

    def _check(self) -> None:
        ended = [m for m in self.members.values() if m.done and m.rank not in self.gone]
        for member in self.members.values():
            for step, results in member.committed.items():
                for bucket, body in results.items():
                    self._check_sum(ended, step, bucket, body)
                self.agree(f"results of step {step}", results)
        for member in ended:
            if sorted(member.committed) != list(range(member.first, STEPS)):
                self.problems.append(f"worker {member.rank} committed {sorted(member.committed)}")
        self.counts["steps"] += sum(len(m.committed) for m in ended)
        self.counts["plans"] += max((m.plan for m in ended), default=1) - 1

    def _check_sum(self, ended: list[Member], step: int, bucket: int, body: bytes) -> None:
        parts = [Part(*_PART.unpack_from(body, i)) for i in range(0, len(body), _PART.size)]
        ranks = [part.rank for part in parts]
        if any((p.step, p.bucket) != (step, bucket) for p in parts):
            self.problems.append(f"step {step}, bucket {bucket}: a part of another sum")
        if len(ranks) != len(set(ranks)):
            self.problems.append(f"step {step}, bucket {bucket}: doubled parts of {ranks}")
        if ranks != sorted(ranks):
            self.problems.append(f"step {step}, bucket {bucket}: added in the order {ranks}")
        if lost := {m.rank for m in ended if m.first <= step} - set(ranks):
            self.problems.append(f"step {step}, bucket {bucket}: lost parts of {sorted(lost)}")
