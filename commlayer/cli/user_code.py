"""Loads a user's function named on the command line, and measures the job of the model that it makes.

Accepted forms are FILE.py, FILE.py:FUNCTION and MODULE:FUNCTION. A file is imported only if its import starts no work; a module
is imported as it is. Torch is loaded only for measuring.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from commlayer.errors import InvalidInput
from commlayer.records import Job


def function_of(text: str, default: str, what: str) -> Callable[..., Any]:
    """The function that `text` names. `default` is its name if `text` is only a file; `what` describes it in errors."""
    where, colon, name = text.rpartition(":")
    if text.endswith(".py"):
        where, name = text, default
    elif not colon or not where or not name:
        raise InvalidInput("E-USER-CODE", f"{text}: allowed are FILE.py, FILE.py:FUNCTION and MODULE:FUNCTION")
    # As Python does for a script and for `python -m`: the command's own sys.path begins elsewhere.
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
"""Calls that a file may make at its top level: modules and functions, and prefixes of dotted names."""


def _check_top_level(path: Path) -> None:
    """InvalidInput if importing the file would do more than define things: planning must not start a training script."""
    try:
        source = path.read_bytes()
        tree = ast.parse(source, str(path))
    except (OSError, SyntaxError, ValueError):
        return  # the import itself reports the error
    working = sorted(_working(tree.body), key=lambda node: node.lineno)
    if working:
        line = source.decode(errors="replace").splitlines()[working[0].lineno - 1].strip()
        more = f" and {len(working) - 1} more statements" if len(working) > 1 else ""
        raise InvalidInput("E-USER-CODE",
                           f"{path}:{working[0].lineno}: importing this file would run `{_shortened(line)}`{more}; put them "
                           "into "
                           f'a function or under `if __name__ == "__main__":`; or name {path.stem}:FUNCTION, from its folder, '
                           "which imports the file as it is")


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
    """Whether the node calls something that is not `QUIET`. The body of a lambda is not called yet."""
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


def made_by(text: str) -> Callable[..., Any]:
    """The function that returns a model and its loss."""
    return function_of(text, "make", "that returns (model, loss)")


def job_of_function(text: str, batch: int | None) -> Job:
    return job_made_by(made_by(text), text, batch)


def job_made_by(make: Callable[..., Any], text: str, batch: int | None) -> Job:
    """Times one step of the model that `make` returns. `text` is the user's name for `make`, for errors."""
    from torch import nn

    from commlayer.autotune.measure.step_times import timed_job

    if batch is not None and batch < 1:
        raise InvalidInput("E-CLI-OPTION", f"batch of {text}: got {batch}, allowed: at least 1")
    result = of_user(text, make)
    try:
        model, loss_of = result
    except (TypeError, ValueError) as error:
        raise InvalidInput("E-USER-CODE", f"{text}: expected (model, function that computes a loss): {error}") from None
    if not isinstance(model, nn.Module) or not callable(loss_of):
        raise InvalidInput("E-USER-CODE",
                           f"{text}: returned {type(model).__name__} and {type(loss_of).__name__}, expected a model and a "
                           "function that computes a loss")
    return of_user(f"{text}: a step", lambda: timed_job(model, loss_of, batch=batch, name=text))


def of_user(what: str, call: Callable[[], T]) -> T:
    """Runs user code. An exception becomes one line; the user sees the full trace by running the model alone."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise InvalidInput("E-USER-CODE", f"{what}: {type(error).__name__}: {error}".splitlines()[0]) from None
