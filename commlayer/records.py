"""Immutable records that all packages share: jobs, tensors, buckets, plans, membership."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from commlayer.errors import MAX_PEER_TEXT_CHARS, InvalidInput, RecordError, short_line

SCHEMA = 4
"""Version of the format of plan files and control messages. A reader refuses other versions."""

MAX_TENSORS_PER_BUCKET = 64
"""Limit for the slices of a bucket: the frame header has one 64-bit word for the bucket's `used` mask."""

MAX_FRAME_NBYTES = 256 << 20
"""Limit for the body of one frame: a payload, or a server's saved state of a bucket."""

MAX_BUCKET_NBYTES = 128 << 20
"""Limit in bytes for a bucket's elements as float32: half of a frame's body, since a payload can be larger than its input."""

T = TypeVar("T")
_COMPLETED: set[Any] = set()
_COMPLETES = threading.Lock()


def complete(kind: T) -> T:
    """Returns the type `kind`, ready to be decoded in any thread. Every type that msgspec decodes or converts to passes through
    this function.

    msgspec looks up a record's fields when the type is used for the first time. A second thread that uses the type meanwhile
    ends the process with a segmentation fault (msgspec 0.22).
    """
    if kind not in _COMPLETED:
        with _COMPLETES:
            msgspec.msgpack.Decoder(kind)
            _COMPLETED.add(kind)
    return kind


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of all records: immutable, and decoding fails on unknown fields."""


class Spec(Record, frozen=True):
    """Shape and dtype of the data that a codec encodes. Codecs process float32; `dtype` is the parameter's type."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class TensorInfo(Record, frozen=True):
    """A tensor that workers average: a parameter's gradient, or a floating-point buffer. In a Job, gradients precede buffers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    buffer: bool = False
    """True: a module's buffer, such as running statistics. Buffers are averaged without a loss scale and in separate
    buckets."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class ModelInfo(Record, frozen=True):
    """Facts about a model's task that its structure and its first batch show, without training."""

    samples: int = 0
    """Samples of the batch; 0: unknown."""
    tokens: int = 0
    """Tokens of a sample, if the model's first layer is an embedding; else 0."""
    vocabulary: int = 0
    """Size of the vocabulary that the model predicts, if it equals that of its embedding; otherwise 0."""
    image_side: int = 0
    """Pixels per side of an image of three colors, if the model's first layer is a convolution over images; else 0."""
    classes: int = 0
    """Outputs of the last layer, if it is linear; else 0."""
    frozen: int = 0
    """Number of parameters that are not trained."""


class Work(Record, frozen=True):
    """The limits on the time of a forward and a backward pass. The passes take the longest of these times."""

    product_s: float
    """Seconds of matrix products and convolutions on a V100."""
    stream_s: float
    """Seconds in which a V100's memory reads and writes the bytes of all other kernels."""
    launch_s: float
    """Seconds in which the host starts all kernels, whatever the GPU."""


class Timing(Record, frozen=True):
    """Times of one rank's step without communication: when backward produces each gradient, and when forward reads each
    parameter. The order is that of the job's tensors."""

    ready_s: tuple[float, ...]
    """Seconds from the start of backward until the gradient is final."""
    needed_s: tuple[float, ...]
    """Seconds from the start of the next forward pass until it first reads the tensor."""
    backward_s: float
    forward_s: float
    update_s: float = 0.0
    """Seconds of the optimizer's step."""
    device: str = ""
    """Name of the measured device, as in the planner's tables. Empty: the times are for a V100, the reference of node
    speeds."""
    filled: tuple[float, ...] = ()
    """Average fraction of nonzero elements of each gradient, as sent and received. Empty: all elements are nonzero."""
    half: bool = False
    """True: the step computes in bf16 or the GPU's fastest precision; node speeds then refer to that precision."""
    activation_nbytes: float = 0.0
    """Bytes of activations that a backward pass needs; 0: unknown."""
    noise_scale: float = 0.0
    """The gradient noise scale in samples, or in batches if the job's batch is unknown. Batches much smaller than the noise
    scale profit from more workers, larger ones do not. 0: unknown, but `model` may tell it."""
    frozen_nbytes: float = 0.0
    """Bytes of parameters that are not trained."""
    model: ModelInfo | None = None
    """None: unknown."""
    work: Work | None = None
    """What limits the step, from which node speeds follow; None: the times were measured, or published."""
    micro_batches: int = 1
    """Number of backward passes whose gradients a step accumulates before the exchange."""

    def scaled(self, factor: float) -> Timing:
        """Returns a copy with all times multiplied by `factor` and the device unknown."""
        return replace(
            self, ready_s=tuple(at * factor for at in self.ready_s), needed_s=tuple(at * factor for at in self.needed_s),
            backward_s=self.backward_s * factor, forward_s=self.forward_s * factor, update_s=self.update_s * factor, device="")


