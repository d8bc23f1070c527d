"""Throughput of the transport against a plain socket, and of a summation server against memory.

Sends message bodies over a plain socket, TCP frames, TLS and gRPC: between two processes on loopback and between two hosts of
the lab. `python -m bench.transport` is one end of a link: it receives bodies and acknowledges each burst, or sends bursts and
prints the rates.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from bench import Unmeasurable
from bench.lab import Lab, LabUnavailable, sound
from bench.ranks import as_rank, program, start
from bench.report import Result
from commlayer.cluster.calls.grpc_port import open_stream_port
from commlayer.cluster.processes.channels import node_ranks
from commlayer.cluster.servers import dialing
from commlayer.cluster.servers.server_codecs import contributing_ranks, make_codec_ops
from commlayer.cluster.servers.summation import Summation
from commlayer.compressors import make_codec
from commlayer.engine.buckets.bucket import EncodedBucket
from commlayer.engine.model.model_tensors import describe_model
from commlayer.planner import default_plan
from commlayer.records import Plan
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.handshake import Hello, RefusalLog
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, Message

SIZES = {"4 MiB": 4 << 20, "64 KiB": 64 << 10}
BODY = "4 MiB"
"""The size that the summary uses: about the size of a bucket."""
KINDS = ("socket", "plain", "tls", "grpc")
"""A plain socket, which is as fast as this machine and the link allow; frames over TCP; frames over TLS; gRPC."""
RATIOS = (("vs_socket", "plain", "socket"), ("tls_vs_plain", "tls", "plain"), ("grpc_vs_tcp", "grpc", "plain"))


class Place(NamedTuple):
    """A link to measure."""

    name: str
    bps: float
    """0 means loopback."""
    one_way_s: float
    burst_nbytes: int
    times: int
    kinds: str = ",".join(KINDS)
    key: str = ""


LOOPBACK = Place("loopback", 0.0, 0.0, 64 << 20, 9, key="loopback")
FAST = Place("1 Gb/s", 1e9, 0.0005, 16 << 20, 9, key="1g")
# A burst takes about 8 s, so the round trip and TCP's slow start do not hide the steady rate.
LONG = Place("100 Mb/s, 150 ms", 100e6, 0.075, 96 << 20, 3, "socket,plain", "100m_150ms")
LINES = FAST, LONG
# Upper bound for any sender: the lab counts IP bytes at MTU 1500. Of 1500 bytes a segment carries 1448 of payload (20 bytes are
# IP's, 20 TCP's, 12 for timestamps): 0.965. A part of a body, about 50,000 bytes at 100 Mb/s and 500,000 at 1 Gb/s, has a
# header of 68 bytes. So a full link delivers about 0.95 of its nominal rate (0.94 over Ethernet, with 38 more bytes a packet).
DEADLINE_S = 240.0


def run(quick: bool) -> Result:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = key_folders(Path(folder) / "keys", "sink", "source")
        rows += [_row(LOOPBACK, size, keys, None, quick) for size in list(SIZES)[: 1 if quick else None]]
        for line in LINES[: 1 if quick else None]:
            try:
                with Lab(hosts=2, up_bps=line.bps, down_bps=line.bps, delay_s=line.one_way_s) as lab:
                    before = lab.counters()
                    row = _row(line, BODY, keys, lab, quick)
                    rows.append(row | {"void": not sound(before, lab.counters()), "congestion": lab.congestion})
            except LabUnavailable as reason:
                rows.append({"where": line.name, "void": True, "why": str(reason)})
    added, server = server_throughput(quick)
    return {"rows": [*rows, added], "summary": summary_of(rows) | server}


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summary of the rows that are not void: throughput ratios between transports, and throughput relative to the link rate."""
    result: dict[str, Any] = {}
    for place in (LOOPBACK, *LINES):
        for row in rows:
            if row["void"] or row["where"] != place.name or row["body"] != BODY:
                continue
            result |= {figure if place is FAST else f"{figure}_{place.key}": row[figure]
                       for figure in ("tls_vs_plain", "grpc_vs_tcp") if figure in row}
            result[f"tcp_vs_socket_{place.key}"] = row["vs_socket"]
            if place.bps:
                result |= {f"{name}_vs_line_{place.key}": 8e9 * row[f"{kind}_gb_s"] / place.bps
                           for name, kind in (("tcp", "plain"), ("socket", "socket"))}
    return result


