"""Reads the tensors to average from a model, and learning rate and loss scale from optimizer and scaler."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from commlayer.errors import InvalidInput
from commlayer.records import Job, TensorInfo


def parameters_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trained parameters, each once (tied weights count once), in registration order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def buffers_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The floating-point buffers: running statistics that workers average. Masks with infinities are left out."""
    named = model.named_buffers()
    return [(name, b) for name, b in named if b.is_floating_point() and b.numel() and bool(torch.isfinite(b).all())]


def job_of(model: nn.Module) -> Job:
    """The averaged tensors: gradients of trained parameters, then float buffers."""
    named: list[tuple[str, torch.Tensor, bool]] = [(name, tensor, False) for name, tensor in parameters_of(model)]
    named += [(name, tensor, True) for name, tensor in buffers_of(model)]
    return Job(tuple(
        TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), buffer)
        for name, tensor, buffer in named
    ))


def check_dense(name: str, gradient: torch.Tensor) -> None:
    """ValueError for a gradient that cannot be averaged in its layout."""
    if gradient.layout is not torch.strided:
        raise InvalidInput("E-GRADIENT-LAYOUT",
                           f"gradient of {name} is {gradient.layout}, allowed: dense; pass sparse=False to the layer that "
                           "has it, as in nn.Embedding(sparse=False)")


def learning_rate(optimizer: Any, before: float) -> float:
    """The rate of the optimizer's first group; `before` while that is 0, and without an optimizer."""
    rate = float(optimizer.param_groups[0]["lr"]) if optimizer is not None else before
    return rate if 0 < rate < math.inf else before


def loss_scale(scaler: Any) -> float:
    """The current scale of a GradScaler; 1 without one."""
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
