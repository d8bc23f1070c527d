"""A user's function named on the command line: FILE.py, FILE.py:FUNCTION or MODULE:FUNCTION. Knows no command."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def function_of(text: str, default: str, what: str) -> Callable[..., Any]:
    """The function; `default` is its name in a file named alone, `what` says in errors what it has to be."""
    where, colon, name = text.rpartition(":")
    if text.endswith(".py"):
        where, name = text, default
    elif not colon or not where or not name:
        raise ValueError(f"{text}: allowed are FILE.py, FILE.py:FUNCTION and MODULE:FUNCTION")
    # What Python does for a script and for `python -m`: the command itself begins elsewhere.
    beside = Path(where).parent.resolve() if where.endswith(".py") else Path.cwd()
    if str(beside) not in sys.path:
        sys.path.insert(0, str(beside))
    try:
        module = _file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError:
        raise ValueError(f"{where}: no such file") from None
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and not where.endswith(".py")
        said = str(error) if absent else f"{type(error).__name__}: {error}"
        raise ValueError(f"{text}: {said}".splitlines()[0]) from None
    found: Any = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{text}: has no function {name} {what}")
    made: Callable[..., Any] = found
    return made


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("commlayer_user", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
