"""Creates codecs from their names in plans, and reports a codec's properties.

parse() creates a codec from its name, and make_codec() from a plan's bucket. TwoWay uses one codec for uploads and another for
downloads. runs_on() is True if a codec has kernels for a device. sparse_result_codec() returns the codec that reads results as
entries. is_summable() and is_separable() tell how payloads can be summed without a server.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from commlayer.codec_spec import CodecSpec, parse_spec
from commlayer.compressors import kernels
from commlayer.compressors.blockwise import Int4, Int8, OneBit, Qsgd
from commlayer.compressors.codec import Codec, CodecWrapper, OneRound, Ranges, Reduction, State
from commlayer.compressors.dense import Bf16, Fp16, Identity
from commlayer.compressors.feedback import ErrorFeedback, Momentum, encodes_updates, wrap
from commlayer.compressors.global_budget import BudgetedTopK, with_budget
from commlayer.compressors.kernels import Array
from commlayer.compressors.payload import Buffer, Out
from commlayer.compressors.powersgd import PowerSGD
from commlayer.compressors.randomk import RandomK
from commlayer.compressors.topk import BlockThreshold, TopK
from commlayer.errors import CorruptPayload, InvalidInput, without_code
from commlayer.records import Bucket, Plan, Spec

if TYPE_CHECKING:
    import torch

log = logging.getLogger("commlayer")

WITH_KERNELS = (Identity, Fp16, Bf16, Int8, Int4, TopK)
_reported: set[str] = set()
"""Texts of kernel launch errors that were already logged, so each is logged only once."""


class TwoWay(CodecWrapper, frozen=True):
    """Uploads are payloads of `inner`, downloads those of `down`: see two_way."""

    name: ClassVar[str] = "two_way"

    down: Codec

    def __post_init__(self) -> None:
        allowed = "but it must be a codec of one round with a dense float32 sum"
        if not is_separable(self.inner):
            raise InvalidInput("E-CODEC-ARGUMENT", f"two_way: up is {self.inner}, {allowed}")
        if not is_download_codec(self.down):
            raise InvalidInput("E-CODEC-ARGUMENT",
                               f"two_way: down is {self.down}, {allowed}, with or without error_feedback")

    @property
    def rounds(self) -> tuple[Reduction, ...]:  # type: ignore[override]
        return (Reduction.GATHER,)

    @property
    def biased(self) -> bool:  # type: ignore[override]
        return False

    @property
    def needs_undo(self) -> bool:  # type: ignore[override]
        return self.inner.needs_undo or self.down.needs_undo

    @property
    def has_server_residual(self) -> bool:  # type: ignore[override]
        return self.down.has_server_residual

    def bound(self, spec: Spec) -> int:
        return max(int(self.inner.bound(spec)), int(self.down.bound(spec)))

    def init_server(self, spec: Spec) -> State:
        return {"down": self.down.init_server(spec)}

    def decode(self, result: Buffer, state: State, out: Array) -> bool:
        return bool(_bare(self.down).decode(result, {}, out))

    def undo_server(self, state: State, elements: Ranges = None) -> None:
        self.down.undo_server(state["down"], elements)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        return self.down.emit(r, acc, state["down"], out)


def two_way(up: Codec, down: Codec) -> TwoWay:
    """Compresses uploads with codec `up` and the server's sum (the download) with codec `down`. Workers and servers keep
    separate residuals. Both codecs must have one round and a dense float32 sum, as most codecs have. With topk(ratio=1.0) as
    `down`, the server sends all nonzero entries of the sum."""
    return TwoWay(up, down)


def is_download_codec(codec: Codec) -> bool:
    """True: the codec can be used as `down` of two_way."""
    return isinstance(_bare(codec), OneRound) and is_separable(codec)


def make_codec(bucket: Bucket, node: int | None = None, plan: Plan | None = None) -> Codec:
    """Returns the codec of a plan's bucket; with `node`, the codec that this node compresses with.

    Without `plan`, settings of the plan for all buckets (ratio_over, warmup) are ignored. Payload sizes then follow from the
    codec's own ratio.
    """
    codec = wrap(parse(bucket.codec))
    for text in filter(None, (bucket.codec, bucket.down)):
        for part in parse_spec(text).layers():
            kernels.check_supported(part)
    for text in bucket.by_node:
        _check_alike(bucket, codec, wrap(parse(text)))
    if node is not None and bucket.by_node:
        codec = wrap(parse(bucket.by_node[node]))
    codec = two_way(codec, wrap(parse(bucket.down))) if bucket.down else codec
    # Collectives reserve the largest size in every step and send it, so they would gain nothing from a changing size.
    if bucket.path != "service" or plan is None:
        return codec
    ratios = [ratio for text in bucket.by_node or (bucket.codec,) if (ratio := parse_spec(text).ratio) is not None]
    return with_budget(codec, fmean(ratios) if ratios else None, steps=plan.warmup, shared=plan.ratio_over == "plan")


def _check_alike(bucket: Bucket, server: Codec, node: Codec) -> None:
    """Raises InvalidInput unless the server, which uses the bucket's codec, can read the payloads of this node's codec."""
    if _read(server) != _read(node):
        raise InvalidInput("E-PLAN-BY-NODE",
                           f"bucket {bucket.id}: by_node has {node}, whose payloads a server with {server} does not read; only "
                           "the ratios may differ")
    if node.needs_undo != server.needs_undo:
        raise InvalidInput("E-PLAN-BY-NODE",
                           f"bucket {bucket.id}: by_node has {node} and the bucket's codec is {server}, but only one of them "
                           "keeps a residual; use error_feedback for both or for neither")
    if node.bound(bucket.spec) > server.bound(bucket.spec):
        raise InvalidInput("E-PLAN-BY-NODE",
                           f"bucket {bucket.id}: by_node has {node}, whose payloads are larger than those of the bucket's "
                           f"codec {server}; the bucket's codec must have the largest payloads")


def _read(codec: Any) -> Any:
    """Returns the parts of a codec that a server must know to read payloads: everything except ratios, the selection method,
    and workers' residuals."""
    if isinstance(codec, Momentum | ErrorFeedback) and not encodes_updates(codec):
        return _read(codec.inner)
    if isinstance(codec, msgspec.Struct):
        names = (name for name in codec.__struct_fields__ if name not in ("ratio", "exact"))
        return type(codec), *(_read(getattr(codec, name)) for name in names)
    return codec


