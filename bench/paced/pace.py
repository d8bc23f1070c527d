"""Makes a model's passes take as long as on a device of a given speed, by sleeping for the rest of the time.

A forward pass takes FORWARD_S x slow, a backward pass BACKWARD_S x slow, spread equally over the layers and proportional to the
number of samples. So ranks that share a machine's cores are as fast as ranks on machines of their own, as long as their real
compute fits into that time. If a module has to wait before it can start, for example for weights in transit, everything after
it is delayed, as on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

FORWARD_S, BACKWARD_S = 0.1, 0.2
TOLERANCE = 0.1
"""A pass counts as late if its real compute made it this fraction longer than its nominal time."""


class Pace:
    """The pace of one model. `layers` are in the order of the forward pass."""

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
            # A layer's gradients are final when its part of the pass is over.
            layer.register_full_backward_pre_hook(self._until(self._backward_s, (count - i) / count))

    def forward(self, part: float = 1.0) -> None:
        """Starts a forward pass with that fraction of the samples. Reinstalls the hooks, so that they enclose all others."""
        self._part = part
        while self._handles:
            self._handles.pop().remove()
        for module, behind in [(self._model, self._start), *((leaf, self._delayed) for leaf in self._leaves)]:
            self._handles.append(module.register_forward_pre_hook(self._ahead, prepend=True))
            self._handles.append(module.register_forward_pre_hook(behind))

    def backward(self) -> None:
        """Starts a backward pass."""
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
