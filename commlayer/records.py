"""The frozen records that every part shares. Knows no torch, no clock, no environment; behaves only as far as sizes go."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from commlayer.errors import RecordError, one_line

SCHEMA = 3
"""Version of the records that leave the process: plan files, control messages."""

MAX_TENSORS_PER_BUCKET = 64
"""A bucket's `used` mask is one 64-bit word of the frame header, so a bucket holds at most this many slices."""

MAX_FRAME_NBYTES = 256 << 20
"""Of a frame's body: a payload, or what a server keeps of a bucket, which travels when it is saved."""

MAX_BUCKET_NBYTES = 128 << 20
"""Of a bucket's elements as float32: half of a frame's body, since a payload can be larger than what it codes."""

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all records: immutable, and an unknown field is an error, never ignored."""


class Spec(Record, frozen=True):
    """What is coded: a shape and a dtype name. Codecs see float32; dtype is what the parameter had."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class TensorInfo(Record, frozen=True):
    """One tensor that workers average, in registration order: the parameters' gradients, then the float buffers themselves."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    buffer: bool = False
    """A buffer (running statistics) is averaged as it is: never under a loss scale, never fused with gradients."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Timing(Record, frozen=True):
    """When a step's computing makes and needs each tensor, on one rank, without communication. In the order of the tensors."""

    ready_s: tuple[float, ...]
    """When its gradient is final, from the start of backward."""
    needed_s: tuple[float, ...]
    """When the next forward pass first reads it, from its start."""
    backward_s: float
    forward_s: float
    update_s: float = 0.0
    """The optimizer's step."""
    device: str = ""
    """What it was measured on, as tables name it; empty: what nodes' speeds are told against."""
    filled: tuple[float, ...] = ()
    """The part of its gradient that is no zeros, of what is sent and answered on average. None: all of each."""
    half: bool = False
    """Whether it is computed in bf16, or the fastest precision that a GPU has: nodes' speeds are then those."""
    activation_nbytes: float = 0.0
    """What a step keeps for its backward pass; 0: not known."""

    def scaled(self, factor: float) -> Timing:
        """With all of it taking so many times as long, on what is not said."""
        return Timing(
            tuple(at * factor for at in self.ready_s), tuple(at * factor for at in self.needed_s), self.backward_s * factor,
            self.forward_s * factor, self.update_s * factor, filled=self.filled, half=self.half,
            activation_nbytes=self.activation_nbytes,
        )


class Job(Record, frozen=True):
    """Model and batch. Two workers train one job only if the digests of their Jobs are equal."""

    tensors: tuple[TensorInfo, ...]
    batch: int | None = None
    timing: Timing | None = None
    """Measured or from a table; planning needs it, training does not."""
    name: str = ""

    @property
    def numel(self) -> int:
        return sum(t.numel for t in self.tensors)

    def digest(self) -> str:
        return digest(Job(self.tensors))


class Slice(Record, frozen=True):
    """Elements [start, stop) of a tensor, counted in logical (row-major) order whatever its memory layout."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Why(Record, frozen=True):
    """What the planner expected of a bucket's path, for people."""

    seconds: float
    """From ready to done, in the simulated step."""
    nbytes: int
    """What one node sends and receives for it."""
    reason: str
    runner_up: str = ""
    runner_up_s: float = 0.0
    """How much longer the whole step would take with the runner-up. Less than 0: shorter, where more of them are needed."""
    runner_up_later: float = 0.0
    """By what part later a loss would come with it, cautiously; 0 where the planner counted steps alike."""


def over_server(path: str) -> bool:
    """Whether a summation server takes part in a path, as a bucket spells it: the one rule for that.

    >>> over_server("service"), over_server("encode@cpu net.push net.pull decode@cpu"), over_server("allreduce")
    (True, True, False)
    """
    return path == "service" or "net.push" in path


class Bucket(Record, frozen=True):
    """What is planned and sent as one: a slice of a big tensor or several small tensors."""

    id: int
    slices: tuple[Slice, ...]
    path: str
    """"service" (encode, push, sum, result, decode), "allreduce" (a planned collective over all ranks), or any path that
    planner/model/paths.py spells."""
    codec: str = "identity()"
    server: int = 0
    """Which server sums it (path "service")."""
    owner: int = 0
    """Which local rank of each node encodes and sends it (path "service")."""
    shape: tuple[int, ...] = ()
    """Empty: a vector. A bucket of one whole tensor may keep that tensor's shape, which low-rank codecs need."""
    down: str = ""
    """The codec of a server's results where it is not that of the payloads."""
    by_node: tuple[str, ...] = ()
    """Codecs of the nodes where they differ (a slow link takes a smaller ratio); of one family: one server reads all."""
    coder: str = ""
    """"gpu": a service bucket is coded on the device. Empty: on the host."""
    stale: bool = False
    """Whether the result of a step is used in the next one."""
    why: Why | None = None

    @property
    def numel(self) -> int:
        return sum(s.numel for s in self.slices)

    @property
    def spec(self) -> Spec:
        return Spec(self.shape or (self.numel,))

    @property
    def served(self) -> bool:
        """Whether it goes over a summation server."""
        return over_server(self.path)


