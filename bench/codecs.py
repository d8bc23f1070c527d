"""Benchmark of every codec over sizes and backends: speed, bits and error, compared with torch and memory bandwidth.

A row is one bucket of normally distributed numbers in one thread. "encode" is the worker's part from gradient to payload, all
rounds, with the codec wrapped as in a plan. "add" is the server's part, "decode" the worker's decoding of the result. GB/s
counts 4 bytes per element. Bits are those of the uploaded payloads. The error is that of the first payload, before any
residual, relative to the gradient's norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.report import Result
from bench.timing import seconds
from commlayer.codec_spec import parse_spec
from commlayer.compressors import Codec, kernels, parse, seed, wrap
from commlayer.compressors.kernels import BACKENDS
from commlayer.compressors.kernels.fallback import FAMILIES
from commlayer.records import Spec

CODECS = (
    "identity()", "fp16()", "bf16()", "int8()", "int4()", "qsgd()", "qsgd(levels=1)", "onebit()",
    "topk(0.01)", "topk(0.01, 'int4')", "topk(0.01, exact=True)", "block_threshold(0.01)", "randomk(0.01)", "powersgd(4)",
    "momentum(topk(0.01))",
)  # fmt: skip
SIZES = tuple(side**2 for side in (32, 128, 512, 1024, 4096, 10_000))
"""Number of elements of square matrices: 4 KB, 64 KB, 1 MB, 4 MB, 64 MB, 400 MB."""
QUICK = SIZES[:3]
FALLBACK_MOST = 1 << 20
"""Largest number of elements for which the fallback runs: 4 MB."""
FALLBACK_MOST_QUICK = 1 << 14
BUDGET_S = 0.15
"""Time for the repetitions of one row, after one warm-up call; there are at least three repetitions."""

Calls = dict[str, Callable[[], object]]


def step_calls(codec: Codec, x: torch.Tensor) -> Calls:
    """The parts of a step of one worker and a server. `encode` runs all rounds, since each needs the results before it."""
    spec = Spec((math.isqrt(x.numel()),) * 2)
    state, server, last = codec.init(spec), codec.init_server(spec), len(codec.rounds) - 1
    seed(state, "bench", 0, 0)
    out, room, total = memoryview(bytearray(codec.bound(spec))), memoryview(bytearray(codec.bound(spec))), torch.empty_like(x)
    accs = [codec.new_accumulator(spec, r) for r in range(last + 1)]
    turns = [x, x.flip(0)]  # a constant gradient would build up a residual that does not occur in training
    sent: list[memoryview] = []
    results: list[bytes] = []

    def encode() -> int:
        """Returns the bytes of all payloads."""
        turns.reverse()
        nbytes = codec.start(turns[1], state, out)
        total_nbytes = nbytes
        for r in range(last):
            codec.add(r, out[:nbytes], accs[r], first=True)
            nbytes = codec.next(r, bytes(room[: codec.emit(r, accs[r], server, room)]), state, out)
            total_nbytes += nbytes
        sent[:] = [out[:nbytes]]
        return total_nbytes

    def emit() -> None:
        results[:] = [bytes(room[: codec.emit(last, accs[last], server, room)])]

    return {
        "encode": encode,
        "add": lambda: codec.add(last, sent[0], accs[last], first=True),
        "emit": emit,
        "decode": lambda: codec.decode(results[0], state, total),
        "total": lambda: total,
    }


def best_s(call: Callable[[], object], quick: bool) -> float:
    """Minimum over the repetitions that fit into the budget."""
    spent: list[float] = []
    while len(spent) < 3 or (sum(spent) < (BUDGET_S / 5 if quick else BUDGET_S) and len(spent) < 200):
        spent.append(seconds(call))
    return min(spent)


def error_of(codec: Codec, x: torch.Tensor) -> tuple[float, float]:
    """(bits per element, relative error) of a first payload, when the result is sent back exactly."""
    calls = step_calls(codec, x)
    nbytes = calls["encode"]()
    for name in ("add", "emit", "decode"):
        calls[name]()
    sent = calls["total"]()
    assert isinstance(nbytes, int)
    assert isinstance(sent, torch.Tensor)
    assert bool(torch.isfinite(sent).all()), f"{codec}: the sum is not finite"
    return 8 * nbytes / x.numel(), float((sent - x).norm() / x.norm())


def row(text: str, backend: str, x: torch.Tensor, quick: bool) -> dict[str, Any]:
    """Measures one codec. Checks first, before timing, that the decoded result is close to the input."""
    codec = parse(text)
    with kernels.use(BACKENDS[backend]):
        bits, error = error_of(codec, x)
        assert error < 3, f"{text}: relative error {error}"
        calls = step_calls(wrap(codec), x)
        for name in ("encode", "add", "emit", "decode"):
            calls[name]()
        spent = {name: best_s(calls[name], quick) for name in ("encode", "add", "decode")}
    return {
        "codec": text, "backend": backend, "elements": x.numel(), "kB": round(4 * x.numel() / 1e3, 1),
        "encode_gb_per_s": round(4 * x.numel() / spent["encode"] / 1e9, 3),
        **{f"{name}_us": round(t * 1e6, 1) for name, t in spent.items()},
        "bits_per_element": round(bits, 4), "relative_error": round(error, 5),
    }  # fmt: skip


def rivals(x: torch.Tensor) -> dict[str, tuple[Callable[[], object], float, float]]:
    """Name -> (call, bits per element, relative error) for torch's own operations and for memory bandwidth."""
    n, acc, half = x.numel(), torch.zeros_like(x), torch.empty(x.numel(), dtype=torch.float16)
    k, scale = max(1, n // 100), float(x.abs().max()) / 127
    kept = torch.zeros_like(x).scatter_(0, (top := torch.topk(x.abs(), k).indices), x[top])
    rounded = (x / scale).round_().clamp_(-127, 127) * scale
    codes = torch.empty(n, dtype=torch.int8)

    def quantise() -> None:
        """Symmetric with one scale for the tensor, like torch.quantize_per_tensor, which torch has deprecated."""
        codes.copy_(torch.mul(x, 127 / float(x.abs().max()), out=acc).round_())

    def off(y: torch.Tensor) -> float:
        return float((y - x).norm() / x.norm())

    return {
        "stream (r += g)": (lambda: acc.add_(x), 32.0, 0.0),
        "copy": (lambda: acc.copy_(x), 32.0, 0.0),
        "torch cast to fp16": (lambda: half.copy_(x), 16.0, off(x.half().float())),
        "torch int8 by tensor": (quantise, 8.0, off(rounded)),
        "torch.topk 1 %": (lambda: torch.topk(x.abs(), k), 0.64, off(kept)),
    }


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    for n in QUICK if quick else SIZES:
        x = torch.randn(n, generator=torch.Generator().manual_seed(n))
        for name, (call, bits, error) in rivals(x).items():
            call()
            spent = best_s(call, quick)
            yield {"codec": name, "backend": "torch", "elements": n, "kB": round(4 * n / 1e3, 1),
                   "encode_gb_per_s": round(4 * n / spent / 1e9, 3), "encode_us": round(spent * 1e6, 1),
                   "bits_per_element": bits, "relative_error": round(error, 5)}
        for backend in BACKENDS:
            if backend == "fallback" and n > (FALLBACK_MOST_QUICK if quick else FALLBACK_MOST):
                continue
            for text in CODECS:
                layers = parse_spec(text).layers()
                # The fallback has no values of 4 bits inside a top-k payload.
                if backend != "fallback" or all(part.family in FAMILIES and part.get("values") != "int4" for part in layers):
                    yield row(text, backend, x, quick)


def run(quick: bool) -> Result:
    torch.set_num_threads(1)
    return {"rows": list(rows(quick)), "summary": {}}
