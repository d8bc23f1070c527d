"""The native kernels. native/include/commlayer.h states what each does, numbers and conventions included.

An Array is a contiguous CPU tensor, numpy array or memoryview of the element type named; its length is the count. A Payload
is bytes (or an array of the same type) read or written from byte `at`, unaligned or not, and may be longer than needed.
Calls over 4 KB release the GIL. ValueError or BufferError name the argument that does not fit; CorruptFrame means bytes or
positions that break the format, with nothing written.
"""

from typing import Any, TypeAlias

import numpy as np
import torch

Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | memoryview
Payload: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | memoryview | bytes | bytearray

def isa() -> str:
    """ "avx2" or "portable"."""

def force_portable(on: bool) -> bool:
    """Runs the portable bodies from now on; returns whether they ran before. For tests."""

def crc32c(data: Payload, crc: int = 0) -> int:
    """CRC-32C of all of data, continuing from crc."""

def add_f32(acc: Array, x: Payload, w: float = 1.0, at: int = 0) -> None:
    """acc += w * x."""

def add_f16(acc: Array, x: Payload, w: float = 1.0, at: int = 0) -> None:
    """acc += w * x, x in float16."""

def add_bf16(acc: Array, x: Payload, w: float = 1.0, at: int = 0) -> None:
    """acc += w * x, x in bfloat16."""

def f32_to_f16(dst: Payload, src: Array, at: int = 0) -> bool:
    """Casts; whether all results are finite."""

def f32_to_bf16(dst: Payload, src: Array, at: int = 0) -> bool:
    """Casts; whether all results are finite."""

def f16_to_f32(dst: Array, src: Payload, at: int = 0) -> None:
    """Casts."""

def bf16_to_f32(dst: Array, src: Payload, at: int = 0) -> None:
    """Casts."""

def all_finite(x: Array, residual: Array | None = None) -> bool:
    """Whether every element of x (+ residual), float32, is finite."""

def int8_encode(
    q: Payload, scale: Payload, x: Array, residual: Array | None, block: int, q_at: int = 0, scale_at: int = 0
) -> bool:
    """Codes x (+ residual, which keeps the rest). False, residual unchanged, if that is not finite."""

def int8_decode(
    acc: Array, q: Payload, scale: Payload, block: int, assign: bool = False, q_at: int = 0, scale_at: int = 0
) -> None:
    """acc += scale * q, or acc = scale * q."""

def select(g: Array, residual: Array | None, threshold: float, start: int, idx: Array, val: Array) -> tuple[int, int, bool]:
    """(selected, passed but did not fit, all finite). The shorter of idx (uint32 or int32) and val is the room."""

def sample_abs(g: Array, residual: Array | None, offset: int, out: Array) -> None:
    """|g + residual| of len(out) elements spread evenly from offset."""

def scatter_add(acc: Array, idx: Array, val: Payload, at: int = 0) -> int:
    """acc[idx] += val (float32). CorruptFrame, acc unchanged, unless idx increases strictly below len(acc)."""

def scatter_add_int8(acc: Array, idx: Array, q: Payload, scale: Payload, block: int, q_at: int = 0, scale_at: int = 0) -> int:
    """The same with values scale[j // block] * q[j]."""

def ef_bound(n: int, k: int) -> int:
    """Exact bytes of k positions below n as Elias-Fano."""

def ef_encode(out: Payload, idx: Array, n: int, at: int = 0) -> int:
    """Writes len(idx) positions below n from byte `at` on; returns the bytes written."""

def ef_decode(idx: Array, n: int, src: Payload, at: int = 0, nbytes: int = -1) -> int:
    """Reads len(idx) positions from nbytes bytes at `at` (-1: all the rest). CorruptFrame leaves idx as it was."""

def bitmap_encode(out: Payload, idx: Array, n: int, at: int = 0) -> int:
    """As ef_encode; always (n + 7) // 8 bytes."""

def bitmap_decode(idx: Array, n: int, src: Payload, at: int = 0, nbytes: int = -1) -> int:
    """As ef_decode."""

class Schedule:
    """A planner.problem.Problem in memory of its own: cml_schedule_run and cml_schedule_sweep over it."""

    def __init__(self, problem: Any) -> None: ...
    def run(self, choice: list[int]) -> float:
        """Seconds of a step."""

    def trace(self, choice: list[int]) -> tuple[float, list[float], list[float]]:
        """Seconds of a step, then starts and ends by instance."""

    def sweep(self, choice: list[int], buckets: list[int], limit: float) -> list[float]:
        """Seconds of a step with each option in turn for all these buckets; infinity where it is sure to be above limit."""
