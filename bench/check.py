"""Regression check of a few ratios against data/expected.json: memory, CPU time and step times.

Each ratio compares two measurements of one run. The stored ratios are those of a quiet machine with two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench import memory, overhead
from bench.report import DATA, Result
from bench.timing import least_s

EXPECTED = DATA / "expected.json"
"""By name: the expected `ratio`, and `tolerance`, the relative amount by which a run may exceed it."""
MODES = ("int4", "topk", "every=16")
NUMEL = 1 << 16


def run(quick: bool) -> Result:
    """`quick`: only memory and codecs, which other load on the machine does not affect."""
    ratios = {f"peak memory of a rank over plain training, {mode}, x model": ratio for mode, ratio in _memory().items()}
    ratios |= _codec()
    if not quick:
        answers = overhead.run_ranks("bucket", 30)
        ratios["CPU time per bucket, x calibration loop"] = overhead.bucket_us(answers) / (_calibration_s() * 1e6)
        steps = overhead.run_ranks("step", 20)
        base = sum(overhead.slowest(steps, "ddp"))
        ratios |= {f"step, {mode}, x DDP": sum(overhead.slowest(steps, mode)) / base for mode in ("allreduce", "service")}
    return compare(ratios, json.loads(EXPECTED.read_text()))


def compare(ratios: dict[str, float], expected: dict[str, dict[str, float]]) -> Result:
    """Returns code 1 if a ratio exceeds its limit."""
    rows: list[dict[str, Any]] = []
    for name, ratio in ratios.items():
        limit = expected[name]["ratio"] * (1 + expected[name]["tolerance"])
        rows.append({"ratio of": name, "measured": round(ratio, 3), "expected": expected[name]["ratio"],
                     "limit": round(limit, 3), "verdict": "ok" if ratio <= limit else "WORSE"})
    worse = [row["ratio of"] for row in rows if row["verdict"] != "ok"]
    return {"rows": rows, "summary": {"worse": worse}, "code": 1 if worse else 0}


def _memory() -> dict[str, float]:
    """Medians of three runs: single peaks differ by a quarter, since threads allocate at other moments."""
    runs = [memory.run(True, argparse.Namespace(modes=",".join(MODES)))["summary"] for _ in range(3)]
    return {mode: statistics.median(float(ratios[mode]) for ratios in runs) for mode in MODES}


def _codec() -> dict[str, float]:
    """CPU time of int4 coding in one thread, relative to tanh over the same elements, all in the cache: the speed of memory
    varies with other load."""
    import torch

    from commlayer.compressors import int4
    from commlayer.compressors.feedback import wrap
    from commlayer.records import Spec

    torch.set_num_threads(1)
    x, y, codec = torch.randn(NUMEL), torch.empty(NUMEL), wrap(int4())
    spec = Spec(shape=(x.numel(),))
    state, out = codec.init(spec), memoryview(bytearray(codec.bound(spec)))
    nbytes = codec.start(x, state, out)
    tanh_s = _cpu_s(lambda: torch.tanh(x, out=y))
    return {"int4 encode, x tanh": _cpu_s(lambda: codec.start(x, state, out)) / tanh_s,
            "int4 decode, x tanh": _cpu_s(lambda: codec.decode(out[:nbytes], state, y)) / tanh_s}


def _calibration_s() -> float:
    """CPU time of a loop of Python calls, which make up most of a bucket's cost."""
    def loop() -> None:
        total: dict[int, list[int]] = {}
        for i in range(1000):
            total.setdefault(i % 17, []).append(len(str(i)))

    return _cpu_s(loop)


def _cpu_s(call: Callable[[], object]) -> float:
    return least_s(call, 20, time.thread_time)
