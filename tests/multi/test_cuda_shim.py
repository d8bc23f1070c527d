"""The shim itself: it runs what is right under every schedule and names what hardware would leave undefined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cuda import COMPILER, SHIM, Shim, build

ROOT = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

FAULTS = {
    "diverging_barrier": (1, r"diverge.*waits at the barrier of line \d+.*waits at the barrier of line \d+"),
    "barrier_after_exit": (1, r"diverge.*thread 7 has exited|diverge.*waits at the barrier"),
    "shuffle_from_exited": (1, r"lane 5, which is not there any more"),
    "shuffle_outside_mask": (1, r"lane 20, which is not in the mask"),
    "waits_for_later_block": (9, r"wait for each other without end"),
}


def shim(*flags: str, seed: int = 0, resident: int = 2) -> Shim:
    return Shim(build([SHIM / "faults.cu"], *flags), seed, resident)


@needs_compiler
@pytest.mark.parametrize("kernel", FAULTS)
def test_faults_are_named(kernel: str) -> None:
    grid, message = FAULTS[kernel]
    with pytest.raises(RuntimeError, match=message):  # the seed is one with which the last block does not start first
        shim(seed=3).launch("faults", kernel, grid, 64, [torch.zeros(64, dtype=torch.int32)])


@needs_compiler
@pytest.mark.parametrize("seed", range(8))
def test_what_is_right_gives_the_same_under_every_schedule(seed: int) -> None:
    out = torch.zeros(11, dtype=torch.int32)
    shim(seed=seed, resident=1 + seed).launch("faults", "sum_of_block", 11, 256, [out])
    assert out.tolist() == [255 * 128] * 11


@needs_compiler
def test_a_wrong_number_of_arguments_is_refused() -> None:
    with pytest.raises(RuntimeError, match="takes 1 arguments, got 2"):
        shim().launch("faults", "sum_of_block", 1, 32, [torch.zeros(1), 5])


SANITIZED = """
import ctypes, sys
call = getattr(ctypes.CDLL(sys.argv[1]), "shim_" + sys.argv[2])
call.restype = ctypes.c_char_p
out = ctypes.c_void_p(ctypes.addressof((ctypes.c_uint32 * 64)()))
print(call(2, 64, 2, ctypes.c_uint64(1), 1, (ctypes.c_void_p * 1)(ctypes.addressof(out))))
"""


def run_sanitized(kernel: str) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    requested = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    runtime = requested.stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("the compiler has no sanitizer runtime")
    library = build([SHIM / "faults.cu"], "-fsanitize=address", "-g1")
    environment = {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-c", SANITIZED, str(library), kernel]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@needs_compiler
def test_a_sanitizer_sees_what_lies_outside_of_shared_memory() -> None:
    right, wrong = run_sanitized("sum_of_block"), run_sanitized("outside_of_shared")
    assert right.stdout == "b''\n", right.stderr[-2000:]
    assert "heap-buffer-overflow" in wrong.stderr
