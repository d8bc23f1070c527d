"""One worker of the demo, under torchrun: trains the same model from the same initial weights twice, uncompressed and
compressed.

The worker ends when its standard input closes, because then its parent process has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import commlayer
from commlayer import native, records
from commlayer.demo import fleet, problem
from commlayer.demo.settings import DENSE, DemoSettings

LOST = 130
GRACE_S = 3.0
GROUP_TIMEOUT = timedelta(seconds=120)


def run(number: int, settings: DemoSettings, data: problem.Digits) -> None:
    """Trains until the model reaches the target accuracy. Evaluations do not count as training time."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = problem.mlp(settings.width, settings.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.rate)
    codec = (DENSE, settings.codec)[number]
    config = {
        "ranks_per_node": 1, "servers": "each", "shape": settings.shape(number), "cut_nbytes": settings.cut_nbytes,
        "deadline_s": settings.deadline_s,
    }
    stream = problem.batches(data.train, settings.batch, rank=rank, world=world, seed=settings.seed)
    with commlayer.attach(model, optimizer, compression=codec, config=config) as session:
        dist.barrier()
        if rank == 0:
            numel = sum(p.numel() for p in model.parameters())
            fleet.report(fleet.RunBegan(number, numel, native.core is not None))
        train_s, accuracy, reached = 0.0, 0.0, False
        for step in range(1, settings.max_steps + 1):
            begin = time.perf_counter()
            loss = train_step(model, optimizer, next(stream))
            train_s += time.perf_counter() - begin
            if step % settings.every == 0:
                accuracy = shared(problem.accuracy(model, data.test) if rank == 0 else 0.0)
                reached = accuracy >= settings.target
            if rank == 0:
                stats = session.metrics()
                sent_nbytes = int(stats["sent_nbytes"])
                fleet.report(fleet.Progress(number, step, loss, accuracy, train_s, stats["exposed_s"], sent_nbytes))
            if reached:
                break
        if rank == 0:
            fleet.report(fleet.RunEnded(number, reached))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: problem.Batch) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.item()


def shared(figure: float) -> float:
    """Broadcasts rank 0's number to every rank, so all ranks stop at the same step."""
    result = torch.tensor([figure], dtype=torch.float64)
    dist.broadcast(result, 0)
    return result.item()


def warm_up(settings: DemoSettings, data: problem.Digits) -> None:
    """Runs a few steps first, so torch's one-time initialization does not count against the first run."""
    model = problem.mlp(settings.width, settings.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.rate)
    stream = problem.batches(data.train, settings.batch, rank=0, world=1, seed=settings.seed)
    for _ in range(3):
        train_step(model, optimizer, next(stream))
    problem.accuracy(model, data.test)


def end_when_told() -> None:
    """Ends this process on SIGTERM, or when standard input closes, which means that the parent process has ended.

    The main thread gets GRACE_S seconds to end its servers.
    """

    def interrupt(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=insist, daemon=True).start()
        raise KeyboardInterrupt

    def insist() -> None:
        time.sleep(GRACE_S)
        os._exit(LOST)

    def follow() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, interrupt)
    threading.Thread(target=follow, name="demo-parent", daemon=True).start()


def main() -> None:
    settings = records.decode(sys.argv[1].encode(), DemoSettings, "settings of the demo")
    code = 0
    try:
        end_when_told()
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        data = problem.digits(settings.seed)
        warm_up(settings, data)
        for number in range(2):
            run(number, settings, data)
        dist.destroy_process_group()
    except KeyboardInterrupt:
        code = LOST
    except Exception as error:
        print(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", file=sys.stderr, flush=True)
        code = 1
    os._exit(code)  # a process group's destructor would wait for ranks that are gone


if __name__ == "__main__":
    main()
