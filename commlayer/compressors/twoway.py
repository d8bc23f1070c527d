"""One codec up to the server, another down to the workers. Knows neither's format."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import torch

from commlayer.compressors.codec import Buffer, Codec, Out, Round, State
from commlayer.compressors.feedback import ErrorFeedback, wrap
from commlayer.compressors.oneround import OneRound, spell
from commlayer.compressors.parse import parse
from commlayer.records import Bucket, Spec


class TwoWay(msgspec.Struct, frozen=True):
    """Workers send `up` payloads, the server sends the sum as a `down` payload. Each keeps its own residual."""

    name: ClassVar[str] = "two_way"
    rounds: ClassVar[tuple[Round, ...]] = (Round.GATHER,)
    biased: ClassVar[bool] = False
    in_place: ClassVar[bool] = False

    up: Any
    down: Any

    def __str__(self) -> str:
        return spell(self)

    @property
    def keeps(self) -> bool:
        return bool(self.up.keeps or self.down.keeps)

    @property
    def id(self) -> int:
        return int(self.up.id)

    def bound(self, spec: Spec) -> int:
        return max(int(self.up.bound(spec)), int(self.down.bound(spec)))

    def init(self, spec: Spec) -> State:
        return {"up": self.up.init(spec)}

    def init_server(self, spec: Spec) -> State:
        return {"down": self.down.init_server(spec)}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        return int(self.up.start(x, state["up"], out))

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int:
        return int(self.up.next(r, result, state["up"], out))

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        return bool(_bare(self.down).decode(result, {}, out))

    def undo(self, state: State) -> None:
        self.up.undo(state["up"])

    def undo_server(self, state: State) -> None:
        self.down.undo_server(state["down"])

    def zeros(self, spec: Spec, r: int) -> Any:
        return self.up.zeros(spec, r)

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        self.up.add(r, payload_, acc, first=first)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        return int(self.down.emit(r, acc, state["down"], out))


def two_way(up: Codec, down: Codec) -> TwoWay:
    """Both must be of one round and sum in dense float32, as most do. topk(ratio=1.0) down forwards the merged sparse sum."""
    for what, codec in (("up", up), ("down", down)):
        if not isinstance(_bare(codec), OneRound):
            raise ValueError(f"two_way: {what} is {codec}, allowed is a codec of one round that sums in dense float32")
    return TwoWay(up, down)


def codec_of(bucket: Bucket, node: int | None = None) -> Codec:
    """The codec that a plan gives a bucket; with `node` the one that this node encodes with."""
    text = bucket.by_node[node] if node is not None and bucket.by_node else bucket.codec
    codec = wrap(parse(text))
    return two_way(codec, wrap(parse(bucket.down))) if bucket.down else codec


def _bare(codec: Any) -> Any:
    return codec.inner if isinstance(codec, ErrorFeedback) else codec
