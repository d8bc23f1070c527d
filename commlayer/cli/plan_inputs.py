"""Reads the inputs of `commlayer plan` (jobs, clusters and profiles, by name or file) and writes its JSON output."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import structs

from commlayer import records
from commlayer.balance import loss_model
from commlayer.balance.loss_model import LossModel
from commlayer.errors import InvalidInput
from commlayer.files import write_whole
from commlayer.plan_file import text_of
from commlayer.planner import tables
from commlayer.planner.convergence import LearningRow
from commlayer.planner.costs import bare
from commlayer.planner.inputs import cluster_from_line, cluster_of, cluster_of_homes, profile_of
from commlayer.planner.model import Cluster, Profile
from commlayer.planner.tables import LearningTable, rows_in, shipped, table_in
from commlayer.records import Job


def job_named(model: str, batch: int | None) -> Job:
    """A built-in job, a job file, or the model that a user's function makes, timed on this machine."""
    if batch is not None and batch < 1:
        raise InvalidInput("E-CLI-OPTION", f"--batch: got {batch}, allowed: at least 1")
    if model.endswith(".json"):
        return tables.on_reference(_of_batch(records.decode(text_of(model, "job").encode(), Job, f"job {model}"), batch, model))
    if model.endswith(".py") or ":" in model:
        # Imported late: it loads torch, which built-in models and job files do not need.
        from commlayer.cli.user_code import job_of_function

        return tables.on_reference(job_of_function(model, batch))
    try:
        return tables.builtin(model, batch)
    except ValueError as error:
        raise InvalidInput("E-CLI-OPTION", f"{error}; or a job file ending in .json, or FILE.py[:FUNCTION]") from None


def _of_batch(job: Job, batch: int | None, file: str) -> Job:
    """The job with its batch. A file without a batch takes `batch`; a file with one has times for that batch only."""
    if batch is not None and job.batch not in (None, batch):
        raise InvalidInput("E-CLI-OPTION",
                           f"--batch {batch}: the times in {file} are of a batch of {job.batch}; leave --batch out, or time it "
                           f"with `commlayer profile --model FILE.py:FUNCTION --batch {batch} --job {file}`")
    return job if batch is None else structs.replace(job, batch=batch)


SERVER = "1Gb"


def cluster_named(file: str, nodes: str, homes: str, server: str) -> Cluster:
    """The cluster from one of three options. `server`: the link of the homes' server, else `SERVER`."""
    options = [option for option, text in (("--homes", homes), ("--nodes", nodes), ("--cluster", file)) if text]
    if len(options) != 1:
        raise InvalidInput("E-CLI-OPTION",
                           "say the machines once: --homes LINE (behind NAT, with a rented server), --nodes LINE or --cluster "
                           f"FILE (`commlayer plan init` writes a first one); got {' and '.join(options) or 'none'}")
    if server and not homes:
        raise InvalidInput("E-CLI-OPTION",
                           f"--server {server} is the link of the server of --homes; got {options[0]}, which has its own")
    if homes:
        return cluster_of_homes(homes, server or SERVER)
    if nodes:
        return cluster_from_line(nodes)
    return cluster_of(text_of(file, "cluster"), f"cluster {file}", toml=not file.endswith(".json"))


def profile_named(file: str) -> Profile | None:
    if not file:
        return None
    return profile_of(text_of(file, "profile"), f"profile {file}", toml=file.endswith(".toml"))


def codecs_named(texts: list[str], profile: Profile | None) -> tuple[str, ...]:
    """The codecs in the profile's spelling, which has all arguments."""
    try:
        spelled = {bare(cost.codec): cost.codec for cost in profile.codecs} if profile is not None else {}
        return tuple(spelled.get(bare(text), text) for text in texts)
    except ValueError as error:
        raise InvalidInput("E-CLI-OPTION", f"--codec: {error}") from None


OPTIMIZERS = {"any": "", "sgd": "sgd", "adam": "adam", "adamw": "adam"}


def optimizer_named(name: str) -> str:
    """The family of the optimizer."""
    if name.lower() not in OPTIMIZERS:
        raise InvalidInput("E-CLI-OPTION",
                           f"--optimizer {name}: allowed are adamw, adam, sgd (with momentum) and any (the worse of both "
                           "counts)")
    return OPTIMIZERS[name.lower()]


def objective_named(name: str) -> Literal["loss", "step"]:
    if name not in ("loss", "step"):
        raise InvalidInput("E-CLI-OPTION", f"--objective {name}: allowed are loss and step")
    return "loss" if name == "loss" else "step"


def loss_named(file: str) -> LossModel | None:
    return loss_model.read(Path(file)) if file else None


def learning_named(file: str) -> tuple[LearningRow, ...]:
    return rows_in(Path(file)) if file else ()


def learning_table(file: str, profile: Profile | None) -> LearningTable | None:
    """The source of the convergence factors that plans use, as in `PlanFileInputs`. None: the profile has rows of its own."""
    if file:
        return table_in(Path(file))
    return None if profile is not None and profile.learning and profile.learning != shipped().rows else shipped()


def check_json(path: Path | None) -> None:
    """Checks the file of write_json before the command does its work."""
    if path is not None:
        check_out(path)


def write_json(path: Path | None, text: str) -> None:
    """Writes the result of a command to the file of its --json option."""
    if path is not None:
        write({path: text + "\n"})


def check_out(path: Path) -> None:
    """Checks an output file before the command does its work."""
    folder = path.absolute().parent
    if path.is_dir():
        raise InvalidInput("E-CLI-OPTION", f"{path}: is a folder, allowed: the name of a file")
    if not folder.is_dir():
        raise InvalidInput("E-CLI-OPTION", f"{path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise InvalidInput("E-CLI-OPTION", f"{path}: the folder {folder} cannot be written to")


def write(texts: Mapping[Path, str]) -> None:
    """Writes all files completely, or none."""
    for path in texts:
        check_out(path)
    try:
        write_whole({path: text.encode() for path, text in texts.items()})
    except OSError as error:
        raise InvalidInput("E-CLI-OPTION", f"{error.filename}: {error.strerror}") from None
