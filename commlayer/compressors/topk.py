"""Codecs that send the largest entries as positions and values.

topk selects single entries. block_threshold selects runs of neighboring entries by the sum of their magnitudes. Runs of 16 need
a sixteenth of the positions and are contiguous in memory (thresholdv16 of StellaTrain, Lim et al. 2024).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from commlayer.compressors import kernels, payload, selection
from commlayer.compressors.codec import FusedCodec, State, as_array, check_numel
from commlayer.compressors.entries import (
    VALUE_KINDS,
    VALUES_BLOCK,
    decode_positions,
    decode_values,
    encode_positions,
    encode_values,
    positions_bound,
    scales_nbytes,
    split_values,
    values_nbytes,
)
from commlayer.compressors.kernels import Array
from commlayer.compressors.payload import Buffer, Out, on_device
from commlayer.records import Spec

HEADER = payload.HEADER_NBYTES


class TopK(FusedCodec, frozen=True):
    """Sends the `ratio` of all entries with the largest magnitudes, never zeros. For large tensors the number varies by up to
    10 %; exact=True sorts tensors of any size, which costs several passes."""

    name: ClassVar[str] = "topk"
    biased: ClassVar[bool] = True

    ratio: float = 0.01
    values: str = "int8"
    exact: bool = False

    def bound(self, spec: Spec) -> int:
        cap = self.capacity(spec.numel)
        return HEADER + values_nbytes(self.values, cap) + positions_bound(spec.numel, cap)

    def wanted(self, numel: int) -> int:
        """Returns the number of entries to send: k."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def capacity(self, numel: int) -> int:
        """Returns the maximum number of entries of a payload."""
        return selection.room(numel, self.wanted(numel), self.few(numel))

    def few(self, numel: int) -> bool:
        """True: all entries are compared, because the tensor is small or `exact` is set."""
        return self.exact or numel <= selection.FEW_ENTRIES

    def init(self, spec: Spec) -> State:
        n = check_numel(spec)
        memory = selection.scratch(n, self.wanted(n), self.few(n)) | {"error": np.empty(self.capacity(n), np.float32)}
        return {**selection.threshold_state(), "_scratch": memory, "_numel": n}

    def start_fused(self, x: Array, residual: Array | None, state: State, out: Out) -> int:
        n, k = len(x), self.wanted(len(x))
        if on_device(out) and not self.few(n):
            from commlayer.compressors import topk_on_device  # loads torch

            nbytes, picked = topk_on_device.start(self.id, VALUE_KINDS[self.values], k, x, residual, state, out)
            if picked is None:
                return nbytes
        else:
            x = as_array(self.name, "x", x, state["_numel"], state["_scratch"]["val"])
            picked = selection.pick(k, self.few(n), x, residual, state)
        idx, val, finite = picked
        if not finite and residual is not None:
            kernels.of(residual).scatter_add(residual, idx, val)
        nbytes = self._encode(n, idx, val, residual, state["_scratch"]["error"][: len(idx)], out) if finite else 0
        return nbytes or payload.write_flagged(out, self.id, n)

    def read(self, result: Buffer, numel: int) -> tuple[Array, Array] | None:
        """Returns the positions (increasing, uint32 stored as int32) and values that `decode` would write; all other elements
        are 0. Returns None if the result is flagged as not finite. Raises CorruptPayload like `decode`."""
        head = payload.read(result, self.id, numel)
        if head.flagged:
            return None
        idx, val = self.check(head, numel)
        return idx, decode_values("int8", val, len(idx)) if self.values == "int8" else val

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        payload.expect("seed", head.seed, 0)
        payload.expect("kind of values", head.aux >> 4, VALUE_KINDS[self.values])
        body, places = split_values(self.name, self.values, head.body, head.entries)
        idx = decode_positions(head.aux & 15, places, head.entries, numel)
        return idx, body if self.values == "int8" else decode_values(self.values, body, head.entries)

    def apply(self, parts: tuple[Any, ...], out: Array, *, assign: bool) -> None:
        idx, val = parts
        if assign:
            out[:] = 0.0
        if self.values == "int8":
            middle = scales_nbytes("int8", len(idx))
            kernels.of(idx).scatter_add_int8(out, idx, val[middle:], val[:middle], VALUES_BLOCK)
        else:
            kernels.of(idx).scatter_add(out, idx, val)

    def _encode(
        self, n: int, idx: Array, val: Array, residual: Array | None, error: Array, out: Out
    ) -> int:
        """Writes the payload. Rounding errors of values are added to the residual. Returns the payload's size, or 0 if a value
        became infinite.

        With a residual no value becomes infinite: fp16 sends its largest number and the residual keeps the rest.
        """
        count = len(idx)
        middle = HEADER + values_nbytes(self.values, count)
        if not encode_values(self.values, out[HEADER:middle], val, error, saturate=residual is not None):
            return 0
        kind, nbytes = encode_positions(out[middle:], idx, n)
        payload.write(out, self.id, n, count, aux=VALUE_KINDS[self.values] << 4 | kind)
        if residual is not None and self.values != "fp32":
            kernels.of(residual).scatter_add(residual, idx, error)
        return middle + nbytes


