"""Homes under the automatic plan, of which one is killed: what is measured afterwards. Run as a script: that training."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import time

import torch
from msgspec import structs
from support.sites import Homes, ended
from torch import nn

SLEEP_S, EVERY, ROUNDS = 0.004, 16, 24
HOMES, VICTIM, AT = 3, 2, 5 * EVERY


def main() -> None:
    import commlayer
    from commlayer.engine.observers import ObserverOrder

    home = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    verdicts, times = [], []
    with commlayer.attach(model, optimizer, exact=False) as session:
        made = session.inspect.connection
        for step in range(ROUNDS * EVERY):
            if step == 1:  # what a search finds on slow links only
                commlayer.switch(session, structs.replace(made.plan, codes="updates", local_steps=EVERY, overlap="round"))
            if step == AT:
                made.terms.auto = True
                if home == VICTIM:
                    os.kill(os.getpid(), signal.SIGKILL)
            if step % EVERY == 0:
                times.append(time.perf_counter())
            x = torch.randn(8, 12)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x[:, :3])
            time.sleep(SLEEP_S)
            loss.backward()
            optimizer.step()
        for auto in session.inspect.observers.at(ObserverOrder.CONTROLLER):
            verdicts += [(found.measured_s, found.priced_s) for found in auto.settle(30.0)]
        round_s = statistics.median(after - before for before, after in itertools.pairwise(times[AT // EVERY + 2 :]))
        print(json.dumps({"verdicts": verdicts, "round_s": round_s, "said": session.inspect.decisions()}), flush=True)


def test_after_a_home_is_lost_under_overlapped_local_steps_a_step_is_measured_as_one_step(homes: Homes) -> None:
    homes.serve(HOMES, "--min-workers", str(HOMES - 1))
    every = [homes.run("launch", "--join", homes.address, "--node-rank", str(n), __file__) for n in range(HOMES)]
    codes = [ended(process) for process in every]
    assert [code for code, _, _ in codes] == [0, 0, 128 + signal.SIGKILL], [errors for _, _, errors in codes]
    (told,) = codes[0][1]
    assert any("2 members continue" in one for one in told["said"])
    assert told["verdicts"], told["said"]
    measured_s, priced_s = told["verdicts"][0]
    assert SLEEP_S <= measured_s < 0.5 * told["round_s"], "no whole round"
    assert priced_s >= SLEEP_S, "computing is in the price"


if __name__ == "__main__":
    main()
