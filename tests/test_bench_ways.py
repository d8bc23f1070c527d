"""The task on which ways of training are compared: equal for equal numbers, learnable, and its text divided."""

from __future__ import annotations

import math

import torch

from bench.ways_task import SEQUENCES, Task


def test_the_task_is_a_function_of_rank_and_step_and_can_be_learnt() -> None:
    task, model = Task(), Task().model()
    assert 500_000 < sum(p.numel() for p in model.parameters()) < 2_000_000
    losses = [task.loss(model, rank, step).item() for rank, step in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3
    before = task.validation(model, sequences=8)
    assert abs(before - math.log(task.characters)) < 0.5, "it begins by knowing nothing"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(8):
        optimizer.zero_grad()
        task.loss(model, 0, step, 2 * SEQUENCES).backward()
        optimizer.step()
    assert task.validation(model, sequences=8) < before - 0.3
