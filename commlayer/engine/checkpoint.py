"""Saves and restores residuals and other codec state, with one file per rank and one per server."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from commlayer import files, records
from commlayer.cluster.collectives import all_or_none, gather, gather_bytes
from commlayer.cluster.messages import named_at
from commlayer.compressors import restore, snapshot
from commlayer.engine import buckets
from commlayer.engine.connection import JobContext
from commlayer.engine.step import EpochChanged
from commlayer.engine.switch import switch
from commlayer.engine.worker import Worker
from commlayer.errors import CommError, InvalidInput, PeerLost, RecordError, coded
from commlayer.records import Bucket, Plan, Record

log = logging.getLogger("commlayer")

_Files = dict[str, dict[str, torch.Tensor]]
"""Maps the name of a file to its tensors by name."""


def worker_state(connection: JobContext) -> dict[str, Any]:
    """State of this rank's codecs (residuals, momenta) for every bucket that it encodes, and the number of the next step."""
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
    tensors |= buckets.snapshot(worker.shared_buffers)
    tensors |= {} if connection.local is None else connection.local.snapshot()
    return {"step": worker.step, "plan": records.digest(worker.plan), "tensors": tensors}


def restore_worker(connection: JobContext, state: dict[str, Any]) -> None:
    """Restores the result of `worker_state`, under the plan of the save. The servers must be at the same step as the saved
    state."""
    worker = connection.worker
    if worker is None:
        return
    _refuse_under_way(connection, "load_state_dict()")
    step = int(state["step"])
    summed = any(b.served for b in worker.plan.buckets)
    if summed and worker.counters.exchanges > 0 and step != worker.step:
        raise InvalidInput("E-CHECKPOINT",
                           f"the saved state is of step {step}, but this job and its servers are at step {worker.step}: use "
                           "session.load_residuals(), which loads what session.save_residuals() wrote and also resets the "
                           "servers")
    _restore(connection, worker, state)


def _restore(connection: JobContext, worker: Worker, state: dict[str, Any]) -> None:
    _same("saved state", "plan", state.get("plan"), records.digest(worker.plan))
    worker.drain()
    for bucket in worker.coded:
        restore(bucket.state, _of_bucket(state["tensors"], bucket.id))
    for bucket in worker.buckets:
        bucket.forget()
        bucket.carry = state["tensors"].get(f"carry.{bucket.id}")
    worker.late.restore(state["tensors"])
    buckets.restore(worker.shared_buffers, state["tensors"])
    if connection.local is not None:
        connection.local.restore(state["tensors"])
    worker.step = int(state["step"])
    worker.total = float(state["tensors"].get("total", worker.total))


def save(connection: JobContext, directory: Path) -> None:
    """Saves the codec state of this rank and its servers, as Session.save_residuals describes. All ranks call it."""
    if connection.worker is not None:
        connection.anew(lambda: _save(connection, directory))


def _save(connection: JobContext, directory: Path) -> None:
    for act in connection.bring_in:
        act()
    worker, uplink = connection.worker, connection.uplink  # `bring_in` may have changed them
    assert worker is not None
    files: _Files = {}
    with all_or_none(connection.groups, "save_residuals()"):
        with writing(directory):  # first: the calls below undo what the last step did not apply
            highest = max(numbers(directory), default=0)
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
    mark = Mark(save=f"{rows[0][1]:016x}", step=worker.step, world=connection.world,
                                 servers=worker.plan.servers, plan=records.digest(worker.plan))
    folder, first = folder_of(directory, number), connection.rank == 0
    try:
        # No rank may continue yet: frames of the next step would change state that other ranks still fetch.
        with all_or_none(connection.groups, "save_residuals()"):
            files[f"rank-{connection.rank}"] = worker_state(connection)["tensors"]
            with writing(directory):
                write(folder, files, mark, records.encode(worker.plan) if first else b"")
        with all_or_none(connection.groups, "save_residuals()"):
            if first:
                with writing(directory):
                    seal(folder, mark)
    except Exception as error:
        if not isinstance(error, CommError):  # after a CommError this rank does not know how far the others came
            remove(folder)
        raise
    keep_only(directory, number)


def load(connection: JobContext, directory: Path) -> None:
    """Loads the newest complete save, as Session.load_residuals describes. Nothing is restored unless every rank has read its
    files of the same save. If a member leaves meanwhile, or fails to restore, the job ends on all ranks."""
    if connection.worker is None:
        return
    try:
        states, mark = _read(connection, directory)
    except (CommError, EpochChanged) as error:
        raise _not_loaded(connection, directory, error) from None
    try:
        _put(connection, states, mark)
    except Exception as error:
        raise _not_loaded(connection, directory, error) from error


