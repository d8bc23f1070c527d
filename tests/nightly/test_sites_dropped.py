"""A home that breaks the protocol in the middle of a step, and those who go on without it. Run as a script: that training.

Where a plan is named, all go over to that one before.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.elastic_sites import EXACT, ODD, STEPS, Given, flat, reference, slopes, survivors
from support.sites import WAIT_S, Homes, ended

BAD, CODE, MOVED = 1, 9, 2
"""The home that does it, with which code it ends, and ahead of which step all go over to another plan, where they do."""
HOW = {"payload": "got codec 99, weight 1.0 and total weight 0.0", "frame": "sent a HELLO frame after the handshake"}
"""What it sends, as the sums judge it, and the connection itself."""


def damage(made: Any, how: str) -> None:
    """By this home's own connection. Then it says nothing of it, and lives, until it hears that it is out."""
    from commlayer.transport.protocol import SERVER_BASE, Header, Kind

    link = made.uplink
    if how == "payload":
        bucket = next(b.id for b in made.plan.buckets if b.server == 0)
        header = Header(Kind.PUSH, made.worker.generation, made.worker.step, bucket, codec=99, sender=made.id, weight=1.0)
        link.transport.send(SERVER_BASE, header, b"no payload of this codec")
    else:
        link.transport.send(SERVER_BASE, Header(Kind.HELLO, sender=made.id))
    until = time.monotonic() + WAIT_S
    while not link._membership._failed and time.monotonic() < until:
        time.sleep(0.05)
    os._exit(CODE)


def main(how: str, then: str = "") -> None:
    import commlayer
    from commlayer.planner import default_plan

    home, model, worlds = int(os.environ["RANK"]), Given(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with commlayer.attach(model, optimizer, plan=EXACT) as session:
        for step in range(STEPS):
            made = session.inspect.connection
            if then and step == MOVED:
                commlayer.switch(session, default_plan(made.worker.job, codec=then, path="service", servers=2, ranks_per_node=1,
                                                       fuse_nbytes=1, cut_nbytes=1024))
            if (home, step) == (BAD, ODD):
                model.parts[0].register_hook(lambda _, made=made: damage(made, how))
            model(slopes(home, step)).backward()
            worlds.append(made.world)
            optimizer.step()
            optimizer.zero_grad()
        told = {"worlds": worlds, "weights": flat([-p.detach().double() for p in model.parts]),
                "said": session.inspect.decisions(), "buckets": len(made.plan.buckets)}
    print(json.dumps(told), flush=True)


def started(homes: Homes, audit: Path, args: Sequence[str], *more: str) -> tuple[Any, list[Any]]:
    """The server and three homes."""
    homes.set(COMMLAYER_AUDIT=str(audit))
    server = homes.serve(3, *more)
    return server, [homes.run("launch", "--join", homes.address, "--node-rank", str(n), __file__, *args) for n in range(3)]


@pytest.mark.parametrize("how", HOW)
def test_who_breaks_the_protocol_is_done_without_and_named(homes: Homes, tmp_path: Path, how: str) -> None:
    server, every = started(homes, tmp_path / "audit.jsonl", [how], "--min-workers", "2")
    done_without(every)
    _, _, said = ended(server)
    assert f"dropped worker 1: {HOW[how]}" in said
    assert f"worker 1: was dropped (by server 0): {HOW[how]}" in said
    assert "continuing with 2 workers; left: worker 1" in said
    noted = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    found = [(line["event"], line["why"]) for line in noted if line.get("peer") == "worker 1" and "why" in line]
    assert [event for event, _ in found] == ["dropped", "lost"]
    assert all(HOW[how] in why for _, why in found)


def done_without(every: list[Any]) -> list[dict[str, Any]]:
    """What those tell who are left."""
    told = survivors(every, {BAD: CODE})
    worlds = [3] * ODD + [2] * (STEPS - ODD)
    assert [one["worlds"] for one in told] == [worlds] * 2
    assert told[0]["weights"] == told[1]["weights"] == reference(worlds, [[0, 1, 2], [0, 2]])
    assert "worker 1 is gone: 2 members continue" in "".join(told[0]["said"])
    return told


def test_where_all_must_stay_all_end_with_its_name(homes: Homes, tmp_path: Path) -> None:
    _, every = started(homes, tmp_path / "audit.jsonl", ["payload"])
    codes = [ended(process) for process in every]
    assert [code for code, _, _ in codes] == [1, CODE, 1]
    for home in (0, 2):
        assert re.search(rf"^commlayer: worker 1: .*\(by server 0\): {HOW['payload']}.*\[E-FRAME\]$", codes[home][2], re.M)


if __name__ == "__main__":
    main(*sys.argv[1:])
