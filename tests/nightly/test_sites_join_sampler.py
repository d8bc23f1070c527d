"""A home that died is started again and joins, where the script follows commlayer's sampler. Run as a script: that training."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from typing import Any

import pytest
import torch
from support.elastic_sites import DECAY, KILLED, Given, flat, slopes
from support.sites import Homes, ended, let_in

LENGTH, BATCH, DEAD_AT, PAUSE_S = 120, 12, 3, 0.05
MORE = 70
"""Steps behind the one in which a home has come again; its part begins 64 behind that."""


def main(home: str, workers: str, *more: str) -> None:
    import commlayer
    from commlayer.balance import Sampler

    model = Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (group,) = optimizer.param_groups
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    sampler, last = Sampler(LENGTH, BATCH), sys.maxsize
    loader: Any = torch.utils.data.DataLoader(range(LENGTH), batch_sampler=sampler, num_workers=int(workers))  # type: ignore[arg-type]
    with commlayer.attach(model, optimizer, plan="topk(ratio=0.5)") as session:
        made, worlds, epoch = session.inspect.connection, list[int](), -1
        while epoch < last:  # as in a script that knows nothing of who joins
            epoch += 1
            sampler.set_epoch(epoch)
            for batch in sampler.follow(loader, session):
                print(json.dumps({"epoch": epoch, "step": session.step, "samples": batch.tolist() if sampler.samples else []}),
                      flush=True)
                if session.step == DEAD_AT and "victim" in more:
                    os.kill(os.getpid(), signal.SIGKILL)
                model(slopes(int(home), session.step)).backward()
                optimizer.step()
                optimizer.zero_grad()
                worlds.append(made.world)
                if last == sys.maxsize and worlds[-1] == 3 and (2 in worlds or "again" in more):
                    last = epoch + MORE // (LENGTH // BATCH)
                time.sleep(PAUSE_S)
            scheduler.step()
            if made.fresh:
                session.save_residuals("nowhere")  # behind an epoch that the others are through with
        told = {"worlds": worlds, "weights": flat([p.detach() for p in model.parts]), "rate": group["lr"],
                "rank": sampler.rank, "shares": sampler.announced[1]}
    print(json.dumps(told), flush=True)


pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_home_that_comes_again_has_its_share_of_the_samples_and_each_is_used_once(homes: Homes, workers: int) -> None:
    """Several epochs, and steps that have begun before somebody dies or comes. With loaders that draw ahead, too."""
    homes.serve(3, "--min-workers", "2")

    def start(home: int, *more: str) -> Any:
        return homes.run("launch", "--join", homes.address, "--node-rank", str(home), __file__, str(home), str(workers), *more)

    every = [start(0), start(1, "victim"), start(2)]
    code, dead, _ = ended(every[1])
    assert code == KILLED
    code, new, errors = let_in(lambda: start(1, "again"))
    assert code == 0, errors
    codes = [ended(every[home]) for home in (0, 2)]
    assert [code for code, _, _ in codes] == [0, 0], "\n".join(errors for _, _, errors in codes)
    rows = [new, *(rows for _, rows, _ in codes)]
    told = [each.pop() for each in rows]
    assert told[0]["weights"] == told[1]["weights"] == told[2]["weights"]
    assert {json.dumps(one["shares"]) for one in told} == {json.dumps({"0": 4, "2": 4, "3": 4})}
    assert [one["rank"] for one in told] == [3, 0, 2]
    assert len({one["rate"] for one in told}) == 1, "a scheduler of epochs has caught up where the script has gone through them"
    trained: dict[int, Counter[int]] = {}
    for row in (*(row for each in rows for row in each), *(row for row in dead if row["step"] < DEAD_AT)):
        trained.setdefault(row["epoch"], Counter()).update(row["samples"])
    assert len(trained) > MORE // (LENGTH // BATCH)
    assert all(epoch == Counter(range(LENGTH)) for epoch in trained.values())
    first = new[0]["step"]
    assert [len(row["samples"]) for row in new[:64]] == [0] * 64
    assert any(row["samples"] for row in new), f"it has come in step {first}, and has a part 64 steps later"


if __name__ == "__main__":
    main(*sys.argv[1:])
