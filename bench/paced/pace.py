"""Makes a model's passes take the time they would take on a device of a given speed. Knows modules and a clock; no network.

A forward pass takes FORWARD_S x slow, a backward pass BACKWARD_S x slow, each of the model's layers an equal part, and of more
or fewer samples than usual as much more or less; the rest of that time the process sleeps. So ranks that share a machine's
cores are as fast as ranks that share nothing, as long as what they truly compute fits in. What a module waits for before it may
begin (weights that are on their way) delays all that follows, as it would on the device: nothing is made up for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

FORWARD_S, BACKWARD_S = 0.1, 0.2
TOLERANCE = 0.1
"""A pass is late when it took that part longer than its time, for what is truly computed."""


class Pace:
    """Of one model, whose layers are given in order of their forward pass."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], slow: float = 1.0) -> None:
        self._forward_s, self._backward_s, count = FORWARD_S * slow, BACKWARD_S * slow, len(layers)
        self._begin = self._ahead_s = 0.0
        self._part = 1.0
        self.passes = self.late = 0
        self._model = model
        self._leaves = list({id(m): m for layer in layers for m in layer.modules() if m._parameters}.values())
        self._handles: list[Any] = []
        for i, layer in enumerate(layers):
            layer.register_forward_hook(self._until(self._forward_s, (i + 1) / count))
            # Its gradients are final when its part of the pass is over.
            layer.register_full_backward_pre_hook(self._until(self._backward_s, (count - i) / count))

    def forward(self, part: float = 1.0) -> None:
        """A forward pass begins, of that part of the usual samples. Our hooks stand around all that are there by now."""
        self._part = part
        while self._handles:
            self._handles.pop().remove()
        for module, behind in [(self._model, self._start), *((leaf, self._delayed) for leaf in self._leaves)]:
            self._handles.append(module.register_forward_pre_hook(self._ahead, prepend=True))
            self._handles.append(module.register_forward_pre_hook(behind))

    def backward(self) -> None:
        """A backward pass begins."""
        self._begin = time.perf_counter()

    def _ahead(self, *_: object) -> None:
        self._ahead_s = time.perf_counter()

    def _start(self, *_: object) -> None:
        self._begin = time.perf_counter()

    def _delayed(self, *_: object) -> None:
        self._begin += time.perf_counter() - self._ahead_s

    def _until(self, whole_s: float, part: float) -> Callable[..., None]:
        def wait(*_: object) -> None:
            takes_s = whole_s * self._part
            left = self._begin + takes_s * part - time.perf_counter()
            if part == 1:
                self.passes += 1
                self.late += left < -TOLERANCE * takes_s
            if left > 0:
                time.sleep(left)

        return wait
