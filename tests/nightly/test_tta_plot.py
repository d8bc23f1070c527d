"""The pictures of `bench tta` show what its table says: medians over seeds, of rows that stand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from support.tta import row

from bench.tta import shown
from bench.tta.plot import draw, middle, points, unshown
from bench.tta.summary import Times

ROWS = [
    row("ideal", "none", 20.0), row("alone", "none", 50.0),
    *(row("auto", "10m-80ms", goal_s, seed=seed) for seed, goal_s in enumerate((59.0, 30.0, 40.0))),
    row("auto", "10m-80ms", 10.0, seed=3, void="the pace was not kept"),
    row("auto", "100m-30ms", 25.0, seed=2),
    *(row("int4", "10m-80ms", goal_s, seed=seed) for seed, goal_s in enumerate((100.0, 90.0))),
]


def times() -> Times:
    return Times([unshown(shown(one)) for one in ROWS])


def test_points_are_the_medians_of_the_table() -> None:
    assert points(times(), "chars") == {"auto": [(10.0, pytest.approx(40.0)), (100.0, pytest.approx(25.0))]}, "no seed 0 needed"
    assert points(times(), "digits") == {}


def test_a_curve_is_that_of_the_seed_in_the_middle() -> None:
    found = {(one["link"], one["system"]): one["seed"] for one in middle(times())}
    assert found == {("none", "ideal"): 0, ("none", "alone"): 0, ("10m-80ms", "auto"): 2, ("100m-30ms", "auto"): 2,
                     ("10m-80ms", "int4"): 1}


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib, of the extra plot, is missing")
def test_both_pictures_are_drawn(tmp_path: Path) -> None:
    source = tmp_path / "tta.json"
    source.write_text(json.dumps({"rows": [shown(one) for one in ROWS]}))
    assert draw(source) == f"wrote {tmp_path / 'tta.png'}, {tmp_path / 'tta_bandwidth.png'}"
    source.write_text(json.dumps({"rows": [shown(row("auto", "10m-80ms", 30.0, void="late"))]}))
    assert draw(source) == "no picture: there is no row that stands"
