"""A home that died is started again, and joins the others, who train on. Run as a script: that training."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.elastic_sites import DECAY, KILLED, MOMENTUM, RATE, SIZES, Given, flat, slopes
from support.site_training import digest
from support.sites import Homes, ended, let_in

from commlayer.engine.local_steps import scale_of, square_of

DEAD_AT, MORE, PAUSE_S, MOST = 3, 5, 0.05, 2400
"""The step in which one home dies, how many come with it again, what each takes at least, and the last if nobody comes."""


def main(home: str, how: str, *more: str) -> None:
    import commlayer
    from commlayer.engine.replica import Replica

    mine, model = int(home) + int(os.environ["LOCAL_RANK"]), Given()
    full = 4 if "pair" in more else 3
    ahead = Path(more[-1]) / "first" if "pair" in more else None
    with torch.no_grad():
        for p in model.parts:
            p += mine  # unequal, as where a script sets no seed
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    rounds: dict[str, Any] = {} if how == "steps" else {"every": 2}
    if how == "rounds":
        rounds |= {"overlap": "round", "sync": commlayer.optim.Outer(matched=True)}
    if "dies inside" in more:  # while the others hand over to it
        Replica.take = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    if "asks" in more:
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
    if ahead is not None and "again" in more and os.environ["LOCAL_RANK"] == "0":  # the second of its home goes ahead of it
        while not ahead.exists():
            time.sleep(0.05)
    with commlayer.attach(model, optimizer, plan=more[0], **rounds) as session:
        made = session.inspect.connection
        scheduler.last_epoch = session.step
        first, again, worlds, invited_in_vain = session.step, MOST, list[int](), 0
        if first:
            session.load_residuals("nothing is there")  # as in a script that begins with it
            if ahead is not None:
                ahead.touch()
        for step in range(first, MOST + MORE):
            if step == DEAD_AT and "victim" in more and not first:
                os.kill(os.getpid(), signal.SIGKILL)
            invites, before = made.members.invites(), made.world
            model(slopes(mine, step)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            worlds.append(made.world)
            invited_in_vain += invites and made.world == before
            if again == MOST and worlds[-1] == full and (first or min(worlds) < full):
                again = step
            if step + 1 == again + MORE + again % 2:
                break
            time.sleep(PAUSE_S)
        session.drain()
        told = {"first": first, "worlds": worlds, "weights": flat([p.detach() for p in model.parts]), "rank": made.rank,
                "momentum": digest(optimizer.state[p]["momentum_buffer"] for p in model.parts), "steps": made.exchanges,
                "calls": model.calls.item(), "step": session.step, "said": session.inspect.decisions(),
                "invited in vain": invited_in_vain}
    print(json.dumps(told), flush=True)


pytestmark = pytest.mark.timeout(300)  # homes start one behind another


class Trained:
    """Three homes, of which one dies, with as many workers as `of` says."""

    def __init__(self, homes: Homes, victim: int, how: str, *more: str, of: int = 1) -> None:
        self.homes, self.victim, self._how, self._more, self._of = homes, victim, how, more, of
        homes.serve(2 + of, "--min-workers", "2")
        self.every = [self.start(home) for home in range(3)]
        assert ended(self.every[victim])[0] == KILLED
        self.left = [home for home in range(3) if home != victim]

    def start(self, home: int, *more: str) -> subprocess.Popen[str]:
        """As it was started first."""
        words = ["victim"] if home == self.victim else []
        options = [*([] if more else ["--node-rank", str(home)]), *(["--nproc-per-node", str(self._of)] if words else [])]
        return self.homes.run("launch", "--join", self.homes.address, *options, __file__, str(home), self._how, "identity()",
                              *words, *more, *self._more)

    def again(self, *more: str) -> tuple[int, list[dict[str, Any]], str]:
        """Of the one that died, to its end."""
        return let_in(lambda: self.start(self.victim, "again", *more))

    def all_ended(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What those tell who were left, and those who came again: first, since nobody waits for them for ever."""
        code, new, errors = self.again()
        assert code == 0, errors
        codes = [ended(self.every[home]) for home in self.left]
        assert [code for code, _, _ in codes] == [0] * len(codes), "\n".join(errors for _, _, errors in codes)
        return [rows[-1] for _, rows, _ in codes], new


def fresh() -> tuple[list[torch.nn.Parameter], torch.optim.SGD, torch.optim.lr_scheduler.ExponentialLR]:
    """As all begin, who have rank 0's weights."""
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    optimizer = torch.optim.SGD(weights, lr=RATE, momentum=MOMENTUM)
    return weights, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)


def reference(homes_of: Sequence[Sequence[int]]) -> tuple[list[float], str]:
    """Weights and momentum by hand: by step, the mean of those who were there, in the order of a server's sum."""
    weights, optimizer, scheduler = fresh()
    for step, there in enumerate(homes_of):
        for p, *gradients in zip(weights, *(slopes(home, step) for home in there), strict=True):
            total = gradients[0].clone()
            for g in gradients[1:]:
                total += g
            p.grad = total.mul_(1.0 / len(there))
        optimizer.step()
        scheduler.step()
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
                there[victim][1].param_groups[0]["lr"] = there[left[0]][1].param_groups[0]["lr"]
                there[victim][1].state[q]["momentum_buffer"] = there[left[0]][1].state[p]["momentum_buffer"].clone()
        for home in here:
            weights, optimizer, scheduler = there[home]
            for p, g in zip(weights, slopes(home, step), strict=True):
                p.grad = g
            optimizer.step()
            scheduler.step()
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
    assert trained.again("dies inside")[0] == KILLED
    code, rows, errors = trained.again("asks")
    assert (code, rows) == (1, [])
    assert re.search(r"attach\(\).*\[E-COLLECTIVE\]$", errors, re.MULTILINE)
    told, (new,) = trained.all_ended()
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
    assert f"step {first}: worker 5 joined: 3 members continue" in "".join(told[0]["said"])
    assert "joined the running job as worker 5" in "".join(new["said"])


def test_of_a_home_of_two_either_may_be_ready_first(homes: Homes, tmp_path: Path) -> None:
    """So who joins later may have the smaller number."""
    trained = Trained(homes, 2, "steps", "pair", str(tmp_path), of=2)
    told, new = trained.all_ended()
    new.sort(key=lambda one: one["rank"])
    assert [one["rank"] for one in (*told, *new)] == [0, 1, 2, 3]
    early, late = (one["first"] for one in new)
    worlds = [4] * DEAD_AT + [2] * (early - DEAD_AT) + [3] * (late - early) + [4] * (len(told[0]["worlds"]) - late)
    assert [one["worlds"] for one in (*told, *new)] == [worlds, worlds, worlds[early:], worlds[late:]]
    there = {2: [0, 1], 3: [0, 1, 3]}
    expected, momentum = reference([[0, 1, 2, 3] if step < DEAD_AT else there.get(world, [0, 1, 3, 2])
                                    for step, world in enumerate(worlds)])
    for one in (*told, *new):
        assert (one["weights"], one["momentum"]) == (expected, momentum)
    assert told[0]["invited in vain"] == 0, "whoever waits is let in in the next step, however quick that is"
    assert "joined the running job as worker 5" in "".join(new[0]["said"])
    assert "joined the running job as worker 4" in "".join(new[1]["said"])


@pytest.mark.parametrize("how", ["local", "rounds"])
def test_a_home_joins_a_job_that_steps_locally_behind_an_exchange(homes: Homes, how: str) -> None:
    """Waited for, and overlapped with means as long as changes."""
    trained = Trained(homes, 1, how)
    told, (new,) = trained.all_ended()
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
