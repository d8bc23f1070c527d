"""The tuner: spaces, the search, stores that resume, the loss model, and the `commlayer tune` command."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commlayer.balance import loss_model, tuner
from commlayer.balance.loss_model import LossModel, LossPoint
from commlayer.balance.tuner import (
    DENSE,
    Dimension,
    Engine,
    Search,
    SearchSpace,
    Settings,
    Store,
    TuningTrial,
    default_space,
    proxy_settings,
)
from commlayer.cli.tune import load, read_space
from commlayer.demo import problem
from examples import tuning_tasks

SPACE = default_space()
BUDGET = 0.01


def synthetic(best_ratio: float = 0.02, best_batch: int = 128) -> tuner.Proxy:
    """Like a training: dense is slow, small ratios lose accuracy below some point, one batch is best."""

    def proxy(given: Settings) -> dict[str, float]:
        size, penalty = {"identity": (1.0, 0.0), "fp16": (0.5, 0.0), "int8": (0.25, 0.001)}.get(
            str(given["codec"]).split("(")[0], (0.6 * given["ratio"], 0.02 * max(0.0, math.log(best_ratio / given["ratio"])))
        )
        batch = 1 + 0.3 * math.log2(given["batch"] / best_batch) ** 2
        return {"seconds": batch * (1 + 8 * size), "loss": 2.0 * (1 + penalty)}

    return proxy


def searched(
    folder: Path, proxy: tuner.Proxy, trials: int = 30, seed: int = 0, space: SearchSpace = SPACE,
) -> list[TuningTrial]:
    """All trials in the folder's store after a search for that number."""
    folder.mkdir(exist_ok=True)
    search = Search("synthetic", space, BUDGET, seed)
    store = Store(folder / "trials.jsonl", search)
    list(tuner.tune(proxy, store, search, Engine(space, seed), trials))
    return store.trials


@pytest.mark.parametrize(("ratio", "batch", "seed"), [(0.02, 128, 0), (0.005, 64, 1), (0.1, 256, 2), (0.0015, 128, 3)])
def test_thirty_trials_reach_the_grid_optimum_within_five_percent(tmp_path: Path, ratio: float, batch: int, seed: int) -> None:
    proxy = synthetic(ratio, batch)
    trials = searched(tmp_path, proxy, seed=seed)
    assert len(trials) == 30
    units = [[(i + 0.5) / 4 for i in range(4)], [i / 39 for i in range(40)], [(i + 0.5) / 3 for i in range(3)]]
    grid = [tuner.run(proxy, SPACE.at(list(u))) for u in itertools.product(*units)]
    least_s = min(t.seconds for t in grid if t.loss <= (1 + BUDGET) * trials[0].loss)
    best = tuner.best(trials, BUDGET)
    assert best.loss <= (1 + BUDGET) * trials[0].loss
    assert best.seconds <= 1.05 * least_s


@pytest.mark.parametrize(("ratio", "batch"), [(0.02, 256), (0.005, 64), (0.0015, 128)])
@pytest.mark.parametrize(("method", "trials"), [("bayesian", 16), ("nelder-mead", 32)])
def test_both_methods_find_the_optimum_of_a_known_surface(method: str, trials: int, ratio: float, batch: int) -> None:
    engine = Engine(SearchSpace((Dimension("ratio", 0.001, 0.3), Dimension("batch", choices=(32, 64, 128, 256, 512, 1024)))), 0,
                    method)
    seconds, seen = [], set()
    for _ in range(trials):
        given = engine.ask()
        seen.add((given["ratio"], given["batch"]))
        seconds.append(1.0 + math.log(given["ratio"] / ratio) ** 2 + math.log2(given["batch"] / batch) ** 2)
        engine.tell(given, math.log(seconds[-1]))
    assert min(seconds) < 1.05
    assert len(seen) == trials, "no settings twice"


