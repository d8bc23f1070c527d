"""One end of `bench transport`: receives bodies and acknowledges each burst, or sends bursts and prints the rates."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import struct
import sys
import threading
import time
from typing import Any

from commlayer.cluster.calls.grpc_port import open_stream_port
from commlayer.cluster.servers import dialing
from commlayer.errors import CommError
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.handshake import Hello, RefusalLog
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, key

WAIT_S = 60.0
KINDS = ("socket", "plain", "tls", "grpc")
"""A plain socket, which is as fast as this machine and the link allow; frames over TCP; frames over TLS; gRPC."""
LENGTH = struct.Struct("<Q")
CHUNK_NBYTES = 1 << 20


def ends(rank: int, folder: str) -> dict[str, StreamTransport]:
    return {kind: StreamTransport(Hello("transport", rank), settings=Settings(keys=Keys(folder) if kind == "tls" else None))
            for kind in KINDS[1:]}


def listening(kind: str, transport: StreamTransport, address: str) -> int:
    if kind != "grpc":
        return transport.listen(address)[1]
    return open_stream_port(None, address, 0, transport.take, RefusalLog().refused).number


def dial(kind: str, transport: StreamTransport, address: tuple[str, int]) -> None:
    deadline = time.monotonic() + WAIT_S
    if kind == "grpc":
        dialing.dial_grpc(transport, SERVER_BASE, address, None, deadline)
    else:
        transport.dial(SERVER_BASE, address, deadline)


def take(args: argparse.Namespace) -> None:
    """Receives until standard input is closed. Prints the ports first."""
    transports = ends(SERVER_BASE, args.keys)
    bare = socket.create_server((args.address, 0))
    threading.Thread(target=drink, args=(bare,), daemon=True).start()
    ports = {kind: listening(kind, transport, args.address) for kind, transport in transports.items()}
    print(json.dumps({"socket": bare.getsockname()[1], **ports}), flush=True)
    for transport in transports.values():
        threading.Thread(target=answer, args=(transport,), daemon=True).start()
    sys.stdin.read()


def answer(transport: StreamTransport) -> None:
    """Acknowledges the last body of each burst, with the CPU time of this process so far."""
    with contextlib.suppress(CommError):  # the sender disconnected
        while True:
            message = transport.wait(transport.recv(0), time.monotonic() + WAIT_S)
            if message.header.bucket == 0:
                spent = int(1e6 * time.process_time())
                transport.send(0, Header(Kind.DATA, step=message.header.step, sender=SERVER_BASE, used=spent))
            transport.pool.give(message.body)


def drink(bare: socket.socket) -> None:
    """Receives bursts on the plain socket: a length, then that many bytes. Replies with the CPU time of this process."""
    taken, _ = bare.accept()
    room = bytearray(CHUNK_NBYTES)
    while head := taken.recv(LENGTH.size, socket.MSG_WAITALL):
        left = LENGTH.unpack(head)[0]
        while left:
            if not (got := taken.recv_into(room, min(left, CHUNK_NBYTES))):
                return  # the sender disconnected during a burst
            left -= got
        taken.sendall(LENGTH.pack(int(1e6 * time.process_time())))


def send(args: argparse.Namespace) -> None:
    transports, ports, kinds = ends(0, args.keys), json.loads(args.ports), args.kinds.split(",")
    for kind, transport in transports.items():
        dial(kind, transport, (args.address, ports[kind]))
    bare = socket.create_connection((args.address, ports["socket"]))
    body, count = bytes(args.body), args.burst // args.body
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    spent: dict[str, float] = dict.fromkeys(kinds, 0.0)
    peer_cpu_s = burst(transports["plain"], body, 1, 0)[1]
    for number in range(1, 2 + args.times):
        for kind in kinds if number % 2 else reversed(kinds):
            own_cpu_s = time.process_time()
            took_s, after = poured(bare, body, count) if kind == "socket" else burst(transports[kind], body, count, number)
            if number > 1:  # the first burst of each warms up the buffers
                seconds[kind].append(count * len(body) / took_s / 1e9)
                spent[kind] += time.process_time() - own_cpu_s + after - peer_cpu_s
            peer_cpu_s = after
    gb = args.times * count * len(body) / 1e9
    figures: dict[str, Any] = {**seconds, **{f"{kind}_cpu": spent[kind] / gb for kind in kinds}}
    print(json.dumps(figures), flush=True)


def burst(transport: StreamTransport, body: bytes, count: int, number: int) -> tuple[float, float]:
    """Seconds until the peer acknowledges the burst, and the peer's CPU seconds so far."""
    handle = transport.recv(SERVER_BASE, key(Header(Kind.DATA, step=number, sender=SERVER_BASE)))
    begin = time.monotonic()
    for bucket in reversed(range(count)):
        transport.send(SERVER_BASE, Header(Kind.DATA, step=number, bucket=bucket, order=count - bucket), body)
    reply = transport.wait(handle, begin + WAIT_S)
    return time.monotonic() - begin, reply.header.used / 1e6


def poured(bare: socket.socket, body: bytes, count: int) -> tuple[float, float]:
    """The same over the plain socket."""
    begin = time.monotonic()
    bare.sendall(LENGTH.pack(count * len(body)))
    for _ in range(count):
        bare.sendall(body)
    spent = LENGTH.unpack(bare.recv(LENGTH.size, socket.MSG_WAITALL))[0] / 1e6
    return time.monotonic() - begin, spent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.transport_worker")
    parser.add_argument("role", choices=["take", "send"])
    parser.add_argument("--keys", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--ports", default="{}")
    parser.add_argument("--body", type=int, default=4 << 20)
    parser.add_argument("--burst", type=int, default=64 << 20)
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which of them send")
    args = parser.parse_args()
    {"take": take, "send": send}[args.role](args)


if __name__ == "__main__":
    main()