class BlockThreshold(FusedCodec, frozen=True):
    """Sends the runs of `run` neighbors with the largest sums of magnitudes, until `ratio` of all entries is sent, never a run
    of zeros. For large tensors the number varies by up to 10 %."""

    name: ClassVar[str] = "block_threshold"
    biased: ClassVar[bool] = True

    ratio: float = 0.01
    run: int = 16
    values: str = "int8"

    def bound(self, spec: Spec) -> int:
        runs = self._runs(spec.numel)
        cap = selection.room(runs, self.wanted(spec.numel), runs <= selection.FEW_RUNS)
        return HEADER + values_nbytes(self.values, min(spec.numel, self.run * cap)) + positions_bound(runs, cap)

    def wanted(self, numel: int) -> int:
        """Returns the number of runs to send."""
        return min(self._runs(numel), max(1, math.ceil(self.ratio * numel / self.run)))

    def init(self, spec: Spec) -> State:
        n = check_numel(spec)
        runs, k = self._runs(n), self.wanted(n)
        few = runs <= selection.FEW_RUNS
        entries = min(n, self.run * selection.room(runs, k, few))
        memory = {"values": np.empty(entries, np.float32), "error": np.empty(entries, np.float32)}
        return {**selection.threshold_state(), "_scratch": selection.scratch(runs, k, few, self.run) | memory, "_numel": n}

    def start_fused(self, x: Array, residual: Array | None, state: State, out: Out) -> int:
        n, memory = state["_numel"], state["_scratch"]
        x = as_array(self.name, "x", x, n, memory["val"])
        few = self._runs(n) <= selection.FEW_RUNS
        ids, _, finite = selection.pick(self.wanted(n), few, x, residual, state, self.run)
        if not finite:
            return payload.write_flagged(out, self.id, n)
        count = kernels.of(x).gather_runs(x if residual is None else residual, self.run, ids, memory["values"])
        val, error = memory["values"][:count], memory["error"][:count]
        middle = HEADER + values_nbytes(self.values, count)
        if not encode_values(self.values, out[HEADER:middle], val, error, saturate=residual is not None):
            return payload.write_flagged(out, self.id, n)
        kind, nbytes = encode_positions(out[middle:], ids, self._runs(n))
        payload.write(out, self.id, n, count, aux=VALUE_KINDS[self.values] << 4 | kind)
        if residual is not None:
            kernels.of(ids).scatter_runs(residual, self.run, ids, error, True)
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

    def apply(self, parts: tuple[Any, ...], out: Array, *, assign: bool) -> None:
        ids, val = parts
        if assign:
            out[:] = 0.0
        kernels.of(ids).scatter_runs(out, self.run, ids, val, False)

    def _runs(self, numel: int) -> int:
        return -(-numel // self.run)


topk, block_threshold = TopK, BlockThreshold
