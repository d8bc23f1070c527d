"""Launches CUDA kernels of codecs and optimizers on a tensor's device.

For CUDA the launcher uses CuPy, on torch's current stream; tests use a launcher that runs the same kernels on CPU tensors. All
memory is torch's; a launcher only passes addresses. Kernel sources are in <root>/cuda for an editable install, else in
commlayer/_cuda.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from commlayer.errors import InvalidInput

THREADS = 256
MOST_BLOCKS = 2048
"""Maximum number of CUDA blocks per kernel, enough to fill any GPU. If there are more elements than threads, threads loop."""


_launchers: dict[str, Launcher] = {}


def has_kernels_for(device: torch.device) -> bool:
    """True: the CUDA kernels of this package process tensors on that device; False: the CPU kernels do."""
    return device.type == "cuda" or device.type in _launchers


def launcher(device: torch.device) -> Launcher:
    """Returns the launcher for a device. Raises InvalidInput, with a remedy, if none is available."""
    result = _launchers.get(device.type)
    if result is None:
        if device.type != "cuda":
            raise InvalidInput("E-GPU-CODE", f"device codecs: got device {device}, allowed: a CUDA device")
        result = _launchers.setdefault("cuda", CupyLauncher())
    return result


@contextlib.contextmanager
def use(device_type: str, chosen: Launcher) -> Iterator[None]:
    """Context manager that replaces the launcher of a device type, for tests and measurements."""
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
    """Allocates bytes whose memory extends to the next multiple of 4, for kernels that set bits in 32-bit words."""
    return torch.empty(-(-nbytes // 4) * 4, dtype=torch.uint8, device=device)[:nbytes]


def start(family: str, kernel: str, grid: int, *args: Argument, threads: int = THREADS) -> None:
    """Queues a kernel with exactly `grid` blocks."""
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    launcher(device).launch(family, kernel, grid, threads, args)


def launch_over_items(family: str, kernel: str, items: int, *args: Argument) -> None:
    """Queues a kernel whose threads loop over `items`."""
    if items > 0:
        start(family, kernel, min(-(-items // THREADS), MOST_BLOCKS), *args)


Argument = torch.Tensor | int | float | None
"""An argument of a kernel, passed as an address, a long long, a double or a null pointer: 8 bytes each."""


class Launcher(Protocol):
    def launch(self, family: str, kernel: str, grid: int, threads: int, args: Sequence[Argument]) -> None:
        """Queues `kernel` of cuda/<family>.cu on the current stream of its tensors' device."""
        ...


MASK = (1 << 64) - 1
OPTIONS = ("--std=c++17", "--fmad=false")
"""Compiler options. Fused multiply-adds are disabled because they round once, but the CPU kernels round twice."""


class CupyLauncher:
    """Launches kernels with CuPy. Each kernel is compiled at its first use per device. CuPy caches binaries on disk, keyed by
    source text and architecture."""

    def __init__(self) -> None:
        self._cupy = _cupy()
        self._kernels: dict[tuple[int, str], Any] = {}

    def launch(self, family: str, kernel: str, grid: int, threads: int, args: Sequence[Argument]) -> None:
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
        index = device.index if device.index is not None else torch.cuda.current_device()
        with self._cupy.cuda.Device(index):
            function = self._kernels.get((index, kernel))
            if function is None:
                module = self._cupy.RawModule(code=source_text(family), options=OPTIONS, backend="nvrtc")
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
        remedy = f"install commlayer[gpu{major}], or use a plan without device codecs"
        raise InvalidInput("E-GPU-CODE", f"device codecs: CuPy cannot be loaded ({error}); {remedy}") from None
    return cupy


PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = (PACKAGE.parent / "cuda", PACKAGE / "_cuda")
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


def source_folder(candidates: tuple[Path, ...] = FOLDERS) -> Path:
    for candidate in candidates:
        if (candidate / "common.cuh").is_file():
            return candidate
    raise InvalidInput("E-GPU-CODE", f"CUDA sources: not found in {' or '.join(map(str, candidates))}; reinstall commlayer")


@cache
def source_text(family: str) -> str:
    """Returns a family's source text with its headers inlined. The compiler then needs no paths, and a cache keyed by the text
    is always valid."""
    return _resolved(source_folder() / f"{family}.cu", set())


def _resolved(file: Path, seen: set[str]) -> str:
    def include(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return ""
        seen.add(name)
        return _resolved(file.with_name(name), seen)

    return _INCLUDE.sub(include, file.read_text("utf-8"))
