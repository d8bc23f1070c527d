"""Chooses the backend of lazy optimizers' kernels: native if built, else torch operations; on a GPU cuda/lazy.cu.

native/include/commlayer.h specifies each kernel. Without CuPy a GPU runs the torch operations, which are slower.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from types import ModuleType

import torch

from commlayer import native
from commlayer.errors import without_code
from commlayer.gpu import launch
from commlayer.optim import device_kernels, torch_kernels

log = logging.getLogger("commlayer")

_host: list[ModuleType] = [native.core or torch_kernels]


def kernels_of(x: torch.Tensor) -> ModuleType:
    """The module with the kernels for the device of x."""
    if not launch.serves(x.device):
        return _host[0] if x.device.type == "cpu" else torch_kernels
    return device_kernels if _can_launch(x.device.type) else torch_kernels


@functools.cache
def _can_launch(kind: str) -> bool:
    try:
        launch.launcher(torch.device(kind))
    except ValueError as error:
        log.warning("sparse optimizers: %s; they run in torch's operations, which is correct but slower",
                    without_code(error))
        return False
    return True


@contextlib.contextmanager
def use_kernels(backend: ModuleType) -> Iterator[None]:
    """Sets the host's backend inside a with block. For tests and measurements."""
    before, _host[0] = _host[0], backend
    try:
        yield
    finally:
        _host[0] = before