class Job(Record, frozen=True):
    """A model's tensors and batch size. Two workers can train one job only if their Jobs have equal digests."""

    tensors: tuple[TensorInfo, ...]
    batch: int | None = None
    timing: Timing | None = None
    """Step times, measured or from a table. Planning needs them, training does not."""
    name: str = ""

    @property
    def numel(self) -> int:
        return sum(t.numel for t in self.tensors)

    @property
    def timed(self) -> Timing:
        """The step times. Raises InvalidInput for a job without them."""
        if self.timing is None:
            raise InvalidInput("E-PLAN-INPUT", f"job {self.name!r} has no timing, but planning needs step times: measure it "
                                               "with `commlayer profile FILE.py:FUNCTION`, or use a built-in model")
        return self.timing

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


class BucketReason(Record, frozen=True):
    """The planner's prediction for one bucket, and the second-best alternative. Users see it; no decision depends on it."""

    seconds: float
    """Seconds from the bucket's gradients being ready to the arrival of the average, in the simulated step."""
    nbytes: int
    """Bytes that one node sends and receives for the bucket in a step."""
    reason: str
    runner_up: str = ""
    runner_up_s: float = 0.0
    """Seconds by which the alternative lengthens a step. Negative: steps are shorter, but training needs more of them."""
    runner_up_later: float = 0.0
    """Relative increase of the training time to a given loss with the alternative, by the cautious estimate; 0: the planner
    ignored convergence."""


def over_server(path: str) -> bool:
    """Returns True if a bucket's path uses a summation server.

    >>> over_server("service"), over_server("encode@cpu net.push net.pull decode@cpu"), over_server("allreduce")
    (True, True, False)
    """
    return path == "service" or "net.push" in path


def chunk_with(row: int, rows: int, ranks: int) -> int:
    """Returns which rank has a row, if rows are divided over ranks as torch.chunk does.

    >>> [chunk_with(row, 5, 4) for row in range(5)]
    [0, 0, 1, 1, 2]
    """
    return row // -(-rows // ranks)


class Bucket(Record, frozen=True):
    """The unit of planning, compressing and sending: a slice of a large tensor, or several small tensors."""

    id: int
    slices: tuple[Slice, ...]
    path: str
    """How the bucket is summed: "service" (over a summation server), "allreduce" (one collective over all ranks), or a sequence
    of operations in the grammar of planner/tree.py."""
    codec: str = "identity()"
    server: int = 0
    """Number of the summation server of this bucket; used only with a path over a server."""
    owner: int = 0
    """Local rank that encodes and sends this bucket on each node; used only with path "service"."""
    shape: tuple[int, ...] = ()
    """Shape that the codec sees; empty: a vector. A bucket of one complete tensor can keep the tensor's shape, which low-rank
    codecs need."""
    down: str = ""
    """Codec of the download from the server; empty: the same as for the upload."""
    by_node: tuple[str, ...] = ()
    """Upload codec of each node, if nodes differ (a slow link uses a smaller ratio); empty: all nodes use `codec`. All codecs
    must belong to one family, since one server decodes the payloads."""
    coder: str = ""
    """"gpu": the bucket is encoded on the GPU. Empty: on the CPU."""
    stale: bool = False
    """True: the average of a step is applied one step late."""
    why: BucketReason | None = None
    rows: tuple[int, ...] = ()
    """The bucket's first row, and the number of rows of its first tensor, if sites divide the tensor among their ranks. The
    owner is then the rank of a site that has this row. Empty: `owner` names it."""

    @property
    def numel(self) -> int:
        return sum(s.numel for s in self.slices)

    @property
    def spec(self) -> Spec:
        return Spec(self.shape or (self.numel,))

    @property
    def served(self) -> bool:
        return over_server(self.path)

    def owner_in(self, site: Sequence[int]) -> int:
        """The rank of a site that exchanges the bucket. In a site with fewer ranks than `Plan.ranks_per_node`, some ranks
        exchange more buckets."""
        return site[chunk_with(self.rows[0], self.rows[1], len(site)) if self.rows else self.owner % len(site)]


