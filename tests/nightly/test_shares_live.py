"""Batch shares in real training: they move to relieve slower ranks, profiles set the first ones, and training is unchanged.

Measured seconds follow lines that the tests fix, and the model runs out of memory where a test requires it.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attached import Run, Setting, coordinators, mlp, play, weights
from support.rank_pool import PoolError, pool
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from commlayer import LocalSteps
from commlayer.autotune.shares.load_balancer import LoadBalancer
from commlayer.autotune.start import reporting
from commlayer.balance import Decision, LinearTime, Note, Outcome, Sampler, shares, solve
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.observers import spacing
from commlayer.engine.worker.stopwatch import StepTiming
from commlayer.errors import CommError, InvalidInput

WORLD, EPOCHS, BATCH, LENGTH = 3, 3, 12, 67
LINES = [LinearTime(0.001, 0.002), LinearTime(0.002, 0.002), LinearTime(0.006, 0.002)]
"""Balanced shares are 3 : 1.5 : 0.5."""
BEST = dict(enumerate(shares(LINES, BATCH)))


def dataset() -> TensorDataset:
    x = torch.randn(LENGTH, 12, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs(), x.sum(1).sin()], dim=1), torch.arange(LENGTH))


def batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def script(
    run: Run, *, workers: int = 0, cap: tuple[int, ...] = (0, 0, 0), leave: bool = False, model: Callable[[], nn.Module] = mlp,
    least: int = 1, batch: int = BATCH, epochs: int = EPOCHS, bad_times: bool = False, slow_from: int = 99, known: bool = False,
    memory: tuple[int, ...] = (), price: tuple[float, float] | None = None, saves: bool = False,
    local: LocalSteps | None = None, skips: bool = False, **fields: Any,
) -> dict[str, Any]:
    """Trains over a sampler.

    `leave`: the loop ends in mid-epoch and begins again. `slow_from`: the step from which rank 0 is as slow as rank 2.
    `memory`: ranks are profiled first; the samples that each holds, then and in training. `known`: their lines are known.
    `saves`: rank 0 alone reads the sampler's state in each step, which commits its step early. `skips`: rank 1 skips the
    optimizer's step after the first batch and every third one from there, as a GradScaler does.
    """
    spacing.MOST_STEPS = 1  # a row after each step, whatever it costs
    rank, world = (0, 1) if run.alone else (run.rank, WORLD)
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    wrapped = run.wrap(module, optimizer=optimizer if local else None, sync=local)
    sampler = Sampler(LENGTH, batch, rank=rank, world=world, seed=1, least=least, cap=0 if run.alone else cap[rank])
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=0 if run.alone else workers,
                        persistent_workers=workers > 0 and not run.alone)

    def seconds(step: int, samples: int) -> float:
        if bad_times and rank == 1 and step in (4, 7):
            return math.nan if step == 4 else -1.0
        line = LINES[2 if step >= slow_from and rank == 0 else rank]
        pieces = -(-samples // cap[rank]) if cap[rank] else 1
        return pieces * line.time_s(samples / pieces)

    def loss_of(called: nn.Module, data: list[torch.Tensor]) -> torch.Tensor:
        if memory and len(data[0]) > memory[rank] and not run.alone:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return nn.functional.mse_loss(called(data[0]), data[1])

    follow, result = sampler.follow, dict[str, Any]()
    if not run.alone:
        connection, moved = run.sessions[0].inspect.context, list[tuple[int, float]]()
        assert isinstance(connection, DistributedJob)
        tuning = reporting(connection)
        shares_moved = tuning.shares_moved

        def move(part: float) -> None:
            moved.append((sampler.step, part))
            shares_moved(part)

        tuning.shares_moved = move  # type: ignore[method-assign]
        connection.terms.price = price if rank == 0 else None
        fields |= {"line": LINES[rank]} if known else {}
        controller = LoadBalancer(run.sessions[0], sampler, measure=seconds, **fields)
        profiles = controller.profile(wrapped, loss_of, loader) if memory else []
        follow = controller.follow
        result = {"profiles": profiles, "first": dict(sampler.announced[1]), "cap": sampler.cap, "moved": moved}
    trained, sizes = [list[int]() for _ in range(epochs)], list[int]()
    for epoch in range(epochs):
        for steps in [2, math.inf] if leave else [math.inf]:
            sampler.set_epoch(epoch)
            first = sampler.step
            for data in follow(loader):
                sizes.append(len(data[0]))
                trained[epoch] += data[2].tolist() if sampler.samples else []
                (loss_of(wrapped, data) * sampler.fraction).backward()
                if sampler.last:
                    if not (skips and rank == 1 and len(sizes) % 3 == 1):
                        optimizer.step()
                    optimizer.zero_grad()
                    if saves and rank == 0:
                        sampler.state_dict()
                    if sampler.step == first + steps:
                        break
    assert sampler.step == epochs * -(-LENGTH // batch)
    result |= weights(module) | {"trained": trained, "most": max(sizes)}
    if not run.alone:
        result |= {"events": controller.events, "lines": run.sessions[0].inspect.decisions(), "shares": controller.shares}
    return result


def play_all(run: Any, how: str = "module", *args: Any) -> list[dict[str, Any]]:
    with coordinators(1, WORLD, 1) as servers:
        return pool(WORLD).call(play, WORLD, run, Setting(how, addresses=tuple(s.address for s in servers)), *args)


def decisions(result: dict[str, Any]) -> list[Decision]:
    return [event for event in result["events"] if isinstance(event, Decision)]


def longest_s(given: dict[int, int]) -> float:
    return max(LINES[rank].time_s(share) for rank, share in given.items() if share)


def trained_alike(run: Any, how: str = "module", batch: int = BATCH) -> list[dict[str, Any]]:
    """As decided_alike; and weights equal those of one process on the union of the batches."""
    results = decided_alike(run, how, batch)
    for name, tensor in play(0, WORLD, run, None).items():
        if isinstance(tensor, torch.Tensor):
            torch.testing.assert_close(results[0][name], tensor, msg=lambda m, n=name: f"{n}: {m}")
            assert all(torch.equal(results[0][name], other[name]) for other in results[1:]), f"{name} differs between ranks"
    return results


def decided_alike(run: Any, how: str = "module", batch: int = BATCH) -> list[dict[str, Any]]:
    """All ranks decide equally, and each sample is used once in each epoch."""
    results = play_all(run, how)
    alike = [(r["events"], r["shares"], [part for _, part in r["moved"]]) for r in results]
    assert all(each == alike[0] for each in alike)
    assert all(sum(d.shares) == batch for d in decisions(results[0]))
    for epoch in range(len(results[0]["trained"])):
        assert sorted(i for r in results for i in r["trained"][epoch]) == list(range(LENGTH))
    return results


@pytest.mark.parametrize(("fields", "how"), [
    ({}, "module"), ({}, "ddp"), ({"workers": 1}, "module"), ({"workers": 1}, "ddp"),
    ({"cap": (5, 3, 1), "workers": 1}, "module"), ({"leave": True, "workers": 1}, "module"), ({"bad_times": True}, "module"),
    ({"saves": True}, "module"),
], ids=str)
def test_shares_change_and_training_is_unchanged(fields: dict[str, Any], how: str) -> None:
    results = trained_alike(partial(script, **fields), how)
    assert decisions(results[0])
    if "cap" not in fields:
        assert longest_s(results[0]["shares"]) == longest_s(BEST)
    sizes = [sum(len(epoch) for epoch in r["trained"]) for r in results]
    assert sizes[0] > sizes[1] > sizes[2]
    assert any(isinstance(event, Outcome) for event in results[0]["events"])
    assert "new shares from step" in results[0]["lines"][0]
    bad = [event.text for event in results[0]["events"] if isinstance(event, Note) and "[E-TIME-MODEL]" in event.text]
    assert [text.partition(" s,")[0] for text in bad] == [
        f"worker 1: measured time {time}" for time in (("nan", "-1.0") if fields.get("bad_times") else ())]


@pytest.mark.parametrize(("local", "fields"), [
    (LocalSteps(every=4, fragments=2), {}), (LocalSteps(every=3, overlap=False), {"workers": 1}),
    (LocalSteps(every=2, fragments=2), {"skips": True, "workers": 1}), (LocalSteps(every=2), {"cap": (5, 3, 1), "skips": True}),
], ids=str)
def test_shares_change_under_local_steps(local: LocalSteps, fields: dict[str, Any]) -> None:
    results = decided_alike(partial(script, local=local, epochs=2 * EPOCHS, **fields))
    assert decisions(results[0])
    if "cap" not in fields:
        assert longest_s(results[0]["shares"]) == longest_s(BEST)


def test_batch_norm_keeps_two_samples() -> None:
    (result, *_) = play_all(partial(script, model=batch_norm, least=2))
    assert decisions(result)
    assert all(min(d.shares) >= 2 for d in decisions(result))


def test_known_time_models_decide_after_the_first_exchange() -> None:
    (decision,) = decisions(trained_alike(partial(script, known=True))[0])
    assert (decision.by_worker, decision.step, decision.from_step) == (BEST, 0, 3)


class Slowed:
    """A session whose steps are measured as usual, but reported as if each took its rank these seconds."""

    def __init__(self, session: Any, seconds: float) -> None:
        self._session, self._seconds, self.measured = session, seconds, list[StepTiming]()

    @property
    def inspect(self) -> Slowed:
        return self

    def laps(self) -> list[StepTiming]:
        laps = self._session.inspect.laps()
        self.measured += laps
        return [lap._replace(seconds=self._seconds) for lap in laps]

    def __getattr__(self, name: str) -> Any:
        inspected = self._session.inspect
        return getattr(inspected if hasattr(inspected, name) else self._session, name)


def measured_by_the_session(run: Run, local: LocalSteps | None = None) -> dict[str, Any]:
    spacing.MOST_STEPS = 1
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.wrap(model, optimizer=optimizer, sync=local)
    session: Any = Slowed(run.sessions[0], (0.001, 0.002, 0.006)[run.rank])
    sampler = Sampler(LENGTH, BATCH, rank=run.rank, world=WORLD)
    controller = LoadBalancer(session, sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y, _ in controller.follow(DataLoader(dataset(), batch_sampler=sampler)):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"measured": session.measured, "shares": controller.shares, "events": controller.events}


@pytest.mark.parametrize("local", [None, LocalSteps(every=4, fragments=2)], ids=str)
def test_session_measures_step_times(local: LocalSteps | None) -> None:
    results = play_all(partial(measured_by_the_session, local=local))
    assert all(r["events"] == results[0]["events"] and r["shares"] == results[0]["shares"] for r in results)
    assert all(0 < lap.seconds < 60 for r in results for lap in r["measured"])
    assert len({lap.step for lap in results[0]["measured"]}) == len(results[0]["measured"]) > EPOCHS
    assert decisions(results[0])[0].step >= 1, "the first step after a begin may contain anything"
    assert results[0]["shares"][0] > BATCH // WORLD > results[0]["shares"][2]


def resumed(run: Run) -> dict[str, Any]:
    """A second sampler loads the state of a first one whose newest shares are for a later step."""
    spacing.MOST_STEPS = 1
    model = mlp()
    run.wrap(model)
    before, after = (Sampler(LENGTH, BATCH, rank=run.rank, world=WORLD) for _ in range(2))

    def follow(sampler: Sampler) -> tuple[LoadBalancer, Any]:
        controller = LoadBalancer(run.sessions[0], sampler, measure=lambda _, samples: LINES[run.rank].time_s(samples))
        return controller, controller.follow(DataLoader(dataset(), batch_sampler=sampler, num_workers=1))

    for x, y, _ in follow(before)[1]:
        nn.functional.mse_loss(model(x), y).backward()
        if before.announced[0] > before.step:
            break
    state = before.state_dict()
    after.load_state_dict(state)
    assert after.announced == before.announced
    controller, _ = follow(after)
    loader = DataLoader(dataset(), batch_sampler=after, num_workers=1)
    for epoch in range(EPOCHS):
        after.set_epoch(epoch)
        for x, y, _ in controller.follow(loader):
            nn.functional.mse_loss(model(x), y).backward()
    return {"events": controller.events, "state": state, "shares": controller.shares, "from": before.announced[0]}


def test_decisions_after_a_resume_continue_from_the_announced_shares() -> None:
    results = play_all(resumed)
    assert all(r["state"] == results[0]["state"] and r["shares"] == results[0]["shares"] for r in results)
    assert all(d.from_step > results[0]["from"] for d in decisions(results[0]))
    assert longest_s(results[0]["shares"]) == longest_s(BEST)


ROOM = (99, 99, 99)


@pytest.mark.parametrize("how", ["module", "ddp"])
def test_profile_sets_the_best_shares_for_the_first_step(how: str) -> None:
    results = trained_alike(partial(script, memory=ROOM), how)
    for rank, result in enumerate(results):
        assert result["first"] == BEST
        assert [one.cap for one in result["profiles"]] == [BATCH] * WORLD
        assert result["profiles"][rank].points == tuple((n, pytest.approx(LINES[rank].time_s(n))) for n in (2, 4, 8, 12))
    decision, outcome, *others = results[0]["events"]
    assert (decision.reason, decision.by_worker, decision.from_step) == ("the profile", BEST, 0)
    assert decision.gain_s == pytest.approx(LINES[2].time_s(4) - longest_s(BEST))
    assert isinstance(outcome, Outcome)
    assert abs(outcome.error) < 1e-6
    assert not any(isinstance(event, Decision) for event in others)


@pytest.mark.parametrize(("memory", "caps"), [((5, 99, 99), [4, 0, 0]), ((4, 4, 3), [3, 3, 2])])
def test_memory_limits_become_caps_and_larger_shares_micro_batches(memory: tuple[int, ...], caps: list[int]) -> None:
    results = play_all(partial(script, memory=memory))
    assert [r["cap"] for r in results] == caps
    assert results[0]["first"] == dict(enumerate(solve(LINES, BATCH, [cap or None for cap in caps]).shares))
    assert all(r["most"] <= cap for r, cap in zip(results, caps, strict=True) if cap)
    assert results[0]["first"][0] > caps[0]


def test_changed_shares_are_reported_before_their_first_step() -> None:
    results = trained_alike(partial(script, memory=ROOM, slow_from=3))
    _, *later = decisions(results[0])
    assert later[0].effect > 0.3
    # Until a step is accounted for, the sampler stands at it.
    assert results[0]["moved"] == [(one.from_step - 1, pytest.approx(one.gain_s / one.before_s)) for one in later
                                   if one.from_step <= EPOCHS * -(-LENGTH // BATCH)]


def test_decisions_include_the_communication_time() -> None:
    runs = [play_all(partial(script, memory=ROOM, slow_from=3, price=price))[2]["events"] for price in (None, (0.05, 0.5))]
    free, priced = (next(e for e in events[1:] if isinstance(e, Decision)) for events in runs)
    assert priced.before_s == pytest.approx(free.before_s + 0.05 - 0.5 * free.before_s)


def failed(run: Run, attempt: Callable[[Run], Any], folder: str = "") -> dict[str, Any]:
    """The error's type, code and text; written to a file, too, as a pool whose rank is killed returns nothing."""
    try:
        attempt(run)
    except (InvalidInput, CommError, KeyError) as error:
        text = str(error)
        if folder:
            (Path(folder) / str(run.rank)).write_text(f"{type(error).__name__} {text}")
        return {"type": type(error).__name__, "code": getattr(error, "code", ""), "text": text}
    return {"type": "", "code": "", "text": ""}


