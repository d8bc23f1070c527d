"""What is trained against the clock: equal for equal numbers, learnable, and of a kind where more data helps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.tasks import TASKS, Task, docs, layers_of, together

ROOT = Path(__file__).parents[2]
COMPARED = ("chars", "digits", "passages")


def trained(task: Task, ranks: int, steps: int, model: torch.nn.Module) -> float:
    optimizer = task.optimizer(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, together([task.batch(rank, step) for rank in range(ranks)])).backward()
        optimizer.step()
    return task.validation(model)


@pytest.mark.parametrize("name", COMPARED)
def test_a_batch_is_a_function_of_rank_step_and_seed(name: str) -> None:
    task, again = TASKS[name](), TASKS[name]()
    assert all(torch.equal(a, b) for a, b in zip(task.batch(1, 2, 3), again.batch(1, 2, 3), strict=True))
    others = [task.batch(*numbers)[0] for numbers in ((0, 2, 3), (1, 3, 3), (1, 2, 4))]
    assert not any(torch.equal(task.batch(1, 2, 3)[0], other) for other in others)
    assert task.digest() == again.digest()
    assert len({TASKS[other]().digest() for other in COMPARED}) == len(COMPARED)


@pytest.mark.parametrize("name", COMPARED)
def test_models_are_of_a_size_where_bytes_matter_and_equal_for_equal_seeds(name: str) -> None:
    task = TASKS[name]()
    model, again, other = task.model(0), task.model(0), task.model(1)
    assert 1_000_000 < sum(p.numel() for p in model.parameters()) < 2_000_000
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert len(layers_of(model)) >= 4
    assert task.targets == tuple(sorted(task.targets, reverse=True))
    assert task.validation(model) > task.targets[0], "no target is reached before the first step"


def test_there_are_tasks_of_both_families_of_optimizers() -> None:
    assert {TASKS[name]().family for name in COMPARED} == {"sgd", "adam"}


def test_the_batches_of_four_ranks_need_at_most_half_the_steps_of_one() -> None:
    task = TASKS["digits"]()
    all_of_them, model = trained(task, 4, 60, task.model(0)), task.model(0)
    assert all_of_them <= task.targets[0]
    assert trained(task, 1, 120, model) > task.targets[0], "one rank's data does not get there in twice the steps"


def test_loss_of_joined_batches_is_the_mean_of_theirs() -> None:
    task = TASKS["passages"]()
    model, batches = task.model(0), [task.batch(rank, 5) for rank in range(4)]
    mean = sum(float(task.loss(model, batch)) for batch in batches) / 4
    assert float(task.loss(model, together(batches))) == pytest.approx(mean, rel=1e-5)


def test_the_docs_can_be_learnt() -> None:
    task = docs(64)
    model = task.model(0)
    before = task.validation(model)
    assert trained(task, 4, 8, model) < before - 0.3


@pytest.mark.nightly
def test_rivals_train_without_commlayer() -> None:
    code = "import sys, bench.paced.worker, bench.paced.rivals; sys.exit('commlayer' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
