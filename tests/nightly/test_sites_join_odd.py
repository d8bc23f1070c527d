"""A home joins under what is less usual: a GradScaler, plan="auto", deaths as it is let in. Run as a script: that training."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from support.attached import data, mlp
from support.elastic_sites import KILLED
from support.site_training import digest
from support.sites import Homes, ended, let_in
from torch import nn

DEAD_AT, MOST, PAUSE_S = 3, 2400, 0.05
WAYS: dict[str, dict[str, Any]] = {
    "scaled": {"plan": "topk(ratio=0.2)"},
    "ddp": {"plan": "topk(ratio=0.2)"},
    "ddp local": {"plan": "fp16()", "every": 2},
    "auto": {"plan": "auto"},
    "rounds": {"plan": "fp16()", "every": 2, "overlap": "round"},
}
MORE = {"scaled": 8, "ddp": 8, "ddp local": 6, "auto": 60, "rounds": 6}
"""Steps behind the one in which a home has come again."""


def main(home: str, how: str, *more: str) -> None:
    import commlayer

    mine = int(home)
    model: Any = mlp(seed=mine, width=400 if how == "auto" else 40)
    if "ddp" in how:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, enabled=how == "scaled")
    with commlayer.attach(model, optimizer, scaler=scaler if how == "scaled" else None, **WAYS[how]) as session:
        made, first, again, worlds = session.inspect.connection, session.step, MOST, list[int]()
        if "dies behind" in more and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if "dies with it" in more:
            threading.Thread(target=die_with, args=(made, 0.05 * mine), daemon=True).start()
        for step in range(first, MOST):
            if step == DEAD_AT and "victim" in more:
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = data(mine, step)
            loss = nn.functional.mse_loss(model(x), y)
            if how == "scaled" and step % 7 == 0 and mine == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            worlds.append(made.world)
            if again == MOST and max(session.inspect.members) > 2:
                again = step
            if step + 1 == again + MORE[how] + again % 2:
                break
            time.sleep(PAUSE_S)
        session.drain()
        rows = torch.tensor([10.0**mine])
        torch.distributed.all_reduce(rows)
        keeps = [v for p in model.parameters() for v in optimizer.state[p].values()]
        told = {"first": first, "worlds": worlds, "step": session.step, "sum": rows.item(),
                "weights": digest(model.parameters()), "optimizer": digest(keeps), "scaler": scaler.state_dict(),
                "members": session.inspect.members, "said": session.inspect.decisions(),
                "plan": commlayer.records.digest(made.plan)}
    print(json.dumps(told), flush=True)


def die_with(made: Any, wait_s: float) -> None:
    """So long behind word that another home is to be let in."""
    while max(m.rank for m in made.members._newest.members) < 3:
        time.sleep(0.001)
    time.sleep(wait_s)
    os.kill(os.getpid(), signal.SIGKILL)


pytestmark = pytest.mark.timeout(300)


class Trained:
    """Three homes, of which the last dies and comes again, and those of `with_it` die when it does."""

    def __init__(self, homes: Homes, how: str, *, with_it: int = -1) -> None:
        self._homes, self._how = homes, how
        homes.serve(3, "--min-workers", "2")
        words = {2: ["victim"], with_it: ["dies with it"]}
        self._every = [self._start(home, "--node-rank", str(home), words=words.get(home, [])) for home in range(3)]
        assert ended(self._every[2])[0] == KILLED
        self._left = [home for home in range(2) if home != with_it]

    def _start(self, home: int, *options: str, words: list[str]) -> subprocess.Popen[str]:
        return self._homes.run("launch", "--join", self._homes.address, *options, __file__, str(home), self._how, *words)

    def again(self, *words: str) -> tuple[int, list[dict[str, Any]], str]:
        return let_in(lambda: self._start(2, words=list(words)))

    def told(self) -> list[dict[str, Any]]:
        """By those who are left, and the one that has come again."""
        code, new, errors = self.again()
        assert code == 0, "\n".join([errors, *(ended(self._every[home])[2] for home in self._left)])
        codes = [ended(self._every[home]) for home in self._left]
        assert [code for code, _, _ in codes] == [0] * len(codes), "\n".join(errors for _, _, errors in codes)
        return [*(rows[-1] | {"stderr": errors} for _, rows, errors in codes), new[-1]]


def test_scale_and_optimizer_are_those_of_the_others_bit_for_bit_and_one_may_die_ahead_of_its_first_step(homes: Homes) -> None:
    trained = Trained(homes, "scaled")
    assert trained.again("dies behind")[0] == KILLED
    told = trained.told()
    for what in ("step", "weights", "optimizer", "scaler", "members", "plan"):
        assert {json.dumps(one[what]) for one in told} == {json.dumps(told[0][what])}, what
    worlds, first = told[0]["worlds"], told[-1]["first"]
    assert worlds == [3] * DEAD_AT + [2] * (first - DEAD_AT) + [3] * (len(worlds) - first)
    assert told[-1]["members"] == [0, 1, 4]
    assert 0 < told[0]["scaler"]["_growth_tracker"] < 3 or told[0]["scaler"]["scale"] != 256.0


@pytest.mark.parametrize("how", ["ddp", "ddp local"])
def test_a_script_with_distributed_data_parallel_joins_as_it_is(homes: Homes, how: str) -> None:
    """Its constructor asks things of all, who are past that."""
    told = Trained(homes, how).told()
    for what in ("step", "weights", "members", "sum"):
        assert {json.dumps(one[what]) for one in told} == {json.dumps(told[0][what])}, what
    assert (told[0]["members"], told[0]["sum"]) == ([0, 1, 3], 111.0)
    assert told[0]["worlds"][-1] == 3


@pytest.mark.parametrize("who", [0, 1])
def test_a_home_dies_while_a_round_is_held_for_one_that_joins(homes: Homes, who: int) -> None:
    """The one that would give it what it has, and another."""
    told = Trained(homes, "rounds", with_it=who).told()
    assert [one["members"] for one in told] == [[1 - who, 3]] * 2
    assert told[0]["weights"] == told[1]["weights"]
    assert told[0]["step"] == told[1]["step"]


def test_auto_measures_and_plans_anew_for_those_who_are_left_and_with_one_that_joins(homes: Homes) -> None:
    told = Trained(homes, "auto").told()
    assert told[0]["plan"] == told[1]["plan"] == told[2]["plan"]
    assert told[0]["weights"] == told[1]["weights"] == told[2]["weights"]
    said = "\n".join(told[0]["said"])
    assert re.search(r"(?s)worker 2 is gone.*links carry [^,\n]+, [^,\n]+ Mb/s up/down\n", said), said
    assert re.search(r"(?s)worker 3 joined.*links carry [^,\n]+, [^,\n]+, [^,\n]+ Mb/s up/down\n", said), said
    assert "found a plan" in said[said.rindex("links carry") :], said
    seen = [line for line in told[0]["stderr"].splitlines() if line.startswith("commlayer: step ")]
    assert any("links carry" in line for line in seen), "whoever looks on sees what is decided"
    assert "links carry" in told[1]["stderr"], "each home sees it"


if __name__ == "__main__":
    main(*sys.argv[1:])
