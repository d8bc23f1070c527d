"""Documentation: paths, links, commands, options and generated pages."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed.run
import typer
from multi import test_features
from support import ROOT, features, matrix

from bench.__main__ import MEASUREMENTS, parser_of
from commlayer.cli.main import app
from commlayer.compressors import parse
from commlayer.compressors.plan_codecs import FACTORIES
from commlayer.config import settings

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
KEPT = ("commlayer", "native", "cuda", "bench", "tests", "examples", "docs")
THERE = [f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for top in KEPT for path in [ROOT / top, *(ROOT / top).rglob("*")]]
"""Prose may shorten paths, such as `paths/late.py`: any path may end like this."""
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")
PATH = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|md|cc|h|cu|cuh|toml))`|`([\w./-]+/)`")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_paths_and_options_of_pages_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    assert not re.search(r"^(<<<<<<<|>>>>>>>) ", text, re.MULTILINE), "conflict markers"
    for target, anchor in LINK.findall(text):
        file = page.parent / target if target else page
        assert file.exists(), f"link to {target}"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"link to {target}{anchor}"
    names = [file or folder for file, folder in PATH.findall(text)]
    assert [name for name in names if not any(path.endswith(f"/{name}") for path in THERE)] == []
    prose = INLINE.findall(FENCED.sub("", text))
    named = {word.partition("=")[0] for code in prose if code.startswith("--") for word in code.split()[:1]}
    assert sorted(named - options()) == []
    assert [module for module in MODULE.findall(text) if not importlib.util.find_spec(module)] == []


def test_pages_contain_commands_to_check() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert len(LINK.findall(text)) > 50
    assert len(PATH.findall(text)) > 20


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name in ("tutorials", "how-to", "explanation")],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_for_users_name_no_internals(page: Path) -> None:
    text = page.read_text()
    assert "decisions/" not in text
    assert [file for file, _ in PATH.findall(text) if file.endswith(".py") and not file.startswith("examples/")] == []
    assert not re.search(r"\b(decision|ADR) 0\d\d", text)


FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
COMMAND = re.compile(r"(?:^|(?<=[\s'\"=]))(commlayer|python -m bench)(?=\s|$)((?:\.\w+)?)(.*)", re.DOTALL)
MODULE = re.compile(r"python -m (bench\.\w+)")
ENDS = re.compile(r"\s#.*|\s*(?:[|;&>]|,\s).*|'(?=\s|$).*", re.DOTALL)
"""A command in a shell line, or in another command's output."""
FOREIGN = {"--fmad"}
"""Options of other programs that pages name alone, besides torchrun's."""


class Line(NamedTuple):
    """`complete`: as a user types it; otherwise a part that a sentence names, such as `commlayer serve --keys`."""

    page: str
    program: str
    words: tuple[str, ...]
    complete: bool


def lines_of(page: str, text: str) -> Iterator[Line]:
    for block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield from _lines(page, line.strip().removeprefix("$ "), complete=True)
    for code in INLINE.findall(FENCED.sub("", text)):
        yield from _lines(page, " ".join(code.split()), complete=False)


def _lines(page: str, text: str, *, complete: bool) -> Iterator[Line]:
    """All commands in order; those that commands print, too."""
    while result := COMMAND.search(text):
        program, _, text = result.groups()
        words = tuple(shlex.split(re.sub(r"\$\{?\w+\}?", "4", ENDS.sub("", text))))
        if words and re.fullmatch(r"[a-z]+", words[0]) and words[0] != "import":  # which is Python
            yield Line(page, program, words, complete)


ALL = [line for page in PAGES for line in lines_of(page.name, page.read_text("utf-8"))]


def problem_of(line: Line) -> str:
    """Why the program would reject it; empty if accepted."""
    return _of_bench(line) if line.program != "commlayer" else _of_commlayer(line)


@functools.cache
def commlayer() -> Any:
    return typer.main.get_command(app)


def _of_commlayer(line: Line) -> str:
    command = commlayer()
    name, *words = "commlayer", *line.words
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        name, *words = words
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    if line.complete:
        try:
            command.make_context(name, [*words])
        except Exception as error:  # click's own, of which typer may bring its own copy
            return getattr(error, "message", "") or str(error)
        return ""
    # What follows the script's name is the script's.
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return _unknown(words, known)


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {*re.findall(r"(?<![\w-])--?[a-z][\w-]*", parser.format_usage())} | {"-h", "--help"}


