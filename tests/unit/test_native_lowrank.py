"""Low-rank products and random words: reference == vector body == portable body."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import codec_kernels as reference
from oracle.codec_kernels.draws import words
from support.native_builds import core, numbers, portable

quick = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)
BODIES = [(core, False), (core, True), (reference, False)]


def test_random_words_take_all_of_key_and_step() -> None:
    seen = {words(9, 0, key, step)[4:].numpy().tobytes() for key in (0, 1, 1 << 32) for step in (0, 1, 1 << 32)}
    assert len(seen) == 9


@quick
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 6), seeds)
def test_outer(m: int, n: int, rank: int, seed: int) -> None:
    p, q = numbers(m * rank, seed), numbers(n * rank, seed + 1)
    results = []
    for module, plain in BODIES:
        with portable(plain):
            out = np.empty(m * n, np.float32)
            module.outer(out, p, q, rank)
            results.append(out.tobytes())
    assert results[0] == results[1] == results[2]
    wanted = p.reshape(rank, m).T.astype(np.float64) @ q.reshape(rank, n)
    assert np.allclose(np.frombuffer(results[0], np.float32).reshape(m, n), wanted, rtol=1e-4, atol=1e-4)


def test_arguments_are_checked() -> None:
    x = numbers(9, 0)
    for columns, rank in ((2, 1), (3, 0)):
        with pytest.raises(ValueError):
            core.outer(x, x[:3].copy(), x[:columns].copy(), rank)
