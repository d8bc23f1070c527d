"""Immutable records shared by all parts: jobs, tensors, buckets, plans, epochs."""

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
"""Limit for a frame's body: a payload, or a server's state of a bucket when it is saved."""

MAX_BUCKET_NBYTES = 128 << 20
"""Limit for a bucket's elements as float32. Half of a frame's body, since a payload can be larger than its input."""

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all records: immutable, and an unknown field is an error."""


class Spec(Record, frozen=True):
    """Shape and dtype of what is encoded. Codecs see float32; dtype is the parameter's."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class TensorInfo(Record, frozen=True):
    """A tensor that workers average. In registration order, parameters' gradients come first, then float buffers."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    buffer: bool = False
    """A buffer (running statistics) is averaged as it is: without a loss scale, and never in a bucket with gradients."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Timing(Record, frozen=True):
    """When computation produces and needs each tensor in one rank's step, without communication. Same order as the
    tensors."""

    ready_s: tuple[float, ...]
    """Seconds from the start of backward until the gradient is final."""
    needed_s: tuple[float, ...]
    """Seconds from the start of the next forward pass until it first reads the tensor."""
    backward_s: float
    forward_s: float
    update_s: float = 0.0
    """The optimizer's step."""
    device: str = ""
    """The device that was measured, as tables name it. Empty: the reference device of the nodes' speeds."""
    filled: tuple[float, ...] = ()
    """Average nonzero part of each gradient, sent and received. Empty: all elements."""
    half: bool = False
    """Whether computation uses bf16, or the GPU's fastest precision; node speeds then refer to that precision."""
    activation_nbytes: float = 0.0
    """Memory that a step keeps for its backward pass; 0: unknown."""

    def scaled(self, factor: float) -> Timing:
        """All times multiplied by `factor`; the device becomes unknown."""
        return Timing(
            tuple(at * factor for at in self.ready_s), tuple(at * factor for at in self.needed_s), self.backward_s * factor,
            self.forward_s * factor, self.update_s * factor, filled=self.filled, half=self.half,
            activation_nbytes=self.activation_nbytes,
        )


class Job(Record, frozen=True):
    """Model and batch. Two workers can train one job only if their Jobs have equal digests."""

    tensors: tuple[TensorInfo, ...]
    batch: int | None = None
    timing: Timing | None = None
    """Measured or from a table. Needed for planning, not for training."""
    name: str = ""

    @property
    def numel(self) -> int:
        return sum(t.numel for t in self.tensors)

    def digest(self) -> str:
        return digest(Job(self.tensors))


class Slice(Record, frozen=True):
    """Elements [start, stop) of a tensor in logical (row-major) order, independent of its memory layout."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Why(Record, frozen=True):
    """The planner's prediction for a bucket's path, for people to read."""

    seconds: float
    """From ready to done, in the simulated step."""
    nbytes: int
    """Bytes that one node sends and receives for the bucket."""
    reason: str
    runner_up: str = ""
    runner_up_s: float = 0.0
    """Extra time of the whole step with the runner-up. Below 0: its steps are shorter, but more of them are needed."""
    runner_up_later: float = 0.0
    """Extra time to reach a loss with the runner-up, as a cautious fraction; 0 if the planner did not compare convergence."""


def over_server(path: str) -> bool:
    """Whether a bucket's path uses a summation server.

    >>> over_server("service"), over_server("encode@cpu net.push net.pull decode@cpu"), over_server("allreduce")
    (True, True, False)
    """
    return path == "service" or "net.push" in path


class Bucket(Record, frozen=True):
    """The unit of planning and sending: a slice of a large tensor, or several small tensors."""

    id: int
    slices: tuple[Slice, ...]
    path: str
    """"service" (encode, push, sum, result, decode), "allreduce" (a planned collective over all ranks), or a path spelled
    as in planner/tree.py."""
    codec: str = "identity()"
    server: int = 0
    """Number of the server that sums it (path "service")."""
    owner: int = 0
    """Local rank of each node that encodes and sends it (path "service")."""
    shape: tuple[int, ...] = ()
    """Empty: a vector. A bucket of one whole tensor may keep that tensor's shape, which low-rank codecs need."""
    down: str = ""
    """Download codec, if it differs from the upload codec."""
    by_node: tuple[str, ...] = ()
    """Codecs per node, if they differ (a slow link uses a smaller ratio). All belong to one family, so that the server can
    decode them."""
    coder: str = ""
    """"gpu": a service bucket is encoded on the device. Empty: on the host."""
    stale: bool = False
    """Whether a step's result is applied in the next step."""
    why: Why | None = None

    @property
    def numel(self) -> int:
        return sum(s.numel for s in self.slices)

    @property
    def spec(self) -> Spec:
        return Spec(self.shape or (self.numel,))

    @property
    def served(self) -> bool:
        return over_server(self.path)


