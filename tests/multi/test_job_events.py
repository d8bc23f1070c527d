"""Events of a running job: from workers to the coordinator over real sockets, and events that the coordinator adds."""

from __future__ import annotations

import contextlib
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from support import rank_pool
from support.attached import data, mlp
from support.coordinators import WAIT_S, Failures, Opened, quick, until
from support.keys import Folders
from support.membership import after, running, several, worker
from support.rank_pool import Servers, pool, ranks_first
from torch import nn

import commlayer
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.event_client import EventClient
from commlayer.cluster.membership import client, membership
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.membership.epoch_change import next_epoch
from commlayer.cluster.membership.job_events import BURST, JobEvents, changes, list_waits
from commlayer.cluster.membership.membership import State
from commlayer.cluster.membership.sites import PendingWait
from commlayer.cluster.servers.data_server import DataServer
from commlayer.errors import CorruptFrame, Refused
from commlayer.observe import events
from commlayer.observe.event_files import read_run
from commlayer.observe.event_log import EventLog
from commlayer.observe.events import Event, JobEvent, LogEvent, MemberEvent, PlanEvent, StepEvent, WaitEvent
from commlayer.observe.job.job_view import JobView

_ranks = ranks_first(2)


def read(log: EventLog) -> list[Event]:
    return [event for line in log.since(0, most=10_000).lines if (event := events.decode(line)) is not None]


def test_start_event_names_the_members() -> None:
    before = State(0, 0)
    state = running(2)
    job, *members = changes(before, state)
    assert isinstance(job, JobEvent)
    assert state.epoch is not None
    assert (job.run, job.world) == (state.epoch.run, 2)
    assert sorted((m.member, m.state) for m in members if isinstance(m, MemberEvent)) == [
        ("server 0", "joined"), ("worker 0", "joined"), ("worker 1", "joined")]


@pytest.mark.parametrize(("change", "expected"), [
    (lambda state: membership.leave(state, "w1", "finished"), ("worker 1", "left", "")),
    (lambda state: membership.leave(state, "w1", "no memory"), ("worker 1", "left", "no memory")),
    (lambda state: membership.evict(state, ["w1"], "hangs"), ("worker 1", "dead", "hangs")),
    (lambda state: state, None),
])
def test_change_of_a_member_is_one_event(change: Any, expected: Any) -> None:
    state = running(3)
    found = [(e.member, e.state, e.reason) for e in changes(state, change(state)) if isinstance(e, MemberEvent)]
    assert found == ([expected] if expected else [])


def test_processes_before_the_start_are_shown_as_waiting_and_may_leave() -> None:
    empty = State(3, 0)
    state, _ = membership.join(empty, worker(0, world=3), 0.0)
    assert [(e.member, e.state) for e in changes(empty, state) if isinstance(e, MemberEvent)] == [("worker 0", "waiting")]
    gone = membership.leave(state, "w0", "bye")
    assert [(e.member, e.state) for e in changes(state, gone) if isinstance(e, MemberEvent)] == [("worker 0", "left")]


@pytest.mark.parametrize("least", [0, 1, 2])
@pytest.mark.parametrize("reasons", list(itertools.product(["finished", "no memory", "hangs"], repeat=3)))
def test_view_and_coordinator_agree_on_failure(least: int, reasons: tuple[str, ...]) -> None:
    """Of jobs whose three workers end one after the other."""
    before, view = State(0, 0, min_workers=least), JobView()
    state, _ = after(before, *(worker(number, world=3, elastic=True) for number in range(3)))
    for number, reason in enumerate(("", *reasons)):
        if reason:
            token = f"w{number - 1}"
            ended = membership.evict(state, [token], reason) if reason == "hangs" else membership.leave(state, token, reason)
            before, state = state, next_epoch(ended)
        for event in changes(before, state):
            view.apply(event)
    assert view.over
    assert view.failed == bool(membership.failure(state))