@pytest.mark.parametrize("flat", [False, True])
def test_trials_are_distinct_and_seeds_reproducible(tmp_path: Path, flat: bool) -> None:
    proxy: tuner.Proxy = (lambda _: {"seconds": 1.0, "loss": 1.0}) if flat else synthetic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trials = searched(tmp_path, proxy, 16, seed=5)
    assert len({repr(sorted(proxy_settings(t.settings).items())) for t in trials}) == len(trials) == 16
    for seed in (5, 6):
        assert (searched(tmp_path / str(seed), proxy, 9, seed)[1:] == trials[1:9]) is (seed == 5)


def test_exhausted_space_returns_its_best() -> None:
    engine = Engine(SearchSpace((Dimension("codec", choices=(DENSE, "int8()")),)), 0)
    for value, codec in ((2.0, DENSE), (1.0, "int8()")):
        engine.tell({"codec": codec}, value)
    assert engine.ask() == {"codec": "int8()"}


def test_settings_that_fail_the_proxy_count_as_bad(tmp_path: Path) -> None:
    def proxy(given: Settings) -> dict[str, float]:
        if given["batch"] == 256:
            raise MemoryError("no room")
        return synthetic()(given) if given["batch"] == 128 else {"seconds": math.nan, "loss": 1.0}

    trials = searched(tmp_path, proxy, 25)
    assert {t.error.split(":")[0] for t in trials if t.error} == {"MemoryError", "got nan s and loss 1.0, allowed"}
    assert tuner.best(trials, BUDGET).settings["batch"] == 128
    assert sum(not t.error for t in trials) > 8, "the search avoids what fails"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_equivalent_coordinates_give_equal_settings(units: list[float]) -> None:
    result = SPACE.at(units)
    assert ("{ratio}" in result["codec"]) or result["ratio"] == 0.3
    assert all(0 <= x <= 1 for x in SPACE.coordinates(result))
    assert "{" not in proxy_settings(result)["codec"]


def test_local_steps_and_staleness_are_searched_on_request(tmp_path: Path) -> None:
    assert default_space(local_steps=(1,)) == SPACE
    space, seen = default_space(local_steps=(8, 2), staleness=True), list[Settings]()

    def proxy(given: Settings) -> dict[str, float]:
        seen.append(given)
        return {"seconds": 1 + 1 / given["local_steps"] - 0.1 * given["stale"], "loss": 1.0}

    trials = searched(tmp_path, proxy, 12, space=space)
    assert (seen[0]["codec"], seen[0]["local_steps"], seen[0]["stale"]) == (DENSE, 1, False)
    assert {given["local_steps"] for given in seen} == {1, 2, 8}
    units = itertools.product([0.0], [0.5], [0.5], [0.1, 0.5, 0.9], [0.1, 0.9])
    modes = {(s["local_steps"], s["stale"]) for s in (space.at(list(u)) for u in units)}
    assert modes == {(1, 0), (1, 1), (2, 0), (8, 0)}, "the engine runs no others"
    assert all(isinstance(given["stale"], bool) for given in seen)
    assert tuner.best(trials, BUDGET).settings["local_steps"] == 8


def test_resumed_search_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    complete = searched(tmp_path / "a", synthetic(), 14)
    searched(tmp_path / "b", synthetic(), 9)
    with (tmp_path / "b" / "trials.jsonl").open("ab") as file:
        file.write(b'{"settings":{"batch"')  # a crash in the middle of a line
    assert searched(tmp_path / "b", synthetic(), 14) == complete


def test_store_of_another_search_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "t", Search("digits", SPACE, 0.01))
    with pytest.raises(ValueError, match="budget.*--store.*E-TUNE-STORE") as caught:
        Store(tmp_path / "t", Search("digits", SPACE, 0.02))
    assert "\n" not in str(caught.value)


