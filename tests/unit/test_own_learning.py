"""`python -m bench.own_learning TASK FILE`: what ways cost in steps on a task of one's own, and that plans are made by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import commlayer
from bench import own_learning
from commlayer.cli.main import run
from commlayer.config import Config
from commlayer.engine.plan_choice import settle
from commlayer.errors import code_of
from commlayer.plan_file import inputs_of
from commlayer.planner import builtin, tables
from commlayer.planner.convergence import LearningRow
from commlayer.planner.tables import LearningTable, Provenance, read, rows_in, written

TASK = """
import torch
from torch import nn


def task(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), {extra}nn.Tanh(), nn.Linear(16, 2))
    truth = torch.randn(6, 2, generator=torch.Generator().manual_seed(9))
    held = torch.randn(64, 6, generator=torch.Generator().manual_seed(8))

    def batches(rank, world):
        drawn = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            x = torch.randn(8, 6, generator=drawn)
            yield x, x @ truth
            {ends}

    def loss(model, batch):
        return {loss}

    def validation(model):
        with torch.no_grad():
            return {held}

    return {made}
"""
WHOLE = "dict(model=model, optimizer=lambda m: torch.optim.{optimizer}(m.parameters(), lr=0.02), batches=batches, loss=loss, " \
        "validation=validation)"
HELD = "float(nn.functional.mse_loss(model(held), held @ truth))"
LOSS = "nn.functional.mse_loss(model(batch[0]), batch[1])"


def task_file(folder: Path, optimizer: str = "AdamW", *, extra: str = "", loss: str = LOSS, returned: str = WHOLE,
              held: str = HELD, ends: str = "") -> Path:
    path = folder / "mine.py"
    task = returned.format(optimizer=optimizer)
    path.write_text(TASK.format(extra=extra, loss=loss, made=task, held=held, ends=ends), "utf-8")
    return path


def told(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["commlayer", *arguments])
    code: object = 0
    try:
        run()
    except SystemExit as end:
        code = end.code
    output = capsys.readouterr()
    return int(str(code or 0)), output.out, output.err


def test_rows_are_measured_on_ones_own_task_and_plans_are_made_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    out, plan = tmp_path / "rows.json", tmp_path / "plan.json"
    options = ["--steps", "24", "--codec", "int4()", "--local-steps", "2"]
    assert own_learning.main([str(task_file(tmp_path)), str(out), *options]) == 0
    output = capsys.readouterr().out
    result = read(out)
    assert [(row.optimizer, row.codes, row.codec, row.every, row.overlap) for row in result.rows] == [
        ("adam", "gradients", "int4()", 1, ""), ("adam", "updates", "int4()", 1, ""), ("adam", "updates", "int4()", 1, "round"),
        ("adam", "updates", "int4()", 2, ""), ("adam", "updates", "int4()", 2, "round"),
        ("adam", "gradients", "identity()", 1, "")]
    assert [row.workers for row in result.rows] == [0, 0, 0, 0, 0, 1]
    assert "one worker by itself" in output
    assert result.provenance.tasks[0].startswith("your proxy: ")
    assert result.provenance.runs == 7
    assert f"6 rows in {out}" in output
    code, output, errors = told(["plan", "create", "lstm", "--nodes", "4xrtx3060@20/20Mb", "--learning", str(out), "--out",
                               str(plan)], monkeypatch, capsys)
    assert (code, errors) == (0, "")
    assert inputs_of(plan).learning == result.rows, "explain, whatif and diff go by them, too"
    assert "x steps: from one seed of your own task" in output
    code, _, errors = told(["plan", "whatif", "--plan", str(plan), "--bandwidth", "20Mb"], monkeypatch, capsys)
    assert (code, errors) == (0, "")


def table(path: Path, **costs: float) -> Path:
    """Of the first steps' codecs alone, by their loss."""
    rows = tuple(LearningRow("adam", "gradients", codec, 1, "", False, 0, 1 + cost, 1 + cost, cost, cost, 1, 1)
                 for codec, cost in (("int4()", costs["int4"]), ("int8()", costs["int8"])))
    path.write_bytes(written(LearningTable(Provenance("2026-01-02", "commlayer tune", 2, ("your proxy",), "2.6", "x"), rows)))
    return path


