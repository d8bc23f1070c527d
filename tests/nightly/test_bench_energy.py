"""The measurement of where entries go: on all its models one threshold keeps more of the energy, in as many bytes."""

from __future__ import annotations

from statistics import fmean

import pytest

from bench import energy, energy_models

SETTLED = 3
"""Steps after which counts have found their place; the first has the plain ones."""


@pytest.mark.parametrize("model", energy_models.MODELS)
def test_one_threshold_keeps_more_than_sorting_each_bucket(model: str) -> None:
    _, sent, down = energy.train(model, "sgd", "plan", seed=1, steps=SETTLED + 4)
    plain, settled = sent[: energy.WORKERS], sent[SETTLED * energy.WORKERS :]
    assert all(s.kept == pytest.approx(s.alike, rel=1e-3) for s in plain)
    assert fmean(s.kept for s in settled) > 1.02 * fmean(s.alike for s in settled)
    assert max(s.nbytes for s in settled) <= 1.02 * plain[0].nbytes
    assert max(down[SETTLED:]) <= 1.02 * down[0]
