"""One rank of a mesh, as a process of its own: `python transport_peer.py RANK N DEADLINE_S [dataloader]`.

Talks to its parent in lines of JSON: says its address, reads all addresses, says step 3 once it is well under way, says the
error that ended it, and exits when its stdin ends. The last rank may hold a DataLoader whose worker, forked from it, is busy.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from commlayer.cluster import uplink
from commlayer.cluster.grpc_server import open_stream_port
from commlayer.errors import CommError
from commlayer.transport.endpoint import StreamTransport, log_refusal
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import Header, Kind, key


def data(sender: int, bucket: int = 0, step: int = 0) -> Header:
    return Header(Kind.DATA, step=step, bucket=bucket, sender=sender)


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def mesh(rank: int, n: int) -> StreamTransport:
    """The higher rank dials, as trainers do: rank 0 over gRPC, others over TCP. A rank may be dialled before it has all
    addresses: it listens from the first moment."""
    transport = StreamTransport(Hello("processes", rank))
    streams = open_stream_port(None, "127.0.0.1", 0, transport.take, log_refusal)
    say(address=("127.0.0.1", streams.number) if rank == 0 else transport.listen())
    addresses = json.loads(sys.stdin.readline())
    for peer in range(rank):
        address, deadline = tuple(addresses[peer]), time.monotonic() + 30
        if peer == 0:
            uplink.dial_grpc(transport, peer, address, None, deadline)
        else:
            transport.dial(peer, address, deadline)
        transport.send(peer, data(rank, bucket=1))
    for peer in range(rank + 1, n):
        transport.wait(transport.recv(peer, key(data(peer, bucket=1))), time.monotonic() + 30)
    return transport


def busy_worker() -> Any:
    import torch

    class Endless(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, _: int) -> int:
            threading.Event().wait()  # never notices that its parent died
            return 0

    batches = iter(torch.utils.data.DataLoader(Endless(), num_workers=1, multiprocessing_context="fork"))
    say(worker=batches._workers[0].pid)
    return batches


def main(rank: int, n: int, deadline_s: float, loader: bool) -> None:
    transport = mesh(rank, n)
    held = busy_worker() if loader else None
    step = 0
    try:
        while True:
            step += 1
            deadline = time.monotonic() + deadline_s
            for peer in transport.peers:
                transport.send(peer, data(rank, step=step), bytes([rank]) * 50_000)
            for peer in sorted(set(range(n)) - {rank}, reverse=True):  # the one that the test ends comes first
                message = transport.wait(transport.recv(peer, key(data(peer, step=step))), deadline)
                assert bytes(message.body) == bytes([peer]) * 50_000
            if step == 3:
                say(step=step)
    except CommError as error:
        say(error=type(error).__name__, peer=error.peer, code=error.code, early_s=deadline - time.monotonic())
    sys.stdin.read()  # the others must not take our end for the one under test
    transport.close()
    del held


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), "dataloader" in sys.argv)
