"""Sites die and join while they train with commlayer's sampler: each sample is learnt once. Run as a script: that training."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.site_job import EXACT, Event, Faults, Script
from support.sites import KILLED, Ended, Sites, all_ended, ended, joined
from torch import nn

pytestmark = pytest.mark.timeout(300)
LENGTH, BATCH, SITES, VICTIM, NEW = 120, 12, 3, 1, 3
STEPS = LENGTH // BATCH
"""Steps of an epoch while all sites are there."""
EPOCHS, PAUSE_S = 500, 0.05
"""Where a site joins: the number of epochs in which it has to."""
FRAGMENTED = 1 << 16
"""Elements of a model whose overlapped local steps go in fragments."""
SECOND_DEATH, MORE = 2, 8
"""After a site has joined: the step in which another one dies, and the remaining epochs."""


class Marks(nn.Module):
    """One weight for each epoch, site and sample. It is not zero if that site has trained on that sample, and all know it."""

    def __init__(self, site: int, epochs: int) -> None:
        super().__init__()
        self.site, self.marks = site, nn.Parameter(torch.zeros(epochs, SITES + 1, LENGTH))
        self.rest = nn.Parameter(torch.zeros(FRAGMENTED))

    def forward(self, epoch: int, samples: torch.Tensor) -> torch.Tensor:
        return 0.0 * self.rest.sum() - self.marks[epoch, self.site, samples].mean()


class Case(msgspec.Struct, frozen=True):
    every: int = 1
    overlap: bool = False
    death: Event = Event(VICTIM, 7)
    joins: bool = False
    second_death: bool = False
    workers: int = 0
    """Of the DataLoader, which read batches before they are needed."""
    folder: str = ""


def main(site: int, case: Case) -> None:
    import commlayer
    from commlayer.balance import Sampler

    faults = Faults(site, Script(events=(case.death,)))
    faults.install()
    model = Marks(site, EPOCHS if case.joins else 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
    sampler = Sampler(LENGTH, BATCH)
    loader: Any = torch.utils.data.DataLoader(range(LENGTH), batch_sampler=sampler, num_workers=case.workers)
    worlds, last, arrival, epoch = list[int](), EPOCHS - 1 if case.joins else 1, sys.maxsize, -1
    sync = commlayer.LocalSteps(case.every, overlap=case.overlap) if case.every > 1 else None
    with commlayer.attach(model, optimizer, compression=EXACT, sync=sync) as session:
        connection = session.inspect.context
        while epoch < last:
            epoch += 1
            sampler.set_epoch(epoch)
            for batch in sampler.follow(loader, session):
                worlds.append(connection.world)
                # A site joins in a step, and the others learn it at that step's end.
                if case.joins and arrival == sys.maxsize and (len(worlds) == 2 if site == NEW else worlds[-1] > min(worlds)):
                    arrival, last = session.step, epoch + MORE
                faults.begin(session.step)
                faults.due("start")
                if case.second_death and session.step == arrival + SECOND_DEATH and site == SITES - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                print(json.dumps({"epoch": epoch, "samples": batch.tolist() if sampler.samples else []}), flush=True)
                (model(epoch, batch) * sampler.fraction).backward()
                optimizer.step()
                optimizer.zero_grad()
                if case.joins:
                    time.sleep(PAUSE_S)
                elif session.step % STEPS == 6:
                    session.checkpoint(case.folder, model=False)
            scheduler.step()
        marks = model.marks.detach()[: last + 1]
        report = {"marks": marks.ne(0).int().tolist(), "sums": marks.sum(1).tolist(), "world": connection.world,
                  "shares": sampler.announced[1], "rate": optimizer.param_groups[0]["lr"]}
    print(json.dumps(report), flush=True)


def start(sites: Sites, case: Case, site: int) -> Any:
    return sites.launch(__file__, str(site), msgspec.json.encode(case).decode(), rank=VICTIM if site == NEW else site)


def learnt_once(case: Case, ends: list[Ended], *dead: Ended) -> dict[str, Any]:
    """Checks the remaining sites' reports, which are equal; returns one.

    The last exchange of a dead site counts. If the row that says so is lost with it, the others train on its samples again.
    """
    reports = [end.rows.pop() for end in ends]
    assert all(one == reports[0] for one in reports)
    marks = torch.tensor(reports[0]["marks"])
    assert (marks.sum(1) >= 1).all(), "each sample of each epoch is in the weights"
    again = {(int(epoch), int(sample)) for epoch, sample in (marks.sum(1) > 1).nonzero()}
    lost = [{(row["epoch"], sample) for row in end.rows[-2 * case.every :] for sample in row["samples"]} for end in dead]
    assert again <= set().union(*lost), "all others are there from one site"
    assert marks.sum(1).max() <= 2
    assert all(len(again & of) <= case.every * BATCH // 2 for of in lost), "of one exchange"
    for epoch in range(len(marks)):
        samples = [sample for end in ends for row in end.rows if row["epoch"] == epoch for sample in row["samples"]]
        assert len(samples) == len(set(samples)), "no two of the remaining sites trained on it"
    return reports[0]


@pytest.mark.parametrize("case", [
    Case(death=Event(VICTIM, 2, after_s=0.001)),
    Case(every=4), Case(every=4, overlap=True),
    Case(every=4, overlap=True, death=Event(VICTIM, 5, at="gather_all")),  # in a save, after the exchange that it begins with
    Case(every=4, death=Event(VICTIM, STEPS - 1, at="exchange")),  # at an epoch's end, before its last steps are exchanged
    Case(every=4, overlap=True, death=Event(VICTIM, STEPS - 1, at="exchange", number=2)),  # between the two exchanges there
], ids=["steps", "local", "overlapped", "save", "epoch's end", "epoch's end, overlapped"])
def test_unshared_samples_of_a_dead_site_are_trained_by_others(sites: Sites, tmp_path: Path, case: Case) -> None:
    case = msgspec.structs.replace(case, folder=str(tmp_path))
    sites.serve(SITES, "--min-workers", "2")
    ends = all_ended([start(sites, case, site) for site in range(SITES)], 0, KILLED, 0)
    report = learnt_once(case, [ends[0], ends[2]], ends[VICTIM])
    assert report["world"] == SITES - 1
    tried = {sample for row in ends[VICTIM].rows for sample in row["samples"]}
    marks = torch.tensor(report["marks"])[:, VICTIM]
    shared = {int(sample) for sample in marks[0].nonzero()}
    assert shared <= tried
    if case.every > 1 and case.death.at != "gather_all" and case.death.number == 1:  # otherwise all were exchanged
        assert shared != tried, "the others repeat some of its samples"
    assert not marks[1].any()


@pytest.mark.parametrize("case", [
    Case(joins=True), Case(joins=True, workers=2),
    *(Case(every, overlap, joins=True, second_death=True) for every in (4, 5 * STEPS) for overlap in (False, True)),
], ids=lambda case: f"{case.every}{'*' * case.overlap}, {case.workers} workers")
def test_joining_site_gets_its_share_and_each_sample_is_learnt_once(sites: Sites, case: Case) -> None:
    """Under local steps another site dies soon after, and the new one knows which samples are lost with it."""
    sites.serve(SITES, "--min-workers", "2")
    processes = [start(sites, case, site) for site in range(SITES)]
    victim = ended(processes[VICTIM])
    assert victim.code == KILLED
    new = joined(lambda: start(sites, case, NEW))
    assert new.code == 0, new.errors
    ends = all_ended([processes[0], processes[2]], 0, KILLED if case.second_death else 0)
    dead = [victim, *(end for end in ends if end.code)]
    report = learnt_once(case, [end for end in (new, *ends) if not end.code], *dead)
    assert report["shares"] == ({"0": BATCH // 2, str(NEW): BATCH // 2} if case.second_death else {"0": 4, "2": 4, str(NEW): 4})
    assert torch.tensor(report["marks"])[:, NEW].any()


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Case))
