"""The one table of codecs, the inputs they are tried on, and a step through worker and server sides. Knows no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from oracle import codec_kernels

from commlayer import native
from commlayer.compressors import (
    bf16,
    block_threshold,
    error_feedback,
    fp16,
    identity,
    int4,
    int8,
    kernels,
    momentum,
    onebit,
    parse,
    powersgd,
    qsgd,
    randomk,
    topk,
    wrap,
)
from commlayer.compressors.codec import Codec, State
from commlayer.records import Spec

PLAIN: list[Codec] = [
    identity(),
    fp16(),
    bf16(),
    int8(),
    int8(block=48),
    topk(ratio=0.01),
    topk(ratio=0.03, values="fp16"),
    topk(ratio=0.2, values="fp32"),
    topk(ratio=1.0, values="int8"),
    topk(ratio=0.05, values="fp32", exact=True),
    int4(),
    int4(block=8),
    qsgd(),
    qsgd(block=128, levels=15, norm="l2"),
    qsgd(block=64, levels=127),
    onebit(),
    onebit(block=40),
    topk(ratio=0.02, values="bf16"),
    topk(ratio=0.05, values="int4"),
    block_threshold(ratio=0.05),
    block_threshold(ratio=0.1, run=8, values="fp32"),
    block_threshold(ratio=1.0, run=64, values="int4"),
    block_threshold(ratio=0.2, values="bf16"),
    randomk(ratio=0.1),
    randomk(ratio=0.3, values="fp16"),
    randomk(ratio=0.3, values="bf16", unbiased=True),
    randomk(ratio=1.0, unbiased=True),
]
CODECS: list[Codec] = PLAIN + [error_feedback(codec) for codec in PLAIN]
NAMED: dict[str, str] = {
    "identity": "identity()",
    "fp16": "fp16()",
    "bf16": "bf16()",
    "int8": "int8()",
    "int4": "int4()",
    "qsgd": "qsgd()",
    "onebit": "onebit()",
    "topk": "topk(ratio=0.05)",
    "block_threshold": "block_threshold(ratio=0.1)",
    "randomk": "randomk(ratio=0.2)",
    "powersgd": "powersgd(rank=2)",
    "error_feedback": "error_feedback(int8(), lr_correction=True)",
    "momentum": "momentum(topk(ratio=0.1), beta=0.5)",
}
"""Every name that a plan may use, as a plan would spell it."""
EVERY: dict[str, Codec] = {name: wrap(parse(text)) for name, text in NAMED.items()}
"""What a plan makes of them: error feedback where it is needed."""
NESTED: list[Codec] = [
    powersgd(rank=200),
    momentum(identity(), 0.9),
    wrap(momentum(powersgd(rank=2), 0.5)),
]
EACH: dict[str, Codec] = EVERY | {str(codec): codec for codec in (*CODECS, *NESTED)}
COARSE = ("int4", "qsgd", "onebit", "randomk", "block_threshold")
"""Codecs whose codes are far from what they stand for, so that only with feedback what goes in comes out."""
SIZES = [0, 1, 2, 31, 257, 4096, 4097, 20_011]
BACKENDS = {"oracle": codec_kernels} | ({} if native.core is None else {"native": native.core})
AVAILABLE = list(BACKENDS)


def use(backend: str) -> AbstractContextManager[None]:
    """Codecs run on this backend inside a with block."""
    return kernels.use(BACKENDS[backend])


def noise(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def room(codec: Codec, spec: Spec) -> memoryview:
    return memoryview(bytearray(codec.bound(spec)))


def residual(state: State) -> torch.Tensor:
    """A copy of the residual."""
    return torch.from_numpy(state["residual"].copy())


def coarse(codec: Codec) -> bool:
    return "error_feedback" not in str(codec) and any(word in str(codec) for word in COARSE)


def encode(codec: Codec, x: torch.Tensor, state: State) -> memoryview:
    """The payload of round 0 in separate memory."""
    out = room(codec, Spec((x.numel(),)))
    return out[: codec.start(x, state, out)]


def decoded(codec: Codec, payload: memoryview | bytes, n: int) -> torch.Tensor:
    out = torch.full((n,), 7.0)
    codec.decode(payload, codec.init(Spec((n,))), out)
    return out


def summed(codec: Codec, acc: Any, n: int) -> torch.Tensor:
    """What an accumulator of round 0 holds, as the dense tensor: it is that, or holds the values of a SUM round alone."""
    total = torch.from_numpy(acc["sum"].copy())
    if total.numel() == n:
        return total
    out = room(codec, Spec((n,)))
    return decoded(codec, out[: codec.emit(0, acc, codec.init_server(Spec((n,))), out)], n)


class Cluster:
    """Workers and a server of one bucket. A step runs all rounds and returns each worker's decoded sum."""

    def __init__(self, codec: Codec, spec: Spec, workers: int) -> None:
        self.codec, self.spec = codec, spec
        self.states = [codec.init(spec) for _ in range(workers)]
        self.server = codec.init_server(spec)
        self.accs = [codec.new_accumulator(spec, r) for r in range(len(codec.rounds))]
        self.rooms = [room(codec, spec) for _ in range(workers)]
        self.result = room(codec, spec)
        self.payloads: list[memoryview] = []
        self.finite: list[bool] = []

    def step(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        codec, result, self.xs = self.codec, memoryview(b""), list(xs)
        for r, acc in enumerate(self.accs):
            self.payloads = []
            for x, state, out in zip(xs, self.states, self.rooms, strict=True):
                nbytes = codec.start(x, state, out) if r == 0 else codec.next(r - 1, result, state, out)
                self.payloads.append(out[:nbytes])
            for i, payload in enumerate(self.payloads):
                codec.add(r, payload, acc, first=i == 0)
            result = memoryview(bytes(self.result[: codec.emit(r, acc, self.server, self.result)]))
        sums = [torch.full((self.spec.numel,), 7.0) for _ in xs]
        self.finite = [codec.decode(result, state, out) for state, out in zip(self.states, sums, strict=True)]
        return sums

    def undo(self) -> None:
        """An aborted step, in the order of the runtime."""
        for state, x in zip(self.states, self.xs, strict=True):
            self.codec.undo(state, x)
        self.codec.undo_server(self.server)

    def kept(self) -> torch.Tensor:
        """The sum of all residuals, including the server's, in float64."""
        def residuals(state: State) -> Iterator[torch.Tensor]:
            if "residual" in state:
                yield residual(state).double()
            for part in state.values():
                if isinstance(part, dict):
                    yield from residuals(part)

        return sum((each for state in [*self.states, self.server] for each in residuals(state)),
                   torch.zeros(self.spec.numel, dtype=torch.float64))
