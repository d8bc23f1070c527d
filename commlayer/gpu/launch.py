"""Starts kernels by the launcher of a tensor's device, for their drivers. Knows launchers, not what a kernel does.

A launcher is the seam between the drivers and the machine: CuPy's for CUDA, and in tests one that runs the same kernels on CPU
tensors. Memory is torch's throughout; a launcher only passes addresses on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from commlayer.errors import InvalidInput
from commlayer.gpu.kernel_call import Argument, Launcher

THREADS = 256
MOST_BLOCKS = 2048
"""Threads loop over what is more than this; enough to fill any GPU."""


_launchers: dict[str, Launcher] = {}


def serves(device: torch.device) -> bool:
    """Whether tensors there are coded by kernels of this package rather than by the host's."""
    return device.type == "cuda" or device.type in _launchers


def launcher(device: torch.device) -> Launcher:
    """The launcher for a device. ValueError, with the remedy, where CUDA has none."""
    found = _launchers.get(device.type)
    if found is None:
        if device.type != "cuda":
            raise InvalidInput("E-GPU-CODE", f"device codecs: {device} has no launcher, allowed is a CUDA device")
        from commlayer.gpu.launch_cupy import CupyLauncher

        found = _launchers.setdefault("cuda", CupyLauncher())
    return found


@contextlib.contextmanager
def use(device_type: str, chosen: Launcher) -> Iterator[None]:
    """Within it, `chosen` serves that type of device. For tests and measurements."""
    before = _launchers.get(device_type)
    _launchers[device_type] = chosen
    try:
        yield
    finally:
        if before is None:
            del _launchers[device_type]
        else:
            _launchers[device_type] = before


def words(nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes whose memory reaches to the next multiple of 4, as kernels that set bits need."""
    return torch.empty(-(-nbytes // 4) * 4, dtype=torch.uint8, device=device)[:nbytes]


def start(family: str, kernel: str, grid: int, *args: Argument, threads: int = THREADS) -> None:
    """Queues a kernel with exactly that grid."""
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    launcher(device).launch(family, kernel, grid, threads, args)


def each(family: str, kernel: str, items: int, *args: Argument) -> None:
    """Queues a kernel whose threads loop over `items`."""
    if items > 0:
        start(family, kernel, min(-(-items // THREADS), MOST_BLOCKS), *args)
