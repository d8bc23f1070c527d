"""Random-k: all members select the same random entries, so a payload contains only values and a server adds them directly.

One entry is drawn in each of k strata by the header's seed, which is computed from state.shared and the step. Accumulators
contain only values; a server does not know the positions. Sums are float32 whatever format the workers send, so a result is
exact.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from commlayer.codec_spec import check_arguments
from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import OneRound, Round, State, check_input, check_numel
from commlayer.compressors.entries import VALUE_KINDS, decode_values, encode_values, values_nbytes
from commlayer.compressors.payload import Buffer, Out
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

HEADER = payload.HEADER_NBYTES


class RandomK(OneRound, frozen=True):
    """Sends ratio * numel random entries per payload. If unbiased, each entry is multiplied by the size of its stratum, which
    it represents."""

    name: ClassVar[str] = "randomk"
    rounds: ClassVar[tuple[Round, ...]] = (Round.SUM,)

    ratio: float
    values: str
    unbiased: bool

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
        memory = {"idx": torch.empty(k, dtype=torch.int32), "val": torch.empty(k), "error": torch.empty(k)}
        if self.unbiased:
            memory["sizes"] = (torch.arange(k + 1) * n // max(k, 1)).diff().float()
        return {"shared": 0, "step": 0, "_scratch": memory, "_numel": n}

    def init_server(self, spec: Spec) -> State:
        return {}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        return self.start_fed(x, None, state, out)

    def start_fed(self, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: Out) -> int:
        """Writes the payload of x + residual in one pass. The residual becomes the part that is not sent, or the finite part of
        x + residual if that is not finite."""
        n = state["_numel"]
        check_input(self.name, "x", x, n)
        idx, val, error = (state["_scratch"][name] for name in ("idx", "val", "error"))
        seed = kernels.draw_word(state["shared"], state["step"])
        state["step"] += 1
        if residual is None:
            finite = kernels.all_finite(x)
        else:
            finite = kernels.select(x, residual, math.inf, 0, idx[:0], val[:0])[2]  # infinity selects nothing: only adds
        if not finite:
            return payload.write_flagged(out, self.id, n)
        kernels.draw_strata(idx, n, seed)
        kernels.take(x if residual is None else residual, idx, val)
        if self.unbiased:
            val *= state["_scratch"]["sizes"]
        end = HEADER + values_nbytes(self.values, idx.numel())
        fits = not self.unbiased or kernels.all_finite(val)
        if not fits or not encode_values(self.values, out[HEADER:end], val, error, saturate=residual is not None):
            return payload.write_flagged(out, self.id, n)
        payload.write(out, self.id, n, idx.numel(), aux=VALUE_KINDS[self.values] << 4, seed=seed)
        if residual is not None:
            kernels.scatter_add(residual, idx, error.sub_(val))
        return end

    def read(self, result: Buffer, numel: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns positions and values of a result; see plan_codecs.Reads."""
        head = payload.read(result, self.id, numel)
        if head.flagged:
            return None
        idx, val = self.check(head, numel)
        return idx, val

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        val = self._values(head, numel)
        idx = torch.empty(self.entries(numel), dtype=torch.int32, device=val.device)
        kernels.draw_strata(idx, numel, head.seed)
        return idx, val

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        idx, val = parts
        if assign:
            out.zero_()
        kernels.scatter_add(out, idx, val)

    def add_to(self, payload_: Buffer, out: torch.Tensor) -> None:
        """Decompresses the payload and adds it to `out`. An accumulator would contain only values."""
        head = payload.read(payload_, self.id, out.numel())
        if not head.flagged:
            self.apply(self.check(head, out.numel()), out, assign=False)

    def zeros(self, spec: Spec, r: int) -> dict[str, Any]:
        total = torch.zeros(self.entries(spec.numel))
        return {"sum": total, "numel": spec.numel, "seed": [0], "flagged": [False], "empty": [True]}

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        head = payload.read(payload_, self.id, acc["numel"])
        empty = first or acc["empty"][0]
        if not head.flagged:
            if not empty:
                payload.expect("seed", head.seed, acc["seed"][0])
            val, total = self._values(head, acc["numel"]), acc["sum"]
            total.copy_(val) if empty else total.add_(val)
            acc["seed"][0] = head.seed
        acc["empty"][0] = empty and head.flagged
        acc["flagged"][0] = head.flagged or (acc["flagged"][0] and not first)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        """Writes the sum as float32, whatever format the members sent, since no residual would keep the rounding error of a
        sum."""
        total: torch.Tensor = acc["sum"]
        n: int = acc["numel"]
        if acc["flagged"][0] or not kernels.all_finite(total):
            return payload.write_flagged(out, self.id, n)
        payload.write(out, self.id, n, total.numel(), aux=VALUE_KINDS["fp32"] << 4, seed=acc["seed"][0])
        end = HEADER + 4 * total.numel()
        kernels.store_f32(out[HEADER:end], total)
        return end

    def _values(self, head: payload.Head, numel: int) -> torch.Tensor:
        """Checks a payload or a result completely and returns its values."""
        kind = "fp32" if head.aux == VALUE_KINDS["fp32"] << 4 else self.values
        payload.expect("aux", head.aux, VALUE_KINDS[kind] << 4)
        payload.expect("count", head.entries, self.entries(numel))
        payload.expect("bytes of body", head.body.nbytes, values_nbytes(kind, head.entries))
        return decode_values(kind, head.body, head.entries)


def randomk(ratio: float = 0.01, values: str = "fp32", unbiased: bool = False) -> RandomK:
    """Creates the random-k codec, whose entries are the same for all members. With unbiased=True entries are scaled; do not
    combine that with error feedback."""
    check_arguments("randomk", ratio=ratio, values=values, unbiased=unbiased)
    return RandomK(float(ratio), values, unbiased)
