"""Rows become the few ratios that decide: hand-made rows, and a store that a run goes on from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from bench.tta import cells, shown
from bench.tta.page import KEPT, PARTS, ROOT, Part, overview, table
from bench.tta.plot import draw
from bench.tta.store import Store, key_of, longest
from bench.tta.summary import summary
from bench.tta.systems import SYSTEMS

STEP_S = 0.3


def row(
    system: str, link: str, goal_s: float, *, task: str = "chars", seed: int = 0, end_s: float = 60.0, **others: Any
) -> dict[str, Any]:
    """A line from 4.0 down that reaches the middle target, 2.0, at goal_s; the easy one, 3.0, in half that time."""
    looks = [0.0, end_s / 2, end_s]
    curve = [(round(s / STEP_S), s, 4.0 - 2.0 * s / goal_s) for s in looks]
    return {
        "task": task, "link": link, "system": system, "seed": seed, "seconds": end_s, "data": "d",
        "group": SYSTEMS[system].group, "targets": (3.0, 2.0, 1.0), "curve": curve, "late_pct": 0.0, "void": "",
        "s_per_step": STEP_S, "up_kb": 1.0, "down_kb": 1.0, "cpu_s": 1.0, "peak_mb": 1.0, "commit": "c", "day": "2026-01-01",
    } | others


BOUNDS = [row("ideal", "none", 20.0), row("alone", "none", 50.0)]


def test_ratios_are_of_seconds_to_the_middle_target() -> None:
    rows = [
        *BOUNDS, row("auto", "100m-30ms", 24.0), row("auto", "10m-80ms", 30.0), row("auto", "1g-2ms", 21.0),
        row("DDP fp16", "100m-30ms", 48.0), row("DDP fp16", "1g-2ms", 20.0), row("DDP fp16", "10m-80ms", 600.0),
        row("torchft DiLoCo H=20", "10m-80ms", 45.0), row("int4", "100m-30ms", 30.0), row("int4 forward", "100m-30ms", 22.0),
    ]
    ratios = summary(rows)
    assert ratios["auto_vs_ideal_100m"] == pytest.approx(1.2)
    assert ratios["auto_vs_ideal_10m"] == pytest.approx(1.5)
    assert ratios["auto_vs_best_rival_100m"] == pytest.approx(2.0)
    assert ratios["auto_vs_best_rival_10m"] == pytest.approx(1.5)
    assert ratios["auto_vs_alone"] == pytest.approx(0.6)
    assert ratios["auto_vs_ddp_fp16_1g"] == pytest.approx(1.05)
    assert ratios["auto_vs_best_fixed_worst"] == pytest.approx(24 / 22)
    assert ratios["ideal_vs_alone_steps"] == pytest.approx(0.4)
    assert ratios["pace_kept"] is True
    assert (ratios["void_rows"], ratios["failed_rows"]) == (0, 0)


def test_who_does_not_get_there_is_never_there_or_counts_with_its_seconds() -> None:
    slow = row("auto", "10m-80ms", 100.0)
    assert summary([*BOUNDS, slow])["auto_vs_ideal_10m"] == "never"
    assert summary([*BOUNDS, slow, row("DDP fp16", "10m-80ms", 40.0)])["auto_vs_best_rival_10m"] == 0
    ratios = summary([*BOUNDS, row("auto", "10m-80ms", 30.0), row("DDP fp16", "10m-80ms", 600.0)])
    assert ratios["auto_vs_best_rival_10m"] == pytest.approx(2.0), "60 s had the rival: at least twice as long"


def test_losses_at_the_end_are_compared_at_equal_steps() -> None:
    bound = row("ideal", "none", 20.0, end_s=30.0)
    auto = row("auto", "100m-30ms", 20.0, end_s=30.0)
    assert summary([bound, auto])["final_loss_delta_pct"] == pytest.approx(0.0)
    # Half the speed: after 100 steps in 60 s it has the loss that the bound has after 100 steps in 30 s, and 1 % more.
    slower = [(n, 2 * s, loss * 1.01) for n, s, loss in auto["curve"]]
    assert summary([bound, auto | {"curve": slower}])["final_loss_delta_pct"] == pytest.approx(1.0)


def test_void_and_failed_rows_count_for_nothing_and_are_counted() -> None:
    void = row("auto", "100m-30ms", 10.0) | {"void": "9 % of passes late", "late_pct": 9.0}
    measured = ("curve", "void", "late_pct")
    failed = {key: value for key, value in row("hivemind", "100m-30ms", 1.0).items() if key not in measured}
    ratios = summary([*BOUNDS, void, failed | {"error": "boom"}])
    assert "auto_vs_ideal_100m" not in ratios
    assert (ratios["pace_kept"], ratios["void_rows"], ratios["failed_rows"]) == (False, 1, 1)
    assert shown(failed | {"error": "boom"})["void"] == "boom"


def test_a_store_goes_on_where_it_was(tmp_path: Path) -> None:
    path, one, two = tmp_path / "rows.jsonl", row("auto", "100m-30ms", 10.0), row("alone", "none", 50.0)
    store = Store(path)
    store.add(one)
    with path.open("a") as file:
        file.write(json.dumps(two)[:40])  # killed while it wrote
    again = Store(path)
    assert key_of(one) in again
    assert key_of(two) not in again
    again.add(two)
    assert {key_of(one), key_of(two)} == set(Store(path).rows)
    assert key_of(one | {"seconds": 45.0}) not in again, "another measurement"
    assert key_of(one | {"data": "other"}) not in again


def test_what_is_measured_follows_the_flags() -> None:
    quick = cells(True, None, None, None, None)
    named = {(cell.link, cell.system.name) for cell in quick}
    assert named >= {("none", "ideal"), ("none", "alone"), ("10m-80ms", "auto"), ("100m-30ms", "DDP fp16")}
    assert len(quick) == 12
    chosen = cells(False, ["digits"], ["trace"], ["auto", "ideal"], 2)
    assert [(c.task, c.link, c.system.name, c.seed) for c in chosen] == [
        ("digits", "none", "ideal", 0), ("digits", "none", "ideal", 1),
        ("digits", "trace", "auto", 0), ("digits", "trace", "auto", 1),
    ]
    full = cells(False, None, None, None, None)
    assert {cell.task for cell in full if cell.link == "trace"} == {"chars"}
    assert {cell.seed for cell in full if cell.system.name == "auto" and cell.link == "10m-80ms"} == {0, 1, 2}


# ---- The pictures of `bench tta` show what its table says: medians over seeds, of rows that stand

ROWS = [
    row("ideal", "none", 20.0), row("alone", "none", 50.0),
    *(row("auto", "10m-80ms", goal_s, seed=seed) for seed, goal_s in enumerate((59.0, 30.0, 40.0))),
    row("auto", "10m-80ms", 10.0, seed=3, void="the pace was not kept"),
    row("auto", "100m-30ms", 25.0, seed=2),
    *(row("int4", "10m-80ms", goal_s, seed=seed) for seed, goal_s in enumerate((100.0, 90.0))),
]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib, of the extra plot, is missing")
def test_both_pictures_are_drawn(tmp_path: Path) -> None:
    source = tmp_path / "tta.json"
    source.write_text(json.dumps({"rows": [shown(one) for one in ROWS]}))
    assert draw(source) == f"wrote {tmp_path / 'tta.png'}, {tmp_path / 'tta_bandwidth.png'}"
    source.write_text(json.dumps({"rows": [shown(row("auto", "10m-80ms", 30.0, void="late"))]}))
    assert draw(source) == "no picture: there is no row that stands"


# ---- pages show the stored rows of `bench tta`

@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.page.name}-{part.name}")
def test_pages_show_the_kept_rows(part: Part) -> None:
    page = part.page.read_text("utf-8")
    assert page == part.within(page, longest(Store(KEPT).rows.values())), "run `python -m bench.tta.page`"


def test_void_rows_count_for_nothing_beside_others_that_count() -> None:
    rows = [row("auto", "10m-80ms", goal_s, seed=seed) for seed, goal_s in enumerate((30.0, 40.0))]
    rows.append(row("auto", "10m-80ms", 59.0, seed=2, void="the pace was not kept"))
    (line,) = table(rows).splitlines()[2:]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[4:9] == ["2 (1 void)", "0.300", "0.000", "17.5", "35.0"]
    assert line.endswith("| 0.0 |")


def test_the_readme_shows_rows_of_the_overview() -> None:
    rows = [line for line in (ROOT / "README.md").read_text("utf-8").splitlines()
            if line.startswith(("| chars,", "| digits,", "| passages,"))]
    kept = overview(longest(Store(KEPT).rows.values())).splitlines()
    assert [row for row in rows if row not in kept] == []
    assert len(rows) > 4
