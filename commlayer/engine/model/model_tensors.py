"""Reads the tensors to average from a model, and learning rate and loss scale from optimizer and scaler."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from commlayer.errors import InvalidInput
from commlayer.records import Job, TensorInfo


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the trained parameters with their names, in registration order. Tied weights occur once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def averaged_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the floating-point buffers that workers average, such as running statistics. Buffers with infinite values, such
    as masks, are excluded."""
    named = model.named_buffers()
    return [(name, b) for name, b in named if b.is_floating_point() and b.numel() and bool(torch.isfinite(b).all())]


def describe_model(model: nn.Module) -> Job:
    """Returns the description of the averaged tensors: gradients of trained parameters, then floating-point buffers."""
    named: list[tuple[str, torch.Tensor, bool]] = [(name, tensor, False) for name, tensor in trained_parameters(model)]
    named += [(name, tensor, True) for name, tensor in averaged_buffers(model)]
    return Job(tuple(
        TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), buffer)
        for name, tensor, buffer in named
    ))


def check_dense(name: str, gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise InvalidInput("E-GRADIENT-LAYOUT",
                           f"the gradient of {name} has layout {gradient.layout}, but it must be dense; pass sparse=False "
                           "to its layer, as in nn.Embedding(sparse=False)")


def learning_rate(optimizer: Any, before: float) -> float:
    """Returns the learning rate of the optimizer's first parameter group. Returns `before` while that rate is 0 or infinite,
    and without an optimizer."""
    rate = float(optimizer.param_groups[0]["lr"]) if optimizer is not None else before
    return rate if 0 < rate < math.inf else before


def loss_scale(scaler: Any) -> float:
    """Returns the current loss scale of a GradScaler; 1 without an enabled scaler."""
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
