"""Who runs the kernels of lazy optimizers: native where it is built, else their torch twin. Knows no optimizer.

native/include/commlayer.h states what each does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

import torch

from commlayer import native
from commlayer.optim import reference

_host: list[ModuleType] = [native.core or reference]


def of(x: torch.Tensor) -> ModuleType:
    """The module with the kernels for tensors where x lies."""
    return _host[0] if x.device.type == "cpu" else reference


@contextlib.contextmanager
def use(backend: ModuleType) -> Iterator[None]:
    """Within it, `backend` runs the kernels on the host. For tests and measurements."""
    before, _host[0] = _host[0], backend
    try:
        yield
    finally:
        _host[0] = before
