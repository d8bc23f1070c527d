"""`bench longrun`: factors from final losses, the schedule, and a store that resumes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec import structs

from bench import longrun
from bench.longrun import STEPS, Case, Trainings, cases, factor_of, rate_at, row_of
from bench.virtual_training import Variant

DENSE = Case(Variant("gru", "adam"))
LOCAL = DENSE._replace(variant=structs.replace(DENSE.variant, codec="int4()", codes="updates", every=32))


@pytest.mark.parametrize("slower", [0.8, 1.0, 1.5, 2.5, 5.0])
def test_factor_is_the_length_relative_to_synchronous_training_at_equal_loss(tmp_path: Path, slower: float) -> None:
    """The losses fall with the logarithm of the length."""
    store = Trainings(tmp_path / "runs.jsonl")
    assert factor_of(LOCAL, store) is None
    for case in DENSE.synchronous():
        store.add(row_of(case, [9.0, 3 - 0.1 * math.log(case.steps)], 1.0))
    assert factor_of(LOCAL, store) is None
    store.add(row_of(LOCAL, [9.0, 3 - 0.1 * math.log(STEPS / slower)], 1.0))
    assert factor_of(LOCAL, store) == pytest.approx(slower, rel=0.01)
    assert factor_of(LOCAL, Trainings(tmp_path / "runs.jsonl")) == pytest.approx(slower, rel=0.01)


def test_loss_above_the_shortest_synchronous_training_has_no_factor(tmp_path: Path) -> None:
    store = Trainings(tmp_path / "runs.jsonl")
    for case in DENSE.synchronous():
        store.add(row_of(case, [3 - 0.1 * math.log(case.steps)], 1.0))
    store.add(row_of(LOCAL, [3 - 0.1 * math.log(STEPS / 6)], 1.0))  # the shortest is a quarter as long
    assert factor_of(LOCAL, store) is None


def test_learning_rate_warms_up_and_then_decays_or_stays() -> None:
    rates = [rate_at(step, STEPS, "cosine") for step in range(1, STEPS + 1)]
    assert rates[0] < 0.05
    assert max(rates) > 0.98
    assert rates[-1] == pytest.approx(longrun.LAST)
    assert all(a >= b for a, b in zip(rates[longrun.WARMUP + 1:], rates[longrun.WARMUP + 2:], strict=False))
    assert rate_at(STEPS, STEPS, "constant") == 1.0


def test_every_case_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longrun, "LOOKS", 1)
    planned = cases("gru", "adam", 2, 0)
    assert len({case.key for case in planned}) == len(planned)
    for case in planned[:4]:
        noise: list[float] = []
        loss, = longrun.train(case._replace(steps=16), noise)
        assert 0 < loss < 5
        assert len(noise) == (case.variant.codec == "identity()")
        assert all(batches > 0 for batches in noise) or case.variant.workers == 1
