"""Dense sums over loopback: summation servers against Gloo's all-reduce.

    service    a backward pass whose gradients are summed uncompressed by one server per rank
    gloo       the same pass without commlayer, then dist.all_reduce of each gradient

Also measures the round trip of a small body.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import commlayer
from bench.as_rank import as_rank
from bench.baselines import launch_hosts
from bench.wire_worker import Gradients
from bench.worker import DEADLINE, host_config
from commlayer.engine.model.model_tensors import job_of
from commlayer.errors import CommError
from commlayer.planner import default_plan
from commlayer.transport.endpoint import StreamTransport
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, key

RANKS = (2, 4)
SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20,
         "256 MiB": 256 << 20}
IN_QUICK = ("4 KiB", "4 MiB", "16 MiB")
LARGE_NBYTES = 4 << 20
"""From this size up, servers should be no slower than Gloo."""
SMALL_NBYTES = 4 << 10
WARMUP = 3
BUDGET_NBYTES = 256 << 20
"""Bytes that a rank sums per row, so small bodies are summed more often than large ones."""
WAIT_S = 30.0


def run(quick: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and summary keys of `bench transport`."""
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for ranks in RANKS:
        replies = launch_hosts(None, ranks, [sys.executable, "-m", "bench.transport_sums", *(["quick"] if quick else [])])
        for body in replies[0]["sums"]:
            took = {way: _slowest([one["sums"][body][way] for one in replies]) for way in ("service", "gloo")}
            rows.append({"where": f"{ranks} ranks", "body": body, "service_ms": 1e3 * statistics.median(took["service"]),
                         "gloo_ms": 1e3 * statistics.median(took["gloo"]),
                         "vs_gloo": statistics.median(g / s for s, g in zip(took["service"], took["gloo"], strict=True))})
        summary[f"tcp_vs_gloo_n{ranks}"] = min(r["vs_gloo"] for r in rows[-len(replies[0]["sums"]):]
                                               if SIZES[r["body"]] >= LARGE_NBYTES)
        trip = replies[0]["trip"]
        summary.setdefault("small_roundtrip_vs_gloo", statistics.median(trip["service"]) / statistics.median(trip["gloo"]))
    return rows, summary


def _slowest(each: list[list[float]]) -> list[float]:
    return [max(times) for times in zip(*each, strict=True)]


def rank(quick: bool) -> None:
    """One rank. Prints one line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=DEADLINE)
    bodies = IN_QUICK if quick else tuple(SIZES)
    sums = {body: summed(SIZES[body]) for body in bodies}
    print(json.dumps({"sums": sums, "trip": round_trips(200)}), flush=True)


def summed(nbytes: int) -> dict[str, list[float]]:
    """Seconds of each pass by method. The methods alternate, with a barrier before each pass."""
    world = dist.get_world_size()
    numel = nbytes // 4
    ours, theirs = Gradients(numel, world), Gradients(numel, world)
    plan = default_plan(job_of(ours), codec="identity()", path="service", servers=world, ranks_per_node=1,
                        fuse_nbytes=SMALL_NBYTES, cut_nbytes=max(nbytes // world, SMALL_NBYTES))
    session = commlayer.attach(ours, plan=plan, config=host_config(servers="each"))

    def service() -> None:
        ours(torch.ones(())).backward()

    def gloo() -> None:
        theirs(torch.ones(())).backward()
        works = [dist.all_reduce(p.grad, async_op=True) for p in theirs.parameters() if p.grad is not None]
        for work in works:
            assert work is not None
            work.wait()

    _agree(ours, theirs)
    seconds: dict[str, list[float]] = {"service": [], "gloo": []}
    ways: dict[str, Callable[[], None]] = {"service": service, "gloo": gloo}
    models = {"service": ours, "gloo": theirs}
    times = max(5, min(50, BUDGET_NBYTES // nbytes))
    for number in range(WARMUP + times):
        for way in ways if number % 2 else reversed(ways):
            models[way].zero_grad(set_to_none=False)
            dist.barrier()
            begin = time.perf_counter()
            ways[way]()
            if number >= WARMUP:
                seconds[way].append(time.perf_counter() - begin)
    session.close()
    return seconds


def _agree(ours: Gradients, theirs: Gradients) -> None:
    """Checks once, before timing, that both methods sum random gradients to the same result."""
    noise = torch.Generator().manual_seed(dist.get_rank())
    drawn = [torch.randn(p.shape, generator=noise) for p in ours.values]
    for model in (ours, theirs):
        torch.stack([(p * z).sum() for p, z in zip(model.values, drawn, strict=True)]).sum().backward()
    for mine, its in zip(ours.values, theirs.values, strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        dist.all_reduce(its.grad)
        if not torch.allclose(mine.grad * dist.get_world_size(), its.grad, rtol=1e-5, atol=1e-5):
            raise RuntimeError("the servers' sums are not those of Gloo")


def round_trips(times: int) -> dict[str, list[float]]:
    """Round trips of a small body between ranks 0 and 1: as a frame over TCP, and by Gloo's send and recv."""
    me = dist.get_rank()
    seconds: dict[str, list[float]] = {"service": [], "gloo": []}
    address: list[Any] = [None]
    transport = StreamTransport(Hello("transport", SERVER_BASE if me == 1 else 0))
    if me == 1:
        address = [transport.listen("127.0.0.1")]
        threading.Thread(target=_echo, args=(transport,), daemon=True).start()
    dist.broadcast_object_list(address, src=1)
    tensor = torch.zeros(SMALL_NBYTES, dtype=torch.uint8)
    body = bytes(SMALL_NBYTES)
    if me == 0:
        transport.dial(SERVER_BASE, tuple(address[0]), time.monotonic() + WAIT_S)
    for number in range(times):
        if me == 0:
            begin = time.perf_counter()
            header = Header(Kind.DATA, step=number)
            answer = transport.recv(SERVER_BASE, key(header._replace(sender=SERVER_BASE)))
            transport.send(SERVER_BASE, header, body)
            transport.pool.give(transport.wait(answer, time.monotonic() + WAIT_S).body)
            middle = time.perf_counter()
            seconds["service"].append(middle - begin)
            begin = time.perf_counter()
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
            seconds["gloo"].append(time.perf_counter() - begin)
        elif me == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
    dist.barrier()
    transport.close(0.1)
    return seconds


def _echo(transport: StreamTransport) -> None:
    while True:
        try:
            message = transport.wait(transport.recv(0), time.monotonic() + WAIT_S)
        except CommError:
            return  # the peer disconnected
        transport.send(0, message.header._replace(sender=SERVER_BASE), message.body)


if __name__ == "__main__":
    as_rank(lambda: rank("quick" in sys.argv[1:]))
