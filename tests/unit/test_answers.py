"""Answers about a running job, its story in sentences, its costs, and alerts."""

from __future__ import annotations

import http.server
import json
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.commands import assert_error
from support.coordinators import until
from support.event_stream import START, stream

from commlayer.cli.serve import _costs_file
from commlayer.config import Config
from commlayer.engine.buckets.current_step import Counters
from commlayer.engine.buckets.units import Units
from commlayer.engine.job.run_events import RunEvents
from commlayer.last_run import folder, list_remembered
from commlayer.observe import events, power
from commlayer.observe.event_log import EventLog
from commlayer.observe.events import (
    AloneEvent,
    CheckpointEvent,
    CostEvent,
    Event,
    JobEvent,
    LogEvent,
    MemberEvent,
    PlanEvent,
    PowerEvent,
    StepEvent,
    WaitEvent,
    WhatIfEvent,
)
from commlayer.observe.job import alerts
from commlayer.observe.job.alerts import MOST, Alert, Alerts, Receiver, causes, parse_receiver
from commlayer.observe.job.answers import UNKNOWN, answers
from commlayer.observe.job.costs import PENDING_S, Costs
from commlayer.observe.job.job_view import JobView
from commlayer.observe.job.story import Story
from commlayer.observe.job.watcher import Watcher
from commlayer.observe.pages.page import report
from commlayer.observe.power import gpu_watts

ENDS = [MemberEvent(time=START + 50, member=f"worker {number}", state="left") for number in range(3)]


def view_of(*found: Event, world: int = 2) -> JobView:
    view = JobView()
    for number in range(world):
        view.apply(MemberEvent(time=START, member=f"worker {number}", name=f"home-{number}"))
    for event in found:
        view.apply(event)
    return view


def step(rank: int = 0, at: float = 10.0, **fields: Any) -> StepEvent:
    return StepEvent(time=START + at, rank=rank, **{"step": 100, "steps": 10, "step_s": 0.5, **fields})


@pytest.mark.parametrize(("found", "place", "expected"), [
    ([], 0, (UNKNOWN, 0.0)),
    ([AloneEvent(over_alone=1.234)], 0, ("1.23 x", 0.0)),
    ([], 1, (UNKNOWN, 0.0)),
    ([step(total=300)], 1, ("0:01:40", START + 120)),
    ([step(total=100)], 1, ("0:00:00", 0.0)),
    ([step(total=300, step_s=0.0)], 1, (UNKNOWN, 0.0)),
    ([step(), *ENDS[:2]], 1, ("finished", START + 50)),
    ([step(), ENDS[0], MemberEvent(time=START + 60, member="worker 1", state="dead", reason="x")], 1, ("failed", START + 60)),
    ([step(), MemberEvent(member="worker 1", state="dead", reason="x", continues=True), ENDS[0]], 1, ("finished", START + 50)),
    ([MemberEvent(time=START + 60, member=f"worker {n}", state="left", reason="x") for n in (0, 1)], 1, ("failed", START + 60)),
    ([step(sent_bytes=5)], 2, (UNKNOWN, 0.0)),
    ([CostEvent(month="2026-11", sent_bytes=2_500_000_000, busiest="home-1")], 2, ("2.5 GB", 0.0)),
    ([CostEvent(rank=1, month="2026-11", sent_bytes=2_500_000_000)], 2, (UNKNOWN, 0.0)),
    ([CostEvent(month="2026-11")], 3, (UNKNOWN, 0.0)),
    ([CostEvent(month="2026-11", kwh=1.5, kwh_price=0.3)], 3, ("1.5 kWh", 0.0)),
    ([CostEvent(month="2026-11", kwh=1.5), JobEvent(run="another")], 3, (UNKNOWN, 0.0)),
    ([], 4, ("none", 0.0)),
    ([MemberEvent(time=START + 5, member="worker 1", state="dead", reason="x")], 4, ("home-1", START + 5)),
    ([MemberEvent(time=START + 5, member="worker 1", state="left", reason="x")], 4, ("home-1", START + 5)),
    ([MemberEvent(time=START + 5, member="worker 1", state="left")], 4, ("none", 0.0)),
    ([MemberEvent(time=START + 5, member="worker 1", state="dead"), MemberEvent(member="worker 2", name="home-1")], 4,
     ("none", 0.0)),
    ([WaitEvent(time=START + 18, what="heartbeat", names=("worker 1",), waited_s=9.0)], 4, ("home-1", START + 9)),
    ([], 5, (UNKNOWN, 0.0)),
    ([WhatIfEvent(rank=0, home_times=1.3, uplink_times=1.2)], 5, ("one more home", 0.0)),
    ([WhatIfEvent(rank=0, home_times=1.3, uplink_times=1.6, names=("worker 1",))], 5, ("twice the uplink of home-1", 0.0)),
    ([WhatIfEvent(rank=0, home_times=1.3, uplink_times=1.6), AloneEvent(auto_times=2.0)], 5, ("local steps: sync='auto'", 0.0)),
    ([WhatIfEvent(rank=0, home_times=1.04, uplink_times=0.9)], 5, ("nothing", 0.0)),
    ([WhatIfEvent(rank=1, home_times=1.3)], 5, (UNKNOWN, 0.0)),
    ([MemberEvent(member="worker 0", state="dead", continues=True), WhatIfEvent(rank=1, home_times=1.3)], 5,
     ("one more home", 0.0)),
])
def test_answers(found: Sequence[Event], place: int, expected: tuple[str, float]) -> None:
    answer = answers(view_of(*found), START + 20)[place]
    assert (answer.text, answer.at) == (expected[0], pytest.approx(expected[1]))


