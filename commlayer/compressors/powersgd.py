"""PowerSGD (Vogels et al. 2019): sends a matrix as two thin factors, each summed over the workers.

It makes one step of subspace iteration on the summed matrix M. Round 0 sums P = M Q, each worker makes P orthonormal, round 1
sums Q = M' P, and P Q' is the result. The next step starts from Q. Every member computes P Q' itself, so the result must not
depend on a library's order of additions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import NAN, Codec, Reduction, State, accumulator, as_array, check_numel
from commlayer.compressors.dense import finite_or_nan
from commlayer.compressors.kernels import Array
from commlayer.compressors.payload import Buffer, Out
from commlayer.errors import InvalidInput
from commlayer.records import Spec

HEADER = payload.HEADER_NBYTES
NOISE = 1e-12
"""If less than this fraction of a row's squared length remains after orthogonalization, the remainder is float32 rounding
error."""

Rows = npt.NDArray[np.float64]
Shape = tuple[int, ...]


class Factors(NamedTuple):
    """Dimensions of one tensor of a bucket: `start` is its first element, m x n its shape as a matrix. Rank 0: its elements are
    sent uncompressed."""

    start: int
    m: int
    n: int
    rank: int

    @property
    def stop(self) -> int:
        return self.start + self.m * self.n

    def count(self, r: int) -> int:
        """Returns the tensor's number of floats in a payload of round r. An uncompressed tensor is sent in round 1."""
        return self.rank * (self.m, self.n)[r] if self.rank else (0, self.m * self.n)[r]


