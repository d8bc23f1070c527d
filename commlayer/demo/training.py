"""One worker of the demo: trains a small character model at the pace of a GPU, alone, with DDP, or with commlayer.

It reports on standard output, one line of JSON each, starts after a line on standard input, and ends when standard input
closes, because then the demo has ended. Each worker takes one byte of the input.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer import native, records
from commlayer.demo.settings import COMMLAYER, DDP, STEP_S, WorkerReport, WorkerSettings

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 192, 4, 4, 32, 4
"""A GPT of 1.8 million parameters, and 128 characters in each batch: far below its noise scale."""
RATE, CLIP = 1e-3, 1.0
"""AdamW's learning rate for all runs, the best for one machine of 0.5e-3, 0.7e-3, 1e-3, 1.4e-3 and 2e-3; and the largest norm
of gradients."""
HELD_OUT, EVALUATE_S = 64, 1.5
"""Rows of the text for evaluation, and seconds between two evaluations, which the first home makes."""
FORWARD_S, BACKWARD_S = STEP_S / 3, 2 * STEP_S / 3
GRACE_S = 3.0
"""Seconds that a worker gets to leave its job in order."""


def text() -> torch.Tensor:
    """Python's built-in handbook (the topics of `help()`) as numbers: 460,000 characters of English and Python."""
    from pydoc_data.topics import topics

    characters = re.sub(r"[^\n -~]", "", "\n".join(topics[name] for name in sorted(topics)))
    return torch.frombuffer(bytearray(characters.encode()), dtype=torch.uint8).long().sub(31).clamp(0)


LETTERS = 96
"""Newline, and the printable characters of ASCII."""


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of text to train on and to evaluate with."""
    rows = text()
    rows = rows[: len(rows) // (CONTEXT + 1) * (CONTEXT + 1)].unflatten(0, (-1, CONTEXT + 1))
    held_out = torch.arange(len(rows)) % (len(rows) // HELD_OUT) == 0
    return rows[~held_out], rows[held_out]


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def batches(seed: int, home: int, homes: int) -> Iterator[torch.Tensor]:
    """Yields this home's batches. No home sees another home's rows, or a row twice before all others."""
    rows, _ = data()
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from rows[torch.randperm(len(rows), generator=generator)[home::homes]].split(BATCH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, 2))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        fed: torch.Tensor = x + self.feed(self.norms[1](x))
        return fed


class GPT(nn.Module):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        predicted: torch.Tensor = self.head(self.blocks(self.letters(x) + self.places.weight))
        return predicted


class Pace:
    """Lets the passes through a model's blocks take as long as on a GPU, by sleeping for the rest of the time. Gradients become
    ready block by block, as there."""

    def __init__(self, blocks: nn.Sequential) -> None:
        self._begin_s = 0.0
        self.passes = self.late = 0
        """Passes, and those for which computing took longer than the pace."""
        for i, block in enumerate(blocks):
            block.register_forward_hook(self._until(FORWARD_S, (i + 1) / len(blocks)))
            block.register_full_backward_pre_hook(self._until(BACKWARD_S, 1 - i / len(blocks)))

    def begin(self) -> None:
        self._begin_s = time.perf_counter()

    def _until(self, pass_s: float, part: float) -> Callable[..., None]:
        def wait(block: nn.Module, *_: object) -> None:
            if not block.training:
                return
            left_s = self._begin_s + pass_s * part - time.perf_counter()
            if part == 1:
                self.passes, self.late = self.passes + 1, self.late + (left_s < 0)
            time.sleep(max(0.0, left_s))

        return wait


class DemoWorker:
    """The ends of this process that the demo holds: its standard input and output."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings, self._started = settings, threading.Event()
        threading.Thread(target=self._follow, name="demo", daemon=True).start()

    def report(self, **what: Any) -> None:
        """Writes a report in one call, so that lines of several processes do not mix."""
        os.write(1, records.encode(WorkerReport(self.settings.run, self.settings.home, **what)) + b"\n")

    def wait(self) -> None:
        self.report(ready=True, native=native.core is not None)
        self._started.wait()

    def _follow(self) -> None:
        if os.read(0, 1):
            self._started.set()
            end = select.poll()
            end.register(0, 0)  # the end of the input; what is left to read is for other workers
            end.poll()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(GRACE_S)
        os._exit(0)


