"""The quantisers' kernels: reference == vector body == portable body; the random words are Philox's; bounds on what is lost."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.native_builds import KINDS, SIZES, bits, numbers, same, unaligned

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
quick = settings(max_examples=30, deadline=None)
sizes = st.sampled_from((*SIZES, 159, 160, 161, 320, 1283))
seeds = st.integers(0, 2**32 - 1)
kinds = st.sampled_from(KINDS)
keys = st.integers(0, 2**63 - 1)


def run_coder(
    name: str, n: int, seed: int, kind: str, fed: bool, shift: int, block: int, scale_nbytes: int, *how: object
) -> None:
    """All bodies agree, in bytes, residual and guard bytes; and the residual is what was not sent."""
    x, old, acc = numbers(n, seed, kind=kind), numbers(n, seed + 1, kind=kind) if fed else None, numbers(n, seed + 2)
    if fed and kind == "wild":
        assert old is not None
        old[~np.isfinite(old)] = 1.0
    width = how[0] if name == "linear" else 1
    nbytes = (n * int(str(width)) + 7) // 8
    count = -(-n // block)

    def run(module: ModuleType) -> tuple[object, ...]:
        kept = None if old is None else old.copy()
        q, guarded_q = unaligned(nbytes, shift)
        scale, guarded_scale = unaligned(scale_nbytes * count, shift)
        finite = getattr(module, f"{name}_encode")(q, scale, x, kept, block, *how)
        if not finite:
            q[:], scale[:] = bytes(nbytes), bytes(scale_nbytes * count)  # may hold anything now
        decoded, assigned = acc.copy(), acc.copy()
        shape = how[:1] if name == "linear" else ()
        getattr(module, f"{name}_decode")(decoded, q, scale, block, *shape)
        getattr(module, f"{name}_decode")(assigned, q, scale, block, *shape, True)
        return (
            finite,
            bytes(guarded_q),
            bytes(guarded_scale),
            b"" if kept is None else bits(kept),
            bits(decoded),
            bits(assigned),
        )

    # Where a number is not finite, what dithering had sent is added back to the residual with rounding: threads stop elsewhere.
    finite, _, _, kept, _, assigned = same(run, threads=not (name == "linear" and how[2] and kind in ("wild", "special")))
    with np.errstate(all="ignore"):
        v = x if old is None else x + old
    assert finite == bool(np.isfinite(v).all())
    sent = np.frombuffer(assigned, np.float32)
    assert np.isfinite(sent).all()
    if old is None:
        return
    rest, most = np.frombuffer(kept, np.float32), float(np.abs(v[np.isfinite(v)]).max(initial=0))
    if finite:
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(sent.astype(np.float64) + rest, v, rtol=1e-6, atol=1e-6 * most + 1e-37)
    else:
        np.testing.assert_allclose(rest, np.where(np.isfinite(v), v, old), rtol=1e-6, atol=1e-6 * most + 1e-37)


@quick
@given(sizes, seeds, kinds, st.booleans(), st.sampled_from([0, 1]), st.sampled_from([8, 32, 40, 64, 1024]), keys, st.data())
@pytest.mark.parametrize("dither", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4, 5, 8])
def test_linear(
    width: int, dither: bool, n: int, seed: int, kind: str, fed: bool, shift: int, block: int, key: int, data: st.DataObject
) -> None:
    euclidean, step = data.draw(st.booleans()), data.draw(st.sampled_from([0, 1, 2**32 + 5]))
    run_coder("linear", n, seed, kind, fed, shift, block, 2, width, euclidean, dither, key, step)


@quick
@given(sizes, seeds, kinds, st.booleans(), st.sampled_from([0, 1]), st.sampled_from([8, 32, 40, 1024]))
def test_onebit(n: int, seed: int, kind: str, fed: bool, shift: int, block: int) -> None:
    run_coder("onebit", n, seed, kind, fed, shift, block, 2)
