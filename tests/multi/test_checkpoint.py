"""Session.checkpoint() and resume(): a resumed run equals an uninterrupted one, bit for bit, in every sync mode; with other
workers residuals are inherited. Real ranks and two servers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attached import mlp
from support.disks import files_up_to
from support.rank_pool import Servers, pool
from support.residuals import by_tensor, slices_of
from support.sync_modes import WORLD, Net, Training
from torch import nn

import commlayer
from commlayer.engine.checkpoints import checkpoint
from commlayer.engine.checkpoints.checkpoint_files import CheckpointHeader, SaveOnDisk
from commlayer.errors import find_error_code
from commlayer.optim import OuterSGD

SERVERS, MORE = 2, 6
TOPK = "topk(ratio=0.05, values='int8', exact=False)"
FILES = ["manifest.json", "plan.json", "rank-0.safetensors", "rank-1.safetensors", "server-0.safetensors",
         "server-1.safetensors", "training-0.safetensors"]


def training(rank: int, address: str, mode: str = "gradients", how: str = "scaled", codec: str = TOPK) -> Training:
    """Under local steps with an outer optimizer, whose momentum is a part of the checkpoint."""
    local = mode not in ("gradients", "late", "forward")
    return Training(rank, address, mode, optimizer="adamw", codec=codec, how=how, servers=SERVERS,
                    outer=OuterSGD(lr=0.7, momentum=0.9) if local else None,
                    **({"ratio_over": "plan", "warmup": 8} if "budget" in how else {}),
                    model=Net().to(torch.bfloat16) if "bfloat16" in how else None)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Counter:
    """An object of the script with a separate state on each rank."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "history": torch.tensor([self.value])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = int(state["history"][0])


def save_and_continue(rank: int, address: str, mode: str, how: str, before: int, folder: str) -> list[torch.Tensor]:
    job = training(rank, address, mode, how)
    job.train(before, infinite=before - 1 if "skipped" in how else -1)
    if folder:
        job.session.checkpoint(folder, extra={"counter": Counter(rank)})
    job.train(MORE, infinite=before + MORE - 1 if "skipped" in how else -1)
    end = job.tensors()
    if folder and "skipped" not in how:  # the running job can go back, too
        assert job.session.resume(folder, extra={"counter": Counter(rank)})
        job.step = before
        job.train(MORE)
        assert equal(job.tensors(), end)
    job.session.close()
    return end


def resumed(rank: int, address: str, mode: str, how: str, before: int, folder: str) -> tuple[list[torch.Tensor], int, int]:
    job = training(rank, address, mode, how)
    with torch.no_grad():
        for p in job.model.parameters():
            p.add_(1.0)  # another initialisation: everything comes from the checkpoint
    counter = Counter(7)
    assert job.session.resume(folder, extra={"counter": counter})
    job.step, step = before, job.session.step
    job.train(MORE, infinite=before + MORE - 1 if "skipped" in how else -1)
    end = job.tensors()
    job.session.close()
    return end, counter.value, step


