"""How entries are divided among buckets: the total is kept, limits hold, and one threshold comes out for all."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from commlayer.compressors.global_budget import MOST_CHANGE, Demand, Tail, share_budget

TAILS = st.builds(Tail, st.integers(0, 5000), st.floats(1e-30, 1e30), st.floats(0.5, 40.0))


@st.composite
def asks(draw: st.DrawFn) -> list[Demand]:
    results = []
    for _ in range(draw(st.integers(1, 12))):
        plain = draw(st.integers(1, 5000))
        fewest, most = max(1, plain // 8), 8 * plain
        results.append(Demand(draw(st.integers(1, 3 * most)), fewest, plain, most, draw(st.none() | TAILS)))
    return results


@given(asks())
def test_the_total_is_that_of_plain_shares_and_limits_hold(given_: list[Demand]) -> None:
    result = share_budget(given_)
    assert sum(result) == sum(ask.plain for ask in given_)
    assert all(ask.fewest <= entries <= ask.most for ask, entries in zip(given_, result, strict=True))
    assert share_budget(given_) == result


@given(asks())
def test_a_bucket_changes_by_a_factor_at_most(given_: list[Demand]) -> None:
    """Where the asks were for the same total, as in all steps but those of a warm-up, and within the limits."""
    total = sum(ask.plain for ask in given_)
    settled = [ask._replace(now=now) for ask, now in zip(given_, share_budget(given_), strict=True)]
    assert sum(ask.now for ask in settled) == total
    for ask, entries in zip(settled, share_budget(settled), strict=True):
        assert ask.now / MOST_CHANGE - 1 <= entries <= ask.now * MOST_CHANGE + 1


def test_shares_settle_where_one_threshold_over_all_would_have_them() -> None:
    generator = torch.Generator().manual_seed(1)
    scales = [0.5, 1.0, 1.0, 1.3, 2.0]
    vectors = [scale * torch.randn(20_000, generator=generator).abs().pow(1.5) for scale in scales]
    plain, now = [200] * len(vectors), [200] * len(vectors)
    for _ in range(8):
        tails = []
        for v, k in zip(vectors, now, strict=True):
            top = v.topk(k).values
            tails.append(Tail(k, float(top[-1]), 1 / max(float((top / top[-1]).log().mean()), 1e-3)))
        now = share_budget([Demand(k, p // 8, p, 8 * p, t) for k, p, t in zip(now, plain, tails, strict=True)])
    threshold = torch.cat(vectors).topk(sum(plain)).values[-1]
    best = [int((v >= threshold).sum()) for v in vectors]
    for mine, wanted in zip(now, best, strict=True):
        assert math.isclose(mine, max(wanted, 25), rel_tol=0.1, abs_tol=10)
