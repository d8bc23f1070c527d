"""Builds the .cu files with the host's compiler against tests/cuda_shim, launches and compares them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from commlayer.compressors.kernels import cuda as device
from commlayer.engine.buckets.bucket_layout import BucketMemory
from commlayer.gpu import launch
from commlayer.gpu.launch import Argument, Launcher
from support import ROOT, native_builds
from support.native_builds import bits

SHIM = ROOT / "tests" / "cuda_shim"
CUDA = ROOT / "cuda"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
_one_at_a_time = threading.Lock()
"""The shim is one device without streams."""

FLAGS += os.environ.get("COMMLAYER_SHIM_FLAGS", "").split()
"""-fsanitize=address, with the runtimes of sanitizer and C++ preloaded, runs every test under the sanitizer."""

KERNEL = re.compile(r"^CML_KERNEL (\w+)\(", re.MULTILINE)


def build(sources: Sequence[Path], *flags: str) -> Path:
    """A library with a launcher for every kernel; built once per content of sources, shim and flags."""
    assert COMPILER is not None
    headers = sorted([*SHIM.glob("*.h"), *CUDA.glob("*.cuh")])
    text = b"".join(f.read_bytes() for f in [*headers, *sources]) + " ".join([COMPILER, *FLAGS, *flags]).encode()
    library = ROOT / "build" / "cuda_shim" / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    # Tests that need the same build wait for the first, which uses all cores for about ten seconds.
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(library, sources, flags)
    return library


def _build(library: Path, sources: Sequence[Path], flags: Sequence[str]) -> None:
    assert COMPILER is not None
    work = library.with_suffix(f".{os.getpid()}")
    work.mkdir()
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda source: _compile(source, work, flags), sources))
    _run([COMPILER, "-shared", "-Wl,-Bsymbolic", *FLAGS, *flags, *map(str, objects), "-o", str(work / "all.so")])
    (work / "all.so").replace(library)
    shutil.rmtree(work)


def _compile(source: Path, work: Path, flags: Sequence[str]) -> Path:
    wrapper = work / f"{source.stem}.cc"
    exports = "\n".join(f"SHIM_EXPORT({name})" for name in KERNEL.findall(source.read_text()))
    wrapper.write_text(f'#include "cuda.h"\n#include "{source}"\n{exports}\n')
    assert COMPILER is not None
    _run([COMPILER, *FLAGS, *flags, f"-I{SHIM}", f"-I{CUDA}", "-c", str(wrapper), "-o", str(wrapper.with_suffix(".o"))])
    return wrapper.with_suffix(".o")


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr


class Shim:
    """A launcher whose device is the CPU. `seed` decides who runs first, `resident` how many blocks run at once."""

    def __init__(self, library: Path, seed: int = 0, resident: int = 3) -> None:
        self.library = ctypes.CDLL(str(library))
        self.seed, self.resident = seed, resident

    def launch(self, family: str, kernel: str, grid: int, threads: int, args: Sequence[Argument]) -> None:
        call = getattr(self.library, f"shim_{kernel}")
        call.restype = ctypes.c_char_p
        slots = [_slot(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(slots))(*(ctypes.addressof(slot) for slot in slots))
        self.seed += 1
        with _one_at_a_time:
            error = call(grid, threads, self.resident, ctypes.c_uint64(self.seed), len(slots), pointers)
        if error:
            raise RuntimeError(f"{family}/{kernel}: {error.decode()}")


def _slot(arg: Argument) -> ctypes.c_void_p | ctypes.c_longlong | ctypes.c_double:
    if isinstance(arg, float):
        return ctypes.c_double(arg)
    if isinstance(arg, int):
        return ctypes.c_longlong(arg)
    return ctypes.c_void_p(None if arg is None else arg.data_ptr())


class Recorder:
    """Forwards to a launcher and records the names of the kernels."""

    def __init__(self, inner: Launcher) -> None:
        self.inner, self.launched = inner, list[str]()

    def launch(self, family: str, kernel: str, grid: int, threads: int, args: Sequence[Argument]) -> None:
        self.launched.append(kernel)
        self.inner.launch(family, kernel, grid, threads, args)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""With a GPU the very same tables run on it; without one on the CPU, as the device of tests/cuda_shim."""


@contextlib.contextmanager
def running(seed: int = 0, resident: int = 3) -> Iterator[Recorder]:
    """Inside the block tensors on DEVICE are encoded by the kernels in cuda/."""
    inner: Launcher
    if DEVICE.type == "cuda":
        inner = launch.launcher(DEVICE)
    elif COMPILER is None:
        pytest.skip("no C++ compiler")
    else:
        inner = Shim(build(sorted(CUDA.glob("*.cu"))), seed, resident)
    recorder = Recorder(inner)
    with launch.use(DEVICE.type, recorder):
        yield recorder


def octets(nbytes: int) -> torch.Tensor:
    """Device memory for a payload: it reaches to the next multiple of 4 bytes, as all device memory does."""
    return torch.full((-(-nbytes // 4) * 4,), 0xA5, dtype=torch.uint8)[:nbytes]


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """Inside the block the host reads no memory that collectives have filled, as if it were GPU memory."""
    place = BucketMemory.place

    def there(memory: BucketMemory, every: torch.Tensor, every_y: torch.Tensor) -> None:
        place(memory, every, every_y)
        memory.facts = memory.facts_y = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketMemory, "place", there)
        yield


Run = Callable[[ModuleType, Callable[[np.ndarray], torch.Tensor]], list[bytes]]


def same(run: Run, seed: int = 0, resident: int = 3) -> list[bytes]:
    """What run(module, there) gives, the same for all bodies of the native core, the reference and the device; `there` puts an
    array where the module works, as a copy."""
    result: list[bytes] = native_builds.same(lambda module: run(module, here))
    with running(seed, resident):
        assert run(device, there) == result, "device and native differ"
    return result


def here(array: np.ndarray) -> torch.Tensor:
    copy = torch.from_numpy(array.copy())
    return copy if array.size else torch.empty(0, dtype=copy.dtype)  # what torch makes of an empty array has no view as bytes


def there(array: np.ndarray) -> torch.Tensor:
    if array.size == 0:
        return here(array).to(DEVICE)
    memory = octets(array.nbytes)
    memory.copy_(torch.from_numpy(array.copy()).view(torch.uint8))
    return memory.to(DEVICE).view(torch.from_numpy(array).dtype)


def raw(tensor: torch.Tensor) -> bytes:
    array = tensor.cpu().numpy()
    return bits(array) if array.dtype == np.float32 else array.tobytes()


def zeros(nbytes: int) -> np.ndarray:
    return np.zeros(nbytes, np.uint8)


__all__ = ["CUDA", "DEVICE", "Run", "Shim", "build", "device", "here", "octets", "raw", "running", "same", "there", "unread",
           "zeros"]
