"""Scripts and commands of the documentation run and print what the pages show.

COMMLAYER_GOLDEN=1 rewrites docs/tutorials/planning.md.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import ROOT, clean_environment
from support.site_job import one_save
from typer.testing import CliRunner

from commlayer.cli.main import app, run

README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.commit(1)
def test_shown_diff_equals_that_of_the_example() -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    example = (ROOT / "examples" / "train.py").read_text("utf-8").splitlines()
    lines = [line[1:] for line in diff.splitlines() if line != " ..."]
    assert [line for line in lines if line not in example] == []
    assert sum(line.startswith("+") for line in diff.splitlines()) <= 5


@pytest.mark.commit(1)
def test_first_script_trains_as_a_single_process_and_reports_it() -> None:
    done = subprocess.run([sys.executable, "examples/train.py"], cwd=ROOT, text=True, timeout=120, capture_output=True,
                          env=clean_environment())
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


@pytest.mark.commit(1)
def test_planning_command_runs_in_a_clone() -> None:
    (line,) = re.findall(r"^commlayer (estimate examples/train.py:make .*)$", README, re.MULTILINE)
    done = subprocess.run([sys.executable, "-m", "commlayer", *line.split()], cwd=ROOT, text=True, timeout=120,
                          capture_output=True, env=clean_environment())
    assert done.returncode == 0, done.stderr
    assert "3 ranks on 3 nodes" in done.stdout
    assert "homes behind NAT" in done.stdout
    assert "summation servers: server" in done.stdout


EVENING = (ROOT / "docs" / "tutorials" / "first-evening.md").read_text("utf-8")


def losses(line: list[str], folder: Path, epochs: int = 2) -> list[float]:
    command = [sys.executable, *line, str(ROOT / "examples" / "homes.py"), f"{epochs}"]
    done = subprocess.run(command, cwd=folder, text=True, timeout=120, env=clean_environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+), ", done.stdout, re.MULTILINE)]


def test_script_trains_under_torchrun_and_resumes_as_a_single_process(tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    fresh = losses([], empty)
    first = losses(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], tmp_path)
    then = losses([], tmp_path, 4)
    assert len(fresh) == len(first) == len(then) == 2, "rank 0 alone prints"
    assert then[0] < 0.8 * fresh[0], "with the weights that the two have left"


def test_first_site_without_a_checkpoint_overwrites_none(tmp_path: Path) -> None:
    """Rank 0's folder is empty; rank 1 has the checkpoint of an earlier run."""
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    losses([], folders[1])
    run = f"os.chdir({str(tmp_path)!r} + '/' + os.environ['RANK']); os.environ['LOCAL_RANK'] = '0'"
    script = tmp_path / "home.py"
    example = str(ROOT / "examples" / "homes.py")
    script.write_text(f"import os, runpy\n{run}\nrunpy.run_path({example!r}, run_name='__main__')\n")
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), "3"]
    done = subprocess.run([sys.executable, *line], text=True, timeout=120, env=clean_environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("continuing from step 80\n") == 2, "two epochs of 40 steps alone"
    assert one_save(folders[0] / "checkpoint") == (2, 120)


def test_page_shows_the_planner_output_for_its_cluster(tmp_path: Path) -> None:
    (line,) = re.findall(r"^\$ commlayer (estimate .*)$", EVENING, re.MULTILINE)
    text = CliRunner().invoke(app, line.split(), env={"COLUMNS": "120"})
    assert text.exit_code == 0, text.output
    assert "summation servers: server assumed" in " ".join(text.output.split())
    row = re.compile(r'^ (sync="auto"|sync="step"|one machine alone) +([\d.]+ .*?) *$', re.MULTILINE)
    rows, shown = dict(row.findall(text.output)), dict(row.findall(EVENING))
    assert {name: row.split() for name, row in rows.items()} == {name: row.split() for name, row in shown.items()} != {}
    assert EVENING[: EVENING.index("```\n\n`--homes` describes")].splitlines()[-1] == text.output.splitlines()[-1]
    assumed = re.findall(r"^  (?:batch|computing|optimizer|memory|network): .*$", EVENING, re.MULTILINE)
    assert len(assumed) == 5
    assert [line for line in assumed if line not in text.output] == []


PLANNING = Path(__file__).parents[2] / "docs" / "tutorials" / "planning.md"
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


def test_worked_example_prints_what_the_page_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PLANNING.read_text("utf-8")
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
        PLANNING.write_text(page, "utf-8")


def test_documentation_site_builds_without_warnings() -> None:
    if not Path(sys.executable).with_name("zensical").exists():
        pytest.skip("zensical is not installed: `make docs` installs it")
    done = subprocess.run([sys.executable, "docs/build_site.py"], cwd=ROOT, text=True, timeout=300, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = re.findall(r'= "([\w/.-]+\.md)"', (ROOT / "build" / "zensical.toml").read_text())
    assert {"README.md", "docs/explanation/faq.md"} <= set(pages)
    assert (ROOT / "build" / "site" / "index.html").exists()


GUIDES = [page for folder in ("how-to", "tutorials") for page in sorted((ROOT / "docs" / folder).glob("*.md"))
          if "```python" in page.read_text() and page.stem != "frameworks"]
"""The block of frameworks.md loads a model from a hub, for a GPU."""


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guide_code_runs(page: Path, tmp_path: Path) -> None:
    world = 4 if page.stem in ("uneven-machines", "sharded-models") else 2
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
         str(ROOT / "tests" / "support" / "scripts" / "code_blocks.py"), str(page)],
        cwd=tmp_path, text=True, timeout=110, capture_output=True, env=clean_environment() | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ran ") == world


HIDDEN = """
import importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "termios"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
from commlayer.cli.main import run
run()
"""


@pytest.mark.commit(1)
@pytest.mark.parametrize(("command", "code", "ends"), [
    ("estimate lstm --homes 2xrtx3060@100/20Mb", 0, ""), ("serve --bind 127.0.0.1:7000 --workers 1", 2, "[E-SYSTEM]")])
def test_without_unix_modules_estimates_work_and_servers_are_refused(command: str, code: int, ends: str) -> None:
    done = subprocess.run([sys.executable, "-c", HIDDEN, *command.split()], text=True, timeout=120, capture_output=True,
                          env=clean_environment(), cwd=ROOT)
    assert (done.returncode, done.stderr.strip()[-len(ends):] if ends else done.stderr) == (code, ends)
