"""Saves and restores what codecs keep back, a file per rank and per server. Knows connections and files; no model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from commlayer import records
from commlayer.compressors import restore, snapshot
from commlayer.connect import Connection, switch
from commlayer.records import Bucket, Plan
from commlayer.runtime import agreed
from commlayer.runtime.worker import Worker
from commlayer.transport.together import gather, together

FORMAT = "commlayer-state-1"
PLAN_FILE = "plan.json"


def worker_state(connection: Connection) -> dict[str, Any]:
    """Residuals and the like of every bucket that this worker codes, and the step that comes next."""
    worker = connection.worker
    if worker is None:
        return {}
    if worker.error is None:
        worker.drain()
        worker.undone()
    tensors = {
        f"{flow.bucket.id}.{name}": tensor for flow in worker.coded for name, tensor in snapshot(flow.state).items()
    }
    tensors["total"] = torch.tensor(worker.total, dtype=torch.float64)
    tensors |= {f"carry.{flow.bucket.id}": flow.carry.clone() for flow in worker.flows if flow.carry is not None}
    for flow in worker.flows:
        if flow.held is not None:
            tensors |= {f"late.{flow.bucket.id}.{name}": tensor for name, tensor in flow.held.snapshot().items()}
    tensors |= agreed.snapshot(worker.flows)
    tensors |= {} if connection.local is None else connection.local.snapshot()
    return {"step": worker.step, "plan": records.digest(worker.plan), "tensors": tensors}


def restore_worker(connection: Connection, state: dict[str, Any]) -> None:
    """The reverse. The plan must be the one it was saved under, and the servers must be where the worker then is."""
    worker = connection.worker
    if worker is None:
        return
    step = int(state["step"])
    summed = any(b.path == "service" for b in worker.plan.buckets)
    if summed and worker.counters.steps > 0 and step != worker.step:
        raise ValueError(f"saved state is of step {step}, this job is at step {worker.step} and its servers with it: go back "
                         "with session.load(), which takes what session.save() wrote and resets the servers, too")
    _restore(connection, worker, state)


def _restore(connection: Connection, worker: Worker, state: dict[str, Any]) -> None:
    _same("saved state", "plan", state.get("plan"), records.digest(worker.plan))
    worker.drain()
    for flow in worker.coded:
        restore(flow.state, _of_bucket(state["tensors"], flow.bucket.id))
    for flow in worker.flows:
        flow.carry = state["tensors"].get(f"carry.{flow.bucket.id}")
        if flow.held is not None:
            flow.held.restore(_of_bucket(state["tensors"], flow.bucket.id, "late."))
    agreed.restore(worker.flows, state["tensors"])
    if connection.local is not None:
        connection.local.restore(state["tensors"])
    worker.step = int(state["step"])
    worker.total = float(state["tensors"].get("total", worker.total))


def save(connection: Connection, directory: Path) -> None:
    """See Session.save. Files appear whole or not at all."""
    worker, uplink = connection.worker, connection.uplink
    if worker is None:
        return
    meta = {"format": FORMAT, "plan": records.digest(worker.plan), "world": str(connection.world), "step": str(worker.step)}
    files: dict[str, dict[str, torch.Tensor]] = {}
    with together(connection.groups, "save()"):
        worker.drain()
        undone = worker.undone()
        for server in _servers_of(connection):
            assert uplink is not None
            tensors: dict[str, torch.Tensor] = {}
            for bucket in _summed_by(worker.plan, server):
                data = uplink.fetch_state(server, bucket.id, undone.get(bucket.id, 0))
                tensors |= {f"{bucket.id}.{name}": t for name, t in safetensors.torch.load(data).items()}
            files[f"server-{server}"] = tensors
    worker.heard()  # on all ranks, though one told each server
    with together(connection.groups, "save()"):  # and the next step's frames would change what others still fetch
        files[f"rank-{connection.rank}"] = worker_state(connection)["tensors"]
        directory.mkdir(parents=True, exist_ok=True)
        for name, tensors in files.items():
            _write(directory / f"{name}.safetensors", tensors, meta)
        if connection.rank == 0:
            _whole(directory / PLAN_FILE, lambda part: part.write_bytes(records.encode(worker.plan)))


def load(connection: Connection, directory: Path) -> None:
    """See Session.load. Nothing is restored unless every rank has read files of one save."""
    worker, uplink = connection.worker, connection.uplink
    if worker is None:
        return
    _take_plan(connection, directory)
    worker = connection.worker
    assert worker is not None
    names = [f"rank-{connection.rank}", *(f"server-{s}" for s in _servers_of(connection))]
    with together(connection.groups, "load()"):
        worker.drain()
        read = {name: _read(directory / f"{name}.safetensors") for name in names}
        for name, (_, meta) in read.items():
            _same(f"{directory / name}.safetensors", "world", meta.get("world"), str(connection.world))
            _same(f"{directory / name}.safetensors", "plan", meta.get("plan"), records.digest(worker.plan))
        steps = [int(meta["step"]) for _, meta in read.values()]
    _one_step(connection, directory, steps)
    tensors, meta = read[names[0]]
    step = int(meta["step"])
    with together(connection.groups, "load()"):  # nobody may push before every server has its state back
        for server in _servers_of(connection):
            assert uplink is not None
            for bucket in _summed_by(worker.plan, server):
                data = safetensors.torch.save(_of_bucket(read[f"server-{server}"][0], bucket.id))
                uplink.put_state(server, bucket.id, step, data)
        _restore(connection, worker, {"step": step, "plan": meta["plan"], "tensors": tensors})


def _take_plan(connection: Connection, directory: Path) -> None:
    """Where nobody asked for a plan, goes over to that of the save: the run that saved may have changed it since it began."""
    if not connection.auto:
        return
    saved: Plan | None = None
    with together(connection.groups, "load()"):
        file = directory / PLAN_FILE
        if connection.rank == 0 and file.is_file():
            saved = records.decode(file.read_bytes(), Plan, f"plan {file}")
    assert connection.worker is not None
    other = saved is not None and records.digest(saved) != records.digest(connection.worker.plan)
    if gather(connection.groups, [other])[0][0]:
        switch(connection, saved)


def _one_step(connection: Connection, directory: Path, steps: list[int]) -> None:
    """The files of a save that was broken off may lie among those of an earlier one."""
    rows = gather(connection.groups, [min(steps), max(steps)])
    low, high = min(row[0] for row in rows), max(row[1] for row in rows)
    if low != high:
        first = next(rank for rank, row in enumerate(rows) if row[0] == low)
        last = next(rank for rank, row in enumerate(rows) if row[1] == high)
        raise ValueError(f"{directory}: files of different saves: rank {first} has read one of step {low}, rank {last} one of "
                         f"step {high}; load a directory that one save() has filled")


def _servers_of(connection: Connection) -> list[int]:
    """The servers whose files this rank sees to: spread over the ranks, each by one."""
    assert connection.plan is not None
    return [s for s in range(connection.plan.servers) if s % connection.world == connection.rank]


def _summed_by(plan: Plan, server: int) -> list[Bucket]:
    return [b for b in plan.buckets if b.path == "service" and b.server == server]


def _of_bucket(tensors: dict[str, torch.Tensor], bucket: int, lead: str = "") -> dict[str, torch.Tensor]:
    prefix = f"{lead}{bucket}."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _same(name: str, what: str, saved: str | None, here: str) -> None:
    if saved != here:
        raise ValueError(f"{name} is of {what} {saved}, this job has {here}: load it under the same plan and world")


def _write(path: Path, tensors: dict[str, torch.Tensor], meta: dict[str, str]) -> None:
    _whole(path, lambda part: safetensors.torch.save_file({n: t.contiguous() for n, t in tensors.items()}, part, metadata=meta))


def _whole(path: Path, write: Callable[[Path], object]) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        write(part)
        _sync(part)
        os.replace(part, path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """To the disk, so that no power failure leaves a name without its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; save() writes one per rank and per server")
    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole file of the safetensors format: {error}") from None
    if meta.get("format") != FORMAT or "step" not in meta:
        raise ValueError(f"{path}: format {meta.get('format')!r}, this version reads {FORMAT!r} with a step")
    return tensors, meta