class Plan(Record, frozen=True):
    """All paths. `buckets` stand in the order in which they become ready; collectives are issued in it."""

    job: str
    """Digest of the Job that it was made for."""
    buckets: tuple[Bucket, ...]
    servers: int = 0
    ranks_per_node: int = 1
    local_steps: int = 1
    """Steps of local training per exchange."""
    codes: Literal["gradients", "updates"] = "gradients"
    """What an exchange is of; with several local steps it is of updates, whatever stands here: see `steps_locally`."""
    overlap: Literal["", "round", "forward"] = ""
    """What goes on while an exchange is under way: nothing; the next round of local steps, or step; the next
    forward pass."""
    fragments: int = 1
    """In so many parts, one after the other, a round's changes are exchanged."""
    step_s: float = 0.0
    """Predicted seconds of a step; 0: nobody predicted."""
    free_s: float = 0.0
    """Predicted seconds of a step if coding took no time, as far as a search finds: no bound, another plan may be faster."""
    steps: float = 0.0
    """Predicted: how many times as many steps it needs to a loss as dense training that exchanges in each; 0: nobody did."""
    steps_high: float = 0.0
    """The same, cautiously: what the planner counts with."""
    hosts: tuple[int, ...] = ()
    """The node of each server, as places in the cluster that was planned for; empty: the first that can host one."""
    ratio_over: Literal["bucket", "plan"] = "bucket"
    """What a sparse codec's ratio is a part of: of each bucket; or of all buckets over servers together, so that one threshold
    cuts them all, and more is sent of those with larger gradients."""
    warmup: int = 0
    """Steps of the job over which the ratios of sparse codecs over servers come down from 25 %; 0: none."""
    schema: int = SCHEMA

    @property
    def steps_locally(self) -> bool:
        """Whether each rank steps on its own gradients, and exchanges are of what its weights have changed by."""
        return self.local_steps > 1 or self.codes == "updates"


def plan_of(plan: Plan, places: Sequence[int], new: int = 0) -> Plan:
    """For those who stood in these places among its workers, and so many more. What was predicted was of all."""
    buckets = tuple(replace(b, by_node=(*(b.by_node[place] for place in places), *[b.codec] * new)) if b.by_node else b
                    for b in plan.buckets)
    return replace(plan, buckets=buckets, step_s=0.0, free_s=0.0, steps=0.0, steps_high=0.0)


class Member(Record, frozen=True):
    """A worker process of the job: `rank` counts over all workers, `node` groups those that share one machine."""

    rank: int
    node: int
    name: str
    pid: int = 0
    certificate: str = ""
    """By which it has joined, where there are keys: servers let nobody else in under its rank."""


class ServerInfo(Record, frozen=True):
    """A summation server and where workers reach it."""

    id: int
    address: str
    node: int = 0
    """The machine that it shares with the members of this node number."""
    beside: bool = False
    """It is in the coordinator's process."""
    streams: str = ""
    """Where it takes gRPC streams; of one beside the coordinator, there. Empty: nowhere."""
    returns: bool = False
    """It has a journal, so that it may come back when it was killed."""


class View(Record, frozen=True):
    """Who takes part, in which generation, from which step."""

    generation: int
    members: tuple[Member, ...]
    servers: tuple[ServerInfo, ...]
    plan: str = ""
    """Digest of the plan bytes; empty until rank 0 has handed one in."""
    from_step: int = 0
    gradients: int = -1
    """So many of the job's tensors are gradients; those behind them are buffers, of which servers make means. -1: all are."""


def encode(record: Record) -> bytes:
    """Canonical bytes: sorted keys, so that equal records have equal bytes everywhere."""
    return msgspec.json.encode(record, order="deterministic")


def digest(record: Record) -> str:
    """First 16 hex digits of the SHA-256 of the canonical bytes."""
    return hashlib.sha256(encode(record)).hexdigest()[:16]


MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError)
"""What msgspec raises for bytes that are no such record: of text that is not UTF-8 it says so by itself."""


def decode(data: bytes, kind: type[T], what: str) -> T:
    """The record in `data`, or one line naming `what`, the field and what is wrong with it."""
    try:
        return msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
        raise RecordError(f"{what}: {one_line(error)}") from None