@pytest.mark.commit(4)
@pytest.mark.parametrize(("mode", "how", "before"), [
    ("gradients", "scaled", 6), ("late", "", 7), ("round", "weighed", 7), ("every", "scaled, weighed", 5),
    ("every", "bfloat16", 5), ("updates", "", 5), ("gradients", "scaled, skipped", 6), ("gradients", "ddp, scaled", 6),
    ("gradients", "ddp, scaled, skipped", 6), ("whole round", "", 5), ("forward", "", 6),
    ("gradients", "budget", 3), ("gradients", "ddp, budget", 9),  # ratios over the whole plan, during the warm-up and after it
])
def test_resumed_run_equals_the_uninterrupted_run(mode: str, how: str, before: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    with Servers(WORLD, SERVERS) as servers:
        ends = pool(WORLD).call(save_and_continue, servers.address, mode, how, before, folder)
    assert [p.name for p in tmp_path.iterdir()] == ["save-1"]
    own = ["training-1.safetensors"] if mode in ("round", "every", "updates", "whole round") else []
    assert sorted(p.name for p in (tmp_path / "save-1").iterdir()) == [*FILES, *own]
    with Servers(WORLD, SERVERS) as servers:
        again = pool(WORLD).call(resumed, servers.address, mode, how, before, folder)
    for rank, (end, (later, counter, step)) in enumerate(zip(ends, again, strict=True)):
        assert equal(end, later)
        assert (counter, step) == (rank, before)


def test_checkpoint_does_not_change_the_run(tmp_path: Path) -> None:
    ends = []
    for folder in ("", str(tmp_path)):
        with Servers(WORLD, SERVERS) as servers:
            ends.append(pool(WORLD).call(save_and_continue, servers.address, "gradients", "scaled", 3, folder)[0])
    assert equal(*ends)


def residual_sum(job: Training) -> torch.Tensor:
    """Contribution of this rank's residuals to the mean, over all elements of the model."""
    worker = job.connection.worker
    worker.roll_back()
    return torch.cat(by_tensor(slices_of(worker), [t.numel for t in worker.job.tensors])) / worker.units.members


def saved(rank: int, address: str, folder: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    job = training(rank, address, how="")
    job.train(5)
    job.session.checkpoint(f"{folder}/{rank}" if rank else folder)
    result = residual_sum(job), job.tensors(buffers=False)
    job.session.close()
    return result


def taken(
    rank: int, address: str, folder: str, codec: str,
) -> tuple[torch.Tensor, list[torch.Tensor], int, list[str]]:
    job = training(rank, address, how="", codec=codec)
    with torch.no_grad():
        for p in job.model.parameters():
            p.add_(1.0)
    assert job.session.resume(f"{folder}/{rank}" if rank else folder)
    result = residual_sum(job), job.tensors(buffers=False), job.session.step, job.session.inspect.decisions()
    job.train(2)
    job.session.close()
    return result


@pytest.mark.parametrize(("world", "codec", "shared"), [(3, TOPK, True), (2, "int8()", True), (3, TOPK, False)])
def test_residuals_are_inherited_by_other_workers_and_plans(world: int, codec: str, shared: bool, tmp_path: Path) -> None:
    """`shared`: all ranks use one disk; otherwise each has its own, and the third rank has none of the files."""
    with Servers(WORLD, SERVERS) as servers:
        before = pool(WORLD).call(saved, servers.address, str(tmp_path))
    if shared:
        for path in (tmp_path / "1" / "save-1").iterdir():
            shutil.copy(path, tmp_path / "save-1") if not (tmp_path / "save-1" / path.name).exists() else None
        for rank in (1, 2):
            shutil.rmtree(tmp_path / str(rank), ignore_errors=True)
            (tmp_path / str(rank)).symlink_to(tmp_path)
    with Servers(world, SERVERS) as servers:
        after = pool(world).call(taken, servers.address, str(tmp_path), codec)
    server = torch.zeros_like(before[0][0])
    torch.testing.assert_close(sum(part for part, *_ in after), sum(part for part, _ in before) + server)
    assert sum(part for part, *_ in after).abs().max() > 0
    for _, weights, step, decisions in after:
        assert equal(weights, before[0][1])
        assert step == 5
        assert any("residuals of the 2 workers" in line for line in decisions)


def gone_back(rank: int, address: str, folder: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    job = training(rank, address, how="")
    job.train(3)
    job.session.checkpoint(folder)
    before = residual_sum(job)
    job.codec = "int8(block=64)"
    job.switch("gradients", servers=SERVERS)
    job.train(3)
    assert job.session.resume(folder)
    after, step = residual_sum(job), job.session.step
    job.train(2)
    job.session.close()
    return before, after, step


def test_running_job_goes_back_under_another_plan(tmp_path: Path) -> None:
    """Residuals of the steps that are taken back are dropped."""
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(gone_back, servers.address, str(tmp_path))
    before, after = (sum(result[n] for result in results) for n in (0, 1))
    assert before.abs().max() > 0
    torch.testing.assert_close(after, before)
    assert [result[2] for result in results] == [3, 3]


def alone(folder: str, start: int) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(start)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with commlayer.attach(model, optimizer) as session:
        results = session.resume(folder)
        assert results is (start > 0)
        for step in range(session.step, session.step + 3):
            optimizer.zero_grad()
            model(torch.full((4, 12), 0.1 * step)).square().sum().backward()
            optimizer.step()
        session.checkpoint(folder)
        return [p.detach().clone() for p in model.parameters()], session.step


def test_single_process_resumes(tmp_path: Path) -> None:
    (first, three), (second, six) = alone(str(tmp_path), 0), alone(str(tmp_path), 3)
    assert (three, six) == (3, 6)
    assert not equal(first, second)
    assert [p.name for p in tmp_path.iterdir()] == ["save-2"]


@pytest.mark.parametrize(("model", "groups", "text"), [
    (mlp(width=24), 1, "has shape"), (nn.Sequential(*list(mlp())[:-1]), 1, "but (3,) in the saved state"),
    (mlp(), 2, "the optimizer's state does not fit"),
])
def test_checkpoint_of_another_model_is_one_line(model: nn.Module, groups: int, text: str, tmp_path: Path) -> None:
    alone(str(tmp_path), 0)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[n::groups]} for n in range(groups)])
    with commlayer.attach(model, optimizer) as session:
        line = error_of(lambda: session.resume(tmp_path))
    assert text in line
    assert find_error_code(line) == "E-CHECKPOINT"
    assert "\n" not in line


def test_file_of_another_checkpoint_is_named(tmp_path: Path) -> None:
    alone(str(tmp_path / "a"), 0)
    alone(str(tmp_path / "b"), 0)
    shutil.copy(tmp_path / "b" / "save-1" / "rank-0.safetensors", tmp_path / "a" / "save-1")
    line = error_of(lambda: checkpoint.find(None, 0, 1, tmp_path / "a"))
    assert "rank-0.safetensors belongs to another checkpoint, of step 3" in line
    assert find_error_code(line) == "E-CHECKPOINT"


