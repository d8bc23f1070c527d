"""Homes whose coordinator is killed and started again with its journal go on. Run as a script: a training of such homes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.coordinators import Failures, all_opened, quick, until  # noqa: F401  (a fixture)
from support.keys import Folders, made_folders  # noqa: F401  (a fixture)
from support.sites import WAIT_S, Homes, ended

from commlayer.cluster import client, messages
from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.coordinator_journal import NAME, CoordinatorJournal
from commlayer.cluster.site_client import KvClient, SiteLease

KILLS = 2
BEHIND = 3
"""So many steps are made in any case, ahead of the first kill and behind the last one."""


def main(trains: str, meets: str) -> None:
    """Trains until that file is there, with a collective in each step; then more collectives, until the other one is."""
    import torch
    import torch.distributed as dist
    from support.attached import data, mlp
    from support.site_training import digest
    from torch import nn

    import commlayer

    rank = int(os.environ["RANK"])
    model: Any = mlp(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlayer.attach(model, optimizer, plan="topk(ratio=0.1)"):
        step, left = 0, BEHIND

        def over(flag: str) -> bool:
            """Alike in all homes."""
            there = torch.tensor([float(Path(flag).exists())])
            dist.all_reduce(there)
            return there.item() > 0

        while left:
            x, y = data(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            left -= over(trains)
            print(json.dumps({"step": step}), flush=True)
    while not over(meets):
        print(json.dumps({"behind": True}), flush=True)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    dist.barrier()
    print(json.dumps({"sha": digest(model.parameters()), "sum": total.item(), "steps": step}), flush=True)


class Served:
    """`commlayer serve` as one process, or as two: a coordinator alone, and its server; each with a journal of its own."""

    def __init__(self, homes: Homes, folder: Path, *, together: bool) -> None:
        self._homes, self._folder = homes, folder
        self._sums = () if together else ("--no-server", "--servers", "1")
        self.process = self.start()
        if not together:
            homes.run("serve", "--join", homes.address, "--journal", str(folder / "server"))

    def start(self) -> subprocess.Popen[str]:
        before = self._homes.address
        self.process = self._homes.serve(2, "--journal", str(self._folder / "coordinator"), *self._sums)
        assert before in ("", self._homes.address)
        return self.process


def steps_of(process: subprocess.Popen[str], told: list[int]) -> threading.Thread:
    """Follows what it prints; the last line stays."""
    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            told.append(json.loads(line))  # noqa: PERF401  (as they come)

    thread = threading.Thread(target=follow)
    thread.start()
    return thread


@pytest.mark.parametrize(("together", "least"), [(True, "1"), (False, "0")], ids=["with its server", "apart"])
def test_homes_train_on_and_meet_behind_it(together: bool, least: str, homes: Homes, tmp_path: Path) -> None:
    homes.set(COMMLAYER_MIN_WORKERS=least)
    served, flags = Served(homes, tmp_path, together=together), [tmp_path / "trained", tmp_path / "met"]
    both = [homes.run("launch", "--join", homes.address, __file__, *map(str, flags)) for _ in range(2)]
    told: list[list[Any]] = [[], []]
    threads = [steps_of(process, rows) for process, rows in zip(both, told, strict=True)]

    def go_on(steps: int) -> None:
        """Both homes have made so many more."""
        before = [len(rows) for rows in told]

        def further() -> bool:
            assert all(process.poll() is None for process in both), [p.communicate()[1] for p in both if p.poll() is not None]
            return all(len(rows) >= n + steps for rows, n in zip(told, before, strict=True))

        until(further, "they go on", WAIT_S)

    def killed() -> None:
        served.process.kill()
        served.process.communicate(timeout=WAIT_S)
        served.start()
        go_on(BEHIND)

    go_on(BEHIND)
    for _ in range(KILLS):
        killed()
    flags[0].touch()
    while not all("behind" in rows[-1] for rows in told):
        go_on(1)
    killed()
    flags[1].touch()
    for process, thread in zip(both, threads, strict=True):
        thread.join(WAIT_S)
        assert process.wait(WAIT_S) == 0, process.stderr and process.stderr.read()
    last = [rows[-1] for rows in told]
    assert last[0]["sha"] == last[1]["sha"]
    assert [one["sum"] for one in last] == [3.0, 3.0]
    assert last[0]["steps"] == last[1]["steps"] >= (KILLS + 2) * BEHIND
    code, _, errors = ended(served.process)
    assert code == 0, errors
    assert "resumed a running job of 2 workers" in errors
    assert [path.name for path in (tmp_path / "coordinator").iterdir()] == (["lock"] if together else []), "the job is over"


# ---- what homes ask, in one process


class Restarted:
    """A coordinator here. A process holds its journal's folder to its end, so each one has a copy of the last."""

    def __init__(self, folder: Path, opened: list[Any], **settings: Any) -> None:
        self._folder, self._settings, self._number = folder, settings, 0
        self.coordinator = self._made(0)
        opened.append(self)

    def _made(self, port: int) -> Coordinator:
        journal = CoordinatorJournal(str(self._folder / f"{self._number}"))
        made = Coordinator(quick(port=port, reconnect_s=WAIT_S, **self._settings), workers=3, journal=journal)
        self._began_s = time.monotonic()  # behind what it has taken up as heard
        return made

    def kill(self) -> None:
        """As nearly as may be: whoever asked gets no answer, and nobody hears of it."""
        copied = self._folder / f"{self._number + 1}"
        shutil.copytree(self._folder / f"{self._number}", copied)
        self.coordinator.close()

    def start(self) -> None:
        self._number += 1
        self.coordinator = self._made(int(self.coordinator.address.rpartition(":")[2]))

    def heard(self) -> None:
        """Each worker who is here has been, by this one: what it says once is not said to nobody."""
        until(lambda: all(p.seen_s > self._began_s for p in self.coordinator._state.registrations.values() if p.present),
              "all are heard")

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in (self._folder / f"{self._number}").iterdir())

    def close(self) -> None:
        self.coordinator.close()


