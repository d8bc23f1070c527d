"""Hooks before a module's forward pass, and the order in which the first forward pass needs parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ForwardOrder:
    """Records the order in which one forward pass uses the parameters; `take` returns a map from tensor number to position.

    Module hooks see a parameter only if the module that contains it directly is called. Other parameters (functional use,
    compiled graphs) are missing from the result; callers then use the reverse of the order in which gradients become final.
    """

    def __init__(self, model: nn.Module, index: dict[int, int]) -> None:
        """Adds hooks to the model's modules. `index` maps id(parameter), and id(buffer) if the order of buffers matters, to the
        tensor's number."""
        self._places: dict[int, int] = {}
        self._handles = []
        for module in model.modules():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            numbers = [index[id(tensor)] for tensor in tensors if id(tensor) in index]
            if numbers:
                self._handles.append(before_forward(module, self._hook(numbers)))

    def _hook(self, numbers: list[int]) -> Callable[[nn.Module, object], None]:
        def record(_module: nn.Module, _args: object) -> None:
            if torch.compiler.is_compiling():
                return  # in a graph, modules are not called one by one
            for number in numbers:
                self._places.setdefault(number, len(self._places))

        return record

    def take(self) -> dict[int, int]:
        """Returns the recorded positions by tensor number, and removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return self._places


def before_forward(module: nn.Module, hook: Callable[[nn.Module, Any], None], *, prepend: bool = False) -> Any:
    """Registers a hook on any module. A scripted module forbids its own method, but calls hooks that nn.Module's registers;
    scripted modules inside it call none."""
    return nn.Module.register_forward_pre_hook(module, hook, prepend=prepend)


class ModuleHook:
    """Hook that calls `act` before a module's forward pass, but in compiled code only if `compiled` is True. The hook does
    nothing in copies and saved files of the module."""

    def __init__(self, act: Callable[[], None] | None = None, *, compiled: bool = False) -> None:
        self._act, self._compiled = act, compiled

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        if self._act is not None and (self._compiled or not torch.compiler.is_compiling()):
            self._act()

    def __deepcopy__(self, _memo: Any) -> ModuleHook:
        return ModuleHook()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()
