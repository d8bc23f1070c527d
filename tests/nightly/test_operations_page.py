"""docs/how-to/torchrun.md: the lines for Slurm and Kubernetes start a job."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "torchrun.md").read_text("utf-8")
TORCHRUN = f"{shlex.quote(sys.executable)} -m torch.distributed.run "
WAIT_S = 90.0


def test_a_node_that_slurm_starts_and_one_that_kubernetes_starts_are_one_job(tmp_path: Path) -> None:
    """Each command finds the number of nodes and its own number, so one job tests both."""
    authority = pytest.importorskip("commlayer.cluster.authority", reason="cryptography is not installed")
    authority.init(tmp_path / "keys")
    keys = str(authority.add(tmp_path / "keys", "cluster"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    (slurm,) = re.findall(r"^srun bash -c '(torchrun .*)'$", PAGE, re.MULTILINE)
    (kubernetes,) = re.findall(r'command: \["sh", "-c", "exec (torchrun .*)"\]$', PAGE, re.MULTILINE)
    kubernetes = kubernetes.replace("--nnodes 4", "--nnodes 2").replace("train-0.train", "127.0.0.1").replace("29500", port)
    own = {"SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": port}, {"JOB_COMPLETION_INDEX": "1"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COMMLAYER_")}
    children = []
    for shell, line, mine in zip(("bash", "sh"), (slurm, kubernetes), own, strict=True):
        line = line.replace("torchrun ", TORCHRUN, 1).replace("--nproc-per-node 8", "--nproc-per-node 1")
        children.append(subprocess.Popen(
            [shell, "-c", line.replace("train.py", "examples/train.py")], cwd=ROOT, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=clean | mine | {"COMMLAYER_KEYS": keys, "COMMLAYER_CONFIG": "", "OMP_NUM_THREADS": "1"}))
    try:
        lines = [child.communicate(timeout=WAIT_S) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], lines
    assert "step 200: loss" in lines[0][0]
    assert "step" not in lines[1][0], "rank 0 alone prints"