def key_folders(folder: Path, *names: str) -> dict[str, str]:
    """Keys of a new job, by member."""
    try:
        from commlayer.cluster.keys import authority
    except ImportError as error:
        raise Unmeasurable(f"{error.name} is not installed") from None
    authority.init(folder)
    return {name: str(authority.add(folder, name)) for name in names}


def _row(place: Place, size: str, keys: dict[str, str], lab: Lab | None, quick: bool) -> dict[str, Any]:
    """One process receives; another sends bursts, alternating between the transports. The row has medians over bursts."""
    address = lab.addresses[0] if lab else "127.0.0.1"
    with contextlib.ExitStack() as stack:
        def started(host: int, *arguments: object) -> subprocess.Popen[str]:
            process = start(lab, host, program("bench.transport", *arguments), env={}, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        sink = started(0, "receive", keys["sink"], address)
        assert sink.stdout
        if not select.select([sink.stdout], [], [], DEADLINE_S)[0]:
            raise TimeoutError(f"the receiving process reported no ports within {DEADLINE_S:.0f} s")
        ports = sink.stdout.readline()
        times = 3 if quick else place.times
        source = started(1, "send", keys["source"], address, ports, SIZES[size], place.burst_nbytes, times, place.kinds)
        figures = json.loads(source.communicate(timeout=DEADLINE_S)[0])
    kinds = place.kinds.split(",")
    row: dict[str, Any] = {"where": place.name, "body": size, "void": False}
    row |= {f"{kind}_gb_s": median(figures[kind]) for kind in kinds}
    for figure, kind, other in RATIOS:
        if kind in kinds:
            row[figure] = median(mine / its for mine, its in zip(figures[kind], figures[other], strict=True))
    return row


WORLD = 4
FLOATS = 4 << 20
"""Floats in a body, 16 MiB: four bodies are far larger than the caches."""
TIMES, QUICK_TIMES = 25, 7


def server_throughput(quick: bool) -> tuple[dict[str, Any], dict[str, float]]:
    """A row and the summary figure `server_add_vs_stream`: a summation server on dense bodies, against `r += g` in place.

    Uses the real server without sockets: it checks each body and adds the bodies in member order. Rates count the added bytes.
    The first and last body of a step are not timed: the first starts the sum, and after the last the sum is encoded and sent.
    """
    model = torch.nn.Linear(1 << 11, FLOATS >> 11, bias=False)
    plan = default_plan(describe_model(model), codec="identity()", path="service", servers=1, ranks_per_node=1,
                        fuse_nbytes=4 * FLOATS,
                        cut_nbytes=4 * FLOATS)
    bodies = [_body(model, plan, rank) for rank in range(WORLD)]
    server = Summation(0, 1, dict(make_codec_ops(plan, 0)), contributing_ranks(plan, node_ranks(WORLD, 1)))
    acc, gradient = torch.rand(FLOATS), torch.rand(FLOATS)
    torch.set_num_threads(1)  # the server adds a bucket on one thread, too
    rates: list[float] = []
    streams: list[float] = []
    for step in range(QUICK_TIMES if quick else TIMES):
        messages = [Message(rank, Header(Kind.PUSH, 1, step, 0, codec=codec, sender=rank, weight=1.0, used=used), body)
                    for rank, (codec, used, body) in enumerate(bodies)]
        server.push(messages[0], now=0.0)
        begin = time.perf_counter()
        for message in messages[1:-1]:
            server.push(message, now=0.0)
        added = time.perf_counter()
        server.push(messages[-1], now=0.0)
        again = time.perf_counter()
        for _ in messages[1:-1]:
            acc.add_(gradient)
        rates.append((WORLD - 2) * 4 * FLOATS / (added - begin))
        streams.append((WORLD - 2) * 4 * FLOATS / (time.perf_counter() - again))
    ratio = median(mine / its for mine, its in zip(rates, streams, strict=True))
    row = {"where": "a server's sums", "body": "16 MiB", "server_gb_s": median(rates) / 1e9,
           "stream_gb_s": median(streams) / 1e9}
    return row, {"server_add_vs_stream": ratio}


def _body(model: torch.nn.Module, plan: Plan, rank: int) -> tuple[int, int, memoryview]:
    """A body as a worker encodes it: codec id, mask of its slices, and the bytes."""
    (planned,) = plan.buckets
    worker = EncodedBucket(planned, describe_model(model), make_codec(planned, plan=plan), torch.device("cpu"), 0, rank=rank)
    worker.sources = [parameter.detach() for parameter in model.parameters()]
    worker.gather(1.0, 1.0)
    return worker.codec.id, worker.ledger.all_slices, worker.coder.payload[: worker.encode()]


WAIT_S = 60.0
LENGTH = struct.Struct("<Q")
CHUNK_NBYTES = 1 << 20


def transports_of(rank: int, folder: str) -> dict[str, StreamTransport]:
    return {kind: StreamTransport(Hello("transport", rank), settings=Settings(keys=Keys(folder) if kind == "tls" else None))
            for kind in KINDS[1:]}


def listen(kind: str, transport: StreamTransport, address: str) -> int:
    if kind != "grpc":
        return transport.listen(address)[1]
    return open_stream_port(None, address, 0, transport.take, RefusalLog().refused).number


def dial(kind: str, transport: StreamTransport, address: tuple[str, int]) -> None:
    deadline = time.monotonic() + WAIT_S
    if kind == "grpc":
        dialing.dial_grpc(transport, SERVER_BASE, address, None, deadline)
    else:
        transport.dial(SERVER_BASE, address, deadline)


def receive(folder: str, address: str) -> dict[str, Any]:
    """Receives until standard input is closed. Prints the ports first."""
    transports = transports_of(SERVER_BASE, folder)
    plain = socket.create_server((address, 0))
    threading.Thread(target=receive_plain, args=(plain,), daemon=True).start()
    for transport in transports.values():
        transport.arrived = functools.partial(acknowledge, transport)
    ports = {kind: listen(kind, transport, address) for kind, transport in transports.items()}
    print(json.dumps({"socket": plain.getsockname()[1], **ports}), flush=True)
    sys.stdin.read()
    return {}


def acknowledge(transport: StreamTransport, message: Message) -> None:
    """Acknowledges the last body of each burst."""
    if message.header.bucket == 0:
        transport.send(0, Header(Kind.DATA, step=message.header.step, sender=SERVER_BASE))
    transport.pool.give(message.body)


def receive_plain(plain: socket.socket) -> None:
    """Receives bursts on the plain socket: a length, then that many bytes. Replies with a byte."""
    connection, _ = plain.accept()
    room = bytearray(CHUNK_NBYTES)
    while head := connection.recv(LENGTH.size, socket.MSG_WAITALL):
        left = LENGTH.unpack(head)[0]
        while left:
            if not (nbytes := connection.recv_into(room, min(left, CHUNK_NBYTES))):
                return  # the sender disconnected during a burst
            left -= nbytes
        connection.sendall(b"!")


def send(folder: str, address: str, listening: str, body_nbytes: str, burst_nbytes: str, bursts: str, sending: str
         ) -> dict[str, Any]:
    """Sends bursts, in turn by each kind of `sending`. Rates in GB/s by kind."""
    transports, ports, kinds = transports_of(0, folder), json.loads(listening), sending.split(",")
    replies = queue.SimpleQueue[Message]()
    for kind, transport in transports.items():
        transport.arrived = replies.put
        dial(kind, transport, (address, ports[kind]))
    plain = socket.create_connection((address, ports["socket"]))
    body, count = bytes(int(body_nbytes)), int(burst_nbytes) // int(body_nbytes)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(1, 2 + int(bursts)):
        for kind in kinds if number % 2 else reversed(kinds):
            begin = time.monotonic()
            if kind == "socket":
                send_plain_burst(plain, body, count)
            else:
                send_burst(transports[kind], replies, body, count, number)
            if number > 1:  # the first burst of each warms up the buffers
                rates[kind].append(count * len(body) / (time.monotonic() - begin) / 1e9)
    return rates


def send_burst(transport: StreamTransport, replies: queue.SimpleQueue[Message], body: bytes, count: int, number: int) -> None:
    """Sends the bodies, and waits until the peer acknowledges the last one."""
    for bucket in reversed(range(count)):
        transport.send(SERVER_BASE, Header(Kind.DATA, step=number, bucket=bucket, order=count - bucket), body)
    replies.get(timeout=WAIT_S)


def send_plain_burst(plain: socket.socket, body: bytes, count: int) -> None:
    """The same over the plain socket."""
    plain.sendall(LENGTH.pack(count * len(body)))
    for _ in range(count):
        plain.sendall(body)
    plain.recv(1)


def end(role: str, *arguments: str) -> dict[str, Any]:
    return receive(*arguments) if role == "receive" else send(*arguments)


if __name__ == "__main__":
    as_rank(end)