def waits(state: State, now: float, pending: list[PendingWait] | None = None) -> list[tuple[Any, ...]]:
    found = list_waits(state, pending or [], now, 0.0, 3.0, 10.0, 60.0)
    return [(wait.what, wait.names, wait.waited_s, wait.limit_s) for wait in found]


def test_coordinator_reports_what_it_waits_for() -> None:
    joining, _ = membership.join(State(3, 1), worker(1, world=3), 0.0)
    assert waits(joining, 7.0) == [("join", ("worker 0", "worker 2", "server 0"), 7.0, 0.0)]
    assert waits(State(0, 1), 7.0) == []  # the number of workers is not known yet
    state = several(2, servers=1)
    assert waits(state, 2.0) == []
    for token in ("w0", "s0"):
        state, _ = membership.heartbeat(state, token, 12.0)
    assert waits(state, 12.0) == [("heartbeat", ("worker 1",), 12.0, 60.0)]
    assert waits(several(2, servers=1), 0.0, [PendingWait(1, {0: 5.0}, 600.0)]) == [("call", ("worker 1",), 5.0, 600.0)]
    assert waits(several(2, servers=1), 0.0, [PendingWait(1, {0: 0.5}, 600.0)]) == []


def test_wait_event_is_repeated_at_intervals_and_ended_once() -> None:
    job = JobEvents(EventLog(retains=True))
    for tenth in range(120):
        job.waits([WaitEvent(what="heartbeat", names=("worker 1",), waited_s=tenth / 10)], tenth / 10)
    job.waits([], 12.1)
    job.waits([], 12.2)
    found = [event for event in read(job.log) if isinstance(event, WaitEvent)]
    assert [event.over for event in found] == [False, False, False, True]
    assert found[-1].names == ("worker 1",)


def beat(token: str, *sent: Event, first: int = 0, ahead_s: float = 0.0) -> messages.Heartbeat:
    return messages.Heartbeat(token, events=tuple(map(events.encode, sent)), first_event=first, time_s=time.time() + ahead_s)


def test_duplicate_heartbeat_adds_its_events_once() -> None:
    job, state = JobEvents(EventLog(retains=True)), running(2)
    one, two, three = (LogEvent(time=time.time(), text=text) for text in ("one", "two", "three"))
    job.received(beat("w1", one, two), state, 0.0)
    job.received(beat("w1", one, two), state, 1.0)
    job.received(beat("w1", two, three, first=1), state, 2.0)
    assert [(event.rank, event.text) for event in read(job.log) if isinstance(event, LogEvent)] == [
        (1, "one"), (1, "two"), (1, "three")]


def test_member_cannot_send_events_of_another() -> None:
    job, state = JobEvents(EventLog(retains=True)), running(2)
    job.received(beat("w1", StepEvent(time=time.time(), rank=0, step=5), MemberEvent(time=1.0, member="worker 0", state="dead"),
                      JobEvent(time=time.time(), run="another", world=9),
                      *(WaitEvent(what=what, names=("worker 0",)) for what in ("heartbeat", "join"))), state, 0.0)
    job.received(beat("w1", JobEvent(time=time.time(), run="another")), structs.replace(state, epoch=None), 0.0)
    job.received(beat("s0", LogEvent(time=time.time(), text="of a server")), state, 0.0)
    job.received(beat("stranger", LogEvent(time=time.time(), text="of a stranger")), state, 0.0)
    step, began = read(job.log)
    assert state.epoch is not None
    assert isinstance(began, JobEvent)
    assert (step.rank, began.rank, began.run, began.world) == (1, 1, state.epoch.run, 2)


def test_clock_offsets_are_corrected() -> None:
    job, state = JobEvents(EventLog(retains=True)), running(2)
    job.received(beat("w1", LogEvent(time=time.time() + 3600, text="x"), ahead_s=3600), state, 0.0)
    (event,) = read(job.log)
    assert event.time == pytest.approx(time.time(), abs=60)


