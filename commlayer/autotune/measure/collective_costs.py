"""Cost of collectives inside nodes and between them: a few are timed and fitted to lines.

All ranks call together. The number of calls depends on times that all ranks have exchanged, so that all make the same calls.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from commlayer.autotune.measure.codec_costs import fit
from commlayer.cluster.groups import Groups
from commlayer.planner.model.cluster import Line
from commlayer.planner.pricing.collectives import moves
from commlayer.transport.pending import Pending

FIRST_NBYTES, LAST_NBYTES, GROWTH = 1 << 10, 16 << 20, 16
REPEATS = 3
FLOAT_NBYTES = 4
LEAST_BYTE_S = 1e-12
"""Lower bound of the time per byte, whatever a noisy fit gives."""
NONE = Line(0.0)

Collective = Callable[[torch.Tensor], Pending]


class Grouped(NamedTuple):
    """Seconds per message (the floor) and per byte through a member's link (the slope); zeros if there is no such level."""

    inside: Line
    across: Line


def measure(groups: Groups, budget_s: float) -> Grouped:
    """Within about `budget_s`, times a reduce inside all nodes at once, and an all-reduce over ranks that reach each other."""
    nodes, ranks = groups.world // groups.ranks_per_node, groups.ranks_per_node
    inside = across = NONE
    if ranks > 1:
        inside = _line(groups, lambda x: groups.inside.out.reduce(x, 0), "reduce", ranks, budget_s / (2 if nodes > 1 else 1))
    if nodes > 1 and groups.members.reachable:
        across = _line(groups, groups.allreduce, "allreduce", groups.world, budget_s / (2 if ranks > 1 else 1))
    return Grouped(inside, across)


def _line(groups: Groups, run: Collective, name: str, members: int, budget_s: float) -> Line:
    """Divides the fitted line by the sequential messages and the passes of the collective."""
    times_s = _timed(groups, run, budget_s)
    move = moves(name, members)
    line = fit(list(times_s), list(times_s.values())) if len(times_s) > 1 else Line(next(iter(times_s.values())))
    return Line(line.floor_s / move.messages, max(line.slope_s / move.passes, LEAST_BYTE_S), line.error)


def _timed(groups: Groups, run: Collective, budget_s: float) -> dict[float, float]:
    """Seconds by bytes, of the slowest rank. Times at least one size; more sizes and repetitions while time remains."""
    times_s: dict[float, float] = {}
    left_s, nbytes = budget_s, FIRST_NBYTES
    while True:
        x = torch.zeros(nbytes // FLOAT_NBYTES, device=groups.device)
        once = functools.partial(_once, groups, run, x)
        groups.barrier()
        seconds = _slowest(groups, once())
        left_s -= seconds
        if REPEATS * seconds < left_s / 2:
            best_s = _slowest(groups, min(once() for _ in range(REPEATS)))
            left_s, seconds = left_s - REPEATS * best_s, min(seconds, best_s)
        times_s[nbytes] = seconds
        # At the first size most of the time is message latency, which does not grow.
        likely_s = seconds if len(times_s) == 1 else seconds * GROWTH
        if nbytes >= LAST_NBYTES or likely_s > left_s / 2:
            return times_s
        nbytes *= GROWTH


def _slowest(groups: Groups, seconds: float) -> float:
    return float(groups.gather_all(torch.tensor([seconds], dtype=torch.float64, device=groups.device)).max())


def _once(groups: Groups, run: Collective, x: torch.Tensor) -> float:
    begin = time.perf_counter()
    run(x).wait(time.monotonic() + groups.timeout_s)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - begin
