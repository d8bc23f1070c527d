"""Homes that are killed, and come, while they step locally over commlayer's sampler. Run as a script: that training."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.elastic_sites import EXACT, KILLED, Death
from support.sites import Homes, ended, let_in
from torch import nn

LENGTH, BATCH, HOMES, EVERY, VICTIM, NEW = 120, 12, 3, 4, 1, 3
STEPS = LENGTH // BATCH
"""Of an epoch, as long as all are there. No multiple of EVERY."""
LONG = 5 * STEPS
PLANES, PAUSE_S = 500, 0.05
"""Where a home joins: so many epochs it has to come in."""
SOON, MORE = 2, 8
"""So many steps behind the one in which a home has come another one dies, and so many epochs they all go on."""


class Marks(nn.Module):
    """By epoch, home and sample, what that home has made of that sample: where it is not zero, all have learnt from it."""

    def __init__(self, home: int, epochs: int) -> None:
        super().__init__()
        self.home, self.marks = home, nn.Parameter(torch.zeros(epochs, HOMES + 1, LENGTH))

    def forward(self, epoch: int, samples: torch.Tensor) -> torch.Tensor:
        return -self.marks[epoch, self.home, samples].mean()


def main(how: str, deaths: str, directory: str, number: str) -> None:
    import commlayer
    from commlayer.balance import Sampler

    home, joins = int(number), "joined" in how
    death, model = Death(home, deaths), Marks(home, PLANES if joins else 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sampler = Sampler(LENGTH, BATCH)
    loader: Any = torch.utils.data.DataLoader(range(LENGTH), batch_sampler=sampler)  # type: ignore[arg-type]
    worlds, last, come = list[int](), PLANES - 1 if joins else 1, sys.maxsize
    every, overlap = LONG if "long" in how else EVERY, None if "local" in how else "round"
    with commlayer.attach(model, optimizer, plan=EXACT, every=every, overlap=overlap) as session:
        made, epoch = session.inspect.connection, -1
        while epoch < last:
            epoch += 1
            sampler.set_epoch(epoch)
            for batch in sampler.follow(loader, session):
                worlds.append(made.world)
                # It comes in a step, at whose end the others hear of it.
                if joins and come == sys.maxsize and (len(worlds) == 2 if home == NEW else worlds[-1] > min(worlds)):
                    come, last = session.step, epoch + MORE
                dies = death.silent and session.step == death.step
                if dies and death.place != "step":
                    death.arm(made, directory)
                elif dies or (session.step == come + SOON and home == HOMES - 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                print(json.dumps({"epoch": epoch, "samples": batch.tolist() if sampler.samples else []}), flush=True)
                (model(epoch, batch) * sampler.fraction).backward()
                optimizer.step()
                optimizer.zero_grad()
                if joins:
                    time.sleep(PAUSE_S)
                elif session.step % STEPS == 6:
                    session.save_residuals(directory)
        marks = model.marks.detach()[: last + 1]
        told = {"marks": marks.ne(0).int().tolist(), "sums": marks.sum(1).tolist(), "world": made.world,
                "shares": sampler.announced[1]}
    print(json.dumps(told), flush=True)


def started(homes: Homes, directory: Path, home: int, how: str, deaths: str = "") -> Any:
    place = VICTIM if home == NEW else home
    return homes.run("launch", "--join", homes.address, "--node-rank", str(place), __file__, how, deaths, str(directory),
                     str(home))


def each_once(left: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """By what those say who are left, which is the same: given."""
    told = [rows.pop() for rows in left]
    assert told[0] == told[1]
    learnt = torch.tensor(told[0]["marks"])
    assert (learnt.sum(1) == 1).all(), "each sample of each epoch is in weights that all have, of one home"
    for epoch in range(len(learnt)):
        seen = [sample for rows in left for row in rows if row["epoch"] == epoch for sample in row["samples"]]
        assert len(seen) == len(set(seen)), "and by nobody twice"
    return told[0]


@pytest.mark.parametrize(("how", "deaths"), [
    ("local", f"{VICTIM}@7:step:1"),
    ("round", f"{VICTIM}@7:step:1"),
    ("round", f"{VICTIM}@5:gather:1"),  # in a save, between two exchanges
    ("local", f"{VICTIM}@{STEPS - 1}:exchange:1"),  # at an epoch's end, ahead of the exchange of its last steps
    ("round", f"{VICTIM}@{STEPS - 1}:exchange:2"),  # and between the two of overlapped rounds
])
def test_what_a_home_has_stepped_through_and_not_shared_is_learnt_from_others(
    homes: Homes, tmp_path: Path, how: str, deaths: str,
) -> None:
    homes.serve(HOMES, "--min-workers", "2")
    codes = [ended(process) for process in [started(homes, tmp_path, n, how, deaths) for n in range(HOMES)]]
    assert [code for code, _, _ in codes] == [KILLED if n == VICTIM else 0 for n in range(HOMES)], [e for _, _, e in codes]
    told = each_once([rows for n, (_, rows, _) in enumerate(codes) if n != VICTIM])
    assert told["world"] == HOMES - 1
    tried = {sample for row in codes[VICTIM][1] for sample in row["samples"]}
    learnt = torch.tensor(told["marks"])[:, VICTIM]
    learnt_of_it = {int(sample) for sample in learnt[0].nonzero()}
    assert learnt_of_it <= tried
    if ":exchange:2" not in deaths:  # else all was on its way
        assert learnt_of_it != tried, "some of what it had stepped through went out again"
    assert not learnt[1].any()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["joined, local", "joined, round", "joined, long local", "joined, long round"])
def test_a_home_that_comes_into_local_steps_knows_what_is_lost_with_another_that_dies_soon(
    homes: Homes, tmp_path: Path, how: str,
) -> None:
    homes.serve(HOMES, "--min-workers", "2")
    every = [started(homes, tmp_path, n, how, f"{VICTIM}@7:step:1") for n in range(HOMES)]
    assert ended(every[VICTIM])[0] == KILLED
    code, new, errors = let_in(lambda: started(homes, tmp_path, NEW, how))
    assert code == 0, errors
    assert ended(every[2])[0] == KILLED
    code, old, errors = ended(every[0])
    assert code == 0, errors
    told = each_once([old, new])
    assert told["shares"] == {"0": BATCH // 2, str(NEW): BATCH // 2}
    assert torch.tensor(told["marks"])[:, NEW].any()


if __name__ == "__main__":
    main(*sys.argv[1:])