def test_flood_of_events_is_limited_and_other_members_are_served() -> None:
    job, state = JobEvents(EventLog(retains=True)), running(2)
    for number in range(100):
        flood = [LogEvent(time=time.time(), text="flood")] * messages.MAX_EVENTS
        job.received(beat("w1", *flood, first=number * messages.MAX_EVENTS), state, 0.01 * number)
    job.received(beat("w0", LogEvent(time=time.time(), text="heard")), state, 1.0)
    texts = [event.text for event in read(job.log) if isinstance(event, LogEvent)]
    assert texts.count("flood") <= BURST + 20
    assert "heard" in texts


@pytest.mark.parametrize("line", [b"no json", b'{"event":"step","step":"x"}', b'{"event":"log","x":' + b"[" * 9000])
def test_malformed_event_is_a_protocol_error(line: bytes) -> None:
    with pytest.raises(CorruptFrame):
        JobEvents(EventLog()).received(messages.Heartbeat("w1", events=(line,), time_s=time.time()), running(2), 0.0)


@pytest.mark.parametrize("sent", [(b"x" * (events.MAX_LINE_NBYTES + 1),), (b"{}",) * (messages.MAX_EVENTS + 1)])
def test_sizes_are_checked_when_a_heartbeat_is_decoded(sent: tuple[bytes, ...]) -> None:
    data = messages.pack(messages.Heartbeat("w1", events=sent))
    with pytest.raises(CorruptFrame):
        messages.unpack(data, messages.Heartbeat, "w1")


def joined(opened: Opened, count: int = 2, **fields: Any) -> tuple[Coordinator, list[client.Membership]]:
    config = quick(**fields)
    coordinator = opened.add(Coordinator(config, workers=count))
    with ThreadPoolExecutor(count) as threads:
        requests = [messages.worker_request("job", rank, count, plan=b"a plan") for rank in range(count)]
        seats = [threads.submit(client.join, coordinator.address, request, config, Failures()) for request in requests]
        members = [seat.result(WAIT_S) for seat in seats]
    opened.extend(members)
    return coordinator, members


def test_events_are_sent_to_clients_with_the_secret(opened: Opened) -> None:
    coordinator, members = joined(opened)
    log = EventLog(1)
    members[1].report.events = log
    for step in range(200):
        log.append(StepEvent(step=step))
    with contextlib.closing(EventClient(quick(join=coordinator.address))) as reader:
        got = list[Event]()

        def steps() -> list[int]:
            got.extend(reader.read())
            return [event.step for event in got if isinstance(event, StepEvent)]

        until(lambda: steps() == list(range(200)), "all events have arrived, once and in order")
        assert {event.member for event in got if isinstance(event, MemberEvent) and event.state == "joined"} == {
            "worker 0", "worker 1"}
        assert members[1].report.rtt_s > 0
        log.append(StepEvent(step=200))
        members[1].leave()
        until(lambda: steps()[-1] == 200, "a member that leaves sends its last events first")
        until(lambda: bool(steps()) and any(isinstance(e, MemberEvent) and e.state == "left" for e in got), "and leaves")


def test_clients_without_the_secret_get_no_events(opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick(token="a-good-secret"), workers=2))
    for token in ("", "another-secret"):
        with contextlib.closing(EventClient(quick(join=coordinator.address, **({"token": token} if token else {})))) as reader:
            with pytest.raises(Refused) as refused:
                reader.read()
            assert refused.value.code == "E-SECRET"


def test_silent_member_is_named_with_the_remaining_seconds(opened: Opened) -> None:
    coordinator, members = joined(opened, dead_after_s=20.0, reconnect_s=20.0)
    members[1].close()
    view = JobView()
    with contextlib.closing(EventClient(quick(join=coordinator.address))) as reader:

        def waiting() -> list[WaitEvent]:
            for event in reader.read():
                view.apply(event)
            return view.current_waits(view.time)

        until(lambda: bool(waiting()), "the coordinator waits for worker 1")
        (wait,) = waiting()
        assert (wait.what, wait.names, wait.limit_s) == ("heartbeat", ("worker 1",), 20.0)


