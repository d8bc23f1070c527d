"""Benchmark of the native kernels in one thread against torch and memory bandwidth, interleaved in the same rounds.

"stream" is r += g in place at 12 B per element, the faster of native and torch. "copy" reads and writes 8 B per element. Ratios
are medians of per-round ratios. Every result is checked before timing. "codec" rows are whole steps of a codec with error
feedback, from gradient to payload, including sampling, trimming and packing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from bench.report import Result, one_thread
from bench.timing import seconds
from commlayer.compressors import Codec, error_feedback, int8, kernels, onebit, topk
from commlayer.compressors.kernels import fallback
from commlayer.native import core
from commlayer.records import Spec

N, N_QUICK = 25_000_000, 12_500_000
"""Much larger than the caches: with a smaller size cached rivals would be compared with uncached ones."""
BLOCK = 256
DENSITY = 0.01
CUT = 2.5758293
"""The magnitude of a standard normal exceeds CUT with probability DENSITY."""


SETTLE = 12
"""Number of steps after which a codec's residual and threshold are steady."""


class _Steps:
    """A codec over training steps. Alternates two gradients, since a constant gradient would build up a residual."""

    def __init__(self, codec: Codec, g: torch.Tensor, core: ModuleType) -> None:
        spec = Spec((g.numel(),))
        self.codec, self.core, self.gradients = codec, core, [g, g.flip(0)]
        self.state, self.out = codec.init(spec), memoryview(bytearray(codec.bound(spec)))
        self.payload = self.out[:0]

    def __call__(self) -> bytes:
        """Runs a step and returns the first bytes of its payload."""
        self.gradients.reverse()
        with kernels.use(self.core):
            self.payload = self.out[: self.codec.start(self.gradients[0], self.state, self.out)]
        return bytes(self.payload[:64])