def _not_loaded(connection: JobContext, directory: Path, error: Exception) -> CommError:
    """Creates the error that ends the job on all ranks after a failed load: a save contains state of all ranks, and some might
    already have restored theirs."""
    if isinstance(error, EpochChanged) and isinstance(error.__cause__, Exception):
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
    final = cause.located(what=f"{cause.what}; {directory} was not loaded and is unchanged, and all ranks stop: only as "
                               "many ranks as saved it can load it; start all ranks again")
    assert connection.worker is not None
    connection.worker.latch(final)
    return final


def _read(connection: JobContext, directory: Path) -> tuple[_Files, Mark]:
    """Selects the newest save that is complete on all ranks, switches to its plan and reads this rank's files. All ranks call
    it together."""
    rank = connection.rank
    for act in connection.bring_in:
        act()
    with all_or_none(connection.groups, "load_residuals()"), reading(directory):
        mine = msgspec.json.encode(saves_of(directory, rank))
    rows = [msgspec.json.decode(row, type=list[SaveOnDisk]) for row in gather_bytes(connection.groups, mine)]
    for held in [held for held in rows[0] if not held.fault][:1]:
        _same(str(folder_of(directory, held.number)), "world", held.world, connection.world)
    newest = newest_save(directory, rows)
    folder = folder_of(directory, newest.number)
    if newest != rows[0][0]:
        log.warning("load_residuals(): loading %s, saved at step %d, because newer saves were "
                    "interrupted", folder, newest.step)
    _take_plan(connection, folder)
    worker = connection.worker
    assert worker is not None
    states: _Files = {}
    with all_or_none(connection.groups, "load_residuals()"), reading(directory):
        worker.drain()
        mark = mark_of(folder / f"rank-{rank}.safetensors")
        _same(str(folder), "plan", mark.plan, records.digest(worker.plan))
        names = own_files(rank, connection.world, worker.plan.servers)
        states = {name: read(folder, name, mark) for name in names}
    return states, mark


def _put(connection: JobContext, read: _Files, mark: Mark) -> None:
    worker, uplink = connection.worker, connection.uplink
    assert worker is not None
    with all_or_none(connection.groups, "load_residuals()"):  # no rank may push before every server has its state back
        for server in _servers_of(connection):
            assert uplink is not None
            for bucket in _summed_by(worker.plan, server):
                data = safetensors.torch.save(_of_bucket(read[f"server-{server}"], bucket.id))
                uplink.put_state(server, bucket.id, mark.step, data)
        _restore(connection, worker, {"step": mark.step, "plan": mark.plan, "tensors": read[f"rank-{connection.rank}"]})


def _take_plan(connection: JobContext, folder: Path) -> None:
    """Switches to the plan of the save, unless the user specified a plan. The run that wrote the save might have changed plans
    after its start."""
    if not connection.terms.auto:
        return
    saved: Plan | None = None
    with all_or_none(connection.groups, "load_residuals()"), reading(folder.parent):
        file = folder / PLAN
        if connection.rank == 0 and file.is_file():
            saved = records.decode(file.read_bytes(), Plan, f"plan {file}")
    assert connection.worker is not None
    other = saved is not None and records.digest(saved) != records.digest(connection.worker.plan)
    if gather(connection.groups, [other])[0][0]:
        switch(connection, saved)


def _servers_of(connection: JobContext) -> list[int]:
    """Ids of the servers whose files this rank writes and reads. Each server is assigned to one rank."""
    assert connection.plan is not None
    return [s for s in range(connection.plan.servers) if s % connection.world == connection.rank]


def _summed_by(plan: Plan, server: int) -> list[Bucket]:
    return [b for b in plan.buckets if b.served and b.server == server]


def _of_bucket(tensors: dict[str, torch.Tensor], bucket: int) -> dict[str, torch.Tensor]:
    prefix = f"{bucket}."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _refuse_under_way(connection: JobContext, what: str) -> None:
    if connection.local is not None and connection.local.under_way:
        raise InvalidInput("E-CHECKPOINT",
                           f"{what} is not possible during an exchange of local steps, which all ranks must finish "
                           "together: call session.drain() on all ranks first, or use session.save_residuals() and "
                           "load_residuals()")


