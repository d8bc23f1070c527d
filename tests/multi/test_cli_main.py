"""The command as a whole: its version, `python -m`, what shells complete, and what only some commands need."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = importlib.metadata.version("commlayer")
LOOK = ("import sys; from commlayer.cli import main; sys.argv = ['commlayer', *{}]\n"
        "try: main.run()\nexcept SystemExit as end: code = end.code\n"
        "print(code, sorted({{'numpy', 'torch', 'grpc'}} & set(sys.modules)))")


def call(*command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, env=os.environ | settings)


def test_it_tells_its_version_and_loads_nothing_for_it() -> None:
    assert call("-c", LOOK.format(["--version"])).stdout.splitlines() == [f"commlayer {VERSION}", "0 []"]


def test_the_package_has_its_version() -> None:
    assert call("-c", "import commlayer; print(commlayer.__version__)").stdout == f"{VERSION}\n"


def test_python_m_is_the_command() -> None:
    assert call("-m", "commlayer", "--version").stdout == f"commlayer {VERSION}\n"
    wrong = call("-m", "commlayer", "tune", "nothing")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert re.fullmatch(r"commlayer: nothing: .*\[E-CLI-OPTION\]\n", wrong.stderr)


@pytest.mark.parametrize(("typed", "offered"), [("commlayer pl", {"plan"}), ("commlayer plan ", {"create", "explain", "diff"})])
def test_shells_complete_commands(typed: str, offered: set[str]) -> None:
    words = typed.split(" ")
    done = call("-m", "commlayer", _COMMLAYER_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(words) - 1))
    assert offered <= set(done.stdout.split()), done.stderr
    assert "serve" not in done.stdout


def test_completion_can_be_shown() -> None:
    shown = call("-m", "commlayer", "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete -o default -F _commlayer_completion commlayer" in shown.stdout, shown.stderr


WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without:
    @staticmethod
    def find_spec(name, *rest):
        return None if name.split(".")[0] == "skopt" else PathFinder.find_spec(name, *rest)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
import commlayer.session, commlayer.cluster.summation_server
from commlayer.cli import main
sys.argv = ["commlayer", "tune", "digits"]
main.run()
"""


def test_workers_need_no_scikit_optimize_and_tune_says_that_it_does(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "scikit-optimize" in done.stderr
    assert done.stderr.endswith("[E-PACKAGE]\n")
    assert done.returncode == 2
    assert not list(tmp_path.iterdir())
