"""Block threshold: sends runs of neighbouring entries with the largest summed magnitude.

Runs of 16 need a sixteenth of the positions and are contiguous in memory. selection.py estimates the threshold.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from commlayer.codec_name import checked
from commlayer.compressors import inputs, kernels, payload, selection
from commlayer.compressors.codec import State
from commlayer.compressors.entries import (
    VALUE_KINDS,
    decode_positions,
    decode_values,
    encode_positions,
    encode_values,
    positions_bound,
    split_values,
    values_nbytes,
)
from commlayer.compressors.one_round import OneRound, check_numel
from commlayer.compressors.payload import Out
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

HEADER = payload.HEADER_NBYTES


class BlockThreshold(OneRound, frozen=True):
    """About ratio * numel entries per payload, in runs, never a run of zeros. Large tensors send up to 10 % more or less."""

    name: ClassVar[str] = "block_threshold"
    biased: ClassVar[bool] = True

    ratio: float
    run: int
    values: str

    def bound(self, spec: Spec) -> int:
        runs_, cap = self._runs(spec.numel), selection.runs_room(self._runs(spec.numel), self.wanted(spec.numel))
        return HEADER + values_nbytes(self.values, min(spec.numel, self.run * cap)) + positions_bound(runs_, cap)

    def wanted(self, numel: int) -> int:
        """Runs to send."""
        return min(self._runs(numel), max(1, math.ceil(self.ratio * numel / self.run)))

    def init(self, spec: Spec) -> State:
        n = check_numel(spec)
        runs_, k = self._runs(n), self.wanted(n)
        entries = min(n, self.run * selection.runs_room(runs_, k))
        memory = {"val": torch.empty(entries), "kept": torch.empty(entries)}
        return {**selection.threshold_state(), "_scratch": {**selection.runs_scratch(runs_, k), **memory}, "_numel": n}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        return self.start_fed(x, None, state, out)

    def start_fed(self, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: Out) -> int:
        """`start` of x + residual in one pass; the residual keeps what is not sent, or the finite part of x if flagged."""
        n, memory = state["_numel"], state["_scratch"]
        inputs.check(self.name, "x", x, n)
        ids, finite = selection.pick_runs(self.wanted(n), self.run, x, residual, state)
        if not finite:
            return payload.write_flagged(out, self.id, n)
        count = kernels.gather_runs(x if residual is None else residual, self.run, ids, memory["val"])
        val, kept = memory["val"][:count], memory["kept"][:count]
        middle = HEADER + values_nbytes(self.values, count)
        if not encode_values(self.values, out[HEADER:middle], val, kept, saturate=residual is not None):
            return payload.write_flagged(out, self.id, n)
        kind, nbytes = encode_positions(out[middle:], ids, self._runs(n))
        payload.write(out, self.id, n, count, aux=VALUE_KINDS[self.values] << 4 | kind)
        if residual is not None:
            kernels.scatter_runs(residual, self.run, ids, kept, assign=True)
        return middle + nbytes

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        payload.expect("seed", head.seed, 0)
        payload.expect("kind of values", head.aux >> 4, VALUE_KINDS[self.values])
        count = head.entries
        body, places = split_values(self.name, self.values, head.body, count)
        ids = decode_positions(head.aux & 15, places, -(-count // self.run), self._runs(numel))
        short = numel % self.run if len(ids) and int(ids[-1]) == numel // self.run else 0
        if count:
            payload.expect("entries in the last run", (count - 1) % self.run + 1, short or self.run)
        return ids, decode_values(self.values, body, count)

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        ids, val = parts
        if assign:
            out.zero_()
        kernels.scatter_runs(out, self.run, ids, val, assign=False)

    def _runs(self, numel: int) -> int:
        return -(-numel // self.run)


def block_threshold(ratio: float = 0.01, run: int = 16, values: str = "int8") -> BlockThreshold:
    """The runs of `run` neighbours of largest summed magnitude, until `ratio` of all entries is sent."""
    checked("block_threshold", ratio=ratio, run=run, values=values)
    return BlockThreshold(float(ratio), run, values)
