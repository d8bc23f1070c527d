"""Homes that are killed or leave in the middle of a training, and those who go on. Run as a script: that training."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from support.elastic_sites import (
    EXACT,
    KILLED,
    ODD,
    SIZES,
    SLOW_S,
    STEPS,
    Given,
    flat,
    owed_of,
    reference,
    slopes,
    survivors,
    unheard,
)
from support.sites import WAIT_S, Homes, ended

SILENT = 2
"""The home whose gradients are zeros where what is owed is counted: what it owes is gone with it, and that is nothing."""
DATA = 96


class End:
    """What becomes of this home: "HOME@STEP+SECONDS" of each that ends, so long behind the beginning of that step."""

    def __init__(self, home: int, how: str, ends: str) -> None:
        every = re.findall(r"(\d+)@(\d+)\+([\d.]+)", ends)
        found = [(int(step), float(wait_s)) for one, step, wait_s in every if int(one) == home]
        self._step, self._wait_s = found[0] if found else (STEPS, 0.0)
        self._how = how

    def whole(self, step: int) -> None:
        """That step is, here."""
        if self._how == "slow" and step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)

    def begins(self, step: int) -> bool:
        """A step does. Whether this home is still of the job."""
        if step < self._step:
            return True
        if self._how == "leave" and self._wait_s:
            raise RuntimeError("this home has had enough")
        if self._how == "leave":
            return False
        if self._how == "slow":
            return True
        if self._how == "broken":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self._step < STEPS:
            threading.Timer(self._wait_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif self._step < STEPS:
            time.sleep(WAIT_S)  # the steps here may be over before that
        return True


def slow(session: Any) -> None:
    """The last result of the step under way is decoded late, behind the word that a home is gone."""
    now = session.inspect.connection.worker.now
    (arrivals,), left = now._awaited, now._awaited[0]._left
    arrived, count = arrivals.arrived, itertools.count(1)

    def late() -> None:
        if next(count) == left:
            time.sleep(SLOW_S)
        arrived()

    arrivals.arrived = late


def main(codec: str, how: str, ends: str) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import commlayer
    from commlayer.errors import StepAbandoned

    home = int(os.environ["RANK"])
    end, model = End(home, how, ends), Given()
    wrapped: Any = model
    if how == "ddp":
        dist.init_process_group("gloo")
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    put = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    worlds, sums = [], []
    rounds: dict[str, Any] = {"round": {"every": 2, "overlap": "round"},
                              "matched": {"every": 2, "sync": commlayer.optim.Outer(matched=True)}}.get(how, {})
    with commlayer.attach(wrapped, optimizer, plan=codec, **rounds) as session:
        if how == "matched" and home == 1:
            unheard(session, ODD // 2)
        for step in range(STEPS):
            if not end.begins(step):
                break
            given = slopes(home, step)
            if how == "counted" and home == SILENT:
                given = [torch.zeros_like(g) for g in given]
            if how == "slow" and (home, step) == (1, ODD):
                slow(session)
            made = session.inspect.connection
            try:
                model.breaks = how == "broken" and (home, step) == (1, ODD)
                wrapped(given).backward()
            except (ArithmeticError, StepAbandoned):
                optimizer.zero_grad()
                continue
            end.whole(step)
            worlds.append(dist.get_world_size())
            if how in ("killed", "slow"):
                x = torch.tensor([float(10**home)])
                dist.all_reduce(x)
                sums.append(x.item())
            for total, g in zip(put, given, strict=True):
                total += g.double() / made.world
            optimizer.step()
            optimizer.zero_grad()
        session.drain()
        applied = [-p.detach().double() for p in model.parts]
        owed = owed_of(made)
        told = {"home": home, "worlds": worlds, "rank": dist.get_rank(), "sums": sums, "said": session.inspect.decisions(),
                "weights": flat(applied), "put": flat(put), "owed": flat(owed), "steps": made.exchanges,
                "calls": model.calls.item()}
    print(json.dumps(told), flush=True)


def sampled(how: str, ends: str) -> None:
    """The same over commlayer's own sampler: says which samples it has trained."""
    import commlayer
    from commlayer.balance import Sampler

    home = int(os.environ["RANK"])
    end, model = End(home, how, ends), Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sampler, worlds = Sampler(DATA, batch=12), list[int]()
    with commlayer.attach(model, optimizer, plan=EXACT) as session:
        loader = torch.utils.data.DataLoader(range(DATA), batch_sampler=sampler)
        for step, batch in enumerate(sampler.follow(loader, session)):
            print(json.dumps({"step": step, "samples": batch.tolist() if sampler.samples else []}), flush=True)
            if not end.begins(step):
                break
            model(slopes(home, step)).backward()
            worlds.append(session.inspect.connection.world)
            optimizer.step()
            optimizer.zero_grad()
    print(json.dumps({"worlds": worlds}), flush=True)


def started(homes: Homes, count: int, least: int, *args: str) -> list[subprocess.Popen[str]]:
    homes.serve(count, "--min-workers", str(least))
    return [homes.run("launch", "--join", homes.address, "--node-rank", str(n), __file__, *args) for n in range(count)]


