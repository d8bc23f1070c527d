"""Runs of neighbours in plain torch: scores, selection, gathering and scattering."""

from __future__ import annotations

import torch
from oracle.codec_kernels.memory import Memory, floats, increasing, octets_of, positions, total, write

from commlayer.errors import CorruptPayload, InvalidInput

LEAST_THRESHOLD = 2.0**-126

RUNS = (8, 16, 32, 64)


def _rows(v: torch.Tensor, run: int) -> torch.Tensor:
    rows = torch.zeros(-(-v.numel() // run) * run)
    rows[: v.numel()] = v
    return rows.view(-1, run)


def _scores(v: torch.Tensor, run: int) -> torch.Tensor:
    """Sums of magnitudes, added in the order that native/include/commlayer.h states."""
    rows = _rows(v.abs(), run)
    lanes = torch.zeros(rows.shape[0], 8)
    for j in range(0, run, 8):
        lanes = lanes + rows[:, j : j + 8]
    for half in (4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
    return lanes.view(-1)


def _check_run(name: str, run: int) -> None:
    if run not in RUNS:
        raise InvalidInput("E-CODEC-INPUT", f"{name}: got run {run}, need one of {RUNS}")


def select_runs(
    g: Memory, residual: Memory | None, run: int, threshold: float, start: int, ids: Memory, scores: Memory
) -> tuple[int, int, bool]:
    _check_run("select_runs", run)
    v = total(g, residual)
    limit = torch.tensor(threshold, dtype=torch.float32)
    all_scores = _scores(v, run)
    runs = all_scores.numel()
    if not limit >= LEAST_THRESHOLD or not (0 <= start < runs or start == runs == 0):
        raise InvalidInput("E-CODEC-INPUT",
                           f"select_runs: got threshold {threshold} and start {start}, need >= 2^-126 and 0 <= start < {runs}")
    finite = _rows(v, run).isfinite().all(1)
    passed = ((all_scores >= limit) & finite).nonzero().view(-1)
    scanned = torch.cat([passed[passed >= start], passed[passed < start]])
    room = min(octets_of(ids).numel(), octets_of(scores).numel()) // 4
    taken = scanned[:room].sort().values
    write(ids, taken.to(torch.int32))
    write(scores, all_scores[taken])
    if residual is not None:
        kept = floats(residual)
        kept.copy_(torch.where(v.isfinite(), v, kept))
    return len(taken), len(passed) - len(taken), bool(finite.all())


def score_runs(g: Memory, residual: Memory | None, run: int, offset: int, out: Memory) -> None:
    _check_run("score_runs", run)
    scores, target = _scores(total(g, residual), run), floats(out)
    if scores.numel() == 0 or target.numel() == 0:
        target.zero_()
        return
    steps = torch.arange(target.numel()) * scores.numel() // target.numel()
    target.copy_(scores[(offset + steps) % scores.numel()])


def _elements(name: str, ids: Memory, n: int, run: int) -> torch.Tensor:
    _check_run(name, run)
    numbers = positions(ids)
    if not increasing(numbers, -(-n // run)):
        raise CorruptPayload(f"{name}: runs do not increase below {-(-n // run)}")
    where = (numbers[:, None] * run + torch.arange(run)).view(-1)
    return where[where < n]


def gather_runs(src: Memory, run: int, ids: Memory, val: Memory) -> int:
    v = floats(src)
    where = _elements("gather_runs", ids, v.numel(), run)
    write(val, v[where])
    return len(where)


def scatter_runs(acc: Memory, run: int, ids: Memory, val: Memory, assign: bool = False) -> int:
    target, values = floats(acc), floats(val)
    where = _elements("scatter_runs", ids, target.numel(), run)
    if len(where) != values.numel():
        raise CorruptPayload(f"scatter_runs: {values.numel()} values for runs of {len(where)} elements")
    target[where] = values if assign else target[where] + values
    return len(where)
