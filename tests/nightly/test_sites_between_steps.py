"""Homes that are killed between two steps: inside a save, or in a change of plans. Run as a script: that training."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.elastic_sites import (
    EXACT,
    KILLED,
    SIZES,
    STEPS,
    Death,
    Given,
    flat,
    owed_of,
    reference,
    slopes,
    unheard,
    waits_at,
    whole,
)
from support.sites import WAIT_S, Homes, ended

EVERY = 3
"""Local steps to a round: behind every fourth step there is one to drain."""
COARSE, FINE = "onebit(block=64)", "topk(ratio=0.3)"


def said_of(bucket: Any) -> str:
    return next((codec for codec in (COARSE, FINE) if codec.partition("(")[0] in bucket.codec), "")


def coded(plan: Any) -> str:
    """With which of the two."""
    (found,) = {said_of(b) for b in plan.buckets} - {""} or {EXACT}
    return found


def main(what: str, codec: str, deaths: str, directory: str) -> None:
    """Behind every fourth step it saves, changes its plan, or drains its local steps. Who dies has put in nothing, where what
    is owed is counted."""
    from msgspec import structs

    import commlayer
    from commlayer.compressors import parse, wrap
    from commlayer.engine.observers import Observer, ObserverOrder
    from commlayer.engine.switch import switch as go_over

    home = int(os.environ["RANK"])
    death, model = Death(home, deaths), Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    put = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    worlds, codecs = list[int](), list[str]()
    rounds: dict[str, Any] = {"every": EVERY} if what in ("drain", "matched") else {}
    if what == "matched":
        rounds["sync"] = commlayer.optim.Outer(matched=True)
    with commlayer.attach(model, optimizer, plan=codec, **rounds) as session:
        made = session.inspect.connection
        if what == "matched" and home == 1:
            unheard(session, 1)

        def other() -> Any:
            """Of the model's weights; its buffer goes as it went."""
            codec = str(wrap(parse(FINE if coded(made.plan) == COARSE else COARSE)))
            changed = [structs.replace(b, codec=codec, down=codec) if said_of(b) else b for b in made.plan.buckets]
            return structs.replace(made.plan, buckets=tuple(changed))

        def after_step() -> None:
            worlds.append(made.world)
            codecs.append(coded(made.plan))
            if what == "by itself" and made.exchanges in (4, 8):
                go_over(made, other(), by_itself=True)

        session._driver.observers.add(Observer(ObserverOrder.OTHER, after_step, after_step, after_drain=after_step))
        for step in range(STEPS):
            if step == death.step:
                death.arm(made, directory)
            given = slopes(home, step)
            if death.silent and codec != EXACT:
                given = [torch.zeros_like(g) for g in given]
            model(given).backward()
            for total, g in zip(put, given, strict=True):
                total += g.double() / (worlds or [made.world])[-1]
            optimizer.step()
            optimizer.zero_grad()
            if step % 4 == 3 and what in ("save", "matched"):
                session.save_residuals(directory)
            elif step % 4 == 3 and what == "drain":
                session.drain()
            elif step % 4 == 3 and what in ("asked", "rank 0's"):
                commlayer.session.switch(session, other() if what == "asked" or made.rank == 0 else None)
        session.drain()
        owed = owed_of(made)
        told = {"home": home, "worlds": worlds, "said": session.inspect.decisions(), "steps": made.exchanges, "put": flat(put),
                "weights": flat([-p.detach().double() for p in model.parts]), "owed": flat(owed),
                "codecs": codecs}
    print(json.dumps(told), flush=True)


