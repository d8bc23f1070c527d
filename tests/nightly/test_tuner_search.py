"""The tuner: spaces, the engine, stores that go on where a run stopped, the loss model, and the command with all of it."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

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
    spelled,
)
from commlayer.cli import main
from commlayer.cli.tune import load, read_space
from commlayer.demo import problem, tuning_tasks

SPACE = default_space()
BUDGET = 0.01


def synthetic(best_ratio: float, best_batch: int) -> tuner.Proxy:
    """Like a training: dense is slow, small ratios lose accuracy below some point, one batch is best."""

    def proxy(given: Settings) -> dict[str, float]:
        size, penalty = {"identity": (1.0, 0.0), "fp16": (0.5, 0.0), "int8": (0.25, 0.001)}.get(
            str(given["codec"]).split("(")[0], (0.6 * given["ratio"], 0.02 * max(0.0, math.log(best_ratio / given["ratio"])))
        )
        batch = 1 + 0.3 * math.log2(given["batch"] / best_batch) ** 2
        return {"seconds": batch * (1 + 8 * size), "loss": 2.0 * (1 + penalty)}

    return proxy


def search_for(tmp_path: Path, proxy: tuner.Proxy, made: Engine, trials: int = 30, seed: int = 0) -> list[TuningTrial]:
    search = Search("synthetic", SPACE, BUDGET, seed)
    store = Store(tmp_path / "trials.jsonl", search)
    list(tuner.tune(proxy, store, search, made, trials))
    return store.trials


@pytest.mark.parametrize(("ratio", "batch", "seed"), [(0.02, 128, 0), (0.005, 64, 1), (0.1, 256, 2), (0.0015, 128, 3)])
def test_within_five_per_cent_of_the_grid_in_thirty_trials(tmp_path: Path, ratio: float, batch: int, seed: int) -> None:
    proxy = synthetic(ratio, batch)
    trials = search_for(tmp_path, proxy, Engine(SPACE, seed), seed=seed)
    assert len(trials) == 30
    units = [[(i + 0.5) / 4 for i in range(4)], [i / 39 for i in range(40)], [(i + 0.5) / 3 for i in range(3)]]
    grid = [tuner.run(proxy, SPACE.at(list(u))) for u in itertools.product(*units)]
    floor = min(tuner.price(t, trials[0], BUDGET) for t in grid)
    assert min(tuner.price(t, trials[0], BUDGET) for t in trials) <= 1.05 * floor
    assert tuner.excess(tuner.best(trials, BUDGET), trials[0]) <= BUDGET


@pytest.mark.parametrize("flat", [False, True])
def test_no_trial_means_what_another_did_and_nothing_warns(tmp_path: Path, flat: bool) -> None:
    def proxy(given: Settings) -> dict[str, float]:
        return {"seconds": 1.0, "loss": 1.0} if flat else synthetic(0.02, 128)(given)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trials = search_for(tmp_path, proxy, Engine(SPACE, 5), 16)
    meant = [repr(sorted(spelled(t.settings).items())) for t in trials]
    assert len(set(meant)) == len(meant) == 16
    for seed in (5, 6):
        again = tmp_path / str(seed)
        again.mkdir()
        assert (search_for(again, proxy, Engine(SPACE, seed), 9)[1:] == trials[1:9]) is (seed == 5)


def test_a_space_that_is_used_up_gives_its_best_again() -> None:
    space = SearchSpace((Dimension("codec", choices=(DENSE, "int8()")),))
    engine = Engine(space, 0)
    for value, codec in ((2.0, DENSE), (1.0, "int8()")):
        engine.tell({"codec": codec}, value)
    assert engine.ask() == {"codec": "int8()"}


def test_a_resumed_search_goes_the_way_of_one_that_never_stopped(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    proxy = synthetic(0.02, 128)
    whole = search_for(tmp_path / "a", proxy, Engine(SPACE, 0), 14)
    search_for(tmp_path / "b", proxy, Engine(SPACE, 0), 9)
    with (tmp_path / "b" / "trials.jsonl").open("ab") as file:
        file.write(b'{"settings":{"batch"')  # a crash in the middle of a line
    assert search_for(tmp_path / "b", proxy, Engine(SPACE, 0), 14) == whole


def test_a_store_of_another_search_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "t", Search("digits", SPACE, 0.01))
    with pytest.raises(ValueError, match="budget.*--store.*E-TUNE-STORE") as caught:
        Store(tmp_path / "t", Search("digits", SPACE, 0.02))
    assert "\n" not in str(caught.value)


def test_settings_that_break_the_proxy_are_bad_settings(tmp_path: Path) -> None:
    inner = synthetic(0.02, 128)

    def proxy(given: Settings) -> dict[str, float]:
        if given["batch"] == 256:
            raise MemoryError("no room")
        return inner(given) if given["batch"] == 128 else {"seconds": math.nan, "loss": 1.0}

    trials = search_for(tmp_path, proxy, Engine(SPACE, 0), 25)
    assert {t.error.split(":")[0] for t in trials if t.error} == {"MemoryError", "got nan s and loss 1.0, allowed"}
    assert tuner.best(trials, BUDGET).settings["batch"] == 128
    assert sum(1 for t in trials if not t.error) > 8, "the search turns away from what fails"


def test_a_dense_run_that_fails_ends_it(tmp_path: Path) -> None:
    for wrong in ({"seconds": 1.0}, None, {"seconds": 1.0, "loss": None}, [1.0]):
        said = re.escape(f"the proxy returned {wrong!r}, needed is a dict such as {{\"seconds\": 3.1, \"loss\": 0.142}}")
        with pytest.raises(ValueError, match=f"{said}.*E-TUNE-BASELINE"):
            search_for(tmp_path, lambda _, wrong=wrong: wrong, Engine(SPACE, 0))
    trials = search_for(tmp_path, synthetic(0.02, 128), Engine(SPACE, 0), 3)
    assert [t.error for t in trials] == [""] * 3, "once the proxy is mended, the same command goes on with a dense run"
    assert trials[0].settings["codec"] == DENSE


def test_a_kept_dense_run_that_failed_is_not_compared_with(tmp_path: Path) -> None:
    store = Store(tmp_path / "trials.jsonl", Search("synthetic", SPACE, BUDGET))
    store.add(TuningTrial(tuner.first(SPACE), 0.0, 0.0, "MemoryError: no room"))
    with pytest.raises(ValueError, match=r"MemoryError: no room.*trials\.jsonl.*E-TUNE-BASELINE"):
        search_for(tmp_path, synthetic(0.02, 128), Engine(SPACE, 0), 3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_settings_that_mean_the_same_are_the_same(units: list[float]) -> None:
    found = SPACE.at(units)
    assert ("{ratio}" in found["codec"]) or found["ratio"] == 0.3
    assert all(0 <= x <= 1 for x in SPACE.coordinates(found))
    assert "{" not in tuner.spelled(found)["codec"]


def test_local_steps_and_staleness_join_where_asked_for(tmp_path: Path) -> None:
    assert default_space(local_steps=(1,)) == SPACE
    space = default_space(local_steps=(8, 2), staleness=True)
    search = Search("more", space, BUDGET)
    store = Store(tmp_path / "t", search)
    seen: list[Settings] = []

    def proxy(given: Settings) -> dict[str, float]:
        seen.append(given)
        return {"seconds": 1 + 1 / given["local_steps"] - 0.1 * given["stale"], "loss": 1.0}

    list(tuner.tune(proxy, store, search, Engine(space, 0), 12))
    assert (seen[0]["codec"], seen[0]["local_steps"], seen[0]["stale"]) == (DENSE, 1, False)
    assert {given["local_steps"] for given in seen} == {1, 2, 8}
    units = itertools.product([0.0], [0.5], [0.5], [0.1, 0.5, 0.9], [0.1, 0.9])
    inexact = {(s["local_steps"], s["stale"]) for s in (space.at(list(u)) for u in units)}
    assert inexact == {(1, 0), (1, 1), (2, 0), (8, 0)}, "the runtime runs no others"
    assert all(isinstance(given["stale"], bool) for given in seen)
    assert tuner.best(store.trials, BUDGET).settings["local_steps"] == 8
    assert Store(tmp_path / "t", search).trials == store.trials


def test_what_local_steps_lose_is_not_laid_upon_a_codec() -> None:
    def trial(codec: str, steps: int, loss: float) -> TuningTrial:
        return TuningTrial({"codec": codec, "ratio": 0.3, "batch": 64, "local_steps": steps}, 1.0, loss)

    trials = [trial(DENSE, 1, 0.5), trial("int8()", 4, 0.9), trial("topk(ratio={ratio})", 4, 0.9)]
    assert tuner.loss_model(trials).penalty("int8") == math.inf
    trials.append(trial(DENSE, 4, 0.8))
    assert tuner.loss_model(trials).penalty("int8") == pytest.approx(0.125)


# ---- the loss model


MODEL = LossModel((LossPoint("topk", 0.1, 0.001), LossPoint("topk", 0.01, 0.01), LossPoint("topk", 0.001, 0.004),
                   LossPoint("topk", 0.01, 0.02), LossPoint("int8", 1.0, 0.0)))


@pytest.mark.parametrize(("codec", "ratio", "penalty"), [
    ("topk", 0.1, 0.001), ("topk", 0.5, 0.001), ("topk", 0.01, 0.015), ("topk", 10**-1.5, 0.008),
    ("topk", 0.001, 0.015),  # noise made it look better than 0.01
    ("topk", 0.0005, math.inf), ("qsgd", 1.0, math.inf), ("int8", 1.0, 0.0),
    ("error_feedback(topk(ratio=0.01, values='int8'))", 0.1, 0.001),
])
def test_penalties_between_points(codec: str, ratio: float, penalty: float) -> None:
    assert MODEL.penalty(codec, ratio) == pytest.approx(penalty)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-4, 1), st.floats(0, 0.5)), min_size=1, max_size=8), st.floats(0, 0.6))
@example([(1.0, 1e-38), (0.5, 0.0), (0.25, 0.5)], 0.0)
def test_penalties_fall_with_the_ratio_and_budgets_are_kept(points: list[tuple[float, float]], budget: float) -> None:
    model = LossModel(tuple(LossPoint("topk", r, p) for r, p in points))
    ratios = [min(r for r, _ in points) * 1.3**i for i in range(40)]
    penalties = [model.penalty("topk", r) for r in ratios]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(penalties))
    least = model.least_ratio("topk", budget)
    if least is not None:
        assert model.penalty("topk", least) <= budget + 1e-9
    else:
        assert min(model.penalty("topk", r) for r, _ in points) > budget


def test_trials_make_a_loss_model(tmp_path: Path) -> None:
    trials = search_for(tmp_path, synthetic(0.02, 128), Engine(SPACE, 0), 20)
    model = tuner.loss_model(trials)
    loss_model.write(tmp_path / "loss.json", model)
    assert loss_model.read(tmp_path / "loss.json") == model
    assert {p.codec for p in model.points} == {"identity", "fp16", "int8", "topk"}
    assert model.penalty("identity") == 0.0
    least = min(p.ratio for p in model.points if p.codec == "topk")
    assert model.penalty("topk", least) == pytest.approx(0.02 * max(0.0, math.log(0.02 / least)), abs=1e-6)


@pytest.mark.parametrize(("dense_there", "penalty"), [(None, 0.2), (0.55, 1 / 11), (0.7, 0.0)])
def test_a_penalty_is_what_a_codec_loses_against_dense(dense_there: float | None, penalty: float) -> None:
    def trial(codec: str, batch: int, loss: float, ratio: float = 0.3) -> TuningTrial:
        return TuningTrial({"codec": codec, "ratio": ratio, "batch": batch}, 1.0, loss)

    there = [trial(DENSE, 64, dense_there)] if dense_there else []
    model = tuner.loss_model([trial(DENSE, 128, 0.5), trial("topk(ratio={ratio})", 64, 0.6, 0.001), *there])
    assert model.penalty("topk", 0.001) == pytest.approx(penalty)
    assert model.penalty("identity") == 0.0


# ---- the command


def test_its_help_loads_no_numbers() -> None:
    look = ("import sys; from commlayer.cli import main; sys.argv = ['commlayer', 'tune', '--help']\n"
            "try: main.run()\nexcept SystemExit: pass\nprint(sorted({'numpy', 'skopt', 'torch'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=True)
    assert "proxy runs" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


SCRIPT = """
def proxy(settings):
    small = "topk" in settings["codec"]
    return {"seconds": 1.0 if small else 3.0, "loss": 2.0}
