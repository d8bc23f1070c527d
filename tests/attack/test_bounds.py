"""The cost limit of 100 kB from one member or stranger, for each message and frame kind.

BOUNDS has an entry for each, and a message without an entry fails. The messages are generated from the types of the records:
texts, bytes and lists of 100 kB, extreme numbers, many small ones, malformed ones.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from support.coordinators import WAIT_S, quick
from support.extremes import malformed, messages_of
from support.hostile import Growth, HonestMember, HostileMember, Victim, flood, joined
from support.keys import Folders
from support.serving import PLAN

from commlayer import records
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.call_proofs import CHALLENGE
from commlayer.cluster.keys import enrolment_messages
from commlayer.cluster.membership import coordinator
from commlayer.cluster.servers import summation_server
from commlayer.config import host_port
from commlayer.records import Plan, Record
from commlayer.transport import framing, handshake
from commlayer.transport.crc import crc32c
from commlayer.transport.handshake import Hello, Proof
from commlayer.transport.protocol import Flag, Header, Kind

import grpc  # isort: skip  (after commlayer, which sets what grpc reads once)

TOTAL_NBYTES = 100_000
CALL_NBYTES = 160
"""Bytes of a call on the wire besides its request: HTTP/2 headers and the proof."""
MOST_CALLS = 400
"""Calls at a time. A member with more of them waits for answers."""
QUIET_S, MOST_QUIET_S = 0.15, 10.0
TURNS = 5
"""How often a message is sent, each time with other values, if the server has grown by more than allowed. It must not grow with
each of them; what an allocator once had it may keep."""


class Bound(NamedTuple):
    """What 100 kB of a message may cost the server, beyond what the job needs. The job of these tests needs some kB."""

    memory_nbytes: int = 1 << 20
    """What the server has grown by afterwards, each time."""
    peak_nbytes: int = 4 << 20
    """And in between: entries of few bytes are a dozen times as large when they are decoded."""
    cpu_s: float = 1.0
    descriptors: int = 8
    threads: int = 8
    call_s: float = 5.0
    """Seconds until a call of an honest member is answered, made right after. A busy machine adds to them."""


ONE = Bound()

BOUNDS: dict[str, Bound] = {
    **{f"{record.__name__} of a member": ONE for record in (
        messages.Join, messages.PlanPart, messages.Heartbeat, messages.WatchRequest, messages.Leave, messages.StatusRequest,
        messages.EventsRequest)},
    # What a home stores is limited as a whole, and each key counts more than it takes: some 150 bytes.
    "KvRequest of a member": Bound(memory_nbytes=2 << 20),
    "Challenge of a member": ONE,
    **{f"{kind.name} of a member": ONE for kind in Kind},
    **{f"{name} of a stranger": ONE for name in ("Hello", "Proof", "EnrolmentRequest", "Challenge")},
}
"""By message or kind of frame, and by sender."""
FROM_SERVERS = {
    messages.JoinReply, messages.HeartbeatReply, messages.KvReply, messages.StatusReply, messages.EventsReply,
    handshake.Challenge, handshake.Welcome, summation_server.Stalled, enrolment_messages.EnrolmentChallenge,
    enrolment_messages.EnrolmentReply,
}
"""Records that only a server sends. The server can end the job anyway."""
PARTS = {messages.PeerExit, messages.Overdue, summation_server.Joins}
"""Records inside of others, or of a frame of a kind that has a bound."""


def methods() -> dict[str, type[Record]]:
    """The coordinator's methods, with the records that they accept."""
    found: dict[str, type[Record]] = {}

    def method(self: Any, name: str, kind: type[Record], act: Any) -> Any:
        found[name] = kind
        return made(self, name, kind, act)

    made = coordinator.Coordinator._method
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator.Coordinator, "_method", method)
        coordinator.Coordinator(quick()).close()
    return found


