"""torchrun restarts all ranks after one was killed, and they resume from the checkpoint. Run as a script: the training."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT, rank_pool
from support.attached import mlp, train_step
from support.rank_pool import pool

import commlayer

PAGE = (ROOT / "docs" / "how-to" / "torchrun.md").read_text("utf-8")
WORLD, SAVED, KILLED, STEPS = 2, 4, 6, 9
LIMIT_S = 110.0


def train(rank: int, folder: str, *, killed: int = -1) -> dict[str, Any]:
    """Trains to the end, from the checkpoint in `folder` if it exists. `killed`: a rank to kill, once."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with commlayer.attach(model, optimizer, compression="topk(ratio=0.1)", config=rank_pool.quick(ranks_per_node=1)) as session:
        session.resume(folder)
        first = session.step
        for step in range(first, STEPS):
            if step == SAVED and first == 0:
                session.checkpoint(folder)
            if step == KILLED and rank == killed and first == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            train_step(model, optimizer, rank, step)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return {"rank": rank, "first": first, "digest": digest}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Each rank's weights after a run of all steps."""
    return [each["digest"] for each in pool(WORLD).call(train, str(tmp_path_factory.mktemp("whole")))]


def environment() -> dict[str, str]:
    return rank_pool.clean_environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


def check(agents: list[tuple[str, str]], undisturbed: list[str]) -> None:
    lines = [json.loads(line) for out, _ in agents for line in out.splitlines() if line.startswith("{")]
    lines.sort(key=lambda each: int(each["rank"]))
    assert [each["first"] for each in lines] == [SAVED] * WORLD, agents
    assert [each["digest"] for each in lines] == undisturbed


def test_restart_after_a_kill_reaches_the_same_weights(tmp_path: Path, undisturbed: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD),
               "--max-restarts", "1", str(Path(__file__)), str(tmp_path), "1"]
    # See docs/how-to/torchrun.md: otherwise the second attempt of torch 2.13 uses the store of the first.
    report = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, env=environment() | report, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    check([(done.stdout, done.stderr)], undisturbed)


@pytest.mark.parametrize("killed", [1, 0])
def test_documented_command_on_two_machines_survives_any_kill(killed: int, tmp_path: Path, undisturbed: list[str]) -> None:
    """Rank 0 hosts the job's coordinator and its server."""
    (line,) = re.findall(r"^(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun .*)\\\n *(.*) train.py$", PAGE, re.MULTILINE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    words = re.sub(r"--rdzv-endpoint \S+", f"--rdzv-endpoint {where}", " ".join(line)).split()
    lines = dict([words[0].split("=")])
    command = [sys.executable, "-m", "torch.distributed.run", *words[2:], "--local-addr", "127.0.0.1", str(Path(__file__)),
               str(tmp_path), str(killed)]
    agents = [subprocess.Popen(command, env=environment() | lines, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
              for _ in range(2)]
    try:
        messages = [agent.communicate(timeout=LIMIT_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], messages
    check(messages, undisturbed)
    assert sum("(exitcode: -9)" in errors for _, errors in messages) == 1, messages


def test_restart_with_another_number_of_workers_continues(tmp_path: Path) -> None:
    pool(3).call(train, str(tmp_path))
    for world in (2, 1):
        results = pool(world).call(train, str(tmp_path))
        assert [each["first"] for each in results] == [SAVED] * world
        assert len({each["digest"] for each in results}) == 1


def save_or_resume(rank: int, folder: str, per_node: int) -> dict[str, Any]:
    """With an automatic plan: with a server if the ranks are on machines of their own."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlayer.attach(model, optimizer, config=rank_pool.quick(ranks_per_node=per_node)) as session:
        session.resume(folder)
        first = session.step
        train_step(model, optimizer, rank, first)
        session.checkpoint(folder)
    return {"first": first, "weights": sum(parameter.sum().item() for parameter in model.parameters())}


def test_as_many_ranks_on_another_number_of_machines_continue(tmp_path: Path) -> None:
    for first, per_node in enumerate((1, 2, 1)):
        results = pool(WORLD).call(save_or_resume, str(tmp_path), per_node)
        assert [each["first"] for each in results] == [first] * WORLD
        assert len({each["weights"] for each in results}) == 1


if __name__ == "__main__":
    print(json.dumps(train(int(os.environ["RANK"]), sys.argv[1], killed=int(sys.argv[2]))), flush=True)
