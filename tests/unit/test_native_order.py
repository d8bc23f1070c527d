"""Order among magnitudes, runs, draws and 4-bit values: reference == vector body == portable body, and what each promises."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import codec_kernels as reference
from oracle.codec_kernels.draws import philox4x32
from support.native_builds import KINDS, SIZES, bits, core, numbers, positions, same

from commlayer.errors import CorruptFrame

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
quick = settings(max_examples=50, deadline=None)
sizes = st.sampled_from(SIZES)
filled = st.sampled_from(SIZES[1:])
seeds = st.integers(0, 2**32 - 1)
kinds = st.sampled_from(KINDS)
runs = st.sampled_from([8, 16, 32, 64])
MODULES = (core, reference)


@quick
@given(sizes, seeds, kinds, runs, st.sampled_from([1e-9, 8.0, 14.0, 100.0, float("inf")]), st.floats(0, 0.999), st.data())
def test_select_runs(n: int, seed: int, kind: str, run: int, threshold: float, place: float, data: st.DataObject) -> None:
    g = numbers(n, seed, kind=kind)
    old = numbers(n, seed + 1) * np.float32(0.5) if data.draw(st.booleans()) else None
    every = -(-n // run)
    start, cap = int(place * every), data.draw(st.sampled_from([every, every // 3, 1, 0]))

    def go(module: ModuleType) -> tuple[object, ...]:
        kept = None if old is None else old.copy()
        ids, scores = np.full(cap, 7, np.uint32), np.full(cap, 7, np.float32)
        k, overflow, finite = module.select_runs(g, kept, run, threshold, start, ids, scores)
        spread = np.full(every + 3, 7, np.float32)
        module.score_runs(g, old, run, start, spread)
        return k, overflow, finite, ids[:k].tobytes(), scores[:k].tobytes(), b"" if kept is None else bits(kept), bits(spread)

    k, overflow, finite, ids_bytes, scores_bytes, kept_bytes, _ = same(go)  # type: ignore[misc]
    ids, scores = np.frombuffer(ids_bytes, np.uint32), np.frombuffer(scores_bytes, np.float32)
    with np.errstate(all="ignore"):
        v = g if old is None else g + old
        rows = np.zeros(every * run, np.float32)
        rows[:n] = v
        rows = rows.reshape(every, run)
        sums = np.abs(rows.astype(np.float64)).sum(1)
    assert finite == bool(np.isfinite(v).all())
    assert k + overflow == 0 or np.isfinite(rows).all(1).sum() >= k + overflow
    assert (np.diff(ids.astype(np.int64)) > 0).all()
    np.testing.assert_allclose(np.minimum(scores, np.float32(3.4e38)), np.minimum(sums[ids], 3.4e38), rtol=1e-5)
    assert not len(ids) or sums[ids].min() >= min(threshold, 3.4e38) * 0.9999
    if overflow == 0 and finite:
        rest = np.delete(sums, ids)
        assert not len(rest) or rest.max() <= threshold * 1.0001
    if old is not None:
        assert kept_bytes == bits(np.where(np.isfinite(v), v, old))


@quick
@given(filled, seeds, runs, st.floats(0, 1))
def test_gather_and_scatter_of_runs(n: int, seed: int, run: int, density: float) -> None:
    every = -(-n // run)
    ids = positions(every, int(density * every), seed)
    src, acc = numbers(n, seed), numbers(n, seed + 1)
    where = (ids[:, None].astype(np.int64) * run + np.arange(run)).reshape(-1)
    where = where[where < n]

    def go(module: ModuleType) -> tuple[bytes, ...]:
        val = np.zeros(len(where), np.float32)
        assert module.gather_runs(src, run, ids, val) == len(where)
        added, assigned, refused = acc.copy(), acc.copy(), acc.copy()
        module.scatter_runs(added, run, ids, val)
        module.scatter_runs(assigned, run, ids, val, True)
        for bad, values in ((ids[::-1].copy() if len(ids) > 1 else ids + every, val), (ids, np.append(val, val[:1] * 0 + 1))):
            if len(ids):
                with pytest.raises(CorruptFrame):
                    module.scatter_runs(refused, run, bad, values)
        return val.tobytes(), added.tobytes(), assigned.tobytes(), refused.tobytes()

    val, added, assigned, refused = same(go)  # type: ignore[misc]
    assert val == src[where].tobytes()
    assert refused == acc.tobytes()
    expected = acc.copy()
    expected[where] = src[where]
    assert assigned == expected.tobytes()
    expected[where] = acc[where] + src[where]
    assert added == expected.tobytes()


def test_philox_gives_the_published_words() -> None:
    """Known answers of the authors' Random123: counter and key of zeros, of ones, and of the digits of pi."""
    assert [hex(w) for w in philox4x32(0, np.zeros(1, np.uint64), 0)[0]] == [
        "0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    ones = (1 << 64) - 1
    assert [hex(w) for w in philox4x32(ones, np.array([ones], np.uint64), ones)[0]] == [
        "0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd",
    ]  # fmt: skip
    block, step, key = 0x85A308D3243F6A88, 0x0370734413198A2E, 0x299F31D0A4093822
    assert [hex(w) for w in philox4x32(key, np.array([block], np.uint64), step)[0]] == [
        "0xd16cfe09", "0x94fdcceb", "0x5001e420", "0x24126ea1",
    ]  # fmt: skip
    for module in MODULES:
        assert module.draw_word(key, step) == int(philox4x32(key, np.zeros(1, np.uint64), step)[0, 0])


@quick
@given(filled, seeds, st.floats(0, 1))
def test_draws(n: int, seed: int, density: float) -> None:
    k = max(1, int(n * density))
    src = numbers(n, seed)

    def run(module: ModuleType) -> tuple[bytes, ...]:
        idx, val = np.zeros(k, np.uint32), np.zeros(k, np.float32)
        module.draw_strata(idx, n, seed)
        module.take(src, idx, val)
        return idx.tobytes(), val.tobytes()

    idx_bytes, val = same(run)  # type: ignore[misc]
    idx = np.frombuffer(idx_bytes, np.uint32).astype(np.int64)
    begins = np.arange(k + 1) * n // k
    assert (begins[:-1] <= idx).all()
    assert (idx < begins[1:]).all()
    assert val == src[idx].tobytes()