def test_no_comparison_without_a_dense_run(tmp_path: Path) -> None:
    for wrong in ({"seconds": 1.0}, None, {"seconds": 1.0, "loss": None}, [1.0]):
        with pytest.raises(ValueError, match=f"{re.escape(repr(wrong))}, .*E-TUNE-BASELINE"):
            searched(tmp_path, lambda _, wrong=wrong: wrong)  # type: ignore[misc]
    trials = searched(tmp_path, synthetic(), 3)
    assert [t.error for t in trials] == [""] * 3, "once the proxy is mended, the same command begins with a dense run"
    assert trials[0].settings["codec"] == DENSE
    store = Store(tmp_path / "failed.jsonl", Search("synthetic", SPACE, BUDGET))
    store.add(TuningTrial(tuner.first(SPACE), 0.0, 0.0, "MemoryError: no room"))
    with pytest.raises(ValueError, match=r"MemoryError: no room.*failed\.jsonl.*E-TUNE-BASELINE"):
        list(tuner.tune(synthetic(), store, Search("synthetic", SPACE, BUDGET), Engine(SPACE, 0), 3))


MODEL = LossModel((LossPoint("topk", 0.1, 0.001), LossPoint("topk", 0.01, 0.01), LossPoint("topk", 0.001, 0.004),
                   LossPoint("topk", 0.01, 0.02), LossPoint("int8", 1.0, 0.0)))


@pytest.mark.parametrize(("codec", "ratio", "penalty"), [
    ("topk", 0.1, 0.001), ("topk", 0.5, 0.001), ("topk", 0.01, 0.015), ("topk", 10**-1.5, 0.008),
    ("topk", 0.001, 0.015),  # noise made it look better than 0.01
    ("topk", 0.0005, math.inf), ("qsgd", 1.0, math.inf), ("int8", 1.0, 0.0),
    ("error_feedback(topk(ratio=0.01, values='int8'))", 0.1, 0.001),
])
def test_penalties_are_interpolated(codec: str, ratio: float, penalty: float) -> None:
    assert MODEL.penalty(codec, ratio) == pytest.approx(penalty)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-4, 1), st.floats(0, 0.5)), min_size=1, max_size=8), st.floats(0, 0.6))
@example([(1.0, 1e-38), (0.5, 0.0), (0.25, 0.5)], 0.0)
def test_penalties_fall_with_the_ratio_and_budgets_are_met(points: list[tuple[float, float]], budget: float) -> None:
    model = LossModel(tuple(LossPoint("topk", r, p) for r, p in points))
    penalties = [model.penalty("topk", min(r for r, _ in points) * 1.3**i) for i in range(40)]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(penalties))
    least = model.least_ratio("topk", budget)
    if least is not None:
        assert model.penalty("topk", least) <= budget + 1e-9
    else:
        assert min(model.penalty("topk", r) for r, _ in points) > budget


def test_trials_make_a_loss_model(tmp_path: Path) -> None:
    model = tuner.loss_model(searched(tmp_path, synthetic(), 20))
    loss_model.write(tmp_path / "loss.json", model)
    assert loss_model.read(tmp_path / "loss.json") == model
    assert {p.codec for p in model.points} == {"identity", "fp16", "int8", "topk"}
    assert model.penalty("identity") == 0.0
    least = min(p.ratio for p in model.points if p.codec == "topk")
    assert model.penalty("topk", least) == pytest.approx(0.02 * max(0.0, math.log(0.02 / least)), abs=1e-6)


def trial(codec: str, loss: float, **given: Any) -> TuningTrial:
    return TuningTrial({"codec": codec, "ratio": 0.3, "batch": 64} | given, 1.0, loss)


@pytest.mark.parametrize(("dense_loss", "penalty"), [(None, 0.2), (0.55, 1 / 11), (0.7, 0.0)])
def test_penalty_is_relative_to_the_dense_run_of_the_same_batch(dense_loss: float | None, penalty: float) -> None:
    dense = [trial(DENSE, dense_loss)] if dense_loss else []
    model = tuner.loss_model([trial(DENSE, 0.5, batch=128), trial("topk(ratio={ratio})", 0.6, ratio=0.001), *dense])
    assert model.penalty("topk", 0.001) == pytest.approx(penalty)
    assert model.penalty("identity") == 0.0