class Plan(Record, frozen=True):
    """The decisions for all buckets. `buckets` are in the order in which they become ready; collectives run in this order."""

    job: str
    """Digest of the Job that the plan is for."""
    buckets: tuple[Bucket, ...]
    servers: int = 0
    ranks_per_node: int = 1
    local_steps: int = 1
    """Local training steps per exchange."""
    codes: Literal["gradients", "updates"] = "gradients"
    """What an exchange carries. With several local steps it is always updates; see `steps_locally`."""
    overlap: Literal["", "round", "forward"] = ""
    """What runs during an exchange: nothing, the next round of local steps (or the next step), or the next forward pass."""
    fragments: int = 1
    """Number of parts into which a round's updates are split; the parts are exchanged one after the other."""
    step_s: float = 0.0
    """Predicted seconds per step; 0: no prediction."""
    free_s: float = 0.0
    """Predicted seconds per step if coding took no time, by a search. Not a lower bound: another plan may be faster."""
    steps: float = 0.0
    """Predicted convergence factor: steps to a loss relative to dense synchronous training. 0: no prediction."""
    steps_high: float = 0.0
    """The cautious convergence factor, which the planner uses."""
    hosts: tuple[int, ...] = ()
    """Node of each server, as an index into the planned cluster. Empty: the first node that can host one."""
    ratio_over: Literal["bucket", "plan"] = "bucket"
    """Base of a sparse codec's ratio. "bucket": each bucket. "plan": all server buckets together with one threshold, so
    that buckets with larger gradients send more."""
    warmup: int = 0
    """Steps of the job over which the ratios of sparse codecs over servers decrease from 25 %; 0: none."""
    schema: int = SCHEMA

    @property
    def steps_locally(self) -> bool:
        """Whether each rank applies its own gradients, and exchanges carry the weights' changes."""
        return self.local_steps > 1 or self.codes == "updates"


def plan_of(plan: Plan, places: Sequence[int], new: int = 0) -> Plan:
    """The plan for the workers at these places of the old membership, plus `new` further ones. Predictions are dropped:
    they were for the old membership."""
    buckets = tuple(replace(b, by_node=(*(b.by_node[place] for place in places), *[b.codec] * new)) if b.by_node else b
                    for b in plan.buckets)
    return replace(plan, buckets=buckets, step_s=0.0, free_s=0.0, steps=0.0, steps_high=0.0)


def with_updates(plan: Plan) -> Plan:
    """The plan with coded updates in every step and no late results: averaged gradients would let the ranks diverge."""
    buckets = tuple(replace(b, stale=False) if b.stale else b for b in plan.buckets)
    return replace(plan, codes="updates", overlap="", buckets=buckets)


class Member(Record, frozen=True):
    """A worker process: `rank` is its number among all workers, `node` groups workers on one machine."""

    rank: int
    node: int
    name: str
    pid: int = 0
    certificate: str = ""
    """Certificate that the worker joined with, if there are keys. Servers accept only this certificate for its rank."""


class ServerInfo(Record, frozen=True):
    id: int
    address: str
    node: int = 0
    """The server shares a machine with the members of this node number."""
    colocated: bool = False
    """The server runs in the coordinator's process."""
    streams: str = ""
    """Address for gRPC streams; the coordinator's own if the server runs beside it. Empty: no gRPC."""
    restartable: bool = False
    """The server has a journal, so that it can be restarted after a crash."""


class View(Record, frozen=True):
    """An epoch's membership: generation, members, servers and first step."""

    generation: int
    members: tuple[Member, ...]
    servers: tuple[ServerInfo, ...]
    plan: str = ""
    """Digest of the plan bytes; empty until rank 0 has sent one."""
    from_step: int = 0
    gradients: int = -1
    """Number of leading tensors that are gradients. The rest are buffers, which servers average. -1: all are gradients."""


def encode(record: Record) -> bytes:
    """Canonical bytes: sorted keys, so that equal records have equal bytes everywhere."""
    return msgspec.json.encode(record, order="deterministic")


def digest(record: Record) -> str:
    """First 16 hex digits of the SHA-256 of the canonical bytes."""
    return hashlib.sha256(encode(record)).hexdigest()[:16]


MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError)
"""Errors that msgspec raises for malformed bytes; text that is not UTF-8 raises its own."""


def decode(data: bytes, kind: type[T], what: str) -> T:
    """Decodes a record; the one-line error names `what`, the field and the problem."""
    try:
        return msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
        raise RecordError("E-RECORD", f"{what}: {one_line(error)}") from None
