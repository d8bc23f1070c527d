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
from test_homes_training import Homes, digest

from commlayer.runtime.matched_length import scale_of, square_of

DEAD_AT, MORE, PAUSE_S = 3, 5, 0.05
"""The step in which one home dies, how many come with it again, and what each takes at least."""
RATE, MOMENTUM = 1.0, 0.5


def main(home: str, how: str, *more: str) -> None:
    import commlayer
    from commlayer.job.replica import Replica

    mine, model = int(home), Given()
    with torch.no_grad():
        for p in model.parts:
            p += mine  # unequal, as where a script sets no seed
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    rounds: dict[str, Any] = {} if how == "steps" else {"every": 2}
    if how == "rounds":
        rounds |= {"overlap": "round", "sync": commlayer.optim.Outer(matched=True)}
    if "dies inside" in more:  # while the others hand over to it
        Replica.take = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    if "asks" in more:
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
    with commlayer.attach(model, optimizer, plan=more[0] if more else "identity()", **rounds) as session:
        made = session.inspect.connection
        first, again, worlds = session.step, 1 << 30, list[int]()
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
                again = step
            if step + 1 == again + MORE + again % 2:
                break
            time.sleep(PAUSE_S)
        session.drain()
        told = {"first": first, "worlds": worlds, "weights": flat([p.detach() for p in model.parts]), "rank": made.rank,
                "momentum": digest(optimizer.state[p]["momentum_buffer"] for p in model.parts), "steps": made.steps,
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


def fresh() -> tuple[list[torch.nn.Parameter], torch.optim.SGD]:
    """As all begin, who have rank 0's weights."""
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    return weights, torch.optim.SGD(weights, lr=RATE, momentum=MOMENTUM)


def reference(homes_of: Sequence[Sequence[int]]) -> tuple[list[float], str]:
    """Weights and momentum by hand: by step, the mean of those who were there, in the order of a server's sum."""
    weights, optimizer = fresh()
    for step, there in enumerate(homes_of):
        for p, *gradients in zip(weights, *(slopes(home, step) for home in there), strict=True):
            total = gradients[0].clone()
            for g in gradients[1:]:
                total += g
            p.grad = total.mul_(1.0 / len(there))
        optimizer.step()
    return flat([p.detach() for p in weights]), digest(optimizer.state[p]["momentum_buffer"] for p in weights)


def stepped_locally(how: str, steps: int, left: list[int], victim: int, first: int, last: int) -> list[float]:
    """Weights by hand, exchanged behind every second step. The victim's `last` step in an exchange is known, and it comes again
    behind step `first` with what all have in common, and the momentum of the first who was left."""
    there = {home: fresh() for home in (*left, victim)}
    starts = [torch.zeros(size) for size in SIZES]
    sent: list[list[torch.Tensor]] = []
    ends: dict[int, list[torch.Tensor]] = {}

    def merge(here: Sequence[int]) -> None:
        means = [torch.stack(each).mean(0) for each in zip(*sent, strict=True)]
        scale = scale_of([(1.0, square_of(change)) for change in sent], square_of(means)) if how == "rounds" else 1.0
        for number, (start, mean) in enumerate(zip(starts, means, strict=True)):
            start -= scale * mean
            for home in here:
                p = there[home][0][number].detach()
                p.copy_(start + (p - ends[home][number]))

    here: list[int] = []
    for step in range(steps):
        here = [home for home in there if home != victim or step <= last or step > first]
        if step == first + 1:
            there[victim], ends[victim] = fresh(), [start.clone() for start in starts]
            for p, q, start in zip(there[left[0]][0], there[victim][0], starts, strict=True):
                q.data.copy_(start)
                there[victim][1].state[q]["momentum_buffer"] = there[left[0]][1].state[p]["momentum_buffer"].clone()
        for home in here:
            weights, optimizer = there[home]
            for p, g in zip(weights, slopes(home, step), strict=True):
                p.grad = g
            optimizer.step()
        if (drained := step == steps - 1) or step % 2:
            if how == "rounds" and sent:
                merge(here)
            sent = [[start - p.detach() for start, p in zip(starts, there[home][0], strict=True)] for home in here]
            ends |= {home: [p.detach().clone() for p in there[home][0]] for home in here}
            if how == "local" or drained:
                merge(here)
    return flat(starts)


def test_a_home_that_died_is_started_again_and_trains_with_the_others(homes: Homes) -> None:
    """Its first try is killed while it is let in, and the others train on."""
    trained = Trained(homes, 0, "steps")
    first_try, asks = trained.start(0, "dies inside"), trained.start(0, "asks")
    assert ended(first_try)[0] == KILLED
    code, rows, errors = ended(asks)
    assert (code, rows) == (1, [])
    assert "RuntimeError: this home joins a running job, and the others take no part in what its script asks of all" in errors
    *told, new = trained.ended(trained.start(0))
    worlds, first = told[0]["worlds"], new["first"]
    assert new["worlds"] == worlds[first:] == [3] * len(new["worlds"])
    assert worlds[DEAD_AT:first] == [2] * (first - DEAD_AT), "its first backward pass is of the step in which it was taken in"
    assert [one["rank"] for one in (*told, new)] == [0, 1, 2]
    assert {(one["step"], one["steps"], one["calls"]) for one in (*told, new)} == {(len(worlds),) * 3}
    there = [[0, 1, 2] if step < DEAD_AT else trained.left if step < first else [*trained.left, 0]
             for step in range(len(worlds))]
    weights, momentum = reference(there)
    for one in (*told, new):
        assert (one["weights"], one["momentum"]) == (weights, momentum)
    assert f"step {first}: worker 5 is taken in: 3 go on" in "".join(told[0]["said"])
    assert "joined the running job as worker 5" in "".join(new["said"])


@pytest.mark.parametrize("how", ["local", "rounds"])
def test_a_home_joins_a_job_that_steps_locally_behind_an_exchange(homes: Homes, how: str) -> None:
    """Waited for, and overlapped with means as long as changes."""
    trained = Trained(homes, 1, how)
    *told, new = trained.ended(trained.start(1))
    assert new["first"] % 2 == 1, "in the step that an exchange is behind"
    assert told[0]["weights"] == told[1]["weights"] == new["weights"]
    assert {one["step"] for one in (*told, new)} == {len(told[0]["worlds"])}
    # Whether what it sent last in a round was heard before it died.
    found = [stepped_locally(how, len(told[0]["worlds"]), trained.left, 1, new["first"], last)
             for last in ((1,) if how == "local" else (1, -1))]
    weights = torch.tensor(new["weights"])
    assert any(torch.allclose(weights, torch.tensor(exact), atol=1e-3, rtol=1e-4) for exact in found), [
        (weights - torch.tensor(exact)).abs().max() for exact in found]


if __name__ == "__main__":
    main(*sys.argv[1:])