class Home:
    """One of a worker. Its own settings wait as long as a test does."""

    def __init__(self, address: str, opened: list[Any], config: Any, name: str) -> None:
        self._attendance = SiteLease(address, config, messages.site_request(1, name=name), lambda _: None)
        self.seat = self._attendance.meet(WAIT_S)
        self._desk = KvClient(address, config, self._attendance.request.home)
        self._address, self._config, self._opened = address, config, opened
        opened.append(self)

    def join(self) -> client.Membership:
        request = messages.worker_request("job", self.seat.first, self.seat.world, plan=b"a plan", elastic=True)
        member = client.join(self._address, request, self._config, Failures())
        self._opened.append(member)
        return member

    def ask(self, **asked: Any) -> messages.KvReply:
        return self._desk.request(time.monotonic() + WAIT_S, **asked)

    @property
    def ended(self) -> str:
        return self._attendance.why

    def close(self) -> None:
        self._desk.close()
        self._attendance.close("the test is over")


@pytest.mark.parametrize("keys", [False, True], ids=["plain", "TLS"])
def test_what_is_under_way_goes_on_and_who_comes_later_is_let_in(
        keys: bool, folders: Folders, opened: list[Any], tmp_path: Path) -> None:
    server, worker = ({"keys": str(folder), "token": "secret-of-this-test"} if keys else {}
                      for folder in (folders.server, folders.worker))
    config = quick(reconnect_s=WAIT_S, **worker)
    served = Restarted(tmp_path, opened, min_workers=2, **server)
    address = served.coordinator.address
    with ThreadPoolExecutor(3) as pool:
        every = list(pool.map(lambda name: Home(address, opened, config, name), "abc"))
        every.sort(key=lambda home: home.seat.first)
        members = list(pool.map(Home.join, every))
        assert served.files[0] == NAME
        every[0].ask(put=[("group/0/0", bytes(160 << 10))], add=("count", 1))
        waits = [pool.submit(home.ask, want=[("group/1/2", 2)], add=("count", 1)) for home in every[:2]]
        until(lambda: every[2].ask(want=[("count", messages.ANY)]).values == (b"3",), "both have added")
        served.kill()
        late = pool.submit(every[2].ask, put=[("group/1/2", b"at last")], add=("count", 1))
        served.start()
        assert late.result(WAIT_S).sum == 4
        assert [wait.result(WAIT_S).values for wait in waits] == [(b"at last",)] * 2
    served.heard()
    assert every[1].ask(want=[("group/0/0", 0), ("count", messages.ANY)]).values == (bytes(160 << 10), b"4")
    members[2].leave("it breaks off")
    every[2].close()
    newcomer = Home(address, opened, config, "d")
    assert (newcomer.seat.first, newcomer.seat.world, newcomer.seat.joins) == (3, 3, True)
    served.kill()
    served.start()
    members.append(newcomer.join())
    assert [member.rank for member in members[-1].view.members] == [0, 1, 3]
    assert newcomer.ask(want=[("count", messages.ANY)]).values == (b"4",)
    assert [home.ended for home in (*every[:2], newcomer)] == [""] * 3
    served.heard()
    for member in (*members[:2], members[3]):
        member.leave()
    for home in (*every[:2], newcomer):
        home.close()
    assert served.coordinator.over.wait(WAIT_S)
    served.close()
    assert served.files == [], "the job is over"


if __name__ == "__main__":
    main(*sys.argv[1:])
