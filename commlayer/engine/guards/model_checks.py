"""Checks whether a model can be attached, before anything is exchanged. Errors name the unsupported part."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from commlayer.engine.hooks.forward_order import before_forward
from commlayer.errors import InvalidInput
from commlayer.records import Job

DTYPES = ("float32", "float16", "bfloat16", "float64")
STEP_AFTER_BACKWARD = ("averages are complete when backward() returns, so step after it, with one optimizer over "
                       "model.parameters()")
_claims: Any = WeakIdKeyDictionary()
"""Maps a parameter to the session (a Claim) that averages its gradients."""


def is_averaged(parameter: torch.Tensor) -> bool:
    """Returns True if a session of this process averages the parameter's gradients."""
    return (holder := _claims.get(parameter)) is not None and holder() is not None


class Claim:
    """Reserves the parameters that one session averages, so that no other session averages them."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Reserves the parameters. Raises ValueError and reserves none if another session averages one of them."""
        parameters = []
        for name, p in named:
            if is_averaged(p):
                raise InvalidInput("E-ATTACHED-TWICE",
                                   f"{name or 'a parameter'} is attached already, by itself or inside a "
                                   "DistributedDataParallel module, so its gradient would be averaged twice: attach a "
                                   "model once, or close the other session first")
            parameters.append(p)
        for p in parameters:
            _claims[p] = weakref.ref(self)
        self._parameters = parameters

    def release(self) -> None:
        for p in self._parameters:
            _claims.pop(p, None)
        self._parameters = []


def check_model(model: nn.Module) -> None:
    """Raises ValueError with the name of a module, parameter or buffer that cannot be averaged."""
    if not isinstance(model, nn.Module):
        raise InvalidInput("E-MODEL-UNSUPPORTED", f"model: got {type(model).__name__}, but it must be a torch.nn.Module")
    for name, module in model.named_modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise InvalidInput("E-SHARDED", f"{name or 'the model'} is under FullyShardedDataParallel (FSDP1), which keeps "
                                            "parameters in flat buffers: use fully_shard() (FSDP2)")
    for name, p in model.named_parameters():
        if not is_lazy(p) and p.is_inference():
            raise InvalidInput("E-MODEL-UNSUPPORTED",
                               f"{name} was created inside torch.inference_mode(), so it cannot be trained: create the model "
                               "outside inference_mode()")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InvalidInput("E-MODEL-UNSUPPORTED",
                               f"{name} has no shape before the first forward pass of its lazy module: run the model once "
                               "on a batch, then call attach()")


def refuse_steps_in_backward(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError for parameters marked by apply_optimizer_in_backward, whose steps use this rank's own gradients."""
    for name, p in named:
        for optimizer in getattr(p, "_in_backward_optimizers", ()):
            raise InvalidInput("E-STEP-IN-BACKWARD",
                               f"{name} is updated inside backward by {type(optimizer).__name__} "
                               f"(apply_optimizer_in_backward), with this rank's own gradient: {STEP_AFTER_BACKWARD}")


def check_dtypes(job: Job) -> None:
    for info in job.tensors:
        if info.dtype not in DTYPES:
            raise InvalidInput("E-MODEL-UNSUPPORTED",
                               f"{info.name} is {info.dtype}, but its dtype must be one of {', '.join(DTYPES)}; "
                               "requires_grad=False excludes a parameter")


def choose_bucket_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Returns the device on which buckets of these tensors are: theirs for a CPU and CUDA (or ROCm, which torch calls cuda).
    Buckets of other devices, such as Apple's, are on the CPU, and torch copies gradients and averages. Raises ValueError if the
    tensors are on several devices, or have no memory."""
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1 or devices == ["meta"]:
        raise InvalidInput("E-MODEL-UNSUPPORTED",
                           f"the model is on {', '.join(devices)}, but each process must use one device")
    return tensors[0].device if tensors[0].device.type in ("cpu", "cuda") else torch.device("cpu")


def refuse_ddp_around(model: nn.Module) -> None:
    """Registers a check for the model's first forward pass. The check raises ValueError if a DDP module around the model
    averages its gradients, too."""

    def look(_module: nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling():
            return
        handle.remove()
        outer = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if outer is not None and any(module is model for module in outer.module.modules()):
            raise InvalidInput("E-ATTACHED-TWICE",
                               "the model is attached and also inside a DistributedDataParallel module, so gradients would "
                               "be averaged twice: attach the DistributedDataParallel module instead, or leave it out")

    handle = before_forward(model, look)
