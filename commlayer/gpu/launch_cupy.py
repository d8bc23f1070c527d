"""Launches kernels through CuPy on torch's current stream. The only module that imports cupy; it allocates no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from commlayer.errors import InvalidInput
from commlayer.gpu import sources
from commlayer.gpu.kernel_call import Argument

MASK = (1 << 64) - 1
OPTIONS = ("--std=c++17", "--fmad=false")
"""A fused multiply-add would round once where the host's kernels round twice."""


class CupyLauncher:
    """Compiles each kernel at its first use per device. CuPy caches binaries on disk, keyed by source text and architecture."""

    def __init__(self) -> None:
        self._cupy = _cupy()
        self._kernels: dict[tuple[int, str], Any] = {}

    def launch(self, family: str, kernel: str, grid: int, threads: int, args: Sequence[Argument]) -> None:
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
        index = device.index if device.index is not None else torch.cuda.current_device()
        with self._cupy.cuda.Device(index):
            function = self._kernels.get((index, kernel))
            if function is None:
                module = self._cupy.RawModule(code=sources.text(family), options=OPTIONS, backend="nvrtc")
                function = self._kernels[index, kernel] = module.get_function(kernel)
            with self._cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream, index):
                function((grid,), (threads,), tuple(map(_slot, args)))


def _slot(arg: Argument) -> np.generic:
    if isinstance(arg, float):
        return np.float64(arg)
    if isinstance(arg, int):
        return np.uint64(arg & MASK)  # keys of random numbers fill all 64 bits
    return np.uint64(0 if arg is None else arg.data_ptr())


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        major = (torch.version.cuda or "12").split(".")[0]
        remedy = f"install commlayer[gpu{major}], or plan without them"
        raise InvalidInput("E-GPU-CODE", f"device codecs: CuPy cannot be loaded ({error}); {remedy}") from None
    return cupy
