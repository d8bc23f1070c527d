"""Who runs the kernels of lazy optimizers: native where it is built, else their torch twin; on a GPU those in cuda/lazy.cu.

native/include/commlayer.h states what each does. Where CuPy is missing, the twin runs on the GPU, which is slower. Knows no
optimizer.
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
from commlayer.optim import device, reference

log = logging.getLogger("commlayer")

_host: list[ModuleType] = [native.core or reference]


def of(x: torch.Tensor) -> ModuleType:
    """The module with the kernels for tensors where x lies."""
    if not launch.serves(x.device):
        return _host[0] if x.device.type == "cpu" else reference
    return device if _can_launch(x.device.type) else reference


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
def use(backend: ModuleType) -> Iterator[None]:
    """Within it, `backend` runs the kernels on the host. For tests and measurements."""
    before, _host[0] = _host[0], backend
    try:
        yield
    finally:
        _host[0] = before
