"""Summation servers: admission, plans they cannot serve, changes of members, codec states, restarts inside a step."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support import codecs as kit
from support.attached import assert_refused, outcome
from support.coordinators import (
    ROOT,
    WAIT_S,
    Failures,
    Opened,
    quick,
    until,
)
from support.mailbox import InboxTransport
from support.meshes import FAR, soon
from support.serving import JOB, PLAN, Pair, changed, epoch_of, plan_of
from support.workers import Rig, job, on_ranks, step

from commlayer import records
from commlayer.cluster.calls import messages
from commlayer.cluster.membership import client
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.processes.child_processes import EmbeddedServer
from commlayer.cluster.servers import worker_client
from commlayer.cluster.servers.data_server import DataServer
from commlayer.cluster.servers.gather import ROW_BUCKET, GatherOps
from commlayer.cluster.servers.server_codecs import CodecOps
from commlayer.cluster.servers.server_journal import ServerIdentity, ServerJournal
from commlayer.cluster.servers.summation import Summation
from commlayer.cluster.servers.summation_server import Joins, Stalled
from commlayer.compressors import kernels
from commlayer.compressors.kernels import fallback
from commlayer.compressors.plan_codecs import make_codec
from commlayer.config import host_port, join_host
from commlayer.engine.worker.worker import Worker
from commlayer.errors import CommError, CorruptFrame, InvalidInput, PeerLost, RecordError, Refused, find_error_code
from commlayer.planner import default_plan
from commlayer.records import Bucket, Epoch, Job, Member, Plan, ServerInfo, Slice, TensorInfo
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, key

DATA = records.encode(PLAN)


class Serving:
    """A server of three, its coordinator's newest epoch, and the transports of some workers."""

    def __init__(self, opened: Opened, *, fixed: bool = False, journal: str = "") -> None:
        self._opened = opened
        self.serving = opened.add(DataServer("127.0.0.1", 0, quick(heartbeat_s=0.05, journal=journal)))
        self.newest, self.awaited = epoch_of(DATA, self.serving, 3), list[tuple[int, float]]()
        """`awaited`: generations for which the server has waited, and for how long at most."""
        self.serving.start(self.newest, DATA, 0, await_epoch=None if fixed else self._await_epoch)

    def _await_epoch(self, generation: int, timeout_s: float) -> Epoch:
        self.awaited.append((generation, timeout_s))
        return self.newest

    def epoch(self, *members: int, generation: int = 0) -> Epoch:
        """The coordinator's next epoch, which the server has not received yet."""
        everyone = epoch_of(DATA, self.serving, 10).members
        self.newest = msgspec.structs.replace(self.newest, generation=generation or self.newest.generation + 1,
                                              members=tuple(everyone[rank] for rank in members))
        return self.newest

    def end(self, rank: int) -> InboxTransport:
        end = InboxTransport(Hello(JOB.digest(), rank, messages.hash_plan_bytes(DATA)))
        self._opened.append(end)
        end.dial(SERVER_BASE, host_port(self.serving.address), soon())
        return end

    def report(self, end: InboxTransport, number: int, member: int, generation: int) -> None:
        """Reports that a worker joins, and waits for the answer."""
        header = Header(Kind.PLAN, 1, number, sender=end.rank, flags=Flag.ABANDON)
        answer = end.recv(SERVER_BASE, key(header._replace(kind=Kind.PLAN_OK)))
        end.send(SERVER_BASE, header, msgspec.msgpack.encode(Joins(number, member, generation)))
        assert bytes(end.wait(answer, soon()).body) == b""

    @property
    def core(self) -> Summation:
        assert self.serving.sums is not None
        return self.serving.sums

    @property
    def dropped(self) -> list[tuple[str, str]]:
        """What the server's next heartbeat reports."""
        return [(gone.peer, gone.reason) for gone in self.serving.report()["dropped"]]

    @property
    def members(self) -> tuple[int, ...]:
        """Those of a step that counts all workers that have joined."""
        return self.core.cells[0].members_with(len(self.core.joined))


