"""docs/tutorials/planning.md: its commands print what the page shows. COMMLAYER_GOLDEN=1 rewrites the page."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from commlayer.cli.main import run

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "planning.md"
CUT = "\n...\n"
"""In an output: the page leaves out the rest."""


def said(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", shlex.split(command))
    code: str | int | None = 0
    try:
        run()
    except SystemExit as end:
        code = end.code
    output = capsys.readouterr()
    assert code in (0, 1), output.err  # 1: plans that differ
    return "".join(f"{line.rstrip()}\n" for line in output.out.splitlines()).strip("\n") + "\n"


def test_the_worked_decision_prints_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text("utf-8")
    begin, end = page.index("## A worked example"), page.index("## Your own model")
    worked = page[begin:end]
    toml = re.search(r"```toml\n(.*?)```", worked, re.DOTALL)
    assert toml is not None
    Path("cluster.toml").write_text(toml[1], "utf-8")
    commands = re.findall(r"^\$ (commlayer .*)\n((?:(?!\$ |```).*\n)*)", worked, re.MULTILINE)
    assert [command.split()[2] for command, _ in commands] == ["create", "explain", "whatif", "create", "diff"]
    for command, printed in commands:
        result = said(command, monkeypatch, capsys)
        shown = result
        if printed.endswith(CUT):
            shown = "".join(result.splitlines(keepends=True)[: printed.removesuffix(CUT).count("\n") + 1]) + CUT.lstrip("\n")
        if os.environ.get("COMMLAYER_GOLDEN"):
            page = page.replace(f"$ {command}\n{printed}", f"$ {command}\n{shown}")
        else:
            assert shown == printed, command
    if os.environ.get("COMMLAYER_GOLDEN"):
        PAGE.write_text(page, "utf-8")
