"""Several threads to a call give the bytes of one: kernel by kernel, at parts' borders, with overflow, with bad numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.native_builds import bits, core, numbers, unaligned

SIZES = (0, 1, 63, 480, 1000, 4097, 9999)
BLOCK = 96


@pytest.fixture(autouse=True)
def _one_thread_after() -> Iterator[None]:
    yield
    core.threads(1, 1)


def same(run: Callable[[], object]) -> None:
    core.threads(1, 1)
    alone = run()
    for count, grain in ((2, 1), (3, 64), (16, 200)):
        core.threads(count, grain)
        assert run() == alone, f"{count} threads, {grain} elements each"


def encoders(n: int) -> dict[str, tuple[int, int, Callable[..., bool]]]:
    """{name: (bytes of codes, bytes of scales, encode(codes, scales, x, residual))}; all rounding to the nearest."""
    blocks = -(-n // BLOCK)
    return {
        "int8": (n, 4 * blocks, lambda q, s, x, r: core.int8_encode(q, s, x, r, BLOCK)),
        "int4": ((n + 1) // 2, 2 * blocks, lambda q, s, x, r: core.linear_encode(q, s, x, r, BLOCK, 4, False, False)),
        "int5": ((5 * n + 7) // 8, 2 * blocks, lambda q, s, x, r: core.linear_encode(q, s, x, r, BLOCK, 5, False, False)),
        "onebit": ((n + 7) // 8, 2 * blocks, lambda q, s, x, r: core.onebit_encode(q, s, x, r, BLOCK)),
    }


def dithered(n: int) -> dict[str, tuple[int, int, Callable[..., bool]]]:
    blocks = -(-n // BLOCK)
    return {
        "qsgd": ((3 * n + 7) // 8, 2 * blocks, lambda q, s, x, r: core.linear_encode(q, s, x, r, BLOCK, 3, True, True, 5, 6)),
    }


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ["int8", "int4", "int5", "onebit", "qsgd"])
def test_encoders(name: str, n: int) -> None:
    codes_nbytes, scales_nbytes, encode = (encoders(n) | dithered(n))[name]
    x, old = numbers(n, 1), numbers(n, 2)

    def run(residual: np.ndarray | None) -> tuple[bool, bytes, bytes, bytes]:
        kept = None if residual is None else residual.copy()
        (q, guarded), (scales, guarded_scales) = unaligned(codes_nbytes, 3), unaligned(scales_nbytes, 1)
        finite = encode(q, scales, x, kept)
        return finite, bytes(guarded), bytes(guarded_scales), b"" if kept is None else kept.tobytes()

    same(lambda: run(None))
    same(lambda: run(old))


@pytest.mark.parametrize("place", [0.0, 0.4, 0.999])
@pytest.mark.parametrize("name", ["int8", "int4", "int5"])
def test_a_bad_number_in_one_part_is_one_in_all(name: str, place: float) -> None:
    n = 4097
    codes_nbytes, scales_nbytes, encode = encoders(n)[name]
    x, old = numbers(n, 1), numbers(n, 2)
    x[int(place * n)] = np.inf

    def run() -> tuple[bool, bytes]:
        kept = old.copy()
        return encode(bytearray(codes_nbytes), bytearray(scales_nbytes), x, kept), kept.tobytes()

    same(run)
    assert run()[0] is False


@pytest.mark.parametrize("kind", ["normal", "wild"])
@pytest.mark.parametrize("n", SIZES)
def test_sums_casts_and_decoders(n: int, kind: str) -> None:
    x, acc, blocks = numbers(n, 3, kind=kind), numbers(n, 4), -(-n // BLOCK)
    rng = np.random.default_rng(n)
    noise, scales = rng.integers(0, 256, 2 * n, dtype=np.uint8), rng.integers(0, 0x4000, blocks).astype(np.uint16)
    full = numbers(blocks, 5)

    def view(nbytes: int) -> memoryview:
        return memoryview(noise.data)[:nbytes]

    decoders = {
        "int8": lambda a: core.int8_decode(a, view(n), full, BLOCK),
        "int5": lambda a: core.linear_decode(a, view((5 * n + 7) // 8), scales, BLOCK, 5),
        "onebit": lambda a: core.onebit_decode(a, view((n + 7) // 8), scales, BLOCK),
        "add_f32": lambda a: core.add_f32(a, x, 0.3),
        "add_f16": lambda a: core.add_f16(a, view(2 * n)),
        "add_bf16": lambda a: core.add_bf16(a, view(2 * n)),
        "f16_to_f32": lambda a: core.f16_to_f32(a, view(2 * n)),
        "bf16_to_f32": lambda a: core.bf16_to_f32(a, view(2 * n)),
    }

    def decoded(decode: Callable[[np.ndarray], None]) -> bytes:
        mine = acc.copy()
        decode(mine)
        return bits(mine)

    for decode in decoders.values():
        same(lambda decode=decode: decoded(decode))

    def narrowed() -> tuple[object, ...]:
        half, bfloat = bytearray(2 * n), bytearray(2 * n)
        return core.f32_to_f16(half, x), core.f32_to_bf16(bfloat, x), half, bfloat, core.all_finite(x), core.all_finite(x, acc)

    same(narrowed)


@pytest.mark.parametrize("kind", ["normal", "wild"])
@pytest.mark.parametrize(("n", "cap"), [(1, 1), (63, 5), (1000, 1000), (4097, 900), (9999, 40), (9999, 0)])
def test_selection_with_and_without_room(n: int, cap: int, kind: str) -> None:
    g, old = numbers(n, 7, kind=kind), numbers(n, 8)
    for start in {0, 1, n // 3, n // 2, n - 1} & set(range(n)):

        def run(residual: np.ndarray | None, start: int = start) -> tuple[object, ...]:
            kept = None if residual is None else residual.copy()
            idx, val = np.zeros(cap, np.uint32), np.zeros(cap, np.float32)
            found = core.select(g, kept, 1.0, start, idx, val)
            count = found[0]
            return found, idx[:count].tobytes(), val[:count].tobytes(), b"" if kept is None else bits(kept)

        same(lambda: run(None))
        same(lambda: run(old))


def test_mistakes_are_refused_as_by_one_thread() -> None:
    core.threads(4, 1)
    g = numbers(100, 9)
    for threshold, start in ((0.0, 0), (1.0, 100), (1.0, -1)):
        with pytest.raises(ValueError, match="select"):
            core.select(g, None, threshold, start, np.zeros(9, np.uint32), np.zeros(9, np.float32))
    with pytest.raises(ValueError, match="linear_encode"):
        core.linear_encode(bytearray(50), bytearray(200), g, None, 1, 4, False, False)
