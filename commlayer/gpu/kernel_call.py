"""A kernel's call as drivers and launchers agree on it: the kinds of arguments, and what a launcher offers. Imports neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Argument = torch.Tensor | int | float | None
"""Passed as an address, a long long, a double or a null pointer: 8 bytes each."""


class Launcher(Protocol):
    def launch(self, family: str, kernel: str, grid: int, threads: int, args: Sequence[Argument]) -> None:
        """Queues `kernel` of cuda/<family>.cu on the current stream of its tensors' device."""
        ...
