"""Races: tasks are learnable functions of a seed, clocks keep their pace, and rows become the figures of the pages."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import Unmeasurable
from bench.paced.pace import BACKWARD_S, FORWARD_S, Pace
from bench.report import PAGE, ROOT
from bench.tasks import TASKS
from bench.tta import shown
from bench.tta.links import NO_LINK, named
from bench.tta.page import page
from bench.tta.store import key_of, stored
from bench.tta.summary import summary
from bench.tta.systems import SYSTEMS


def test_passes_take_their_time_and_waiting_is_not_made_up_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    pace = Pace(model, list(model), slow=0.5)
    waited_s = 0.0

    def late_weights(*_: object) -> None:
        time.sleep(waited_s)

    def step() -> tuple[float, float]:
        pace.forward()
        begin = time.perf_counter()
        loss = model(torch.ones(1, 4)).sum()
        middle = time.perf_counter()
        pace.backward()
        loss.backward()
        return middle - begin, time.perf_counter() - middle

    forward_s, backward_s = step()
    assert forward_s >= 0.5 * FORWARD_S
    assert backward_s >= 0.5 * BACKWARD_S
    # Like a system that is added last: its hook runs before all others.
    model[2].register_forward_pre_hook(late_weights, prepend=True)
    waited_s = 0.2
    assert step()[0] >= 0.5 * FORWARD_S + waited_s
    assert pace.passes == 4


COMPARED = ("chars", "digits", "passages")


@pytest.mark.parametrize("name", COMPARED)
def test_a_batch_is_a_function_of_rank_step_and_seed(name: str) -> None:
    task, again = TASKS[name](), TASKS[name]()
    assert all(torch.equal(a, b) for a, b in zip(task.batch(1, 2, 3), again.batch(1, 2, 3), strict=True))
    others = [task.batch(*numbers)[0] for numbers in ((0, 2, 3), (1, 3, 3), (1, 2, 4))]
    assert not any(torch.equal(task.batch(1, 2, 3)[0], other) for other in others)
    assert task.digest() == again.digest()
    assert len({TASKS[other]().digest() for other in COMPARED}) == len(COMPARED)


def test_rivals_train_without_commlayer() -> None:
    code = "import sys, bench.paced.worker, bench.paced.rivals; sys.exit('commlayer' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


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
        "s_per_step": STEP_S, "up_kb": 1.0, "down_kb": 1.0, "commit": "c", "day": "2026-01-01",
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
    store = stored(path)
    store.add(one)
    with path.open("a") as file:
        file.write(json.dumps(two)[:40])  # killed while it wrote
    again = stored(path)
    assert key_of(one) in again.rows
    assert key_of(two) not in again.rows
    again.add(two)
    assert {key_of(one), key_of(two)} == set(stored(path).rows)
    assert key_of(one | {"seconds": 45.0}) not in again.rows, "another measurement"
    assert key_of(one | {"data": "other"}) not in again.rows


def test_the_page_shows_the_kept_rows() -> None:
    text = PAGE.read_text("utf-8")
    assert text == page(text), "run `python -m bench.tta.page`"


def test_a_race_has_more_hosts_only_where_all_are_alike() -> None:
    assert named("10m-80ms", 8).hosts == 8
    assert named(NO_LINK, 8).stretched(3.0).slow == (3.0,) * 8
    assert named("trace").hosts == 4
    for link, hosts in (("trace", 8), ("one slow peer", 2), ("uneven compute", 8), ("10m-80ms", 0)):
        with pytest.raises(Unmeasurable, match=f"--hosts {hosts}: .*{link}"):
            named(link, hosts)
    plain = row("auto", "10m-80ms", 20.0)
    assert key_of(plain) == key_of(plain | {"hosts": 4, "stretch": 1.0}) != key_of(plain | {"hosts": 8})
