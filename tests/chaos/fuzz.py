"""Fuzzes the real decoders of frames, greetings, payloads, states, plans and control messages.

Each must refuse damaged input with its own error, in bounded time, and leak no memory. `python -m bench fuzz --frames 1000000`.
`--seed` is the first seed, so a long run can be split into slices.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from bench.report import Result
from tests.chaos.fuzz_mutate import mutated, resealed
from tests.chaos.fuzz_targets import Target, targets

FRAMES, QUICK = 1_000_000, 20_000
BLOCK = 1000
"""Number of inputs generated from one seed."""
SLOW_S, HANG_S = 0.5, 60.0
"""SLOW_S: maximum CPU seconds per input. HANG_S: after this many seconds the run prints its stack and ends."""
WARM = 0.2
"""Fraction of the run after which memory must no longer grow."""
MOST_FINDINGS = 20
WEIGHTS = {"frames": 24.0, "acceptor's greeting": 12.0, "dialler's greeting": 8.0, "sums": 4.0, "zeros": 4.0,
           "control decisions": 4.0}
"""Relative frequency of a target; others have weight 1."""


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--frames", type=int, default=0, help=f"how many inputs, else {FRAMES}")
    parser.add_argument("--seed", type=int, default=0, help=f"where to begin: a seed for each {BLOCK} inputs")


def run(quick: bool, args: argparse.Namespace) -> Result:
    return fuzz(targets(), args.frames or (QUICK if quick else FRAMES), args.seed)


def fuzz(targets: list[Target], inputs: int, seed: int = 0) -> Result:
    """Returns a row for each target and for each finding."""
    taken: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    findings: list[dict[str, Any]] = []
    warm_nbytes, begin = 0, time.monotonic()
    for number, (where, target, rng, data) in enumerate(_inputs(targets, inputs, seed)):
        if number == int(WARM * inputs):
            warm_nbytes = _resident()
        if number % BLOCK == 0:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
        problem, began = "", time.thread_time()
        try:
            target.read(data, rng)
        except target.refusals as error:
            refused[target.name] += 1
            problem = "" if (str(error) and "\n" not in str(error)) or not error.args else f"refused without a line: {error!r}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            taken[target.name] += 1
        spent_s = time.thread_time() - began
        slowest[target.name] = max(slowest.get(target.name, 0.0), spent_s)
        if not problem and spent_s > SLOW_S:
            problem = f"took {spent_s:.2f} s"
        if problem and len(findings) < MOST_FINDINGS:
            findings.append({"target": target.name, "seed": where, "finding": problem[:300], "input": data[:2000].hex()})
    faulthandler.cancel_dump_traceback_later()
    growth = _resident() / warm_nbytes - 1
    rows = [{"target": t.name, "taken": taken[t.name], "refused": refused[t.name], "slowest_ms": 1e3 * slowest.get(t.name, 0.0)}
            for t in targets]
    seconds = time.monotonic() - begin
    return {"rows": [*rows, *findings], "summary": {
        "inputs": inputs, "seeds": f"{seed} to {seed + (inputs - 1) // BLOCK}", "findings": len(findings),
        "slowest_ms": 1e3 * max(slowest.values()), "memory_growth_pct": 100 * growth, "memory_flat": growth <= 0.05,
        "inputs_per_s": inputs / seconds, "seconds": seconds}}


def _inputs(targets: list[Target], inputs: int, seed: int) -> Iterator[tuple[int, Target, random.Random, bytes]]:
    weights = [WEIGHTS.get(target.name, 1.0) for target in targets]
    for block in range(-(-inputs // BLOCK)):
        rng = random.Random(seed + block)
        for target in rng.choices(targets, weights, k=min(BLOCK, inputs - block * BLOCK)):
            data = mutated(rng, target.examples)
            yield seed + block, target, rng, resealed(data) if target.frames and rng.random() < 0.7 else data


def _resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
