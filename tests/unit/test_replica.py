"""The state that a joining worker receives in two parts: a snapshot, and what it still lacks when it joins."""

from __future__ import annotations

import torch
from torch import nn

from commlayer.engine.epochs.replica import Replica
from commlayer.engine.job.job import JobContext


def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, layers: int) -> None:
    """A step of the first layers, as in a training that unfreezes them one after the other."""
    optimizer.zero_grad()
    torch.stack([p.square().sum() for p in model[:layers].parameters()]).sum().backward()
    optimizer.step()


def test_optimizer_state_that_is_newer_than_the_snapshot_is_sent() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    replica, context = Replica(model, optimizer), JobContext()
    step(model, optimizer, 1)
    snapshot = replica.state(context, None)
    step(model, optimizer, 2)
    state = replica.state(context, None)
    rest = replica.remaining_state(state, snapshot)
    moments = {name for name, t in rest.items() if name.startswith("state.") and t.numel() > 1}
    assert moments == {name for name, t in state.items() if name not in snapshot and t.numel() > 1}
    assert moments
    starts = [p.detach() for p in model.parameters()]
    assert state.keys() == replica.completed(rest, snapshot, starts, [None] * len(starts)).keys()
    assert state.keys() - {"head"} == {*replica.remaining_state(state, ())} - {"head"} | {
        name for name in state if name.startswith("parameter.")}, "without a snapshot all of it is sent"
