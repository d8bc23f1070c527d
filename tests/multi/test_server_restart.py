"""A summation server that is killed in the middle of a step and started again: workers go on with it, and no bit differs."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.coordinators import ROOT, WAIT_S, Failures, quick
from support.workers import Rig, job, on_ranks, step

from commlayer import records
from commlayer.cluster import messages, uplink
from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.server_journal import ServerIdentity, ServerJournal
from commlayer.cluster.summation_server import DataServer
from commlayer.compressors import codec_of
from commlayer.config import join_host
from commlayer.engine.worker import Worker
from commlayer.planner import default_plan
from commlayer.records import Member, Plan, ServerInfo, View

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
    """Workers here, their server in a process of its own, with the coordinator or without."""

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
            self.ups = list(pool.map(lambda r: uplink.connect(address, r, self.config), requests))
        self.workers = [self.worker(layout, rank) for rank in range(WORLD)]
        self.steps = [0] * WORLD

    def started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=CLEAN)

    def worker(self, plan: Plan, rank: int) -> Worker:
        codecs = {b.id: codec_of(b, rank, plan) for b in plan.buckets}
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
            time.sleep(0.01)  # one whose leaving is not heard is missed only by its silence
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


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    things: list[Any] = []
    yield things
    for thing in things:
        thing.close()


@pytest.mark.commit(1)
@pytest.mark.parametrize(("codec", "together"), [("topk(ratio=0.1)", False), ("powersgd(rank=2)", True)],
                         ids=["a server", "with its coordinator"])
def test_who_is_killed_in_mid_step_takes_up_where_it_was(codec: str, together: bool, opened: list[Any], tmp_path: Path) -> None:
    layout, chance = plan(codec), random.Random(codec)
    expected = undisturbed(layout)
    served = Served(layout, tmp_path / "journal", together=together)
    opened.append(served)
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


def test_who_is_killed_behind_a_change_of_plans_takes_up_the_later_one(opened: list[Any], tmp_path: Path) -> None:
    served = Served(plan("topk(ratio=0.1)"), tmp_path / "journal", together=False)
    opened.append(served)
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


def test_who_finds_no_coordinator_keeps_its_journal(tmp_path: Path) -> None:
    journal = ServerJournal(str(tmp_path), required=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = join_host(*free.getsockname())
    view = View(1, (Member(0, 0, "host"),), (ServerInfo(0, address),), "digest")
    assert journal.replace(ServerIdentity("a token", 0, address, view, b"plan", 1), {0: 1000}, lambda _: None)
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


def test_streams_come_to_the_port_that_they_came_to(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        serving = DataServer("127.0.0.1", 0, quick(carrier="auto", journal=str(tmp_path)))
        layout = plan("int8()")
        view = View(1, tuple(Member(rank, rank, "host") for rank in range(WORLD)), (ServerInfo(0, serving.address),),
                    messages.digest_of(records.encode(layout)))
        results.append((serving.address, serving.streams))
        serving.start(view, records.encode(layout), 0)
        serving.close(over=False)
    assert results[0] == results[1]
    assert results[0][1]
