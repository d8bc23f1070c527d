"""Base of the blockwise quantisers: a payload's body holds the scales of all blocks, then the codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import State
from commlayer.compressors.dense import check_dense
from commlayer.compressors.one_round import OneRound, check_numel
from commlayer.compressors.payload import Buffer, Out
from commlayer.errors import CorruptPayload
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch

HEADER = payload.HEADER_NBYTES

MOST16 = 0x7F7F
"""The bits of the largest finite bfloat16. Bits of non-negative numbers have the order of the numbers."""


class Blockwise(OneRound, frozen=True):
    """A subclass defines the size of its codes, its kernels, and the checks of its bytes."""

    scale_nbytes: ClassVar[int] = 2

    block: int

    def codes_nbytes(self, numel: int) -> int:
        raise NotImplementedError

    def encode(
        self, codes: Out, scales: Out, x: torch.Tensor, residual: torch.Tensor | None, state: State
    ) -> bool:
        """Returns False if x + residual is not finite; the residual then holds the finite part."""
        raise NotImplementedError

    def check_body(self, codes: Buffer, scales: Buffer, numel: int) -> None:
        """Raises CorruptPayload if scales or codes break the format. Their sizes are already checked."""
        raise NotImplementedError

    def scales_nbytes(self, numel: int) -> int:
        return self.scale_nbytes * -(-numel // self.block)

    def bound(self, spec: Spec) -> int:
        return HEADER + self.scales_nbytes(spec.numel) + self.codes_nbytes(spec.numel)

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        return self.start_fed(x, None, state, out)

    def start_fed(self, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: Out) -> int:
        """`start` of x + residual; the residual keeps the rounding error, or the finite part of x if flagged."""
        n = x.numel()
        middle = HEADER + self.scales_nbytes(n)
        end = middle + self.codes_nbytes(n)
        if not self.encode(out[middle:end], out[HEADER:middle], x, residual, state):
            return payload.write_flagged(out, self.id, n)
        payload.write(out, self.id, n, n)
        return end

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        middle = self.scales_nbytes(numel)
        check_dense(head, numel, middle + self.codes_nbytes(numel))
        scales, codes = head.body[:middle], head.body[middle:]
        self.check_body(codes, scales, numel)
        return codes, scales


class Dithered(Blockwise, frozen=True):
    """Rounds with a random stream of its own, so that the expected value of the result is the input: unbiased.

    A flagged start sends nothing, so it uses no random numbers and does not count as a step.
    """

    def init(self, spec: Spec) -> State:
        check_numel(spec)
        return {"own": 0, "step": 0}

    def encode(
        self, codes: Out, scales: Out, x: torch.Tensor, residual: torch.Tensor | None, state: State
    ) -> bool:
        finite = self.draw(codes, scales, x, residual, (state["own"], state["step"]))
        state["step"] += finite
        return finite

    def draw(
        self, codes: Out, scales: Out, x: torch.Tensor, residual: torch.Tensor | None, random: tuple[int, int]
    ) -> bool:
        """`encode` with the key and the step of the random numbers."""
        raise NotImplementedError


def check_scales16(name: str, scales: Buffer, most: int) -> None:
    if kernels.largest(scales, np.uint16) > most:
        raise CorruptPayload(f"{name} payload with a scale that is negative, not finite or too large")


def check_padding(name: str, codes: Buffer, numel: int, bits: int) -> None:
    used = numel * bits % 8
    if used and int(codes[-1]) >> used:
        raise CorruptPayload(f"{name} payload with bits set past its last element")
