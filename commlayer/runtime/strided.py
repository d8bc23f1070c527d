"""Tensors that are written by element ranges, whatever their strides. Knows nothing of buckets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch


@contextlib.contextmanager
def whole(targets: Sequence[torch.Tensor | None], cut: Callable[[int], bool]) -> Iterator[list[torch.Tensor | None]]:
    """The targets, with contiguous zeros in place of those that are cut and have no element ranges; copied back at the end."""
    made = {t: torch.zeros_like(target, memory_format=torch.contiguous_format) for t, target in enumerate(targets)
            if target is not None and cut(t) and not target.is_contiguous()}
    yield [made.get(t, target) for t, target in enumerate(targets)]
    for t, copy in made.items():
        target = targets[t]
        assert target is not None
        target.detach().copy_(copy)