@pytest.mark.commit(1)
@pytest.mark.parametrize(("how", "victim"), [("killed", 0), ("ddp", 1)])
def test_a_home_is_killed_in_a_step_and_the_others_go_on_with_the_same_weights(homes: Homes, how: str, victim: int) -> None:
    wait_s = random.Random(how).uniform(0.0, 0.01)
    told = survivors(started(homes, 3, 2, EXACT, how, f"{victim}@4+{wait_s:.4f}"), {victim: KILLED})
    left = [home for home in range(3) if home != victim]
    worlds = told[0]["worlds"]
    assert worlds in ([3] * 4 + [2] * 8, [3] * 5 + [2] * 7), "dead in that step, or ahead of the next one"
    assert [(one["worlds"], one["rank"], one["steps"]) for one in told] == [(worlds, place, STEPS) for place in range(2)]
    assert [one["calls"] for one in told] == [STEPS] * 2
    assert f"worker {victim} is gone: 2 members continue" in "".join(told[0]["said"])
    assert told[0]["weights"] == told[1]["weights"] == reference(worlds, [[0, 1, 2], left])
    if how == "killed":
        assert told[0]["sums"] == told[1]["sums"]
        assert set(told[0]["sums"]) == {111.0, 110.0}, "those who are left add up what they have, in the old world, too"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_home_that_is_slow_to_get_results_of_the_dead_is_waited_for_by_scripts_too(homes: Homes, victim: int) -> None:
    """One has the step whole, and waits in the script's own collective for the other, which waits for results."""
    told = survivors(started(homes, 3, 2, EXACT, "slow", f"{victim}@{ODD}+0"), {victim: KILLED})
    left = [home for home in range(3) if home != victim]
    assert [one["worlds"] for one in told] == [[3] * (ODD + 1) + [2] * (STEPS - ODD - 1)] * 2
    assert told[0]["weights"] == told[1]["weights"] == reference(told[0]["worlds"], [[0, 1, 2], left])
    assert told[0]["sums"] == told[1]["sums"]


def test_a_step_that_one_home_breaks_off_while_another_dies_is_dropped_by_those_who_are_left(homes: Homes) -> None:
    told = survivors(started(homes, 3, 2, EXACT, "broken", f"0@{ODD}+0"), {0: KILLED})
    worlds = [3] * ODD + [2] * (STEPS - ODD - 1)
    assert [(one["worlds"], one["steps"]) for one in told] == [(worlds, len(worlds))] * 2
    assert told[0]["weights"] == told[1]["weights"]
    steps = [step for step in range(STEPS) if step != ODD]
    assert told[0]["weights"] == reference(worlds, [[0, 1, 2], [1, 2]], steps)


def test_a_round_of_local_steps_is_exchanged_again_by_those_who_are_left(homes: Homes) -> None:
    """In one of the rounds around the death; whose other steps are theirs alone, as those of the dead are."""
    told = survivors(started(homes, 3, 2, EXACT, "round", "0@5+0.001"), {0: KILLED})
    assert told[0]["weights"] == told[1]["weights"]
    assert told[0]["worlds"][-1] == 2
    weights, pair = torch.tensor(told[0]["weights"]), [0, 1, 2]
    found = [torch.tensor(reference([3] * first + [2] * (STEPS - first), [pair, pair[1:]])) for first in range(2, 9, 2)]
    assert any(torch.allclose(weights, one, atol=1e-4) for one in found)


def test_homes_die_one_after_the_other_until_too_few_are_left_and_then_all_stop_with_a_name(homes: Homes) -> None:
    every = started(homes, 4, 2, "topk(ratio=0.1)", "killed", "0@3+0.001 2@3+0.004 1@8+0.0")
    codes = [ended(process) for process in every]
    assert [code for code, _, _ in codes] == [KILLED, KILLED, KILLED, 1]
    assert re.search(r"^commlayer: worker 1: .*\b1\b.*min_workers \(2\).*\[E-PEER-LOST\]$", codes[3][2], re.MULTILINE)
    assert "worker 0" in codes[3][2]
    assert "worker 2" in codes[3][2]


def test_homes_that_leave_are_done_without_at_once(homes: Homes) -> None:
    """One with an error, one in order, with fewer batches than the others."""
    codes = [ended(process) for process in started(homes, 3, 1, EXACT, "leave", "0@4+1.0 2@8+0.0")]
    assert [code for code, _, _ in codes] == [1, 0, 0], [errors for _, _, errors in codes]
    one, other = codes[1][1][0], codes[2][1][0]
    assert one["worlds"] == [3] * 4 + [2] * 4 + [1] * 4
    assert other["worlds"] == [3] * 4 + [2] * 4
    groups = [[0, 1, 2], [1, 2], [1]]
    assert one["weights"] == reference(one["worlds"], groups)
    assert other["weights"] == reference(other["worlds"], groups, range(8))


def test_the_sampler_hands_out_again_what_a_home_was_given_that_is_gone(homes: Homes) -> None:
    codes = [ended(process) for process in started(homes, 3, 2, "sampler", "killed", "1@2+0.001")]
    assert [code for code, _, _ in codes] == [0, KILLED, 0], [errors for _, _, errors in codes]
    worlds = [rows.pop()["worlds"] for _, rows, _ in (codes[0], codes[2])]
    assert worlds[0] == worlds[1]
    trained = [row for home, (_, rows, _) in enumerate(codes) for row in rows if home != 1 or worlds[0][row["step"]] == 3]
    assert sorted(sample for row in trained for sample in row["samples"]) == list(range(DATA)), "each once"


if __name__ == "__main__":
    if sys.argv[1] == "sampler":
        sampled(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
