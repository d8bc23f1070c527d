"""Partition: encodes a bucket in slices, each with its own codec state. A slice's payload is the inner codec's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from commlayer.codec_name import checked
from commlayer.compressors import payload
from commlayer.compressors.codec import (
    NAN,
    Codec,
    Cut,
    OneRound,
    Round,
    State,
    Wrapper,
    accumulator,
    check_codec,
    check_input,
    check_numel,
)
from commlayer.compressors.feedback import Sent, add_back
from commlayer.compressors.payload import Buffer, Out
from commlayer.compressors.several_rounds import SeveralRounds
from commlayer.errors import CorruptPayload, InvalidInput
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

HEADER = payload.HEADER_NBYTES
_LENGTH = struct.Struct("<I")
ELEMENT_NBYTES = 4


class Partition(Wrapper, frozen=True):
    """Slices by exactly one of three arguments.

    `parts` is the number of slices, of about equal size. `nbytes` is the largest size of a slice as float32. `shapes` are those
    of the tensors in a fused bucket, in order, so that each tensor is encoded with its own shape.

    A slice that is not finite flags the whole payload, for all rounds that follow.
    """

    name: ClassVar[str] = "partition"

    parts: int | None
    nbytes: int | None
    shapes: tuple[tuple[int, ...], ...] | None

    @property
    def id(self) -> int:
        return payload.CODEC_IDS[self.name]

    def specs(self, numel: int) -> list[Spec]:
        """The specs of the slices. ValueError if the shapes belong to another bucket."""
        if self.shapes is not None:
            specs = [Spec(shape) for shape in self.shapes]
            if (total := sum(s.numel for s in specs)) != numel:
                raise InvalidInput("E-CODEC-ARGUMENT", f"partition: shapes of {total} elements in all, the bucket has {numel}")
            return specs
        if self.parts is not None:
            count = min(self.parts, max(numel, 1))
        else:
            assert self.nbytes is not None
            count = max(1, -(-numel * ELEMENT_NBYTES // self.nbytes))
        edges = [numel * i // count for i in range(count + 1)]
        return [Spec((stop - start,)) for start, stop in pairwise(edges)]

    def bound(self, spec: Spec) -> int:
        return HEADER + sum(_LENGTH.size + int(self.inner.bound(s)) for s in self.specs(spec.numel))

    def init(self, spec: Spec) -> State:
        return self._init(self.inner.init, spec)

    def init_server(self, spec: Spec) -> State:
        return self._init(self.inner.init_server, spec)

    def _init(self, make: Callable[[Spec], State], spec: Spec) -> State:
        parts = {str(i): make(s) for i, s in enumerate(self.specs(check_numel(spec)))}
        return {"parts": parts, "_numel": spec.numel, "_flagged": False}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        check_input(self.name, "x", x, state["_numel"])
        slices, states = self._cut(x), list(state["parts"].values())
        nbytes = self._join(x.numel(), out, lambda i, room: self.inner.start(slices[i], states[i], room))
        state["_flagged"] = nbytes == HEADER
        return nbytes

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int:
        numel, states = state["_numel"], list(state["parts"].values())
        bodies = self._read_result(r, result, state)
        if bodies is None:
            state["_flagged"] = True
            return payload.write_flagged(out, self.id, numel)
        nbytes = self._join(numel, out, lambda i, room: self.inner.next(r, bodies[i], states[i], room))
        state["_flagged"] = nbytes == HEADER
        return nbytes

    def sent(self, state: State, out: torch.Tensor) -> None:
        """See feedback.Sent."""
        if state["_flagged"]:
            out.zero_()
            return
        for part, into in zip(state["parts"].values(), self._cut(out), strict=True):
            self.inner.sent(part, into)

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        check_input(self.name, "out", out, state["_numel"])
        bodies = self._read_result(len(self.rounds) - 1, result, state)
        dense = torch.empty_like(out)  # nothing is written to out before the last slice is decoded
        if bodies is not None:
            slices = zip(bodies, state["parts"].values(), self._cut(dense), strict=True)
            if sum(self.inner.decode(body, part, into) for body, part, into in slices) == len(bodies):
                out.copy_(dense)
                return True
        out.fill_(NAN)
        return False

    def add_to(self, payload_: Buffer, out: torch.Tensor) -> None:
        """See feedback.AddsTo."""
        for body, into in zip(self._split(payload_, out.numel()) or [], self._cut(out), strict=False):
            add_back(self.inner, body, into)

    def undo(self, state: State, x: torch.Tensor, cut: Cut = None) -> None:
        """Nothing to undo: the inner codec keeps no residual."""

    def undo_server(self, state: State, cut: Cut = None) -> None:
        """Nothing to undo, as in `undo`."""

    def zeros(self, spec: Spec, r: int) -> Any:
        if self.rounds == (Round.GATHER,):
            return accumulator(torch.zeros(spec.numel))
        accs = [self.inner.zeros(s, r) for s in self.specs(spec.numel)]
        return {"parts": accs, "flagged": [False], "numel": spec.numel}

    def vet(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> list[Any] | None:
        numel, accs = self._accs(acc)
        bodies = self._split(payload_, numel)
        return None if bodies is None else [self.inner.vet(r, b, a, first=first) for b, a in zip(bodies, accs, strict=True)]

    def put(self, r: int, vetted: list[Any] | None, acc: Any, *, first: bool) -> None:
        accs = self._accs(acc)[1]
        for part, body in zip(accs, vetted or [None] * len(accs), strict=True):
            self.inner.put(r, body, part, first=first)
        if first:
            acc["flagged"][0] = False
        acc["flagged"][0] |= any(part["flagged"][0] for part in accs)

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        self.put(r, self.vet(r, payload_, acc, first=first), acc, first=first)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        numel, accs = self._accs(acc)
        if acc["flagged"][0]:
            return payload.write_flagged(out, self.id, numel)
        states = list(state["parts"].values())
        return self._join(numel, out, lambda i, room: self.inner.emit(r, accs[i], states[i], room))

    def _read_result(self, r: int, result: Buffer, state: State) -> list[memoryview] | None:
        """The slices' results. All are checked before the first is used, since using one changes its state."""
        bodies = self._split(result, state["_numel"])
        if bodies is not None and isinstance(self.inner, SeveralRounds):
            for body, part in zip(bodies, state["parts"].values(), strict=True):
                self.inner.read_result(r, body, part)
        return bodies

    def _accs(self, acc: Any) -> tuple[int, list[Any]]:
        """(elements, an accumulator for each slice). A dense sum is split into views; a residual is such a sum, too."""
        if "parts" in acc:
            return acc["numel"], acc["parts"]
        return acc["sum"].numel(), [accumulator(part) for part in self._cut(acc["sum"])]

    def _cut(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(x.split([s.numel for s in self.specs(x.numel())]))

    def _join(self, numel: int, out: Out, write: Callable[[int, memoryview], int]) -> int:
        """Writes the header, the length of each slice's payload, then the payloads. If one is flagged, the whole is flagged."""
        specs = self.specs(numel)
        at = HEADER + _LENGTH.size * len(specs)
        flagged, memory = False, payload.on_host(out)
        for i, spec in enumerate(specs):
            nbytes = write(i, memory[at:])
            flagged |= payload.read(memory[at : at + nbytes], self.inner.id, spec.numel).flagged
            _LENGTH.pack_into(memory, HEADER + _LENGTH.size * i, nbytes)
            at += nbytes
        if flagged:
            return payload.write_flagged(out, self.id, numel)
        payload.write(out, self.id, numel, 0)
        return at

    def _split(self, message: Buffer, numel: int) -> list[memoryview] | None:
        """The slices' payloads, or None if the whole is flagged."""
        head = payload.read(message, self.id, numel)
        if head.flagged:
            return None
        payload.expect("aux", head.aux, 0)
        payload.expect("seed", head.seed, 0)
        payload.expect("count", head.entries, 0)
        count, octets = len(self.specs(numel)), payload.on_host(head.body)
        if octets.nbytes < _LENGTH.size * count:
            raise CorruptPayload(f"partition payload with {octets.nbytes} bytes of body, {count} lengths take {4 * count}")
        lengths = [_LENGTH.unpack_from(octets, _LENGTH.size * i)[0] for i in range(count)]
        edges = list(accumulate(lengths, initial=_LENGTH.size * count))
        payload.expect("bytes of body", octets.nbytes, edges[-1])
        bodies = [octets[start:stop] for start, stop in pairwise(edges)]
        for body, spec in zip(bodies, self.specs(numel), strict=True):
            if payload.read(body, self.inner.id, spec.numel).flagged:
                raise CorruptPayload("partition payload with a flagged slice, expected the whole to be flagged")
        return bodies


def partition(
    inner: Codec, parts: int | None = None, nbytes: int | None = None, shapes: tuple[tuple[int, ...], ...] | None = None
) -> Partition:
    """Encodes slices separately. Error feedback goes around it; a plan adds that where the inner codec needs it."""
    codec = check_codec("partition", inner)
    if not isinstance(inner, OneRound | SeveralRounds):
        raise InvalidInput("E-CODEC-ARGUMENT",
                           f"partition: inner is {inner}, allowed is a codec without wrappers; put those around partition")
    if len(codec.rounds) > 1 and not isinstance(inner, Sent):
        raise InvalidInput("E-CODEC-ARGUMENT", f"partition: {inner} has {len(codec.rounds)} rounds and no sent()")
    checked("partition", parts=parts, nbytes=nbytes, shapes=shapes)
    return Partition(codec, parts, nbytes, shapes)
