"""What the pages say of `bench tta` is what its kept rows have."""

from __future__ import annotations

import pytest
from support.tta import row

from bench.tta.page import KEPT, PARTS, ROOT, Part, figures, overview, table
from bench.tta.store import Store, longest
from bench.tta.summary import AIMS, summary


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.page.name}-{part.name}")
def test_pages_show_the_kept_rows(part: Part) -> None:
    page = part.page.read_text("utf-8")
    assert page == part.within(page, longest(Store(KEPT).rows.values())), "run `python -m bench.tta.page`"


def test_a_line_is_the_median_over_seeds_and_says_what_counts_for_nothing() -> None:
    rows = [row("auto", "10m-80ms", goal_s, seed=seed) for seed, goal_s in enumerate((30.0, 50.0, 40.0))]
    (line,) = table(rows).splitlines()[2:]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[1:10] == ["chars", "10 Mb/s, 80 ms", "auto", "3", "0.300", "0.000", "20.0", "40.0", "60.0"]
    assert cells[11:16] == ["1", "1", "1", "1", "0.0"]
    (line,) = table([row("auto", "10m-80ms", 90.0, void="the pace was not kept")]).splitlines()[2:]
    assert [cell.strip() for cell in line.split("|")][7:10] == ["45.0", "-", "-"]
    assert line.endswith("| 0.0, void |")


def test_void_rows_count_for_nothing_beside_others_that_count() -> None:
    rows = [row("auto", "10m-80ms", goal_s, seed=seed) for seed, goal_s in enumerate((30.0, 40.0))]
    rows.append(row("auto", "10m-80ms", 59.0, seed=2, void="the pace was not kept"))
    (line,) = table(rows).splitlines()[2:]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[4:9] == ["2 (1 void)", "0.300", "0.000", "17.5", "35.0"]
    assert line.endswith("| 0.0 |")


def test_beside_auto_stands_what_a_user_would_have_had() -> None:
    link = "100m-30ms"
    rows = [row("auto", link, 30.0), row("ideal", "none", 20.0), row("alone", "none", 200.0), row("DDP fp16", link, 50.0),
            row("hivemind", link, 58.0), row("DeMo-like", link, 55.0), row("int4 forward", link, 28.0),
            row("DDP fp16", "10m-80ms", 50.0)]
    (line,) = overview(rows).splitlines()[2:]
    assert line == ("| chars, 100 Mb/s, 30 ms | 10 / 20 | above 60 / above 60 | 25 / 50 | 28 / 55 (DeMo-like) | "
                    "14 / 28 (int4 forward) | 15 / 30 |")


def told(rows: list[dict[str, object]]) -> dict[str, list[str]]:
    """The cells behind the first of each line."""
    lines = [line for line in figures(rows).splitlines()[2:] if line.startswith("|")]
    return {cells[1]: cells[2:-1] for cells in ([cell.strip() for cell in line.split("|")] for line in lines)}


def test_the_summary_says_what_is_wanted_what_was_measured_and_where_it_is_worst() -> None:
    rows = [row("ideal", "none", 20.0), row("alone", "none", 50.0), row("ideal", "none", 20.0, task="digits"),
            *(row("auto", "100m-30ms", goal_s, seed=seed) for seed, goal_s in enumerate((24.0, 26.0, 22.0))),
            row("auto", "100m-30ms", 30.0, task="digits"), row("hivemind", "100m-30ms", 36.0)]
    found = told(rows)
    assert set(found) == {*(aim.key for aim in AIMS), "pace_kept", "void_rows, failed_rows"}
    assert {key for key, cells in found.items() if cells[2] != "not measured"} == {
        key for key in (*summary(rows), "void_rows, failed_rows") if key not in ("void_rows", "failed_rows")}
    assert found["auto_vs_ideal_100m"][1:] == ["<= 1.25", "1.50 (missed)", "2", "digits, 100 Mb/s, 30 ms (1 seed)"]
    assert found["auto_vs_best_rival_100m"][1:] == [">= 1.5", "1.50", "1", "chars, 100 Mb/s, 30 ms (3 seeds)"]
    assert found["ideal_vs_alone_steps"][1:] == ["<= 0.5", "0.40", "1", "chars (1 seed)"]
    assert found["auto_vs_ideal_10m"][1:] == ["<= 1.6", "not measured", "0", ""]
    assert found["pace_kept"][1:] == ["yes", "yes", "8 rows", "chars, ideal: 0.0 %"]


def test_what_a_single_seed_cannot_judge_is_said_by_what_loses_nothing() -> None:
    bound, halves = row("ideal", "none", 20.0), row("DDP fp16", "1g-2ms", 20.0)
    above = [(step, s, loss * 1.04) for step, s, loss in halves["curve"]]
    assert "DDP fp16 at 1 Gb/s, which loses next to nothing, ends +4.0 % on chars (1 seed)" in figures(
        [bound, halves | {"curve": above}])
    assert "DDP fp16 at 1 Gb/s, " not in figures([bound])


def test_the_readme_shows_rows_of_the_overview() -> None:
    rows = [line for line in (ROOT / "README.md").read_text("utf-8").splitlines()
            if line.startswith(("| chars,", "| digits,", "| passages,"))]
    kept = overview(longest(Store(KEPT).rows.values())).splitlines()
    assert [row for row in rows if row not in kept] == []
    assert len(rows) > 4


def test_a_page_without_a_place_for_rows_is_named() -> None:
    with pytest.raises(ValueError, match="<!-- rows: begin --> .*<!-- rows: end -->.*E-ARGUMENT"):
        PARTS[1].within("# Nothing", [])
