"""Starts kernels with the launcher of a tensor's device.

For CUDA the launcher is CuPy's; tests use one that runs the same kernels on CPU tensors. All memory is torch's; a launcher only
passes addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from commlayer.errors import InvalidInput
from commlayer.gpu.kernel_call import Argument, Launcher

THREADS = 256
MOST_BLOCKS = 2048
"""Enough blocks to fill any GPU; beyond that, threads loop."""


_launchers: dict[str, Launcher] = {}


def serves(device: torch.device) -> bool:
    """Whether kernels of this package, and not the host's, process tensors on that device."""
    return device.type == "cuda" or device.type in _launchers


def launcher(device: torch.device) -> Launcher:
    """The launcher for a device. If CUDA has none, the error names the remedy."""
    result = _launchers.get(device.type)
    if result is None:
        if device.type != "cuda":
            raise InvalidInput("E-GPU-CODE", f"device codecs: {device} has no launcher, allowed is a CUDA device")
        from commlayer.gpu.launch_cupy import CupyLauncher

        result = _launchers.setdefault("cuda", CupyLauncher())
    return result


@contextlib.contextmanager
def use(device_type: str, chosen: Launcher) -> Iterator[None]:
    """Sets the launcher of a device type inside a with block. For tests and measurements."""
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
    """Bytes whose memory reaches to the next multiple of 4, for kernels that set bits in 32-bit words."""
    return torch.empty(-(-nbytes // 4) * 4, dtype=torch.uint8, device=device)[:nbytes]


def start(family: str, kernel: str, grid: int, *args: Argument, threads: int = THREADS) -> None:
    """Queues a kernel with exactly `grid` blocks."""
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    launcher(device).launch(family, kernel, grid, threads, args)


def each(family: str, kernel: str, items: int, *args: Argument) -> None:
    """Queues a kernel whose threads loop over `items`."""
    if items > 0:
        start(family, kernel, min(-(-items // THREADS), MOST_BLOCKS), *args)
