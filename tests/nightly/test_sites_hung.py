"""A home that lives but hangs in its script, and those who go on without it. Run as a script: that training."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from support.elastic_sites import DEADLINE_S, EXACT, ODD, STEPS, Given, flat, hang, reference, slopes, survivors
from support.sites import WAIT_S, Homes, ended

HANGS, CODE = 1, 1
"""The home that does, and with which code it ends when it wakes."""


def main(how: str) -> None:
    import commlayer

    home, model, worlds = int(os.environ["RANK"]), Given(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with commlayer.attach(model, optimizer, plan=EXACT) as session:
        made = session.inspect.connection
        for step in range(STEPS):
            if (home, step) == (HANGS, ODD):
                model.parts[0].register_hook(lambda _: hang(made, how == "stays"))
            model(slopes(home, step)).backward()
            worlds.append(made.world)
            optimizer.step()
            optimizer.zero_grad()
        told = {"worlds": worlds, "weights": flat([-p.detach().double() for p in model.parts]),
                "said": session.inspect.decisions()}
    print(json.dumps(told), flush=True)


def started(homes: Homes, audit: Path, how: str, *more: str) -> tuple[Any, list[Any]]:
    """The server and three homes, once all are in: what they wait behind that comes on top of how long they take to start."""
    homes.set(COMMLAYER_DEADLINE_S=DEADLINE_S, COMMLAYER_AUDIT=str(audit))
    server = homes.serve(3, *more)
    every = [homes.run("launch", "--join", homes.address, "--node-rank", str(n), __file__, how) for n in range(3)]
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until and not (audit.exists() and '"begun"' in audit.read_text()):
        time.sleep(0.1)
    return server, every


def test_who_hangs_is_done_without_and_named_and_hears_of_it_when_it_wakes(homes: Homes, tmp_path: Path) -> None:
    server, every = started(homes, tmp_path / "audit.jsonl", "wakes", "--min-workers", "2")
    told = survivors(every[::2], {})
    worlds = [3] * ODD + [2] * (STEPS - ODD)
    assert [one["worlds"] for one in told] == [worlds] * 2
    assert told[0]["weights"] == told[1]["weights"] == reference(worlds, [[0, 1, 2], [0, 2]])
    assert "worker 1 is gone: 2 members continue" in "".join(told[0]["said"])
    why = (f"was dropped: sent nothing for {DEADLINE_S} s while others waited in step {ODD} (reported by server 0): it hangs, "
           "or its machine is too slow for deadline_s")
    code, _, said = ended(every[HANGS])
    assert code == CODE, said
    assert re.search(rf"worker 1 .*: {re.escape(why)}.*\[E-PEER-LOST\]$", said, re.MULTILINE), said
    _, _, said = ended(server)
    assert f"worker 1: {why}" in said
    assert "continuing with 2 workers; left: worker 1" in said


def test_where_all_must_stay_all_end_with_its_name(homes: Homes, tmp_path: Path) -> None:
    _, every = started(homes, tmp_path / "audit.jsonl", "wakes")
    codes = [ended(process) for process in every]
    assert [code for code, _, _ in codes] == [1, 1, 1], [said for _, _, said in codes]
    for home in (0, 2):
        assert re.search(r"worker 1: .*\(server 0 .*\[E-DEADLINE\]$", codes[home][2], re.MULTILINE)


if __name__ == "__main__":
    main(*sys.argv[1:])