def contribution(rank: int, step: int = 0, joined: int = 0) -> tuple[Header, memoryview]:
    codec = make_codec(PLAN.buckets[0])
    out = memoryview(bytearray(codec.bound(PLAN.buckets[0].spec)))
    nbytes = codec.start(np.full(100, 1.0 + rank, np.float32), codec.init(PLAN.buckets[0].spec), out)
    return Header(Kind.PUSH, 1, step, codec=codec.id, sender=rank, weight=1.0, used=1, joined=joined), out[:nbytes]


def contribute(end: InboxTransport, step: int = 0, joined: int = 0) -> Any:
    """Sends a contribution; a receive for the result."""
    header, body = contribution(end.rank, step, joined)
    result = end.recv(SERVER_BASE, key(header._replace(kind=Kind.RESULT)))
    end.send(SERVER_BASE, header, body)
    return result


def test_sum_closes_as_soon_as_a_member_is_removed(opened: Opened) -> None:
    job = Serving(opened)
    ends = [job.end(rank) for rank in range(3)]
    results = [contribute(end) for end in ends[:2]]
    waits = ends[2].recv(SERVER_BASE)
    job.serving.change(job.epoch(0, 1))
    for end, result in zip(ends, results, strict=False):
        assert end.wait(result, soon()).header.weight == 2.0
    with pytest.raises(PeerLost):
        ends[2].wait(waits, soon())
    assert job.dropped == []
    with pytest.raises(Refused, match="is no longer a member of the job.*E-EPOCH-ENDED"):
        job.end(2)