def profile(run: Run, how: str) -> None:
    """Rank 1 fails in its profile: it raises, or is killed."""
    model = mlp()
    run.wrap(model)
    controller = LoadBalancer(run.sessions[0], Sampler(LENGTH, BATCH, rank=run.rank, world=WORLD))

    def loss_of(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if run.rank == 1 and how == "raises":
            raise KeyError("labels")
        if run.rank == 1 and len(batch) > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return module(batch).mean()

    controller.profile(model, loss_of, lambda n: torch.randn(n, 12))


def sampler_of_rank_0(run: Run) -> None:
    model = mlp()
    run.wrap(model)
    sampler = Sampler(LENGTH, BATCH, rank=0, world=WORLD)
    for x, y, _ in LoadBalancer(run.sessions[0], sampler).follow(DataLoader(dataset(), batch_sampler=sampler)):
        nn.functional.mse_loss(model(x), y).backward()


@pytest.mark.parametrize(("attempt", "code", "text"), [
    (partial(script, memory=(0, 0, 0)), "E-SHARES-ARGUMENT", "worker 0: .*memory holds 0 "),
    (partial(script, memory=(99, 0, 99)), "E-SHARES-ARGUMENT", "worker 1: .*memory holds 0 "),
    (sampler_of_rank_0, "E-SAMPLER-RANKS", "rank 1 was made for rank 0"),
    (partial(profile, how="raises"), "E-OTHER-RANK", "worker 1: "),
], ids=["no room", "no room on rank 1", "sampler", "exception"])
def test_all_ranks_name_the_rank_that_fails(attempt: Any, code: str, text: str) -> None:
    results = play_all(failed, "module", attempt)
    for rank, result in enumerate(results):
        if code == "E-OTHER-RANK" and rank == 1:
            assert (result["type"], result["text"]) == ("KeyError", "'labels'")
        else:
            assert result["code"] == code
            assert re.search(text, result["text"])


def test_worker_killed_during_its_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="rank 1"):
        play_all(failed, "module", partial(profile, how="killed"), str(tmp_path))
    for rank in (0, 2):
        assert re.fullmatch(r"PeerLost worker 1: .*\[E-PEER-LOST\]", (tmp_path / str(rank)).read_text())


def test_single_process_reads_all_samples() -> None:
    sampler = Sampler(LENGTH, BATCH, rank=0, world=1)
    controller = LoadBalancer(None, sampler)  # type: ignore[arg-type]
    samples = [i for _, _, index in controller.follow(DataLoader(dataset(), batch_sampler=sampler)) for i in index.tolist()]
    assert sorted(samples) == list(range(LENGTH))
