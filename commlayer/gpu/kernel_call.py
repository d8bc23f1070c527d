"""The interface of a kernel call: the types of arguments, and the launcher's method. Imports no launcher."""

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