@pytest.mark.parametrize(("folder", "code"), [
    ("worker", ""), ("dials", ""), ("expired", "E-CERTIFICATE-DATE"), ("early", "E-CERTIFICATE-DATE"),
    ("foreign", "E-CERTIFICATE-CA"), ("revoked", "E-CERTIFICATE-REVOKED"), ("none", "E-TLS"), ("nowhere", "E-PEER-LOST"),
    ("no name", "E-ADDRESS"), ("data port", "E-ADDRESS"),
])
def test_top_needs_valid_keys(
    commlayer: Any, opened: Opened, folders: Folders, folder: str, code: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client without them gets one line with a code."""
    secret = (folders.server / "token").read_text().strip()
    monkeypatch.setenv("COMMLAYER_TOKEN_FILE" if folder == "none" else "COMMLAYER_INSECURE",
                       str(folders.server / "token") if folder == "none" else "1")
    plain = folder == "data port"
    coordinator = opened.add(Coordinator(quick(token=secret, **({} if plain else {"keys": str(folders.server)})), workers=2))
    address = {"nowhere": "127.0.0.1:9", "no name": "no-such-host.invalid:7000"}.get(folder, coordinator.address)
    if plain:
        serving = opened.add(DataServer("127.0.0.1", 0, quick(token=secret)))
        address = serving.address
        monkeypatch.setenv("COMMLAYER_TOKEN", secret)
    keys = [] if folder == "none" or plain else ["--keys", str(getattr(folders, folder, folders.worker))]
    status, output, error = commlayer("top", address, "--once", *keys)
    if code:
        assert (status, error.count("\n")) == (2, 1)
        assert f"[{code}]" in error
    else:
        assert (status, error) == (0, "")
        assert "waiting for worker 0, worker 1 to join" in output or "0 of" in output


def train(rank: int, folder: str, address: str, every: int) -> tuple[str, float]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = rank_pool.quick(events=folder, **({"join": address} if address else {}))
    sync = {"sync": commlayer.LocalSteps(every)} if every > 1 else {}
    with commlayer.attach(model, optimizer, compression="int8", config=config, **sync) as session:
        session.weight(16)
        for number in range(12):
            x, y = data(rank, number)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            session.log_loss(loss)
            optimizer.step()
            time.sleep(0.15)
        return session.inspect.context.uplink.epoch.run, session.metrics()["exchange_s"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("every", "own"), [(1, False), (4, True)])
def test_training_job_writes_its_events(tmp_path: Path, every: int, own: bool) -> None:
    """With its own coordinator, or with a separate one that has the events of all ranks."""
    with contextlib.ExitStack() as stack:
        address = "" if own else stack.enter_context(Servers(2, 1)).address
        (run, exchange_s), _ = pool(2).call(train, str(tmp_path), address, every)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.jsonl", "rank-1.jsonl"]
    view = JobView()
    found = read_run(tmp_path)
    for event in found:
        view.apply(event)
    assert (view.job.run, view.job.world, view.over) == (run, 2, True)
    for each in view.workers.values():
        assert (each.totals.steps, each.step.step, each.totals.samples) == (12, 12, 12 * 16.0)
        assert each.totals.dense_bytes == 12 * 4 * sum(p.numel() for p in mlp().parameters())
        assert 0 < each.totals.sent_bytes < each.totals.dense_bytes
        assert each.totals.compute_s + each.totals.exposed_s == pytest.approx(each.totals.step_s)
        assert each.step.share == pytest.approx(0.5)
        assert each.step.loss is not None
    assert exchange_s > 0
    assert len([event for event in found if isinstance(event, StepEvent)]) <= 2 * 6, "at most one a second, first and last"
    assert [(event.reason, event.local_steps) for event in found if isinstance(event, PlanEvent)] == [("start", every)]