"""


def test_the_command_goes_on_and_writes_a_loss_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SCRIPT)
    for trials, said, more in ((10, "best within 0.50%: topk", []), (12, "tune.jsonl: going on after 10 trials", []),
                               (12, "best within 2.00%: topk", ["--budget", "2%", "--store", "two.jsonl"]),
                               (12, "best within 2.00%: topk", ["--budget", "0.02", "--store", "two.jsonl"])):
        done = CliRunner().invoke(main.app, ["tune", "mine.py", "--trials", str(trials), *more])
        assert done.exit_code == 0, done.output
        assert said in done.output
    assert len(Path("tune.jsonl").read_text().splitlines()) == 13
    assert loss_model.read(Path("loss.json")).penalty("topk", 0.3) == 0.0


def test_the_command_searches_what_is_not_exact_where_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def proxy(s): return {'seconds': 4.0 / s['local_steps'] + (not s['stale']), 'loss': 2.0}")
    done = CliRunner().invoke(main.app, ["tune", "mine.py", "--trials", "8", "--local-steps", "4", "--staleness"])
    assert done.exit_code == 0, done.output
    first, *others = Path("tune.jsonl").read_text().splitlines()[1:]
    assert '"local_steps":1,' in first
    assert '"stale":0}' in first
    assert any('"local_steps":4,' in line for line in others)
    assert ", 4 local steps: 2 s, dense 5 s" in done.output


@pytest.mark.parametrize(("arguments", "text"), [
    (["nothing.py"], "nothing.py: .*E-USER-CODE"),
    (["nothing"], "nothing: .*digits, chars.*E-CLI-OPTION"),
    (["no.such:f"], "no.such:f: .*'no'.*E-USER-CODE"),
    (["math:tau"], "math:tau: .*E-USER-CODE"),
    (["digits", "--trials", "0"], "--trials 0: .*E-CLI-OPTION"),
    (["digits", "--budget", "0"], "--budget 0: .*E-CLI-OPTION"),
    (["digits", "--budget", "2"], "--budget 2: .*E-CLI-OPTION"),
    (["digits", "--budget", "0%"], "--budget 0%: .*E-CLI-OPTION"),
    (["digits", "--ratio", "5"], "--ratio '5': .*E-CLI-OPTION"),
    (["digits", "--ratio", "0.1:0.01"], "ratio: got 0.1 to 0.01.*E-TUNE-ARGUMENT"),
    (["digits", "--batch", "64,x"], "--batch '64,x': .*E-CLI-OPTION"),
    (["digits", "--local-steps", "1,0"], "--local-steps '1,0': .*E-CLI-OPTION"),
    (["digits", "--codec", "best()"], "--codec: .*'best'.*E-CODEC-NAME"),
    (["digits", "--out", "/nowhere/loss.json"], "/nowhere/loss.json: .*/nowhere .*E-CLI-OPTION"),
])
def test_misuse_is_one_line_and_code_2(arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["commlayer", "tune", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.run()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert re.search(rf"{text}\]$", said)
    assert said.count("\n") == 1


def test_a_script_that_does_not_load_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    with pytest.raises(ValueError, match=r"broken\.py: ModuleNotFoundError: .*'nothing_of_that_name'.*E-USER-CODE"):
        load(str(tmp_path / "broken.py"))


def test_proxies_are_repeatable_and_learn() -> None:
    proxy = load("digits")
    assert read_space(("int8()",), "0.01:0.1", "256").dimensions[2].choices == (256,)
    runs: list[Any] = [proxy({"codec": codec, "batch": 256}) for codec in (DENSE, DENSE, "topk(ratio=0.05,values='int8')")]
    assert runs[0] == runs[1]
    assert runs[0]["loss"] < math.log(10)
    assert runs[2]["seconds"] < runs[0]["seconds"]


def test_proxies_step_locally_and_use_late_results() -> None:
    proxy = load("digits")
    exact, local, late = (proxy({"codec": DENSE, "batch": 256} | more)
                          for more in ({"local_steps": 1, "stale": False}, {"local_steps": 4}, {"stale": True}))
    assert proxy({"codec": DENSE, "batch": 256}) == exact
    assert max(local["seconds"], late["seconds"]) < exact["seconds"]
    assert len({exact["loss"], local["loss"], late["loss"]}) == 3
    assert max(local["loss"], late["loss"]) < 0.5 * math.log(10)


@pytest.mark.parametrize("steps", [4, 7])
def test_local_steps_of_a_worker_alone_are_steps(steps: int) -> None:
    task, data = problem.mlp(8, 0), problem.digits(0)
    found = [
        tuning_tasks.train(tuning_tasks.TuningTask(deepcopy(task), tuning_tasks.picker(*data.train), data.test, 640, 0.1),
                           {"codec": DENSE, "batch": 32, "local_steps": n}, tuning_tasks.SimulatedCluster(workers=1))
        for n in (1, steps)
    ]
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-4)
    assert found[1]["seconds"] < found[0]["seconds"]
