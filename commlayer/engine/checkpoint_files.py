"""Files of a saved state: their layout on disk, and the search for the newest complete save.

Each save has its own folder, `save-N`, in the user's directory. All ranks write their files there, on a shared disk or each on
its own. After that rank 0 writes the manifest. Only when the manifest is on rank 0's disk do all ranks remove older saves. So a
save that is complete on all ranks remains, wherever a failure happens. A save without manifest, or with missing files, is
incomplete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from commlayer import files, records
from commlayer.errors import InvalidInput, RecordError, coded
from commlayer.records import Record

log = logging.getLogger("commlayer")

FORMAT = "commlayer-state-2"
"""Version 1 had no folders, and its residuals had units that cannot be converted today."""
MANIFEST, PLAN = "manifest.json", "plan.json"
FOLDER = "save-"


class Mark(Record, frozen=True):
    """The header common to all files of one save. The manifest holds nothing else."""

    save: str
    """A random name that distinguishes the files of two saves."""
    step: int
    world: int
    servers: int
    plan: str
    """The plan's digest."""


class Held(Record, frozen=True):
    """What one rank holds of a save."""

    number: int
    save: str = ""
    step: int = -1
    world: int = 0
    fault: str = ""
    """Why it is incomplete on this rank."""


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Reports a disk error of save_residuals() in one line."""
    try:
        yield
    except OSError as error:
        raise OSError(coded("E-FILE", f"{directory}: save_residuals() cannot write there: {_seen(error)}; name a directory "
                            "that this process may make and fill, on a disk with room")) from None


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Reports a disk error of load_residuals() in one line."""
    try:
        yield
    except OSError as error:
        raise InvalidInput("E-CHECKPOINT",
                           f"{directory}: load_residuals() cannot read it: {_seen(error)}; name the directory that "
                           "save_residuals() was given") from None


def _seen(error: OSError) -> str:
    return f"{error.strerror} ({error.filename})" if error.strerror and error.filename else error.strerror or str(error)


def folder_of(directory: Path, number: int) -> Path:
    return directory / f"{FOLDER}{number}"


def numbers(directory: Path) -> list[int]:
    """The numbers of all saves on disk, complete or not."""
    if not directory.exists():
        return []
    names = [path.name.removeprefix(FOLDER) for path in directory.iterdir() if path.name.startswith(FOLDER)]
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 16)


def mine(rank: int, world: int, servers: int) -> list[str]:
    """The files that a rank writes and reads: its own, and those of its servers."""
    return [f"rank-{rank}", *(f"server-{s}" for s in range(servers) if s % world == rank)]


def write(folder: Path, states: dict[str, dict[str, torch.Tensor]], mark: Mark, plan: bytes) -> None:
    """Writes one rank's files. They are on disk when this returns. `plan` comes from rank 0; elsewhere it is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"format": FORMAT} | {name: str(value) for name, value in msgspec.structs.asdict(mark).items()}
    for name, tensors in states.items():
        path = _path(folder, name)
        try:
            safetensors.torch.save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata=meta)
        except SafetensorError as error:
            raise OSError(coded("E-FILE", f"{path}: cannot be written: {error}")) from None
        files.sync(path)
    if plan:
        files.write_whole({folder / PLAN: plan}, durable=True)
    files.sync(folder)
    files.sync(folder.parent)


def seal(folder: Path, mark: Mark) -> None:
    """Marks the save as complete. Rank 0 calls it once all ranks have written."""
    files.write_whole({folder / MANIFEST: records.encode(mark)}, durable=True)


def remove(folder: Path) -> None:
    """Removes the manifest first, so that a half-removed save is never complete. Other ranks may remove the same files."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        log.warning("%s: cannot be removed; it is no longer needed", folder)


def keep_only(directory: Path, number: int) -> None:
    for other in numbers(directory):
        if other != number:
            remove(folder_of(directory, other))


def held(directory: Path, rank: int) -> list[Held]:
    """What this rank holds of each save, newest first."""
    return [_look(directory, number, rank) for number in reversed(numbers(directory))]


