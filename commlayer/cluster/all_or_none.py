"""Blocks that all ranks complete or fail together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from commlayer.cluster.groups import Groups
from commlayer.errors import CommError, InvalidInput


class Told:
    """Numbers that ranks exchange at the end of a block."""

    def __init__(self, numbers: int) -> None:
        self.mine = [0] * numbers
        self.rows: list[list[int]] = []
        """After the block: the numbers of all, in rank order."""


@contextlib.contextmanager
def together(groups: Groups | None, what: str, numbers: int = 0) -> Iterator[Told]:
    """All ranks leave the block together. An error on one rank is raised there, and the others raise one that names the rank.

    The block must not contain collectives, since a rank that fails would leave the others waiting in them. `numbers`: how many
    numbers each rank puts into `mine`, to be sent to all.
    """
    failure: Exception | None = None
    shared = Told(numbers)
    try:
        yield shared
    except Exception as error:
        failure = error
    try:
        rows = gather(groups, [failure is not None, *shared.mine])
    except CommError as error:
        if failure is None or isinstance(failure, CommError):
            raise (failure or error) from None
        raise failure from error  # the others have not learned of it
    if failure is not None:
        raise failure
    failed = [str(rank) for rank, row in enumerate(rows) if row[0]]
    if failed:
        raise InvalidInput("E-OTHER-RANK", f"{what} failed on rank {', '.join(failed)}, whose own error says why")
    shared.rows = [row[1:] for row in rows]


def gather(groups: Groups | None, row: list[int]) -> list[list[int]]:
    """Gathers one row per rank."""
    if groups is None:
        return [row]
    rows: list[list[int]] = groups.gather_all(torch.tensor(row, dtype=torch.int64, device=groups.device)).tolist()
    return rows


def gather_bytes(groups: Groups | None, data: bytes) -> list[bytes]:
    """Gathers bytes of different sizes, in rank order."""
    if groups is None:
        return [data]
    sizes = [row[0] for row in gather(groups, [len(data)])]
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    rows = groups.gather_all(padded.to(groups.device)).cpu()
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