class _Stage:
    """The arrays that all rounds share, and the kernels as calls without arguments."""

    def __init__(self, n: int, backend: ModuleType | None = core) -> None:
        if backend is None:
            raise RuntimeError("bench kernels: the native core is not built; install with a C++ compiler")
        self.core = backend
        torch.manual_seed(0)
        room = n // 50
        self.n = n
        self.g = torch.randn(n)
        self.acc, self.kept = torch.zeros(n), torch.zeros(n)
        self.half, self.bfloat = self.g.to(torch.float16), torch.zeros(n, dtype=torch.int16)
        self.q, self.scale = torch.zeros(n, dtype=torch.int8), torch.zeros(-(-n // BLOCK))
        self.idx, self.val = torch.zeros(room, dtype=torch.int32), torch.zeros(room)
        self.topk = _Steps(error_feedback(topk(DENSITY, "int8")), self.g, backend)
        self.int8 = _Steps(error_feedback(int8()), self.g, backend)
        self.onebit = _Steps(error_feedback(onebit()), self.g, backend)

    def select(self) -> Any:
        return self.core.select(self.g, self.kept, CUT, self.n // 3, self.idx, self.val)

    def rivals(self) -> dict[str, Callable[[], object]]:
        """Name -> call. `select` finds the residual that `clear` emptied, like steady error feedback at this cut."""
        c, g, acc = self.core, self.g, self.acc
        return {
            "stream native": lambda: c.add_f32(acc, g),
            "stream torch": lambda: acc.add_(g),
            "copy": lambda: acc.copy_(g),
            "clear": self.kept.zero_,
            "select_1pct": self.select,
            "add_f16": lambda: c.add_f16(acc, self.half),
            "cast f32 to f16": lambda: c.f32_to_f16(self.half, g),
            "cast f32 to f16 torch": lambda: self.half.copy_(g),
            "cast f16 to f32": lambda: c.f16_to_f32(acc, self.half),
            "cast f32 to bf16": lambda: c.f32_to_bf16(self.bfloat, g),
            "clear again": self.kept.zero_,
            "int8 with residual": lambda: c.int8_encode(self.q, self.scale, g, self.kept, BLOCK),
            "int8": lambda: c.int8_encode(self.q, self.scale, g, None, BLOCK),
            "int8 decode": lambda: c.int8_decode(acc, self.q, self.scale, BLOCK),
            "all_finite": lambda: c.all_finite(g),
            "crc32c": lambda: c.crc32c(g),
            "codec topk 1pct": self.topk,
            "codec int8": self.int8,
            "codec onebit": self.onebit,
        }


BYTES = {
    "stream native": 12, "stream torch": 12, "copy": 8, "select_1pct": 12, "add_f16": 10, "cast f32 to f16": 6,
    "cast f32 to f16 torch": 6, "cast f16 to f32": 6, "cast f32 to bf16": 6, "int8 with residual": 13, "int8": 5,
    "int8 decode": 9, "all_finite": 4, "crc32c": 4, "codec topk 1pct": 12, "codec int8": 13,
    "codec onebit": 12.14,
    "torch.topk": 4,
}  # fmt: skip
"""Minimum number of bytes per element that each must read and write."""


NOT_IN_FALLBACK = ("crc32c", "codec onebit")


def check(n: int = 50_003) -> None:
    """Raises AssertionError if native and fallback differ in results or memory, for the same calls that are timed."""
    ours, twin = _Stage(n), _Stage(n, fallback)
    for (name, mine), theirs in zip(ours.rivals().items(), twin.rivals().values(), strict=True):
        if name in NOT_IN_FALLBACK:
            continue
        result, expected = mine(), theirs()
        assert isinstance(result, torch.Tensor) or result == expected, f"{name}: native {result}, fallback {expected}"
        for field, memory in vars(ours).items():
            if isinstance(memory, torch.Tensor) and field not in ("idx", "val"):
                same = torch.equal(memory.view(torch.uint8), getattr(twin, field).view(torch.uint8))
                assert same, f"{name}: {field} differs from the fallback"
    for _ in range(SETTLE):
        for mine, theirs in ((ours.topk, twin.topk), (ours.int8, twin.int8)):
            mine()
            theirs()
            assert mine.payload == theirs.payload, f"{mine.codec}: payload differs from the fallback"
    for stage in (ours, twin):
        stage.kept.zero_()
    count = int(ours.select()[0])
    twin.select()
    assert count == int((ours.g.abs() >= CUT).sum())
    assert abs(count - DENSITY * n) < 0.2 * DENSITY * n
    assert torch.equal(ours.idx[:count], twin.idx[:count])
    assert torch.equal(ours.val[:count], twin.val[:count])


def run(quick: bool) -> Result:
    with one_thread():
        return _run(quick)


def _run(quick: bool) -> Result:
    check()
    stage = _Stage(N_QUICK if quick else N)
    k = int(stage.n * DENSITY)
    rivals = stage.rivals()
    for call in rivals.values():
        call()
    for _ in range(SETTLE):
        stage.topk()
        stage.int8()
        stage.onebit()
    slow = {"torch.topk": lambda: torch.topk(stage.g.abs(), k)}
    few = 2 if quick else 4
    rounds = [
        {name: seconds(call) for name, call in (rivals | slow if i < few else rivals).items()}
        for i in range(7 if quick else 15)
    ]

    def ratio(over: Callable[[dict[str, float]], float], last: int | None = None) -> float:
        return statistics.median(over(one) for one in rounds[:last])

    def stream(one: dict[str, float]) -> float:
        return min(one["stream native"], one["stream torch"])

    def speed(one: dict[str, float], name: str) -> float:
        return BYTES[name] / one[name]

    times = {name: [one[name] for one in rounds if name in one] for name in BYTES}
    rows = [
        {
            "kernel": name,
            "elements": stage.n,
            "median_ms": round(statistics.median(spent) * 1e3, 3),
            "best_ms": round(min(spent) * 1e3, 3),
            "gb_per_s": round(BYTES[name] * stage.n / statistics.median(spent) / 1e9, 2),
        }
        for name, spent in times.items()
    ]
    summary = {
        "select_1pct_vs_torch_topk": ratio(lambda one: one["torch.topk"] / one["select_1pct"], few),
        "select_1pct_vs_stream": ratio(lambda one: stream(one) / one["select_1pct"]),
        "decode_add_vs_stream": ratio(lambda one: speed(one, "add_f16") / (12 / stream(one))),
        "decode_add_f32_vs_stream": ratio(lambda one: stream(one) / one["stream native"]),
        "int8_vs_copy": ratio(lambda one: speed(one, "int8 with residual") / speed(one, "copy")),
        "onebit_vs_copy": ratio(lambda one: speed(one, "codec onebit") / speed(one, "copy")),
        "codec_topk_1pct_vs_stream": ratio(lambda one: stream(one) / one["codec topk 1pct"]),
        "codec_topk_1pct_vs_torch_topk": ratio(lambda one: one["torch.topk"] / one["codec topk 1pct"], few),
        "codec_int8_vs_copy": ratio(lambda one: speed(one, "codec int8") / speed(one, "copy")),
        "crc32c_gbs": BYTES["crc32c"] * stage.n / statistics.median(times["crc32c"]) / 1e9,
    }
    return {"rows": rows, "summary": {name: round(value, 3) for name, value in summary.items()}}
