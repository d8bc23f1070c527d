"""A hook before a module's forward pass that is left out of copies and saved files of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ModuleHook:
    """Calls `act` before a module's forward, in compiled code only if `compiled`. In copies of the module it does nothing."""

    def __init__(self, act: Callable[[], None] | None = None, *, compiled: bool = False) -> None:
        self._act, self._compiled = act, compiled

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        if self._act is not None and (self._compiled or not torch.compiler.is_compiling()):
            self._act()

    def __deepcopy__(self, _memo: Any) -> ModuleHook:
        return ModuleHook()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()
