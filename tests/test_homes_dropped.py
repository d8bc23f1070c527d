"""A home that breaks the protocol in the middle of a step, and those who go on without it. Run as a script: that training."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from homes_kit import WAIT_S, Homes, ended
from test_homes_regroup import EXACT, ODD, STEPS, Given, flat, reference, slopes, survivors

BAD, CODE = 1, 9
"""The home that does it, and with which code it ends."""
HOW = {"payload": "codec 99 with weight 1.0 of 0.0", "frame": "HELLO in the middle of a connection"}
"""What it sends, as the sums judge it, and the connection itself."""


def damage(made: Any, how: str) -> None:
    """By this home's own connection. Then it says nothing of it, and lives, until it hears that it is out."""
    from commlayer.transport.protocol import SERVER_BASE, Header, Kind

    link = made.uplink
    if how == "payload":
        header = Header(Kind.PUSH, made.worker.generation, made.worker.step, 0, codec=99, sender=made.id, weight=1.0)
        link.transport.send(SERVER_BASE, header, b"no payload of this codec")
    else:
        link.transport.send(SERVER_BASE, Header(Kind.HELLO, sender=made.id))
    until = time.monotonic() + WAIT_S
    while not link._membership._failed and time.monotonic() < until:
        time.sleep(0.05)
    os._exit(CODE)


def main(how: str) -> None:
    import commlayer

    home, model, worlds = int(os.environ["RANK"]), Given(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with commlayer.attach(model, optimizer, plan=EXACT) as session:
        for step in range(STEPS):
            made = session.inspect.connection
            if (home, step) == (BAD, ODD):
                model.parts[0].register_hook(lambda _, made=made: damage(made, how))
            model(slopes(home, step)).backward()
            worlds.append(made.world)
            optimizer.step()
            optimizer.zero_grad()
        told = {"worlds": worlds, "weights": flat([-p.detach().double() for p in model.parts]),
                "said": session.inspect.decisions()}
    print(json.dumps(told), flush=True)


def started(homes: Homes, audit: Path, how: str, *more: str) -> tuple[Any, list[Any]]:
    """The server and three homes."""
    homes.set(COMMLAYER_AUDIT=str(audit))
    server = homes.serve(3, *more)
    return server, [homes.run("launch", "--join", homes.address, "--node-rank", str(n), __file__, how) for n in range(3)]


@pytest.mark.parametrize("how", HOW)
def test_who_breaks_the_protocol_is_done_without_and_named(homes: Homes, tmp_path: Path, how: str) -> None:
    server, every = started(homes, tmp_path / "audit.jsonl", how, "--min-workers", "2")
    told = survivors(every, {BAD: CODE})
    worlds = [3] * ODD + [2] * (STEPS - ODD)
    assert [one["worlds"] for one in told] == [worlds] * 2
    assert told[0]["weights"] == told[1]["weights"] == reference(worlds, [[0, 1, 2], [0, 2]])
    assert "worker 1 is gone: 2 go on" in "".join(told[0]["said"])
    _, _, said = ended(server)
    assert f"dropped worker 1: {HOW[how]}" in said
    assert f"worker 1: was dropped (by server 0): {HOW[how]}" in said
    assert "goes on with 2 workers, without worker 1" in said
    noted = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    found = [(line["event"], line["why"]) for line in noted if line.get("peer") == "worker 1" and "why" in line]
    assert [event for event, _ in found] == ["dropped", "lost"]
    assert all(HOW[how] in why for _, why in found)


def test_where_all_must_stay_all_end_with_its_name(homes: Homes, tmp_path: Path) -> None:
    _, every = started(homes, tmp_path / "audit.jsonl", "payload")
    codes = [ended(process) for process in every]
    assert [code for code, _, _ in codes] == [1, CODE, 1]
    for home in (0, 2):
        assert f"PeerLost: worker 1: was dropped (by server 0): {HOW['payload']}" in codes[home][2]


if __name__ == "__main__":
    main(*sys.argv[1:])
