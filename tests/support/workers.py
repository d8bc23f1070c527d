"""Ranks as threads over loopback with real servers: what the tests of the runtime stand on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from commlayer.cluster.processes.channels import node_ranks
from commlayer.cluster.servers.server_codecs import contributing_ranks, make_codec_ops
from commlayer.cluster.servers.summation import Summation
from commlayer.cluster.servers.summation_server import Stalled, SumServer
from commlayer.compressors import make_codec
from commlayer.engine.components import Components
from commlayer.engine.worker.worker import Worker
from commlayer.observe.noise_scale import Agreement
from commlayer.planner import default_plan
from commlayer.records import Job, Plan, TensorInfo
from commlayer.transport.protocol import SERVER_BASE, Handle, Header, Kind, Message, key
from commlayer.transport.reconnect import ReconnectingTransport
from support.loopback import Hub

SHAPES = [(64, 33), (64,), (5, 3, 3, 3), (1,), (0,), (4000,), (7,)]


def job(shapes: list[tuple[int, ...]] | None = None, buffers: int = 0) -> Job:
    """The last `buffers` of the tensors are buffers."""
    sizes = shapes or SHAPES
    return Job(tuple(TensorInfo(f"t{i}", s, buffer=i >= len(sizes) - buffers) for i, s in enumerate(sizes)))


class Rig(contextlib.AbstractContextManager["Rig"]):
    """`world` workers and the plan's servers in one process, and `joining` workers that join later, which servers expect."""

    def __init__(self, world: int, codec: str, *, servers: int = 1, shapes: list[tuple[int, ...]] | None = None,
                 buffers: int = 0, stall_s: float = 0.2, hub: Any = None, plan: Plan | None = None,
                 of: Job | None = None, joining: int = 0) -> None:
        self.job = of or job(shapes, buffers)
        self.plan = plan or default_plan(self.job, codec=codec, path="service", servers=servers, ranks_per_node=1,
                                         fuse_nbytes=2048, cut_nbytes=4096)
        self.hub = hub or Hub()
        gradients = sum(not tensor.buffer for tensor in self.job.tensors)
        senders = contributing_ranks(self.plan, node_ranks(world, self.plan.ranks_per_node))
        self.sums = [Summation(s, 1, make_codec_ops(self.plan, s, gradients=gradients), senders)
                     for s in range(self.plan.servers)]
        """What the servers hold."""
        for core in self.sums:
            for number in range(joining):
                core.add(number + 1, world + number)
        self.servers = [SumServer(core, self.hub.transport(SERVER_BASE + s), range(world + joining), stall_s=stall_s)
                        for s, core in enumerate(self.sums)]
        self.world, self.components = world, list[Components]()
        """`components`: of each worker."""
        self.transports = [self.hub.transport(rank) for rank in range(world + joining)]
        self.workers = [self.worker(rank, t) for rank, t in enumerate(self.transports)]

    def worker(self, rank: int, transport: Any) -> Worker:
        codecs = {b.id: make_codec(b, rank, self.plan) for b in self.plan.buckets}
        self.components.append(Components())
        worker = Worker(self.job, self.plan, codecs, torch.device("cpu"), rank=rank, members=self.world,
                        transport=transport, components=self.components[-1])
        for s in range(self.plan.servers):
            follow_stalls(transport, SERVER_BASE + s, worker)
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for transport in self.transports:
            transport.close()
        for server in self.servers:
            server.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def follow_stalls(transport: Any, server: int, worker: Worker) -> None:
    """Passes the server's stall reports to the worker."""

    def arrived(message: Message) -> None:
        report = msgspec.msgpack.decode(message.body, type=Stalled)
        worker.stalled(report.bucket, report.step, report.missing)

    def received(handle: Handle) -> None:
        if handle.error() is None:
            arrived(handle.message())
            follow_stalls(transport, server, worker)

    if isinstance(transport, ReconnectingTransport):
        transport.arrived = arrived
    else:
        transport.recv(server, key(Header(Kind.STALLED, 1))).on_done(received)


def on_ranks(world: int, body: Callable[[int], Any], timeout_s: float = 60.0) -> list[Any]:
    """Runs body(rank) on a thread each; results in rank order, an exception as its own result."""
    results: list[Any] = [TimeoutError("did not end")] * world

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return results


class SharedRows:
    """Rows that ranks, as threads, exchange in rounds; with a deadline."""

    def __init__(self, world: int) -> None:
        self._world, self._told = world, [list[tuple[float, ...]]() for _ in range(world)]
        self._heard, self._news = [0] * world, threading.Condition()
        self.seen = [Agreement() for _ in range(world)]

    def of(self, rank: int) -> Any:
        return _RankRows(self, rank)

    def tell(self, rank: int, row: tuple[float, ...]) -> None:
        with self._news:
            self._told[rank].append(row)
            self._news.notify_all()

    def hear(self, rank: int) -> list[tuple[float, ...]]:
        turn, self._heard[rank] = self._heard[rank], self._heard[rank] + 1
        with self._news:
            assert self._news.wait_for(lambda: all(len(report) > turn for report in self._told), 20.0)
            return [report[turn] for report in self._told]


class _RankRows:
    """One rank's end."""

    def __init__(self, rows: SharedRows, rank: int) -> None:
        self._rows, self._rank = rows, rank

    def start(self, *row: float) -> None:
        self._rows.tell(self._rank, row)

    def read(self) -> list[tuple[float, ...]]:
        return self._rows.hear(self._rank)

    def observe(self, rows: Sequence[Sequence[float]], square: float) -> None:
        self._rows.seen[self._rank] = self._rows.seen[self._rank].plus(rows, square)


def step(
    worker: Worker, gradients: list[torch.Tensor | None], deadline_s: float = 20.0, device: torch.device | None = None
) -> list[torch.Tensor | None]:
    """One step: announces all gradients, waits, and returns the averages that the worker wrote into copies of them."""
    for tensor, gradient in enumerate(gradients):
        if gradient is not None:
            worker.ready(tensor, gradient)
    worker.finish(list(gradients), deadline_s)
    used = worker.used()
    shapes = [info.shape for info in worker.job.tensors]
    targets = [torch.empty(shape, device=device) if anyone else None for shape, anyone in zip(shapes, used, strict=True)]
    worker.commit(targets)
    return targets