def test_member_that_violates_the_protocol_is_dropped_and_reported(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    job = Serving(opened)
    end = job.end(1)
    end.send(SERVER_BASE, Header(Kind.PUSH, 1, 0, 0, codec=99, sender=1, weight=1.0), b"")
    with pytest.raises(PeerLost):
        end.wait(end.recv(SERVER_BASE), soon())
    ((peer, reason),) = job.dropped
    assert (peer, find_error_code(reason), "codec 99" in reason) == ("worker 1", "E-FRAME", True)
    assert "dropped worker 1: " in caplog.text


def test_reported_worker_is_a_member_from_then_on(opened: Opened) -> None:
    job = Serving(opened)
    ends = [job.end(rank) for rank in range(3)]
    generation = job.epoch(0, 1, 2, 3).generation
    for end in (*ends, ends[0]):
        job.report(end, 1, 3, generation)
    assert job.core.joined == [3]
    assert job.awaited[0][0] == generation
    ends.append(job.end(3))
    results = [contribute(end, joined=1) for end in ends]
    assert [end.wait(result, soon()).header.weight for end, result in zip(ends, results, strict=True)] == [4.0] * 4


@pytest.mark.parametrize(("number", "member", "generation", "line"), [
    (2, 3, 2, "worker 3 joins as number 2, but 0 workers have joined"),
    (1, 2, 2, "worker 2 joins as number 1, but 0 workers have joined"),
    (1, 3, 3, "worker 3 joins as number 1, but the coordinator's newest epoch is 2, not 3"),
    (1, 4, 2, "worker 4 joins as number 1, but the coordinator has not admitted it"),
    (1, 4, 1, "worker 4 joins as number 1, but the coordinator has not admitted it"),
    (0, 3, 2, "worker 3 joins as number 0, but 0 workers have joined"),
])
def test_member_that_reports_a_worker_falsely_is_dropped(
    number: int, member: int, generation: int, line: str, opened: Opened, caplog: pytest.LogCaptureFixture,
) -> None:
    job = Serving(opened)
    liar, honest = job.end(1), job.end(0)
    job.epoch(0, 1, 2, 3)
    with caplog.at_level(logging.WARNING, "commlayer"), pytest.raises(CommError):
        job.report(liar, number, member, generation)
    assert f"dropped worker 1: reports that {line}" in caplog.text
    assert job.dropped == [("worker 1", f"reports that {line} [E-FRAME]")]
    assert job.core.joined == []
    job.report(honest, 1, 3, 2)
    assert job.members == (0, 1, 2, 3)


def test_other_worker_under_a_used_number_is_refused(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    job = Serving(opened)
    job.report(job.end(0), 1, 3, job.epoch(0, 1, 2, 3, 4).generation)
    with caplog.at_level(logging.WARNING, "commlayer"), pytest.raises(CommError):
        job.report(job.end(1), 1, 4, 2)
    assert "dropped worker 1: reports that worker 4 joins as number 1, but 1 workers have joined" in caplog.text
    assert job.core.joined == [3]


def test_worker_that_joins_a_job_of_fixed_members_is_refused(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    job = Serving(opened, fixed=True)
    with caplog.at_level(logging.WARNING, "commlayer"), pytest.raises(CommError):
        job.report(job.end(0), 1, 3, 2)
    assert "dropped worker 0: reports a worker that joins, but the members of this job cannot change" in caplog.text
    assert job.core.joined == []


def test_worker_that_has_joined_and_left_before_the_report_is_not_waited_for(opened: Opened) -> None:
    job = Serving(opened)
    ends = [job.end(rank) for rank in range(3)]
    job.epoch(0, 1, 2, 3)
    job.epoch(0, 1, 2)
    for end in ends:
        job.report(end, 1, 3, 2)
    results = [contribute(end, joined=1) for end in ends]
    assert [end.wait(result, soon()).header.weight for end, result in zip(ends, results, strict=True)] == [3.0] * 3


def test_workers_that_come_and_go_need_no_further_room(opened: Opened, tmp_path: Path) -> None:
    job = Serving(opened, journal=str(tmp_path))
    end, begun = job.end(0), (tmp_path / "server.journal").stat().st_ino
    for number in range(1, 7):
        job.report(end, number, 2 + number, job.epoch(0, 1, 2 + number).generation)
    assert job.core.cells[ROW_BUCKET].ops.bound == GatherOps(3).bound
    assert (tmp_path / "server.journal").stat().st_ino == begun


def test_requests_of_a_worker_that_follows_end_with_it(opened: Opened) -> None:
    job = Serving(opened)
    for rank in (3, 4, 5):
        job.serving.change(job.epoch(0, 1, 2, rank))
        end = job.end(rank)
        request = Header(Kind.FOLLOW, 1, 0, sender=rank)
        answer = end.request(SERVER_BASE, request)
        until(lambda: job.core.cells[0].followers, "the request has arrived")
        job.serving.change(job.epoch(0, 1, 2))
        assert job.core.cells[0].followers == {}
        with pytest.raises(PeerLost):
            end.wait(answer, soon())
        with pytest.raises(Refused, match=r"E-EPOCH-ENDED"):
            job.end(rank)


def test_removal_that_a_report_reveals_closes_sums_in_progress(opened: Opened) -> None:
    """The epoch may reach the server during the wait for it, before `change` is called."""
    job = Serving(opened)
    ends = [job.end(rank) for rank in range(2)]
    results = [contribute(end) for end in ends]
    job.report(ends[0], 1, 3, job.epoch(0, 1, 3, generation=3).generation)
    job.serving.change(job.newest)
    assert [end.wait(result, soon()).header.weight for end, result in zip(ends, results, strict=True)] == [2.0] * 2


def test_job_is_not_over_when_a_worker_that_left_early_is_reported(opened: Opened) -> None:
    job = Serving(opened)
    ends = [job.end(rank) for rank in range(3)]
    job.serving.change(job.epoch(0, 1, 2, 3))
    job.end(3).close()
    job.serving.change(job.epoch(0, 1, 2))
    job.report(ends[0], 1, 3, 2)
    for end in ends:
        assert not job.serving.finished
        end.close()
    until(lambda: job.serving.finished, "all workers have ended")


def test_restarted_server_knows_who_has_joined_and_who_is_gone(opened: Opened, tmp_path: Path) -> None:
    job = Serving(opened, journal=str(tmp_path))
    ends, begun = [job.end(rank) for rank in range(3)], (tmp_path / "server.journal").stat().st_ino
    job.report(ends[0], 1, 3, job.epoch(0, 1, 2, 3).generation)
    job.report(ends[0], 2, 4, job.epoch(0, 1, 2, 3, 4).generation)
    assert (tmp_path / "server.journal").stat().st_ino == begun, "sums go on meanwhile"
    newest = job.epoch(0, 1, 4, generation=5)
    job.serving.change(newest)
    job.serving.close(over=False)
    opened.remove(job.serving)
    again = opened.add(DataServer("127.0.0.1", 0, quick(heartbeat_s=0.05, journal=str(tmp_path))))
    again.start(newest, DATA, 0, await_epoch=lambda *_: newest)
    job.serving = again
    assert (job.core.joined, job.members) == ([3, 4], (0, 1, 4))
    with pytest.raises(Refused, match="is no longer a member of the job.*E-EPOCH-ENDED"):
        job.end(3)
    ends = [job.end(rank) for rank in (0, 1, 4)]
    results = [contribute(end, joined=2) for end in ends]
    assert [end.wait(result, soon()).header.weight for end, result in zip(ends, results, strict=True)] == [3.0] * 3


needs_native = pytest.mark.skipif("native" not in kernels.BACKENDS, reason="built without the native core")

SLICES = (Slice(0, 0, 4000), Slice(1, 16, 4016), Slice(2, 0, 16128))
VECTOR = Bucket(0, SLICES, "service")
"""Larger than tensors that are sorted completely (selection.FEW_ENTRIES)."""
CASES = [*({"codec": text} for text in kit.NAMED.values() if "powersgd" not in text),
         *({"codec": "topk(ratio=0.05)", "down": down} for down in ("int8()", "error_feedback(topk(ratio=0.05))"))]


def served(**fields: str) -> CodecOps:
    bucket = Bucket(0, SLICES, "service", **fields)
    return CodecOps(make_codec(bucket), bucket, "job")


@needs_native
@pytest.mark.parametrize("fields", CASES, ids=lambda fields: " ".join(fields.values()))
def test_restored_server_continues_bit_for_bit_and_hands_over_residuals(fields: dict[str, str]) -> None:
    ops, other, after = (served(**fields) for _ in range(3))
    codec = make_codec(Bucket(0, SLICES, "service", **fields))
    state, room, out = codec.init(VECTOR.spec), kit.room(codec, VECTOR.spec), kit.room(codec, VECTOR.spec)

    def step(number: int, *servers: CodecOps) -> list[bytes]:
        payload, results = room[: codec.start(kit.noise(VECTOR.numel, number), state, room)], []
        for server in servers:
            acc = server.new_accumulator(0)
            server.add(0, payload, acc, True)
            results.append(bytes(out[: server.emit(0, acc, out)]))
        return results

    for number in range(3):
        step(number, ops)
    ops.undo(1)  # one slice was not applied
    other.restore(ops.snapshot())
    assert other.snapshot() == ops.snapshot()
    first, second = step(3, ops, other)
    assert first == second
    after.inherit_residuals(ops.residuals())
    assert [(d.tensor, d.start, d.values.tobytes()) for d in after.residuals()] == [
        (d.tensor, d.start, d.values.tobytes()) for d in ops.residuals()]


@needs_native
@pytest.mark.parametrize("text", ["topk(ratio=0.05)", "error_feedback(int8())"])
def test_mismatched_bytes_and_states_are_refused(text: str) -> None:
    ops = served(codec=text)
    for junk in (bytes(40), bytes(range(64)), b""):
        with pytest.raises(CorruptFrame):
            ops.add(0, memoryview(junk), ops.new_accumulator(0), True)
    short = Bucket(0, SLICES[:1], "service", codec="topk(ratio=0.1)")
    for junk in (b"junk", served(codec="momentum(int8())").snapshot(), CodecOps(make_codec(short), short, "job").snapshot()):
        with pytest.raises(ValueError, match=r"E-SERVER-STATE|E-CODEC-STATE"):
            ops.restore(junk)


def loaded(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


@needs_native
@pytest.mark.commit(1)
@pytest.mark.parametrize("backend", ["auto", "fallback"])
def test_embedded_server_loads_no_torch_for_any_codec(backend: str) -> None:
    texts = [text for name, text in kit.NAMED.items() if backend == "auto" or name in fallback.FAMILIES]
    cuts = [Slice(0, 100 * i, 100 * i + 100) for i in range(len(texts))]
    buckets = tuple(Bucket(i, (cuts[i],), "service", codec=text) for i, text in enumerate(texts))
    job = Job((TensorInfo("weight", (100 * len(buckets),)),))
    plan = records.encode(Plan(job.digest(), buckets, servers=1))
    config = quick(backend=backend, token="of-this-test")
    with contextlib.ExitStack() as stack:
        child = EmbeddedServer.start(config, workers=1)
        stack.callback(child.close)
        assert not loaded(child.pid, "libtorch_cpu"), "once it reports its address"
        link = worker_client.connect(child.control, messages.worker_request(job.digest(), 0, 1, plan=plan), config)
        stack.callback(link.close)
        for bucket in buckets:
            state = link.fetch_state(0, bucket.id, 0)
            link.put_state(0, bucket.id, 0, state)
        ones, codec = torch.ones(100), make_codec(buckets[0])
        out = memoryview(bytearray(codec.bound(buckets[0].spec)))
        nbytes = codec.start(ones, codec.init(buckets[0].spec), out)
        header = Header(Kind.PUSH, 1, step=0, bucket=0, codec=codec.id, sender=0, weight=1.0, total=1.0)
        handle = link.transport.request(SERVER_BASE, header, out[:nbytes])
        assert handle.wait(time.monotonic() + WAIT_S).body == out[:nbytes]
        assert not loaded(child.pid, "libtorch_cpu")


UNFIT = [
    (b"\x00", "E-PLAN-REFUSED", "plan of worker 0: JSON is malformed"),
    (records.encode(plan_of(ranks_per_node=0)), "E-PLAN-REFUSED", "plan of worker 0: ranks_per_node is 0"),
    (records.encode(plan_of(ranks_per_node=3)), "E-PLAN-REFUSED", "plan of worker 0: ranks_per_node is 3"),
    (records.encode(changed(owner=7)), "E-PLAN-REFUSED", "plan of worker 0: bucket 0: owner 7"),
    (records.encode(changed(slices=(Slice(0, 0, 1 << 62),))), "E-PLAN-REFUSED",
     f"plan of worker 0: bucket 0: {1 << 62} elements"),
    (records.encode(plan_of(servers=2)), "E-PLAN-REFUSED", "plan of worker 0: it is for 2 servers, but the job has 1"),
    (records.encode(changed(codec="zip()")), "E-CODEC-NAME", "codec 'zip()'"),
]


@pytest.mark.parametrize(("plan", "code", "line"), UNFIT)
def test_unsupported_plan_is_one_line_for_the_server_and_its_workers(plan: bytes, code: str,
                                                                     line: str, opened: Opened) -> None:
    serving = opened.add(DataServer("127.0.0.1", 0, quick()))
    with pytest.raises(InvalidInput) as caught:
        serving.start(epoch_of(plan, serving), plan, 0)
    assert caught.value.what.startswith(line)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    opened.append(InboxTransport(Hello(JOB.digest(), 0, messages.hash_plan_bytes(plan))))
    with pytest.raises(Refused) as refused:
        opened[-1].dial(SERVER_BASE, host_port(serving.address), time.monotonic() + WAIT_S)
    assert str(refused.value) == f"server 0: {caught.value}"
    assert (refused.value.peer, refused.value.code) == ("server 0", code)


def test_only_members_of_the_epoch_are_admitted(opened: Opened) -> None:
    serving = opened.add(DataServer("127.0.0.1", 0, quick()))
    plan = records.encode(PLAN)
    serving.start(epoch_of(plan, serving), plan, 0)
    for rank in (0, 2, SERVER_BASE + 1):
        opened.append(InboxTransport(Hello(JOB.digest(), rank, messages.hash_plan_bytes(plan))))
        where, deadline = host_port(serving.address), time.monotonic() + WAIT_S
        if rank == 0:
            opened[-1].dial(SERVER_BASE, where, deadline)
        else:
            line = outcome(lambda where=where, deadline=deadline: opened[-1].dial(SERVER_BASE, where, deadline))
            assert_refused(line, "E-RANK", "server 0: ", "2 workers")


@pytest.mark.parametrize(("address", "code"), [("10.1.2.3:7000", "E-PLAIN-TEXT"), ("nowhere", "E-ADDRESS")])
def test_workers_do_not_dial_servers_where_plain_text_is_forbidden(address: str, code: str, opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick(), servers=1))
    request = messages.worker_request("job", 0, 1, plan=records.encode(PLAN))
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(client.join, coordinator.address, messages.server_request(address), quick(), Failures())
        with pytest.raises(RecordError) as caught:
            worker_client.connect(coordinator.address, request, quick())
        opened.append(SimpleNamespace(close=serving.result(WAIT_S).leave))
    assert caught.value.what.startswith("address of server 0: ")
    assert address.partition(":")[0] in caught.value.what
    assert caught.value.code == code
    assert coordinator.state.registrations[request.token].left == f"could not reach a server: {caught.value}"


@pytest.mark.parametrize("exchanges", [0, 1])
def test_wait_notice_contains_the_exchanges_of_a_member_that_left(
        exchanges: int, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's notice that it waits for a member may be older than that member's last message, so it proves nothing alone.
    """
    monkeypatch.setattr("commlayer.cluster.servers.summation_server.REPEAT_S", 0.05)
    job = Pair(opened)
    payload = Header(Kind.PUSH, 1, 0, 0, codec=1, sender=1, weight=1.0, used=1)
    job.ups[1].transport.request(SERVER_BASE, payload, b"looked at after worker 0's")
    assert job.stalled.wait(WAIT_S), "the server has named the missing worker once"
    job.ups[0].close(exchanges=exchanges)
    assert job.left.get(timeout=WAIT_S) == ("worker 0", exchanges)
    job.stalled.clear()
    assert job.stalled.wait(WAIT_S), "it is sent again"
    assert job.failures.errors == []
    job.ups[1].subscribe(job.failures, lambda *_: None, lambda *report: job.left.put(report), 1)
    assert job.left.get(timeout=WAIT_S) == ("worker 0", exchanges), "so does a worker that switches to another plan"


def test_verdict_of_the_coordinator_reaches_later_followers(opened: Opened) -> None:
    """The coordinator sends it once. The worker that received it may be entering another epoch and no longer need it."""
    job = Pair(opened)
    assert job.ups[1]._membership is not None
    job.ups[1]._membership._on_reply(messages.HeartbeatReply(failed=(messages.PeerExit("worker 0", "no heartbeat for 4.0 s"),)))
    assert job.failure().peer == "worker 0"
    after = Failures()
    job.ups[1].subscribe(after, lambda *_: None, lambda *_: None, 65537)
    assert [error.peer for error in after.errors] == ["worker 0"]


def test_state_may_be_larger_than_all_payloads(opened: Opened) -> None:
    complete = Job((TensorInfo("weight", (6 << 20,)),))
    plan = default_plan(complete, codec="topk(ratio=0.01)", path="service", servers=1, ranks_per_node=1, fuse_nbytes=4096,
                        cut_nbytes=32 << 20)
    up = Pair(opened, plan, WAIT_S, FAR).ups[0]
    state = up.fetch_state(0, 0, 0)
    assert len(state) > 24 << 20
    up.put_state(0, 0, 0, state)


def test_server_failure_reaches_its_workers_with_the_reason(opened: Opened) -> None:
    job = Pair(opened)
    job.report_stall(Stalled(0, 3, (), failed="failed: MemoryError: no room"))
    failure = job.failure()
    assert (failure.peer, failure.step, failure.bucket) == ("server 0", 3, 0)
    assert "MemoryError: no room" in failure.what


def test_server_started_for_a_separate_coordinator_uses_any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configured port is the coordinator's, which may be on the same machine."""
    environments: list[dict[str, str]] = []

    def look(*_: Any, env: dict[str, str], **__: Any) -> Callable[[], None]:
        environments.append(env)
        raise OSError

    monkeypatch.setattr(subprocess, "Popen", look)
    for join in ("", "127.0.0.1:7000"):
        with pytest.raises(OSError, match="^$"):
            EmbeddedServer.start(quick(port=7000), join=join)
    assert [env["COMMLAYER_PORT"] for env in environments] == ["7000", "0"]


WORLD, STEPS, TOKEN = 2, 30, "a-job's-secret"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("COMMLAYER_")} | {
    "COMMLAYER_CONFIG": "", "COMMLAYER_TOKEN": TOKEN, "COMMLAYER_DEADLINE_S": "30",
    "COMMLAYER_HEARTBEAT_S": "0.2"}
SERVE = [sys.executable, "-m", "commlayer.cli.main", "serve"]


def plan(codec: str) -> Plan:
    return default_plan(job(), codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=2048, cut_nbytes=4096)


def gradients(rank: int, number: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return [torch.randn(info.shape, generator=generator) for info in job().tensors]


def undisturbed(plan: Plan) -> list[Any]:
    with Rig(WORLD, "", plan=plan) as rig:
        return on_ranks(WORLD, lambda rank: [step(rig.workers[rank], gradients(rank, n)) for n in range(STEPS)])


class Served:
    """Workers here, their server in a separate process, with or without the coordinator."""

    def __init__(self, layout: Plan, journal: Path, *, together: bool) -> None:
        settings = {"token": TOKEN, "dead_after_s": 20.0, "reconnect_s": 20.0, "deadline_s": 30.0}
        self.coordinator = None if together else Coordinator(quick(**settings), servers=1)
        self.command = [*SERVE, "--journal", str(journal)]
        if self.coordinator is not None:
            self.command += ["--join", self.coordinator.address]
        self.process = self.started()
        assert self.process.stdout is not None
        address = json.loads(self.process.stdout.readline())["control"]
        self.config = quick(join=address, **settings)
        self.said: list[str] = []
        self.failures = Failures()
        requests = [messages.worker_request(layout.job, rank, WORLD, plan=records.encode(layout)) for rank in range(WORLD)]
        with ThreadPoolExecutor(WORLD) as pool:
            self.ups = list(pool.map(lambda r: worker_client.connect(address, r, self.config), requests))
        self.workers = [self.worker(layout, rank) for rank in range(WORLD)]
        self.steps = [0] * WORLD

    def started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=CLEAN)

    def worker(self, plan: Plan, rank: int) -> Worker:
        codecs = {b.id: make_codec(b, rank, plan) for b in plan.buckets}
        worker = Worker(job(), plan, codecs, torch.device("cpu"), rank=rank, members=WORLD, transport=self.ups[rank].transport,
                        recycle=self.ups[rank].recycle)

        def fail(error: Any) -> None:
            self.failures(error)
            worker.latch(error)

        self.ups[rank].subscribe(fail, worker.stalled, lambda *_: None, 1)
        return worker

    def train(self, rank: int) -> list[Any]:
        results = []
        for number in range(STEPS):
            results.append(step(self.workers[rank], gradients(rank, number), deadline_s=30.0))
            self.steps[rank] = number + 1
        return results

    def killed(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.said.append(self.process.communicate(timeout=WAIT_S)[1])

    def close(self) -> None:
        until = time.monotonic() + WAIT_S
        while not all(up.coordinated for up in self.ups) and time.monotonic() < until:
            time.sleep(0.01)  # a member whose leave is lost is detected only by its silence
        for worker in self.workers:
            worker.close()
        for up in self.ups:
            up.close()
        try:
            self.said.append(self.process.communicate(timeout=WAIT_S)[1])
        finally:
            self.process.kill()
            if self.coordinator is not None:
                self.coordinator.close()


@pytest.mark.commit(1)
@pytest.mark.parametrize(("codec", "together"), [("topk(ratio=0.1)", False), ("powersgd(rank=2)", True)],
                         ids=["a server", "with its coordinator"])
def test_server_killed_inside_a_step_resumes_there(codec: str, together: bool, opened: Opened, tmp_path: Path) -> None:
    layout, chance = plan(codec), random.Random(codec)
    expected = undisturbed(layout)
    served = opened.add(Served(layout, tmp_path / "journal", together=together))
    results: list[Any] = []
    trains = threading.Thread(target=lambda: results.extend(on_ranks(WORLD, served.train, 90.0)))
    trains.start()
    for after, number in ((4, signal.SIGKILL), (12, signal.SIGTERM), (18, signal.SIGINT)):
        while max(served.steps) < after and trains.is_alive():
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.02))
        served.killed(number)
        steps = max(served.steps)
        served.process = served.started()
        while max(served.steps) <= steps + 1 and trains.is_alive():
            time.sleep(0.001)
    trains.join(90.0)
    for got, wanted in zip(results, expected, strict=True):
        assert not isinstance(got, BaseException), got
        pairs = [pair for a, b in zip(got, wanted, strict=True) for pair in zip(a, b, strict=True)]
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)
    opened.clear()
    served.close()
    assert served.failures.errors == []
    again = "resumed in generation 1; "
    assert [again in lines for lines in served.said] == [False, True, True, True], served.said
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == ["lock"], "the job is over"


def test_server_killed_after_a_plan_change_resumes_the_new_plan(opened: Opened, tmp_path: Path) -> None:
    served = opened.add(Served(plan("topk(ratio=0.1)"), tmp_path / "journal", together=False))
    for generation, codec in ((2, "int8()"), (3, "topk(ratio=0.2)")):
        served.ups[0].send_plan(0, records.encode(plan(codec)), generation, {})
    for _ in range(2):
        served.killed()
        served.process = served.started()
        served.ups[0].send_plan(0, records.encode(plan("topk(ratio=0.2)")), 3, {})  # asked for again it changes nothing
    opened.clear()
    served.close()
    again = "resumed in generation 3; "
    assert [again in lines for lines in served.said] == [False, True, True], served.said
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == ["lock"], "the job is over"


def test_server_without_a_coordinator_keeps_its_journal(tmp_path: Path) -> None:
    journal = ServerJournal(str(tmp_path), required=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = join_host(*free.getsockname())
    epoch = Epoch(1, (Member(0, 0, "host"),), (ServerInfo(0, address),), "digest")
    assert journal.replace(ServerIdentity("a token", 0, address, epoch, b"plan", 1), {0: 1000}, lambda _: None)
    journal.close(over=False)
    command = [*SERVE, "--journal", str(tmp_path), "--join", "127.0.0.1:1"]
    for wait_s in ("1", "60"):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                                   env=CLEAN | {"COMMLAYER_JOIN_DEADLINE_S": wait_s})
        assert process.stdout is not None
        assert process.stdout.readline()
        if wait_s == "60":
            process.terminate()
        process.communicate(timeout=WAIT_S)
        assert process.returncode == (0 if wait_s == "60" else 2)
        assert (tmp_path / "server.journal").exists()


def test_streams_return_to_the_same_port_after_a_restart(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        serving = DataServer("127.0.0.1", 0, quick(carrier="auto", journal=str(tmp_path)))
        layout = plan("int8()")
        epoch = Epoch(1, tuple(Member(rank, rank, "host") for rank in range(WORLD)), (ServerInfo(0, serving.address),),
                      messages.hash_plan_bytes(records.encode(layout)))
        results.append((serving.address, serving.streams))
        serving.start(epoch, records.encode(layout), 0)
        serving.close(over=False)
    assert results[0] == results[1]
    assert results[0][1]
