"""PowerSGD (Vogels et al. 2019): sends a matrix as two thin factors, each summed over the workers.

One step of subspace iteration on the summed matrix M: round 0 sums P = M Q, each worker makes P orthonormal, round 1 sums
Q = M' P, and P Q' is the result. The next step starts from Q.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from commlayer.codec_name import checked
from commlayer.compressors import kernels, lowrank, payload
from commlayer.compressors.codec import NAN, Round, State, accumulator, check_input, check_numel
from commlayer.compressors.dense import finite_or_nan
from commlayer.compressors.payload import Buffer, Out
from commlayer.compressors.several_rounds import HEADER, SeveralRounds, add_floats, read_floats, write_floats
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch


class Sides(NamedTuple):
    """m x n elements and the rank of their factors. Rank 0 means that the elements are sent uncompressed."""

    m: int
    n: int
    rank: int


class PowerSGD(SeveralRounds, frozen=True):
    """A bucket with fewer elements than its factors is sent dense in round 1, after an empty round 0."""

    name: ClassVar[str] = "powersgd"
    rounds: ClassVar[tuple[Round, ...]] = (Round.SUM, Round.SUM)

    rank: int

    def sides(self, spec: Spec) -> Sides:
        """The matrix has the first dimension as rows and all others as columns."""
        if spec.numel == 0 or len(spec.shape) < 2:
            return Sides(spec.numel, 1, 0)
        m = spec.shape[0]
        n = spec.numel // m
        rank = min(self.rank, m, n)
        return Sides(m, n, rank if rank * (m + n) < m * n else 0)

    def count(self, sides: Sides, r: int) -> int:
        """Floats in a payload of round r."""
        m, n, rank = sides
        return (0, m * n)[r] if rank == 0 else rank * (m, n)[r]

    def bound(self, spec: Spec) -> int:
        sides = self.sides(spec)
        return HEADER + 4 * max(self.count(sides, 0), self.count(sides, 1))

    def init(self, spec: Spec) -> State:
        check_numel(spec)
        sides = self.sides(spec)
        m, n, rank = sides
        return {"q": torch.zeros(rank, n), "shared": 0, "step": 0, "_sides": sides, "_x": None, "_carried": False,
                "_p": torch.zeros(rank, m), "_mine": torch.zeros(rank, n)}

    def init_server(self, spec: Spec) -> State:
        check_numel(spec)
        return {}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        m, n, rank = state["_sides"]
        check_input(self.name, "x", x, m * n)
        state["_x"], state["_carried"] = x.view(m, n), False
        state["step"] += 1
        if rank == 0:
            if not kernels.all_finite(x):
                return payload.write_flagged(out, self.id, m * n)
            return write_floats(out, self.id, m * n, 0, torch.empty(0))
        # A direction that is zero in the last sum would stay zero: draw it again.
        for row, q in enumerate(state["q"]):
            if not q.any():
                q.copy_(lowrank.signs(n, state["shared"], state["step"], row))
        torch.mm(state["q"], state["_x"].t(), out=state["_p"])
        return write_floats(out, self.id, m * n, 0, state["_p"].view(-1))

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int:
        m, n, rank = state["_sides"]
        body = self.read_result(0, result, state)
        if body is None:
            return payload.write_flagged(out, self.id, m * n)
        if rank == 0:
            values = state["_x"].view(-1)
        else:
            kernels.copy_f32(state["_p"].view(-1), body)
            state["_p"].copy_(lowrank.orthonormal(state["_p"]))
            torch.mm(state["_p"], state["_x"], out=state["_mine"])
            values = state["_mine"].view(-1)
        nbytes = write_floats(out, self.id, m * n, 1, values)
        state["_carried"] = nbytes > HEADER
        return nbytes

    def sent(self, state: State, out: torch.Tensor) -> None:
        if not state["_carried"]:
            out.zero_()
        elif state["_sides"].rank == 0:
            out.copy_(state["_x"].view(-1))
        else:
            kernels.outer(out, state["_p"].view(-1), state["_mine"].view(-1), state["_sides"].rank)

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        m, n, rank = state["_sides"]
        check_input(self.name, "out", out, m * n)
        body = self.read_result(1, result, state)
        if body is None:
            out.fill_(NAN)
            return False
        if rank == 0:
            kernels.copy_f32(out, body)
            return finite_or_nan(True, out)
        q = torch.empty(rank, n)
        kernels.copy_f32(q.view(-1), body)
        if not math.isfinite(largest := float(q.abs().max())):
            out.fill_(NAN)
            return False
        kernels.outer(out, state["_p"].view(-1), q.view(-1), rank)
        state["q"].copy_(q)
        return largest * rank < kernels.MOST["fp32"] or finite_or_nan(True, out)

    def read_result(self, r: int, result: Buffer, state: State) -> memoryview | None:
        m, n, _ = state["_sides"]
        return read_floats(result, self.id, m * n, r, self.count(state["_sides"], r))

    def zeros(self, spec: Spec, r: int) -> Any:
        return {**accumulator(torch.zeros(self.count(self.sides(spec), r))), "numel": spec.numel}

    def vet(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> memoryview | None:
        return read_floats(payload_, self.id, acc["numel"], r, acc["sum"].numel())

    def put(self, r: int, vetted: memoryview | None, acc: Any, *, first: bool) -> None:
        add_floats(vetted, acc, first=first)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        if acc["flagged"][0]:
            return payload.write_flagged(out, self.id, acc["numel"])
        return write_floats(out, self.id, acc["numel"], r, acc["sum"])


def powersgd(rank: int = 4) -> PowerSGD:
    """Factors of that rank. Only buckets with the shape of a tensor of two or more dimensions gain."""
    checked("powersgd", rank=rank)
    return PowerSGD(rank)