@pytest.mark.commit(1)
def test_every_message_and_frame_has_a_bound() -> None:
    modules = messages, handshake, enrolment_messages, summation_server
    there = {one for module in modules for one in vars(module).values()
             if isinstance(one, type) and issubclass(one, Record) and one.__module__ == module.__name__}
    of_members, of_strangers = [*methods().values()], [Hello, Proof, enrolment_messages.EnrolmentRequest]
    assert there == {*of_members, *of_strangers} | FROM_SERVERS | PARTS, "a new record needs a bound, or only servers send it"
    assert BOUNDS.keys() == {f"{name} of a member" for name in MESSAGES + FRAMES} | {f"{name} of a stranger"
                                                                                     for name in STRANGERS}
    assert {*MESSAGES} == {*(one.__name__ for one in of_members), "Challenge"}
    assert {*STRANGERS} == {*(one.__name__ for one in of_strangers), "Challenge"}


class Job:
    """A server and its job: an honest and a hostile member. A case may end the job; `renew` then begins another one."""

    def __init__(self, folders: Folders | None = None) -> None:
        self._folders, self._stack = folders, contextlib.ExitStack()
        self.failed: list[str] = []
        """What exceeded its bound."""
        self.renew()

    def renew(self) -> None:
        self._stack.close()
        self.generation = 1
        self.victim = self._stack.enter_context(Victim("--workers", "2", folders=self._folders))
        self.honest: HonestMember
        self.hostile: HostileMember
        self.honest, self.hostile = joined(self._stack, self.victim, HonestMember, HostileMember)
        with self.hostile.data():  # memory that a first step loads belongs to the job
            assert self.honest.step(self.hostile), self.honest.failed
        for _ in range(20):
            self.honest.call()
        quiet(self.victim)

    @property
    def over(self) -> bool:
        return not self.victim.alive or any("the job failed" in line or "dropped worker" in line for line in self.victim.lines)

    def check(self, bound: Bound, name: str, act: Callable[..., object], *args: object) -> None:
        """A case: act(*args, turn). Afterwards the server has become quiet, and answers."""
        for turn in range(TURNS):
            if self.over:
                self.renew()
            try:
                with self.victim.watched() as growth:
                    act(*args, turn)
                    call_s = answered_s(self.honest, bound.call_s)
                    quiet(self.victim)
            except FileNotFoundError:  # in /proc
                self.failed.append(f"{name}: the server has ended: {self.victim.lines[-3:]}")
                return
            self.failed += [f"{name}: {line}" for line in exceeded(growth, call_s, bound)]
            if growth.memory_nbytes <= bound.memory_nbytes:
                return
        self.failed.append(f"{name}: grows by {growth.memory_nbytes} bytes each time, allowed {bound.memory_nbytes}")

    def send(self, one: Sent, _turn: int) -> None:
        """Sends frames on a new data connection."""
        is_plan = one.header.kind == Kind.PLAN and one.times == 1 and one.nbytes is None
        header = one.header
        if header.kind == Kind.PLAN and header.generation == 1:
            header = header._replace(generation=self.generation + 1)
        with self.hostile.data() as data, contextlib.suppress(OSError):  # the server has had enough
            for _ in range(one.times):
                data.send(header, one.body, one.nbytes)
            if is_plan and (answer := data.read(WAIT_S)) is not None and not answer.body:
                self.generation += 1
            quiet(self.victim)

    def close(self) -> None:
        self._stack.close()


def answered_s(honest: HonestMember, limit_s: float) -> float:
    begin = time.monotonic()
    while True:
        try:
            return honest.call(limit_s) + time.monotonic() - begin
        except Exception as error:
            if time.monotonic() - begin > 3 * limit_s:
                honest.failed.append(str(error))
                return time.monotonic() - begin
            time.sleep(0.05)  # the coordinator begins the next job


