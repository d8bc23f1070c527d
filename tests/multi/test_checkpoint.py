"""save_residuals() and load_residuals(): training resumes bit for bit, in every sync mode. Real ranks and two servers."""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_pool import Servers, pool
from support.sync_modes import WORLD, Net, Training

from commlayer.errors import code_of
from commlayer.optim import Outer

SERVERS, MORE = 2, 6
TOPK = "topk(ratio=0.05, values='int8', exact=False)"
FILES = ["manifest.json", "plan.json", *(f"{who}-{n}.safetensors" for who in ("rank", "server") for n in range(2))]


def training(rank: int, address: str, mode: str = "gradients", how: str = "scaled", codec: str = TOPK) -> Training:
    """Under local steps with an outer optimizer, whose momentum is a part of the save, too."""
    local = mode not in ("gradients", "late", "forward")
    return Training(rank, address, mode, optimizer="adamw", codec=codec, how=how, servers=SERVERS,
                    outer=Outer(lr=0.7, momentum=0.9) if local else None,
                    model=Net().to(torch.bfloat16) if "bfloat16" in how else None)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def save_and_continue(rank: int, address: str, mode: str, how: str, before: int, folder: str) -> tuple[Any, list[torch.Tensor]]:
    job = training(rank, address, mode, how)
    job.train(before, infinite=before - 1 if "skipped" in how else -1)
    if folder:
        job.session.save_residuals(folder)
    state = job.state()
    job.train(MORE, infinite=before + MORE - 1 if "skipped" in how else -1)
    end = job.tensors()
    if folder and "skipped" not in how:  # the running job can go back, too
        job.session.load_residuals(folder)
        job.load(state)
        job.train(MORE)
        assert equal(job.tensors(), end)
    job.session.close()
    return state, end


def resume(rank: int, address: str, mode: str, how: str, before: int, folder: str, states: list[Any]) -> list[torch.Tensor]:
    job = training(rank, address, mode, how)
    job.load(states[rank])
    if folder:
        job.session.load_residuals(folder)
    job.train(MORE, infinite=before + MORE - 1 if "skipped" in how else -1)
    end = job.tensors()
    job.session.close()
    return end


