"""A summation server that is killed in the middle of a step and started again: workers go on with it, and no bit differs."""

from __future__ import annotations

import json
import os
import random
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
from control_kit import ROOT, WAIT_S, Failures, quick
from runtime_kit import Rig, job, on_ranks, step

from commlayer import records
from commlayer.compressors import codec_of
from commlayer.control import messages, uplink
from commlayer.control.coordinator import Coordinator
from commlayer.planner import default_plan
from commlayer.records import Plan
from commlayer.runtime.worker import Worker

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


def undisturbed(made: Plan) -> list[Any]:
    with Rig(WORLD, "", plan=made) as rig:
        return on_ranks(WORLD, lambda rank: [step(rig.workers[rank], gradients(rank, n)) for n in range(STEPS)])


class Served:
    """Workers here, their server in a process of its own, with the coordinator or without."""

    def __init__(self, made: Plan, journal: Path, *, together: bool) -> None:
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
        requests = [messages.worker(made.job, rank, WORLD, plan=records.encode(made)) for rank in range(WORLD)]
        with ThreadPoolExecutor(WORLD) as pool:
            self.ups = list(pool.map(lambda r: uplink.connect(address, r, self.config), requests))
        self.workers = [self.worker(made, rank) for rank in range(WORLD)]
        self.steps = [0] * WORLD

    def started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=CLEAN)

    def worker(self, made: Plan, rank: int) -> Worker:
        codecs = {b.id: codec_of(b, rank, made) for b in made.buckets}
        worker = Worker(job(), made, codecs, torch.device("cpu"), rank=rank, members=WORLD, transport=self.ups[rank].transport,
                        recycle=self.ups[rank].recycle)

        def fail(error: Any) -> None:
            self.failures(error)
            worker.latch(error)

        self.ups[rank].follow(fail, worker.stalled, lambda *_: None, 1)
        return worker

    def train(self, rank: int) -> list[Any]:
        found = []
        for number in range(STEPS):
            found.append(step(self.workers[rank], gradients(rank, number), deadline_s=30.0))
            self.steps[rank] = number + 1
        return found

    def killed(self) -> None:
        self.process.kill()
        self.said.append(self.process.communicate(timeout=WAIT_S)[1])

    def close(self) -> None:
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


@pytest.mark.parametrize(("codec", "together"), [("topk(ratio=0.1)", False), ("powersgd(rank=2)", True)],
                         ids=["a server", "with its coordinator"])
def test_who_is_killed_in_mid_step_takes_up_where_it_was(codec: str, together: bool, opened: list[Any], tmp_path: Path) -> None:
    made, chance = plan(codec), random.Random(codec)
    expected = undisturbed(made)
    served = Served(made, tmp_path / "journal", together=together)
    opened.append(served)
    results: list[Any] = []
    trains = threading.Thread(target=lambda: results.extend(on_ranks(WORLD, served.train, 90.0)))
    trains.start()
    for after in (4, 15):
        while max(served.steps) < after and trains.is_alive():
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.02))
        served.killed()
        begun, steps = time.monotonic(), max(served.steps)
        served.process = served.started()
        while max(served.steps) <= steps + 1 and trains.is_alive():
            time.sleep(0.001)
        assert time.monotonic() - begun < 10.0
    trains.join(90.0)
    for got, wanted in zip(results, expected, strict=True):
        assert not isinstance(got, BaseException), got
        pairs = [pair for a, b in zip(got, wanted, strict=True) for pair in zip(a, b, strict=True)]
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)
    opened.clear()
    served.close()
    assert served.failures.errors == []
    again = "taken up where an earlier process ended, in generation 1, with "
    assert [again in said for said in served.said] == [False, True, True], served.said
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == ["lock"], "the job is over"
