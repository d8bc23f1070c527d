"""A home that died is started again, and joins the others, who train on. Run as a script: that training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from test_homes_regroup import KILLED, SIZES, Given, ended, flat, slopes
from test_homes_training import Homes

DEAD_AT, MORE, PAUSE_S = 3, 5, 0.05
"""The step in which one home dies, how many come with it again, and what each takes at least."""
RATE, MOMENTUM = 1.0, 0.5


def main(home: str, how: str, *more: str) -> None:
    import commlayer

    mine, model = int(home), Given()
    with torch.no_grad():
        for p in model.parts:
            p += mine  # unequal, as where a script sets no seed
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    rounds: dict[str, Any] = {"local": {"every": 2}, "round": {"every": 2, "overlap": "round"}}.get(how, {})
    if "asks" in more:
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
    with commlayer.attach(model, optimizer, plan=more[0] if more else "identity()", **rounds) as session:
        made = session.inspect.connection
        first, again, worlds = session.step, 1 << 30, list[int]()
        if first and "dies" in more:
            os.kill(os.getpid(), signal.SIGKILL)
        if first:
            session.load("nothing is there")  # as in a script that begins with it
            again = first
        for step in range(first, 1 << 30):
            if step == DEAD_AT and "victim" in more and not first:
                os.kill(os.getpid(), signal.SIGKILL)
            model(slopes(mine, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            worlds.append(made.world)
            if worlds[-2:] == [2, 3]:
                again = step + 1 if made.local is not None else step
            if len(worlds) > 1 and worlds[-2:] == [3, 2]:
                print(json.dumps({"two": step}), flush=True)
            if step + 1 == again + MORE + again % 2:
                break
            time.sleep(PAUSE_S)
        session.drain()
        told = {"first": first, "worlds": worlds, "weights": flat([p.detach() for p in model.parts]), "rank": made.rank,
                "momentum": flat([optimizer.state[p]["momentum_buffer"] for p in model.parts]), "steps": made.steps,
                "calls": model.calls.item(), "step": session.step, "said": session.inspect.decisions()}
    print(json.dumps(told), flush=True)


@pytest.fixture
def homes() -> Iterator[Homes]:
    made = Homes()
    yield made
    made.close()


class Trained:
    """Three homes, of which one dies."""

    def __init__(self, homes: Homes, victim: int, how: str, *more: str, least: int = 2) -> None:
        self.homes, self.victim, self._how, self._more = homes, victim, how, more
        homes.serve(3, "--min-workers", str(least))
        self.every = [self.start(home) for home in range(3)]
        assert ended(self.every[victim])[0] == KILLED
        self.left = [home for home in range(3) if home != victim]

    def start(self, home: int, *more: str) -> subprocess.Popen[str]:
        """As it was started first."""
        words = ["victim"] if home == self.victim else []
        place = [] if more else ["--node-rank", str(home)]
        return self.homes.run("launch", "--join", self.homes.address, *place, __file__, str(home), self._how,
                              *(self._more or ("identity()",)), *words, *more)

    def ended(self, *others: subprocess.Popen[str]) -> list[dict[str, Any]]:
        codes = [ended(process) for process in (*(self.every[home] for home in self.left), *others)]
        assert [code for code, _, _ in codes] == [0] * len(codes), "\n".join(errors for _, _, errors in codes)
        return [rows[-1] for _, rows, _ in codes]


def reference(homes_of: Sequence[Sequence[int]], first: int) -> tuple[list[float], list[float]]:
    """Weights and momentum by hand: by step, the mean of those who were there, in the order of a server's sum. `first`: whose
    weights all begin with."""
    weights = [nn_parameter(size, first) for size in SIZES]
    optimizer = torch.optim.SGD(weights, lr=RATE, momentum=MOMENTUM)
    for step, there in enumerate(homes_of):
        for p, *gradients in zip(weights, *(slopes(home, step) for home in there), strict=True):
            total = gradients[0].clone()
            for g in gradients[1:]:
                total += g
            p.grad = total.mul_(1.0 / len(there))
        optimizer.step()
    return flat([p.detach() for p in weights]), flat([optimizer.state[p]["momentum_buffer"] for p in weights])


def nn_parameter(size: tuple[int, ...], value: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(size) + value)


@pytest.mark.parametrize("victim", [1, 0])
def test_a_home_that_died_is_started_again_and_trains_with_the_others(homes: Homes, victim: int) -> None:
    trained = Trained(homes, victim, "steps")
    again = trained.start(victim)
    *told, new = trained.ended(again)
    worlds, first = told[0]["worlds"], new["first"]
    assert new["worlds"] == worlds[first:] == [3] * len(new["worlds"])
    assert worlds[first - 1] == 2, "its first backward pass is of the step in which it was taken in"
    assert [one["rank"] for one in (*told, new)] == [0, 1, 2]
    assert {(one["step"], one["steps"], one["calls"]) for one in (*told, new)} == {(len(worlds),) * 3}
    there = [[0, 1, 2] if step < DEAD_AT else trained.left if step < first else [*trained.left, victim]
             for step in range(len(worlds))]
    weights, momentum = reference(there, 0)
    for one in (*told, new):
        assert (one["weights"], one["momentum"]) == (weights, momentum)
    assert f"step {first}: worker 3 is taken in: 3 go on" in "".join(told[0]["said"])
    assert "joined the running job as worker 3" in "".join(new["said"])


if __name__ == "__main__":
    main(*sys.argv[1:])
