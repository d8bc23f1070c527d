"""The event stream: records, logs, files, and the job view derived from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import InvalidInput
from commlayer.observe import event_log, events
from commlayer.observe.event_files import EventFile, EventFiles, read_run
from commlayer.observe.event_log import EventLog
from commlayer.observe.events import (
    KINDS,
    CheckpointEvent,
    Event,
    JobEvent,
    LinkEvent,
    LogEvent,
    MemberEvent,
    PlanEvent,
    QualityEvent,
    StepEvent,
    WaitEvent,
)
from commlayer.observe.job.job_view import JobView

ANY_TEXT = st.text(max_size=3000)
ANY_NUMBER = st.floats(allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_one_json_line_with_all_fields(kind: type[Event]) -> None:
    line = events.encode(kind(time=1.5, rank=2))
    assert b"\n" not in line
    assert set(json.loads(line)) == {"event", *kind.__struct_fields__}
    assert events.decode(line) == kind(time=1.5, rank=2)


@given(text=ANY_TEXT, number=ANY_NUMBER, loss=ANY_NUMBER, names=st.lists(ANY_TEXT, max_size=40))
def test_sanitized_events_are_small_and_printable_and_round_trip(text: str, number: float, loss: float, names: list[str]
                                                                 ) -> None:
    for event in (LogEvent(text=text), StepEvent(step_s=number, loss=loss), WaitEvent(names=tuple(names), waited_s=number)):
        clean = events.clean(event)
        line = events.encode(clean)
        assert len(line) <= events.MAX_LINE_NBYTES
        assert events.decode(line) == clean == events.clean(clean)
        assert all(text.isprintable() for value in msgspec.structs.astuple(clean) if isinstance(value, str | tuple)
                   for text in ([value] if isinstance(value, str) else value))


def test_numbers_outside_the_json_range_become_0() -> None:
    assert events.clean(StepEvent(step=10**30, step_s=-math.inf, samples=math.nan)) == StepEvent()
    assert events.decode(events.encode(events.clean(CheckpointEvent(directory="/a\udc80")))) is not None


def test_unknown_kinds_and_fields_are_ignored() -> None:
    assert events.decode(b'{"event":"sunrise","time":1,"rank":0}') is None
    assert events.decode(b'{"event":"log","time":1,"rank":0,"level":"info","code":"","text":"x","colour":"red"}') == LogEvent(
        time=1.0, rank=0, text="x")


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"event":"step","step":"one"}', b'{"event":"step","step":1e99}',
                                  b'{"event":"wait","what":"godot"}', b'{"time":1}', b"\xff\xfe", b'{"event":5}'])
def test_malformed_events_are_refused(line: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        events.decode(line)


def texts(lines: tuple[bytes, ...]) -> list[str]:
    return [json.loads(line).get("text", "") for line in lines]


@given(appended=st.integers(0, 40), most=st.integers(1, 12), page=st.integers(1, 5))
def test_reader_gets_the_newest_lines_in_order_and_the_number_missed(appended: int, most: int, page: int) -> None:
    log = EventLog(most=most)
    for number in range(appended):
        log.append(LogEvent(text=str(number)))
    got, cursor, missed = list[str](), 0, 0
    while (batch := log.since(cursor, most=page)).lines:
        got, cursor, missed = got + texts(batch.lines), batch.cursor, missed + batch.missed
    assert got == [str(number) for number in range(max(0, appended - most), appended)]
    assert (cursor, missed) == (appended, max(0, appended - most))


def test_log_is_bounded_and_a_batch_has_at_least_one_line() -> None:
    log = EventLog(most_nbytes=5000)
    for number in range(50):
        log.append(LogEvent(text=f"{number}" + 900 * "x"))
    lines = log.since(0).lines
    assert sum(map(len, lines)) <= 5000
    assert texts(lines)[-1].startswith("49")
    assert len(log.since(0, most_nbytes=1).lines) == 1


def test_last_event_of_each_key_survives_a_full_log() -> None:
    log = EventLog(most=4, retains=True, clock=lambda: 7.0)
    log.append(PlanEvent(digest="first"))
    log.append(MemberEvent(member="worker 1", state="joined"))
    log.append(PlanEvent(digest="second"))
    for step in range(20):
        log.append(StepEvent(time=1.0, rank=step % 2, step=step))
    kept, cursor = list[Any](), 0
    while (batch := log.since(cursor, most=3)).lines:
        kept, cursor = kept + [events.decode(line) for line in batch.lines], batch.cursor
    assert [event.digest for event in kept if isinstance(event, PlanEvent)] == ["second"]
    assert [event.member for event in kept if isinstance(event, MemberEvent)] == ["worker 1"]
    assert [event.step for event in kept if isinstance(event, StepEvent)] == [16, 17, 18, 19]
    assert log.since(cursor).lines == ()


def test_number_of_kept_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_RETAINED", 5)
    log = EventLog(most=2, retains=True)
    for number in range(20):
        log.append(MemberEvent(member=f"home {number}"))
    kept = [events.decode(line) for line in log.since(0).lines]
    assert [event.member for event in kept if isinstance(event, MemberEvent)] == [f"home {n}" for n in range(13, 20)]
    assert log.since(0).missed == 13


def test_time_and_rank_are_filled_in() -> None:
    log = EventLog(3, clock=lambda: 12.5)
    log.append(LogEvent(text="mine"))
    log.append(LogEvent(time=4.0, rank=1, text="from elsewhere"))
    mine, other = (events.decode(line) for line in log.since(0).lines)
    assert [(event.time, event.rank) for event in (mine, other) if event is not None] == [(12.5, 3), (4.0, 1)]


def written(path: Path, *appended: Event) -> Path:
    log = EventLog(0)
    file = EventFile(log, path)
    for event in appended:
        log.append(event)
    file.close()
    return path


def test_appended_events_are_in_the_file(tmp_path: Path) -> None:
    appended = [JobEvent(time=1.0, rank=0, run="r"), LogEvent(time=2.0, rank=0, text="x")]
    path = written(tmp_path / "new" / "rank-0.jsonl", *appended)
    assert read_run(path) == read_run(path.parent) == appended


def test_rank_files_are_merged_by_time_and_a_coordinator_file_has_all(tmp_path: Path) -> None:
    written(tmp_path / "rank-0.jsonl", LogEvent(time=1.0, rank=0, text="a"), LogEvent(time=3.0, rank=0, text="c"))
    written(tmp_path / "rank-1.jsonl", LogEvent(time=2.0, rank=1, text="b"))
    assert [event.time for event in read_run(tmp_path)] == [1.0, 2.0, 3.0]
    written(tmp_path / "events.jsonl", LogEvent(time=9.0, text="all"))
    assert [event.time for event in read_run(tmp_path)] == [9.0]


def test_text_from_a_file_cannot_control_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(
        b'{"event":"log","time":1,"rank":1,"text":"a\\u001b]0;title\\u0007b"}\n{"event":"step","time":2,"rank":1,"loss":1e300}\n')
    text, step = read_run(tmp_path)
    assert isinstance(text, LogEvent)
    assert isinstance(step, StepEvent)
    assert (text.text, step.loss) == (r"a\x1b]0;title\x07b", None)


def test_growing_file_is_followed_line_by_line(tmp_path: Path) -> None:
    path, line = tmp_path / "rank-0.jsonl", events.encode(LogEvent(time=1.0, rank=0, text="x"))
    path.write_bytes(line + b"\n" + line[:20])
    files = EventFiles(tmp_path)
    assert len(files.read()) == 1
    with path.open("ab") as stream:
        stream.write(line[20:] + b"\n")
    assert len(files.read()) == 1
    assert files.read() == []


@pytest.mark.parametrize("contents", [
    b"", b"no json\n", b'{"event":"step","step":"one"}\n', b'{"event":"job","format":99}\n', b"\xff\xff\n",
    b'{"event":"log","x":' + b"[" * 100_000 + b"\n",
])
def test_unreadable_files_are_one_error_with_a_code(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(contents)
    for given_path in (path, tmp_path):
        with pytest.raises(InvalidInput) as refused:
            read_run(given_path)
        assert refused.value.code == "E-EVENTS"
        assert "\n" not in str(refused.value)


def test_missing_or_read_only_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        EventFiles(tmp_path / "absent")
    assert refused.value.code == "E-EVENTS"
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput) as refused:
        EventFile(EventLog(), tmp_path / "file" / "rank-0.jsonl")
    assert refused.value.code == "E-EVENTS"


def test_full_disk_ends_only_the_event_file(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(0)
    file = EventFile(log, Path("/dev/full"))
    log.append(LogEvent(text="lost"))
    file.close()
    assert "/dev/full" in caplog.text


def epoch_of(*applied: Event) -> JobView:
    view = JobView()
    for event in applied:
        view.apply(event)
    return view


JOB = JobEvent(time=100.0, run="r1", world=2, name="train.py")
ANNA = MemberEvent(time=100.0, member="worker 0", name="anna")
BEN = MemberEvent(time=100.0, member="worker 1", name="ben")


def step(rank: int, number: int, at: float, **fields: Any) -> StepEvent:
    return StepEvent(time=at, rank=rank, step=number, **{"step_s": 0.1, "compute_s": 0.06, "exposed_s": 0.04, **fields})


def test_totals_add_up_over_steps() -> None:
    view = epoch_of(JOB, ANNA, step(0, 1, 101.0, step_s=0.0, compute_s=0.0, exposed_s=0.0),
                    step(0, 11, 102.0, steps=10, sent_bytes=50, dense_bytes=400, samples=80.0),
                    step(0, 21, 103.0, steps=10, sent_bytes=50, dense_bytes=400, samples=80.0))
    totals = view.workers[0].totals
    assert (totals.steps, totals.sent_bytes, totals.samples) == (21, 100, 160.0)
    assert totals.step_s == pytest.approx(2.0)
    assert totals.exposed_s == pytest.approx(0.8)
    assert (view.step, view.step_s, view.sent_bytes) == (21, 0.1, 100)
    assert view.samples_per_s == pytest.approx(80.0)


def test_rates_come_from_the_link_or_else_from_exchanges() -> None:
    sent = step(0, 10, 101.0, steps=10, exposed_s=0.04, hidden_s=0.01, sent_bytes=1000, received_bytes=500)
    view = epoch_of(JOB, sent)
    assert view.workers[0].up_bytes_per_s == pytest.approx(2000)
    assert view.workers[0].down_bytes_per_s == pytest.approx(1000)
    view.apply(LinkEvent(time=102.0, rank=0, up_bytes_per_s=7.0, down_bytes_per_s=8.0))
    assert (view.workers[0].up_bytes_per_s, view.workers[0].down_bytes_per_s) == (7.0, 8.0)


@pytest.mark.parametrize(("waits", "now", "words"), [
    ([], 110.0, []),
    ([WaitEvent(time=110.0, rank=0, names=("worker 1",), waited_s=10, limit_s=60)], 112.0, ["waiting for ben, 12 of 60 s"]),
    # one wait of several ranks is shown once, and a silent member explains it
    ([WaitEvent(time=110.0, rank=0, names=("worker 1",), waited_s=3, limit_s=600),
      WaitEvent(time=110.0, what="heartbeat", names=("worker 1",), waited_s=12, limit_s=60)], 110.0,
     ["waiting for ben, which sends no heartbeats, 12 of 60 s"]),
    ([WaitEvent(time=110.0, rank=0, waited_s=5, limit_s=20)], 110.0, ["waiting for other ranks, 5 of 20 s"]),
    ([WaitEvent(time=110.0, what="join", names=("worker 2",), waited_s=7)], 110.0, ["waiting for worker 2 to join, 7 s"]),
    # over, or not reported any more
    ([WaitEvent(time=110.0, rank=0, names=("worker 1",), waited_s=3, limit_s=600),
      WaitEvent(time=111.0, rank=0, names=("worker 1",), waited_s=4, over=True)], 112.0, []),
    ([WaitEvent(time=110.0, rank=0, names=("worker 1",), waited_s=3, limit_s=600), step(0, 3, 111.0)], 112.0, []),
    ([WaitEvent(time=110.0, rank=0, names=("worker 1",), waited_s=3, limit_s=600)], 190.0, []),
])
def test_description_of_what_a_job_waits_for(waits: list[Event], now: float, words: list[str]) -> None:
    assert epoch_of(JOB, ANNA, BEN, *waits).waiting(now) == words


@pytest.mark.parametrize(("last", "status"), [
    ([], "starts"),
    ([step(1, 5, 101.0)], "trains"),
    ([step(1, 5, 101.0), WaitEvent(time=102.0, rank=1, names=("worker 0",))], "waits"),
    ([step(1, 5, 101.0), WaitEvent(time=102.0, what="heartbeat", names=("worker 1",))], "silent"),
    ([MemberEvent(time=103.0, member="worker 1", state="dead", reason="killed")], "dead"),
    ([MemberEvent(time=103.0, member="worker 1", state="left")], "left"),
])
def test_worker_status(last: list[Event], status: str) -> None:
    view = epoch_of(JOB, ANNA, BEN, *last)
    assert view.status(view.workers[1], 104.0) == status


def test_without_a_coordinator_silence_means_no_events() -> None:
    view = epoch_of(msgspec.structs.replace(JOB, rank=0), step(0, 5, 101.0), step(1, 5, 101.0), step(0, 9, 120.0))
    assert [view.status(worker, 121.0) for worker in view.present] == ["trains", "silent"]


def test_job_ends_when_all_members_left_and_the_next_run_starts_fresh() -> None:
    view = epoch_of(JOB, ANNA, BEN, step(0, 5, 101.0), MemberEvent(time=102.0, member="worker 0", state="left"))
    assert not view.over
    view.apply(MemberEvent(time=102.0, member="worker 1", state="dead", reason="killed"))
    assert view.over
    view.apply(JobEvent(time=200.0, run="r2", world=3))
    assert (view.over, view.workers, view.job.world, view.job.name) == (False, {}, 3, "")


def test_each_plan_after_the_start_counts_as_one_change() -> None:
    view = epoch_of(JOB, PlanEvent(time=101.0, rank=0, digest="a"),
                    PlanEvent(time=110.0, rank=0, digest="b", reason="automatic"),
                    PlanEvent(time=110.0, rank=0, digest="b", reason="automatic"),
                    PlanEvent(time=120.0, rank=0, digest="a", reason="rollback"))
    assert (view.plan.digest, dict(view.plan_changes)) == ("a", {"automatic": 1, "rollback": 1})


def test_codec_change_keeps_the_last_comparison() -> None:
    view = epoch_of(JOB, QualityEvent(rank=0, cosine=0.9, residual=2.0), QualityEvent(rank=0, before=0.01, after=0.02))
    assert (view.quality.cosine, view.quality.residual, view.quality.after) == (0.9, 2.0, 0.02)
    assert len([event for event in view.recent if isinstance(event, QualityEvent)]) == 1


def test_names_get_numbers_only_if_a_machine_has_several_workers() -> None:
    view = epoch_of(JOB, ANNA, BEN, MemberEvent(member="worker 2", name="ben"))
    assert [view.display(f"worker {number}") for number in range(4)] == ["anna", "ben#1", "ben#2", "worker 3"]


def test_line_names_its_sender_unless_job_wide() -> None:
    job = epoch_of(MemberEvent(member="worker 1", name="ben"))
    said = [job.words(LogEvent(rank=rank, text="text", code="E-LINK")) for rank in (events.COORDINATOR, 0, 1, 2)]
    assert said == ["text [E-LINK]", "text [E-LINK]", "ben: text [E-LINK]", "worker 2: text [E-LINK]"]


def test_losses_are_averaged_over_reporting_ranks() -> None:
    assert epoch_of(JOB, step(0, 1, 101.0), step(1, 1, 101.0)).loss is None
    assert epoch_of(JOB, step(0, 1, 101.0, loss=2.0), step(1, 1, 101.0, loss=4.0), step(2, 1, 101.0)).loss == 3.0


def test_rejoining_site_reuses_the_row_of_its_former_worker() -> None:
    again = MemberEvent(time=130.0, member="worker 2", name="ben")
    view = epoch_of(JOB, ANNA, BEN, step(1, 10, 101.0, steps=10, sent_bytes=50),
                    MemberEvent(time=120.0, member="worker 1", state="dead", reason="killed"))
    assert [(row.number, row.state) for row in view.rows] == [(0, "joined"), (1, "dead")]
    for event in (again, step(2, 30, 131.0, steps=5, sent_bytes=20), again):
        view.apply(event)
    assert [(row.number, row.returns) for row in view.rows] == [(0, 0), (2, 1)]
    assert (view.display("worker 1"), view.display("worker 2")) == ("ben", "ben")
    totals = view.totals(view.workers[2])
    assert (totals.steps, totals.sent_bytes, view.sent_bytes) == (15, 70, 70)


def test_only_the_lost_worker_of_a_site_is_replaced() -> None:
    twins = [MemberEvent(time=100.0, member=f"worker {number}", name="ben") for number in (1, 2)]
    view = epoch_of(JOB, ANNA, *twins, MemberEvent(time=120.0, member="worker 1", state="dead", reason="killed"))
    assert [row.number for row in view.rows] == [0, 1, 2]
    view.apply(MemberEvent(time=130.0, member="worker 3", name="ben"))
    assert [(row.number, row.returns) for row in view.rows] == [(0, 0), (2, 0), (3, 1)]


@pytest.mark.parametrize(("reason", "failures"), [("", []), ("out of memory", ["ben: out of memory"])])
def test_finished_job_waits_for_no_member_and_names_the_failed_one(reason: str, failures: list[str]) -> None:
    waits = WaitEvent(time=110.0, rank=0, names=("worker 1",), waited_s=3, limit_s=600)
    ends = [MemberEvent(time=111.0, member="worker 0", state="left"),
            MemberEvent(time=111.0, member="worker 1", state="left", reason=reason)]
    view = epoch_of(JOB, ANNA, BEN, waits, *ends)
    assert (view.over, view.waiting(112.0), view.failures) == (True, [], failures)


def test_remaining_time_follows_from_the_announced_number_of_steps() -> None:
    view = epoch_of(JOB, ANNA, step(0, 100, 101.0))
    assert (view.total_steps, view.left_s) == (0, 0.0)
    view.apply(step(0, 200, 111.0, total=500))
    assert (view.total_steps, view.left_s) == (500, pytest.approx(30.0))
    view.apply(MemberEvent(time=112.0, member="worker 0", state="left"))
    assert view.left_s == 0.0
