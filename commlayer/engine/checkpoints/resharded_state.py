"""The state of a session for torch.distributed.checkpoint: residuals in tensors that another number of ranks can load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from commlayer.cluster.processes.collectives import Groups, all_or_none
from commlayer.compressors.residual_slices import Residuals, ResidualSlice, residual_on
from commlayer.engine.checkpoints.checkpoint import (
    LOADING,
    SAVING,
    forget_residuals,
    residuals_in,
    server_states,
    take_residuals,
    worker_state,
)
from commlayer.engine.checkpoints.checkpoint_files import CheckpointHeader
from commlayer.engine.epochs.replica import Replica
from commlayer.engine.job.job import DistributedJob, JobContext
from commlayer.engine.model.shard_parameters import local_elements
from commlayer.errors import InvalidInput
from commlayer.planner.shards import Shards
from commlayer.records import Slice

RESIDUAL = "residual."


def collect_training_state(context: JobContext, replica: Replica) -> dict[str, Any]:
    """Returns the number of steps and, for each trained parameter, the sum of all ranks' and servers' residuals, divided among
    the ranks. All ranks call it together."""
    job = context if isinstance(context, DistributedJob) else None
    if context.local is not None:
        raise InvalidInput("E-CHECKPOINT", "the session's state for torch.distributed.checkpoint does not include local steps: "
                                           "use session.checkpoint()")
    residuals = Residuals() if job is None else _collect_residuals(job)
    state: dict[str, Any] = {"step": context.passes, "members": context.first_world}
    mesh = None if job is None else DeviceMesh.from_group(job.groups.hosts.group, "cpu")
    for number, (name, numel) in enumerate(replica.trained.items()):
        found = residual_on(residuals.gradients, [Slice(number, 0, numel)])
        x = torch.zeros(numel) if found is None else torch.from_numpy(found)
        state[RESIDUAL + name] = x if job is None else _divided(x, job.groups, mesh)
    return state


def _collect_residuals(job: DistributedJob) -> Residuals:
    """Returns the residuals of this rank and of the servers that it saves."""
    with all_or_none(job.groups, SAVING):
        job.worker.drain()
        undone = job.worker.roll_back()
    servers = server_states(job, undone)
    plan = job.plan
    with all_or_none(job.groups, SAVING):
        mark = CheckpointHeader(save="", step=job.passes, round=job.worker.step, world=job.world, servers=plan.servers, plan="",
                                rate=job.worker.units.rate, members=job.first_world)
        each = [residuals_in(worker_state(job)["tensors"], plan, mark, late=job.rank == 0),
                *(residuals_in(tensors, plan, mark) for tensors in servers.values())]
    return Residuals([part for one in each for part in one.gradients])


def _divided(x: torch.Tensor, groups: Groups, mesh: Any) -> torch.Tensor:
    """Returns the sum of the ranks' tensors as a DTensor that is divided among all ranks."""
    from torch.distributed.tensor import DTensor, Shard

    groups.hosts.allreduce(x).wait(time.monotonic() + groups.timeout_s)
    start, end = Shards(groups.world).elements(x.shape, groups.rank)
    return DTensor.from_local(x[start:end].clone(), mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())


def load(context: JobContext, replica: Replica, state: Mapping[str, Any]) -> None:
    """Continues from a result of `collect_training_state` with other values. All ranks call it together."""
    context.passes = int(state["step"])
    if not isinstance(context, DistributedJob):
        if any(state[RESIDUAL + name].any() for name in replica.trained):
            context.log_decision("the residuals in the checkpoint are dropped, because this job has one worker")
        return
    context.first_world = context.worker.units.members = int(state["members"])
    own = []
    for number, (name, numel) in enumerate(replica.trained.items()):
        start, _ = Shards(context.world).elements((numel,), context.rank)
        own.append(ResidualSlice(number, start, local_elements(state[RESIDUAL + name]).numpy()))
    with all_or_none(context.groups, LOADING):
        context.worker.drain()
    with all_or_none(context.groups, LOADING):  # no rank may push before every server is reset
        forget_residuals(context)
    take_residuals(context, Residuals(own), lambda: replica.agree_buffers(context.worker))
