"""How a session recognizes what scripts do with averages: apply them, accumulate them, or discard them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from commlayer.engine.model.optimizers import HeldParameters
from commlayer.engine.worker.averages import AverageUse

TENSORS = 3


class Script:
    """Three parameters, an optimizer of the first two and one of the third; the actions of a script, by name."""

    def __init__(self, named: bool = True) -> None:
        self.parameters = [nn.Parameter(torch.ones(4)) for _ in range(TENSORS)]
        self.first = torch.optim.SGD(self.parameters[:2], lr=0.1)
        self.second = torch.optim.SGD(self.parameters[2:], lr=0.1)
        self.cleared: set[int] = set()
        self.applied: set[int] = set()
        self.sparse: set[int] = set()
        """Tensors of which no element was sent, so their averages are zeros."""
        worker: Any = SimpleNamespace(mark_discarded=self.cleared.add, mark_applied=self.applied.update,
                                      any_nonzero=lambda number: number not in self.sparse)
        self.use = AverageUse(self.parameters, self.first if named else None, lambda: worker, HeldParameters(self.parameters))

    def run(self, actions: str) -> None:
        """Backward, then these actions."""
        for action in ["backward", *actions.split()]:
            getattr(self, action)()

    def backward(self) -> None:
        """A backward pass, to the end of its exchange."""
        torch.stack([p.sum() for p in self.parameters]).sum().backward()
        for number in self.sparse:
            self.parameters[number].grad = torch.zeros(4)
        self.use.end()
        self.use.note_written(can_roll_back=True)

    def step(self) -> None:
        self.first.step()

    def step_second(self) -> None:
        self.second.step()

    def step_with_closure(self) -> None:
        """The backward passes inside belong to the first optimizer."""
        def closure() -> float:
            self.clear()
            self.backward()
            return 0.0

        self.first.step(closure)

    def clear(self) -> None:
        for p in self.parameters:
            p.grad = None

    def zero(self, tensors: slice = slice(None)) -> None:
        for p in self.parameters[tensors]:
            if p.grad is not None:
                p.grad.zero_()

    def zero_1(self) -> None:
        self.zero(slice(1, 2))

    def cancel_0(self) -> None:
        self.parameters[0].grad = None

    def clip(self, tensors: slice = slice(None)) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters[tensors], 0.1)

    def clip_1(self) -> None:
        self.clip(slice(1, 2))

    def send_nothing_of_1(self) -> None:
        self.sparse = {1}

    def add(self, tensors: slice = slice(None)) -> None:
        """A backward pass that adds to the averages, without an exchange."""
        torch.stack([p.sum() for p in self.parameters[tensors]]).sum().backward()

    def add_0(self) -> None:
        self.add(slice(1))

    def grad_only(self) -> None:
        """A gradient that is computed and accumulated nowhere."""
        torch.autograd.grad(sum(p.sum() for p in self.parameters), self.parameters)

    def settle(self) -> None:
        self.use.settle()


@pytest.mark.parametrize(("actions", "cleared"), [
    ("step clear backward", set()), ("clear backward", {0, 1}), ("zero backward", {0, 1}), ("zero settle", {0, 1}),
    ("backward step clear backward", set()),  # two passes add up for one step
    ("clip backward step", set()), ("step step_with_closure clear backward", set()),
    ("cancel_0 step", {0}),  # before a step, as some schedules do with a layer
    ("add clear backward", set()), ("add_0 clear backward", {1}),  # averages that were added to are final
    ("grad_only clear backward", {0, 1}), ("zero step", {0, 1}), ("clip zero_1 step", {1}),
    # Zeros of a tensor of which nothing was sent are not discarded averages: its gradient is still in the residual.
    ("step clear send_nothing_of_1 backward clip step", set()), ("step clear send_nothing_of_1 backward clip_1 step", set()),
    ("step clear send_nothing_of_1 backward zero backward", {0, 1}),
])
def test_discarded_averages(actions: str, cleared: set[int]) -> None:
    """No optimizer of the third tensor is known, so its averages count as applied."""
    script = Script()
    script.run(actions)
    assert script.cleared == cleared
    script.use.detach()


def test_closure_step_does_not_hide_gradients_of_another_optimizer() -> None:
    script = Script()
    script.second.step()  # now both optimizers are known
    script.run("step step_second clear")

    def closure() -> float:
        script.backward()
        return 0.0

    script.first.step(closure)
    script.clear()
    script.backward()
    assert script.cleared == {2}, "the closure's averages are the first optimizer's, not the third tensor's"
    script.use.detach()


def test_optimizer_of_other_tensors_is_no_evidence(caplog: pytest.LogCaptureFixture) -> None:
    """A script may step copies of the parameters, such as float32 weights of a float16 model."""
    script = Script(named=False)
    torch.optim.SGD([torch.ones(4, requires_grad=True)], lr=0.1).step()
    script.run("clear backward clear backward clear backward")
    assert script.cleared == set()
    assert sum("gradients were cleared without a step" in r.message for r in caplog.records) == 1
    script.use.detach()


def test_optimizer_step_reports_applied_tensors() -> None:
    script = Script()
    script.run("step_second")
    assert script.applied == {2}
    script.use.detach()
