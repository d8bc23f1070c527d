"""Recognizes a model's task from its layers and from the inputs of its first forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from commlayer.records import ModelInfo


class ModelWatch:
    """Records which layers a forward pass calls first and last, and the input of the first. Only shapes are read, so fake
    tensors and the meta device serve as well."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._called: dict[nn.Module, torch.Size] = {}
        """The layers in the order of their first calls, since activation checkpointing calls some again, and their inputs."""
        self._handles = [module.register_forward_pre_hook(self._call) for module in model.modules()
                         if not any(module.children()) and any(True for _ in module.parameters(recurse=False))]

    def _call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._called.setdefault(module, args[0].shape if args and isinstance(args[0], torch.Tensor) else torch.Size())

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def info(self) -> ModelInfo:
        """Returns what the recorded forward passes show about the model; ends the recording."""
        self.remove()
        frozen = sum(p.numel() for p in self._model.parameters() if not p.requires_grad)
        if not self._called:
            return ModelInfo(frozen=frozen)
        first, shape = next(iter(self._called.items()))
        last = next(reversed(self._called))
        outputs = last.out_features if isinstance(last, nn.Linear) else 0
        if isinstance(first, nn.Embedding) and shape:
            samples = shape[0] if len(shape) > 1 else 1
            # A head shares the embedding's weight or has one of the same shape; any other head does not predict words.
            return ModelInfo(samples, shape.numel() // max(1, samples), outputs * (outputs == first.num_embeddings),
                             frozen=frozen)
        if isinstance(first, nn.Conv2d) and first.in_channels == 3 and len(shape) == 4:
            return ModelInfo(shape[0], image_side=min(shape[2:]), classes=outputs, frozen=frozen)
        return ModelInfo(shape[0] if shape else 0, frozen=frozen)
