"""A rank logs that it waits for others, also between two steps and inside session.join(). Real ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.attached import data, mlp
from support.rank_pool import pool, quick, ranks_first

import commlayer

WORLD, LIMIT_S = 2, 60.0
_ranks = ranks_first(WORLD)


def until(present: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not present():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def waited(rank: int, where: str, folder: str) -> list[str]:
    """What rank 0 logs of waits. Rank 1 comes when rank 0 has logged one."""
    lines: list[str] = []
    seen = Path(folder) / "seen"

    def emit(record: logging.LogRecord) -> None:
        if "waiting for" in record.getMessage():
            lines.append(record.getMessage())
            seen.touch()

    handler = logging.Handler(logging.WARNING)
    handler.emit = emit  # type: ignore[method-assign]
    log = logging.getLogger("commlayer")
    log.addHandler(handler)
    try:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = quick(ranks_per_node=1, deadline_s=LIMIT_S)
        with commlayer.attach(model, optimizer, compression="identity()", config=config) as session:
            model(data(rank, 0)[0]).sum().backward()
            if where == "join":
                with session.join():
                    if rank == 1:
                        until(seen.exists)
            else:
                if rank == 1:
                    until(seen.exists)
                session.checkpoint(folder, model=False)
            if rank == 0:
                until(lambda: len(lines) > 1)
    finally:
        log.removeHandler(handler)
    return lines


@pytest.mark.commit(1)
@pytest.mark.parametrize("where", ["save", "join"])
def test_a_wait_between_two_steps_is_logged(where: str, tmp_path: Path) -> None:
    waits, _ = pool(WORLD).call(waited, where, str(tmp_path))
    assert waits[0].startswith("waiting for other ranks: ")
    assert waits[-1].startswith("continues after ")
