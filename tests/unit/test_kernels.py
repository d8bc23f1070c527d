"""Codec kernels: vector, portable and threaded bodies, the reference, and device kernels on a GPU or on the shim."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from support.cuda import here, raw, same, zeros
from support.native_builds import KINDS, core, numbers, positions
from support.native_builds import same as same_on_host

from commlayer.errors import CorruptFrame

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = (0, 1, 31, 32, 33, 255, 256, 257, 1000, 4095, 4096, 4097, 12_289)
TILE = 4096


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_sums_and_casts(n: int, kind: str) -> None:
    acc, x = numbers(n, 1, kind=kind), numbers(n, 2, kind=kind)

    def sums(module: ModuleType, present: Callable[[np.ndarray], torch.Tensor]) -> list[bytes]:
        out = []
        for name in ("f16", "bf16"):
            total, back, payload = present(acc), present(acc), present(zeros(2 * n))
            finite = getattr(module, f"f32_to_{name}")(payload, present(x))
            getattr(module, f"add_{name}")(total, payload)
            getattr(module, f"{name}_to_f32")(back, payload)
            words = payload.cpu().view(torch.int16)
            out += [bytes([finite]), raw(total), raw(back), words[back.cpu().isfinite()].numpy().tobytes()]
        total = present(acc)
        module.add_f32(total, present(x.view(np.uint8)))
        scaled = present(acc)
        finite = module.scale_f32(scaled, present(x.view(np.uint8)), 0.3)
        facts = bytes([finite, module.all_finite(present(x)), module.all_finite(present(x), present(acc))])
        return [*out, raw(total), facts, raw(scaled) if finite else b""]

    same(sums)


@pytest.mark.parametrize("n", SIZES)
def test_sums_of_squares_are_exact(n: int) -> None:
    x = np.random.default_rng(n).integers(-(2**17), 2**17 + 1, n).astype(np.float32) / 16
    wanted = sum(round(float(value) * 8) ** 2 for value in x)
    assert same_on_host(lambda module: module.sum_squares(here(x), 8.0)) == wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 7, 256, 1024, 5000])
def test_int8(block: int, kind: str) -> None:
    for n in SIZES if block > 1 else SIZES[:8]:
        x, old = numbers(n, n, kind=kind), numbers(n, n + 1)
        blocks = -(-n // block)
        for with_residual in (True, False):

            def code(
                module: ModuleType, present: Callable[[np.ndarray], torch.Tensor], with_residual: bool = with_residual,
                n: int = n, x: np.ndarray = x, old: np.ndarray = old, blocks: int = blocks,
            ) -> list[bytes]:
                kept = present(old) if with_residual else None
                q, scale, acc = present(zeros(n)), present(zeros(4 * blocks)), present(old)
                finite = module.int8_encode(q, scale, present(x), kept, block)
                after = b"" if kept is None else raw(kept)
                if not finite:
                    return [b"not finite", after]
                module.int8_decode(acc, q, scale, block)
                assigned = present(old)
                module.int8_decode(assigned, q, scale, block, True)
                return [raw(q), raw(scale), after, raw(acc), raw(assigned)]

            same(code)


@pytest.mark.parametrize("kind", KINDS)
def test_int4(kind: str) -> None:
    for n in (0, 1, 8, 33, 257, 4097):
        x, old = numbers(n, n, kind=kind), numbers(n, n + 1)
        for block in (8, 64, 1024)[n > 257 :]:

            def code(
                module: ModuleType, present: Callable[[np.ndarray], torch.Tensor], n: int = n, block: int = block,
                x: np.ndarray = x, old: np.ndarray = old,
            ) -> list[bytes]:
                out = []
                for kept in (None, present(old)):
                    q, scale = present(zeros((n + 1) // 2)), present(zeros(2 * -(-n // block)))
                    finite = module.linear_encode(q, scale, present(x), kept, block, 4, False, False)
                    out += [bytes([finite]), b"" if kept is None else raw(kept)]
                    if finite:
                        added, assigned = present(old), present(old)
                        module.linear_decode(added, q, scale, block, 4)
                        module.linear_decode(assigned, q, scale, block, 4, True)
                        out += [raw(q), raw(scale), raw(added), raw(assigned)]
                return out

            same(code)


@pytest.mark.commit(15)
@pytest.mark.parametrize("n", [*SIZES, 2 * TILE, 5 * TILE + 3])
@pytest.mark.parametrize("kind", ["normal", "wild", "equal"])
def test_select(n: int, kind: str) -> None:
    g, old = numbers(n, n, kind=kind), numbers(n, n + 1) * np.float32(0.3)
    cases = [
        (threshold, start, cap)
        for threshold in (1e-30, 2.0, 1e30)
        for start in sorted({0, n // 3, max(0, n - 1), min(n, TILE) - 1 if n else 0, n - n % 4 if n % 4 else 0})
        for cap in (n, n // 10, 3)
    ][:: 1 if n <= TILE else 4]
    for i, (threshold, start, cap) in enumerate(cases):
        for with_residual in (True, False):

            def pick(
                module: ModuleType, present: Callable[[np.ndarray], torch.Tensor], with_residual: bool = with_residual,
                threshold: float = threshold, start: int = start, cap: int = cap,
            ) -> list[bytes]:
                kept = present(old) if with_residual else None
                idx, val = present(np.zeros(cap, np.int32)), present(np.zeros(cap, np.float32))
                count, over, finite = module.select(present(g), kept, threshold, start, idx, val)
                entries = raw(idx[:count]) + raw(val[:count])
                return [repr((count, over, finite)).encode(), entries, b"" if kept is None else raw(kept)]

            same(pick, seed=i, resident=1 + i % 5)


@pytest.mark.parametrize("seed", range(12))
def test_tiles_wait_for_each_other_under_any_schedule(seed: int) -> None:
    """Forty tiles; one to eight run at a time and start in any order."""
    n = 40 * TILE - 5
    g = numbers(n, seed)

    def pick(module: ModuleType, present: Callable[[np.ndarray], torch.Tensor]) -> list[bytes]:
        idx, val = present(np.zeros(n // 50, np.int32)), present(np.zeros(n // 50, np.float32))
        count, over, finite = module.select(present(g), None, 2.5, 12345, idx, val)
        return [repr((count, over, finite)).encode(), raw(idx[:count]), raw(val[:count])]

    same(pick, seed, resident=1 + seed % 8)


@pytest.mark.parametrize("n", SIZES)
def test_sample_abs(n: int) -> None:
    g, old = numbers(n, 1, kind="wild"), numbers(n, 2)

    def sample(module: ModuleType, present: Callable[[np.ndarray], torch.Tensor]) -> list[bytes]:
        outs = []
        for count, offset, residual in ((0, 0, None), (1, 5, None), (100, 77, present(old)), (5000, 10**6, present(old))):
            out = present(np.full(count, 7, np.float32))
            module.sample_abs(present(g), residual, offset, out)
            outs.append(raw(out))
        return outs

    same(sample)


def size_of(kind: str, idx: np.ndarray, n: int) -> int:
    return {"ef": core.ef_bound(n, len(idx)), "bitmap": (n + 7) // 8, "blocks": core.blocks_nbytes(idx.view(np.int32), n)}[kind]


SPARSE = [(1, 1), (33, 32), (257, 1), (257, 256), (4097, 400), (10**5, 70), (10**5, 5000), (10**5, 99_999), (2**32 - 1, 6)]


@pytest.mark.parametrize(("n", "k"), SPARSE)
@pytest.mark.parametrize("kind", ["ef", "bitmap", "blocks"])
def test_positions(kind: str, n: int, k: int) -> None:
    if kind == "bitmap" and n > 10**6:
        n = 300_001
    idx = positions(n, k, 1) if n < 10**7 else np.array([0, 1, 2**31 - 1, 2**31, n - 2, n - 1], np.uint32)
    nbytes = size_of(kind, idx, n)

    def code(module: ModuleType, present: Callable[[np.ndarray], torch.Tensor]) -> list[bytes]:
        outs = []
        for shift in (0, 1, 3):
            memory = present(np.full(nbytes + 8, 0xA5, np.uint8))
            where = memory[shift : shift + nbytes]
            assert getattr(module, f"{kind}_encode")(where, present(idx.view(np.int32)), n) == nbytes
            back = present(np.zeros(len(idx), np.int32))
            getattr(module, f"{kind}_decode")(back, n, where)
            assert raw(back) == idx.tobytes()
            outs.append(raw(memory))
        return outs

    same(code)


@pytest.mark.parametrize("kind", ["ef", "bitmap", "blocks"])
def test_malformed_positions_are_refused_by_all_bodies(kind: str) -> None:
    n, k = 3001, 200
    idx, random = positions(n, k, 2), np.random.default_rng(3)
    good = zeros(size_of(kind, idx, n))
    getattr(core, f"{kind}_encode")(good, idx, n)
    broken = []
    for _ in range(100):
        bad = good.copy()
        bad[random.integers(len(bad))] ^= 1 << random.integers(8)
        broken.append(bad)
    broken += [random.integers(0, 256, len(good)).astype(np.uint8), np.full_like(good, 255), np.zeros_like(good)]

    def verdicts(module: ModuleType, present: Callable[[np.ndarray], torch.Tensor]) -> list[bytes]:
        out = []
        for bad in broken:
            back = present(np.zeros(k, np.int32))
            try:
                getattr(module, f"{kind}_decode")(back, n, present(bad))
            except CorruptFrame:
                out.append(b"corrupt")
            else:
                out.append(raw(back))
        return out

    results = same(verdicts)
    assert b"corrupt" in results
    for bad, result in zip(broken, results, strict=True):
        if result != b"corrupt":
            back, again = np.frombuffer(result, np.uint32), zeros(len(bad))
            assert (np.diff(back.astype(np.int64)) > 0).all()
            assert back[-1] < n
            getattr(core, f"{kind}_encode")(again, back, n)
            assert bytes(again) == bytes(bad), "two spellings of the same positions"


@pytest.mark.parametrize(("n", "k"), [(1, 0), (33, 32), (4097, 400), (100_000, 5000)])
def test_scattering(n: int, k: int) -> None:
    idx, acc, val = positions(n, k, 1).view(np.int32), numbers(n, 2), numbers(k, 3)

    def scatter(module: ModuleType, present: Callable[[np.ndarray], torch.Tensor]) -> list[bytes]:
        plain, coded = present(acc), present(acc)
        module.scatter_add(plain, present(idx), present(val))
        q, scale = present(zeros(k)), present(zeros(4 * -(-k // 256)))
        module.int8_encode(q, scale, present(val), None, 256)
        module.scatter_add_int8(coded, present(idx), q, scale, 256)
        return [raw(plain), raw(coded)]

    same(scatter)


@pytest.mark.parametrize("n", [1, 2, 7, 33, 1000, 5000, 20_011])
@pytest.mark.parametrize("kind", KINDS)
def test_order(n: int, kind: str) -> None:
    x, old = numbers(n, n, kind=kind), numbers(n, n + 1)

    def order(module: ModuleType, present: Callable[[np.ndarray], torch.Tensor]) -> list[bytes]:
        words, results = present(np.zeros(n, np.int32)), []
        for rank in sorted({1, n // 3 + 1, n}):
            results += [module.kth_abs(present(x), residual, rank, words) for residual in (None, present(old))]
        counts = [module.count_above(present(x), cut) for cut in (2.0**-126, 0.1, 1.0000001, 3.4e38)]
        return [raw(torch.tensor(results)), repr(counts).encode()]

    same(order)


@pytest.mark.parametrize("kind", ["normal", "equal", "spike"])
@pytest.mark.parametrize(("count", "keep"), [(1, 1), (33, 1), (257, 256), (1000, 400), (5000, 4999), (5000, 1234)])
def test_trim(count: int, keep: int, kind: str) -> None:
    n = 6000
    idx, val, old = positions(n, count, 1).view(np.int32), numbers(count, 2, kind=kind), numbers(n, 3)

    def trim(module: ModuleType, present: Callable[[np.ndarray], torch.Tensor]) -> list[bytes]:
        out = []
        for start in (0, n // 2, n - 1):
            where, values, kept = present(idx), present(val), present(old)
            left = module.trim(kept, n, where, values, count, keep, start, present(np.zeros(count, np.int32)))
            assert left == keep
            out += [raw(where[:keep]), raw(values[:keep]), raw(kept)]
        return out

    same(trim)


@pytest.mark.parametrize("n", [0, 1, 2, 255, 256, 257, 1001])
@pytest.mark.parametrize("kind", KINDS)
def test_nibbles(n: int, kind: str) -> None:
    x = numbers(n, n, kind=kind)

    def code(module: ModuleType, present: Callable[[np.ndarray], torch.Tensor]) -> list[bytes]:
        out = []
        for block in (2, 256):
            q, scale, rest = present(zeros((n + 1) // 2)), present(zeros(4 * -(-n // block))), present(x)
            if not module.nibbles_encode(q, scale, present(x), rest, block):
                out.append(b"not finite")
                continue
            back = present(x)
            module.nibbles_decode(back, q, scale, block)
            out += [raw(q), raw(scale), raw(rest), raw(back)]
        return out

    same(code)
