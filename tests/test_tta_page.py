"""What the pages say of `bench tta` is what its kept rows have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_tta_summary import row

from bench.tta.page import BEGIN, END, KEPT, PAGES, overview, table
from bench.tta.store import Store, longest
from commlayer.files import between


@pytest.mark.parametrize(("path", "made"), PAGES.items(), ids=lambda value: getattr(value, "name", ""))
def test_pages_show_the_kept_rows(path: Path, made: Callable[[Any], str]) -> None:
    page = path.read_text("utf-8")
    assert page == between(page, BEGIN, END, made(longest(Store(KEPT).rows.values()))), "run `python -m bench.tta.page`"


def test_a_line_is_the_median_over_seeds_and_says_what_counts_for_nothing() -> None:
    rows = [row("auto", "10m-80ms", goal_s, seed=seed) for seed, goal_s in enumerate((30.0, 50.0, 40.0))]
    (line,) = table(rows).splitlines()[2:]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[1:9] == ["chars", "10 Mb/s, 80 ms", "auto", "3", "0.300", "20.0", "40.0", "60.0"]
    (line,) = table([row("auto", "10m-80ms", 90.0, void="the pace was not kept")]).splitlines()[2:]
    assert [cell.strip() for cell in line.split("|")][6:9] == ["45.0", "-", "-"]
    assert line.endswith("| 0.0, void |")


def test_void_rows_count_for_nothing_beside_others_that_count() -> None:
    rows = [row("auto", "10m-80ms", goal_s, seed=seed) for seed, goal_s in enumerate((30.0, 40.0))]
    rows.append(row("auto", "10m-80ms", 59.0, seed=2, void="the pace was not kept"))
    (line,) = table(rows).splitlines()[2:]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[4:8] == ["2 (1 void)", "0.300", "17.5", "35.0"]
    assert line.endswith("| 0.0 |")


def test_beside_auto_stands_what_a_user_would_have_had() -> None:
    link = "100m-30ms"
    rows = [row("auto", link, 30.0), row("ideal", "none", 20.0), row("alone", "none", 200.0), row("DDP fp16", link, 50.0),
            row("hivemind", link, 58.0), row("DeMo-like", link, 55.0), row("int4 forward", link, 28.0),
            row("DDP fp16", "10m-80ms", 50.0)]
    (line,) = overview(rows).splitlines()[2:]
    assert line == ("| chars, 100 Mb/s, 30 ms | 10 / 20 | above 60 / above 60 | 25 / 50 | 28 / 55 (DeMo-like) | "
                    "14 / 28 (int4 forward) | 15 / 30 |")


def test_a_page_without_a_place_for_rows_is_named() -> None:
    with pytest.raises(ValueError, match="the page has no <!-- rows: begin --> before a <!-- rows: end -->"):
        between("# Nothing", BEGIN, END, "")
