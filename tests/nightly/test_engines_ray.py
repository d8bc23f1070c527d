"""examples/with_ray.py on a Ray of this machine: over a killed worker. Run as a script: Ray's driver."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support import ROOT
from support.processes import clean_environment
from torch import nn

pytest.importorskip("ray.train.torch", reason="needs ray[train], which `make engines` installs")
sys.path.append(str(ROOT / "examples"))

import ray
import ray.train
import ray.train.torch

with_ray = importlib.import_module("with_ray")
pytestmark = pytest.mark.timeout(900)
STEPS, WORKERS, LIMIT_S = 50, 2, 400.0


def dies(options: dict[str, Any]) -> None:
    """The example's function. Worker 1 is killed, once, after Ray has stored its second checkpoint."""
    report, count, killed = ray.train.report, 0, Path(options["killed"])

    def wrapped(*args: Any, **more: Any) -> None:
        nonlocal count
        report(*args, **more)
        count += 1
        if ray.train.get_context().get_world_rank() == 1 and count == 2 and not killed.exists():
            ray.train.get_all_reported_checkpoints(consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED)
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    ray.train.report = wrapped
    with_ray.train(options)


def driver() -> dict[str, Any]:
    ray.init("local", num_cpus=WORKERS, include_dashboard=False)
    result = ray.train.torch.TorchTrainer(
        dies, train_loop_config={"steps": STEPS, "killed": str(Path("killed").absolute())},
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS),
        run_config=ray.train.RunConfig(storage_path=str(Path("runs").absolute()),
                                       failure_config=ray.train.FailureConfig(max_failures=3))).fit()
    return {**result.metrics, "checkpoint": result.checkpoint.path}


def run(folder: Path, *line: str) -> str:
    """What a script prints, with a Ray of its own."""
    environment = clean_environment() | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local",
                                         "COMMLAYER_CONFIG": ""}
    environment["PYTHONPATH"] += f":{ROOT / 'examples'}"
    done = subprocess.run([sys.executable, *line], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def row_of(out: str) -> dict[str, Any]:
    """The driver's row, among log lines of Ray."""
    (line,) = (line for line in out.splitlines() if line.startswith("{"))
    return dict(json.loads(line))


def union() -> dict[str, torch.Tensor]:
    """The weights of one process that trains on the batches of all workers."""
    model, optimizer = with_ray.model_and_optimizer()
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORKERS):
            x, y = with_ray.batch(step, rank, WORKERS)
            (nn.functional.cross_entropy(model(x), y) / WORKERS).backward()
        optimizer.step()
    return model.state_dict()


def test_restart_after_a_kill_reaches_the_same_weights(tmp_path: Path) -> None:
    row = row_of(run(tmp_path, __file__))
    assert (row["step"], row["workers"]) == (STEPS, WORKERS)
    assert row["first"] >= 2 * with_ray.EVERY, "it continues from the last checkpoint that Ray has stored"
    (file,) = Path(row["checkpoint"]).glob("*/training-0.safetensors")
    weights = safetensors.torch.load_file(file)
    for name, value in union().items():
        torch.testing.assert_close(weights[f"parameter.{name}"], value, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    print(json.dumps(driver()), flush=True)
    ray.shutdown()
