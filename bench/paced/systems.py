"""The training systems that are compared, each set up as its users would write it.

The rest of the system's record are keyword arguments: {"kind": "ddp", "hook": "fp16"} calls ddp(..., hook="fp16"). commlayer
and the rivals are imported only where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.paced.demo import DeMo
from bench.paced.place import Place, TrainingSystem
from bench.paced.sparseloco import SparseLoCo
from bench.ranks import DEADLINE, host_config
from bench.tasks import Task

if TYPE_CHECKING:  # rivals train in environments without commlayer
    pass


def start_system(system: dict[str, Any], place: Place, model: nn.Module, task: Task) -> TrainingSystem:
    options = dict(system)
    if (kind := options.pop("kind")) in RIVALS:
        from bench.paced import rivals

        result: TrainingSystem = getattr(rivals, kind)(place, model, task, **options)
        return result
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, allowed are {', '.join([*KINDS, *RIVALS])}")
    return KINDS[kind](place, model, task, **options)


def alone(place: Place, model: nn.Module, task: Task) -> TrainingSystem:
    """Each rank trains by itself; with the batches of all ranks, one machine without a network."""
    return TrainingSystem(model, task.optimizer(model.parameters()))


def ddp(place: Place, model: nn.Module, task: Task, hook: str = "", **options: Any) -> TrainingSystem:
    """DistributedDataParallel with one of torch's own hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    init_group()
    if hook == "powersgd":
        # With more buckets than Gloo has threads, the hooks wait for each other forever: use one bucket.
        module = DistributedDataParallel(model, bucket_cap_mb=1 << 10)
        module.register_comm_hook(powerSGD_hook.PowerSGDState(None, **options), powerSGD_hook.powerSGD_hook)
    else:
        module = DistributedDataParallel(model)
        if hook:
            module.register_comm_hook(None, {"fp16": default_hooks.fp16_compress_hook}[hook])
    return TrainingSystem(module, task.optimizer(model.parameters()), leave)


def post_local_sgd(place: Place, model: nn.Module, task: Task, every: int, start: int) -> TrainingSystem:
    """torch's post-local SGD: DDP for `start` steps, then local steps with weights averaged every `every` steps."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    init_group()
    module = DistributedDataParallel(model)
    # Groups of one rank, because there is nothing to average inside a machine.
    alone_here = [dist.new_group([rank]) for rank in range(place.ranks)][place.rank]
    module.register_comm_hook(hooks.PostLocalSGDState(None, alone_here, start), hooks.post_localSGD_hook)
    averager = PeriodicModelAverager(period=every, warmup_steps=start)
    return TrainingSystem(module, PostLocalSGDOptimizer(task.optimizer(model.parameters()), averager), leave)


def demo(place: Place, model: nn.Module, task: Task, lr: float = 5e-4, **options: Any) -> TrainingSystem:
    init_group()
    return TrainingSystem(model, DeMo(model.parameters(), all_gather, lr=lr, **options), leave)


def sparseloco(place: Place, model: nn.Module, task: Task, every: int, **options: Any) -> TrainingSystem:
    init_group()
    optimizer = task.optimizer(model.parameters())
    SparseLoCo(list(model.parameters()), optimizer, all_gather, every, **options)
    return TrainingSystem(model, optimizer, leave)


def commlayer_attach(
    place: Place, model: nn.Module, task: Task, *, shares: bool = False, local: dict[str, Any] | None = None, **options: Any,
) -> TrainingSystem:
    """commlayer.attach() with these arguments. `local`: the arguments of LocalSteps. With `shares`, a LoadBalancer also assigns
    the samples."""
    import commlayer
    from bench.paced.shares import shared_batches

    init_group()
    if local is not None:
        options["sync"] = commlayer.LocalSteps(**local)
    optimizer = task.optimizer(model.parameters())
    session = commlayer.attach(model, optimizer, config=host_config(servers="each"), **options)

    def end() -> dict[str, Any]:
        stats = session.metrics()
        report = {"exposed_s": stats["exposed_s"], "decisions": session.inspect.decisions()}
        session.close()
        return report

    return TrainingSystem(model, optimizer, end, shared_batches(place, task, session) if shares else None)


def init_group() -> None:
    dist.init_process_group("gloo", timeout=DEADLINE)


def leave() -> dict[str, Any]:
    dist.barrier()
    return {}


def all_gather(own: torch.Tensor) -> list[torch.Tensor]:
    buffers = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    # Gloo has no 16-bit integers.
    dist.all_gather([buffer.view(torch.uint8) for buffer in buffers], own.view(torch.uint8))
    return buffers


KINDS: dict[str, Callable[..., TrainingSystem]] = {
    "alone": alone, "together": alone, "ddp": ddp, "post_local_sgd": post_local_sgd, "demo": demo, "sparseloco": sparseloco,
    "commlayer": commlayer_attach,
}
RIVALS = ("torchft_diloco", "hivemind")
"""Kinds in bench/paced/rivals.py, each of which runs in its own environment."""
