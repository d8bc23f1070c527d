"""Four uneven workers share a batch as their speeds allow: torchrun --standalone --nproc-per-node 4 examples/uneven.py

Each worker sleeps a number of milliseconds per step and per sample, like GPUs of different age.
In the second third worker 0 slows down. Trains with equal shares first, then profiled and balanced, and compares.
"""

import argparse
import time
from statistics import mean, median, stdev

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commlayer
from commlayer.balance import Note, Sampler
from commlayer.balance.balancer import describe
from commlayer.demo.problem import accuracy, digits, mlp

SPEED_MS = [(3.0, 0.4), (3.0, 0.4), (3.0, 0.8), (6.0, 2.4)]  # to begin a step, for each sample
SLOWER = 2.5  # worker 0, in the second third

parser = argparse.ArgumentParser()
parser.add_argument("--modes", nargs="+", default=["equal", "balanced"], choices=["equal", "balanced"], metavar="MODE",
                    help="equal, balanced; default: both")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch", type=int, default=96)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--seeds", type=int, default=1, help="train with this many seeds and compare accuracies")
args = parser.parse_args()


def train(mode: str, seed: int) -> tuple[float, float]:
    """Accuracy, and seconds of training."""
    torch.manual_seed(seed)
    data, model = digits(seed), mlp(48, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with commlayer.attach(model, optimizer) as session:
        first = dist.get_rank() == 0
        begin_ms, sample_ms = SPEED_MS[dist.get_rank() % len(SPEED_MS)]
        slower = 1.0

        def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
            x, y = batch
            time.sleep(slower * (begin_ms + sample_ms * len(x)) / 1e3)
            return nn.functional.cross_entropy(model(x), y)

        sampler = Sampler(len(data.train[0]), args.batch, seed=seed)
        loader = DataLoader(TensorDataset(*data.train), batch_sampler=sampler)
        controller = commlayer.LoadBalancer(session, sampler)
        shown, begin = 0, time.perf_counter()
        if mode != "equal":
            controller.profile(model, loss_of, loader, limit_s=2.0)
            if first:
                print(f"profiled in {time.perf_counter() - begin:.1f} s", flush=True)
        begin = time.perf_counter()
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            slower = SLOWER if dist.get_rank() == 0 and args.epochs <= 3 * epoch < 2 * args.epochs else 1.0
            if first and slower > 1 and 3 * (epoch - 1) < args.epochs:
                print(f"worker 0 takes {SLOWER} times as long for a third of the epochs", flush=True)
            mark = time.perf_counter()
            for batch in sampler.follow(loader, session) if mode == "equal" else controller.follow(loader):
                (loss_of(model, batch) * sampler.fraction).backward()
                if sampler.last:
                    optimizer.step()
                    optimizer.zero_grad()
                for event in controller.events[shown:] if first else []:
                    if not isinstance(event, Note):
                        print(describe(event), flush=True)
                shown = len(controller.events)
            if first:
                shares = " ".join(f"{share:3d}" for _, share in sorted(controller.shares.items()))
                rate = sampler.length / (time.perf_counter() - mark)
                print(f"epoch {epoch + 1:2d}: shares {shares}, {rate:.0f} samples a second", flush=True)
        seconds, reached = time.perf_counter() - begin, accuracy(model, data.test)
        if first:
            print(f"{mode}: accuracy {reached:.3f} after {seconds:.1f} s", flush=True)
    return reached, seconds


def main() -> None:
    torch.set_num_threads(1)
    results: dict[str, list[tuple[float, float]]] = {mode: [] for mode in args.modes}
    for seed in range(args.seed, args.seed + args.seeds):
        for mode in args.modes:
            results[mode].append(train(mode, seed))
    if dist.get_rank() or len(results) + args.seeds < 3:
        return
    baseline_s = median(seconds for _, seconds in results[args.modes[0]])
    print(f"\n{'':10}  {'training':>9}  {'speed':>7}  accuracy, {args.seeds} seed{'s' * (args.seeds > 1)}")
    for mode, runs in results.items():
        accuracies, seconds = zip(*runs, strict=True)
        spread = f" +- {stdev(accuracies):.3f}" if args.seeds > 1 else ""
        print(f"{mode:10}  {median(seconds):7.1f} s  {baseline_s / median(seconds):6.2f}x  {mean(accuracies):.3f}{spread}")


main()