def test_penalty_of_local_steps_is_not_attributed_to_a_codec() -> None:
    trials = [trial(DENSE, 0.5, local_steps=1), trial("int8()", 0.9, local_steps=4)]
    assert tuner.loss_model(trials).penalty("int8") == math.inf
    trials.append(trial(DENSE, 0.8, local_steps=4))
    assert tuner.loss_model(trials).penalty("int8") == pytest.approx(0.125)


def test_command_resumes_and_writes_a_loss_model(commlayer: Any) -> None:
    Path("mine.py").write_text("def proxy(s): return {'seconds': 1.0 if 'topk' in s['codec'] else 3.0, 'loss': 2.0}")
    for trials, line, more in ((10, "best within 0.50%: topk", []), (12, "tune.jsonl: continuing after 10 trials", []),
                               (12, "best within 2.00%: topk", ["--budget", "2%", "--store", "two.jsonl"]),
                               (12, "best within 2.00%: topk", ["--budget", "0.02", "--store", "two.jsonl"])):
        code, out, errors = commlayer("tune", "mine.py", "--trials", str(trials), *more)
        assert code == 0, errors
        assert line in out + errors
    assert len(Path("tune.jsonl").read_text().splitlines()) == 13
    assert loss_model.read(Path("loss.json")).penalty("topk", 0.3) == 0.0


def test_command_searches_local_steps_and_staleness(commlayer: Any) -> None:
    Path("mine.py").write_text("def proxy(s): return {'seconds': 4.0 / s['local_steps'] + (not s['stale']), 'loss': 2.0}")
    code, out, errors = commlayer("tune", "mine.py", "--trials", "8", "--local-steps", "4", "--staleness")
    assert code == 0, errors
    first, *others = Path("tune.jsonl").read_text().splitlines()[1:]
    assert '"local_steps":1,' in first
    assert '"stale":0}' in first
    assert any('"local_steps":4,' in line for line in others)
    assert ", 4 local steps: 2 s, dense 5 s" in out


def test_proxies_are_reproducible_and_learn() -> None:
    proxy = load("examples/tuning_tasks.py:digits")
    assert read_space(("int8()",), "0.01:0.1", "256").dimensions[2].choices == (256,)
    runs: list[Any] = [proxy({"codec": codec, "batch": 256}) for codec in (DENSE, DENSE, "topk(ratio=0.05,values='int8')")]
    assert runs[0] == runs[1]
    assert runs[0]["loss"] < math.log(10)
    assert runs[2]["seconds"] < runs[0]["seconds"]
    exact, local, stale = (proxy({"codec": DENSE, "batch": 256} | more)
                           for more in ({"local_steps": 1, "stale": False}, {"local_steps": 4}, {"stale": True}))
    assert exact == runs[0]
    assert max(local["seconds"], stale["seconds"]) < exact["seconds"]
    assert len({exact["loss"], local["loss"], stale["loss"]}) == 3
    assert max(local["loss"], stale["loss"]) < 0.5 * math.log(10)


@pytest.mark.parametrize("steps", [4, 7])
def test_local_steps_of_one_worker_are_steps(steps: int) -> None:
    task, data = problem.mlp(8, 0), problem.digits(0)
    plain, local = (
        tuning_tasks.train(tuning_tasks.TuningTask(deepcopy(task), tuning_tasks.picker(*data.train), data.test, 640, 0.1),
                           {"codec": DENSE, "batch": 32, "local_steps": n}, tuning_tasks.SimulatedCluster(workers=1))
        for n in (1, steps)
    )
    assert local["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert local["seconds"] < plain["seconds"]
