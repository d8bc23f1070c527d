"""torchrun starts all ranks again after one was killed, and they go on from what was saved. Run as a script: the training."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pool_kit
import torch
from attach_kit import data, mlp
from pool_kit import pool
from torch import nn

import commlayer
from commlayer.compressors import topk

ROOT = Path(__file__).parents[1]
WORLD, SAVED, KILLED, STEPS = 2, 4, 6, 9


def train(rank: int, folder: str, *, restarts: int | None = None) -> dict[str, Any]:
    """To the end, from what is in `folder` if there is anything. `restarts`: how often torchrun has started it again."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    whole = Path(folder) / "model.pt"
    with commlayer.attach(model, optimizer, plan=topk(ratio=0.1), config=pool_kit.quick(ranks_per_node=1)) as session:
        first = 0
        if whole.is_file():
            held = torch.load(whole, weights_only=True)
            model.load_state_dict(held["model"])
            optimizer.load_state_dict(held["optimizer"])
            session.load(f"{folder}/session")
            first = held["step"]
        for step in range(first, STEPS):
            if step == SAVED and first == 0:
                session.save(f"{folder}/session")
                if rank == 0:
                    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(held, f"{whole}.new")
                    os.replace(f"{whole}.new", whole)
            if step == KILLED and rank == 1 and restarts == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            x, y = data(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return {"rank": rank, "first": first, "restarts": restarts, "digest": digest}


def test_after_a_kill_all_start_again_and_come_to_the_same_weights(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    expected = pool(WORLD).call(train, str(tmp_path / "whole"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD),
               "--max-restarts", "1", str(Path(__file__)), str(tmp_path / "killed")]
    # As docs/running.md says: else the second attempt of torch 2.13 meets in the store of the first.
    environment = pool_kit.clean_environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1",
                                                  "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    said.sort(key=lambda each: int(each["rank"]))
    assert [each["restarts"] for each in said] == [1, 1]
    assert [each["first"] for each in said] == [SAVED, SAVED]
    assert [each["digest"] for each in said] == [each["digest"] for each in expected]


if __name__ == "__main__":
    print(json.dumps(train(int(os.environ["RANK"]), sys.argv[1], restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))),
          flush=True)