def train(worker: DemoWorker, gpt: GPT, model: nn.Module, optimizer: torch.optim.Optimizer,
          session: commlayer.Session | None = None) -> None:
    """Trains until the process ends. `model`: what runs the passes; the blocks of `gpt` have the pace."""
    settings, pace = worker.settings, Pace(gpt.blocks)
    rows, (_, held_out) = batches(settings.seed, settings.home, settings.homes), data()
    worker.wait()
    begin_s = time.perf_counter()
    evaluated_s = 0.0
    for step, batch in enumerate(rows, 1):
        pace.begin()
        at_s, validation = time.perf_counter() - begin_s, None
        if settings.home == 0 and at_s >= evaluated_s + EVALUATE_S:
            # The evaluation's time counts as a part of the paced forward pass, because a GPU needs almost no time for it.
            validation, evaluated_s = evaluate(gpt, held_out, session), at_s
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        pace.begin()
        loss.backward()
        if session is None:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        else:
            session.log_loss(loss)
        optimizer.step()
        plan = session and session.inspect.plan
        every = plan.local_steps if plan else 1
        worker.report(step=step, at_s=at_s, loss=validation, every=every, late=pace.late / pace.passes)


@torch.no_grad()
def evaluate(gpt: GPT, rows: torch.Tensor, session: commlayer.Session | None) -> float:
    """The loss of the weights that all homes have: under local steps, those of the last exchange."""
    with nullcontext() if session is None else session.averaged():
        loss = loss_of(gpt.eval(), rows).item()
    gpt.train()
    return loss


class RelayAddresses(Store):
    """The store of torch's process group. It gives Gloo the relay's addresses in place of those of the other ranks.

    Of two ranks, the one with the larger address connects to the other. Gloo compares hosts first, then ports as numbers in the
    machine's byte order. The rank with the larger number must have the larger address, so its relays get small port numbers.
    The other rank gets the address of a large host, to which it never connects.
    """

    def __init__(self, worker: DemoWorker) -> None:
        super().__init__()
        self._worker, self._store = worker, FileStore(worker.settings.store, worker.settings.homes)

    def set(self, key: str, value: Any) -> None:  # bytes, although torch's stub says str
        for port in ADDRESS.findall(value):
            self._store.set(f"rank at {port.hex()}", str(self._worker.settings.home))
            self._worker.report(port=int.from_bytes(port))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return ADDRESS.sub(self._relayed, self._store.get(key))

    def _relayed(self, address: re.Match[bytes]) -> bytes:
        rank = int(self._store.get(f"rank at {address[1].hex()}"))
        if rank < self._worker.settings.home:
            return address[0].replace(address[1], self._worker.settings.ports[rank].to_bytes(2))
        return address[0].replace(OWN, WAITS_FOR) if rank > self._worker.settings.home else address[0]

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait(keys, *timeout)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


ADDRESS = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)
"""An IPv4 address on loopback as system calls take it, which is how Gloo publishes it. The group is the port."""
OWN, WAITS_FOR = b"\x7f\x00\x00\x01", b"\x7f\xff\xff\xfe"


def run(settings: WorkerSettings) -> None:
    worker = DemoWorker(settings)
    for _ in range(3):  # torch's first passes take longer
        GPT(settings.seed)(next(batches(0, 0, 1))[:, :-1]).sum().backward()
    gpt = GPT(settings.seed)
    optimizer = make_optimizer(gpt)
    if settings.run == COMMLAYER:
        with commlayer.attach(gpt, optimizer, sync="auto", clip_grad_norm=CLIP) as session:
            train(worker, gpt, gpt, optimizer, session)
    model: nn.Module = gpt
    if settings.run == DDP:
        dist.init_process_group("gloo", store=RelayAddresses(worker), rank=settings.home, world_size=settings.homes)
        model = DistributedDataParallel(gpt)
        model.register_comm_hook(None, fp16_compress_hook)
    train(worker, gpt, model, optimizer)


def make_optimizer(gpt: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(gpt.parameters(), lr=RATE)


def main() -> None:
    """Runs one worker, or several in forked processes, which share what torch's modules take to load."""
    workers = [records.decode(text.encode(), WorkerSettings, "settings of the demo") for text in sys.argv[1:]]
    torch.set_num_threads(1)
    if len(workers) > 1:
        make_optimizer(GPT(0))  # loads torch._dynamo
        for settings in workers:
            if not os.fork():
                workers = [settings]
                break
    if len(workers) == 1:
        run(workers[0])
    _, status = os.wait()  # returns when the first worker ends; workers train until the demo ends
    os._exit(os.waitstatus_to_exitcode(status) and 1)


if __name__ == "__main__":
    main()
