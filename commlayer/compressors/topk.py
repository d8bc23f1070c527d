"""Sends the entries of largest magnitude: positions as Elias-Fano or bitmap, values as int8, fp16 or fp32.

Knows selection and its body; the residual is the caller's. How the threshold is found: threshold.py.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch

from commlayer.compressors import kernels, payload, positions, queued, selection, threshold
from commlayer.compressors.codec import Out, State
from commlayer.compressors.oneround import OneRound, check_numel
from commlayer.errors import CorruptFrame
from commlayer.records import Spec

HEADER = payload.HEADER_NBYTES
BLOCK = 256
"""Selected entries that share one int8 scale."""

MOST_FP16 = 65504.0
VALUES = {"int8": 0, "fp16": 1, "fp32": 2}
"""Kinds of values, in the high half of the header's aux; the low half is the kind of positions."""

ENTRY_NBYTES = {"int8": 1, "fp16": 2, "fp32": 4}


class TopK(OneRound, frozen=True):
    """About ratio * numel entries per payload, never zeros. Large tensors get up to 10 % more or less."""

    name: ClassVar[str] = "topk"
    biased: ClassVar[bool] = True

    ratio: float
    values: Literal["int8", "fp16", "fp32"]
    exact: bool

    def bound(self, spec: Spec) -> int:
        cap = self.capacity(spec.numel)
        return HEADER + self._values_nbytes(cap) + positions.bound(spec.numel, cap)

    def wanted(self, numel: int) -> int:
        """k."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def capacity(self, numel: int) -> int:
        """Most entries that a payload holds."""
        return selection.room(numel, self.wanted(numel), self.exact)

    def init(self, spec: Spec) -> State:
        n = check_numel(spec)
        return {**threshold.init(), "_scratch": selection.scratch(n, self.wanted(n), self.exact)}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        return self.start_fed(x, None, state, out)

    def start_fed(self, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: Out) -> int:
        """`start` of x + residual in one pass, writing back what is not sent. Flagged: residual took the finite part of x."""
        n, k = x.numel(), self.wanted(x.numel())
        if isinstance(out, torch.Tensor) and not selection.sorts(n, self.exact):
            nbytes, picked = queued.start(self.id, VALUES[self.values], k, x, residual, state, out)
            if picked is None:
                return nbytes
        else:
            picked = selection.pick(k, self.exact, x, residual, state)
        idx, val, finite = picked
        if not finite and residual is not None:
            kernels.scatter_add(residual, idx, val)
        nbytes = self._encode(n, idx, val, residual, state["_scratch"]["kept"][: idx.numel()], out) if finite else 0
        return nbytes or payload.write_flagged(out, self.id, n)

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        payload.expect("seed", head.seed, 0)
        payload.expect("kind of values", head.aux >> 4, VALUES[self.values])
        count, middle = head.entries, self._values_nbytes(head.entries)
        if head.body.nbytes < middle:
            raise CorruptFrame(f"topk payload with {head.body.nbytes} bytes of body, {count} values take {middle}")
        idx = positions.decode(head.aux & 15, head.body[middle:], count, numel)
        values = head.body[:middle]
        if self.values == "int8":
            if not kernels.scales_valid(values[: middle - count]):
                raise CorruptFrame("topk payload with a scale that is negative, not finite or too large")
            return idx, values
        val = torch.empty(count, device=idx.device)
        if count:
            (kernels.copy_f32 if self.values == "fp32" else kernels.f16_to_f32)(val, values)
        if not kernels.all_finite(val):
            raise CorruptFrame("topk payload with a value that is not finite")
        return idx, val

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        idx, values = parts
        if assign:
            out.zero_()
        if self.values == "int8":
            middle = values.nbytes - idx.numel()
            kernels.scatter_add_int8(out, idx, values[middle:], values[:middle], BLOCK)
        else:
            kernels.scatter_add(out, idx, values)

    def _values_nbytes(self, count: int) -> int:
        scales = 4 * -(-count // BLOCK) if self.values == "int8" else 0
        return scales + ENTRY_NBYTES[self.values] * count

    def _encode(
        self, n: int, idx: torch.Tensor, val: torch.Tensor, residual: torch.Tensor | None, kept: torch.Tensor, out: Out
    ) -> int:
        """Writes the payload, and to the residual what rounding keeps of the values. 0 if a value became infinite.

        With a residual none does: fp16 sends its largest number and the residual keeps the rest.
        """
        count = idx.numel()
        middle = HEADER + self._values_nbytes(count)
        if not self._encode_values(out[HEADER:middle], val, kept, saturate=residual is not None):
            return 0
        kind, nbytes = positions.encode(out[middle:], idx, n)
        payload.write(out, self.id, n, count, aux=VALUES[self.values] << 4 | kind)
        if residual is not None and self.values != "fp32":
            kernels.scatter_add(residual, idx, kept)
        return middle + nbytes

    def _encode_values(self, body: Out, val: torch.Tensor, kept: torch.Tensor, *, saturate: bool) -> bool:
        """kept = val - what the body says."""
        if self.values == "fp32":
            kernels.store_f32(body, val)
            return True
        if self.values == "int8":
            middle = body.nbytes - val.numel()
            kept.zero_()
            return kernels.int8_encode(body[middle:], body[:middle], val, kept, BLOCK)
        finite = kernels.f32_to_f16(body, torch.clamp(val, -MOST_FP16, MOST_FP16, out=kept) if saturate else val)
        kernels.f16_to_f32(kept, body)
        torch.sub(val, kept, out=kept)
        return finite


def topk(ratio: float = 0.01, values: str = "int8", exact: bool = False) -> TopK:
    """The largest `ratio` of all entries; exact=True sorts at any size, which costs several passes."""
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 < ratio <= 1:
        raise ValueError(f"topk: ratio is {ratio!r}, allowed is a number above 0 and up to 1")
    if not isinstance(values, str) or values not in VALUES:
        raise ValueError(f"topk: values is {values!r}, allowed is one of {', '.join(map(repr, VALUES))}")
    if not isinstance(exact, bool):
        raise ValueError(f"topk: exact is {exact!r}, allowed is True or False")
    return TopK(float(ratio), values, exact)  # type: ignore[arg-type]
