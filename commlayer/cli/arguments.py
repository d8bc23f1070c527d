"""Reads the arguments of commands (jobs, clusters, profiles, functions in a user's files) as records.

A user's function is FILE.py, FILE.py:FUNCTION or MODULE:FUNCTION. A file is imported only if its top level runs no calls, such
as training; a module is imported without this check.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from msgspec import structs

from commlayer import records
from commlayer.config import MOST_LOSS
from commlayer.errors import InvalidInput
from commlayer.plan_file import read_plan_text
from commlayer.planner.data import models
from commlayer.planner.data.tables import LearningTable, shipped_table, table_of_file
from commlayer.planner.inputs import cluster_from_line, cluster_of_homes, parse_cluster, parse_profile
from commlayer.planner.model import Cluster, Profile, bare
from commlayer.records import Job

if TYPE_CHECKING:
    from torch import nn


def job_named(model: str, batch: int | None) -> Job:
    """The job that MODEL names: a built-in job, a job file, or a model from the user's function, whose work is counted."""
    if model.endswith(".json"):
        return models.on_reference(_with_batch_size(records.decode(read_plan_text(model, "job").encode(), Job, f"job {model}"),
                                                    batch, model))
    if model.endswith(".py") or ":" in model:
        return counted_job(model, batch)
    try:
        return models.builtin(model, batch)
    except ValueError as error:
        raise InvalidInput("E-CLI-OPTION", f"{error}; or a job file ending in .json, or FILE.py[:FUNCTION]") from None


def _with_batch_size(job: Job, batch: int | None, file: str) -> Job:
    """The job with a batch size. `batch` applies to a file without one; a file with a batch has times for that batch only."""
    if batch is not None and job.batch not in (None, batch):
        raise InvalidInput("E-CLI-OPTION",
                           f"--batch {batch}: the times in {file} are for a batch of {job.batch}; remove --batch, or time the "
                           f"other batch with `commlayer profile FILE.py:FUNCTION --batch {batch} --job {file}`")
    return job if batch is None else structs.replace(job, batch=batch)


def with_noise_scale(job: Job, noise_scale: float | None) -> Job:
    """The job with the gradient noise scale from the command line, if the user set one."""
    if noise_scale is None:
        return job
    if not 0 < noise_scale < math.inf:
        raise InvalidInput("E-CLI-OPTION", f"--noise-scale: got {noise_scale:g}, allowed: a number of samples above 0")
    if not job.batch:
        raise InvalidInput("E-CLI-OPTION", f"--noise-scale {noise_scale:g}: the batch size of {job.name or 'the job'} is "
                           "unknown; set it with --batch N")
    return structs.replace(job, timing=structs.replace(job.timed, noise_scale=noise_scale))


def server_price(server: str, steps: int | None) -> tuple[str, float]:
    """Splits --server of `estimate` into the link's rate and the price per hour; 0: no price."""
    rate, comma, text = server.partition(",")
    if not comma:
        return server, 0.0
    try:
        price = float(text)
    except ValueError:
        price = 0.0
    if not 0 < price < math.inf:
        raise InvalidInput("E-CLI-OPTION",
                           f'--server {server}: got the price {text!r}, allowed: a number above 0, as in "1Gb,0.04"')
    if steps is None:
        raise InvalidInput("E-CLI-OPTION", f"--server {server}: a price is for the cost of a whole training: add --steps N")
    return rate or SERVER, price


SERVER = "1Gb"


def cluster_named(file: str, nodes: str, homes: str, server: str) -> Cluster:
    """The cluster from --homes, --nodes or --cluster. `server`: link of the server for --homes, by default `SERVER`."""
    options = [option for option, text in (("--homes", homes), ("--nodes", nodes), ("--cluster", file)) if text]
    if len(options) != 1:
        raise InvalidInput("E-CLI-OPTION",
                           "give the machines in one option: --homes LINE (behind NAT, with a rented server), --nodes LINE or "
                           f"--cluster FILE (`commlayer plan init` writes an example); got {' and '.join(options) or 'none'}")
    if server and not homes:
        raise InvalidInput("E-CLI-OPTION",
                           f"--server {server} sets the server's link for --homes, but {options[0]} describes all links "
                           "itself: leave --server out")
    if homes:
        return cluster_of_homes(homes, server or SERVER)
    if nodes:
        return cluster_from_line(nodes)
    return parse_cluster(read_plan_text(file, "cluster"), f"cluster {file}", toml=not file.endswith(".json"))