def test_pause_is_the_reason_of_a_missing_home() -> None:
    why = "its home ben (pid 7) has left: pauses until 22:00"
    found = answers(view_of(MemberEvent(time=START, member="worker 1", state="left", reason=why, continues=True)), START)
    assert found[4].more == "since {at}: pauses until 22:00"


def test_price_and_the_busiest_machine_are_in_the_answers() -> None:
    costs = CostEvent(month="2026-11", busiest="home-1", busiest_bytes=3_000_000_000, kwh=2.0, kwh_price=0.3)
    found = answers(view_of(costs), 0)
    assert "home-1" in found[2].more
    assert "3 GB" in found[2].more
    assert "0.6 at 0.3 per kWh" in found[3].more


def told(*found: Event) -> list[str]:
    story = Story()
    story.apply(JobEvent(time=START, run="a", name="train.py", world=2))
    for number in range(2):
        story.apply(MemberEvent(time=START, member=f"worker {number}", name=f"home-{number}"))
    return [sentence for event in found for sentence in story.apply(event)]


@pytest.mark.parametrize(("found", "expected"), [
    ([JobEvent(run="b", name="train.py", world=3)], ["train.py began with 3 workers."]),
    ([JobEvent(run="a", rank=1, host="home-1", world=2)], []),
    ([step()], []),
    ([MemberEvent(member="home c", name="c", state="waiting")], ["c waits for the others."]),
    ([MemberEvent(member="worker 2", name="home-2")], ["home-2 joined."]),
    ([MemberEvent(member="worker 1", state="left", reason="its connection ended", continues=True)],
     ["home-1 left: its connection ended. The others train on."]),
    ([MemberEvent(member="worker 1", state="dead", reason="no heartbeat for 60.0 s")],
     ["home-1 was lost: no heartbeat for 60.0 s."]),
    ([MemberEvent(member="worker 1", state="dead", continues=True), MemberEvent(member="worker 2", name="home-1")],
     ["home-1 was lost. The others train on.", "home-1 joined again."]),
    ([step(1), MemberEvent(member="worker 1", state="left")], ["home-1 finished."]),
    ([MemberEvent(member="server 0", state="left")], ["server 0 left."]),
    ([WaitEvent(what="heartbeat", names=("worker 1",), waited_s=waited_s, limit_s=60.0) for waited_s in (5.0, 10.0)],
     ["The job waits for home-1, which sends no heartbeats, at most 60 s."]),
    ([WaitEvent(names=("worker 1",)), WaitEvent(names=("worker 1",), over=True)],
     ["The job waits for home-1.", "The wait for home-1 is over."]),
    ([WaitEvent(what="join", names=("worker 2",))], ["The job waits for worker 2 to join."]),
    ([PlanEvent(rank=0, digest="1a2b3c4d5e", reason="automatic", summary="12 buckets")],
     ["The plan is now 1a2b3c4d (automatic): 12 buckets."]),
    ([LogEvent(rank=1, text="step 8: links carry")], []),
    ([AloneEvent(rank=0, over_alone=times) for times in (1.31, 1.5, 1.2)],
     ["The job reaches a loss 1.31 times as fast as its fastest machine alone."]),
    ([CheckpointEvent(rank=0, step=100, directory="d")], ["Checkpoint saved at step 100 in d."]),
    ([LogEvent(rank=1, text="the loss is nan at step 7", level="warning")], ["home-1: the loss is nan at step 7."]),
    ([step(at=60.0, loss=2.5), *ENDS[:2]],
     ["home-0 finished.", "home-1 left.", "The run is done: 100 steps in 0:01:00. The last loss is 2.5."]),
    ([MemberEvent(time=START + 9, member="worker 0", state="dead", reason="a", continues=True),
      MemberEvent(time=START + 9, member="worker 1", state="left", reason="b")],
     ["home-0 was lost: a. The others train on.", "home-1 left: b.",
      "The run failed after 0 steps and 0:00:09: home-1: b; home-0: a."]),
    ([MemberEvent(time=START + 9, member=f"worker {number}", state="left", reason="no memory") for number in (0, 1)],
     ["home-0 left: no memory.", "home-1 left: no memory.",
      "The run failed after 0 steps and 0:00:09: home-0: no memory; home-1: no memory."]),
])
def test_story(found: Sequence[Event], expected: list[str]) -> None:
    assert told(*found) == expected


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "events.jsonl").write_bytes(b"".join(events.encode(event) + b"\n" for event in [*stream(), *ENDS[::2]]))
    return tmp_path


