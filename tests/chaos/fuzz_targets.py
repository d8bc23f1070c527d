"""Fuzz targets: every decoder of bytes from peers, with valid examples.

Covers frames, greetings, payloads, states, control messages and plans. Uses no sockets.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from commlayer import planner, records
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.call_proofs import AuthenticationFailed, CallVerifier
from commlayer.cluster.keys import enrolment_messages
from commlayer.cluster.membership import job_events, membership, uploaded_plans
from commlayer.cluster.processes.channels import node_ranks
from commlayer.cluster.servers import server_codecs, summation, summation_server
from commlayer.compressors import make_codec, parse, seed, wrap
from commlayer.compressors.codec import Codec
from commlayer.errors import CorruptFrame, PeerLost, RecordError, Refused
from commlayer.observe import events
from commlayer.records import MALFORMED, Epoch, Job, Plan, ServerInfo, Spec, TensorInfo
from commlayer.transport import framing, handshake
from commlayer.transport.chunking import Assembly, split_parts
from commlayer.transport.crc import crc32c
from commlayer.transport.framing import Reader, allocate_bytes
from commlayer.transport.handshake import Hello
from commlayer.transport.keys.secret import NONCE_NBYTES, PROOF_NBYTES, make_proof
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, Message
from commlayer.transport.zero_chunks import drop_zeros, restore_zeros
from tests.chaos.frames import frames_in

CAP_NBYTES, KEPT_NBYTES = 1 << 18, 1 << 20
CODECS = (
    "identity()", "fp16()", "bf16()", "int8()", "int4()", "qsgd()", "onebit()",
    "topk(ratio=0.05)", "block_threshold(ratio=0.1)", "randomk(ratio=0.2)", "powersgd(rank=2)",
)
"""Codecs for every codec id of the wire format."""
SHAPE = (20, 16)
SECRET = "a-secret-of-the-fuzzing"


class Target(NamedTuple):
    """`read` raises one of `refusals` or nothing; any other exception is a finding."""

    name: str
    examples: Sequence[bytes]
    read: Callable[[bytes, random.Random], None]
    refusals: tuple[type[Exception], ...] = (CorruptFrame,)
    frames: bool = False
    """Whether the examples have frame checksums."""


def targets() -> list[Target]:
    return [frames(), zeros(), dialler(), acceptor(), *control(), event_lines(), member_events(), calls(), joining(),
            parts_of_plans(), plans(), sums(), *payloads(), *states()]


def frame(header: Header, body: bytes = b"") -> bytes:
    return framing.encode(header, len(body), crc32c(body)) + body


def frames() -> Target:
    """Streams of several frames, read in pieces of random size and assembled as a connection does, or as two connections do."""
    stalled = msgspec.msgpack.encode(summation_server.Stalled(3, 7, (1, 2), dropped={1: "it broke the format"}))
    body = random.Random(5).randbytes(15_000)
    kinds = [kind for kind in Kind if kind != Kind.STALLED]
    some = [frame(Header(kind, 1, 5, 3, sender=2, weight=1.0, total=2.0), body[: 40 * kind]) for kind in kinds]
    large = Header(Kind.PUSH, 1, 6, 4, parts=len(split_parts(len(body), 5000)), order=9)
    pieces = [frame(large._replace(part=i), body[a:b]) for i, (a, b) in enumerate(split_parts(len(body), 5000))]
    urgent = frame(Header(Kind.PUSH, 1, 6, 5, order=1), b"between")
    flagged = Header(Kind.RESULT, 1, 6, 6, sender=SERVER_BASE, flags=Flag.WITHOUT_ZEROS)
    short = _without_zeros()[-1]
    halves = [frame(flagged._replace(part=i, parts=2), short[a:b]) for i, (a, b) in enumerate(split_parts(len(short), 600))]
    examples = [*some, frame(Header(Kind.STALLED, 1), stalled), b"".join(pieces), pieces[0] + urgent + pieces[1] + pieces[2],
                *(frame(flagged, one) for one in _without_zeros()), b"".join(halves)]

    def read(data: bytes, rng: random.Random) -> None:
        reader, assembly = Reader(CAP_NBYTES), Assembly(allocate_bytes, lambda _: CAP_NBYTES, lambda: KEPT_NBYTES)
        reader.place = assembly.place
        at, cut = 0, rng.choice((len(data), rng.randrange(len(data) + 1)))
        while at < len(data):
            if at >= cut and reader.at_frame_boundary:
                assembly, cut = Assembly(allocate_bytes, lambda _: CAP_NBYTES, lambda: KEPT_NBYTES,
                                         former=assembly.unfinished()), len(data)
                reader.place = assembly.place
            room = reader.wanted()
            n = min(len(room), rng.choice((1, 67, 68, 500, len(data))), len(data) - at)
            room[:n] = data[at : at + n]
            reader.filled(n)
            at += n
            while (one := reader.next()) is not None:
                message = assembly.whole(one)
                if message is not None and message.header.kind == Kind.STALLED:
                    summation_server.read_stalled(Message(SERVER_BASE, message.header, message.body))

    return Target("frames", examples, read, frames=True)


def _without_zeros() -> list[bytes]:
    """Bodies of several sizes without their zeros: only zeros, some nonzero chunks, an odd end."""
    some = [bytearray(nbytes) for nbytes in (4096, 5000, 4097, 12_345)]
    some[1][100:170] = random.Random(6).randbytes(70)
    some[2][-1] = 7
    some[3][3000:3500] = random.Random(7).randbytes(500)
    return [short for one in some if (short := drop_zeros(memoryview(one))) is not None]


def zeros() -> Target:
    """The restored body must have the size that it states, be in the allocated memory, and encode to the same bytes again."""

    def read(data: bytes, _: random.Random) -> None:
        sizes: list[int] = []

        def allocate(nbytes: int) -> memoryview:
            sizes.append(nbytes)
            return memoryview(bytearray(b"\xa5" * nbytes))

        try:
            body = restore_zeros(memoryview(data), CAP_NBYTES, allocate)
        except CorruptFrame:
            assert not sizes, "allocated for what was refused"
            raise
        assert sizes == [len(body)]
        assert len(body) <= CAP_NBYTES
        short = drop_zeros(body)
        assert short is None or restore_zeros(memoryview(short), CAP_NBYTES, allocate) == body

    return Target("zeros", _without_zeros(), read)


class Canned:
    """A ByteChannel that returns prepared bytes, then end of stream."""

    def __init__(self, data: bytes) -> None:
        self._data, self.said = memoryview(data), b""

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0, /) -> int:
        n = min(len(buffer), len(self._data))
        buffer[:n] = self._data[:n]
        self._data = self._data[n:]
        return n

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, /) -> int:
        self.said = b"".join(buffers)
        return len(self.said)

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        self.said = bytes(data)

    def settimeout(self, value: float | None, /) -> None:
        pass

    def shutdown(self, how: int, /) -> None:
        pass

    def close(self) -> None:
        pass


GREETED = (CorruptFrame, Refused, PeerLost)
"""PeerLost if the bytes end too early, Refused if the peer does not prove the secret."""


def acceptor() -> Target:
    hellos = [Hello("job", rank, "plan", "0.1", nonce=bytes(NONCE_NBYTES)) for rank in (0, 1, 65535)]
    greetings = [frame(Header(Kind.HELLO, sender=1), msgspec.msgpack.encode(one)) for one in hellos]
    proved = frame(Header(Kind.PROOF), msgspec.msgpack.encode(handshake.Proof(bytes(PROOF_NBYTES))))

    def read(data: bytes, _: random.Random) -> None:
        handshake.accept_handshake(Canned(data), Reader(handshake.MAX_NBYTES), SERVER_BASE, SECRET, "the dialler",
                                   time.monotonic() + 60.0)

    return Target("acceptor's greeting", [one + proved for one in greetings], read, GREETED, frames=True)


def dialler() -> Target:
    body = msgspec.msgpack.encode(handshake.Challenge(bytes(NONCE_NBYTES)))
    challenge = frame(Header(Kind.CHALLENGE, sender=SERVER_BASE), body)
    answers = [handshake.Welcome(SERVER_BASE, "", bytes(PROOF_NBYTES)),
               handshake.Welcome(SERVER_BASE, "is of another job", b"")]
    examples = [challenge + frame(Header(Kind.WELCOME, sender=SERVER_BASE), msgspec.msgpack.encode(one)) for one in answers]

    def read(data: bytes, _: random.Random) -> None:
        handshake.dial_handshake(Canned(data), Reader(handshake.MAX_NBYTES), Hello("job", 1), SECRET, SERVER_BASE,
                                 time.monotonic() + 60.0)

    return Target("dialler's greeting", examples, read, GREETED, frames=True)


JOB = Job((TensorInfo("weight", (40, 30)), TensorInfo("bias", (30,))))
PLAN = planner.default_plan(JOB, codec="topk(ratio=0.1)", path="service", servers=1, ranks_per_node=1, fuse_nbytes=1024,
                            cut_nbytes=4096)
MEMBERS = records.Member(0, 0, "a", 7), records.Member(1, 1, "b", 8)
EPOCH = Epoch(1, MEMBERS, (records.ServerInfo(0, "127.0.0.1:7001"),), "digest")


EVENT_LINES = tuple(events.encode(event) for event in (
    events.StepEvent(step=7, steps=2, step_s=0.5, loss=1.25, sent_bytes=9), events.MemberEvent(member="worker 1"),
    events.WaitEvent(what="step", names=("worker 1",), waited_s=3.0), events.JobEvent(run="a", world=2)))


def _messages() -> list[Any]:
    gone, overdue = messages.PeerExit("worker 1", "finished", 5), messages.Overdue(7, (1, 2), 600.0)
    return [
        messages.worker_request("job", 0, 2, plan=b"a plan"),
        messages.server_request("127.0.0.1:7001", streams="127.0.0.1:7000"),
        messages.JoinReply(epoch=EPOCH, plan=b"a plan", rank=1), messages.JoinReply(error="no"),
        messages.PlanPart("digest", 40, 8, bytes(16)),
        messages.Heartbeat("token", dropped=(gone,), overdue=overdue), gone, overdue,
        messages.HeartbeatReply(failed=(gone,), departed=(gone, gone)), messages.Leave("token", "finished", 3),
        messages.WatchRequest("token", 2, 1 << 40),
        messages.site_request(2, 1, name="home"), messages.JoinReply(missing="worker 1"),
        messages.JoinReply(rank=0, world=3, node=1, nodes=2),
        messages.KvRequest("home", ((("a/0", 1), bytes(9)),), (("b", -1),), (("n", -1), 1, "once"), (("a/0", 0),), 2.0),
        messages.KvReply((b"there", None), sum=3), messages.KvReply(error="worker 1: gone"),
        messages.StatusRequest(bytes(5), 7), messages.EventsRequest("log", 3), messages.EventsReply("log", 4, EVENT_LINES, 1.5),
        messages.Heartbeat("token", events=EVENT_LINES, first_event=3, time_s=1.5),
        enrolment_messages.EnrolmentChallenge(bytes(NONCE_NBYTES)),
        enrolment_messages.EnrolmentRequest("home-1", bytes(40), bytes(64)),
        enrolment_messages.EnrolmentReply("no"), enrolment_messages.EnrolmentReply("", bytes(40), bytes(9), "secret"),
        messages.StatusReply("1", 1, 4, 1.5, 3, 1, (ServerInfo(0, "127.0.0.1:7001"),), data=bytes(7)),
    ]


def control() -> list[Target]:
    """Every record type, decoded as itself."""
    by_type: dict[type[records.Record], list[bytes]] = {}
    for one in _messages():
        by_type.setdefault(type(one), []).append(messages.pack(one))

    def reader(kind: type[records.Record]) -> Callable[[bytes, random.Random], None]:
        def read(data: bytes, _: random.Random) -> None:
            again = messages.unpack(data, kind, "worker 1")
            assert messages.unpack(messages.pack(again), kind, "worker 1") == again or "nan" in repr(again)

        return read

    return [Target(f"control {kind.__name__}", examples, reader(kind)) for kind, examples in by_type.items()]


def calls() -> Target:
    """Incoming calls with their proofs. Some damaged calls carry a valid proof, as if a member had sent them."""
    judge = CallVerifier(SECRET)
    request = messages.pack(messages.Heartbeat("token"))
    good = make_proof(SECRET, b"ask", b"Heartbeat", judge.challenge("peer"), request) + request

    def read(data: bytes, _: random.Random) -> None:
        messages.unpack(judge.opened("peer", "Heartbeat", data), messages.Heartbeat, "peer")

    return Target("proved calls", [good], read, (CorruptFrame, AuthenticationFailed))


def joining() -> Target:
    """Join requests that can be decoded are processed; the resulting state is kept for some inputs."""
    examples = [messages.pack(one) for one in (messages.worker_request("job", rank, 2, plan=b"p") for rank in (0, 1))]
    examples.append(messages.pack(messages.server_request("127.0.0.1:7001")))
    kept = [membership.State(0, 1)]

    def read(data: bytes, rng: random.Random) -> None:
        request = messages.unpack(data, messages.Join, "worker 1")
        state = kept[0] if rng.random() < 0.9 else membership.State(0, 1)
        state, seat = membership.join(state, request, rng.random())
        messages.pack(seat)
        state, pulse = membership.heartbeat(state, request.token, rng.random())
        messages.pack(pulse)
        kept[0] = membership.tick(state, 100 * rng.random(), 10.0)

    return Target("control decisions", examples, read)


def event_lines() -> Target:
    """Lines of events, as a file's reader takes them."""

    def read(data: bytes, _: random.Random) -> None:
        if (event := events.decode(data)) is not None:
            assert events.decode(events.encode(events.clean(event))) == events.clean(event)

    return Target("lines of events", list(EVENT_LINES), read, (*MALFORMED, RecursionError))