def quiet(victim: Victim) -> None:
    """Waits until the server does nothing more than in its idle state."""
    until, before = time.monotonic() + MOST_QUIET_S, -1.0
    with contextlib.suppress(OSError):  # it has ended
        while time.monotonic() < until and (now := victim.usage().cpu_s) - before > 0.25 * QUIET_S:
            before = now
            time.sleep(QUIET_S)


def exceeded(growth: Growth, call_s: float, bound: Bound) -> Iterator[str]:
    measured = growth.peak_nbytes, growth.cpu_s, growth.descriptors, growth.threads, call_s
    for name, got, most in zip(Bound._fields[1:], measured, bound[1:], strict=True):
        if got > most:
            yield f"{name} {got:.7g}, allowed {most:.7g}"


@pytest.fixture(name="job")
def made_job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


MESSAGES = ["Challenge", "Join", "PlanPart", "Heartbeat", "WatchRequest", "Leave", "KvRequest", "StatusRequest",
            "EventsRequest"]


def bases(name: str, hostile: HostileMember) -> list[Mapping[str, Any]]:
    """Fields with which a message passes the first checks.

    Those of Leave and Join name no member: a member may end its own part of the job.
    """
    own = msgspec.to_builtins(hostile.request)
    site = msgspec.to_builtins(messages.site_request(1))
    own_plan = records.encode(PLAN)
    return {
        "Join": [{**site, "token": "another"}, {**own, "token": "another", "rank": messages.ANY}, own],
        "Heartbeat": [{"token": hostile.token}],
        "WatchRequest": [{"token": hostile.token}],
        "KvRequest": [{"home": hostile.home}],
        "PlanPart": [{"plan_digest": messages.hash_plan_bytes(own_plan), "nbytes": len(own_plan), "data": own_plan[:10]}],
    }.get(name, [{}])


@pytest.mark.timeout(900)
@pytest.mark.commit(1)
@pytest.mark.parametrize("name", MESSAGES)
def test_calls_of_a_member(name: str, job: Job) -> None:
    bound, method, record = BOUNDS[f"{name} of a member"], name, None
    for one, kind in methods().items():
        if kind.__name__ == name:
            method, record = one, kind
    if record is not None:
        for place in range(len(bases(name, job.hostile))):
            for number, (label, _) in enumerate(messages_of(record, {}, 0)):
                job.check(bound, f"{label}, as {place}", ask_extreme, job, method, record, place, number)
            job.check(bound, f"many at once, as {place}", ask_many, job, method, record, place)
    for label, data in malformed(TOTAL_NBYTES):
        job.check(bound, label, ask, job, method, data)
    for label, data in greedy(name, job):
        job.check(bound, f"{label}, unread", ask_unread, job, method, data)
    assert job.failed == [], "\n".join(job.failed)


def ask(job: Job, method: str, data: bytes, _turn: int = 0) -> None:
    """One call, with any outcome."""
    with contextlib.suppress(Exception):
        job.hostile.call(method, data, 10.0)


def ask_extreme(job: Job, method: str, record: type[Record], place: int, number: int, turn: int) -> None:
    """A call with the message of that number, with entries that no earlier turn had."""
    base = bases(record.__name__, job.hostile)[place]
    made = itertools.islice(messages_of(record, base, TOTAL_NBYTES, turn * TOTAL_NBYTES), number, None)
    ask(job, method, msgspec.msgpack.encode(next(made)[1]))


def ask_many(job: Job, method: str, record: type[Record], place: int, turn: int) -> None:
    """As many concurrent small calls as fit in 100 kB."""
    requests = numbered(record, bases(record.__name__, job.hostile)[place], turn)
    for future in job.hostile.flood(method, requests.__getitem__, len(requests)):
        future.exception(WAIT_S)


