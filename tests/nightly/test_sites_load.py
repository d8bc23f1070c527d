"""Homes that are killed while a save is loaded: who is left stops with the same line. Run as a script: that training."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.elastic_sites import KILLED, SIZES, Given, slopes, whole
from support.sites import Homes, ended

WORLD, SAVED = 3, 4
STOPPED = 3


def dies(owner: Any, name: str, number: int) -> None:
    """This process, behind the call of that number."""
    real, left = getattr(owner, name), [number]

    def counted(*args: Any, **named: Any) -> Any:
        found = real(*args, **named)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, counted)


def main(victim: int, name: str, number: int, directory: str) -> None:
    """Trains, saves and goes back to that, in which one home dies."""
    import commlayer
    from commlayer.cluster.collectives import Groups
    from commlayer.cluster.uplink import Uplink
    from commlayer.engine import checkpoint
    from commlayer.errors import CommError

    home, model = int(os.environ["RANK"]), Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    said = []
    with commlayer.attach(model, optimizer, plan="topk(ratio=0.3)") as session:
        def train(step: int) -> None:
            model(slopes(home, step)).backward()
            optimizer.step()
            optimizer.zero_grad()

        for step in range(SAVED):
            train(step)
        session.save_residuals(directory)
        train(SAVED)
        if home == victim:
            dies({"gather_all": Groups, "put_state": Uplink, "_restore": checkpoint}[name], name, number)
        for act in (lambda: session.load_residuals(directory), lambda: train(SAVED)):
            try:
                act()
            except CommError as error:
                said.append(str(error))
    print(json.dumps({"said": said, "weights": [float(p.detach().double().sum()) for p in model.parts]}), flush=True)
    sys.exit(STOPPED if said else 0)


@pytest.mark.parametrize(("victim", "name", "number"), [
    (2, "gather_all", 2),  # nobody has chosen a save
    (0, "put_state", 1),  # the server has one bucket's state of it
    (1, "_restore", 1),  # and all but its own word is there
], ids=["before a save is chosen", "with a part of it at the server", "restored"])
def test_who_is_left_stops_with_one_line_and_nobody_trains_with_half_a_save(
    homes: Homes, tmp_path: Path, victim: int, name: str, number: int,
) -> None:
    assert len(SIZES) > 1
    homes.serve(WORLD, "--min-workers", "2")
    every: list[subprocess.Popen[str]] = [
        homes.run("launch", "--join", homes.address, "--node-rank", str(n), __file__, str(victim), name, str(number),
                  str(tmp_path)) for n in range(WORLD)]
    codes = [ended(process) for process in every]
    left = [n for n in range(WORLD) if n != victim]
    assert [code for code, _, _ in codes] == [KILLED if n == victim else STOPPED for n in range(WORLD)], \
        "\n".join(errors for _, _, errors in codes)
    told = [codes[n][1][0] for n in left]
    assert told[0] == told[1]
    first, then = told[0]["said"]
    assert re.search(rf"^worker {victim}: .*; {tmp_path} was not loaded.*\[E-PEER-LOST\]$", first)
    assert then == first
    found = whole(tmp_path, WORLD)
    assert (found.world, found.step, found.fault) == (WORLD, SAVED, "")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