class PowerSGD(Codec, frozen=True):
    """Sends matrices as factors of low rank. A tensor with fewer elements than its factors is sent uncompressed, as is each
    tensor of one dimension. The codec keeps no residual; error feedback calls `sent`."""

    name: ClassVar[str] = "powersgd"
    rounds: ClassVar[tuple[Reduction, ...]] = (Reduction.SUM, Reduction.SUM)
    biased: ClassVar[bool] = True

    rank: int = 4
    shapes: tuple[Shape, ...] | None = None
    """Shapes of the tensors in a fused bucket, in order. None: the shape is that of the bucket."""

    def __str__(self) -> str:
        shapes = "" if self.shapes is None else f", shapes={self.shapes}"
        return f"{self.name}(rank={self.rank}{shapes})"

    def factors(self, spec: Spec) -> list[Factors]:
        """Returns the dimensions of the bucket's tensors. As a matrix, a tensor has its first dimension as rows and all others
        as columns."""
        found, start = [], 0
        for shape in self.shapes or (spec.shape,):
            numel = math.prod(shape)
            m, n = (shape[0], numel // shape[0]) if numel and len(shape) > 1 else (numel, 1)
            rank = min(self.rank, m, n)
            found.append(Factors(start, m, n, rank if rank * (m + n) < m * n else 0))
            start += numel
        if start != spec.numel:
            raise InvalidInput("E-CODEC-ARGUMENT", f"{self.name}: shapes have {start} elements together, but the bucket has "
                                                   f"{spec.numel}")
        return found

    def count(self, spec: Spec, r: int) -> int:
        """Returns the number of floats in a payload of round r."""
        return sum(each.count(r) for each in self.factors(spec))

    def bound(self, spec: Spec) -> int:
        return HEADER + 4 * max(self.count(spec, 0), self.count(spec, 1))

    def init(self, spec: Spec) -> State:
        check_numel(spec)
        factors = self.factors(spec)
        return {"q": np.zeros(sum(each.count(1) for each in factors if each.rank), np.float32), "shared": 0, "step": 0,
                "_x": None, "_factors": factors, "_numel": spec.numel, "_encoded": False,
                "_p": np.zeros(self.count(spec, 0), np.float32), "_own": np.zeros(self.count(spec, 1), np.float32)}

    def init_server(self, spec: Spec) -> State:
        check_numel(spec)
        return {}

    def start(self, x: Array, state: State, out: Out) -> int:
        x = as_array(self.name, "x", x, state["_numel"], state["_p"])
        state["_x"], state["_encoded"] = x, False
        state["step"] += 1
        row = 0
        for each, p, q in _matrices(state["_factors"], state["_p"], state["q"]):
            # A direction that is zero in the last sum would stay zero, so it is replaced by a random one.
            for direction in q:
                if not direction.any():
                    direction[:] = signs(each.n, state["shared"], state["step"], row)
                row += 1
            _mm(q, x[each.start : each.stop].reshape(each.m, each.n).T, p)
        uncompressed = (x[each.start : each.stop] for each in state["_factors"] if not each.rank)
        if not all(kernels.host().all_finite(part) for part in uncompressed):
            return payload.write_flagged(out, self.id, state["_numel"])
        return self._write(out, state["_numel"], 0, state["_p"])

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int:
        body = self._read(result, state["_numel"], 0, len(state["_p"]))
        if body is None:
            return payload.write_flagged(out, self.id, state["_numel"])
        kernels.copy_f32(state["_p"], body)
        x = state["_x"]
        for each, p, own in _tensors(state["_factors"], state["_p"], state["_own"]):
            part = x[each.start : each.stop]
            if each.rank:
                p[:] = orthonormal(p)
                _mm(p, part.reshape(each.m, each.n), own.reshape(each.rank, each.n))
            else:
                own[:] = part
        nbytes = self._write(out, state["_numel"], 1, state["_own"])
        state["_encoded"] = nbytes > HEADER
        return nbytes

    def sent(self, state: State, out: Array) -> None:
        if state["_encoded"]:
            self._multiply(state, state["_own"], out)
        else:
            out[:] = 0.0

    def decode(self, result: Buffer, state: State, out: Array) -> bool:
        out = as_array(self.name, "out", out, state["_numel"], state["_p"])
        body = self._read(result, state["_numel"], 1, len(state["_own"]))
        total = np.empty(len(state["_own"]), np.float32)
        if body is not None:
            kernels.copy_f32(total, body)
        if body is None or not kernels.host().all_finite(total):
            out[:] = NAN
            return False
        self._multiply(state, total, out)
        factors = [q for each, _, q in _tensors(state["_factors"], state["_p"], total) if each.rank]
        if factors:
            np.concatenate(factors, out=state["q"])
        largest = float(np.abs(total).max(initial=0.0))
        return largest * self.rank < kernels.MOST["fp32"] or finite_or_nan(out)

    def new_accumulator(self, spec: Spec, r: int) -> Any:
        return {**accumulator(np.zeros(self.count(spec, r), np.float32)), "numel": spec.numel}

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        total = acc["sum"]
        body = self._read(payload_, acc["numel"], r, len(total))
        if body is not None:
            (kernels.copy_f32 if first else kernels.host().add_f32)(total, body)
        elif first:
            total[:] = 0.0
        acc["flagged"][0] = body is None or (acc["flagged"][0] and not first)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        if acc["flagged"][0]:
            return payload.write_flagged(out, self.id, acc["numel"])
        return self._write(out, acc["numel"], r, acc["sum"])

    def _multiply(self, state: State, second: Array, out: Array) -> None:
        """Computes out = P Q' for each matrix, with Q from `second`, and copies the elements of uncompressed tensors from
        `second`."""
        for each, p, q in _tensors(state["_factors"], state["_p"], second):
            part = out[each.start : each.stop]
            if each.rank:
                kernels.host().outer(part, p.reshape(-1), q, each.rank)
            else:
                part[:] = q

    def _write(self, out: Out, numel: int, r: int, values: Array) -> int:
        """Writes the payload of round r. The payload is flagged if a value is not finite. Returns its size."""
        if not kernels.host().all_finite(values):
            return payload.write_flagged(out, self.id, numel)
        end = HEADER + 4 * len(values)
        payload.write(out, self.id, numel, len(values), aux=r)
        kernels.store_f32(out[HEADER:end], values)
        return end

    def _read(self, message: Buffer, numel: int, r: int, count: int) -> Out | None:
        """Checks a payload or a result. Returns its body of `count` floats. Returns None if the result is flagged as not
        finite."""
        head = payload.read(message, self.id, numel)
        if head.flagged:
            return None
        payload.expect("seed", head.seed, 0)
        payload.expect("round", head.aux, r)
        payload.expect("count", head.entries, count)
        payload.expect("bytes of body", head.body.nbytes, 4 * count)
        return head.body


powersgd = PowerSGD


def _tensors(factors: list[Factors], first: Array, second: Array) -> Iterator[tuple[Factors, Any, Any]]:
    """Yields for every tensor: its dimensions, its P as a rank x m matrix, and its floats of round 1."""
    at = [0, 0]
    for each in factors:
        ends = [at[r] + each.count(r) for r in range(2)]
        p, q = first[at[0] : ends[0]], second[at[1] : ends[1]]
        yield each, p.reshape(each.rank, each.m) if each.rank else p, q
        at = ends


def _matrices(factors: list[Factors], first: Array, second: Array) -> Iterator[tuple[Factors, Any, Any]]:
    """Yields for every compressed tensor: its dimensions, P as rank x m, Q as rank x n. `second` contains the matrices Q."""
    compressed = [each for each in factors if each.rank]
    for each, p, q in _tensors(compressed, first, second):
        yield each, p, q.reshape(each.rank, each.n)


def _mm(a: Array, b: Array, out: Array) -> None:
    """Computes out = a b with torch, whose product of a thin matrix is four times as fast as numpy's. Called only on
    workers."""
    import torch

    torch.mm(torch.from_numpy(a), torch.from_numpy(b), out=torch.from_numpy(out))


def orthonormal(p: Array) -> Array:
    """Makes the rows of p (float32) orthonormal in order, by Gram-Schmidt, applied twice. A linearly dependent row becomes
    zeros."""
    rows = p.astype(np.float64)
    for j, row in enumerate(rows):
        before = _dot(row, row)
        for _ in range(2):
            for other in rows[:j]:
                row -= _dot(other, row) * other
        after = _dot(row, row)
        row[:] = row / np.sqrt(after) if after > NOISE * before else 0.0
    return rows.astype(np.float32)


def signs(n: int, key: int, step: int, row: int) -> Array:
    """Returns n random numbers, 1 or -1, which are equal for all members with the same key."""
    digest = hashlib.shake_256(f"{key} {step} {row}".encode()).digest((n + 7) // 8)
    bits = np.unpackbits(np.frombuffer(digest, np.uint8), count=n)
    return bits.astype(np.float32) * 2 - 1


def _dot(x: Rows, y: Rows) -> float:
    """Returns the dot product, summed by halves with elementwise additions only, so the order of additions is fixed."""
    v = x * y
    while v.size > 1:
        half = v.size // 2
        rest = v[2 * half :]
        v = v[:half] + v[half : 2 * half]
        v[: rest.size] += rest
    return float(v[0]) if v.size else 0.0
