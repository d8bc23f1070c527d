"""`commlayer top`, metrics, their server, and trackers: how a job's events are shown."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.event_stream import START, stream

from commlayer.cli.watch.top_screen import event_line, screen, summary, worker_lines
from commlayer.errors import InvalidInput
from commlayer.integrations.tracking import log_to, scalars
from commlayer.observe import events
from commlayer.observe.job.job_view import JobView
from commlayer.observe.pages.metrics import exposition
from commlayer.observe.pages.page import page_state


def view_at(seconds: float, world: int = 3) -> JobView:
    view = JobView()
    for event in stream(world):
        if event.time <= START + seconds:
            view.apply(event)
    return view


def shown(view: JobView, seconds: float, width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(screen(view, START + seconds, width=width, height=height))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_screen_fits_and_shows_the_essentials(width: int) -> None:
    lines = shown(view_at(19), 19, width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24
    assert "waiting for home-2, which sends no heartbeats, 10 of 60 s" in text
    assert re.search(r"home-2 +silent", text)
    assert re.search(r"home-0 +trains +95", text)
    assert "sent 44 MB, received 44 MB" in text
    assert "50%" not in text  # of the batch: a third each
    assert "33%" in text


@pytest.mark.parametrize(("over_alone", "forecast", "auto_times", "line"), [
    (0.58, 0.6, 2.4, "slower than one machine alone: 0.58x; sync='auto' would be 2.4x as fast"),
    (0.7, 0.0, 0.0, "slower than one machine alone: 0.70x"), (1.2, 0.9, 0.0, ""), (0.97, 1.2, 0.0, ""), (0.0, 0.0, 0.0, "")])
def test_job_slower_than_a_single_machine_is_marked(
    over_alone: float, forecast: float, auto_times: float, line: str,
) -> None:
    view = view_at(10)
    view.apply(events.AloneEvent(time=START + 10, rank=0, over_alone=over_alone, forecast=forecast, auto_times=auto_times))
    lines = [each for each in shown(view, 10) if "than one machine alone" in each]
    assert lines == ([line] if line else [])
    assert [each for each in page_state(view, START + 10)["waits"] if "alone" in each] == lines
    assert any(f"speed against one machine alone: {over_alone:.3g} x" in each for each in shown(view, 10)) == (over_alone > 0)


@pytest.mark.parametrize("height", [12, 24, 50])
def test_screen_of_64_members_fits_and_shows_those_that_need_attention(height: int) -> None:
    lines = shown(view_at(19, 64), 19, height=height)
    assert len(lines) <= max(height, 18)
    assert any("home-63" in line and "silent" in line for line in lines)
    assert any("more" in line for line in lines)


def test_plain_lines_when_output_is_a_pipe() -> None:
    view, lines = JobView(), list[str]()
    for event in stream():
        view.apply(event)
        lines += [event_line(view, event)]
    text = "\n".join(filter(None, lines))
    assert text.count("home-0 joined") == 1
    assert text.count("waiting for home-2, which sends no heartbeats, 4 of 60 s") == 1
    assert text.count("no longer waiting for home-2") == 1
    assert "worker 1: connection lost [E-PEER-LOST]" in text
    assert re.search(r"^\d\d:\d\d:\d\d step 145, .*2 of 3 workers", summary(view, START + 31))
    assert len(list(worker_lines(view, START + 31))) == 3


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "events.jsonl").write_bytes(b"".join(events.encode(event) + b"\n" for event in stream()))
    return tmp_path


def test_replay_shows_the_chosen_time(commlayer: Any, run_folder: Path) -> None:
    code, output, _ = commlayer("top", "--replay", str(run_folder), "--at", "19", "--once")
    assert code == 0
    assert "waiting for home-2, which sends no heartbeats, 10 of 60 s" in output
    assert "is dead" not in output
    assert "home-1 is dead" in commlayer("top", "--replay", str(run_folder / "events.jsonl"))[1]


def test_folder_is_shown_once_without_following(commlayer: Any, run_folder: Path) -> None:
    code, output, _ = commlayer("top", str(run_folder), "--once")
    assert code == 0
    assert "2 of 3 workers" in output.splitlines()[0], "the state, without the events before it"


@pytest.mark.parametrize(("arguments", "code"), [
    ([], "E-CLI-OPTION"),
    (["FOLDER", "--replay", "FOLDER"], "E-CLI-OPTION"),
    (["--replay", "FOLDER", "--at", "1000"], "E-CLI-OPTION"),
    (["--replay", "FOLDER", "--page", "8080"], "E-CLI-OPTION"),
    (["FOLDER", "--once", "--page", "8080"], "E-CLI-OPTION"),
    (["/nonexistent"], "E-EVENTS"),
    (["--replay", "/nonexistent"], "E-EVENTS"),
    (["EMPTY"], "E-EVENTS"),
    (["--replay", "EMPTY"], "E-EVENTS"),
    (["host:port"], "E-ADDRESS"),
    (["127.0.0.1:9"], "E-SECRET"),
    (["10.0.0.1:7000"], "E-PLAIN-TEXT"),
])
def test_top_errors_are_one_line_with_a_code(commlayer: Any, run_folder: Path, tmp_path: Path, arguments: list[str], code: str,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir(exist_ok=True)
    for name in ("COMMLAYER_TOKEN", "COMMLAYER_KEYS", "COMMLAYER_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    words = {"FOLDER": str(run_folder), "EMPTY": str(tmp_path / "empty")}
    status, _, error = commlayer("top", *(words.get(each, each) for each in arguments))
    assert status == 2
    assert f"[{code}]" in error
    assert error.count("\n") == 1


SAMPLE = re.compile(r'^commlayer_[a-z_]+(\{([a-z]+="(\\.|[^"\\])*",?)*\})? -?\d[\d.e+-]*$')


def test_metrics_use_the_prometheus_format() -> None:
    text = exposition(view_at(99), START + 31)
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        assert SAMPLE.match(line), line
        name = line.partition("{")[0]
        assert name in kinds or name.removesuffix("_sum").removesuffix("_count") in kinds
        assert (kinds.get(name) == "counter") == name.endswith("_total")
    assert 'commlayer_step_total{run="5f0c2a91d3e4b687",rank="0",host="home-0"} 140.0' in text
    for state, count in {"expected": 3.0, "present": 2.0, "waiting": 0.0}.items():
        assert f'commlayer_members{{run="5f0c2a91d3e4b687",state="{state}"}} {count}' in text
    assert 'plan="1a2b3c4d5e6f7081",every="8",codec="int4()"} 1.0' in text
    assert "commlayer_guard_cosine_ratio" in text
    assert exposition(JobView(), START)  # of a job that has not begun


def test_dashboard_queries_only_existing_metrics() -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "how-to" / "grafana.json").read_text())
    there = set(re.findall(r"^# TYPE (\S+)", exposition(view_at(19), START + 19) + exposition(view_at(99), START + 31), re.M))
    there |= {f"{name}{suffix}" for name in there for suffix in ("_sum", "_count")}
    there.add("commlayer_plan_changes_total")
    asked = {name for panel in dashboard["panels"] for target in panel.get("targets", [])
             for name in re.findall(r"commlayer_\w+", target["expr"])}
    assert len(asked) >= 10
    assert asked <= there


class FakeSession:
    step = 0

    def metrics(self) -> dict[str, float]:
        return {"steps": 3, "sent_nbytes": 2e6, "exposed_s": 0.5}


def test_counters_are_one_flat_dict_with_slashes() -> None:
    assert scalars(FakeSession()) == {"comm/steps": 3.0, "comm/sent_MB": 2.0, "comm/exposed_s": 0.5}


def test_values_reach_each_kind_of_tracker() -> None:
    session, rows = FakeSession(), list[Any]()
    board = SimpleNamespace(add_scalar=lambda name, value, step: rows.append((step, name, value)))
    tracker = SimpleNamespace(log=lambda values, step: rows.append((step, values["loss"])))
    for writer in (board, tracker, lambda values, step: rows.append((step, values["loss"])), None):
        log = log_to(session, writer, every=2, prefix="")
        for session.step in (1, 2):
            log(loss=0.25)
    assert rows == [(2, "steps", 3.0), (2, "sent_MB", 2.0), (2, "exposed_s", 0.5), (2, "loss", 0.25), (2, 0.25), (2, 0.25)]


@pytest.mark.parametrize("arguments", [{"writer": 5}, {"writer": None, "every": 0}])
def test_unsupported_trackers_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        log_to(FakeSession(), **arguments)
    assert refused.value.code == "E-ARGUMENT"
