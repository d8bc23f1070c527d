"""Random-k: all members select the same random entries, so a payload contains only values and a server adds them directly.

One entry is drawn in each of k strata by the header's seed, which is computed from state.shared and the step. Accumulators
contain only values; a server does not know the positions. Sums are float32 whatever format the workers send, so a result is
exact.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import FusedCodec, Reduction, State, as_array, check_numel
from commlayer.compressors.entries import VALUE_KINDS, decode_values, encode_values, values_nbytes
from commlayer.compressors.kernels import Array
from commlayer.compressors.payload import Buffer, Out
from commlayer.records import Spec

HEADER = payload.HEADER_NBYTES


class RandomK(FusedCodec, frozen=True):
    """Sends ratio * numel random entries per payload, the same entries for all members. If unbiased, each entry is multiplied
    by the size of its stratum, which it represents; do not combine unbiased=True with error feedback."""

    name: ClassVar[str] = "randomk"
    rounds: ClassVar[tuple[Reduction, ...]] = (Reduction.SUM,)

    ratio: float = 0.01
    values: str = "fp32"
    unbiased: bool = False

    @property
    def biased(self) -> bool:  # type: ignore[override]
        return not self.unbiased

    def bound(self, spec: Spec) -> int:
        return HEADER + 4 * self.entries(spec.numel)

    def entries(self, numel: int) -> int:
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def init(self, spec: Spec) -> State:
        n = check_numel(spec)
        k = self.entries(n)
        memory = {"idx": np.empty(k, np.int32), "val": np.empty(k, np.float32), "error": np.empty(k, np.float32)}
        if self.unbiased:
            memory["sizes"] = np.diff(np.arange(k + 1) * n // max(k, 1)).astype(np.float32)
        return {"shared": 0, "step": 0, "_scratch": memory, "_numel": n}

    def init_server(self, spec: Spec) -> State:
        return {}

    def start_fused(self, x: Array, residual: Array | None, state: State, out: Out) -> int:
        n = state["_numel"]
        idx, val, error = (state["_scratch"][name] for name in ("idx", "val", "error"))
        x, k = as_array(self.name, "x", x, n, val), kernels.host()
        seed = kernels.host().draw_word(state["shared"], state["step"])
        state["step"] += 1
        if not (k.all_finite(x) if residual is None else kernels.add_finite(residual, x)):
            return payload.write_flagged(out, self.id, n)
        k.draw_strata(idx, n, seed)
        k.take(x if residual is None else residual, idx, val)
        if self.unbiased:
            with np.errstate(over="ignore"):
                val *= state["_scratch"]["sizes"]
        end = HEADER + values_nbytes(self.values, len(idx))
        fits = not self.unbiased or k.all_finite(val)
        if not fits or not encode_values(self.values, out[HEADER:end], val, error, saturate=residual is not None):
            return payload.write_flagged(out, self.id, n)
        payload.write(out, self.id, n, len(idx), aux=VALUE_KINDS[self.values] << 4, seed=seed)
        if residual is not None:
            error -= val
            k.scatter_add(residual, idx, error)
        return end

    read = FusedCodec.unpack
    """Returns the positions and values of a result."""

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        val = self._values(head, numel)
        idx = np.empty(self.entries(numel), np.int32)
        kernels.host().draw_strata(idx, numel, head.seed)
        return idx, val

    def apply(self, parts: tuple[Any, ...], out: Array, *, assign: bool) -> None:
        idx, val = parts
        if assign:
            out[:] = 0.0
        kernels.host().scatter_add(out, idx, val)

    def new_accumulator(self, spec: Spec, r: int) -> dict[str, Any]:
        total = np.zeros(self.entries(spec.numel), np.float32)
        return {"sum": total, "numel": spec.numel, "seed": [0], "flagged": [False], "empty": [True]}

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        head = payload.read(payload_, self.id, acc["numel"])
        empty = first or acc["empty"][0]
        if not head.flagged:
            if not empty:
                payload.expect("seed", head.seed, acc["seed"][0])
            val, total = self._values(head, acc["numel"]), acc["sum"]
            if empty:
                total[:] = val
            else:
                kernels.host().add_f32(total, val)
            acc["seed"][0] = head.seed
        acc["empty"][0] = empty and head.flagged
        acc["flagged"][0] = head.flagged or (acc["flagged"][0] and not first)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        """Writes the sum as float32, whatever format the members sent, since no residual would keep the rounding error of a
        sum."""
        total, n = acc["sum"], acc["numel"]
        if acc["flagged"][0] or not kernels.host().all_finite(total):
            return payload.write_flagged(out, self.id, n)
        payload.write(out, self.id, n, len(total), aux=VALUE_KINDS["fp32"] << 4, seed=acc["seed"][0])
        end = HEADER + 4 * len(total)
        kernels.store_f32(out[HEADER:end], total)
        return end

    def _values(self, head: payload.Head, numel: int) -> Array:
        """Checks a payload or a result completely and returns its values."""
        kind = "fp32" if head.aux == VALUE_KINDS["fp32"] << 4 else self.values
        payload.expect("aux", head.aux, VALUE_KINDS[kind] << 4)
        payload.expect("count", head.entries, self.entries(numel))
        payload.expect("bytes of body", head.body.nbytes, values_nbytes(kind, head.entries))
        return decode_values(kind, head.body, head.entries)


randomk = RandomK
