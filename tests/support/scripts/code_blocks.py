"""Runs the Python blocks of a page of the documentation, one after the other, as one rank of a job of two or more.

    torchrun --nproc-per-node 2 code_blocks.py docs/how-to/wait-less.md

Names that a reader's script has (model, optimizer, loader, ...) are defined first. A session is closed when a block attaches
again.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commlayer
from commlayer import plan_file, planner
from commlayer.balance import loss_model
from commlayer.engine.model.model_tensors import describe_model

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(256, 16), nn.ReLU(), nn.Linear(16, 4))


class Writer:
    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert name
        assert value == value
        assert step >= 0


def names() -> dict[str, Any]:
    """What a reader's script has."""
    torch.manual_seed(0)
    model = Net()
    plan = planner.default_plan(describe_model(model), codec="fp16()", path="allreduce", servers=0,
                                ranks_per_node=dist.get_world_size(), fuse_nbytes=1 << 20, cut_nbytes=1 << 22)
    Path("plan.json").write_text(plan_file.format_plan(plan))
    loss_model.write(Path("loss.json"), loss_model.LossModel((loss_model.LossPoint("int4", 1.0, 0.001),)))
    dataset = TensorDataset(torch.randn(1024, 256), torch.randint(4, (1024,)))
    last: list[commlayer.Session] = []

    def attach(*args: Any, **options: Any) -> commlayer.Session:
        if last:
            last.pop().close()
        last.append(attached(*args, **options))
        return last[0]

    attached, commlayer.attach = commlayer.attach, attach
    loss = nn.functional.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "commlayer": commlayer, "torch": torch, "nn": nn, "Net": Net, "DataLoader": DataLoader, "dataset": dataset,
        "model": model, "device": "cpu", "optimizer": optimizer, "loader": DataLoader(dataset, batch_size=32),
        "loss": loss, "loss_of": loss, "steps": 3, "epochs": 1, "evaluate": lambda model: model(dataset[:8][0]),
        "writer": Writer(), "batches": None, "validation": None, "attached": last,
        "session": attach(model, optimizer),
    }


def main() -> None:
    dist.init_process_group("gloo")
    page, known = Path(sys.argv[1]), names()
    blocks = BLOCK.findall(page.read_text())
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), known)
    if known["attached"]:
        known["attached"].pop().close()
    print(f"ran {len(blocks)} blocks", flush=True)


if __name__ == "__main__":
    main()