def member_events() -> Target:
    """Heartbeats with events at the coordinator."""
    state = membership.State(1, 0)
    request = messages.worker_request("job", 0, 1, plan=b"p")
    state, _ = membership.join(state, request, 0.0)
    log = job_events.log_of_job()

    def read(data: bytes, rng: random.Random) -> None:
        beat = messages.Heartbeat(request.token, events=(data,), first_event=rng.randrange(1 << 40), time_s=rng.random())
        job_events.JobEvents(log).received(beat, state, rng.random())  # a sender whose lines are not limited yet

    return Target("events of a member", list(EVENT_LINES), read)


def parts_of_plans() -> Target:
    plan = bytes(range(256)) * 4
    parts = [messages.PlanPart(messages.hash_plan_bytes(plan), len(plan), at, plan[at : at + 300])
             for at in range(0, 1024, 300)]
    examples = [messages.pack(part) for part in parts]
    known = uploaded_plans.UploadedPlans()

    def read(data: bytes, _: random.Random) -> None:
        part = messages.unpack(data, messages.PlanPart, "worker 0")
        if part.nbytes <= CAP_NBYTES or part.nbytes > messages.MAX_PLAN_NBYTES:
            known.add_part(part)
            known.whole(part.plan_digest)

    return Target("parts of plans", examples, read)