def survivors(homes: Homes, count: int, what: str, codec: str, deaths: str, directory: Path,
              meanwhile: Callable[[], object] = lambda: None) -> list[dict[str, Any]]:
    homes.serve(count, "--min-workers", "2")
    every: list[subprocess.Popen[str]] = [
        homes.run("launch", "--join", homes.address, "--node-rank", str(n), __file__, what, codec, deaths, str(directory))
        for n in range(count)]
    meanwhile()
    victims = {int(home) for home in re.findall(r"(\d+)@", deaths)}
    codes = [ended(process) for process in every]
    assert [code for code, _, _ in codes] == [KILLED * (n in victims) for n in range(count)], "\n".join(e for _, _, e in codes)
    told = [told[0] for home, (_, told, _) in enumerate(codes) if home not in victims]
    assert all(one["weights"] == told[0]["weights"] for one in told)
    assert {one["steps"] for one in told} == {{"drain": STEPS // 2, "matched": STEPS // EVERY}.get(what, STEPS)}
    return told


@pytest.mark.parametrize(("deaths", "worlds"), [
    ("0@3:gather:5 2@7:gather:2", [4] * 4 + [3] * 4 + [2] * 4),  # two at two saves, the first with all but the end of it
    ("0@3:gather:4 1@3:gather:8", [4] * 4 + [2] * 8),  # one in the first save, another as that is done anew
])
def test_homes_die_in_saves_and_those_who_are_left_save_anew(
    homes: Homes, tmp_path: Path, deaths: str, worlds: list[int],
) -> None:
    told = survivors(homes, 4, "save", EXACT, deaths, tmp_path)
    assert [one["worlds"] for one in told] == [worlds] * 2
    left = [[0, 1, 2, 3], [1, 2, 3], [one["home"] for one in told]]
    assert told[0]["weights"] == reference(worlds, left)
    found = whole(tmp_path, 2)
    assert (found.world, found.step, found.fault) == (2, STEPS, "")


def test_a_home_dies_in_a_save_between_two_exchanges_and_the_others_go_on_from_the_same_weights(
    homes: Homes, tmp_path: Path,
) -> None:
    """One of them has not heard how long changes were in the exchange before."""
    told = survivors(homes, 3, "matched", EXACT, "0@3:gather:1", tmp_path)
    assert all("had merged the last exchange differently" in "".join(one["said"]) for one in told)
    assert whole(tmp_path, 2).world == 2


@pytest.mark.parametrize(("what", "deaths"), [
    ("save", "3@3:gather:2 2@7:gather:2+"),
    ("asked", "3@3:gather:2 0@7:send:1+"),  # the server knows of the plan
    ("drain", "3@3:drain:1 2@7:drain:1+"),
])
def test_a_home_that_joins_where_another_dies_between_two_steps_is_sent_away(
    homes: Homes, tmp_path: Path, what: str, deaths: str,
) -> None:
    """Nobody waits for it in what is begun again, of which it knows nothing: the others do that as if it had not come."""
    def joins() -> None:
        until = time.monotonic() + WAIT_S
        while not waits_at(tmp_path).exists() and time.monotonic() < until:
            time.sleep(0.05)
        late.append(homes.run("launch", "--join", homes.address, __file__, what, codec, "", str(tmp_path)))

    late, codec = list[subprocess.Popen[str]](), COARSE if what == "asked" else EXACT
    told = survivors(homes, 4, what, codec, deaths, tmp_path, joins)
    worlds = [3, 2, 2] if what == "drain" else [4] * 4 + [3] * 4 + [2] * 4
    assert [one["worlds"] for one in told] == [worlds] * 2
    assert " joined: " not in "".join(told[0]["said"])
    code, rows, errors = ended(late[0])
    assert (code, rows) == (1, [])
    assert "[E-JOIN-MISSED]\n" in errors
    if what == "save":
        assert told[0]["weights"] == reference(worlds, [[0, 1, 2, 3], [0, 1, 2], [0, 1]])
        waits_at(tmp_path).unlink()
        assert whole(tmp_path, 2).world == 2


def owes_nothing_else(told: list[dict[str, Any]]) -> None:
    """What was put in is in the weights, or owed."""
    put, owed = (torch.tensor([one[what] for one in told], dtype=torch.float64).sum(0) for what in ("put", "owed"))
    assert owed.abs().max() > 0.1
    torch.testing.assert_close(torch.tensor(told[0]["weights"], dtype=torch.float64) + owed, put, atol=1e-4, rtol=1e-4)


def test_a_change_of_plans_that_a_script_asks_for_is_made_by_those_who_are_left(homes: Homes, tmp_path: Path) -> None:
    """One dies ahead of it, one when the server has been told and nobody knows that."""
    told = survivors(homes, 4, "asked", COARSE, "3@3:gather:2 0@7:send:1", tmp_path)
    assert [one["worlds"] for one in told] == [[4] * 4 + [3] * 4 + [2] * 4] * 2
    assert [one["codecs"] for one in told] == [[COARSE] * 4 + [FINE] * 4 + [COARSE] * 4] * 2
    owes_nothing_else(told)


def test_a_plan_that_rank_0_alone_had_is_gone_with_it_and_the_one_of_before_goes_on(homes: Homes, tmp_path: Path) -> None:
    """Behind that the others take the next one's."""
    told = survivors(homes, 3, "rank 0's", COARSE, "0@3:share:1", tmp_path)
    assert [one["worlds"] for one in told] == [[3] * 4 + [2] * 8] * 2
    assert all("step 4: the new plan is lost" in "".join(one["said"]) for one in told)
    assert [one["codecs"] for one in told] == [[COARSE] * 8 + [FINE] * 4] * 2
    owes_nothing_else(told)


def test_a_change_that_nobody_asked_for_is_left_unless_servers_may_know_of_it(homes: Homes, tmp_path: Path) -> None:
    told = survivors(homes, 4, "by itself", COARSE, "3@3:gather:2 0@7:send:1", tmp_path)
    assert [one["worlds"] for one in told] == [[4] * 4 + [3] * 4 + [2] * 4] * 2
    assert [one["codecs"] for one in told] == [[COARSE] * 8 + [FINE] * 4] * 2
    owes_nothing_else(told)


if __name__ == "__main__":
    main(*sys.argv[1:])
