"""In which order the forward pass needs parameters, seen in the first forward. Knows modules and hooks; nothing of buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from commlayer.engine.bucket import WorkerBucket


def by_place(spans: Sequence[Sequence[int]], orders: Sequence[int], places: Mapping[int, int]) -> list[int]:
    """Buckets in the order on the wire: by the first place of their tensors, then by their order so far."""
    far = len(places)
    first = [min((places.get(tensor, far) for tensor in span), default=far) for span in spans]
    return sorted(range(len(spans)), key=lambda i: (first[i], orders[i]))


def reorder(buckets: Sequence[WorkerBucket], places: Mapping[int, int], first: WorkerBucket | None = None) -> None:
    """Order on the wire by place in the forward pass; what that did not see keeps its order behind. `first` precedes all."""
    spans = [[s.tensor for s in f.slices] for f in buckets]
    for order, i in enumerate(by_place(spans, [f.order for f in buckets], places), int(first is not None)):
        buckets[i].order = 0 if buckets[i] is first else order


class ForwardOrder:
    """Watches one forward pass; `take` gives tensor number -> place.

    Module hooks see a parameter only where a module that holds it directly is called. What they do not see (functional use,
    compiled graphs) is missing from the result, and the caller falls back to reversed ready order.
    """

    def __init__(self, model: nn.Module, index: dict[int, int]) -> None:
        """`index` maps id(parameter), and id(buffer) if the order of those matters, to the tensor's number."""
        self._places: dict[int, int] = {}
        self._handles = []
        for module in model.modules():
            held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            numbers = [index[id(tensor)] for tensor in held if id(tensor) in index]
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
        """What was seen; ends the watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return self._places
