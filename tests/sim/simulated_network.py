"""The simulated network, and the coordinator with its store: what simulated servers and workers share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from commlayer.cluster.calls import messages
from commlayer.cluster.calls.messages import KvReply, KvRequest, StoreKey
from commlayer.cluster.membership import epoch_change, membership
from commlayer.cluster.membership.coordinator_journal import CoordinatorRecord, resumed_state, without_times
from commlayer.cluster.membership.kv_store import StoreRow
from commlayer.cluster.membership.rendezvous_service import RendezvousService
from commlayer.cluster.membership.sites import AdmissionState, Sites
from commlayer.config import Config
from commlayer.records import Bucket, Epoch, Plan, Slice, complete
from commlayer.transport.handshake import RefusalLog
from commlayer.transport.protocol import Flag, Header, Kind

STEPS, MOST_WORKERS = 9, 12
CONFIG = Config(min_workers=1, last_call_s=1.0)


class Killed(Exception):
    """The server is killed in the middle of an operation."""


class Frame(NamedTuple):
    header: Header
    body: bytes

    @property
    def stream(self) -> tuple[int, int, int]:
        """Frames of one stream stay in order; frames of different streams overtake each other."""
        return self.header.kind, self.header.bucket, self.header.flags & Flag.ABANDON

    @property
    def reports(self) -> bool:
        """Whether this reports a joining worker to a server."""
        return self.header.kind == Kind.PLAN and bool(self.header.flags & Flag.ABANDON)


def numbers(epoch: Epoch) -> list[int]:
    return [member.rank for member in epoch.members]


class Home:
    """The workers of one home, which add their contributions among themselves."""

    def __init__(self, ranks: range, token: str) -> None:
        self.ranks, self.token = ranks, token
        self.parts: dict[tuple[int, int, int], dict[int, bytes]] = {}


class Journal:
    """The coordinator's journal, in memory: everything that is read from it was encoded before."""

    def __init__(self) -> None:
        self._sites, self._job, self._rows = b"", b"", dict[StoreKey, bytes]()

    @property
    def sites(self) -> Sites | None:
        return msgspec.msgpack.decode(self._sites, type=complete(Sites)) if self._sites else None

    @property
    def rows(self) -> dict[StoreKey, StoreRow]:
        return {key: msgspec.msgpack.decode(row, type=complete(StoreRow)) for key, row in self._rows.items()}

    @property
    def state(self) -> membership.State:
        return resumed_state(msgspec.msgpack.decode(self._job, type=complete(CoordinatorRecord)), 0.0)

    def write(self, state: membership.State) -> None:
        self._job = msgspec.msgpack.encode(without_times(CoordinatorRecord("", "", state)))

    def begin(self, sites: Sites, rows: Mapping[StoreKey, StoreRow]) -> None:
        self._rows.clear()
        self.write_sites(sites)
        for key, row in rows.items():
            self.write_row(key, row)

    def write_sites(self, sites: Sites) -> None:
        self._sites = msgspec.msgpack.encode(sites)

    def write_row(self, key: StoreKey, row: StoreRow | None) -> None:
        if row is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = msgspec.msgpack.encode(row)


