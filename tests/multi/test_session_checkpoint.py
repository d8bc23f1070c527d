"""save_residuals() and load_residuals(): training resumes bit for bit. Real ranks and two servers."""

from __future__ import annotations

import contextlib
import copy
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attached import Run, Setting, loss_of, mlp
from support.rank_pool import Servers, pool

from commlayer.errors import code_of

WORLD, SERVERS = 2, 2
TOPK = "topk(ratio=0.05, values='int8', exact=False)"
HALF = 6
FILES = ["manifest.json", "plan.json", *(f"{who}-{n}.safetensors" for who in ("rank", "server") for n in range(2))]


class Training:
    """A model, an optimizer and a scaler, and the way that they take together."""

    def __init__(self, run: Run) -> None:
        self.run, self.model = run, mlp(width=64)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        self.wrapped = run.wrap(self.model, scaler=self.scaler)
        self.session = run.sessions[0]

    def train(self, first: int, last: int, skip: int = -1) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss = self.scaler.scale(loss_of(self.run, self.wrapped, step))
            if step == skip and self.run.rank == 1:
                # One gradient is infinite: what the other buckets have sent has to be put right, too.
                loss = loss + float("inf") * self.model[4].bias.sum()
            loss.backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                              "scaler": self.scaler.state_dict()})

    def load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def save_and_go_on(rank: int, setting: Setting, directory: str, skip: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    run = Run(rank, WORLD, setting)
    training = Training(run)
    training.train(0, HALF, skip)
    if directory:
        training.session.save_residuals(directory)
    state = training.state()
    assert len(training.session.inspect.plan.buckets) > 4
    training.train(HALF, 2 * HALF)
    run.close()
    return state, training.weights()


def take_up(rank: int, setting: Setting, directory: str, states: list[dict[str, Any]], load: bool) -> list[torch.Tensor]:
    run = Run(rank, WORLD, setting)
    training = Training(run)
    training.load(states[rank])
    if load:
        training.session.load_residuals(directory)
    training.train(HALF, 2 * HALF)
    run.close()
    return training.weights()


@pytest.mark.commit(2)
@pytest.mark.parametrize("skip", [-1, HALF - 1], ids=["", "after a skipped step"])
@pytest.mark.parametrize("how", ["module", "ddp"])
def test_a_resumed_run_equals_the_one_that_went_on(how: str, skip: int, tmp_path: Path) -> None:
    with Servers(WORLD, SERVERS) as servers:
        setting = Setting(how, (servers.address,), TOPK, servers=SERVERS)
        saved = pool(WORLD).call(save_and_go_on, setting, str(tmp_path), skip)
    assert [p.name for p in tmp_path.iterdir()] == ["save-1"]
    assert sorted(p.name for p in (tmp_path / "save-1").iterdir()) == FILES
    with Servers(WORLD, SERVERS) as servers:
        without = pool(WORLD).call(save_and_go_on, Setting(how, (servers.address,), TOPK, servers=SERVERS), "", skip)
    again = {}
    for load in (True, False):
        with Servers(WORLD, SERVERS) as servers:
            setting = Setting(how, (servers.address,), TOPK, servers=SERVERS)
            again[load] = pool(WORLD).call(take_up, setting, str(tmp_path), [state for state, _ in saved], load)
    for rank in range(WORLD):
        assert all(torch.equal(a, b) for a, b in zip(again[True][rank], saved[rank][1], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(without[rank][1], saved[rank][1], strict=True)), "changed the run"
        # What was kept back matters: without it the run goes another way.
        assert not all(torch.equal(a, b) for a, b in zip(again[False][rank], saved[rank][1], strict=True))


def go_back(rank: int, setting: Setting, directory: str) -> list[list[torch.Tensor]]:
    run = Run(rank, WORLD, setting)
    training = Training(run)
    training.train(0, HALF)
    training.session.save_residuals(directory)
    state = training.state()
    ways = []
    for skip in (2 * HALF - 1, -1):
        training.train(HALF, 2 * HALF, skip)
        ways.append(training.weights())
        training.load(state)
        training.session.load_residuals(directory)
    training.train(HALF, 2 * HALF)
    ways.append(training.weights())
    run.close()
    return ways


@pytest.mark.parametrize("how", ["module", "ddp"])
def test_a_running_job_can_go_back(how: str, tmp_path: Path) -> None:
    """As after a loss spike: the servers take up a step that they have seen before, even after one that was abandoned."""
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(go_back, Setting(how, (servers.address,), TOPK, servers=SERVERS), str(tmp_path))
    for _, first, second in results:
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def state_dict_round_trip(rank: int, setting: Setting, file: str) -> int:
    run = Run(rank, WORLD, setting)
    training = Training(run)
    training.train(0, HALF)
    state = training.session.state_dict()
    path = f"{file}.{rank}"
    torch.save(state, path)
    kept = torch.load(path, weights_only=True)
    training.train(HALF, HALF + 1)
    assert not all(torch.equal(t, training.session.state_dict()["tensors"][n]) for n, t in kept["tensors"].items())
    # Servers would answer the step before with the results that they have kept of it.
    with pytest.raises(ValueError, match=rf"step {HALF}, .*step {HALF + 1} .*load_residuals\(\).*E-CHECKPOINT"):
        training.session.load_state_dict(kept)
    kept["step"] += 1
    training.session.load_state_dict(kept)
    now = training.session.state_dict()
    assert set(now["tensors"]) == set(kept["tensors"])
    assert all(torch.equal(t, kept["tensors"][n]) for n, t in now["tensors"].items())
    with pytest.raises(ValueError, match="plan 00.*E-CHECKPOINT"):
        training.session.load_state_dict(kept | {"plan": "00"})
    run.close()
    return int(now["step"])


def test_state_dict_passes_through_torch_save(tmp_path: Path) -> None:
    with Servers(WORLD, SERVERS) as servers:
        setting = Setting("module", (servers.address,), TOPK, servers=SERVERS)
        assert pool(WORLD).call(state_dict_round_trip, setting, str(tmp_path / "state")) == [HALF + 1] * WORLD


def wrong_loads(rank: int, setting: Setting, directory: str, empty: str) -> list[str]:
    run = Run(rank, WORLD, setting)
    training = Training(run)
    said = []
    for place in (directory, empty):
        try:
            training.session.load_residuals(place)
        except ValueError as error:
            said.append(str(error))
    run.close()
    return said


def test_a_save_under_another_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with Servers(WORLD, SERVERS) as servers:
        pool(WORLD).call(save_and_go_on, Setting("module", (servers.address,), TOPK, servers=SERVERS), str(tmp_path), -1)
    with Servers(WORLD, SERVERS) as servers:
        other = Setting("module", (servers.address,), "int8()", servers=SERVERS)
        said = pool(WORLD).call(wrong_loads, other, str(tmp_path), str(tmp_path / "empty"))
    for plan, missing in said:
        assert re.search(f"{tmp_path}/save-1 has plan .*E-CHECKPOINT", plan), plan
        assert re.search(f"{tmp_path}/empty: .*E-CHECKPOINT", missing), missing


def said_by(action: Callable[[], None]) -> str:
    with pytest.raises((ValueError, OSError)) as caught:
        action()
    return str(caught.value)


@contextlib.contextmanager
def full_disk(nbytes: int | None) -> Iterator[None]:
    """No file grows beyond that."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits[0] if nbytes is None else nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_and_load_at_every_turn(rank: int, setting: Setting, folder: str) -> dict[str, Any]:
    """One connected job, all the ways in which saves and loads can go."""
    run = Run(rank, WORLD, setting)
    training = Training(run)
    session, early, late, broken = training.session, f"{folder}/early", f"{folder}/late", f"{folder}/broken"
    said: dict[str, Any] = {}
    session.save_residuals(early)
    session.load_residuals(early)
    training.train(0, 2)
    said["step after a load of step 0"] = int(session.state_dict()["step"])
    session.save_residuals(late)
    if rank == 0:
        for name in ("rank-0", "server-0", "server-1"):
            shutil.copytree(late, f"{folder}/{name}")
            shutil.copy(f"{early}/save-1/{name}.safetensors", f"{folder}/{name}/save-1")
    torch.distributed.barrier()
    for name in ("rank-0", "server-0", "server-1"):
        said[name] = said_by(lambda name=name: session.load_residuals(f"{folder}/{name}"))
    before = training.weights()
    training.train(2, 3, skip=2)
    assert all(torch.equal(a, b) for a, b in zip(training.weights(), before, strict=True)), "the step was to be skipped"
    said["no directory"] = said_by(lambda: session.save_residuals(__file__ if rank == 1 else f"{folder}/none"))
    with full_disk(200 if rank == 1 else None):
        said["save"] = said_by(lambda: session.save_residuals(broken))
    torch.distributed.barrier()
    said["left"] = [path.name for path in Path(broken).iterdir()]
    training.train(3, 4)
    said["step"] = int(session.state_dict()["step"])
    run.close()
    return said


def test_saves_and_loads_succeed_or_fail_on_all_ranks_together(tmp_path: Path) -> None:
    with Servers(WORLD, SERVERS) as servers:
        setting = Setting("module", (servers.address,), TOPK, servers=SERVERS)
        results = pool(WORLD).call(save_and_load_at_every_turn, setting, str(tmp_path))
    for said in results:
        assert said["step after a load of step 0"] == 2
        assert said["step"] == 4, "neither a refused load nor a failed save, after an abandoned step, disturbs the job"
        for name in ("rank-0", "server-0", "server-1"):
            assert code_of(said[name]) == "E-CHECKPOINT"
            assert "of step 0" in said[name]
            assert "of step 2" in said[name]
            assert "\n" not in said[name]
        assert said["left"] == []
    assert re.match(r"save_residuals\(\) .*rank 1\b.*E-OTHER-RANK", results[0]["save"])
    assert "Not a directory" in results[1]["no directory"]
    assert "File too large" in results[1]["save"]
    assert "-1.safetensors: cannot be written: " in results[1]["save"]
    assert sorted(p.name for p in (tmp_path / "late" / "save-1").iterdir()) == FILES
