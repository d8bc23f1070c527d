"""After any crash during a checkpoint, all ranks can load the previous or the new one completely.

Real ranks and two servers. At each file operation of a save a rank's directory is copied, as a crash there would leave it, also
with unsynced files cut in half. Then every pair of copies that two ranks can have at one time is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from support.attached import Run, Setting, loss_of, mlp
from support.rank_pool import PoolError, Servers, pool

from commlayer.engine.checkpoints import checkpoint, checkpoint_files
from commlayer.errors import find_error_code

WORLD, SERVERS = 2, 2
TOPK = "topk(ratio=0.05, values='int8', exact=False)"
Kept = dict[str, torch.Tensor]


class Job:
    """A model that trains; what its worker and its servers keep back."""

    def __init__(self, rank: int, where: Setting) -> None:
        self.run, self.model = Run(rank, WORLD, where), mlp(width=24)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.run.wrap(self.model, optimizer=self.optimizer)
        self.session = self.run.sessions[0]

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss_of(self.run, self.model, step).backward()
            self.optimizer.step()

    def kept(self) -> Kept:
        connection = self.session.inspect.context
        state = checkpoint.worker_state(connection)
        tensors: Kept = {"step": torch.tensor(state["step"]), **{n: t.clone() for n, t in state["tensors"].items()}}
        tensors |= {f"model.{name}": t.clone() for name, t in self.model.state_dict().items()}
        for server in range(SERVERS):
            for bucket in connection.plan.buckets:
                if bucket.server == server and server % WORLD == self.run.rank:
                    data = safetensors.torch.load(connection.uplink.fetch_state(server, bucket.id, 0))
                    tensors |= {f"server {server} {bucket.id}.{name}": tensor for name, tensor in data.items()}
        dist.barrier()  # no rank begins a step while others fetch the last one's state from servers
        return tensors


def setting(servers: Servers) -> Setting:
    return Setting("module", (servers.address,), TOPK, servers=SERVERS)


def equal(a: Kept, b: Kept) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


OPERATIONS = [(os, "mkdir"), (os, "fsync"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (Path, "write_bytes"),
              (safetensors.torch, "save_file")]


@contextlib.contextmanager
def before_each(action: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Calls action(name, arguments) in front of every operation that changes files."""
    inside = [False]

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not inside[0]:
                inside[0] = True
                try:
                    action(name, args)
                finally:
                    inside[0] = False
            return real(*args, **kwargs)
        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, wrapped(name, getattr(owner, name)))
        yield


class Crash(NamedTuple):
    """A copy of one rank's directory, and between which meetings of the ranks it was taken."""

    phase: int
    copy: str


def recorded_save(job: Job, directory: str, copies: str) -> list[Crash]:
    """Saves a checkpoint; records the files that a crash before each operation, and after the last, would leave."""
    results: list[Crash] = []
    phase = [0]

    def record(name: str, args: tuple[Any, ...]) -> None:
        at = f"{copies}/{len(results)}"
        shutil.copytree(directory, at)
        results.append(Crash(phase[0], at))
        written = Path(os.readlink(f"/proc/self/fd/{args[0]}")) if name == "fsync" else None
        if written is not None and written.is_file():
            torn = f"{copies}/{len(results)}"
            shutil.copytree(directory, torn)
            file = Path(torn) / written.relative_to(Path(directory).resolve())
            os.truncate(file, file.stat().st_size // 2)
            results.append(Crash(phase[0], torn))

    together = checkpoint.all_or_none  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def counted(*args: Any) -> Iterator[None]:
        with together(*args):
            yield
        phase[0] += 1

    with pytest.MonkeyPatch.context() as patch, before_each(record):
        patch.setattr(checkpoint, "all_or_none", counted)
        job.session.checkpoint(directory)
    record("end", ())
    return results


def everyones(crashes: list[Crash]) -> list[list[Crash]]:
    rows: list[Any] = [None] * WORLD
    dist.all_gather_object(rows, crashes)
    return rows


def crash_everywhere(rank: int, where: Setting, folder: str) -> tuple[int, int, list[str]]:
    """How many crashes left the old save, how many the new one, and what went wrong."""
    job = Job(rank, where)
    own = f"{folder}/disk-{rank}"
    job.train(0, 2)
    old = job.kept()
    job.session.checkpoint(own)
    job.train(2, 3)
    new = job.kept()
    assert not equal(old, new)
    rows = everyones(recorded_save(job, own, f"{folder}/copies-{rank}"))
    taken, wrong = [0, 0], []
    for i, j in [(i, j) for i in rows[0] for j in rows[1] if i.phase == j.phase]:
        shared = f"{folder}/shared-{Path(i.copy).name}-{Path(j.copy).name}"
        if rank == 0:
            shutil.copytree(i.copy, shared)
            shutil.copytree(j.copy, shared, dirs_exist_ok=True)
        dist.barrier()
        for place in ((i, j)[rank].copy, shared):
            try:
                job.session.resume(place)
            except Exception as error:
                wrong.append(f"{place}: {error}")
                continue
            now = job.kept()
            taken[0] += equal(now, old)
            taken[1] += equal(now, new)
            if not equal(now, old) and not equal(now, new):
                wrong.append(f"{place}: neither the old nor the new state")
    job.run.close()
    return taken[0], taken[1], wrong


def test_crash_at_any_point_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(crash_everywhere, setting(servers), str(tmp_path))
    for old, new, wrong in results:
        assert wrong == []
        assert (old, new) == results[0][:2], "all ranks take the same one"
        assert old > 100
        assert new > 50


def fail_everywhere(rank: int, where: Setting, folder: str) -> list[str]:
    """Each operation of each rank fails once, as on a full disk; what went wrong. The second disk is shared."""
    job, wrong = Job(rank, where), []
    for place in (f"{folder}/disk-{rank}", f"{folder}/shared"):
        counted: list[int] = [0]

        def count(*_: Any, counted: list[int] = counted) -> None:
            counted[0] += 1

        job.session.checkpoint(place)
        with before_each(count):
            job.session.checkpoint(place)
        for victim, operations in enumerate([row[0] for row in everyones([Crash(counted[0], "")])]):
            for at in range(operations[0]):
                left, before, present = [at if rank == victim else -1], job.kept(), checkpoint_files.numbers(Path(place))

                def fail(name: str, args: tuple[Any, ...], left: list[int] = left) -> None:
                    left[0] -= 1
                    if left[0] == -1:
                        raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))

                failed = ""
                try:
                    with before_each(fail):
                        job.session.checkpoint(place)
                except (OSError, ValueError) as error:
                    failed = str(error)
                failures: list[Any] = [None] * WORLD
                dist.all_gather_object(failures, failed)
                if len({bool(f) for f in failures}) > 1:
                    wrong.append(f"{at}: {failures}")
                other = f"rank {victim}:" in failed and find_error_code(failed) == "E-OTHER-RANK"
                if failed and "No space left" not in failed and not other:
                    wrong.append(f"{at}: {failed}")
                if not equal(before, job.kept()):
                    wrong.append(f"{at}: the failed save changed the state")
                if failed and checkpoint_files.numbers(Path(place)) != present:
                    wrong.append(f"{at}: left {os.listdir(place)}")
                job.session.resume(place)
        job.session.checkpoint(place)
        dist.barrier()
        if len(os.listdir(place)) != 1:
            wrong.append(f"the last save left {os.listdir(place)}")
    job.train(0, 2)
    job.run.close()
    return wrong


