"""Lines of `commlayer` and `python -m bench` in README.md and docs/: each is one that the commands take. Nothing is run."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed.run
import typer

from bench.__main__ import MEASUREMENTS, parser_of
from commlayer.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
COMMAND = re.compile(r"(?:^|(?<=[\s'\"=]))(commlayer|python -m bench)(?=\s|$)((?:\.\w+)?)(.*)", re.DOTALL)
MODULE = re.compile(r"python -m (bench\.\w+)")
ENDS = re.compile(r"\s#.*|\s*(?:[|;&>]|,\s).*|'(?=\s|$).*", re.DOTALL)
"""Of a command in a line of a shell, or of what another one says."""
FOREIGN = {"--fmad"}
"""Options of other programs that pages name by themselves, beside torchrun's."""


class Line(NamedTuple):
    """`whole`: as a user types it; otherwise a part that a sentence names, such as `commlayer serve --keys`."""

    page: str
    program: str
    words: tuple[str, ...]
    whole: bool


def lines_of(page: str, text: str) -> Iterator[Line]:
    for block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield from _lines(page, line.strip().removeprefix("$ "), whole=True)
    for code in INLINE.findall(FENCED.sub("", text)):
        yield from _lines(page, " ".join(code.split()), whole=False)


def _lines(page: str, text: str, *, whole: bool) -> Iterator[Line]:
    """All commands in order; those that commands print, too."""
    while result := COMMAND.search(text):
        program, _, text = result.groups()
        words = tuple(shlex.split(re.sub(r"\$\{?\w+\}?", "4", ENDS.sub("", text))))
        if words and re.fullmatch(r"[a-z]+", words[0]) and words[0] != "import":  # which is Python
            yield Line(page, program, words, whole)


ALL = [line for page in PAGES for line in lines_of(page.name, page.read_text("utf-8"))]


def problem_of(line: Line) -> str:
    """Why the program would not take it; empty where it does."""
    return _of_bench(line) if line.program != "commlayer" else _of_commlayer(line)


def _of_commlayer(line: Line) -> str:
    command: Any = typer.main.get_command(app)
    name, *words = "commlayer", *line.words
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        name, *words = words
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    if line.whole:
        try:
            command.make_context(name, [*words])
        except Exception as error:  # click's own, of which typer may bring its own copy
            return getattr(error, "message", "") or str(error)
        return ""
    # What follows the script's name is the script's.
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return _unknown(words, known)


def _of_bench(line: Line) -> str:
    name, *words = line.words
    if name not in MEASUREMENTS:
        return f"no measurement {name}"
    parser = parser_of(name)
    if line.whole:
        try:
            parser.exit_on_error = False
            _, more = parser.parse_known_args(line.words)
        except argparse.ArgumentError as error:
            return str(error)
        return f"no option {more[0]}" if more else ""
    return _unknown(words, {*parser._option_string_actions})


def _unknown(words: list[str], known: set[str]) -> str:
    return next((f"no option {word}" for word in words if word.startswith("--") and word.partition("=")[0] not in known), "")


@pytest.mark.parametrize("line", ALL, ids=lambda line: f"{line.page}: {' '.join(line.words)[:60]}")
def test_a_line_of_a_page_is_one_that_the_command_takes(line: Line) -> None:
    assert problem_of(line) == "", line


def test_no_kind_of_line_is_overlooked() -> None:
    full = {(line.page, line.program, line.words[0]) for line in ALL if line.whole}
    for page, commands in (("README.md", ("serve", "join")), ("keys.md", ("keys",)),
                           ("first-evening.md", ("serve", "join", "keys", "doctor"))):
        assert {(page, "commlayer", command) for command in commands} <= full
    assert {("benchmarks.md", "python -m bench", "tta"), ("benchmarks.md", "python -m bench", "chaos")} <= full
    # One torchrun starts, and one is a word of another shell's.
    pages = "\n".join(page.read_text("utf-8") for page in PAGES)
    words = [line.words for line in lines_of("", pages) if line.whole]
    assert words.count(("doctor",)) == 2


@pytest.mark.parametrize(("text", "problem"), [
    ("```\n$ commlayer serve --bnd 127.0.0.1:7000      # here\n```", "No such option: --bnd"),
    ("```\ncommlayer doctor --port many\n```", "valid integer"),
    ("```\nsrun bash -c 'commlayer doctor --jon $A:1 --port 4' || exit 2\n```", "No such option: --jon"),
    ("```\ntorchrun --nnodes 4 \\\n   -m commlayer doctor --node 4\n```", "No such option"),
    ("```\nsays: commlayer lanch --join h:1 SCRIPT\n```", "no command lanch"),
    ("```\ncommlayer keys add\n```", "Missing"),
    ("so `commlayer serve --key` is", "no option --key"),
    ("so `commlayer keys make` is", "no command make"),
    ("```\npython -m bench tta --tasks digits\n```", "no option --tasks"),
    ("```\npython -m bench tta --task letters\n```", "invalid choice"),
    ("so `python -m bench chaos --fuz N` is", "no option --fuz"),
    ("so `python -m bench chaoss` is", "no measurement chaoss"),
])
def test_a_line_that_is_not_taken_is_told(text: str, problem: str) -> None:
    (line,) = lines_of("", text)
    assert problem in problem_of(line)


# ---- options that sentences name by themselves


@functools.cache
def options() -> set[str]:
    """Of all commands, all measurements and torchrun."""
    results, commands = set(FOREIGN), [typer.main.get_command(app)]
    while commands:
        command: Any = commands.pop()
        commands += getattr(command, "commands", {}).values()
        results |= {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for parser in (*map(parser_of, MEASUREMENTS), torch.distributed.run.get_args_parser()):
        results |= {*parser._option_string_actions}
    return results


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_an_option_that_a_sentence_names_is_one_of_somebody(page: Path) -> None:
    text = FENCED.sub("", page.read_text("utf-8"))
    named = {word.partition("=")[0] for code in INLINE.findall(text) if code.startswith("--") for word in code.split()[:1]}
    assert sorted(named - options()) == []


def test_modules_of_the_bench_that_pages_start_are_there() -> None:
    for page in PAGES:
        for module in MODULE.findall(page.read_text("utf-8")):
            assert importlib.util.find_spec(module), f"{page.name}: python -m {module}"