def plans() -> Target:
    """What a server does with a plan that a worker sends."""

    def read(data: bytes, _: random.Random) -> None:
        plan = records.decode(data, Plan, "plan of worker 0")
        if not planner.verify_alone(plan, 2) and sum(b.numel for b in plan.buckets) <= CAP_NBYTES:
            server_codecs.make_codec_ops(plan, 0)

    return Target("plans", [records.encode(PLAN)], read, (RecordError, ValueError))


def sums() -> Target:
    """Headers of contributions at a server, with matching payloads."""
    ops = server_codecs.make_codec_ops(PLAN, 0)
    core = summation.Summation(0, 1, dict(ops), server_codecs.contributing_ranks(PLAN, node_ranks(2, 1)))
    good = [frame(Header(Kind.PUSH, 1, 0, b.id, codec=ops[b.id].codec, sender=rank, weight=1.0, total=2.0), _flagged(b))
            for b in PLAN.buckets for rank in (0, 1)]

    def read(data: bytes, rng: random.Random) -> None:
        for one in frames_in(Reader(CAP_NBYTES), data):
            cell = core.cells.get(one.header.bucket)
            if cell is not None and cell.awaited is not None and rng.random() < 0.5:
                one = one._replace(header=one.header._replace(step=cell.awaited))
            message = Message(one.header.sender & 1, one.header, one.body)
            if one.header.kind == Kind.PUSH:
                core.push(message, 0.0)
            elif one.header.kind == Kind.STATE_GET:
                core.snapshot(message)
            elif one.header.kind == Kind.UNDO:
                core.undo(message)

    return Target("sums", good, read, frames=True)


