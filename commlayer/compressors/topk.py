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


class _Largest(FusedCodec, frozen=True):
    """Base class of both codecs: sends the runs of neighbors with the largest sums of magnitudes; an entry is a run of one."""

    biased: ClassVar[bool] = True
    few_runs: ClassVar[int] = selection.FEW_RUNS
    """Number of runs up to which all are compared."""

    @property
    def ratio(self) -> float:
        raise NotImplementedError

    @property
    def values(self) -> str:
        raise NotImplementedError

    @property
    def run_length(self) -> int:
        return 1

    def runs(self, numel: int) -> int:
        return -(-numel // self.run_length)

    def wanted(self, numel: int) -> int:
        """Returns the number of runs to send: k."""
        return min(self.runs(numel), max(1, math.ceil(self.ratio * numel / self.run_length)))

    def compares_all(self, numel: int) -> bool:
        """True: all runs are compared."""
        return self.runs(numel) <= self.few_runs

    def capacity(self, numel: int) -> int:
        """Returns the maximum number of runs of a payload."""
        return selection.capacity(self.runs(numel), self.wanted(numel), self.compares_all(numel))

    def bound(self, spec: Spec) -> int:
        cap, runs = self.capacity(spec.numel), self.runs(spec.numel)
        return HEADER + values_nbytes(self.values, min(spec.numel, self.run_length * cap)) + positions_bound(runs, cap)

    def init(self, spec: Spec) -> State:
        n = check_numel(spec)
        entries = min(n, self.run_length * self.capacity(n))
        memory = {name: np.empty(entries, np.float32) for name in (("error",) if self.run_length == 1 else ("values", "error"))}
        memory |= selection.scratch(self.runs(n), self.wanted(n), self.compares_all(n), self.run_length)
        return {**selection.threshold_state(), "_scratch": memory, "_numel": n}

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        payload.expect("seed", head.seed, 0)
        payload.expect("kind of values", head.aux >> 4, VALUE_KINDS[self.values])
        count = head.entries
        body, places = split_values(self.name, self.values, head.body, count)
        ids = decode_positions(head.aux & 15, places, -(-count // self.run_length), self.runs(numel))
        if count and self.run_length > 1:
            short = numel % self.run_length if int(ids[-1]) == numel // self.run_length else 0
            payload.expect("entries in the last run", (count - 1) % self.run_length + 1, short or self.run_length)
        return ids, self.read_values(body, count)

    def read_values(self, body: Buffer, count: int) -> Any:
        """Returns the values in the form that `apply` needs."""
        return decode_values(self.values, body, count)

    def encode(self, n: int, ids: Array, val: Array, residual: Array | None, error: Array, out: Out) -> int:
        """Writes the payload and its rounding errors, the latter to `error`. Returns the payload's size, or that of a flagged
        payload if a value became infinite.

        With a residual no value becomes infinite: fp16 sends its largest number and the residual keeps the rest.
        """
        middle = HEADER + values_nbytes(self.values, len(val))
        if not encode_values(self.values, out[HEADER:middle], val, error, saturate=residual is not None):
            return payload.write_flagged(out, self.id, n)
        kind, nbytes = encode_positions(out[middle:], ids, self.runs(n))
        payload.write(out, self.id, n, len(val), aux=VALUE_KINDS[self.values] << 4 | kind)
        if residual is not None:
            self.keep_error(residual, ids, error)
        return middle + nbytes

    def keep_error(self, residual: Array, ids: Array, error: Array) -> None:
        """Stores the rounding errors of what was sent in the residual."""
        raise NotImplementedError


class TopK(_Largest, frozen=True):
    """Sends the `ratio` of all entries with the largest magnitudes, never zeros. For large tensors the number varies by up to
    10 %; exact=True sorts tensors of any size, which costs several passes."""

    name: ClassVar[str] = "topk"
    few_runs: ClassVar[int] = selection.FEW_ENTRIES

    ratio: float = 0.01
    values: str = "int8"
    exact: bool = False

    def compares_all(self, numel: int) -> bool:
        return self.exact or super().compares_all(numel)

    def start_fused(self, x: Array, residual: Array | None, state: State, out: Out) -> int:
        n, k = len(x), self.wanted(len(x))
        if on_device(out) and not self.compares_all(n):
            from commlayer.compressors.kernels import topk_on_device  # loads torch

            nbytes, picked = topk_on_device.start(self.id, VALUE_KINDS[self.values], k, x, residual, state, out)
            if picked is None:
                return nbytes
        else:
            x = as_array(self.name, "x", x, state["_numel"], state["_scratch"]["val"])
            picked = selection.pick(k, self.compares_all(n), x, residual, state)
        idx, val, finite = picked
        if finite:
            return self.encode(n, idx, val, residual, state["_scratch"]["error"][: len(idx)], out)
        if residual is not None:
            kernels.of(residual).scatter_add(residual, idx, val)
        return payload.write_flagged(out, self.id, n)

    def read(self, result: Buffer, numel: int) -> tuple[Array, Array] | None:
        """Returns the positions (increasing, uint32 stored as int32) and values that `decode` would write; all other elements
        are 0. Returns None if the result is flagged as not finite. Raises CorruptPayload like `decode`."""
        parts = self.unpack(result, numel)
        if parts is None:
            return None
        idx, val = parts
        return idx, decode_values("int8", val, len(idx)) if self.values == "int8" else val

    def read_values(self, body: Buffer, count: int) -> Any:
        return body if self.values == "int8" else super().read_values(body, count)

    def apply(self, parts: tuple[Any, ...], out: Array, *, assign: bool) -> None:
        idx, val = parts
        if assign:
            out[:] = 0.0
        if self.values == "int8":
            middle = scales_nbytes("int8", len(idx))
            kernels.of(idx).scatter_add_int8(out, idx, val[middle:], val[:middle], VALUES_BLOCK)
        else:
            kernels.of(idx).scatter_add(out, idx, val)

    def keep_error(self, residual: Array, ids: Array, error: Array) -> None:
        if self.values != "fp32":
            kernels.of(residual).scatter_add(residual, ids, error)


class BlockThreshold(_Largest, frozen=True):
    """Sends the runs of `run` neighbors with the largest sums of magnitudes, until `ratio` of all entries is sent, never a run
    of zeros. For large tensors the number varies by up to 10 %."""

    name: ClassVar[str] = "block_threshold"

    ratio: float = 0.01
    run: int = 16
    values: str = "int8"

    @property
    def run_length(self) -> int:
        return self.run

    def start_fused(self, x: Array, residual: Array | None, state: State, out: Out) -> int:
        n, memory = state["_numel"], state["_scratch"]
        x = as_array(self.name, "x", x, n, memory["val"])
        ids, _, finite = selection.pick(self.wanted(n), self.compares_all(n), x, residual, state, self.run)
        if not finite:
            return payload.write_flagged(out, self.id, n)
        count = kernels.of(x).gather_runs(x if residual is None else residual, self.run, ids, memory["values"])
        return self.encode(n, ids, memory["values"][:count], residual, memory["error"][:count], out)

    def apply(self, parts: tuple[Any, ...], out: Array, *, assign: bool) -> None:
        ids, val = parts
        if assign:
            out[:] = 0.0
        kernels.of(ids).scatter_runs(out, self.run, ids, val, False)

    def keep_error(self, residual: Array, ids: Array, error: Array) -> None:
        kernels.of(ids).scatter_runs(residual, self.run, ids, error, True)


topk, block_threshold = TopK, BlockThreshold