def profile_named(file: str) -> Profile | None:
    if not file:
        return None
    return parse_profile(read_plan_text(file, "profile"), f"profile {file}", toml=file.endswith(".toml"))


def codecs_named(texts: list[str], profile: Profile | None) -> tuple[str, ...]:
    """The codecs of --codec, spelled as in the profile, with all arguments."""
    try:
        spelled = {bare(cost.codec): cost.codec for cost in profile.codecs} if profile is not None else {}
        return tuple(spelled.get(bare(text), text) for text in texts)
    except ValueError as error:
        raise InvalidInput("E-CLI-OPTION", f"--codec: {error}") from None


OPTIMIZERS = {"any": "", "sgd": "sgd", "adam": "adam", "adamw": "adam", "muon": "muon", "lion": "lion"}


def optimizer_named(name: str) -> str:
    """The optimizer family of the --optimizer option."""
    if name.lower() not in OPTIMIZERS:
        raise InvalidInput("E-CLI-OPTION",
                           f"--optimizer {name}: allowed are adamw, adam, sgd (with momentum), muon, lion and any (the worse "
                           "of adamw and sgd)")
    return OPTIMIZERS[name.lower()]


def learning_table(file: str, profile: Profile | None) -> LearningTable | None:
    """The table from which plans take convergence factors, as in `PlanFileInputs`. Returns None if the profile contains its own
    rows."""
    if file:
        return table_of_file(Path(file))
    return None if profile is not None and profile.learning and profile.learning != shipped_table().rows else shipped_table()


