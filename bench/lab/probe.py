"""Probe on each host of a self-check: sends UDP, pings over TCP. Runs commands from stdin.

Commands: send DATAGRAM_NBYTES BPS ADDRESS... | stop | ping ADDRESS TIMES. Imports only the standard library, so that it
starts fast.

UDP at a fixed rate measures only the link. TCP would add its congestion control, which can slow down for seconds when
acknowledgements are queued with the data of other hosts.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

PORT = 7411
TIMEOUT_S = 10.0
UDP_SEGMENT = 103  # linux/udp.h: one system call for many datagrams
BURST_S = 2e-3
BURST_NBYTES = 64_000


def send_datagrams(datagram_nbytes: int, bps: float, addresses: list[str], stop: threading.Event) -> None:
    """Sends bps of IP traffic to the addresses in rotation, in bursts of about BURST_S, until stopped."""
    per_burst = int(min(bps / 8 * BURST_S, BURST_NBYTES) / datagram_nbytes) or 1
    data = bytes(per_burst * datagram_nbytes)
    burst_s = per_burst * (datagram_nbytes + 28) * 8 / bps
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outbox:
        outbox.setsockopt(socket.SOL_UDP, UDP_SEGMENT, datagram_nbytes)
        due = time.perf_counter()
        while not stop.is_set():
            for address in addresses:
                outbox.sendto(data, (address, PORT))
                due += burst_s
                time.sleep(max(0.0, due - time.perf_counter()))


def echo(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := connection.recv(64):
                connection.sendall(data)


def ping(address: str, times: int) -> list[float]:
    round_trips_s = []
    with socket.create_connection((address, PORT), TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(times):
            begin = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            round_trips_s.append(time.perf_counter() - begin)
    return round_trips_s


def main() -> None:
    listener = socket.create_server(("", PORT), backlog=64)
    threading.Thread(target=echo, args=(listener,), daemon=True).start()
    inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)  # nobody reads it: what arrives beyond its buffer is dropped
    inbox.bind(("", PORT))
    stop, sender = threading.Event(), threading.Thread()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        answer: object = "ok"
        if verb == "send":
            stop.clear()
            order = (int(words[0]), float(words[1]), words[2:], stop)
            sender = threading.Thread(target=send_datagrams, args=order, daemon=True)
            sender.start()
        elif verb == "stop":
            stop.set()
            sender.join(TIMEOUT_S)
        elif verb == "ping":
            answer = ping(words[0], int(words[1]))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
