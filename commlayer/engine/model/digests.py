"""Digests of tensors, computed piece by piece so that no single step takes the time of all digests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from commlayer.transport.crc import crc32c

PIECE_NBYTES = 4 << 20
"""Number of bytes that are digested at once; this takes about 0.4 ms on a CPU."""
EXACT_BITS = 52
"""Number of bits of a digest. Digests are sent as float64, which represents integers of this size exactly."""
ROW = 1024
ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""Multiplier for digests on a GPU: the golden ratio's bits as an int64."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DigestPiece(NamedTuple):
    """A range of elements [start, stop) of a tensor, which is identified by its number."""

    tensor: int
    start: int
    stop: int


def pieces(tensors: Sequence[torch.Tensor], most_nbytes: int = PIECE_NBYTES) -> list[DigestPiece]:
    """Divides all elements of all tensors into pieces of at most `most_nbytes` bytes. A tensor that is not contiguous is one
    piece."""
    parts = []
    for number, tensor in enumerate(tensors):
        most = max(1, most_nbytes // tensor.element_size()) if tensor.is_contiguous() else max(1, tensor.numel())
        edges = [*range(0, tensor.numel(), most), tensor.numel()]
        parts += [DigestPiece(number, start, stop) for start, stop in pairwise(edges)]
    return parts


class Digests:
    """Digests of tensors on one device, over the pieces added since the last `restart_digests`. The digests compare bits: -0.0
    differs from 0.0, and equal NaNs are equal.

    On a CPU, a digest is a CRC-32C over the bytes. A CRC on a GPU would wait for copies, so the GPU sums the elements' bits by
    row and by column, with odd weights. Two changes that cancel in a plain sum do not cancel under these weights.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        device = tensors[0].device if tensors else torch.device("cpu")
        self.by_sums = device.type != "cpu"
        """True: digests are weighted sums (on a GPU). False: they are CRCs (on a CPU). The two kinds cannot be compared."""
        self._device, self._weights = device, torch.empty(0, dtype=torch.int64, device=device)
        self.restart_digests()

    def restart_digests(self) -> None:
        self._crcs = [0] * len(self._tensors)
        self._sums = torch.zeros(len(self._tensors) if self.by_sums else 0, dtype=torch.int64, device=self._device)

    def add(self, piece: DigestPiece) -> None:
        """Adds a piece to its tensor's digest. Pieces of a tensor must be added in order."""
        tensor = self._tensors[piece.tensor].detach()
        flat = tensor.contiguous().view(-1)[piece.start : piece.stop]
        if self.by_sums:
            mine = self._sums[piece.tensor]
            mine.mul_(ODD).add_(self.weighted_bit_sum(flat))
        else:
            self._crcs[piece.tensor] = crc32c(flat.view(torch.uint8).numpy().data, self._crcs[piece.tensor])

    def weighted_bit_sum(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a weighted sum of the elements' bits. The sum is a tensor on the device, so the host does not wait."""
        bits = flat.view(_INTEGERS[flat.element_size()])
        table_numel = bits.numel() // ROW * ROW
        table, rest = bits[:table_numel].view(-1, ROW), bits[table_numel:].to(torch.int64)
        weights = self._weights_for(max(ROW, table.shape[0]))
        rows, columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
        return ((rows * weights[: rows.numel()]).sum() * ODD + (columns * weights[:ROW]).sum()) * ODD \
            + (rest * weights[: rest.numel()]).sum()

    def _weights_for(self, count: int) -> torch.Tensor:
        if self._weights.numel() < count:
            multiples = torch.arange(1, count + 1, dtype=torch.int64, device=self._device) * ODD
            self._weights = (multiples ^ (multiples >> 29)) * ODD | 1
        return self._weights

    def take(self) -> list[int]:
        """Returns the digest of each tensor, and restarts all digests."""
        values = (self._sums & (1 << EXACT_BITS) - 1).tolist() if self.by_sums else self._crcs
        self.restart_digests()
        return values
