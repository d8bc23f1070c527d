"""What a demo may be asked for, and its arithmetic: units, refusals, the shape of its links, the ring's bound, the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from commlayer.demo.fleet import Progress
from commlayer.demo.report import notes, results, ring_bound_s
from commlayer.demo.settings import CODEC, DemoSettings, read_settings
from commlayer.transport.shaped_links import parse_shape


def settings(**given: Any) -> DemoSettings:
    asked = {"workers": 4, "link": "100Mb", "rtt_ms": 30.0, "codec": CODEC, "quick": False}
    return read_settings(**{**asked, **given})


@pytest.mark.parametrize("change", [
    {"link": "100"}, {"link": "-1Mb"}, {"link": "0.5Mb"}, {"link": "101Gb"}, {"link": "100/20Mb"}, {"rtt_ms": -1.0},
    {"rtt_ms": float("nan")}, {"rtt_ms": 10001.0}, {"workers": 1}, {"workers": 17}, {"codec": "topq()"},
])
def test_what_is_not_allowed_is_named(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=rf"^--{name.removesuffix('_ms')}\b.*\[E-[A-Z-]+\]$"):
        settings(**change)


def test_a_round_trip_is_both_hosts_delays_there_and_back(tmp_path: Path) -> None:
    made = msgspec.structs.replace(settings(workers=3, link="8Mb", rtt_ms=40.0), folder=str(tmp_path))
    links = parse_shape(made.shape(0))
    try:
        assert len(links.hosts) == 3
        nbytes = 1000  # 1 ms at 8 Mb/s
        out = links.send(0, 100.0, nbytes)
        there = links.receive(0, 1, out, nbytes)
        assert there == pytest.approx(100.001 + made.rtt_s / 2)
    finally:
        links.close()


@pytest.mark.parametrize(("workers", "nbytes", "bps", "one_way_s", "bound_s"), [
    (2, 1_000_000, 8e6, 0.0, 1.0),  # half there, half back
    (4, 1_000_000, 8e6, 0.0, 1.5),
    (4, 0, 8e6, 0.015, 0.09),
    (4, 2_252_820, 1e8, 0.015, 0.3603384),
    (1, 1_000_000, 8e6, 0.015, 0.0),
])
def test_ring_bound(workers: int, nbytes: int, bps: float, one_way_s: float, bound_s: float) -> None:
    assert ring_bound_s(workers, nbytes, bps, one_way_s) == pytest.approx(bound_s)


DENSE = Progress(0, 100, 0.1, 0.97, 40.0, 39.0, 200_000_000)
SPARSE = Progress(1, 120, 0.1, 0.98, 8.0, 6.0, 3_000_000)


def test_figures_of_two_runs_that_reached_the_target() -> None:
    found = results(settings(), 1_126_410, [DENSE, SPARSE], [True, True])
    dense, bound, compressed = found["rows"]
    assert [row["run"] for row in found["rows"]] == ["dense", "bound", "compressed"]
    assert (dense["speedup"], compressed["speedup"]) == (1.0, 5.0)
    assert (compressed["step_nbytes"], compressed["exposed"]) == (25_000, 0.75)
    assert bound["train_s"] == pytest.approx(100 * 0.3603384)
    assert found["summary"]["speedup_over_bound"] == pytest.approx(100 * 0.3603384 / 8)
    assert "4.50x" in notes(settings(), found, native=True)


@pytest.mark.parametrize("reached", [(True, False), (False, True), (False, False)])
def test_a_run_that_missed_the_target_is_not_compared(reached: tuple[bool, bool]) -> None:
    found = results(settings(), 1_126_410, [DENSE, SPARSE], list(reached))
    assert found["summary"]["speedup"] is None
    assert found["rows"][2]["speedup"] is None
    assert " as fast " not in notes(settings(), found, native=True)