def test_a_job_begins_by_its_own_table(tmp_path: Path) -> None:
    bad, good = table(tmp_path / "bad.json", int4=0.5, int8=0.001), table(tmp_path / "good.json", int4=0.001, int8=0.001)
    first = [settle("auto", builtin("lstm"), Config(learning=str(path), max_loss=0.05), 4, 1, optimizer="adam").buckets[0].codec
             for path in (bad, good)]
    assert ["int8" in first[0], "int4" in first[1]] == [True, True]
    assert tables.learning_rows(str(bad)) is rows_in(bad), "one object, since looks are kept by it"
    assert tables.learning_rows() is tables.rows()
    model = torch.nn.Linear(2, 2)
    session = commlayer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), config={"learning": str(bad)})
    assert session.inspect.connection.terms.learning == str(bad), "where planning of a running job looks it up"
    session.close()


@pytest.mark.parametrize(("task", "more", "line"), [
    ({"extra": "nn.BatchNorm1d(16), "}, [], "1.running_mean"),
    ({"held": "None"}, [], "mine.py: validation returned NoneType"),
    ({"held": "model(held)"}, [], "mine.py: validation returned Tensor of 128"),
    ({"ends": "return"}, [], "mine.py: the batches of rank 0 ended after 1"),
    ({"loss": "None"}, [], "returned NoneType as its loss"),
    ({"held": "0.0"}, [], "mine.py: validation returned 0, "),
    ({"held": "-1.5"}, [], "mine.py: validation returned -1.5"),
    ({"held": "model(batch)"}, [], "mine.py: validation: NameError: name 'batch' is not defined"),
    ({"loss": "model(batch[1]).sum()"}, [], "mine.py: loss: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ({"ends": "raise KeyError(rank)"}, [], "mine.py: batches: KeyError: 0"),
    ({"optimizer": "AdamV"}, [], "mine.py: optimizer: AttributeError: module 'torch.optim' has no attribute 'AdamV'"),
    ({"returned": "None"}, [], "mine.py: task(0) returned NoneType"),
    ({"returned": "dict(model=model)"}, [], "mine.py: task(0) returned a dict without optimizer, batches, loss, validation"),
    ({"returned": "dict(model=model, optimizer=1, batches=batches, loss=loss, validation=validation)"}, [],
     "mine.py: task(0): its optimizer is of type int"),
    ({"returned": "1 / 0"}, [], "mine.py: task(0): ZeroDivisionError: division by zero"),
    ({"optimizer": "Rprop"}, [], "its optimizer is of no family"),
    ({}, ["--codec", "int5()"], "int5"),
])
def test_what_cannot_be_measured_is_one_line(
    task: dict[str, str], more: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "rows.json"
    assert own_learning.main([str(task_file(tmp_path, **task)), str(out), *more]) == 2
    errors = capsys.readouterr().err
    assert line in errors
    assert code_of(errors) == ("E-CODEC-NAME" if more else "E-USER-CODE"), errors
    assert len(errors.strip().splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(("text", "line"), [
    ('{"rows": []}', "`version`"), ('{"version": 1, "rows": [], "more": 2}', "`more`"), ("no JSON", "JSON"),
])
def test_a_table_of_another_form_is_one_line_with_a_remedy(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=f"learning table {path}: .*{line}.*{path}.*E-LEARNING-TABLE") as told:
        read(path)
    assert "\n" not in str(told.value)


def test_a_table_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    absent = tmp_path / "none.json"
    with pytest.raises(ValueError, match=f"{absent}: No such file.*E-LEARNING-TABLE"):
        settle("auto", builtin("lstm"), Config(learning=str(absent)), 4, 1)
    words = ["plan", "create", "lstm", "--nodes", "2xrtx3060@1Gb", "--learning", str(absent)]
    code, _, errors = told(words, monkeypatch, capsys)
    assert code == 2
    assert str(absent) in errors
    assert errors.endswith("[E-LEARNING-TABLE]\n")
