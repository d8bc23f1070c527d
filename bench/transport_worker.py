"""One end of the transport measurement: takes bodies and says when all are there, or sends them and says how fast."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from typing import Any

from commlayer.control import carriers
from commlayer.control.grpc_port import stream_port
from commlayer.errors import CommError
from commlayer.transport.hello import Hello
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, key
from commlayer.transport.stream_transport import Settings, StreamTransport, note_refusal

WAIT_S = 60.0
KINDS = ("plain", "tls", "grpc")


def ends(rank: int, folder: str) -> dict[str, StreamTransport]:
    """One over TCP in plain text, one in TLS, one over gRPC in plain text."""
    return {kind: StreamTransport(Hello("transport", rank), settings=Settings(keys=Keys(folder) if kind == "tls" else None))
            for kind in KINDS}


def listening(kind: str, transport: StreamTransport, address: str) -> int:
    if kind != "grpc":
        return transport.listen(address)[1]
    return stream_port(None, address, 0, transport.take, note_refusal).number


def dial(kind: str, transport: StreamTransport, address: tuple[str, int]) -> None:
    deadline = time.monotonic() + WAIT_S
    if kind == "grpc":
        carriers.over_grpc(transport, SERVER_BASE, address, None, deadline)
    else:
        transport.dial(SERVER_BASE, address, deadline)


def take(args: argparse.Namespace) -> None:
    """Until its standard input ends."""
    made = ends(SERVER_BASE, args.keys)
    print(json.dumps({kind: listening(kind, transport, args.address) for kind, transport in made.items()}), flush=True)
    for transport in made.values():
        threading.Thread(target=answer, args=(transport,), daemon=True).start()
    sys.stdin.read()


def answer(transport: StreamTransport) -> None:
    """Says of each burst that its last body is there, and what this end has taken of the processor since it began."""
    with contextlib.suppress(CommError):  # the sender has ended
        while True:
            message = transport.wait(transport.recv(0), time.monotonic() + WAIT_S)
            if message.header.bucket == 0:
                spent = int(1e6 * time.process_time())
                transport.send(0, Header(Kind.DATA, step=message.header.step, sender=SERVER_BASE, used=spent))
            transport.pool.give(message.body)


def send(args: argparse.Namespace) -> None:
    made, ports = ends(0, args.keys), json.loads(args.ports)
    for kind, transport in made.items():
        dial(kind, transport, (args.address, ports[kind]))
    body, count = bytes(args.body), args.burst // args.body
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    spent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    there = burst(made["plain"], body, 1, 0)[1]
    for number in range(1, 2 + args.times):
        for kind in KINDS if number % 2 else reversed(KINDS):
            here = time.process_time()
            took_s, after = burst(made[kind], body, count, number)
            if number > 1:  # the first of each finds buffers that nobody has touched
                seconds[kind].append(count * len(body) / took_s / 1e9)
                spent[kind] += time.process_time() - here + after - there
            there = after
    gb = args.times * count * len(body) / 1e9
    told: dict[str, Any] = {**seconds, **{f"{kind}_cpu": spent[kind] / gb for kind in KINDS}}
    print(json.dumps(told), flush=True)


def burst(transport: StreamTransport, body: bytes, count: int, number: int) -> tuple[float, float]:
    """Seconds until all are there, and those of the processor at the other end since it began."""
    told = transport.recv(SERVER_BASE, key(Header(Kind.DATA, step=number, sender=SERVER_BASE)))
    begin = time.monotonic()
    for bucket in reversed(range(count)):
        transport.send(SERVER_BASE, Header(Kind.DATA, step=number, bucket=bucket, order=count - bucket), body)
    heard = transport.wait(told, begin + WAIT_S)
    return time.monotonic() - begin, heard.header.used / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.transport_worker")
    parser.add_argument("role", choices=["take", "send"])
    parser.add_argument("--keys", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--ports", default="{}")
    parser.add_argument("--body", type=int, default=4 << 20)
    parser.add_argument("--burst", type=int, default=64 << 20)
    parser.add_argument("--times", type=int, default=9)
    args = parser.parse_args()
    {"take": take, "send": send}[args.role](args)


if __name__ == "__main__":
    main()
