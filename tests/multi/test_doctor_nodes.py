"""`commlayer doctor` under a launcher: two commands that compare each other, one of which runs on an odd node."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.processes import clean_environment

from commlayer import plan_file
from commlayer.records import Bucket, Plan, Slice

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0


def test_another_plan_and_another_version_are_reported_on_both(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    odd = "from commlayer.cluster import messages; messages.version = lambda: '9.9.9'"
    processes = []
    for number, (program, codec) in enumerate((("", "fp16()"), (odd, "bf16()"))):
        plan = Plan("job", (Bucket(0, (Slice(0, 0, 8),), "service", codec, 0),), 1)
        (tmp_path / f"plan{number}.json").write_text(plan_file.written(plan))
        program += "\nimport sys; from commlayer.cli.main import run; sys.argv = ['commlayer', *sys.argv[1:]]; run()"
        env = {"COMMLAYER_CONFIG": "", "RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        processes.append(subprocess.Popen(
            [sys.executable, "-c", program, "doctor", "--plan", str(tmp_path / f"plan{number}.json"), "--json",
             str(tmp_path / f"{number}.json")], text=True, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=clean_environment() | env))
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [errors for _, errors in outputs] == ["", ""]
    first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert lines(first) == lines(second)
    for pattern in (r"^fail commlayer .* on node 0 \(\S+\), commlayer 9.9.9 .* on node 1",
                    r"^fail plan with hash \w+ on node 0 \(\S+\), plan with hash \w+ on node 1"):
        assert re.search(pattern, lines(first), re.MULTILINE), lines(first)
    assert first["links"] == second["links"]
    assert min(first["links"][0][1], first["links"][1][0]) > 1e6
    # Two nodes on one machine meet at loopback, which several machines could not.
    assert all(any(f["check"] == "address" and f["verdict"] == "fail" for f in one["findings"]) for one in (first, second))


def lines(report: dict[str, Any]) -> str:
    return "\n".join(f"{one['verdict']} {one['seen']}" for one in report["findings"] if one["check"] == "nodes")
