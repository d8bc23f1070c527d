"""The example of uneven workers, run as a user runs it: shares move, sums are kept, and it learns like equal batches."""

from __future__ import annotations

import re
import subprocess
import sys

from support.processes import ROOT, clean_environment


def test_example_prints_changing_shares_and_learns() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run([*launch, "examples/uneven.py", "--epochs", "3"], cwd=ROOT, env=clean_environment(), text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=110)
    assert done.returncode == 0, done.stderr
    row = r"^new shares from step \d+: worker 0 (\d+), worker 1 (\d+), worker 2 (\d+), worker 3 (\d+); ([^(]+) \("
    decided = re.findall(row, done.stdout, re.MULTILINE)
    assert decided
    assert decided[0][4] == "the profile"
    assert len({shares[:4] for shares in decided}) > 1
    assert all(sum(map(int, shares[:4])) == 96 for shares in decided)
    epochs = re.findall(r"epoch +\d+: shares +(\d+) +(\d+) +(\d+) +(\d+),", done.stdout)
    assert len(epochs) == 6
    assert set(epochs[:3]) == {("24",) * 4}
    assert all(sum(map(int, shares)) == 96 for shares in epochs)
    equal, balanced = (float(result) for result in re.findall(r"accuracy ([\d.]+) after", done.stdout))
    assert balanced > 0.85
    assert abs(balanced - equal) < 0.02
    assert re.search(r"^balanced +[\d.]+ s +[\d.]+x +[\d.]+$", done.stdout, re.MULTILINE)
