"""Reads settings from arguments, environment variables and a TOML file."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from commlayer.errors import RecordError

PREFIX = "COMMLAYER_"
Types = Mapping[str, Any]
"""Types of all settings by name; their description is what is allowed."""
REMOVED = {"quarantine": "leave it out: servers no longer judge contributions by their size"}
"""Settings of earlier versions and their replacements."""


class Setting(NamedTuple):
    value: Any
    source: str
    text: bool
    """Whether the value arrived as text (from the environment) and is converted. Other values must have the right type."""


def from_argument(argument: Mapping[str, Any], types: Types) -> dict[str, Setting]:
    return {_known(name, f"argument {name}", types): Setting(value, f"argument {name}", False)
            for name, value in argument.items()}


def from_environment(environ: Mapping[str, str], types: Types) -> dict[str, Setting]:
    # Kubernetes sets variables of this form for a service named commlayer.
    linked = {n for n, v in environ.items() if PREFIX + "SERVICE_HOST" in environ
              and (n.startswith((PREFIX + "SERVICE_", PREFIX + "PORT_")) or (n == PREFIX + "PORT" and "://" in v))}
    names = [n for n in sorted(environ) if n.startswith(PREFIX) and n != PREFIX + "CONFIG" and n not in linked]
    return {_known(n.removeprefix(PREFIX).lower(), f"environment variable {n}", types):
            Setting(environ[n], f"environment variable {n}", True) for n in names}


def from_file(environ: Mapping[str, str], cwd: Path, types: Types) -> dict[str, Setting]:
    named = environ.get(PREFIX + "CONFIG")
    path = cwd / (named or "commlayer.toml")
    if named == "" or (named is None and not path.is_file()):
        return {}
    try:
        fields = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RecordError("E-SETTING", f"{PREFIX}CONFIG: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecordError("E-SETTING", f"{path} is not TOML: {error}") from None
    return {_known(name, f"{path}:{name}", types): Setting(value, f"{path}:{name}", False) for name, value in fields.items()}


def _known(name: str, source: str, types: Types) -> str:
    if name in REMOVED:
        raise RecordError("E-SETTING", f"{name}: this setting was removed ({source}); {REMOVED[name]}")
    if name not in types:
        near = difflib.get_close_matches(name, types, n=1, cutoff=0.5)
        meant = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(types)}"
        raise RecordError("E-SETTING", f"{name}: no such setting ({source}); {meant}")
    return name


def checked(name: str, setting: Setting, types: Types) -> Any:
    try:
        return msgspec.convert(setting.value, types[name], strict=not setting.text)
    except msgspec.ValidationError:
        allowed = next(m.description for m in types[name].__metadata__)
        shown = "a text that is none" if name == "token" else repr(setting.value)
        raise RecordError("E-SETTING", f"{name}: got {shown} from {setting.source}, allowed: {allowed}") from None
