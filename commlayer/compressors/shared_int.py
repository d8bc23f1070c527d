"""Integers in a scale that all workers share, so that a server adds them without decoding. Knows its bodies and widths.

Round 0 takes the maximum, over the workers, of each block's largest magnitude; round 1 sums whole numbers in units of that.
The sum of n workers needs more bits than what each sends: a result says in its header how many it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from commlayer.codec_name import checked
from commlayer.compressors import inputs, kernels, payload
from commlayer.compressors.codec import Buffer, Out, Round, State
from commlayer.compressors.dense import finite_or_nan
from commlayer.compressors.one_round import NAN, check_numel
from commlayer.compressors.several_rounds import HEADER, SeveralRounds
from commlayer.errors import CorruptFrame
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

MOST_BF16 = 0x7F7F
"""Bits of the largest finite bfloat16. Magnitudes compare as their bits do."""

WIDTHS = (4, 8, 12, 16, 32)
"""Bits that an integer may have on the wire."""



class SharedInt(SeveralRounds, frozen=True):
    """Stochastic rounding is unbiased: what workers' roundings lose cancels in the mean. Nearest wants error feedback."""

    name: ClassVar[str] = "shared_int"
    rounds: ClassVar[tuple[Round, ...]] = (Round.MAX, Round.SUM)

    bits: int
    block: int
    rounding: str

    @property
    def biased(self) -> bool:  # type: ignore[override]
        return self.rounding == "nearest"

    @property
    def levels(self) -> int:
        """Largest magnitude of one worker's integers."""
        return (1 << self.bits - 1) - 1

    def bound(self, spec: Spec) -> int:
        return HEADER + max(self._maxima_nbytes(spec.numel), packed_nbytes(spec.numel, WIDTHS[-1]))

    def init(self, spec: Spec) -> State:
        n = check_numel(spec)
        maxima = memoryview(bytearray(self._maxima_nbytes(n)))
        return {"own": 0, "step": 0, "_maxima": maxima, "_numel": n, "_x": None, "_carried": None}

    def init_server(self, spec: Spec) -> State:
        check_numel(spec)
        return {}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        n = state["_numel"]
        inputs.check(self.name, "x", x, n)
        state["_x"], state["_carried"] = x, None
        state["step"] += 1
        end = HEADER + self._maxima_nbytes(n)
        if not kernels.int_maxima(out[HEADER:end], x, self.block):
            return payload.write_flagged(out, self.id, n)
        payload.write(out, self.id, n, self._blocks(n))
        return end

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int:
        x = state["_x"]
        n = x.numel()
        body = self.read_result(0, result, state)
        if body is None:
            return payload.write_flagged(out, self.id, n)
        state["_maxima"][:] = body
        quanta = out[HEADER : HEADER + packed_nbytes(n, self.bits)]
        kernels.int_encode(quanta, x, state["_maxima"], self.block, self.bits,
                           dither=self.rounding == "stochastic", key=state["own"], step=state["step"])
        payload.write(out, self.id, n, n, aux=self.bits)
        state["_carried"] = quanta
        return HEADER + quanta.nbytes

    def sent(self, state: State, out: torch.Tensor) -> None:
        """Reads the last payload, which must be as it was."""
        if state["_carried"] is None:
            out.zero_()
        else:
            kernels.int_decode(out, state["_carried"], state["_maxima"], self.block, self.bits, self.bits)

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        inputs.check(self.name, "out", out, state["_numel"])
        head = self.read_result(1, result, state)
        if head is None:
            out.fill_(NAN)
            return False
        kernels.int_decode(out, head.body, state["_maxima"], self.block, self.bits, head.aux)
        return self._cannot_overflow(state, head.aux) or finite_or_nan(True, out)

    def read_result(self, r: int, result: Buffer, state: State) -> Any:
        if r == 0:
            return self._read_maxima(result, state["_numel"])
        head = payload.read(result, self.id, state["_numel"])
        if head.flagged:
            return None
        if head.aux not in WIDTHS or head.aux < self.bits:
            raise CorruptFrame(f"shared_int result of {head.aux} bits, expected one of {WIDTHS} and at least {self.bits}")
        _check_quanta(head, state["_numel"], head.aux)
        return head

    def zeros(self, spec: Spec, r: int) -> Any:
        n = spec.numel
        if r == 0:
            return {"max": np.zeros(self._blocks(n), np.uint16), "flagged": [False], "numel": n}
        return {"sum": torch.zeros(n, dtype=torch.int32), "flagged": [False], "numel": n, "members": [0], "most": self.levels}

    def vet(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> memoryview | None:
        n = acc["numel"]
        if r == 0:
            return self._read_maxima(payload_, n)
        head = payload.read(payload_, self.id, n)
        if head.flagged:
            return None
        payload.expect("bits", head.aux, self.bits)
        _check_quanta(head, n, self.bits)
        if not kernels.int_legal(head.body, n, self.bits):
            raise CorruptFrame(f"shared_int payload with an integer beyond {self.levels}, or with padding set")
        return payload.on_host(head.body)

    def put(self, r: int, vetted: memoryview | None, acc: Any, *, first: bool) -> None:
        if first:
            acc["flagged"][0] = False
        acc["flagged"][0] |= vetted is None
        if r == 0:
            maxima = acc["max"]
            if first:
                maxima.fill(0)
            if vetted is not None:
                np.maximum(maxima, np.frombuffer(vetted, np.uint16), out=maxima)
            return
        acc["members"][0] = 1 if first else acc["members"][0] + 1
        if vetted is not None:
            kernels.int_add(acc["sum"], vetted, self.bits, assign=first)
        elif first:
            acc["sum"].zero_()

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        n = acc["numel"]
        if acc["flagged"][0]:
            return payload.write_flagged(out, self.id, n)
        if r == 0:
            end = HEADER + self._maxima_nbytes(n)
            payload.on_host(out)[HEADER:end] = memoryview(acc["max"].view(np.uint8))
            payload.write(out, self.id, n, self._blocks(n))
            return end
        width = width_for(acc["members"][0], self.levels)
        end = HEADER + packed_nbytes(n, width)
        kernels.int_pack(out[HEADER:end], acc["sum"], width)
        payload.write(out, self.id, n, n, aux=width)
        return end

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _maxima_nbytes(self, numel: int) -> int:
        return 2 * self._blocks(numel)

    def _read_maxima(self, message: Buffer, numel: int) -> memoryview | None:
        head = payload.read(message, self.id, numel)
        if head.flagged:
            return None
        payload.expect("seed", head.seed, 0)
        payload.expect("bits", head.aux, 0)
        payload.expect("count", head.entries, self._blocks(numel))
        payload.expect("bytes of body", head.body.nbytes, self._maxima_nbytes(numel))
        body = payload.on_host(head.body)
        if bool((np.frombuffer(body, np.uint16) > MOST_BF16).any()):
            raise CorruptFrame("shared_int payload with a maximum that is negative or not finite")
        return body

    def _cannot_overflow(self, state: State, width: int) -> bool:
        bits = int(np.frombuffer(state["_maxima"], np.uint16).max(initial=0)) << 16
        largest = float(np.uint32(bits).view(np.float32))
        return largest / self.levels * 2.0 ** (width - 1) < float(np.finfo(np.float32).max)


def packed_nbytes(n: int, width: int) -> int:
    return (n * width + 7) // 8


def width_for(members: int, levels: int) -> int:
    """The fewest bits that hold any sum of so many workers' integers."""
    return next(w for w in WIDTHS if members * levels < 1 << w - 1)


def _check_quanta(head: payload.Head, numel: int, width: int) -> None:
    payload.expect("seed", head.seed, 0)
    payload.expect("count", head.entries, numel)
    payload.expect("bytes of body", head.body.nbytes, packed_nbytes(numel, width))


def shared_int(bits: int = 8, block: int = 1024, rounding: str = "stochastic") -> SharedInt:
    """`bits` 8 or 4 per element towards the server; from it 12 for 2 to 16 workers at 8 bits, 8 for up to 18 at 4 bits."""
    checked("shared_int", bits=bits, block=block, rounding=rounding)
    return SharedInt(bits, block, rounding)
