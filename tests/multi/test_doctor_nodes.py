"""`commlayer doctor --nodes`: two commands that compare each other, one of which runs on an odd node."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import clean_environment

from commlayer import plan_file
from commlayer.records import Bucket, Plan, Slice

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0


def reports(tmp_path: Path, odd: str, *codecs: str) -> list[dict[str, Any]]:
    """The JSON reports of two nodes. `odd`: a program that the second node runs first. `codecs`: of the nodes' plan files."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = []
    for number, program in enumerate(("", odd)):
        words = ["doctor", "--master", address, "--nodes", "2", "--json", str(tmp_path / f"{number}.json")]
        if codecs:
            plan = Plan("job", (Bucket(0, (Slice(0, 0, 8),), "service", codecs[number], 0),), 1)
            (tmp_path / f"plan{number}.json").write_text(plan_file.written(plan))
            words += ["--plan", str(tmp_path / f"plan{number}.json")]
        program += "\nimport sys; from commlayer.cli.main import run; sys.argv = ['commlayer', *sys.argv[1:]]; run()"
        processes.append(subprocess.Popen([sys.executable, "-c", program, *words], text=True, cwd=ROOT, stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE, env=clean_environment() | {"COMMLAYER_CONFIG": ""}))
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [errors for _, errors in outputs] == ["", ""]
    return [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]


def lines(report: dict[str, Any]) -> str:
    return "\n".join(f"{one['verdict']} {one['seen']}" for one in report["findings"] if one["check"] == "nodes")


def test_another_plan_another_python_and_a_wrong_clock_are_reported_on_both(tmp_path: Path) -> None:
    odd = ("import platform, time; platform.python_version = lambda: '3.99.4'\n"
           "import commlayer.doctor.nodes as nodes; from types import SimpleNamespace\n"
           "nodes.time = SimpleNamespace(time=lambda: time.time() - 7200.0, monotonic=time.monotonic)")
    both = reports(tmp_path, odd, "fp16()", "bf16()")
    assert lines(both[0]) == lines(both[1])
    for pattern in (r"^fail Python 3.\d+ on node 0 \(\S+\), Python 3.\d+ on node 1",
                    r"^fail plan with hash \w+ on node 0 \(\S+\), plan with hash \w+ on node 1",
                    r"^warn clocks: node \d \(\S+\) 2.0 hours (ahead of|behind) node \d"):
        assert re.search(pattern, lines(both[0]), re.MULTILINE), lines(both[0])
    (pair,) = both[0]["links"]
    assert both[1]["links"] == [pair]
    assert pair["error"] == "", "links are measured all the same"
    assert min(pair["up_bps"], pair["down_bps"]) > 1e6
    # Two nodes on one machine meet at loopback, which several machines could not.
    assert all(any(f["check"] == "address" and f["verdict"] == "fail" for f in report["findings"]) for report in both)


@pytest.mark.nightly
def test_links_to_another_commlayer_are_not_measured(tmp_path: Path) -> None:
    for report in reports(tmp_path, "from commlayer.cluster import messages; messages.version = lambda: '9.9.9'"):
        assert re.search(r"^fail .*commlayer 9.9.9.* on node \d", lines(report))
        assert report["links"] == []
