"""Benchmark of GPU kernels and codecs, compared in one run with torch and with memory bandwidth.

Raises Unmeasurable without a GPU. Tests compare the kernels with the host's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench import Unmeasurable
from bench.report import Result
from commlayer.compressors import error_feedback, place, topk
from commlayer.compressors.codec import Codec
from commlayer.compressors.kernels import cuda as kernels
from commlayer.gpu.launch import launcher
from commlayer.records import Spec

N, N_QUICK = 1 << 26, 1 << 22
DENSITY, CUT = 0.01, 2.576
"""The magnitude of a standard normal exceeds CUT with a probability of 1 %."""

ROUNDS, ROUNDS_QUICK = 30, 10
SETTLE = 6
"""Number of steps until a tracked threshold is steady."""

BYTES = {"copy": 8, "select_1pct": 12, "torch.topk": 4, "codec topk 1pct": 12}
"""Minimum number of bytes per element that each must read and write."""


class _Stage:
    def __init__(self, n: int, device: torch.device) -> None:
        self.n, self.device, cap = n, device, n // 50
        generator = torch.Generator(device).manual_seed(1)
        self.g = torch.randn(n, generator=generator, device=device)
        self.kept, self.acc = torch.zeros_like(self.g), torch.empty_like(self.g)
        self.raw, self.picked = _entries(cap, device), _entries(cap, device)
        self.cut = torch.full((1,), CUT, device=device)
        self.words = torch.zeros(kernels.FOUND + 1 + kernels.tiles(n, n // 3), dtype=torch.int64, device=device)
        self.topk = _steps(error_feedback(topk(DENSITY, "int8")), self.g)

    def select(self) -> None:
        self.words.zero_()
        counters, state = self.words[: kernels.FOUND], self.words[kernels.FOUND :]
        kernels.queue_select(self.g, self.kept, self.cut, self.n // 3, self.raw, self.picked, counters, state)

    def rivals(self) -> dict[str, Callable[[], object]]:
        """Name -> call. `clear` empties the residual that the selection before has filled; its time is not counted."""
        k = int(self.n * DENSITY)
        return {
            "copy": lambda: self.acc.copy_(self.g),
            "clear": self.kept.zero_,
            "select_1pct": self.select,
            "torch.topk": lambda: torch.topk(self.g.abs(), k),
            "codec topk 1pct": self.topk,
        }


def _entries(cap: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(cap, dtype=torch.int32, device=device), torch.empty(cap, device=device)


def _steps(codec: Codec, x: torch.Tensor) -> Callable[[], int]:
    spec = Spec((x.numel(),))
    state = codec.init(spec)
    place(state, x.device)
    out = torch.empty(-(-codec.bound(spec) // 4) * 4, dtype=torch.uint8, device=x.device)
    return lambda: codec.start(x, state, out)


def _seconds(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def run(quick: bool) -> Result:
    """Runs the benchmark. All calls of a round run one after the other; ratios are medians over rounds."""
    if not torch.cuda.is_available():
        raise Unmeasurable("there is no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        launcher(device)
    except ValueError as error:
        raise Unmeasurable(str(error)) from None
    stage = _Stage(N_QUICK if quick else N, device)
    rivals = stage.rivals()
    for _ in range(SETTLE):
        for call in rivals.values():
            call()
    rounds = [{name: _seconds(call) for name, call in rivals.items()} for _ in range(ROUNDS_QUICK if quick else ROUNDS)]

    def ratio(rival: str, name: str) -> float:
        return statistics.median(one[rival] / one[name] for one in rounds)

    rows: list[dict[str, Any]] = []
    for name, nbytes in BYTES.items():
        spent = statistics.median(one[name] for one in rounds)
        rows.append({
            "kernel": f"gpu {name}", "device": torch.cuda.get_device_name(device), "elements": stage.n,
            "median_ms": round(spent * 1e3, 4), "gb_per_s": round(nbytes * stage.n / spent / 1e9, 1),
        })  # fmt: skip
    speed = BYTES["select_1pct"] / BYTES["copy"]
    summary = {
        "gpu_select_1pct_vs_torch_topk": round(ratio("torch.topk", "select_1pct"), 3),
        "gpu_select_1pct_vs_copy": round(ratio("copy", "select_1pct") * speed, 3),
        "gpu_codec_topk_1pct_vs_torch_topk": round(ratio("torch.topk", "codec topk 1pct"), 3),
    }
    return {"rows": rows, "summary": summary}