def test_log_command_prints_the_story(commlayer: Any, run_folder: Path) -> None:
    code, output, errors = commlayer("log", str(run_folder))
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert all(line[2] == ":" and line[5] == " " and line[-1] in ".]" for line in lines), lines
    assert lines[0].endswith("train.py began with 3 workers.")
    assert "home-1 was lost: no heartbeat for 60.0 s. The others train on." in output
    assert "The run is done: 145 steps in 0:00:50." in lines[-1]


@pytest.mark.parametrize("arguments", [
    ["serve", "--join", "127.0.0.1:9", "--alert", "ntfy://topic"], ["serve", "--join", "127.0.0.1:9", "--watts", "9"],
    *(["serve", "--workers", "2", "--alert", text] for text in (
        "", "ntfy://", "https://", "http:///x", "https://[", "https://host:port/", "mailto:", "mailto:a", "mailto:a@b,c@d",
        "mailto:-x@", "no-such-program --x", "'open", "ftp://host/x"))])
def test_bad_options_are_one_line(commlayer: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLAYER_TOKEN", "a-secret-that-is-long-enough")
    assert_error(commlayer(*arguments), "E-CLI-OPTION")


def test_missing_run_is_one_line(commlayer: Any) -> None:
    assert_error(commlayer("log", "/nonexistent"), "E-EVENTS")


def test_report_says_nothing_about_waiting_after_the_end() -> None:
    waits = [WaitEvent(time=START + 29, rank=0, names=("worker 2",)), MemberEvent(time=START, member="home c", state="waiting")]
    for found in ([*stream(trouble=False), *waits], [*stream(trouble=False), *waits, *ENDS]):
        text = report(found).decode()
        data = text.partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
        final = json.loads(data)["states"][-1]
        assert final["over"]
        assert "wait" not in json.dumps([final[name] for name in ("answers", "waits", "failures", "others")])
        assert {worker["state"] for worker in final["workers"]} <= {"trains", "left", "no end"}


# What a job costs.

def counted(costs: Costs, *found: Event, world: int = 2) -> CostEvent | None:
    view = view_of(JobEvent(time=START, run="a"), world=0)
    for number in range(world):
        view.apply(MemberEvent(time=START, member=f"worker {number}", name=f"home-{number}"))
    for event in found:
        view.apply(event)
        costs.apply(view, event)
    return costs.event


def test_each_server_counts_in_its_own_file_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _costs_file(Config(cache=""), "keys") is None
    here = Config(cache=str(tmp_path / "c"))
    files = {_costs_file(config, keys) for config in (here, structs.replace(here, port=7000)) for keys in ("", "a", "b")}
    assert len(files) == 6
    assert {file.parent for file in files if file} == {tmp_path / "c" / "costs"}
    default = _costs_file(Config(cache="auto"), "")
    assert default is not None
    assert default.is_relative_to(tmp_path / "commlayer")
    Costs(default).save()
    assert list_remembered(folder("auto")) == [], "it is no plan of a job, so it is not removed with them"


def test_bytes_of_the_month_outlive_the_server_and_are_counted_once(tmp_path: Path) -> None:
    file, found = tmp_path / "new" / "costs.json", [step(0, 1, up_bytes=5), step(1, 1, up_bytes=7, down_bytes=1)]
    first = Costs(file)
    assert counted(first) is None
    counted(first, *found)
    first.save()
    again = Costs(file)
    total = counted(again, *found, step(0, 2, up_bytes=100))  # workers send their events again
    assert total is not None
    assert (total.month, total.sent_bytes, total.received_bytes) == (
        time.strftime("%Y-%m", time.localtime(START)), 112, 1)
    assert (total.busiest, total.busiest_bytes) == ("home-0", 105)
    later = counted(again, step(0, 40 * 86400, up_bytes=3))
    assert later is not None
    assert (later.sent_bytes, later.busiest) == (3, "home-0")
    file.write_text("damaged")
    assert Costs(file).event is None


@pytest.mark.parametrize(("watts", "found", "kwh"), [
    (0.0, [step(0), step(1)], 5.0 * 0),  # unknown
    (360.0, [step(0), step(1)], 2 * 5 * 360 / 3.6e6),
    (0.0, [step(0), PowerEvent(rank=0, watts=100.0), PowerEvent(rank=1, watts=60.0), step(0, 20), step(1, 20)],
     (10 * 100 + 5 * 60) / 3.6e6),
    (0.0, [PowerEvent(rank=0, watts=100.0), step(0), step(1, steps=1, step_s=PENDING_S + 1)], 0.0),
    (0.0, [PowerEvent(rank=0, watts=9.0), step(0), PowerEvent(rank=0), step(0, 20, steps=1, step_s=PENDING_S + 1)], 0.0),
])
def test_energy(watts: float, found: Sequence[Event], kwh: float) -> None:
    first = [step(number, 1, up_bytes=1, step_s=0.0) for number in (0, 1)]
    total = counted(Costs(watts=watts, kwh_price=0.3), *first, *found)
    assert total is not None
    assert (total.kwh, total.kwh_price) == (pytest.approx(kwh), 0.3)


@pytest.mark.parametrize(("says", "watts"), [("100.5\\n60.5", 161.0), ("[N/A]", 0.0), ("", 0.0)])
def test_power_of_gpus(tmp_path: Path, says: str, watts: float) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    program.chmod(0o755)
    assert gpu_watts(str(program)) == watts
    assert gpu_watts(str(tmp_path / "absent")) == 0.0


def test_power_meter_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nif [ -e {tmp_path}/failed ]; then echo 90; else touch {tmp_path}/failed; exit 1; fi\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(power, "EVERY_S", 0.01)
    log = EventLog(retains=True)
    with closing(power.PowerMeter(log)):
        until(lambda: len(log.since(0).lines) >= 2, "two events about power")
    found = [event.watts for line in log.since(0).lines if isinstance(event := events.decode(line), PowerEvent)]
    assert found[:2] == [0.0, 90.0]


# Alerts.

@pytest.mark.parametrize(("event", "expected"), [
    (MemberEvent(member="worker 1", state="dead"), [("missing", "worker 1")]),
    (MemberEvent(member="worker 1", state="left", reason="x"), [("missing", "worker 1")]),
    (MemberEvent(member="worker 1", state="left"), []),
    (MemberEvent(member="worker 1", state="left", reason="pauses until 22:00"), []),
    (MemberEvent(member="server 1", state="dead"), []),
    (WaitEvent(what="heartbeat", names=("worker 1",), waited_s=5.0), []),
    (WaitEvent(what="heartbeat", names=("worker 1",), waited_s=31.0), [("missing", "worker 1")]),
    (WaitEvent(what="step", names=("worker 1",), waited_s=31.0), []),
    (LogEvent(rank=0, level="warning", text="the loss is nan at step 5"), [("loss", "")]),
    (LogEvent(rank=0, level="warning", text="the loss is -inf at step 5"), [("loss", "")]),
    (LogEvent(rank=0, level="warning", text="the loss is 3 at step 5"), []),
    (LogEvent(rank=0, text="the loss is nan at step 5"), []),
])
def test_causes_of_alerts(event: Event, expected: list[tuple[str, str]]) -> None:
    assert list(causes(view_of(event), event)) == expected


@pytest.mark.parametrize(("reason", "cause"), [("", "done"), ("no memory", "failed")])
def test_end_of_the_run_is_a_cause(reason: str, cause: str) -> None:
    end = MemberEvent(member="worker 1", state="left", reason=reason)
    first = MemberEvent(member="worker 0", state="left", reason=reason)
    assert list(causes(view_of(first, end), end)) == [(cause, "")]


def test_message_about_a_loss_is_recognized() -> None:
    stream = RunEvents()
    stream.loss(float("nan"))
    stream.step(7, time.perf_counter(), Counters(), Units(1))
    line = stream.log.since(0).lines[0]
    event = events.decode(line)
    assert isinstance(event, LogEvent)
    assert list(causes(view_of(event), event)) == [("loss", "")]


class Webhook:
    """A local server that keeps what is posted to it. `hangs`: it does not answer before close()."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.got, end = list[tuple[str, bytes]](), threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
                if hangs:
                    end.wait(60)
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._end, self._server = end, http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook?key=private"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._end.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with closing(Webhook()) as hook:
        yield hook


LOST = MemberEvent(time=START + 20, member="worker 1", state="dead", reason="no heartbeat", continues=True)


def test_watcher_tells_each_cause_once_and_counts(webhook: Webhook, tmp_path: Path) -> None:
    log, mark = EventLog(retains=True), tmp_path / "told"
    command = shlex.join([sys.executable, "-c", f"import sys; open({str(mark)!r}, 'a').write(sys.argv[1])"])
    members = [MemberEvent(time=START, member=f"worker {number}", name=f"h{number}") for number in range(2)]
    for event in [JobEvent(time=START, run="a"), *members, step(0, up_bytes=9), LOST, LOST]:
        log.append(event)
    receivers = [parse_receiver(webhook.url), parse_receiver(command)]
    with closing(Watcher(log, Costs(watts=100.0), Alerts(receivers, every_s=0.0))):
        until(lambda: len(webhook.got) == 1, "the alert has arrived")
        log.append(LOST)
        log.append(ENDS[0])
    assert [path for path, _ in webhook.got] == ["/hook?key=private"] * 2
    lost, done = (json.loads(body) for _, body in webhook.got)
    text = "h1 was lost: no heartbeat. The others train on."
    assert lost == {"cause": "missing", "text": text, "run": "a", "time": START + 20}
    assert done["cause"] == "done"
    assert mark.read_text() == lost["text"] + done["text"]
    totals = [event for line in log.since(0).lines if isinstance(event := events.decode(line), CostEvent)]
    assert totals[-1].sent_bytes == 9
    assert totals[-1].kwh == pytest.approx(5 * 100 / 3.6e6)


def test_alerts_that_come_soon_are_sent_together(webhook: Webhook) -> None:
    told = Alerts([parse_receiver(webhook.url)], every_s=3600.0)
    view = view_of(world=5)
    for number in range(4):
        told.apply(view, MemberEvent(member=f"worker {number}", state="dead"), [f"{number} was lost."])
        if number == 0:
            until(lambda: len(webhook.got) == 1, "the first one is sent at once")
    told.close()
    assert [json.loads(body)["text"] for _, body in webhook.got] == ["0 was lost.", "1 was lost. 2 was lost. 3 was lost."]


def test_receiver_that_hangs_or_fails_is_reported_without_its_address(monkeypatch: pytest.MonkeyPatch,
                                                                      caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(alerts, "SEND_S", 0.3)
    with closing(Webhook(hangs=True)) as hook:
        told = Alerts([parse_receiver(hook.url), parse_receiver("false"), parse_receiver("sleep 60")])
        told.apply(view_of(), MemberEvent(member="worker 1", state="dead"), ["1 was lost."])
        until(lambda: len(caplog.records) == 3, "all have failed")
    assert "private" not in caplog.text
    told.close()


@pytest.mark.parametrize("error", [HTTPException("bad status line"), RuntimeError("x")])
def test_receiver_that_raises_does_not_end_the_alerts(error: Exception) -> None:
    got, view = list[str](), view_of(world=3)

    def send(alert: Alert) -> None:
        got.append(alert.text)
        raise error

    told = Alerts([Receiver("broken", send)], every_s=0.0)
    for number in range(2):
        told.apply(view, MemberEvent(member=f"worker {number}", state="dead"), [str(number)])
        until(lambda: len(got) == number + 1, "the receiver was called")  # noqa: B023
    told.close()


def test_full_queue_drops_alerts_and_never_waits() -> None:
    stuck, view = threading.Event(), view_of(world=200)
    got = list[str]()

    def send(alert: Alert) -> None:
        stuck.wait(60)
        got.append(alert.text)

    told = Alerts([Receiver("stuck", send)])
    for number in range(100):
        told.apply(view, MemberEvent(member=f"worker {number}", state="dead"), ["x"])
    stuck.set()
    told.close()
    assert MOST <= " ".join(got).count("x") <= 2 * MOST


def test_mail_is_given_to_sendmail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "sendmail"
    program.write_text(f"#!/bin/sh\n(echo \"$@\"; cat) > {tmp_path}/mail\n")
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name, path="": str(program))
    parse_receiver("mailto:me@example.org").send(Alert("done", "The run is done.", "a", START))
    text = (tmp_path / "mail").read_text()
    assert text.startswith("-i -- me@example.org\n")
    assert "To: me@example.org" in text
    assert "The run is done." in text


@pytest.mark.parametrize(("text", "url"), [
    ("ntfy://topic", "https://ntfy.sh/topic"), ("ntfy://ntfy.example.org/topic", "https://ntfy.example.org/topic")])
def test_address_of_ntfy(monkeypatch: pytest.MonkeyPatch, text: str, url: str) -> None:
    sent = list[tuple[str, bytes]]()
    monkeypatch.setattr(alerts, "_post", lambda to, data, headers: sent.append((to, data)))
    parse_receiver(text).send(Alert("done", "The run is done.", "a", START))
    assert sent == [(url, b"The run is done.")]
