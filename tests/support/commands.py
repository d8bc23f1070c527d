"""Calls the command in this process, as users call it."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlayer.cli.main import run


@pytest.fixture(name="commlayer")
def commlayer_called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> object:
    """Calls the command in an empty folder: (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["commlayer", *arguments])
        code = 0
        try:
            run()
        except SystemExit as end:
            code = int(end.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def assert_error(result: tuple[int, str, str], code: str, text: str = "") -> None:
    """The command has exit code 2, no output, and one line of error with that code and text."""
    exit_code, output, errors = result
    assert (exit_code, output) == (2, "")
    assert errors.startswith("commlayer: ")
    assert text in errors
    assert errors.endswith(f"[{code}]\n")
    assert errors.count("\n") == 1
