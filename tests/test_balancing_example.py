"""The example of uneven workers, run as a user runs it: shares move, sums are kept, and it learns."""

from __future__ import annotations

import re
import subprocess
import sys

from pool_kit import ROOT, clean_environment


def test_the_example_prints_shares_moving_and_learns() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run([*launch, "examples/uneven.py", "--epochs", "3"], cwd=ROOT, env=clean_environment(), text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=110)
    assert done.returncode == 0, done.stderr
    moved = [[int(share) for share in re.findall(r"worker \d (\d+)", line)]
             for line in done.stdout.splitlines() if "new shares from step" in line]
    assert moved
    assert all(sum(shares) == 96 for shares in moved)
    epochs = re.findall(r"epoch +\d+: shares +(\d+) +(\d+) +(\d+) +(\d+),", done.stdout)
    assert len(epochs) == 3
    assert all(sum(map(int, shares)) == 96 for shares in epochs)
    accuracy = re.search(r"accuracy ([\d.]+)", done.stdout)
    assert accuracy
    assert float(accuracy[1]) > 0.85