def _flagged(bucket: records.Bucket) -> bytes:
    from commlayer.compressors.payload import HEADER_NBYTES, write_flagged

    out = memoryview(bytearray(HEADER_NBYTES))
    write_flagged(out, make_codec(bucket, plan=PLAN).id, bucket.numel)
    return bytes(out)


def payloads() -> list[Target]:
    """Payloads of every codec in every round: what a server adds and what a worker decodes."""
    return [_payload(text, r) for text in CODECS for r in range(len(wrap(parse(text)).rounds))]


class _Sides(NamedTuple):
    codec: Codec
    state: Any
    acc: Any
    out: torch.Tensor
    payloads: list[bytes]


def _sides(text: str, r: int) -> _Sides:
    """A worker that has sent its payload of round r, and the server's accumulator."""
    codec, spec = wrap(parse(text)), Spec(SHAPE)
    numel = math.prod(SHAPE)
    state, server = codec.init(spec), codec.init_server(spec)
    seed(state, "fuzz", 1, 0)
    room, answer = (memoryview(bytearray(codec.bound(spec))) for _ in range(2))
    x = torch.linspace(-1.0, 2.0, numel) ** 3
    result, acc, seen = b"", None, []
    for at in range(r + 1):
        acc = codec.new_accumulator(spec, at)
        nbytes = codec.start(x, state, room) if at == 0 else codec.next(at - 1, result, state, room)
        seen = [bytes(room[:nbytes])]
        codec.add(at, seen[0], acc, first=True)
        result = bytes(answer[: codec.emit(at, acc, server, answer)])
    return _Sides(codec, state, acc, torch.zeros(numel), [*seen, result])


def _payload(text: str, r: int) -> Target:
    kept = [_sides(text, r)]

    def read(data: bytes, rng: random.Random) -> None:
        s = kept[0]
        if rng.random() < 0.5 or r + 1 < len(s.codec.rounds):
            s.codec.add(r, memoryview(data), s.acc, first=rng.random() < 0.5)
        else:
            s.codec.decode(memoryview(data), s.state, s.out)
            kept[0] = s if len(s.codec.rounds) == 1 else _sides(text, r)  # a state with several rounds cannot be used again

    return Target(f"payload {text.partition('(')[0]} {r}", kept[0].payloads, read)


def states() -> list[Target]:
    """Codec states saved by a server."""
    result = []
    for text in ("topk(ratio=0.1)", "qsgd()"):
        bucket = msgspec.structs.replace(PLAN.buckets[0], codec=text)
        ops = server_codecs.CodecOps(make_codec(bucket, plan=PLAN), bucket, PLAN.job)
        result.append(Target(f"state {text.partition('(')[0]}", [ops.snapshot()], _restoring(ops), (CorruptFrame, ValueError)))
    return result


def _restoring(ops: server_codecs.CodecOps) -> Callable[[bytes, random.Random], None]:
    return lambda data, _: ops.restore(data)