@pytest.mark.commit(4)
@pytest.mark.parametrize(("mode", "how", "before"), [
    ("gradients", "scaled", 6), ("late", "", 7), ("round", "weighed", 7), ("every", "scaled, weighed", 5),
    ("every", "bfloat16", 5), ("updates", "", 5), ("gradients", "scaled, skipped", 6), ("gradients", "ddp, scaled", 6),
    ("gradients", "ddp, scaled, skipped", 6), ("whole round", "", 5), ("forward", "", 6),
])
def test_a_resumed_run_equals_the_one_that_continued(mode: str, how: str, before: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    with Servers(WORLD, SERVERS) as servers:
        saved = pool(WORLD).call(save_and_continue, servers.address, mode, how, before, folder)
    states = [state for state, _ in saved]
    assert [p.name for p in tmp_path.iterdir()] == ["save-1"]
    assert sorted(p.name for p in (tmp_path / "save-1").iterdir()) == FILES
    resumed = []
    for place in (folder, ""):
        with Servers(WORLD, SERVERS) as servers:
            resumed.append(pool(WORLD).call(resume, servers.address, mode, how, before, place, states))
    for rank, (_, end) in enumerate(saved):
        assert equal(resumed[0][rank], end)
        assert not equal(resumed[1][rank], end), "residuals matter"


def test_a_save_does_not_change_the_run(tmp_path: Path) -> None:
    ends = []
    for folder in ("", str(tmp_path)):
        with Servers(WORLD, SERVERS) as servers:
            ends.append(pool(WORLD).call(save_and_continue, servers.address, "gradients", "scaled", 3, folder)[0][1])
    assert equal(*ends)


def state_dict_round_trip(rank: int, address: str, file: str) -> None:
    job = training(rank, address)
    job.train(MORE)
    path = f"{file}.{rank}"
    torch.save(job.session.state_dict(), path)
    saved = torch.load(path, weights_only=True)
    job.train(1)
    assert not all(torch.equal(t, job.session.state_dict()["tensors"][n]) for n, t in saved["tensors"].items())
    # Servers would answer the step before with the results that they still have of it.
    with pytest.raises(ValueError, match=rf"step {MORE}\b.*step {MORE + 1}\b.*E-CHECKPOINT"):
        job.session.load_state_dict(saved)
    saved["step"] += 1
    job.session.load_state_dict(saved)
    now = job.session.state_dict()
    assert now["step"] == MORE + 1
    assert set(now["tensors"]) == set(saved["tensors"])
    assert all(torch.equal(t, saved["tensors"][n]) for n, t in now["tensors"].items())
    with pytest.raises(ValueError, match="plan 00.*E-CHECKPOINT"):
        job.session.load_state_dict(saved | {"plan": "00"})
    job.session.close()


def test_state_dict_passes_through_torch_save(tmp_path: Path) -> None:
    with Servers(WORLD, SERVERS) as servers:
        pool(WORLD).call(state_dict_round_trip, servers.address, str(tmp_path / "state"))


def error_of(action: Callable[[], None]) -> str:
    with pytest.raises((ValueError, OSError)) as caught:
        action()
    return str(caught.value)


def load_under_another_plan(rank: int, address: str, folder: str) -> str:
    job = training(rank, address, codec="int8()")
    line = error_of(lambda: job.session.load_residuals(folder))
    job.session.close()
    return line


def test_a_save_under_another_plan_is_refused(tmp_path: Path) -> None:
    with Servers(WORLD, SERVERS) as servers:
        pool(WORLD).call(save_and_continue, servers.address, "gradients", "scaled", 1, str(tmp_path))
    with Servers(WORLD, SERVERS) as servers:
        for line in pool(WORLD).call(load_under_another_plan, servers.address, str(tmp_path)):
            assert line.startswith(f"{tmp_path}/save-1 ")
            assert code_of(line) == "E-CHECKPOINT"


@contextlib.contextmanager
def full_disk(nbytes: int | None) -> Iterator[None]:
    """No file grows beyond that."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits[0] if nbytes is None else nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def failing_saves_and_loads(rank: int, address: str, folder: str) -> dict[str, Any]:
    """One connected job: mixed saves, an empty folder, a folder that is a file, a full disk."""
    job = training(rank, address)
    session, early, late, broken = job.session, f"{folder}/early", f"{folder}/late", f"{folder}/broken"
    session.save_residuals(early)
    session.load_residuals(early)
    job.train(2)
    report: dict[str, Any] = {"step after a load of step 0": int(session.state_dict()["step"])}
    session.save_residuals(late)
    mixed = ("rank-0", "server-0", "server-1")
    if rank == 0:
        Path(f"{folder}/empty").mkdir()
        for name in mixed:
            shutil.copytree(late, f"{folder}/{name}")
            shutil.copy(f"{early}/save-1/{name}.safetensors", f"{folder}/{name}/save-1")
    torch.distributed.barrier()
    report["mixed"] = [error_of(lambda name=name: session.load_residuals(f"{folder}/{name}")) for name in mixed]
    report["empty"] = error_of(lambda: session.load_residuals(f"{folder}/empty"))
    before = job.tensors(buffers=False)
    job.train(1, infinite=2)
    assert equal(job.tensors(buffers=False), before), "the step was to be skipped"
    report["no directory"] = error_of(lambda: session.save_residuals(__file__ if rank == 1 else f"{folder}/none"))
    with full_disk(200 if rank == 1 else None):
        report["save"] = error_of(lambda: session.save_residuals(broken))
    torch.distributed.barrier()
    report["left"] = [path.name for path in Path(broken).iterdir()]
    job.train(1)
    report["step"] = int(session.state_dict()["step"])
    session.close()
    return report


def test_saves_and_loads_succeed_or_fail_on_all_ranks_together(tmp_path: Path) -> None:
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(failing_saves_and_loads, servers.address, str(tmp_path))
    for report in results:
        assert report["step after a load of step 0"] == 2
        assert report["step"] == 4, "neither a refused load nor a failed save, after an abandoned step, disturbs the job"
        for line in report["mixed"]:
            assert code_of(line) == "E-CHECKPOINT"
            assert "of step 0" in line
            assert "of step 2" in line
        assert code_of(report["empty"]) == "E-CHECKPOINT"
        assert report["left"] == []
        assert not any("\n" in line for line in (*report["mixed"], report["empty"], report["save"], report["no directory"]))
    assert code_of(results[0]["save"]) == code_of(results[0]["no directory"]) == "E-OTHER-RANK"
    assert "Not a directory" in results[1]["no directory"]
    assert "File too large" in results[1]["save"]
    assert "-1.safetensors" in results[1]["save"]
    assert sorted(p.name for p in (tmp_path / "late" / "save-1").iterdir()) == FILES