def _of_bench(line: Line) -> str:
    name, *words = line.words
    if name not in MEASUREMENTS:
        return f"no measurement {name}"
    parser = parser_of(name)
    if line.complete:
        try:
            parser.exit_on_error = False
            _, more = parser.parse_known_args(line.words)
        except argparse.ArgumentError as error:
            return str(error)
        return f"no option {more[0]}" if more else ""
    return _unknown(words, options_of(parser))


def _unknown(words: list[str], known: set[str]) -> str:
    return next((f"no option {word}" for word in words if word.startswith("--") and word.partition("=")[0] not in known), "")


@pytest.mark.parametrize("page", sorted({line.page for line in ALL}))
def test_command_lines_of_pages_are_accepted(page: str) -> None:
    assert [(problem, line) for line in ALL if line.page == page and (problem := problem_of(line))] == []


def test_every_kind_of_command_line_is_extracted() -> None:
    full = {(line.page, line.program, line.words[0]) for line in ALL if line.complete}
    for page, commands in (("README.md", ("serve", "join")), ("keys.md", ("keys",)),
                           ("first-evening.md", ("estimate", "serve", "join"))):
        assert {(page, "commlayer", command) for command in commands} <= full
    assert {("benchmarks.md", "python -m bench", "tta"), ("benchmarks.md", "python -m bench", "chaos")} <= full
    # One torchrun starts, and one is a word of another shell's.
    pages = "\n".join(page.read_text("utf-8") for page in PAGES)
    words = [line.words for line in lines_of("", pages) if line.complete]
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
def test_rejected_command_line_is_reported(text: str, problem: str) -> None:
    (line,) = lines_of("", text)
    assert problem in problem_of(line)


@functools.cache
def options() -> set[str]:
    """Of all commands, all measurements and torchrun."""
    results, commands = set(FOREIGN), [commlayer()]
    while commands:
        command: Any = commands.pop()
        commands += getattr(command, "commands", {}).values()
        results |= {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for parser in (*map(parser_of, MEASUREMENTS), torch.distributed.run.get_args_parser()):
        results |= options_of(parser)
    return results


FOLDER = ROOT / "docs"
sys.path.append(str(FOLDER))
generate, codec_table, markdown = map(importlib.import_module, ("generate", "codec_table", "reference_pages.markdown"))
error_codes = importlib.import_module("reference_pages.errors").CODES


@pytest.mark.parametrize("name", generate.PAGES)
def test_generated_pages_are_current(name: str) -> None:
    assert (FOLDER / "reference" / name).read_text() == generate.PAGES[name](), "run `make docs`"


def test_tests_named_in_the_support_page_exist() -> None:
    for test in sorted({test for rows in matrix.TABLES.values() for row in rows for test in row.tests}):
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), test


def test_each_feature_in_each_kind_of_job_is_a_case_of_a_test() -> None:
    (table,) = (mark for mark in vars(test_features.test_feature_in_kind_of_job)["pytestmark"] if mark.name == "parametrize")
    assert sorted(case.values for case in table.args[1]) == sorted(itertools.product(matrix.FEATURES, matrix.KINDS))
    assert features.FEATURES.keys() == matrix.FEATURES.keys()
    assert {case.values for case in table.args[1]} >= matrix.REFUSED.keys()
    assert {refusal.code for refusal in matrix.REFUSED.values()} <= error_codes.keys()


def test_supported_features_name_their_tests() -> None:
    rows = [row for rows in matrix.TABLES.values() for row in rows]
    assert {row.verdict for row in rows} == {matrix.YES, matrix.LIMITS, matrix.NO, matrix.NEVER}
    assert [row.subject for row in rows if row.verdict in (matrix.YES, matrix.LIMITS) and not row.tests] == [
        "Linux, x86-64", "Python 3.12, 3.13"]


def test_undocumented_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "class Config:\n    join: str = ''\n    bind: str = ''\n"
    monkeypatch.setattr(markdown.inspect, "getsource", lambda _: source)
    with pytest.raises(ValueError, match=r"\bjoin\b"):
        markdown.texts_of(settings, "Config")


def test_every_codec_has_an_entry_with_a_valid_spelling() -> None:
    assert set(codec_table.CATALOGUE) == set(FACTORIES)
    for name, entry in codec_table.CATALOGUE.items():
        assert entry.example.startswith(f"{name}(")
        assert parse(entry.example)
        assert "|" not in "".join(entry)


def test_codec_page_is_up_to_date() -> None:
    page = (FOLDER / "reference" / "codecs.md").read_text()
    assert codec_table.renewed(page) == page, "run `make docs`"
