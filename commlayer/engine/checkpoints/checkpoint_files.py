"""Files of checkpoints on disk: written beside the final name, synced, sealed by a manifest, and checked when read."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from commlayer import files, records
from commlayer.engine.epochs.replica import on_host
from commlayer.errors import InvalidInput, append_code
from commlayer.records import Plan, Record, complete
from commlayer.transport.protocol import SERVER_BASE

log = logging.getLogger("commlayer")
Files = dict[str, dict[str, torch.Tensor]]
"""Maps a file name to the file's tensors by name."""
FORMAT = "commlayer-checkpoint-2"
MANIFEST, PLAN, TRAINING = "manifest.json", "plan.json", "training-"
FOLDER = "save-"
MAX_NUMBER_STEP = 10**9
"""Largest difference between the numbers of ranks' checkpoints. Numbers of 16 digits, which are not found again, are far away.
"""
MAX_SAVES, LIST_NBYTES = 8, 1 << 20
"""Largest number of checkpoints that a rank looks at, and largest size of a rank's list of them with their files: that of jobs
with 2,000 workers."""


class CheckpointHeader(Record, frozen=True):
    """Header that all files of one checkpoint have in common. The manifest consists only of this header."""

    save: str
    """A random name, equal in all files of one checkpoint."""
    step: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    """Number of training steps, as Session.step counts them."""
    round: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    """Number of the next exchange, which messages between workers and servers contain."""
    world: Annotated[int, msgspec.Meta(ge=1, le=SERVER_BASE)]
    servers: Annotated[int, msgspec.Meta(ge=0, le=SERVER_BASE)]
    plan: str
    """Digest of the plan under which the state was saved; empty if there were no other workers."""
    rate: float = 1.0
    """Learning rate by which codecs that send weight updates had multiplied the saved residuals; 1 without such codecs."""
    members: Annotated[int, msgspec.Meta(ge=1, le=SERVER_BASE)] = 1
    """Residuals are parts of a mean over this number of workers; see Units.members."""
    sites: str = ""
    """Number of ranks of each site, if they are unlike."""
    training_id: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    """A random number, equal in all checkpoints of a training, which resumed jobs continue."""

    @property
    def files(self) -> list[str]:
        """Names of the files with the codec state of all ranks and servers."""
        return [name for rank in range(self.world) for name in own_files(rank, self.world, self.servers)]


class SaveOnDisk(Record, frozen=True):
    """A checkpoint as one rank finds it on its disk: its number and the files that this rank has."""

    number: int
    save: str = ""
    mark: CheckpointHeader | None = None
    files: tuple[str, ...] = ()
    """Names of the files that are complete."""
    sealed: bool = False
    fault: str = ""
    foreign: str = ""
    """Describes a file that belongs to another checkpoint; empty if there is none."""


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Context manager that converts a disk error of checkpoint() into an error of one line."""
    try:
        yield
    except OSError as error:
        raise OSError(append_code("E-FILE",
                                  f"{directory}: checkpoint() cannot write in this directory: {_seen(error)}; choose a "
                                  "directory that this process can create and that has space")) from None


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Context manager that converts a disk error of resume() into an error of one line."""
    try:
        yield
    except OSError as error:
        raise InvalidInput("E-CHECKPOINT", f"{directory}: resume() cannot read this directory: {_seen(error)}; pass the "
                                           "directory in which checkpoint() wrote") from None


def _seen(error: OSError) -> str:
    return f"{error.strerror} ({error.filename})" if error.strerror and error.filename else error.strerror or str(error)


def checkpoint_folder(directory: Path, number: int) -> Path:
    return directory / f"{FOLDER}{number}"


def numbers(directory: Path) -> list[int]:
    """Returns the numbers of all checkpoints in the directory, complete or not, in ascending order."""
    if not directory.exists():
        return []
    names = [path.name.removeprefix(FOLDER) for path in directory.iterdir() if path.name.startswith(FOLDER)]
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 16)


def own_files(rank: int, world: int, servers: int) -> list[str]:
    """Returns the names of the codec files that a rank writes and reads: its own file, and the files of the servers assigned to
    it."""
    return [f"rank-{rank}", *(f"server-{s}" for s in range(rank, servers, world))]


def assign_file_reader(name: str, holders: Sequence[int], world: int) -> int:
    """Returns the rank that reads a file. It is a rank that has the file: if possible, the rank for which `own_files` names the
    file."""
    number = int(name.rpartition("-")[2]) if name != PLAN else 0
    return number % world if number % world in holders else holders[number % len(holders)]


