"""What a watcher makes of the ways in which scripts use, add to, and throw away averages. One row each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from commlayer.engine.averages import AverageUse

TENSORS = 3


class Watched:
    """Three parameters, an optimizer of the first two and one of the third, and what the watcher has said."""

    def __init__(self, named: bool = True) -> None:
        self.parameters = [nn.Parameter(torch.ones(4)) for _ in range(TENSORS)]
        self.first = torch.optim.SGD(self.parameters[:2], lr=0.1)
        self.second = torch.optim.SGD(self.parameters[2:], lr=0.1)
        self.cleared: set[int] = set()
        self.applied: set[int] = set()
        self.sparse: set[int] = set()
        """Tensors whose averages are zeros."""
        self.outcome = AverageUse(self.parameters, self.first if named else None, self.cleared.add, self.applied.update,
                                  lambda number: number not in self.sparse)

    def backward(self, *which: int, keeps: bool = True) -> None:
        """And the end of its exchange."""
        torch.stack([self.parameters[t].sum() for t in which or range(TENSORS)]).sum().backward()
        for number in self.sparse:
            self.parameters[number].grad = torch.zeros(4)
        self.outcome.end()
        self.outcome.wrote(keeps=keeps)

    def clear(self, *, to_none: bool = True) -> None:
        for p in self.parameters:
            if to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()


def stepped(w: Watched) -> None:
    w.first.step()
    w.clear()
    w.backward()


def thrown_away(w: Watched) -> None:
    w.clear()
    w.backward()


def zeroed(w: Watched) -> None:
    w.clear(to_none=False)
    w.backward()


def zeroed_and_seen_without_a_pass(w: Watched) -> None:
    w.clear(to_none=False)
    w.outcome.settle()


def added_to(w: Watched) -> None:
    w.backward()
    w.first.step()
    w.clear()
    w.backward()


def clipped_and_added_to(w: Watched) -> None:
    torch.nn.utils.clip_grad_norm_(w.parameters, 0.1)
    w.backward()
    w.first.step()


def inside_a_step(w: Watched) -> None:
    """The first optimizer's own passes are its own; what they leave of others is as any."""
    w.first.step()

    def closure() -> float:
        w.clear()
        w.backward()
        return 0.0

    w.first.step(closure)
    w.clear()
    w.backward()


def cancelled(w: Watched) -> None:
    """Ahead of a step, as some schedules do with a layer."""
    w.parameters[0].grad = None
    w.first.step()


def zeroed_and_stepped(w: Watched) -> None:
    """The optimizer gets zeros."""
    w.clear(to_none=False)
    w.first.step()


def one_zeroed_and_stepped(w: Watched) -> None:
    """As who trains a part of a model for a while."""
    torch.nn.utils.clip_grad_norm_(w.parameters, 0.1)
    assert w.parameters[1].grad is not None
    w.parameters[1].grad.zero_()
    w.first.step()


def clipped_beside_zeros(w: Watched) -> None:
    """Few entries were sent, and none of the second tensor's: it is owed, not thrown away."""
    w.first.step()
    w.clear()
    w.sparse = {1}
    w.backward()
    torch.nn.utils.clip_grad_norm_(w.parameters, 0.1)
    w.first.step()


def a_part_clipped_that_is_zeros(w: Watched) -> None:
    w.first.step()
    w.clear()
    w.sparse = {1}
    w.backward()
    torch.nn.utils.clip_grad_norm_(w.parameters[1:2], 0.1)
    w.first.step()


def zeroed_with_zeros_among_them(w: Watched) -> None:
    w.first.step()
    w.clear()
    w.sparse = {1}
    w.backward()
    w.clear(to_none=False)
    w.backward()


def looked_at(w: Watched) -> None:
    """A gradient that is computed and added nowhere says nothing; what is cleared after it does."""
    torch.autograd.grad(sum(p.sum() for p in w.parameters), w.parameters)
    w.clear()
    w.backward()


@pytest.mark.parametrize(("script", "cleared"), [
    (stepped, set()), (thrown_away, {0, 1}), (zeroed, {0, 1}), (zeroed_and_seen_without_a_pass, {0, 1}), (added_to, set()),
    (clipped_and_added_to, set()), (inside_a_step, set()), (cancelled, {0}), (looked_at, {0, 1}),
    (zeroed_and_stepped, {0, 1}), (one_zeroed_and_stepped, {1}), (clipped_beside_zeros, set()),
    (a_part_clipped_that_is_zeros, set()), (zeroed_with_zeros_among_them, {0, 1}),
])
def test_what_is_thrown_away_is_told(script: Callable[[Watched], None], cleared: set[int]) -> None:
    """Of the third tensor no optimizer is known, so it counts as applied."""
    watched = Watched()
    watched.backward()
    script(watched)
    assert watched.cleared == cleared
    watched.outcome.detach()


def test_what_another_optimizer_holds_is_not_hidden_by_a_step_under_way() -> None:
    watched = Watched()
    watched.second.step()  # now both are known
    watched.backward()
    watched.first.step()
    watched.second.step()
    watched.clear()

    def closure() -> float:
        watched.backward()
        return 0.0

    watched.first.step(closure)
    watched.clear()
    watched.backward()
    assert watched.cleared == {2}, "the closure's averages are the first optimizer's, not the third tensor's"
    watched.outcome.detach()


def test_an_optimizer_that_holds_none_of_them_makes_nothing_known(caplog: pytest.LogCaptureFixture) -> None:
    """Copies of the parameters are stepped, as with weights in float32 beside a model in float16."""
    watched = Watched(named=False)
    torch.optim.SGD([torch.ones(4, requires_grad=True)], lr=0.1).step()
    for _ in range(3):
        watched.backward()
        watched.clear()
    watched.backward()
    assert watched.cleared == set()
    assert sum("gradients were cleared without a step" in r.message for r in caplog.records) == 1
    watched.outcome.detach()


def test_a_step_says_what_it_applied() -> None:
    watched = Watched()
    watched.backward()
    watched.second.step()
    assert watched.applied == {2}
    watched.outcome.detach()
