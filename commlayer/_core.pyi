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
    """ "avx512", "avx2", "neon" or "portable"."""

def threads(count: int, grain: int) -> None:
    """From now on up to `count` threads share a call, each with at least `grain` elements. Results stay the same."""

def force_portable(on: bool) -> bool:
    """Runs the portable bodies from now on; returns whether they ran before. For tests."""

def crc32c(data: Payload, crc: int = 0) -> int:
    """CRC-32C of all of data, continuing from crc."""

def add_f32(acc: Array, x: Payload) -> None:
    """acc += x."""

def add_f16(acc: Array, x: Payload) -> None:
    """acc += x, x in float16."""

def add_bf16(acc: Array, x: Payload) -> None:
    """acc += x, x in bfloat16."""

def scale_f32(dst: Array, src: Payload, factor: float) -> bool:
    """dst = factor * src, and whether src is finite. If it is not, dst is written up to some element before."""

def f32_to_f16(dst: Payload, src: Array) -> bool:
    """Casts; whether all results are finite."""

def f32_to_bf16(dst: Payload, src: Array) -> bool:
    """Casts; whether all results are finite."""

def f16_to_f32(dst: Array, src: Payload) -> None:
    """Casts."""

def bf16_to_f32(dst: Array, src: Payload) -> None:
    """Casts."""

def all_finite(x: Array, residual: Array | None = None) -> bool:
    """Whether every element of x (+ residual), float32, is finite."""

def sum_squares(x: Array, factor: float) -> int:
    """The sum of q * q, where q is factor * x, float32, rounded to an integer of at most 17 bits."""

def int8_encode(q: Payload, scale: Payload, x: Array, residual: Array | None, block: int) -> bool:
    """Codes x (+ residual, which keeps the rest). False if that is not finite: the residual takes the finite part."""

def int8_decode(acc: Array, q: Payload, scale: Payload, block: int, assign: bool = False) -> None:
    """acc += scale * q, or acc = scale * q."""

def philox(words: Array, first: int, key: int, step: int) -> None:
    """The random words (uint32 or int32) of elements first, first + 1, ... under this key in this step."""

def linear_encode(
    q: Payload,
    scale: Payload,
    x: Array,
    residual: Array | None,
    block: int,
    bits: int,
    euclidean: bool,
    dither: bool,
    key: int = 0,
    step: int = 0,
) -> bool:
    """As int8_encode, in codes of 2, 3, 4, 5 or 8 bits and scales in bfloat16."""

def linear_decode(acc: Array, q: Payload, scale: Payload, block: int, bits: int, assign: bool = False) -> None:
    """acc += scale * q, or acc = scale * q."""

def onebit_encode(q: Payload, scale: Payload, x: Array, residual: Array | None, block: int) -> bool:
    """As int8_encode, in signs and scales in bfloat16."""

def onebit_decode(acc: Array, q: Payload, scale: Payload, block: int, assign: bool = False) -> None:
    """As linear_decode."""

def select(g: Array, residual: Array | None, threshold: float, start: int, idx: Array, val: Array) -> tuple[int, int, bool]:
    """(selected, passed but did not fit, all finite). The shorter of idx (uint32 or int32) and val is the room."""

def sample_abs(g: Array, residual: Array | None, offset: int, out: Array) -> None:
    """|g + residual| of len(out) elements spread evenly from offset."""

def scatter_add(acc: Array, idx: Array, val: Payload) -> int:
    """acc[idx] += val (float32). CorruptFrame, acc unchanged, unless idx increases strictly below len(acc)."""

def scatter_add_int8(acc: Array, idx: Array, q: Payload, scale: Payload, block: int) -> int:
    """The same with values scale[j // block] * q[j]."""

def ef_bound(n: int, k: int) -> int:
    """Exact bytes of k positions below n as Elias-Fano."""

def ef_encode(out: Payload, idx: Array, n: int) -> int:
    """Writes len(idx) positions below n; returns the bytes written."""

def ef_decode(idx: Array, n: int, src: Payload) -> int:
    """Reads len(idx) positions from all of `src`. CorruptFrame leaves idx as it was."""

def bitmap_encode(out: Payload, idx: Array, n: int) -> int:
    """As ef_encode; always (n + 7) // 8 bytes."""

def bitmap_decode(idx: Array, n: int, src: Payload) -> int:
    """As ef_decode."""

def blocks_nbytes(idx: Array, n: int) -> int:
    """Exact bytes of these positions as blocks."""