def on_disk(number: int, save: str, run: int) -> SaveOnDisk:
    return SaveOnDisk(number, save, CheckpointHeader(save, 10 * number, 0, 2, 1, "", training_id=run), (), sealed=True)


@pytest.mark.parametrize(("third", "refused"), [
    ([], False), ([on_disk(5, "old", 1)], False), ([on_disk(5, "other", 2)], True), ([on_disk(7, "fork", 1)], True),
    ([on_disk(5, "other", 2), on_disk(7, "new", 1)], False),
])
def test_only_an_older_checkpoint_of_the_same_training_is_replaced(third: list[SaveOnDisk], refused: bool) -> None:
    """The first two ranks have the checkpoint with number 7; the third one was away, or comes from another training."""
    new = on_disk(7, "new", 1)
    rows = [[new], [new], third]
    assert new.mark is not None
    if refused:
        line = error_of(lambda: checkpoint.refuse_mixture(Path("dir"), rows, 7, "new", new.mark))
        assert "rank 2" in line
        assert find_error_code(line) == "E-CHECKPOINT"
    else:
        checkpoint.refuse_mixture(Path("dir"), rows, 7, "new", new.mark)


def averaged(rank: int, address: str, mode: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    job = training(rank, address, mode, how="")
    job.train(5)
    own = job.tensors()
    with job.session.averaged():
        common = job.tensors()
    after = job.tensors()
    job.session.close()
    return own, common, after


@pytest.mark.parametrize("mode", ["every", "round", "gradients"])
def test_averaged_weights_are_equal_on_all_ranks_and_temporary(mode: str) -> None:
    with Servers(WORLD, SERVERS) as servers:
        (own, common, after), (other, as_common, _) = pool(WORLD).call(averaged, servers.address, mode)
    parameters = len(list(Net().parameters()))
    assert equal(common[:parameters], as_common[:parameters])
    assert equal(own, after)
    assert equal(own[:parameters], other[:parameters]) is (mode == "gradients")


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises((ValueError, OSError)) as caught:
        action()
    return str(caught.value)


def failing(rank: int, address: str, folder: str) -> dict[str, Any]:
    """One connected job: damaged checkpoints, an empty folder, a folder that is a file, a full disk, wrong objects."""
    job = training(rank, address)
    session, good, broken = job.session, f"{folder}/good", f"{folder}/broken"
    job.train(2)
    session.checkpoint(good)
    if rank == 0:
        Path(f"{folder}/empty").mkdir()
        for name, keep in (("unsealed", "manifest.json"), ("no model", "training-0.safetensors"), ("cut", ""),
                           ("no state of rank 1", "rank-1.safetensors")):
            shutil.copytree(good, f"{folder}/{name}")
            if keep:
                Path(f"{folder}/{name}/save-1/{keep}").unlink()
        model = Path(f"{folder}/cut/save-1/training-0.safetensors")
        model.write_bytes(model.read_bytes()[:-7])
    torch.distributed.barrier()
    report: dict[str, Any] = {"empty": session.resume(f"{folder}/empty")}
    for name in ("unsealed", "no model", "cut"):
        report[name] = error_of(lambda name=name: session.resume(f"{folder}/{name}"))
    report["extra"] = error_of(lambda: session.resume(good, extra={"counter": Counter(0)}))
    report["no state"] = error_of(lambda: session.checkpoint(good, extra={"rank": rank}))
    report["no state of rank 1"] = session.resume(f"{folder}/no state of rank 1"), session.inspect.decisions()
    before = job.tensors(buffers=False)
    job.train(1, infinite=2)
    assert equal(job.tensors(buffers=False), before), "the step was to be skipped"
    report["no directory"] = error_of(lambda: session.checkpoint(__file__ if rank == 1 else f"{folder}/none"))
    with files_up_to(200 if rank == 1 else 1 << 40):
        report["disk"] = error_of(lambda: session.checkpoint(broken))
    torch.distributed.barrier()
    report["left"] = [path.name for path in Path(broken).iterdir()]
    job.train(1)
    report["step"] = session.step
    session.close()
    return report


def test_checkpoints_succeed_or_fail_on_all_ranks_together(tmp_path: Path) -> None:
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(failing, servers.address, str(tmp_path))
    for report in results:
        assert report["step"] == 4, "neither a refused load nor a failed save, after a dropped step, disturbs the job"
        assert report["empty"] is False
        for name in ("unsealed", "no model", "cut", "extra", "no state"):
            assert find_error_code(report[name]) == "E-CHECKPOINT", report[name]
            assert "\n" not in report[name]
        loaded, decisions = report["no state of rank 1"]
        assert loaded
        assert any("rank-1" in line for line in decisions)
        assert report["left"] == []
    assert find_error_code(results[0]["disk"]) == find_error_code(results[0]["no directory"]) == "E-OTHER-RANK"
    assert find_error_code(results[1]["no directory"]) == "E-FILE"
    assert "File too large" in results[1]["disk"]
    assert sorted(p.name for p in (tmp_path / "good" / "save-1").iterdir()) == FILES
