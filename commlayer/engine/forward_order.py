"""Records the order in which the first forward pass needs parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from commlayer.engine.bucket import WorkerBucket


def by_place(spans: Sequence[Sequence[int]], orders: Sequence[int], places: Mapping[int, int]) -> list[int]:
    """Indices of buckets in wire order: by the first place of their tensors, then by their previous order."""
    end = len(places)
    first = [min((places.get(tensor, end) for tensor in span), default=end) for span in spans]
    return sorted(range(len(spans)), key=lambda i: (first[i], orders[i]))


def reorder(buckets: Sequence[WorkerBucket], places: Mapping[int, int], first: WorkerBucket | None = None) -> None:
    """Sets the wire order by place in the forward pass. Tensors that it did not see follow in their previous order. `first`
    precedes all."""
    spans = [[s.tensor for s in f.slices] for f in buckets]
    for order, i in enumerate(by_place(spans, [f.order for f in buckets], places), int(first is not None)):
        buckets[i].order = 0 if buckets[i] is first else order


class ForwardOrder:
    """Watches one forward pass; `take` returns tensor number -> place.

    Module hooks see a parameter only if a module that holds it directly is called. Others (functional use, compiled graphs) are
    missing from the result, and the caller falls back to reversed ready order.
    """

    def __init__(self, model: nn.Module, index: dict[int, int]) -> None:
        """`index` maps id(parameter), and id(buffer) if the order of buffers matters, to the tensor's number."""
        self._places: dict[int, int] = {}
        self._handles = []
        for module in model.modules():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            numbers = [index[id(tensor)] for tensor in tensors if id(tensor) in index]
            if numbers:
                self._handles.append(module.register_forward_pre_hook(self._hook(numbers)))

    def _hook(self, numbers: list[int]) -> Callable[[nn.Module, object], None]:
        def seen(_module: nn.Module, _args: object) -> None:
            if torch.compiler.is_compiling():
                return  # in a graph, modules are not called one by one
            for number in numbers:
                self._places.setdefault(number, len(self._places))

        return seen

    def take(self) -> dict[int, int]:
        """Returns the recorded places and removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return self._places
