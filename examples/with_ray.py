"""Ray Train: workers train through commlayer, save with ray.train.report, and continue from there after a failure.

    python examples/with_ray.py --workers 2

Lines that commlayer adds are marked. docs/how-to/ray.md has what several machines need.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import commlayer

EVERY = 10
"""Steps between two checkpoints."""


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * world + rank))
    return x, x[:, :10].argmax(1)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(options: dict[str, Any]) -> None:
    """What each worker runs."""
    model, optimizer = model_and_optimizer()
    with commlayer.attach(model, optimizer, sync="auto") as session:  # commlayer: instead of ray.train.torch.prepare_model
        if saved := ray.train.get_checkpoint():
            with saved.as_directory() as folder:
                session.resume(folder)  # commlayer: model, optimizer, step and residuals
        first = session.step
        for step in range(session.step, options["steps"]):
            x, y = batch(step, session.rank, session.world_size)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % EVERY == 0:
                with tempfile.TemporaryDirectory() as folder:
                    session.checkpoint(folder)  # commlayer: on all workers, each a part; Ray puts the parts together
                    row = {"step": step + 1, "first": first, "workers": session.world_size, "loss": loss.item()}
                    ray.train.report(row, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", default="runs")
    options = parser.parse_args()
    result = TorchTrainer(
        train, train_loop_config={"steps": options.steps}, scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(name="with_ray", storage_path=str(Path(options.out).absolute()),
                             failure_config=FailureConfig(max_failures=3))).fit()
    print(f"step {result.metrics['step']}: loss {result.metrics['loss']:.3f}, {result.metrics['workers']} workers")


if __name__ == "__main__":
    main()