def _look(directory: Path, number: int, rank: int) -> Held:
    folder, result = folder_of(directory, number), Held(number)
    try:
        mark = mark_of(_path(folder, f"rank-{rank}"))
        result = Held(number, mark.save, mark.step, mark.world)
        for name in mine(rank, mark.world, mark.servers)[1:]:
            same(_path(folder, name), mark)
        if rank == 0:
            _sealed(folder / MANIFEST, mark)
    except ValueError as error:
        return msgspec.structs.replace(result, fault=str(error))
    return result


def newest(directory: Path, rows: list[list[Held]]) -> Held:
    """The newest save that is complete on all ranks. `rows` has what each rank holds."""
    usable = [{(held.number, held.save, held.step) for held in row if not held.fault} for row in rows]
    for candidate in rows[0]:
        if all((candidate.number, candidate.save, candidate.step) in row for row in usable):
            return candidate
    raise InvalidInput("E-CHECKPOINT", _why_none(directory, rows))


def _why_none(directory: Path, rows: list[list[Held]]) -> str:
    number = max((held.number for row in rows for held in row), default=None)
    if number is None and _path(directory, "rank-0").exists():
        return f"{directory}: holds a save of an earlier version, whose residuals have other units: begin without it"
    if number is None:
        return (f"{directory}: holds no save; save_residuals() writes one there, and load_residuals() on every rank names the "
                "same directory")
    of_it = [next((held for held in row if held.number == number), Held(number, fault="nothing")) for row in rows]
    faults = [f"rank {rank} has {held.fault}" for rank, held in enumerate(of_it) if held.fault == "nothing"]
    faults += [f"rank {rank}: {held.fault}" for rank, held in enumerate(of_it) if held.fault not in ("", "nothing")]
    where = folder_of(directory, number)
    if faults:
        return f"{where}: not whole on all ranks, nor is an earlier save: {faults[0]}"
    other = next(rank for rank, held in enumerate(of_it) if (held.save, held.step) != (of_it[0].save, of_it[0].step))
    return (f"{where}: files of different saves: rank 0 has one of step {of_it[0].step}, rank {other} one of step "
            f"{of_it[other].step}; load a directory that one save_residuals() has filled")


def read(folder: Path, name: str, mark: Mark) -> dict[str, torch.Tensor]:
    """The tensors of one file of the save with that mark."""
    path = _path(folder, name)
    same(path, mark)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def mark_of(path: Path) -> Mark:
    """Reads a file's header. That also fails if the file is truncated."""
    if not path.is_file():
        raise InvalidInput("E-CHECKPOINT", f"{path}: no such file; save_residuals() writes one per rank and per server")
    try:
        with safe_open(path, framework="pt") as file:
            meta = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise InvalidInput("E-CHECKPOINT", f"{path}: not a whole file of the safetensors format: {error}") from None
    if (version := meta.pop("format", None)) != FORMAT:
        raise InvalidInput("E-CHECKPOINT", f"{path}: format {version!r}, this version reads {FORMAT!r}")
    try:
        return msgspec.convert(meta, Mark, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInput("E-CHECKPOINT", f"{path}: its header: {error}") from None


def same(path: Path, mark: Mark) -> None:
    """Raises ValueError if the file belongs to another save."""
    other = mark_of(path)
    if (other.save, other.step) != (mark.save, mark.step):
        raise InvalidInput("E-CHECKPOINT",
                           f"{path}: files of different saves: this one is of step {other.step}, the rank's own of step "
                           f"{mark.step}; load a directory that one save_residuals() has filled")


def _sealed(path: Path, mark: Mark) -> None:
    if not path.is_file():
        raise InvalidInput("E-CHECKPOINT", f"{path}: no such file, so the save was broken off")
    try:
        manifest = records.decode(path.read_bytes(), Mark, str(path))
    except RecordError as error:
        raise InvalidInput("E-CHECKPOINT", f"{error}: not a whole manifest") from None
    if manifest != mark:
        raise InvalidInput("E-CHECKPOINT",
                           f"{path}: files of different saves: the manifest is of step {manifest.step}, rank 0's file of step "
                           f"{mark.step}; load a directory that one save_residuals() has filled")


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"
