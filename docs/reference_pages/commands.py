"""The page about commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from commlayer.cli.main import app
from reference_pages.markdown import MADE, one_line, table_row, wrap


def cli() -> str:
    lines = [
        "# Commands", "", MADE, "",
        *wrap("Every command of `commlayer` with its arguments and options. A mistake in one of them, or in a file, is "
               "one line and exit code 2. `commlayer COMMAND --help` prints the same "
               "texts. `commlayer --install-completion` adds completion to the shell."),
    ]
    return "\n".join([*lines, *_command("commlayer", typer.main.get_command(app)), ""])


def _command(name: str, command: Any) -> Iterator[str]:
    parameters = [parameter for parameter in command.params if "--help" not in parameter.opts and not parameter.hidden]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    if hasattr(command, "commands"):
        if name != "commlayer":
            yield from ("", f"## {name}", "", *wrap(one_line(command.help)))
        for each in (each for each in command.commands.values() if not each.hidden):
            yield from _command(f"{name} {each.name}", each)
        return
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *map(_place, arguments)])
    yield from ("", f"{'##' if name.count(' ') == 1 else '###'} {name}", "", f"`{usage}`", "", *wrap(one_line(command.help)))
    if arguments or options:
        yield from ("", "| argument or option | value | default | meaning |", "| --- | --- | --- | --- |")
    for each in arguments:
        yield table_row(f"`{_place(each)}`", "", _default(each), one_line(each.help))
    for each in options:
        value, default = ("", "") if each.is_flag else (f"`{_value(each)}`", _default(each))
        yield table_row(f"`{each.opts[0]}`", value, default, one_line(each.help))


def _place(argument: Any) -> str:
    name = argument.metavar.strip("{}[]") if argument.metavar else argument.name.upper()
    name += "..." if argument.nargs == -1 else ""
    return name if argument.required else f"[{name}]"


def _value(option: Any) -> str:
    """The option's metavar, or one for the type of its default."""
    kinds = ((int, "N"), (float, "X"), (Path, "PATH"))
    return option.metavar or next((name for kind, name in kinds if isinstance(option.default, kind)), "TEXT")


def _default(parameter: Any) -> str:
    value = parameter.default
    return "" if value is None or value == "" or callable(value) or isinstance(value, bool) else f"`{value}`"