def _same(name: str, what: str, saved: object, here: object) -> None:
    if saved != here:
        raise InvalidInput("E-CHECKPOINT",
                           f"{name} was saved with {what} {saved}, but this job has {here}: load it under the same plan and "
                           "number of workers")


# ---- files of a saved state: their layout on disk, and the search for the newest complete save
#
# Each save has its own folder, `save-N`, in the user's directory. All ranks write their files there, on a shared disk or each
# on its own. After that rank 0 writes the manifest. Only when the manifest is on rank 0's disk do all ranks remove older
# saves. So a save that is complete on all ranks remains, wherever a failure happens. A save without manifest, or with missing
# files, is incomplete.

FORMAT = "commlayer-state-2"
"""Name of the file format. Files of version 1 had no folders, and the units of their residuals cannot be converted."""
MANIFEST, PLAN = "manifest.json", "plan.json"
FOLDER = "save-"


class Mark(Record, frozen=True):
    """Header that all files of one save have in common. The manifest consists only of this header."""

    save: str
    """A random name that distinguishes the files of two saves."""
    step: int
    world: int
    servers: int
    plan: str
    """Digest of the plan under which the state was saved."""


class SaveOnDisk(Record, frozen=True):
    """One save, as one rank finds it on its disk."""

    number: int
    save: str = ""
    step: int = -1
    world: int = 0
    fault: str = ""
    """The reason why the save is incomplete on this rank; empty if it is complete."""


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Context manager that converts a disk error of save_residuals() into an error of one line."""
    try:
        yield
    except OSError as error:
        raise OSError(coded("E-FILE", f"{directory}: save_residuals() cannot write in this directory: "
                                      f"{_seen(error)}; choose a directory that this process can create and that "
                                      "has space")) from None


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Context manager that converts a disk error of load_residuals() into an error of one line."""
    try:
        yield
    except OSError as error:
        raise InvalidInput("E-CHECKPOINT",
                           f"{directory}: load_residuals() cannot read this directory: {_seen(error)}; pass the "
                           "directory in which save_residuals() wrote") from None


def _seen(error: OSError) -> str:
    return f"{error.strerror} ({error.filename})" if error.strerror and error.filename else error.strerror or str(error)


def folder_of(directory: Path, number: int) -> Path:
    return directory / f"{FOLDER}{number}"


def numbers(directory: Path) -> list[int]:
    """The numbers of all saves in the directory, complete or not, in ascending order."""
    if not directory.exists():
        return []
    names = [path.name.removeprefix(FOLDER) for path in directory.iterdir() if path.name.startswith(FOLDER)]
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 16)


def own_files(rank: int, world: int, servers: int) -> list[str]:
    """Names of the files that a rank writes and reads: its own file, and those of the servers assigned to it."""
    return [f"rank-{rank}", *(f"server-{s}" for s in range(servers) if s % world == rank)]


def write(folder: Path, states: dict[str, dict[str, torch.Tensor]], mark: Mark, plan: bytes) -> None:
    """Writes one rank's files, and returns when they are safely on disk. `plan`: the encoded plan on rank 0; empty on other
    ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"format": FORMAT} | {name: str(value) for name, value in msgspec.structs.asdict(mark).items()}
    for name, tensors in states.items():
        path = _path(folder, name)
        try:
            safetensors.torch.save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata=meta)
        except SafetensorError as error:
            raise OSError(coded("E-FILE", f"{path}: the file cannot be written: {error}")) from None
        files.sync(path)
    if plan:
        files.write_whole({folder / PLAN: plan}, durable=True)
    files.sync(folder)
    files.sync(folder.parent)


def seal(folder: Path, mark: Mark) -> None:
    """Marks a save as complete by writing its manifest. Rank 0 calls it once all ranks have written their files."""
    files.write_whole({folder / MANIFEST: records.encode(mark)}, durable=True)


def remove(folder: Path) -> None:
    """Removes a save. The manifest is removed first, so that a partly removed save never counts as complete. Other ranks might
    remove the same files."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        log.warning("%s: this old save cannot be removed; it is no longer needed", folder)


def keep_only(directory: Path, number: int) -> None:
    for other in numbers(directory):
        if other != number:
            remove(folder_of(directory, other))


def saves_of(directory: Path, rank: int) -> list[SaveOnDisk]:
    """All saves in the directory as this rank finds them, newest first."""
    return [_look(directory, number, rank) for number in reversed(numbers(directory))]