def import_function(text: str, default: str, what: str) -> Callable[..., Any]:
    """Imports and returns the function that `text` names. `default`: the function's name if `text` is only a file; `what`
    describes the function in errors."""
    where, colon, name = text.rpartition(":")
    if text.endswith(".py"):
        where, name = text, default
    elif not colon or not where or not name:
        raise InvalidInput("E-USER-CODE", f"{text}: allowed are FILE.py, FILE.py:FUNCTION and MODULE:FUNCTION")
    # Python does the same for a script and for `python -m`; the command's own sys.path begins with another folder.
    folder = Path(where).parent.resolve() if where.endswith(".py") else Path.cwd()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if where.endswith(".py"):
        _check_top_level(Path(where))
    try:
        module = _file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError:
        raise InvalidInput("E-USER-CODE", f"{where}: no such file") from None
    except (Exception, SystemExit) as error:
        absent = isinstance(error, ModuleNotFoundError) and not where.endswith(".py")
        reason = str(error) if absent else f"{type(error).__name__}: {error}"
        raise InvalidInput("E-USER-CODE", f"{text}: {reason}".splitlines()[0]) from None
    candidate: Any = getattr(module, name, None)
    if not callable(candidate):
        raise InvalidInput("E-USER-CODE", f"{text}: has no function {name} {what}")
    function: Callable[..., Any] = candidate
    return function


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("commlayer_user", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


QUIET = ("warnings", "logging", "typing", "pathlib", "Path", "TypeVar", "int", "float", "str", "bool")
QUIET_BEGINNINGS = ("os.environ.", "os.getenv", "os.path.", "sys.path.", "torch.set_", "torch.backends.", "torch.manual_seed",
                    "torch.device", "torch.cuda.is_available")
"""Calls that a user's file may make at its top level: names, and prefixes of dotted names."""


def _check_top_level(path: Path) -> None:
    """Raises InvalidInput if importing the file would run other statements than definitions: planning must not start a training
    script."""
    try:
        source = path.read_bytes()
        tree = ast.parse(source, str(path))
    except (OSError, SyntaxError, ValueError):
        return  # the import itself reports the error
    working = sorted(_working(tree.body), key=attrgetter("lineno"))
    if working:
        line = source.decode(errors="replace").splitlines()[working[0].lineno - 1].strip()
        more = f" and {len(working) - 1} more statements" if len(working) > 1 else ""
        raise InvalidInput("E-USER-CODE",
                           f"{path}:{working[0].lineno}: importing this file would run `{_shortened(line)}`{more}; put them "
                           "into "
                           f'a function or under `if __name__ == "__main__":`; or name {path.stem}:FUNCTION, from its folder, '
                           "which imports the file unchecked")


def _working(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that do more than import, define, or assign. Calls to `QUIET` names are allowed."""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.If):
            if _is_main(node.test):
                yield from _working(node.orelse)
            elif _works(node.test):
                yield node
            else:
                yield from _working([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _working([*node.body, *(each for handler in node.handlers for each in handler.body), *node.orelse,
                                 *node.finalbody])
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Match) or _works(node):
            yield node


def _is_main(test: ast.expr) -> bool:
    return "__name__" in {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}


def _works(node: ast.AST) -> bool:
    """True: the node calls a function that is not in `QUIET`. The body of a lambda does not count."""
    if isinstance(node, ast.Lambda):
        return False
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name.split(".")[0] not in QUIET and not name.startswith(QUIET_BEGINNINGS):
            return True
    return any(_works(child) for child in ast.iter_child_nodes(node))


def _shortened(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."


T = TypeVar("T")
LONGEST_LINE = 60


def import_model_function(text: str) -> Callable[..., Any]:
    """Imports the user's function that returns a model and its loss function."""
    return import_function(text, "make", "that returns (model, loss)")


def timed_job(make: Callable[..., Any], text: str, batch: int | None) -> Job:
    """Times a few steps of the model that `make` returns. `text`: the name of `make` in errors."""
    from commlayer.autotune.measure import step_times

    model, loss_of = _call_model_function(make, text)
    return call_user_function(f"{text}: a step", step_times.timed_job, model, loss_of, batch=batch, name=text)


def counted_job(text: str, batch: int | None) -> Job:
    """Counts one step of the model that the function returns which `text` names. Its times are for a V100."""
    from commlayer.autotune.measure import shape_tensors, step_counts

    with shape_tensors.on_a_gpu():
        make = import_model_function(text)
    made = functools.partial(_call_model_function, make, text)
    model, loss_of = shape_tensors.without_values(made)
    job, reason = call_user_function(f"{text}: a step", step_counts.counted_job, model, loss_of, made, batch=batch, name=text)
    if reason:
        typer.echo(f"commlayer: {text}: counted while this machine computed a step, because the step reads values ({reason})",
                   err=True)
    return job


def _call_model_function(make: Callable[..., Any], text: str) -> tuple[nn.Module, Callable[[], Any]]:
    """The model and loss function that the user's function returns."""
    from torch import nn

    result = call_user_function(text, make)
    try:
        model, loss_of = result
    except (TypeError, ValueError) as error:
        raise InvalidInput("E-USER-CODE", f"{text}: expected (model, function that computes a loss): {error}") from None
    if not isinstance(model, nn.Module) or not callable(loss_of):
        raise InvalidInput("E-USER-CODE",
                           f"{text}: returned {type(model).__name__} and {type(loss_of).__name__}, expected a model and a "
                           "function that computes a loss")
    return model, loss_of


def call_user_function(what: str, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Calls a function of the user, or a function that calls one, and converts an exception to a one-line error. The user gets
    a full traceback by running the function directly."""
    try:
        return call(*arguments, **options)
    except InvalidInput as error:
        raise InvalidInput(error.code, f"{what}: {error.what}") from None
    except (Exception, SystemExit) as error:
        raise InvalidInput("E-USER-CODE", f"{what}: {type(error).__name__}: {error}".splitlines()[0]) from None


def loss_part(option: str, text: str, *, above_0: bool = False) -> float:
    """Parses a loss budget, a fraction or a percentage, and returns the fraction. Any other text raises a one-line error.

    >>> loss_part("--max-loss", "0.02"), loss_part("--max-loss", "2%"), loss_part("--max-loss", "0.5 %")
    (0.02, 0.02, 0.005)
    """
    number = text.strip().removesuffix("%")
    try:
        part = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        part = math.nan
    if not (0 <= part <= MOST_LOSS) or (above_0 and not part):
        allowed = f"above 0, up to {MOST_LOSS:g}" if above_0 else f"from 0 to {MOST_LOSS:g}"
        raise InvalidInput("E-CLI-OPTION", f"{option} {text}: allowed is a fraction of the loss {allowed}, such as 0.02, or 2%")
    return part


def whole_numbers(option: str, text: str, such_as: str) -> list[int]:
    """Parses the numbers of an option, with commas between them. `such_as`: an example, for the error."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts):
        raise InvalidInput("E-CLI-OPTION",
                           f"{option} {text!r}: allowed are whole numbers above 0, separated by commas, such as {such_as}")
    return [int(part) for part in parts]
