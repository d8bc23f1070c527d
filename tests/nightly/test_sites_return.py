"""Homes that are switched off without a word and started again by the same lines. Run as a script: what they train."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from support.keys import Folders, made_folders  # noqa: F401  (a fixture)
from support.sites import Homes, ended, next_row, switch_off

STEPS, PAUSE_S, MOST = 5, 0.05, 6000
"""How many steps all make together before the first is over, what each takes at least, and the last if no home comes back."""


def main(start: str) -> None:
    import torch
    from torch import nn

    import commlayer

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlayer.attach(model, optimizer, plan="identity()") as session:
        first, worlds = session.step, [session.world]
        for step in range(first, MOST):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            worlds.append(session.world)
            if step == first + STEPS:
                print(json.dumps({"first": first, "world": session.world}), flush=True)
            # The second start of all ends soon; a job one of whose homes is switched off ends after that one is back.
            if (start == "again" and step == STEPS) or (start == "joins" and min(worlds) < worlds[-1] == 2) or \
                    (first and step == first + STEPS):
                break
            time.sleep(PAUSE_S)
    print(json.dumps({"first": first, "worlds": sorted(set(worlds))}), flush=True)


pytestmark = pytest.mark.timeout(300)  # homes start one behind another


@pytest.fixture(name="start")
def launcher(homes: Homes, folders: Folders) -> object:
    """Starts one of two homes, each with a certificate of its own. Silence alone makes no seat free within a test."""
    homes.set(COMMLAYER_DEAD_AFTER_S="300", COMMLAYER_RECONNECT_S="300", COMMLAYER_DEADLINE_S="300")
    keys = [folders.worker, folders.second]

    def start(home: int, how: str) -> subprocess.Popen[str]:
        return homes.run("launch", "--join", homes.address, "--keys", str(keys[home]), __file__, how)

    return start


@pytest.mark.parametrize("least", ["0", "1"])
def test_when_all_were_switched_off_the_same_lines_begin_a_new_job(homes: Homes, folders: Folders, start: object,
                                                                   least: str) -> None:
    assert callable(start)
    server = homes.serve(2, "--min-workers", least, "--servers", "2", "--keys", str(folders.server))
    other = homes.run("serve", "--join", homes.address, "--keys", str(folders.server))
    both = [start(home, "first") for home in range(2)]
    assert [next_row(home)["world"] for home in both] == [2, 2]
    for home in both:
        switch_off(home)
    for code, rows, errors in [ended(home) for home in [start(home, "again") for home in range(2)]]:
        assert (code, rows[-1]) == (0, {"first": 0, "worlds": [2]}), errors
    for process in (other, server):
        code, _, said = ended(process)
        assert (code, said.count("the job failed")) == (0, 1), said


def test_a_home_that_was_switched_off_takes_its_place_again_at_once(homes: Homes, folders: Folders, start: object) -> None:
    assert callable(start)
    server = homes.serve(2, "--min-workers", "1", "--keys", str(folders.server))
    both = [start(home, "joins") for home in range(2)]
    assert [next_row(home)["world"] for home in both] == [2, 2]
    switch_off(both[1])
    code, rows, errors = ended(start(1, "joins"))
    assert code == 0, errors
    assert rows[-1]["first"] > 0, "it joins the job that runs"
    code, rows, errors = ended(both[0])
    assert (code, rows[-1]["worlds"]) == (0, [1, 2]), errors
    assert ended(server)[0] == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
