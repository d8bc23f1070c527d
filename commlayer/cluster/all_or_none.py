"""What all ranks do or fail at together. Knows groups; not what is done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from commlayer.cluster.groups import Groups
from commlayer.errors import CommError, InvalidInput


class Told:
    """What ranks tell each other on the way out of a block."""

    def __init__(self, numbers: int) -> None:
        self.mine = [0] * numbers
        self.rows: list[list[int]] = []
        """Behind the block: of all, in rank order."""


@contextlib.contextmanager
def together(groups: Groups | None, what: str, numbers: int = 0) -> Iterator[Told]:
    """All ranks leave the block together. What fails on one fails on all: there with its error, elsewhere naming the rank.

    The block holds no collectives: a rank that fails would leave the others in them. `numbers`: so many that each puts into
    `mine` go to all.
    """
    mine: Exception | None = None
    told = Told(numbers)
    try:
        yield told
    except Exception as error:
        mine = error
    try:
        rows = gather(groups, [mine is not None, *told.mine])
    except CommError as error:
        if mine is None or isinstance(mine, CommError):
            raise (mine or error) from None
        raise mine from error  # the others do not know of it
    if mine is not None:
        raise mine
    failed = [str(rank) for rank, row in enumerate(rows) if row[0]]
    if failed:
        raise InvalidInput("E-OTHER-RANK", f"{what} failed on rank {', '.join(failed)}, whose own error says why")
    told.rows = [row[1:] for row in rows]


def gather(groups: Groups | None, row: list[int]) -> list[list[int]]:
    """One row per rank."""
    if groups is None:
        return [row]
    rows: list[list[int]] = groups.gather_all(torch.tensor(row, dtype=torch.int64, device=groups.device)).tolist()
    return rows


def gather_bytes(groups: Groups | None, data: bytes) -> list[bytes]:
    """Everyone's bytes, in rank order."""
    if groups is None:
        return [data]
    sizes = [row[0] for row in gather(groups, [len(data)])]
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    rows = groups.gather_all(padded.to(groups.device)).cpu()
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
