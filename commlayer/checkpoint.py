"""Saves and restores what codecs keep back, a file per rank and per server. Knows connections and files; no model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open

from commlayer import records
from commlayer.compressors import restore, snapshot
from commlayer.connect import Connection
from commlayer.runtime.worker import Worker

FORMAT = "commlayer-state-1"


def worker_state(worker: Worker | None) -> dict[str, Any]:
    """Residuals and the like of every bucket that this worker codes, and the step that comes next."""
    if worker is None:
        return {}
    tensors = {
        f"{flow.bucket.id}.{name}": tensor for flow in worker.coded for name, tensor in snapshot(flow.state).items()
    }
    return {"step": worker.step, "plan": records.digest(worker.plan), "tensors": tensors}


def restore_worker(worker: Worker | None, state: dict[str, Any]) -> None:
    """The reverse. The plan must be the one it was saved under."""
    if worker is None:
        return
    _same("plan", state.get("plan"), records.digest(worker.plan))
    for flow in worker.coded:
        restore(flow.state, _of_bucket(state["tensors"], flow.bucket.id))
    worker.step = int(state["step"])


def save(connection: Connection, directory: Path) -> None:
    """See Session.save. Files appear whole or not at all."""
    worker = connection.worker
    if worker is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    meta = {"format": FORMAT, "plan": records.digest(worker.plan), "world": str(connection.world), "step": str(worker.step)}
    for server in _servers_of(connection):
        assert connection.uplink is not None
        tensors: dict[str, torch.Tensor] = {}
        for bucket in worker.buckets_of(server):
            data = connection.uplink.fetch_state(server, bucket.id, undo=worker.undone)
            tensors |= {f"{bucket.id}.{name}": t for name, t in safetensors.torch.load(data).items()}
        _write(directory / f"server-{server}.safetensors", tensors, meta)
    worker.settle()
    state = worker_state(worker)
    _write(directory / f"rank-{connection.rank}.safetensors", state["tensors"], meta)
    if connection.groups is not None:
        connection.groups.barrier()  # the next step's frames would change what others still fetch; and now all files are there


def load(connection: Connection, directory: Path) -> None:
    """See Session.load."""
    worker = connection.worker
    if worker is None:
        return
    tensors, meta = _read(directory / f"rank-{connection.rank}.safetensors")
    _same("world", meta.get("world"), str(connection.world))
    _same("plan", meta.get("plan"), records.digest(worker.plan))
    step = int(meta["step"])
    for server in _servers_of(connection):
        assert connection.uplink is not None
        kept, _ = _read(directory / f"server-{server}.safetensors")
        for bucket in worker.buckets_of(server):
            data = safetensors.torch.save(_of_bucket(kept, bucket.id))
            connection.uplink.put_state(server, bucket.id, step - 1, data)
    restore_worker(worker, {"step": step, "plan": meta["plan"], "tensors": tensors})
    if connection.groups is not None:
        connection.groups.barrier()  # nobody may push before every server has its state back


def _servers_of(connection: Connection) -> list[int]:
    """The servers whose files this rank sees to: spread over the ranks, each by one."""
    assert connection.plan is not None
    return [s for s in range(connection.plan.servers) if s % connection.world == connection.rank]


def _of_bucket(tensors: dict[str, torch.Tensor], bucket: int) -> dict[str, torch.Tensor]:
    prefix = f"{bucket}."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _same(what: str, saved: str | None, here: str) -> None:
    if saved != here:
        raise ValueError(f"saved state is of {what} {saved}, this job has {here}: load it under the same plan and world")


def _write(path: Path, tensors: dict[str, torch.Tensor], meta: dict[str, str]) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        safetensors.torch.save_file({name: t.contiguous() for name, t in tensors.items()}, part, metadata=meta)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; save() writes one per rank and per server")
    with safe_open(path, framework="pt") as file:
        meta = file.metadata() or {}
        if meta.get("format") != FORMAT:
            raise ValueError(f"{path}: format {meta.get('format')!r}, this version reads {FORMAT!r}")
        return {name: file.get_tensor(name) for name in file.keys()}, meta  # noqa: SIM118 - not a dict
