"""commlayer for scripts with Accelerate."""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import recursively_apply
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlayer.cluster.processes.site_process_group import gather_present
from commlayer.session import Session
from commlayer.session import attach as attach_model


class SiteParallelism(ParallelismConfig):
    """Lets Accelerate shard the model over the ranks of each site only, with FSDP2. commlayer averages between sites.

    >>> config = SiteParallelism(dp_replicate_size=2, dp_shard_size=4)      # sites, ranks in each   # doctest: +SKIP
    >>> accelerator = Accelerator(parallelism_config=config, fsdp_plugin=plugin)                # doctest: +SKIP
    """

    @property
    def fsdp_dim_names(self) -> list[str]:
        return ["dp_shard_cp"]  # Accelerate adds the dimension over which it averages itself


def attach(accelerator: Accelerator, model: nn.Module, optimizer: Any, **options: Any) -> Session:
    """Attaches what `accelerator.prepare()` returned. `save_state` and `load_state` then include residuals.

    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)                # doctest: +SKIP
    >>> session = attach(accelerator, model, optimizer, compression="int4")                     # doctest: +SKIP

    `options`: arguments of commlayer.attach(), such as `compression`, `sync` and `plan`. `prepare()` wraps the model in
    DistributedDataParallel, which sends the whole model once. Between homes avoid that, with
    `model = accelerator.prepare_model(model, evaluation_mode=True)`.
    """
    module: Any = getattr(model, "_orig_mod", model)  # without the wrapper of torch.compile
    session = attach_model(module, optimizer_inside(optimizer), grad_scaler=accelerator.scaler, **options)
    patch_gather(accelerator, session)
    if not isinstance(module, DistributedDataParallel):
        module.no_sync = session.no_sync  # accelerator.accumulate() calls it for all micro-batches of a step but the last

    def save(_models: Any, _weights: Any, folder: str) -> None:
        session.checkpoint(f"{folder}/commlayer", model=session.inspect.steps_locally)

    load_state, folders = accelerator.load_state, list[str]()

    @functools.wraps(load_state)
    def load_all(*args: Any, **kwargs: Any) -> None:
        load_state(*args, **kwargs)
        session.resume(f"{folders.pop()}/commlayer")  # last: under local steps each rank has an optimizer state of its own

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(lambda _models, folder: folders.append(folder))
    accelerator.load_state = load_all
    return session


def patch_gather(accelerator: Accelerator, session: Session) -> None:
    """Lets `accelerator.gather` follow the members of a job whose workers may leave. Accelerate itself reads their number once,
    at the start."""
    if session.inspect.may_leave:
        accelerator.gather = gather_of_present


def gather_of_present(tensors: Any) -> Any:
    """Gathers tensors as `accelerator.gather` does, from the workers that are there now, and sets `num_processes` to their
    number, by which the Trainer multiplies its losses."""
    return recursively_apply(_rows_of_present, tensors, error_on_other_type=True)


def _rows_of_present(x: torch.Tensor) -> torch.Tensor:
    rows = gather_present(x.reshape(1) if x.ndim == 0 else x.contiguous())
    for state in (PartialState, AcceleratorState):
        state._shared_state["num_processes"] = len(rows)
    return torch.cat(rows)


def optimizer_inside(optimizer: Any) -> Any:
    """Returns the script's own optimizer, which `accelerator.prepare()` wraps."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
