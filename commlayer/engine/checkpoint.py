"""Saves and restores residuals and other codec state, with one file per rank and per server."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch

from commlayer import records
from commlayer.cluster.collectives import all_or_none, gather, gather_bytes
from commlayer.cluster.messages import named_at
from commlayer.compressors import restore, snapshot
from commlayer.engine import checkpoint_files, shared_buffers
from commlayer.engine.connection import Connection
from commlayer.engine.step import Regroup
from commlayer.engine.switch import switch
from commlayer.engine.worker import Worker
from commlayer.errors import CommError, InvalidInput, PeerLost
from commlayer.records import Bucket, Plan

log = logging.getLogger("commlayer")

_Files = dict[str, dict[str, torch.Tensor]]
"""By name, as in checkpoint_files.mine."""


def worker_state(connection: Connection) -> dict[str, Any]:
    """Codec state (residuals and the like) of every bucket that this worker codes, and the number of the next step."""
    worker = connection.worker
    if worker is None:
        return {}
    _refuse_under_way(connection, "state_dict()")
    if worker.error is None:
        worker.drain()
        worker.undone()
    tensors = {
        f"{bucket.id}.{name}": tensor for bucket in worker.coded for name, tensor in snapshot(bucket.state).items()
    }
    tensors["total"] = torch.tensor(worker.total, dtype=torch.float64)
    tensors |= {f"carry.{bucket.id}": bucket.carry.clone() for bucket in worker.buckets if bucket.carry is not None}
    tensors |= worker.late.snapshot()
    tensors |= shared_buffers.snapshot(worker.shared_buffers)
    tensors |= {} if connection.local is None else connection.local.snapshot()
    return {"step": worker.step, "plan": records.digest(worker.plan), "tensors": tensors}


def restore_worker(connection: Connection, state: dict[str, Any]) -> None:
    """Restores `worker_state`, under the plan of the save. The servers must be at the step of the save."""
    worker = connection.worker
    if worker is None:
        return
    _refuse_under_way(connection, "load_state_dict()")
    step = int(state["step"])
    summed = any(b.served for b in worker.plan.buckets)
    if summed and worker.counters.exchanges > 0 and step != worker.step:
        raise InvalidInput("E-CHECKPOINT",
                           f"saved state is of step {step}, this job is at step {worker.step} and its servers with it: go back "
                           "with session.load_residuals(), which takes what session.save_residuals() wrote and resets the "
                           "servers, too")
    _restore(connection, worker, state)


def _restore(connection: Connection, worker: Worker, state: dict[str, Any]) -> None:
    _same("saved state", "plan", state.get("plan"), records.digest(worker.plan))
    worker.drain()
    for bucket in worker.coded:
        restore(bucket.state, _of_bucket(state["tensors"], bucket.id))
    for bucket in worker.buckets:
        bucket.forget()
        bucket.carry = state["tensors"].get(f"carry.{bucket.id}")
    worker.late.restore(state["tensors"])
    shared_buffers.restore(worker.shared_buffers, state["tensors"])
    if connection.local is not None:
        connection.local.restore(state["tensors"])
    worker.step = int(state["step"])
    worker.total = float(state["tensors"].get("total", worker.total))


def save(connection: Connection, directory: Path) -> None:
    """See Session.save_residuals, and engine/checkpoint_files.py for the layout and order of files."""
    if connection.worker is not None:
        connection.anew(lambda: _save(connection, directory))


def _save(connection: Connection, directory: Path) -> None:
    for act in connection.bring_in:
        act()
    worker, uplink = connection.worker, connection.uplink  # `bring_in` may have changed them
    assert worker is not None
    files: _Files = {}
    with all_or_none(connection.groups, "save_residuals()"):
        with checkpoint_files.writing(directory):  # first: the calls below undo what the last step did not apply
            highest = max(checkpoint_files.numbers(directory), default=0)
            directory.mkdir(parents=True, exist_ok=True)
        worker.drain()
        undone = worker.undone()
    with all_or_none(connection.groups, "save_residuals()"):
        for server in _servers_of(connection):
            assert uplink is not None
            tensors: dict[str, torch.Tensor] = {}
            for bucket in _summed_by(worker.plan, server):
                data = uplink.fetch_state(server, bucket.id, undone.get(bucket.id, 0))
                tensors |= {f"{bucket.id}.{name}": t for name, t in safetensors.torch.load(data).items()}
            files[f"server-{server}"] = tensors
    worker.heard()  # on all ranks, although only one rank reported to each server
    # Higher than any rank's number, so that no file of an earlier save is overwritten.
    rows = gather(connection.groups, [highest, secrets.randbits(62)])
    number = 1 + max(row[0] for row in rows)
    mark = checkpoint_files.Mark(save=f"{rows[0][1]:016x}", step=worker.step, world=connection.world,
                                 servers=worker.plan.servers, plan=records.digest(worker.plan))
    folder, first = checkpoint_files.folder_of(directory, number), connection.rank == 0
    try:
        # No rank may continue yet: frames of the next step would change state that other ranks still fetch.
        with all_or_none(connection.groups, "save_residuals()"):
            files[f"rank-{connection.rank}"] = worker_state(connection)["tensors"]
            with checkpoint_files.writing(directory):
                checkpoint_files.write(folder, files, mark, records.encode(worker.plan) if first else b"")
        with all_or_none(connection.groups, "save_residuals()"):
            if first:
                with checkpoint_files.writing(directory):
                    checkpoint_files.seal(folder, mark)
    except Exception as error:
        if not isinstance(error, CommError):  # after a CommError this rank does not know how far the others came
            checkpoint_files.remove(folder)
        raise
    checkpoint_files.keep_only(directory, number)


def load(connection: Connection, directory: Path) -> None:
    """See Session.load_residuals. Nothing is restored unless every rank has read its files of the same save. If a member leaves
    meanwhile, or fails to restore, the job ends on all ranks."""
    if connection.worker is None:
        return
    try:
        states, mark = _read(connection, directory)
    except (CommError, Regroup) as error:
        raise _not_loaded(connection, directory, error) from None
    try:
        _put(connection, states, mark)
    except Exception as error:
        raise _not_loaded(connection, directory, error) from error


def _not_loaded(connection: Connection, directory: Path, error: Exception) -> CommError:
    """Ends the job on all ranks: a save holds state of all ranks, and some may have restored theirs already."""
    if isinstance(error, Regroup) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    cause = error if isinstance(error, CommError) else CommError(f"{type(error).__name__}: {error}")
    if (members := connection.members) is not None and members.pending(connection.waits.verdict_s):
        peer = members.gone()[0]
        at = named_at(str(cause), peer)
        cause = PeerLost(str(cause)[at:].partition(": ")[2] if at >= 0 else "is gone", peer=peer)
    else:
        explained = connection.explain(cause)
        assert isinstance(explained, CommError)
        cause = explained
    final = cause.located(what=f"{cause.what}; so {directory} is not loaded, and all stop: a save is loaded by as many as "
                          "made it, and nobody trains on with a part of it; it lies as it was: start all again")
    assert connection.worker is not None
    connection.worker.latch(final)
    return final


def _read(connection: Connection, directory: Path) -> tuple[_Files, checkpoint_files.Mark]:
    """All ranks choose the same save, switch to its plan and read their files."""
    rank = connection.rank
    for act in connection.bring_in:
        act()
    with all_or_none(connection.groups, "load_residuals()"), checkpoint_files.reading(directory):
        mine = msgspec.json.encode(checkpoint_files.held(directory, rank))
    rows = [msgspec.json.decode(row, type=list[checkpoint_files.Held]) for row in gather_bytes(connection.groups, mine)]
    for held in [held for held in rows[0] if not held.fault][:1]:
        _same(str(checkpoint_files.folder_of(directory, held.number)), "world", held.world, connection.world)
    newest = checkpoint_files.newest(directory, rows)
    folder = checkpoint_files.folder_of(directory, newest.number)
    if newest != rows[0][0]:
        log.warning("load_residuals(): takes %s, of step %d; what is newer was broken off", folder, newest.step)
    _take_plan(connection, folder)
    worker = connection.worker
    assert worker is not None
    states: _Files = {}
    with all_or_none(connection.groups, "load_residuals()"), checkpoint_files.reading(directory):
        worker.drain()
        mark = checkpoint_files.mark_of(folder / f"rank-{rank}.safetensors")
        _same(str(folder), "plan", mark.plan, records.digest(worker.plan))
        names = checkpoint_files.mine(rank, connection.world, worker.plan.servers)
        states = {name: checkpoint_files.read(folder, name, mark) for name in names}
    return states, mark


def _put(connection: Connection, read: _Files, mark: checkpoint_files.Mark) -> None:
    worker, uplink = connection.worker, connection.uplink
    assert worker is not None
    with all_or_none(connection.groups, "load_residuals()"):  # no rank may push before every server has its state back
        for server in _servers_of(connection):
            assert uplink is not None
            for bucket in _summed_by(worker.plan, server):
                data = safetensors.torch.save(_of_bucket(read[f"server-{server}"], bucket.id))
                uplink.put_state(server, bucket.id, mark.step, data)
        _restore(connection, worker, {"step": mark.step, "plan": mark.plan, "tensors": read[f"rank-{connection.rank}"]})


def _take_plan(connection: Connection, folder: Path) -> None:
    """Switches to the plan of the save, unless the user named a plan: the saving run may have changed plans after its start."""
    if not connection.terms.auto:
        return
    saved: Plan | None = None
    with all_or_none(connection.groups, "load_residuals()"), checkpoint_files.reading(folder.parent):
        file = folder / checkpoint_files.PLAN
        if connection.rank == 0 and file.is_file():
            saved = records.decode(file.read_bytes(), Plan, f"plan {file}")
    assert connection.worker is not None
    other = saved is not None and records.digest(saved) != records.digest(connection.worker.plan)
    if gather(connection.groups, [other])[0][0]:
        switch(connection, saved)


def _servers_of(connection: Connection) -> list[int]:
    """The servers whose files this rank writes and reads. Each server belongs to one rank."""
    assert connection.plan is not None
    return [s for s in range(connection.plan.servers) if s % connection.world == connection.rank]


def _summed_by(plan: Plan, server: int) -> list[Bucket]:
    return [b for b in plan.buckets if b.served and b.server == server]


def _of_bucket(tensors: dict[str, torch.Tensor], bucket: int) -> dict[str, torch.Tensor]:
    prefix = f"{bucket}."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _refuse_under_way(connection: Connection, what: str) -> None:
    if connection.local is not None and connection.local.under_way:
        raise InvalidInput("E-CHECKPOINT",
                           f"{what}: an exchange of local steps is under way, which all ranks must bring in together: call "
                           "session.drain() on all of them first, or take session.save_residuals() and load_residuals()")


def _same(name: str, what: str, saved: object, here: object) -> None:
    if saved != here:
        raise InvalidInput("E-CHECKPOINT",
                           f"{name} is of {what} {saved}, this job has {here}: load it under the same plan and world")
