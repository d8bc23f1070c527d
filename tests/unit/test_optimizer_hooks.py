"""Hooks around an optimizer's steps are there while somebody wants to be called, whenever they come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commlayer.engine.hooks import Around, OptimizerHooks


class Stepping:
    """An optimizer, and one member that leaves inside its first step."""

    def __init__(self) -> None:
        self.called = 0
        self.parameter = torch.nn.Parameter(torch.ones(2))
        self.parameter.grad = torch.ones(2)
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        self.hooks, self.around = OptimizerHooks(self.optimizer), Around(last=self.leave)
        self.hooks.join(self.around)

    def leave(self, *_: Any) -> None:
        self.called += 1
        self.hooks.leave(self.around)

    def held(self) -> int:
        return len(self.optimizer._optimizer_step_pre_hooks) + len(self.optimizer._optimizer_step_post_hooks)


def test_who_leaves_inside_a_step_leaves_no_hooks() -> None:
    made = Stepping()
    made.optimizer.step()
    assert made.held() == 0
    made.optimizer.step()
    assert made.called == 1


def test_hooks_of_the_script_behind_ours_are_called_in_that_step_and_ours_go_with_the_next_leave() -> None:
    made, seen = Stepping(), []
    made.optimizer.register_step_post_hook(lambda *_: seen.append("script"))
    made.optimizer.step()
    made.optimizer.step()
    assert (made.called, seen) == (1, ["script"] * 2)
    made.hooks.join(made.around)
    assert made.held() == 4, "no second ones"
    made.hooks.leave(made.around)
    assert made.held() == 1


def test_a_step_that_raises_is_no_step_that_goes_on_for_ever() -> None:
    made = Stepping()

    def fails() -> float:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        made.optimizer.step(fails)
    made.optimizer.step()
    assert (made.called, made.held()) == (1, 0)