def test_full_disk_at_any_point_fails_on_all_ranks_without_effect(tmp_path: Path) -> None:
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(fail_everywhere, setting(servers), str(tmp_path))
    assert results == [[]] * WORLD


def killed(rank: int, where: Setting, folder: str, victim: int, operation: str, file: str) -> None:
    job = Job(rank, where)
    for step in range(2):
        job.train(step, step + 1)
        torch.save(job.kept(), f"{folder}/kept-{step}-{rank}.pt")
        dist.barrier()
        if step == 0:
            job.session.checkpoint(f"{folder}/save")

    def kill(name: str, args: tuple[Any, ...]) -> None:
        if rank == victim and name == operation and str(args[-1]).endswith(file):
            os.kill(os.getpid(), signal.SIGKILL)

    with before_each(kill):
        job.session.checkpoint(f"{folder}/save")


def which(rank: int, where: Setting, folder: str) -> list[bool]:
    job = Job(rank, where)
    job.session.resume(f"{folder}/save")
    now = job.kept()
    job.run.close()
    return [equal(now, torch.load(f"{folder}/kept-{step}-{rank}.pt", weights_only=True)) for step in range(2)]


@pytest.mark.parametrize(("victim", "operation", "file", "loads"), [
    pytest.param(1, "fsync", "", 0, id="rank 1 while it writes"),
    pytest.param(0, "replace", "save-2/manifest.json", 0, id="rank 0 before it counts"),
    pytest.param(0, "unlink", "save-1/manifest.json", 1, id="rank 0 while it tidies up"),
])
def test_rank_killed_during_a_checkpoint(victim: int, operation: str, file: str, loads: int, tmp_path: Path) -> None:
    with Servers(WORLD, SERVERS) as servers, pytest.raises(PoolError, match=f"rank {victim}: EOFError"):
        pool(WORLD).call(killed, setting(servers), str(tmp_path), victim, operation, file)
    with Servers(WORLD, SERVERS) as servers:
        assert pool(WORLD).call(which, setting(servers), str(tmp_path)) == [[loads == 0, loads == 1]] * WORLD


def mixtures(rank: int, where: Setting, folder: str) -> tuple[list[str], list[str]]:
    """The errors of resume() for ranks with different checkpoints, and its decisions where one rank has none."""
    job = Job(rank, where)
    for name in ("first", "second", "same-step"):
        if name != "same-step":
            job.train(0, 1)
        job.session.checkpoint(f"{folder}/{name}/{rank}")
    errors = []
    for place in (f"{folder}/{('first', 'second')[rank]}/{rank}", f"{folder}/{('second', 'same-step')[rank]}/{rank}"):
        with pytest.raises(ValueError, match="do not belong to one training") as caught:
            job.session.resume(place)
        errors.append(str(caught.value))
    assert job.session.resume(f"{folder}/{('first', 'nowhere')[rank]}/{rank}")
    decisions = job.session.inspect.decisions()
    job.train(0, 1)
    job.session.checkpoint(f"{folder}/shared")
    job.session.checkpoint(f"{folder}/shared")
    job.run.close()
    return errors, decisions


def test_mixed_checkpoints_are_refused_and_missing_files_are_named(tmp_path: Path) -> None:
    with Servers(WORLD, SERVERS) as servers:
        for errors, decisions in pool(WORLD).call(mixtures, setting(servers), str(tmp_path)):
            assert [find_error_code(error) for error in errors] == ["E-CHECKPOINT"] * 2
            assert any("rank-" in line and "which no rank has" in line for line in decisions), decisions
    assert sorted(p.name for p in (tmp_path / "shared").iterdir()) == ["save-2"], "the older one was removed"