def write(folder: Path, states: Files, mark: CheckpointHeader, plan: Plan | None) -> None:
    """Writes one rank's files and the plan, and returns when they are safely on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"format": FORMAT} | {name: str(value) for name, value in msgspec.structs.asdict(mark).items()}
    for name, tensors in states.items():
        path = tensor_file_path(folder, name)
        try:
            safetensors.torch.save_file({n: on_host(t) for n, t in tensors.items()}, path, metadata=meta)
        except SafetensorError as error:
            raise OSError(append_code("E-FILE", f"{path}: the file cannot be written: {error}")) from None
        files.sync(path)
    if plan is not None:
        files.write_whole({folder / PLAN: records.encode(plan)}, durable=True)
    files.sync(folder)
    files.sync(folder.parent)


def seal(folder: Path, mark: CheckpointHeader) -> None:
    """Marks a checkpoint as complete by writing its manifest. Called once all ranks have written their files."""
    files.write_whole({folder / MANIFEST: records.encode(mark)}, durable=True)


def remove(folder: Path) -> None:
    """Removes a checkpoint. The manifest is removed first, so that a partly removed checkpoint never counts as complete. Other
    ranks may remove the same files at the same time."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        log.warning("%s: this old checkpoint cannot be removed; it is no longer needed", folder)


def keep_only(directory: Path, number: int) -> None:
    for other in numbers(directory):
        if other != number:
            remove(checkpoint_folder(directory, other))


def files_in(folder: Path) -> list[str]:
    """Returns the names of the checkpoint's files in a folder, without suffixes."""
    return [path.name.removesuffix(".safetensors") for path in sorted(folder.iterdir())] if folder.is_dir() else []


def find_checkpoints(directory: Path) -> list[SaveOnDisk]:
    """Returns the newest checkpoints in the directory that this rank finds, newest first. There are several checkpoints if jobs
    ended while they saved."""
    return [_find_checkpoint(directory, number) for number in [*reversed(numbers(directory))][:MAX_SAVES]]


def _find_checkpoint(directory: Path, number: int) -> SaveOnDisk:
    """Returns the checkpoint with the given number. It reads the headers of the files; a file whose header differs from the
    manifest belongs to another checkpoint."""
    folder = checkpoint_folder(directory, number)
    marks: dict[str, CheckpointHeader] = {}
    fault = ""
    for name in files_in(folder):
        try:
            if name.startswith((TRAINING, "rank-", "server-")):
                marks[name] = read_mark(tensor_file_path(folder, name))
            elif name == MANIFEST:
                marks[name] = records.decode((folder / MANIFEST).read_bytes(), CheckpointHeader, str(folder / MANIFEST))
        except ValueError as error:
            fault = fault or str(error)
    if not marks:
        return SaveOnDisk(number, fault=fault or f"{folder}: no file of a checkpoint")
    mark = marks.get(MANIFEST) or next(iter(marks.values()))
    same = tuple(name for name, other in marks.items() if other == mark and name != MANIFEST)
    foreign = next((f"{tensor_file_path(folder, name)} belongs to another checkpoint, of step {other.step}"
                    for name, other in marks.items() if other != mark), "")
    plan = (PLAN,) if (folder / PLAN).is_file() else ()
    return SaveOnDisk(number, mark.save, mark, same + plan, MANIFEST in marks, fault, foreign)


def read(folder: Path, name: str, mark: CheckpointHeader) -> dict[str, torch.Tensor]:
    """Returns the tensors in one file of the checkpoint whose header is `mark`."""
    path = tensor_file_path(folder, name)
    if (other := read_mark(path)) != mark:
        raise InvalidInput("E-CHECKPOINT", f"{path}: this file is of step {other.step}, but the checkpoint is of step "
                                           f"{mark.step}")
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def read_mark(path: Path) -> CheckpointHeader:
    """Reads the header of a file. Raises InvalidInput if the file is truncated or of another format."""
    try:
        with safe_open(path, framework="pt") as file:
            meta = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise InvalidInput("E-CHECKPOINT", f"{path}: not a complete file in the safetensors format: {error}") from None
    if (version := meta.pop("format", None)) != FORMAT:
        raise InvalidInput("E-CHECKPOINT", f"{path}: the file has format {version!r}, but this version of commlayer reads "
                                           f"{FORMAT!r}: resume with the version that wrote it")
    try:
        return msgspec.convert(meta, complete(CheckpointHeader), strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInput("E-CHECKPOINT", f"{path}: the file's header is invalid: {error}") from None


def belongs_to_checkpoint(path: Path, mark: CheckpointHeader) -> bool:
    """Returns True if a file is complete and belongs to the checkpoint whose header is `mark`."""
    try:
        return read_mark(path) == mark
    except ValueError:
        return False


def tensor_file_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"