def _look(directory: Path, number: int, rank: int) -> SaveOnDisk:
    folder, result = folder_of(directory, number), SaveOnDisk(number)
    try:
        mark = mark_of(_path(folder, f"rank-{rank}"))
        result = SaveOnDisk(number, mark.save, mark.step, mark.world)
        for name in own_files(rank, mark.world, mark.servers)[1:]:
            same(_path(folder, name), mark)
        if rank == 0:
            _sealed(folder / MANIFEST, mark)
    except ValueError as error:
        return msgspec.structs.replace(result, fault=str(error))
    return result


def newest_save(directory: Path, rows: list[list[SaveOnDisk]]) -> SaveOnDisk:
    """The newest save that is complete on all ranks. `rows`: for each rank, the saves that it finds."""
    usable = [{(held.number, held.save, held.step) for held in row if not held.fault} for row in rows]
    for candidate in rows[0]:
        if all((candidate.number, candidate.save, candidate.step) in row for row in usable):
            return candidate
    raise InvalidInput("E-CHECKPOINT", _why_none(directory, rows))


def _why_none(directory: Path, rows: list[list[SaveOnDisk]]) -> str:
    number = max((held.number for row in rows for held in row), default=None)
    if number is None and _path(directory, "rank-0").exists():
        return (f"{directory}: the directory contains a save of an earlier version, whose residuals have other units: start "
                "without loading it")
    if number is None:
        return (f"{directory}: the directory contains no save; save_residuals() writes one, and every rank must pass the "
                "same directory to load_residuals()")
    of_it = [next((held for held in row if held.number == number), SaveOnDisk(number, fault="nothing")) for row in rows]
    faults = [f"rank {rank} has {held.fault}" for rank, held in enumerate(of_it) if held.fault == "nothing"]
    faults += [f"rank {rank}: {held.fault}" for rank, held in enumerate(of_it) if held.fault not in ("", "nothing")]
    where = folder_of(directory, number)
    if faults:
        return f"{where}: neither this save nor an earlier one is complete on all ranks: {faults[0]}"
    other = next(rank for rank, held in enumerate(of_it) if (held.save, held.step) != (of_it[0].save, of_it[0].step))
    return (f"{where}: files of different saves: rank 0 has a file of step {of_it[0].step}, rank {other} has a file of step "
            f"{of_it[other].step}; load a directory that one save_residuals() has filled")


def read(folder: Path, name: str, mark: Mark) -> dict[str, torch.Tensor]:
    """The tensors in one file of the save whose header is `mark`."""
    path = _path(folder, name)
    same(path, mark)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def mark_of(path: Path) -> Mark:
    """Reads the header of a file. Raises InvalidInput if the file is missing, truncated or of another format."""
    if not path.is_file():
        raise InvalidInput("E-CHECKPOINT", f"{path}: no such file; save_residuals() writes one per rank and per server")
    try:
        with safe_open(path, framework="pt") as file:
            meta = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise InvalidInput("E-CHECKPOINT", f"{path}: not a complete file in the safetensors format: {error}") from None
    if (version := meta.pop("format", None)) != FORMAT:
        raise InvalidInput("E-CHECKPOINT", f"{path}: the file has format {version!r}, but this version of commlayer reads "
                                           f"{FORMAT!r}")
    try:
        return msgspec.convert(meta, Mark, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInput("E-CHECKPOINT", f"{path}: the file's header is invalid: {error}") from None


def same(path: Path, mark: Mark) -> None:
    """Raises ValueError if the file belongs to another save than the header `mark`."""
    other = mark_of(path)
    if (other.save, other.step) != (mark.save, mark.step):
        raise InvalidInput("E-CHECKPOINT",
                           f"{path}: files of different saves: this file is of step {other.step}, but the rank's own is of "
                           f"step {mark.step}; load a directory that one save_residuals() has filled")


def _sealed(path: Path, mark: Mark) -> None:
    if not path.is_file():
        raise InvalidInput("E-CHECKPOINT", f"{path}: no such file, so the save was interrupted")
    try:
        manifest = records.decode(path.read_bytes(), Mark, str(path))
    except RecordError as error:
        raise InvalidInput("E-CHECKPOINT", f"{error}: the manifest is incomplete") from None
    if manifest != mark:
        raise InvalidInput("E-CHECKPOINT",
                           f"{path}: files of different saves: the manifest is of step {manifest.step}, but rank 0's file "
                           f"is of step {mark.step}; load a directory that one save_residuals() has filled")


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"
