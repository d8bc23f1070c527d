"""Long trainings: how stored ones are compared, and the laws that are fitted to them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench import longrun, longrun_law
from bench.virtual_training import Variant
from commlayer.planner.convergence import LONG_RUNS, LONG_RUNS_HIGH, LongRunLaw


def test_a_shorter_training_at_a_constant_rate_is_the_beginning_of_the_longest(tmp_path: Path) -> None:
    store, whole = longrun.Trainings(tmp_path / "runs.jsonl"), longrun.Case(Variant("gru", "adam"), schedule="constant")
    assert longrun.Case.read(whole.key) == whole
    store.add(longrun.row_of(whole, [5 - 0.1 * i for i in range(longrun.LOOKS)], 1.0))
    assert [store.final(each) for each in whole.synchronous()] == pytest.approx([4.6, 4.3, 3.9, 3.5, 3.1])
    assert store.final(longrun.Case(whole.variant, steps=longrun.STEPS // 2)) is None, "a decayed rate has no such beginning"
    assert longrun.factor_of(whole, store) == pytest.approx(1.0)


def test_the_law_of_long_trainings_is_found_again() -> None:
    law = LongRunLaw(0.8, 0.1, 0.3, 0.5)
    known = [longrun_law.Training("t", workers, numel, noise, "", every, fragments, 1.0)
             for workers in (2, 8) for numel in (20_000, 2_000_000) for noise in (5.0, 60.0)
             for every, fragments in ((0, 0), (8, 0), (128, 0), (8, 1), (8, 4))]
    exact = [one._replace(factor=math.exp(longrun_law.log_factor(law, one))) for one in known]
    assert tuple(longrun_law.fit(exact)) == pytest.approx(tuple(law), rel=0.02)


def test_the_shipped_laws_are_those_of_the_stored_trainings() -> None:
    known = longrun_law.trainings(longrun.Trainings(longrun.STORE))
    assert longrun_law.fit(known) == LONG_RUNS
    assert longrun_law.fit_cautious(known) == LONG_RUNS_HIGH
    kept = [longrun_law.covers(LONG_RUNS_HIGH, one) for one in known if one.every]
    assert sum(kept) >= 0.8 * len(kept)
