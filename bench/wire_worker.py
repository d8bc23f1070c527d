"""One process of `bench wire`: a rank that averages dense gradients with almost no compute, or one end of an echo test.

Prints its results as lines of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commlayer
from bench.as_rank import as_rank
from bench.worker import DEADLINE, host_config
from commlayer.transport.endpoint import StreamTransport
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE, Handle, Header, Kind, key

PORT = 7500
URGENT_NBYTES, BULK_NBYTES = 1 << 10, 1 << 20
BULK_ORDER = 1000
UNDER_WAY = 8
"""Bulk frames in flight at once."""
PAUSE_S = 0.05


class Gradients(nn.Module):
    """Parameters whose gradients cost almost nothing to compute."""

    def __init__(self, numel: int, tensors: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.zeros(numel // tensors) for _ in range(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([value.sum() for value in self.values]).sum() * x


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Prints start and end of each step, by the monotonic clock that all hosts of a lab share."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=DEADLINE)
    model = Gradients(args.numel, args.tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = host_config(**json.loads(args.config))
    session = commlayer.attach(model, optimizer, compression=commlayer.compressors.parse(args.codec), config=config)
    steps = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        begin = time.monotonic()
        model(torch.ones(())).backward()
        steps.append((begin, time.monotonic()))
    print(json.dumps({"steps": steps}), flush=True)
    session.close()
    return {}


def echo(args: argparse.Namespace) -> dict[str, Any]:
    """Echoes each frame with its own priority until the peer disconnects."""
    transport = StreamTransport(Hello("wire", SERVER_BASE))
    gone = threading.Event()

    def arrived(handle: Handle) -> None:
        if handle.error() is not None:
            gone.set()
            return
        message = handle.message()
        transport.send(message.peer, message.header._replace(sender=SERVER_BASE), message.body)
        transport.recv(0).on_done(arrived)

    transport.recv(0).on_done(arrived)
    transport.listen(os.environ["HOST_ADDRESS"], PORT)
    gone.wait(60.0)
    transport.close()
    return {"echoed": True}


def ask(args: argparse.Namespace) -> dict[str, Any]:
    """Prints round trips of urgent frames: first on an idle link, then on a link full of bulk frames."""
    transport = StreamTransport(Hello("wire", 0))
    for _ in range(100):
        try:
            transport.dial(SERVER_BASE, (args.address, PORT), time.monotonic() + 5.0)
            break
        except commlayer.CommError:
            time.sleep(0.1)
    result: dict[str, Any] = {"idle_s": [urgent(transport, i) for i in range(args.times)]}
    stop = threading.Event()

    def bulk(number: int) -> None:
        header = Header(Kind.DATA, bucket=number, order=BULK_ORDER)
        transport.recv(SERVER_BASE, key(header)).on_done(lambda handle: more(number, handle))
        transport.send(SERVER_BASE, header, bytes(BULK_NBYTES))

    def more(number: int, handle: Handle) -> None:
        if handle.error() is None and not stop.is_set():
            bulk(number + UNDER_WAY)

    for number in range(1, UNDER_WAY + 1):
        bulk(number)
    time.sleep(args.settle_s)
    print(json.dumps({"full": True}), flush=True)
    result["bulk_s"] = [urgent(transport, args.times + i) for i in range(args.times)]
    stop.set()
    print(json.dumps(result), flush=True)
    transport.close(0.1)
    return {}


def urgent(transport: StreamTransport, number: int) -> float:
    header = Header(Kind.DATA, generation=1 + number)
    answer = transport.recv(SERVER_BASE, key(header))
    begin = time.monotonic()
    transport.send(SERVER_BASE, header, bytes(URGENT_NBYTES))
    transport.wait(answer, begin + 60.0)
    took_s = time.monotonic() - begin
    time.sleep(PAUSE_S)
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.wire_worker")
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--codec", default="fp16()")
    parser.add_argument("--numel", type=int, default=4 << 20)
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--config", default="{}", help="JSON, on top of what a host of the lab needs")
    parser.add_argument("--address", default="127.0.0.1", help="of the end that echoes")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--settle-s", type=float, default=2.0)
    args = parser.parse_args()
    result = ROLES[args.role](args)
    if result:
        print(json.dumps(result), flush=True)


ROLES = {"train": train, "echo": echo, "ask": ask}

if __name__ == "__main__":
    as_rank(main)
