"""Homes that live but hang where the others meet between two steps, and those who go on. Run as a script: that training."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.elastic_sites import DEADLINE_S, EXACT, KILLED, STEPS, Given, flat, hang, reference, slopes, whole
from support.sites import Homes, ended


def main(what: str, hangs: str, directory: str) -> None:
    """Behind every fourth step it saves, changes its plan, or adds up a number. `hangs`: "HOME@STEP", ahead of that; who is to
    be killed there is "HOME!STEP"."""
    import torch.distributed as dist

    import commlayer
    from commlayer.planner import default_plan

    home, model = int(os.environ["RANK"]), Given()
    found = {how: int(step) for one, how, step in re.findall(r"(\d+)([@!])(\d+)", hangs) if int(one) == home}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    worlds, sums, plans = list[int](), list[float](), list[int]()
    with commlayer.attach(model, optimizer, plan=EXACT) as session:
        made = session.inspect.connection
        for step in range(STEPS):
            model(slopes(home, step)).backward()
            worlds.append(made.world)
            plans.append(len(made.plan.buckets))
            optimizer.step()
            optimizer.zero_grad()
            if found.get("@") == step:
                hang(made, stays=False)
            if found.get("!") == step:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % 4 == 3 and what == "save":
                session.save_residuals(directory)
            elif step % 4 == 3 and what == "switch":
                commlayer.session.switch(session, default_plan(made.worker.job, codec=EXACT, path="service", servers=1,
                                                               ranks_per_node=1, fuse_nbytes=1, cut_nbytes=256 * step))
            elif step % 4 == 3:
                x = torch.tensor([float(10**home)])
                dist.all_reduce(x)
                sums.append(x.item())
        told = {"worlds": worlds, "sums": sums, "plans": plans, "weights": flat([-p.detach().double() for p in model.parts]),
                "said": session.inspect.decisions()}
    print(json.dumps(told), flush=True)


def trained(homes: Homes, count: int, what: str, hangs: str, directory: Path, *more: str) -> tuple[Any, list[Any]]:
    """The server's end and each home's: code, rows, what it said."""
    homes.set(COMMLAYER_DEADLINE_S=DEADLINE_S)
    server = homes.serve(count, *more)
    every = [homes.run("launch", "--join", homes.address, "--node-rank", str(n), __file__, what, hangs, str(directory))
             for n in range(count)]
    ends = [ended(process) for process in every]
    if not any(code == 0 for code, _, _ in ends):
        server.terminate()  # it waits for another job
    return ended(server), ends


def why(waited: int) -> str:
    return (f"was dropped: {waited} others waited {DEADLINE_S} s for it (in a collective, a checkpoint or a change of plans): "
            "it hangs, or its machine is too slow for deadline_s")


@pytest.mark.parametrize("what", ["save", "switch", "own"])
def test_who_hangs_where_all_meet_between_two_steps_is_done_without_and_named(homes: Homes, tmp_path: Path, what: str) -> None:
    """The one in a world of four, the other in what is left of that."""
    server, ends = trained(homes, 4, what, "1@3 3@7", tmp_path, "--min-workers", "2")
    assert [code for code, _, _ in ends] == [0, 1, 0, 1], [said for _, _, said in ends]
    told = [rows[0] for _, rows, _ in ends[::2]]
    worlds = [4] * 4 + [3] * 4 + [2] * 4
    assert [one["worlds"] for one in told] == [worlds] * 2
    assert told[0]["weights"] == told[1]["weights"] == reference(worlds, [[0, 1, 2, 3], [0, 2, 3], [0, 2]])
    for home, waited in ((1, 3), (3, 2)):
        assert re.search(rf"{re.escape(why(waited))}.*\[E-PEER-LOST\]$", ends[home][2], re.MULTILINE)
        assert f"worker {home}: {why(waited)}" in server[2]
    if what == "save":
        assert whole(tmp_path, 2).world == 2
    if what == "switch":
        assert told[0]["plans"] == told[1]["plans"]
        assert len(set(told[0]["plans"])) == 3
    if what == "own":
        assert [one["sums"] for one in told] == [[1101.0, 101.0, 101.0]] * 2


def test_who_hangs_where_another_is_killed_holds_those_who_are_left_up_no_longer(homes: Homes, tmp_path: Path) -> None:
    """They wait for its word in which step they go on. The death is heard of long before the hang."""
    homes.set(COMMLAYER_RECONNECT_S="1")
    _, ends = trained(homes, 4, "save", "1@3 3!3", tmp_path, "--min-workers", "2")
    assert [code for code, _, _ in ends] == [0, 1, 0, KILLED], [said for _, _, said in ends]
    told = [rows[0] for _, rows, _ in ends[:3:2]]
    worlds = [4] * 4 + [2] * 8
    assert [one["worlds"] for one in told] == [worlds] * 2
    assert told[0]["weights"] == told[1]["weights"] == reference(worlds, [[0, 1, 2, 3], [0, 2]])
    assert re.search(rf"{re.escape(why(2))}.*\[E-PEER-LOST\]$", ends[1][2], re.MULTILINE)
    assert whole(tmp_path, 2).world == 2


def test_where_all_must_stay_all_end_by_the_deadline(homes: Homes, tmp_path: Path) -> None:
    _, ends = trained(homes, 3, "save", "1@3", tmp_path)
    assert [code for code, _, _ in ends] == [1, 1, 1]
    assert re.search(rf"\b{DEADLINE_S} s from rank 1\b.*\[E-DEADLINE\]$", ends[0][2], re.MULTILINE)


if __name__ == "__main__":
    main(*sys.argv[1:])