def ask_unread(job: Job, method: str, data: bytes, _turn: int) -> None:
    """As many calls as 100 kB hold, whose replies stay at the server."""
    with job.hostile.unread() as link:
        flood(link, method, data, min(MOST_CALLS, TOTAL_NBYTES // (CALL_NBYTES + len(data))))
        quiet(job.victim)


DISTINCT: dict[str, Callable[[int], dict[str, Any]]] = {
    "Join": lambda number: {"token": f"{number:x}"},
    "Leave": lambda number: {"token": f"{number:x}"},
    "WatchRequest": lambda number: {"token": f"{number:x}"},
    "PlanPart": lambda number: {"plan_digest": f"{number:x}", "nbytes": 10 + number, "data": b"x"},
    "KvRequest": lambda number: {"put": ((f"key {number}", b""),), "want": ((f"other {number}", -1),), "wait_s": 1.0},
}
"""Fields by which small messages differ, so that a server that keeps something of each grows."""


def numbered(record: type[Record], base: Mapping[str, Any], turn: int) -> list[bytes]:
    """As many small messages as 100 kB hold."""
    differ: Callable[[int], dict[str, Any]] = DISTINCT.get(record.__name__, lambda _: {})
    made = [msgspec.msgpack.encode(next(messages_of(record, {**base, **differ(number)}, 0))[1])
            for number in range(turn * MOST_CALLS, (turn + 1) * MOST_CALLS)]
    return made[:TOTAL_NBYTES // (CALL_NBYTES + max(map(len, made)))]


def greedy(name: str, job: Job) -> list[tuple[str, bytes]]:
    """Small requests with the largest replies that a member can get."""
    if name == "StatusRequest":
        return [("wanted", messages.pack(messages.StatusRequest(wanted=1 << 40)))]
    if name == "EventsRequest":
        return [("events", messages.pack(messages.EventsRequest()))]
    if name == "Join":
        return [("a reply with the plan", messages.pack(job.hostile.request))]
    if name == "KvRequest":
        ask(job, "KvRequest", messages.pack(messages.KvRequest(job.hostile.home, put=((("large", -1), bytes(TOTAL_NBYTES)),))))
        return [("a large value", messages.pack(messages.KvRequest(job.hostile.home, want=(("large", -1),))))]
    return []


FRAMES = [kind.name for kind in Kind]
NUMBERS: dict[str, tuple[Any, ...]] = {
    "generation": (2, 0xFFFFFFFF), "step": (7, 0xFFFFFFFF), "bucket": (9, 0xFFFFFFFF), "part": (1, 0xFFFF),
    "parts": (2, 0xFFFF), "round": (1, 0xFF), "codec": (0, 0xFF), "sender": (0, 0xFFFF), "order": (1, 0xFFFF),
    "flags": (Flag.ABANDON, Flag.MEAN, Flag.WITHOUT_ZEROS, Flag.ALL), "used": (0, 7, (1 << 64) - 1),
    "undone": (1, (1 << 64) - 1), "joined": (1, 0xFFFF), "weight": (-1.0, 3e38, float("inf"), float("nan")),
    "total": (-1.0, 3e38, float("inf"), float("nan")),
}
"""Values of header fields other than those of an honest frame."""


@pytest.mark.commit(1)
def test_every_header_field_is_tested_with_extreme_values() -> None:
    assert {*NUMBERS, "kind"} == set(Header._fields)


class Sent(NamedTuple):
    """A frame. `nbytes`: the body size claimed by its header, if not the true one. `times`: how often it is sent."""

    label: str
    header: Header
    body: bytes = b""
    nbytes: int | None = None
    times: int = 1


def honest_frame(kind: Kind, hostile: HostileMember) -> tuple[Header, bytes]:
    if kind == Kind.PUSH:
        return hostile.contribution(1)
    return Header(kind, 1, sender=hostile.rank), records.encode(PLAN) if kind == Kind.PLAN else b""


def sizes(header: Header, body: bytes) -> Iterator[Sent]:
    """Frames of a kind by their number and body size."""
    times = TOTAL_NBYTES // (framing.HEADER_NBYTES + len(body))
    yield Sent("honest", header, body)
    yield Sent("many", header, body, times=times)
    yield Sent("many of a later step", header._replace(step=0x7FFFFFFF), body, times=times)
    yield Sent("large reply", header._replace(used=16 << 20), times=TOTAL_NBYTES // framing.HEADER_NBYTES)
    yield Sent("zeros", header, bytes(TOTAL_NBYTES))
    yield Sent("noise", header, os.urandom(TOTAL_NBYTES))
    yield Sent("zero chunks", header._replace(flags=Flag.WITHOUT_ZEROS), bytes(TOTAL_NBYTES))
    yield Sent("unfinished", header, bytes(TOTAL_NBYTES), 256 << 20)
    yield Sent("too large", header, bytes(TOTAL_NBYTES), 0xFFFFFFFF)
    yield Sent("first part of many", header._replace(parts=2600), bytes(TOTAL_NBYTES))
    yield Sent("first part of too many", header._replace(parts=0xFFFF), bytes(TOTAL_NBYTES))
    chunks = 8 * (TOTAL_NBYTES - 4)
    short = (32 * chunks).to_bytes(4, "little") + bytes(chunks // 8)
    yield Sent("zeros alone", header._replace(flags=Flag.WITHOUT_ZEROS), short)


def contents(header: Header, body: bytes) -> Iterator[Sent]:
    """Frames of a kind that the server takes, by the fields of their header, and for plans by those of the body."""
    for name, values in NUMBERS.items():
        for value in values:
            changed: Any = {name: value}
            yield Sent(f"{name} {value:g}", header._replace(**changed), body)
    if header.kind == Kind.PLAN:
        for label, fields in messages_of(Plan, msgspec.to_builtins(PLAN), TOTAL_NBYTES):
            yield Sent(f"plan with {label}", header, msgspec.json.encode(fields))
        for label, fields in messages_of(summation_server.Joins, {}, TOTAL_NBYTES):
            yield Sent(f"joins with {label}", header._replace(flags=Flag.ABANDON), msgspec.msgpack.encode(fields))


@pytest.mark.timeout(1800)
@pytest.mark.commit(1)
@pytest.mark.parametrize("name", FRAMES)
def test_frames_of_a_member(name: str, job: Job) -> None:
    """Replies are read only for whether the server has accepted a plan: only then is the next generation new to it.

    For a frame kind that the server accepts from no peer the header does not matter.
    """
    bound, (header, body) = BOUNDS[f"{name} of a member"], honest_frame(Kind[name], job.hostile)
    job.check(bound, "honest", job.send, Sent("honest", header, body))
    taken = not job.over
    for one in (*sizes(header, body), *(contents(header, body) if taken else ())):
        job.check(bound, one.label, job.send, one)
    assert job.failed == [], "\n".join(job.failed)


STRANGERS = "Hello", "Proof", "EnrolmentRequest", "Challenge"


def framed(kind: Kind, body: bytes, **fields: Any) -> bytes:
    return framing.encode(Header(kind, **fields), len(body), crc32c(body)) + body


def greetings(name: str) -> Iterator[tuple[str, bytes]]:
    """What a stranger sends to a data port."""
    hello = msgspec.msgpack.encode(Hello("", 0, nonce=bytes(16)))
    record, kind, before = (Hello, Kind.HELLO, b"") if name == "Hello" else (Proof, Kind.PROOF, framed(Kind.HELLO, hello))
    for nbytes in (handshake.MAX_NBYTES - 200, TOTAL_NBYTES):
        for label, fields in messages_of(record, {}, nbytes):
            yield f"{label} of {nbytes}", before + framed(kind, msgspec.msgpack.encode(fields))
        for label, body in malformed(nbytes):
            yield f"{label} of {nbytes}", before + framed(kind, body)
    for label, fields in (("part", {"parts": 0xFFFF}), ("flags", {"flags": Flag.MEAN}), ("sender", {"sender": 0xFFFF})):
        yield label, before + framed(kind, hello, **fields)
    yield "announced", before + framing.encode(Header(kind), 0xFFFFFFFF, 0) + bytes(TOTAL_NBYTES)
    yield "another kind", before + framed(Kind.PUSH, bytes(TOTAL_NBYTES))


def greet(job: Job, data: bytes, _turn: int) -> None:
    """Sends it on a new connection, and waits at most a second until the server closes the connection."""
    address = host_port(job.victim.data_address)
    with contextlib.suppress(OSError), socket.create_connection(address, WAIT_S, ("127.0.0.3", 0)) as sock:
        sock.sendall(data)
        sock.settimeout(1.0)
        while sock.recv(1 << 16):
            pass


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["Hello", "Proof"])
def test_greetings_of_a_stranger(name: str, job: Job) -> None:
    bound = BOUNDS[f"{name} of a stranger"]
    for label, data in greetings(name):
        job.check(bound, label, greet, job, data)
    assert job.failed == [], "\n".join(job.failed)


@pytest.mark.timeout(900)
def test_calls_of_a_stranger(job: Job) -> None:
    """Calls without a proof, of every method."""
    bound = BOUNDS["Challenge of a stranger"]
    for method in (*methods(), CHALLENGE):
        for nbytes in (0, TOTAL_NBYTES):
            count = min(MOST_CALLS, TOTAL_NBYTES // (nbytes + CALL_NBYTES)) or 1
            job.check(bound, f"{count} times {method} of {nbytes}", ask_unproved, job, method, nbytes, count)
    assert job.failed == [], "\n".join(job.failed)


def ask_unproved(job: Job, method: str, nbytes: int, count: int, _turn: int) -> None:
    with grpc.insecure_channel(job.victim.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        caller = channel.unary_unary(f"/{messages.SERVICE}/{method}")
        for future in [caller.future(bytes(nbytes), timeout=10.0) for _ in range(count)]:
            future.exception()


@pytest.mark.timeout(900)
def test_enrolments_of_a_stranger(tmp_path: Path) -> None:
    """After the handshake, in which the server shows its certificate and requests none."""
    folders = Folders(tmp_path)
    job = InvitingJob(folders)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["commlayer-enrolment"])
    requests: Iterable[tuple[str, bytes]] = itertools.chain.from_iterable(
        (*((f"{label} of {nbytes}", msgspec.msgpack.encode(fields))
           for label, fields in messages_of(enrolment_messages.EnrolmentRequest, {}, nbytes)),
         *((f"{label} of {nbytes}", data) for label, data in malformed(nbytes)))
        for nbytes in (enrolment_messages.MAX_REQUEST_NBYTES - 100, TOTAL_NBYTES))
    try:
        for number, (label, data) in enumerate(requests):
            source = f"127.0.1.{1 + number // 2}"  # an address may fail ten times a minute
            job.check(BOUNDS["EnrolmentRequest of a stranger"], label, ask_for_keys, job, context, data, source)
        assert job.failed == [], "\n".join(job.failed)
    finally:
        job.close()


def ask_for_keys(job: Job, context: ssl.SSLContext, data: bytes, source: str, _turn: int) -> None:
    address = host_port(job.victim.address)
    with contextlib.suppress(OSError), socket.create_connection(address, WAIT_S, (source, 0)) as sock:
        sock.sendall(enrolment_messages.MAGIC)
        sock.recv(1 << 16)
        with context.wrap_socket(sock) as tls:
            tls.sendall(len(data).to_bytes(4, "little") + data)
            tls.settimeout(1.0)
            while tls.recv(1 << 16):
                pass


class InvitingJob(Job):
    """With a server that accepts invitations."""

    def renew(self) -> None:
        self._stack.close()
        self.victim = self._stack.enter_context(Victim("--workers", "2", folders=self._folders, invited="gpu-1"))
        self.honest, self.hostile = joined(self._stack, self.victim, HonestMember, HostileMember)
        for _ in range(20):
            self.honest.call()
        quiet(self.victim)