class Plan(Record, frozen=True):
    """All decisions for a job's communication. `buckets` are in the order in which they become ready, which is also the order
    of collectives."""

    job: str
    """Digest of the Job that the plan was made for."""
    buckets: tuple[Bucket, ...]
    servers: int = 0
    ranks_per_node: int = 1
    """Number of ranks among which the buckets of a node are divided; see `Bucket.owner_in`."""
    local_steps: int = 1
    """Number of local training steps per exchange; 1: every step is synchronized."""
    codes: Literal["gradients", "updates"] = "gradients"
    """The values that are compressed and exchanged: "gradients", or "updates" (weight changes). More than one local step
    implies updates; see `steps_locally`."""
    overlap: Literal["", "round", "forward"] = ""
    """What runs during an exchange: "" nothing, "round" the next local steps (or the next step), "forward" the next forward
    pass."""
    fragments: int = 1
    """Number of fragments into which the model's weight changes are split; fragments are exchanged one after the other."""
    step_s: float = 0.0
    """Predicted seconds per step; 0: no prediction."""
    steps: float = 0.0
    """Predicted convergence factor: steps until a given loss, relative to uncompressed synchronous training. 0: no prediction.
    """
    steps_high: float = 0.0
    """Pessimistic estimate of the convergence factor, which the planner uses for decisions; 0: no prediction."""
    hosts: tuple[int, ...] = ()
    """Node that hosts each server, as an index into the planned cluster. Empty: servers run on the first node that can host
    one."""
    ratio_over: Literal["bucket", "plan"] = "bucket"
    """What a sparse codec's ratio refers to. "bucket": the elements of each bucket. "plan": all server buckets together, with
    one threshold, so buckets with larger gradients send more."""
    warmup: int = 0
    """Number of first steps of the job during which sparse codecs over servers decrease their ratios from 25 %; 0: none."""
    schema: int = SCHEMA

    @property
    def steps_locally(self) -> bool:
        """True: each rank applies its own gradients, and exchanges send weight changes instead of gradients."""
        return self.local_steps > 1 or self.codes == "updates"

    @property
    def exchange_steps(self) -> int:
        """Number of steps between two exchanges."""
        return self.local_steps // self.fragments

    @property
    def synchronous(self) -> bool:
        """True: each step uses the average of all workers' gradients of that step, apart from compression errors."""
        return not self.steps_locally and not any(bucket.stale for bucket in self.buckets)


def with_updates(plan: Plan) -> Plan:
    """The plan with weight changes exchanged in every step and no bucket applied one step late. (Gradients applied late would
    make ranks diverge.)"""
    buckets = tuple(replace(b, stale=False) if b.stale else b for b in plan.buckets)
    return replace(plan, codes="updates", overlap="", buckets=buckets)


class Member(Record, frozen=True):
    """A worker process. `rank` is its number among all workers; workers with equal `node` share a machine."""

    rank: int
    node: int
    name: str
    pid: int = 0
    certificate: str = ""
    """Certificate with which the worker registered; empty: the job has no keys. Servers accept only this certificate for the
    worker's rank."""
    site_world: int = 1
    """Number of workers of its site. The workers of a site have equal `node`, exchange together, and enter and leave the job
    together."""


def group_by_site(members: Iterable[Member]) -> list[tuple[int, ...]]:
    """The ranks of each site's workers, in the order of members."""
    sites: dict[tuple[int, int], list[int]] = {}
    for m in members:
        sites.setdefault((0, m.node) if m.site_world > 1 else (1, m.rank), []).append(m.rank)
    return [*map(tuple, sites.values())]


def plan_for_members(plan: Plan, before: Iterable[Member], members: Iterable[Member]) -> Plan:
    """The plan after a change of members. Removes the predictions, which were for the members `before`."""
    former, sites = group_by_site(before), group_by_site(members)
    buckets = tuple(replace(b, by_node=tuple(b.by_node[former.index(site)] if site in former else b.codec for site in sites))
                    if b.by_node else b for b in plan.buckets)
    return replace(plan, buckets=buckets, step_s=0.0, steps=0.0, steps_high=0.0)


class ServerInfo(Record, frozen=True):
    id: int
    address: str
    node: int = 0
    """Node number of the members on the server's machine."""
    colocated: bool = False
    """True: the server runs in the coordinator's process."""
    streams: str = ""
    """Address for gRPC streams: the coordinator's own address if the server runs in its process. Empty: the server accepts no
    gRPC streams."""
    restartable: bool = False
    """True: the server has a journal, so it can be restarted after a crash."""


class Epoch(Record, frozen=True):
    """Membership of one epoch: its generation number, members, servers and first step."""

    generation: int
    members: tuple[Member, ...]
    servers: tuple[ServerInfo, ...]
    plan: str = ""
    """Digest of the encoded plan; empty until rank 0 has sent one."""
    from_step: int = 0
    gradients: int = -1
    """Number of gradients among the job's tensors; the following tensors are buffers, which servers average too. -1: all are
    gradients."""
    tensors: int = -1
    """Number of the job's tensors, and of their elements, which bound every plan of the job. -1: unknown."""
    elements: int = -1
    run: str = ""
    """Identifies the run in events; the same in all epochs of a job."""


def encode(record: Record) -> bytes:
    """Encodes a record as JSON with sorted keys, so equal records give equal bytes on every machine."""
    return msgspec.json.encode(record, order="deterministic")


def digest(record: Record) -> str:
    """First 16 hex digits of the SHA-256 of the record's encoded bytes."""
    return hashlib.sha256(encode(record)).hexdigest()[:16]


MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that msgspec raises for malformed bytes. msgspec skips unknown fields by recursion."""


def decode(data: bytes, kind: type[T], what: str) -> T:
    """Decodes JSON bytes into a record of type `kind`. A RecordError names `what`, the field and the problem in one line."""
    try:
        return msgspec.json.decode(data, type=complete(kind))
    except MALFORMED as error:
        raise RecordError("E-RECORD", f"{what}: {short_line(error, MAX_PEER_TEXT_CHARS)}") from None
