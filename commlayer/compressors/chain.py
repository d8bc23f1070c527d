"""Two codecs in a row: one picks entries, another codes their values. Knows positions; the values' bytes are the second's."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, ClassVar

from commlayer.compressors import kernels, payload, positions
from commlayer.compressors.codec import Buffer, Codec, Out, State
from commlayer.compressors.feedback import Limited
from commlayer.compressors.one_round import OneRound, accumulator, check_numel
from commlayer.compressors.selection import Picks
from commlayer.errors import CorruptFrame
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

HEADER = payload.HEADER_NBYTES
_LENGTH = struct.Struct("<I")
VALUES_AT = HEADER + _LENGTH.size


class Chain(OneRound, frozen=True):
    """What either stage loses is in the residual: entries not picked, and what is off in those that are."""

    name: ClassVar[str] = "chain"
    biased: ClassVar[bool] = True

    first: Any
    second: Any

    def bound(self, spec: Spec) -> int:
        most = self.first.capacity(spec.numel)
        return VALUES_AT + int(self.second.bound(Spec((most,)))) + positions.bound(spec.numel, most)

    def init(self, spec: Spec) -> State:
        most = self.first.capacity(check_numel(spec))
        return {"first": self.first.init(spec), "second": self.second.init(Spec((most,)))}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        return self.start_fed(x, None, state, out)

    def start_fed(self, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: Out) -> int:
        """See feedback.Fed."""
        n = x.numel()
        idx, val, finite = self.first.pick(x, residual, state["first"])
        kept = torch.empty_like(val)
        nbytes = self._values(val, kept, state["second"], out[VALUES_AT:], saturate=residual is not None) if finite else 0
        if nbytes == 0:
            if residual is not None:
                kernels.scatter_add(residual, idx, val)
            return payload.write_flagged(out, self.id, n)
        if residual is not None:
            kernels.scatter_add(residual, idx, kept)
        kind, places_nbytes = positions.encode(out[VALUES_AT + nbytes :], idx, n)
        payload.write(out, self.id, n, idx.numel(), aux=kind)
        _LENGTH.pack_into(payload.on_host(out), HEADER, nbytes)
        return VALUES_AT + nbytes + places_nbytes

    def check(self, head: payload.Head, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        payload.expect("seed", head.seed, 0)
        if head.body.nbytes < _LENGTH.size:
            raise CorruptFrame(f"chain payload with {head.body.nbytes} bytes of body, at least {_LENGTH.size} are needed")
        (nbytes,) = _LENGTH.unpack_from(payload.on_host(head.body))
        values, places = head.body[_LENGTH.size :][:nbytes], head.body[_LENGTH.size :][nbytes:]
        payload.expect("bytes of values", values.nbytes, nbytes)
        val = torch.empty(head.entries)
        acc = accumulator(val)
        self.second.add(0, values, acc, first=True)
        if acc["flagged"][0] or not kernels.all_finite(val):
            raise CorruptFrame("chain payload with a value that is not finite")
        return positions.decode(head.aux, places, head.entries, numel), val

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        if assign:
            out.zero_()
        kernels.scatter_add(out, *parts)

    def places(self, payload_: Buffer, numel: int) -> torch.Tensor:
        """See selection.Placed."""
        head = payload.read(payload_, self.id, numel)
        return torch.empty(0, dtype=torch.int32) if head.flagged else self.check(head, numel)[0]

    def _values(self, val: torch.Tensor, kept: torch.Tensor, state: State, out: Out, *, saturate: bool) -> int:
        """kept = val - what was written. 0 if the second codec cannot hold a value, which it can where `saturate` cuts it."""
        nbytes = int(self.second.start(val, state, out))
        carried = self.second.decode(out[:nbytes], state, kept)
        if not carried and saturate and isinstance(limited := self.second, Limited):
            nbytes = int(self.second.start(val.clamp(-limited.most, limited.most), state, out))
            carried = self.second.decode(out[:nbytes], state, kept)
        torch.sub(val, kept, out=kept)
        return nbytes if carried else 0


def chain(first: Codec, second: Codec) -> Chain:
    """`first` picks entries and sends them as fp32, such as topk(values="fp32"); `second` codes them as a vector."""
    if not isinstance(first, Picks) or getattr(first, "values", "fp32") != "fp32":
        raise ValueError(f"chain: first is {first}, allowed is a sparse codec with values='fp32', such as topk")
    if not isinstance(second, OneRound) or isinstance(second, Chain) or hasattr(second, "ratio"):
        raise ValueError(f"chain: second is {second}, allowed is a codec of one round that sends every entry, such as int8")
    return Chain(first, second)
