"""A home of a job that saves a checkpoint or resumes from one. Run as a script; it writes what it applied and what it keeps."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import structs

import commlayer
from commlayer.engine.model.model_tensors import describe_model
from commlayer.planner import default_plan
from support.attached import sync_of
from support.jobs import distributed_job
from support.residuals import by_tensor
from support.site_job import SIZES, Linear, flat, gradients, residuals_of

SMALL = {"fuse_nbytes": 2048, "cut_nbytes": 4096}
SYNC: dict[str, dict[str, Any]] = {
    "step": {}, "late": {}, "forward": {"overlap": "forward"}, "whole": {"every": 2},
    "fragments": {"every": 4, "overlap": "round", "fragments": 2},
}


class Script(msgspec.Struct, frozen=True):
    """What all homes of a job run."""

    folder: str
    rows: str
    """Path of the rows of all homes, which are appended to one file for each."""
    mode: str
    codec: str
    steps: int
    save_at: int = -1
    """The step before which all homes save."""
    killed: int = -1
    kill_at: int = -1
    """The home that is killed, and the step before which it is."""


def arguments(script: Script, model: Linear) -> dict[str, Any]:
    if script.mode != "late":
        return {"compression": script.codec, "sync": sync_of(**SYNC[script.mode]), "config": SMALL}
    plan = default_plan(describe_model(model), codec=script.codec, path="service", servers=1, ranks_per_node=1, **SMALL)
    return {"plan": structs.replace(plan, buckets=tuple(
        structs.replace(b, stale=b.slices[0].tensor < len(SIZES)) for b in plan.buckets))}


def main(site: int, script: Script) -> None:
    model = Linear()
    with torch.no_grad():
        for p in model.parts:
            p += site
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    put = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    with commlayer.attach(model, optimizer, **arguments(script, model)) as session:
        def report(what: str) -> None:
            if script.mode != "late":  # late averages are kept here, and written by the next step
                session.flush()
            job = distributed_job(session)
            worker, members = job.worker, job.first_world
            worker.drain()
            late = [part for _, part in worker.late.residuals(job.world, members)]
            pending = [] if job.local is None else job.local.pending_residuals.slices
            kept = [total / members for total in by_tensor([*late, *pending], SIZES)]
            own = residuals_of(job)
            job.groups.barrier()  # the servers' state is read: other ranks may train
            row = {
                "what": what, "site": site, "step": session.step, "world": session.world_size, "weights": flat(model.parts),
                "put": flat(put), "kept": flat(a + b for a, b in zip(own, kept, strict=True)),
                "outer": [] if job.local is None else flat(job.local.starts), "decisions": session.inspect.decisions(),
            }
            with Path(f"{script.rows}-{site}").open("a") as file:  # a pipe would be full
                file.write(json.dumps(row) + "\n")

        if session.resume(script.folder):
            report("resumed")
        for step in range(session.step, script.steps):
            if (site, step) == (script.killed, script.kill_at):
                os.kill(os.getpid(), signal.SIGKILL)
            if step == script.save_at:
                session.checkpoint(script.folder)
                report("saved")
            own = gradients(site, step)
            model(own).backward()
            optimizer.step()
            optimizer.zero_grad()
            for total, g in zip(put, own, strict=True):
                total += g.double() / session.world_size
        report("ended")


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Script))