def _bare(codec: Any) -> Any:
    codec = codec.inner if isinstance(codec, ErrorFeedback) else codec
    return codec.inner if isinstance(codec, BudgetedTopK) else codec


FACTORIES: Mapping[str, type[Codec]] = {kind.name: kind for kind in (
    Identity, Fp16, Bf16, Int8, TopK, Int4, Qsgd, OneBit, BlockThreshold, RandomK, PowerSGD, ErrorFeedback, Momentum)}


def parse(text: str) -> Codec:
    """Creates the codec with this name in plans, for example "error_feedback(topk(ratio=0.01, values='int8'))"."""
    return build(parse_spec(text))


def build(name: CodecSpec) -> Codec:
    """Creates the codec of a parsed name. Raises InvalidInput for nestings that cannot work."""
    arguments = {argument: build(value) if isinstance(value, CodecSpec) else value for argument, value in name.arguments}
    return FACTORIES[name.family](**arguments)


def runs_on(codec: Codec, device: torch.device) -> bool:
    """True: a worker can run the codec on the device, because the codec has kernels and this machine can launch them."""
    if not isinstance(_bare(codec), WITH_KERNELS):
        return False
    from commlayer.gpu.launch import launcher  # loads torch

    try:
        launcher(device)
    except ValueError as error:
        if str(error) not in _reported:
            _reported.add(str(error))
            log.warning("%s; gradients are compressed on the CPU instead", without_code(error))
        return False
    return True


def result_codec(codec: Any) -> Any:
    """Returns the innermost codec that decodes results (downloads) of `codec`."""
    while isinstance(codec, CodecWrapper):
        codec = codec.down if isinstance(codec, TwoWay) else codec.inner
    return codec


def sparse_result_codec(codec: Any) -> TopK | RandomK | None:
    """Returns the codec that reads results as positions and values; None if results are dense."""
    inner = result_codec(codec)
    return inner if isinstance(inner, TopK | RandomK) else None


def is_summable(codec: Codec) -> bool:
    """True: an all-reduce can sum accumulators of single payloads, after which `emit` sends the sum."""
    return all(r is not Reduction.GATHER for r in codec.rounds)


def is_separable(codec: Any) -> bool:
    """True: each payload can be decompressed separately and added to a dense sum.

    This excludes two_way, codecs of several rounds, and random-k, whose accumulators contain only values.
    """
    while isinstance(codec, CodecWrapper) and not isinstance(codec, TwoWay):
        codec = codec.inner
    return isinstance(codec, OneRound) and type(codec).new_accumulator is OneRound.new_accumulator


class ReducedAccumulator:
    """An accumulator of one payload that two all-reduces turn into the sum of all members' payloads.

    The caller all-reduces `values` by sum and `facts` (flags and seeds) by maximum, both in place.
    """

    def __init__(self, acc: Any) -> None:
        import torch

        self._acc = acc
        self.values = torch.from_numpy(acc["sum"])
        seeds = acc.get("seed", [])
        self.facts = torch.tensor([int(acc["flagged"][0]), *seeds, *(-seed for seed in seeds)], dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """Number of bytes that each member contributes."""
        return int(self.values.nbytes + self.facts.nbytes)

    def merge(self) -> None:
        """Updates the accumulator after both all-reduces. If payloads cannot be added, raises CorruptPayload on all members."""
        flagged, *seeds = self.facts.tolist()
        self._acc["flagged"][0] = bool(flagged)
        if not flagged and seeds and seeds[0] != -seeds[1]:
            raise CorruptPayload("members used different seeds, so their payloads have entries at different positions")