class Network:
    """What one schedule is about, apart from its processes."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.problems: list[str] = []
        self.counts = Counter[str]()
        self.servers, self.rounds = chance.randint(1, 4), chance.choice((1, 1, 1, 2))
        self.journal, self.kills = chance.random() < 0.7, chance.choice((0.0, 0.01))
        self.breaks, self.deaths = chance.choice((0.0, 0.01)), chance.choice((0.0, 0.001, 0.004))
        self.news = chance.choice((0.1, 0.1, 0.01))
        self.slow = chance.choice((0.0, 0.95))
        """Part of the tries in which a report of a joining worker does not arrive yet."""
        self.local = chance.random() < 0.7
        """True: steps are outer steps of local steps, in fragments."""
        self.follows = chance.random() < 0.8
        """True: the model is so large that workers follow before they join local steps."""
        self.matched = self.local and chance.random() < 0.5
        self.overlap = chance.random() < 0.5
        """True: the result of a fragment is awaited after the next one is computed."""
        self.switches = {step for step in range(1, STEPS) if chance.random() < 0.1}
        """Steps before which all members switch to another plan."""
        self.early = {step for step in range(STEPS) if chance.random() < 0.2}
        """Steps in which no worker can begin."""
        self._plans = [self._some_plan() for _ in range(STEPS + 2)]
        self.sums: dict[tuple[int, int, int, int], bytes] = {}
        self.up: dict[tuple[int, int], list[Frame]] = {}
        self.down: dict[tuple[int, int], list[Frame]] = {}
        self._agreed: dict[str, object] = {}
        self.members: dict[int, Any] = {}
        """All workers, by number."""
        self.ready: list[Any] = []
        """Workers whose home has received a result."""
        sizes = chance.choices((1, 2, 4), (4, 2, 1), k=chance.randint(2, 4))
        self.state = membership.State(sum(sizes), self.servers, min_workers=1, max_workers=99)
        self._lost: dict[int, str] = {}
        self._size, self._kept = sum(sizes), Journal()
        self._store = self._service()
        own = self._own_chance = random.Random(seed)
        self.restarts = own.choice((0.0, 0.002, 0.02))
        self._tokens: dict[int, str] = {}
        for number in range(self.servers):
            self.state, _ = membership.join(self.state, messages.server_request(f"10.0.0.1:{number + 1}", number=number), 0.0)
        self.homes = [self.home(size) for size in sizes]
        self._store.begin()
        assert self.state.epoch is not None
        self.epochs = [self.state.epoch]
        self._kept.write(self.state)

    # What the plan says.

    def _some_plan(self) -> Plan:
        chance = self.chance
        buckets = tuple(Bucket(number, (Slice(0, 0, 1),), "service", server=number % self.servers, owner=chance.randrange(4))
                        for number in range(chance.randint(1, 8)))
        fragments = min(chance.randint(1, 8), len(buckets)) if self.local else 1
        overlap = "" if not self.overlap else "round" if self.local else "forward"
        return Plan("", buckets, self.servers, 4, local_steps=8 if self.local else 1, overlap=overlap, fragments=fragments)

    def plan_of(self, number: int) -> Plan:
        return self._plans[number]

    def totals_of(self, plan: int) -> dict[int, float]:
        return dict.fromkeys((bucket.id for bucket in self.plan_of(plan).buckets), float(len(self.first.members)))

    def some_time(self) -> bool:
        return self.chance.random() < 0.5

    # The coordinator.

    def _service(self) -> RendezvousService:
        journal: Any = self._kept
        return RendezvousService(self._size, CONFIG, lambda: self._lost, RefusalLog(),
                                 lambda: AdmissionState(size=-MOST_WORKERS), journal, clock=lambda: 0.0)

    def restart_sometimes(self) -> None:
        """The coordinator is killed, and resumes from its journal."""
        if self._own_chance.random() < self.restarts:
            self.counts["coordinators killed"] += 1
            self.state, self._store = self._kept.state, self._service()
            self._store.begin()

    @property
    def first(self) -> Epoch:
        return self.epochs[0]

    @property
    def newest(self) -> Epoch:
        return self.epochs[-1]

    def home(self, size: int) -> Home:
        """Registers a home and its workers with the coordinator."""
        site = messages.site_request(size)
        self._store.register(site)
        first = len(self._tokens)
        home = Home(range(first, first + size), site.token)
        for rank in home.ranks:
            request = messages.worker_request("a job", rank, 0 if self.state.epoch else self.state.workers, node=first,
                                              elastic=True, site_world=size)
            self._tokens[rank] = request.token
            self.state, reply = (membership.join if self.state.epoch is None else epoch_change.admit)(self.state, request, 0.0)
            assert not reply.error, reply.error
        assert self._store.register(site).rank in (messages.ANY, first)
        return home

    def changed(self) -> None:
        self.state = epoch_change.next_epoch(self.state)
        assert self.state.epoch is not None
        self._kept.write(self.state)
        self._lost = {place.rank: place.dead or place.left for place in self.state.registrations.values() if not place.present}
        if self.state.epoch.generation > self.newest.generation:
            self.epochs.append(self.state.epoch)

    def remove(self, member: Any, kind: str) -> None:
        token = self._tokens[member.id]
        left = kind == "leaves"
        self.state = membership.leave(self.state, token, kind) if left else membership.evict(self.state, [token], kind)
        self.changed()

    def meet(self, what: str, member: Any, among: Sequence[int]) -> bool | None:
        """Returns True if all of these have called this; False if one of them is lost before, and the member knows that. None:
        the member must wait."""
        keys = {rank: (f"{what}, {among}", rank) for rank in among}
        reply = self.call(KvRequest(member.home.token, ((keys[member.id], b""),), want=(*keys.values(),)))
        if not reply.error:
            return True if None not in reply.values else None
        return None if {*among} <= {*numbers(member.newest)} else False

    def put(self, rank: int, rows: dict[tuple[str, int], bytes]) -> None:
        self.call(KvRequest(self.members[rank].home.token, (*rows.items(),)))

    def call(self, request: KvRequest) -> KvReply:
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
        if not h.flags & Flag.ABANDON and self.sums.setdefault(key, body) != body:
            self.problems.append(f"another result of {key} than before")

    def kill_sometimes(self) -> None:
        if self.chance.random() < self.kills:
            raise Killed