def blocks_encode(out: Payload, idx: Array, n: int) -> int:
    """As ef_encode; blocks_nbytes bytes."""

def blocks_decode(idx: Array, n: int, src: Payload) -> int:
    """As ef_decode."""

def kth_abs(g: Array, residual: Array | None, rank: int, scratch: Array) -> float:
    """The rank-th largest |g + residual|. scratch holds len(g) words and is overwritten."""

def count_above(x: Array, cut: float) -> int:
    """How many x >= cut."""

def trim(residual: Array | None, n: int, idx: Array, val: Array, count: int, keep: int, start: int, scratch: Array) -> int:
    """Of the first `count` entries keeps the `keep` largest at the front, gives the others back to the residual."""

def select_runs(
    g: Array, residual: Array | None, run: int, threshold: float, start: int, ids: Array, scores: Array
) -> tuple[int, int, bool]:
    """As select, but by runs, whose elements stay in the residual."""

def score_runs(g: Array, residual: Array | None, run: int, offset: int, out: Array) -> None:
    """Scores of len(out) runs spread evenly from run `offset`."""

def gather_runs(src: Array, run: int, ids: Array, val: Array) -> int:
    """The elements of the runs, one run after the other; how many."""

def scatter_runs(acc: Array, run: int, ids: Array, val: Array, assign: bool = False) -> int:
    """Adds val to the runs, or assigns it. CorruptFrame, acc unchanged, unless ids increase and cover len(val) elements."""

def draw_word(key: int, step: int) -> int:
    """Word 0 of the stream (key, step)."""

def draw_strata(idx: Array, n: int, seed: int) -> int:
    """One position in each of len(idx) strata of n."""

def take(src: Array, idx: Array, val: Array) -> int:
    """val = src[idx]. CorruptFrame unless idx increases strictly below len(src)."""

def nibbles_encode(q: Payload, scale: Payload, x: Array, rest: Array | None, block: int) -> bool:
    """Codes x to 4 bits each; rest = x - what that says. False if x is not finite."""

def nibbles_decode(out: Array, q: Payload, scale: Payload, block: int) -> None:
    """out = scale * q."""
def sgd_sparse(
    w: Array, v: Array | None, stamp: Array | None, now: int, rows: Array, idx: Array, g: Array, rate: float, momentum: float,
    gain: float, decay: float, nesterov: bool,
) -> int:
    """A lazy step of SGD on the entries idx; `now` is the last step that was made."""

def sgd_catch_up(w: Array, v: Array | None, stamp: Array, now: int, rows: Array) -> None:
    """Brings all elements up to date with step `now`."""

def adam_sparse(
    w: Array, m: Array, v: Array, stamp: Array | None, now: int, rows: Array, idx: Array, g: Array, step: Array
) -> int:
    """As sgd_sparse, of Adam; `step` holds keep, lerp, beta2, gain, root, eps and rate."""

def adam_catch_up(w: Array, m: Array, v: Array, stamp: Array, now: int, rows: Array) -> None:
    """As sgd_catch_up, of Adam."""

def huge_pages(x: Array) -> None:
    """Asks for large pages for memory that nobody has written to yet."""

def flat_positions(idx: Array, at: Array, shape: tuple[int, ...]) -> None:
    """idx = positions, row by row, of the coordinates `at` (int64, one row a dimension), which must increase."""

def coordinates(at: Array, idx: Array, shape: tuple[int, ...]) -> None:
    """The inverse of flat_positions, for positions within the shape."""

def outer(out: Array, p: Array, q: Array, rank: int) -> None:
    """The product of the factors p (rank x m) and q (rank x n), added in the order of rank."""
class Schedule:
    """A planner.problem.Problem in memory of its own: cml_schedule_run and cml_schedule_sweep over it."""

    def __init__(self, problem: Any) -> None: ...
    begun: int
    """Tasks that began in all sweeps so far."""

    def run(self, choice: list[int], limit: float = ...) -> float:
        """Seconds of a step; infinity where it is sure to be above limit."""

    def trace(self, choice: list[int]) -> tuple[float, list[float], list[float]]:
        """Seconds of a step, then starts and ends by instance."""

    def sweep(
        self, choice: list[int], buckets: list[int], limit: float, now_s: float = ..., most: int = ...,
        only: list[int] | None = ..., factors: list[float] | None = ...,
    ) -> list[float]:
        """Seconds of a step with each option in turn for all these buckets; infinity where, times its factor, it is sure to be
        above limit."""
