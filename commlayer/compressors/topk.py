"""Sends the entries of largest magnitude: positions as Elias-Fano or bitmap, values as int8, fp16 or fp32.

Knows selection and its body; the residual is the caller's. How the threshold is found: threshold.py.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch

from commlayer.compressors import kernels, payload, positions, threshold
from commlayer.compressors.codec import State
from commlayer.compressors.oneround import OneRound, check_numel
from commlayer.errors import CorruptFrame
from commlayer.records import Spec

HEADER = payload.HEADER_NBYTES
BLOCK = 256
"""Selected entries that share one int8 scale."""

EXACT_NUMEL = 4096
"""Up to here sorting is as cheap as tracking."""

SPARE = 16
VALUES = {"int8": 0, "fp16": 1, "fp32": 2}
"""Kinds of values, in the high half of the header's aux; the low half is the kind of positions."""

ENTRY_NBYTES = {"int8": 1, "fp16": 2, "fp32": 4}


class TopK(OneRound, frozen=True):
    """About ratio * numel entries per payload, never zeros. Above EXACT_NUMEL elements the count is within some 10 %."""

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
        k = self.wanted(numel)
        return k if self._sorts(numel) else min(numel, k + k // 4 + SPARE)

    def init(self, spec: Spec) -> State:
        n = check_numel(spec)
        cap = self.capacity(n)
        sample = 0 if self._sorts(n) else max(threshold.sample_sizes(n, self.wanted(n)))
        scratch = {
            "idx": torch.empty(cap, dtype=torch.int32),
            "val": torch.empty(cap),
            "kept": torch.empty(cap),
            "sample": torch.empty(sample),
        }
        return {**threshold.init(), "_scratch": scratch}

    def start(self, x: torch.Tensor, state: State, out: memoryview) -> int:
        return self.start_fed(x, None, state, out)

    def start_fed(self, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: memoryview) -> int:
        """`start` of x + residual in one pass, writing back what is not sent. Flagged: residual took the finite part of x."""
        n, scratch = x.numel(), state["_scratch"]
        idx, val = scratch["idx"], scratch["val"]
        k = self.wanted(n)
        if self._sorts(n):
            cut = threshold.Cut(threshold.exact(k, x, residual) if n else threshold.TINY, 1.0, None)
        else:
            cut = threshold.begin(k, x, residual, state, scratch["sample"])
        count, overflow, finite = kernels.select(x, residual, cut.threshold, threshold.rotation(n, state), idx, val)
        nbytes = self._encode(n, idx[:count], val[:count], residual, scratch["kept"][:count], out) if finite else 0
        if not nbytes:
            if residual is not None:
                kernels.scatter_add(residual, idx[:count], val[:count])
            return payload.write_flagged(out, self.id, n)
        if self._sorts(n):
            state["step"] += 1
        else:
            threshold.end(k, count + overflow, cut, state)
        return nbytes

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        payload.expect("seed", head.seed, 0)
        payload.expect("kind of values", head.aux >> 4, VALUES[self.values])
        count, middle = head.entries, self._values_nbytes(head.entries)
        if head.body.nbytes < middle:
            raise CorruptFrame(f"topk payload with {head.body.nbytes} bytes of body, {count} values take {middle}")
        idx = positions.decode(head.aux & 15, head.body[middle:], count, numel)
        val = self._decode_values(head.body[:middle], count)
        if not kernels.all_finite(val):
            raise CorruptFrame("topk payload with a value that is not finite")
        return idx, val

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        idx, val = parts
        if assign:
            out.zero_()
        kernels.scatter_add(out, idx, val)

    def _sorts(self, numel: int) -> bool:
        return self.exact or numel <= EXACT_NUMEL

    def _values_nbytes(self, count: int) -> int:
        scales = 4 * -(-count // BLOCK) if self.values == "int8" else 0
        return scales + ENTRY_NBYTES[self.values] * count

    def _encode(
        self, n: int, idx: torch.Tensor, val: torch.Tensor, residual: torch.Tensor | None, kept: torch.Tensor, out: memoryview
    ) -> int:
        """Writes the payload, and to the residual what rounding keeps of the values. 0 if a value became infinite."""
        count = idx.numel()
        middle = HEADER + self._values_nbytes(count)
        if not self._encode_values(out[HEADER:middle], val, kept):
            return 0
        kind, nbytes = positions.encode(out[middle:], idx, n)
        payload.write(out, self.id, n, count, aux=VALUES[self.values] << 4 | kind)
        if residual is not None and self.values != "fp32":
            kernels.scatter_add(residual, idx, kept)
        return middle + nbytes

    def _encode_values(self, body: memoryview, val: torch.Tensor, kept: torch.Tensor) -> bool:
        """kept = val - what the body says."""
        if self.values == "fp32":
            kernels.store_f32(body, val)
            return True
        if self.values == "int8":
            middle = body.nbytes - val.numel()
            kept.zero_()
            return kernels.int8_encode(body[middle:], body[:middle], val, kept, BLOCK) and kernels.scales_valid(body[:middle])
        finite = kernels.f32_to_f16(body, val)
        kernels.f16_to_f32(kept, body)
        torch.sub(val, kept, out=kept)
        return finite

    def _decode_values(self, body: memoryview, count: int) -> torch.Tensor:
        val = torch.empty(count)
        if count == 0:
            return val
        if self.values == "fp32":
            kernels.copy_f32(val, body)
        elif self.values == "fp16":
            kernels.f16_to_f32(val, body)
        else:
            middle = body.nbytes - count
            kernels.int8_decode(val, body[middle:], body[:middle], BLOCK, assign=True)
        return val


def topk(ratio: float = 0.01, values: str = "int8", exact: bool = False) -> TopK:
    """The largest `ratio` of all entries; exact=True sorts at any size, which costs several passes."""
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 < ratio <= 1:
        raise ValueError(f"topk: ratio is {ratio!r}, allowed is a number above 0 and up to 1")
    if values not in VALUES:
        raise ValueError(f"topk: values is {values!r}, allowed is one of {', '.join(map(repr, VALUES))}")
    if not isinstance(exact, bool):
        raise ValueError(f"topk: exact is {exact!r}, allowed is True or False")
    return TopK(float(ratio), values, exact)  # type: ignore[arg-type]
