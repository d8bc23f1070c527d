"""Profiles on all ranks at once: caps and first shares from them, training as without them, and what may go wrong.

Seconds come from lines that the tests fix, memory's ends are raised by the model: decisions are the same in every run.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attached import Run, Setting, coordinators, mlp, play, weights
from support.rank_pool import PoolError, pool
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from commlayer.autotune.shares.driver import Controller
from commlayer.balance import Decision, Line, Outcome, Sampler, shares, solve
from commlayer.engine import spacing
from commlayer.errors import CommError

WORLD = 3
BATCH, LENGTH = 12, 67
EPOCHS = 2
LINES = [Line(0.001, 0.002), Line(0.002, 0.002), Line(0.006, 0.002)]


def dataset() -> TensorDataset:
    x = torch.randn(LENGTH, 12, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs(), x.sum(1).sin()], dim=1))


def script(
    run: Run, memory: tuple[int, ...] = (99, 99, 99), slow_from: int = 99, price: tuple[float, float] | None = None,
    batch: int = BATCH, epochs: int = EPOCHS, **fields: Any,
) -> dict[str, Any]:
    """`memory`: samples that each rank holds, profiled and in training. Rank 0 is as slow as rank 2 from `slow_from` on."""
    spacing.MOST_STEPS = 1
    model = mlp()
    wrapped = run.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rank, world = (0, 1) if run.alone else (run.rank, WORLD)
    sampler = Sampler(LENGTH, batch, rank=rank, world=world, seed=1)
    loader = DataLoader(dataset(), batch_sampler=sampler)

    def loss_of(module: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if len(batch[0]) > memory[rank] and not run.alone:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return nn.functional.mse_loss(module(batch[0]), batch[1])

    controller, found, heard = None, [], []
    if not run.alone:
        def seconds(step: int, samples: int) -> float:
            return LINES[2 if step >= slow_from and rank == 0 else rank].time_s(samples)

        connection = run.sessions[0].inspect.connection
        connection.on_shares.append(lambda part: heard.append((sampler.step, part)))
        connection.terms.price = price if rank == 0 else None
        controller = Controller(run.sessions[0], sampler, measure=seconds, **fields)
        found = controller.profile(wrapped, loss_of, loader)
    first = dict(sampler.announced[1])
    sizes = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for samples in sampler.follow(loader) if controller is None else controller.follow(loader):
            sizes.append(len(samples[0]))
            (loss_of(wrapped, samples) * sampler.fraction).backward()
            if sampler.last:
                optimizer.step()
                optimizer.zero_grad()
    result = weights(model) | {"first": first, "cap": sampler.cap, "found": found, "most": max(sizes), "heard": heard}
    if controller is None:
        return result
    return result | {"events": controller.events, "lines": run.sessions[0].inspect.decisions()}


def play_all(run: Any, how: str = "module", *args: Any) -> list[dict[str, Any]]:
    with coordinators(1, WORLD, 1) as made:
        return pool(WORLD).call(play, WORLD, run, Setting(how, addresses=tuple(m.address for m in made)), *args)


@pytest.mark.parametrize("how", ["module", "ddp"])
def test_the_first_step_has_the_best_shares_and_training_is_as_alone(how: str) -> None:
    results = play_all(script, how)
    best = dict(enumerate(shares(LINES, BATCH)))
    for rank, result in enumerate(results):
        assert result["first"] == best
        assert [one.cap for one in result["found"]] == [BATCH] * WORLD
        assert result["found"][rank].points == tuple((n, pytest.approx(LINES[rank].time_s(n))) for n in (2, 4, 8, 12))
        assert result["lines"] == results[0]["lines"]
    decision, outcome = results[0]["events"][:2]
    assert isinstance(decision, Decision)
    assert (decision.reason, decision.by_worker, decision.from_step) == ("the profile", best, 0)
    assert decision.gain_s == pytest.approx(LINES[2].time_s(4) - max(LINES[r].time_s(n) for r, n in best.items()))
    assert isinstance(outcome, Outcome)
    assert abs(outcome.error) < 1e-6
    assert not any(isinstance(event, Decision) for event in results[0]["events"][1:])
    for name, tensor in play(0, WORLD, script, None).items():
        if isinstance(tensor, torch.Tensor):
            torch.testing.assert_close(results[1][name], tensor, msg=lambda m, n=name: f"{n}: {m}")


def test_memorys_ends_are_caps() -> None:
    """The fast rank holds little: it computes its share in pieces that fit, which is faster than leaving it to the others."""
    results = play_all(script, "module", (5, 99, 99))
    assert [r["cap"] for r in results] == [4, 0, 0]
    assert results[0]["first"] == dict(enumerate(solve(LINES, BATCH, [4, None, None]).shares))
    assert results[0]["first"][0] > 4
    assert results[0]["most"] == 4


def test_caps_below_the_batch_become_micro_batches() -> None:
    results = play_all(script, "module", (4, 4, 3))
    assert [r["cap"] for r in results] == [3, 3, 2]
    assert sum(results[0]["first"].values()) == BATCH
    assert all(r["most"] <= r["cap"] for r in results)


def refused(run: Run, *args: Any, **fields: Any) -> dict[str, Any]:
    try:
        script(run, *args, **fields)
    except (ValueError, CommError) as error:
        return {"said": f"{type(error).__name__}: {error}"}
    return {"said": ""}


@pytest.mark.parametrize(("memory", "worker"), [((0, 0, 0), 0), ((99, 0, 99), 1)])
def test_a_worker_without_room_is_named_by_all(memory: tuple[int, ...], worker: int) -> None:
    said = {r["said"] for r in play_all(refused, "module", memory)}
    (line,) = said
    assert re.fullmatch(rf"InvalidInput: worker {worker}: .*memory holds 0 .*\[E-SHARES-ARGUMENT\]", line), line


def raises(run: Run) -> dict[str, Any]:
    model = mlp()
    run.wrap(model)
    sampler = Sampler(LENGTH, BATCH, rank=run.rank, world=WORLD)
    controller = Controller(run.sessions[0], sampler)

    def loss_of(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if run.rank == 1:
            raise KeyError("labels")
        return module(batch).mean()

    try:
        controller.profile(model, loss_of, lambda n: torch.randn(n, 12))
    except (KeyError, CommError) as error:
        return {"said": f"{type(error).__name__}: {error}"}
    return {"said": ""}


def test_a_rank_whose_model_raises_is_named_at_once() -> None:
    said = [r["said"] for r in play_all(raises)]
    assert said[1] == "KeyError: 'labels'"
    assert re.fullmatch(r"CommError: worker 1: .*\[E-OTHER-RANK\]", said[0])
    assert said[2] == said[0]


def slowed(run: Run) -> dict[str, Any]:
    return script(run, slow_from=3)


def published(run: Run) -> dict[str, Any]:
    return script(run, slow_from=3, mode="lbb", batch=24, epochs=5)


def check_same(results: list[dict[str, Any]], run: Any) -> list[Decision]:
    """As alone, on all ranks alike; the decisions."""
    assert all(r["lines"] == results[0]["lines"] and r["heard"] == results[0]["heard"] for r in results)
    for name, tensor in play(0, WORLD, run, None).items():
        if isinstance(tensor, torch.Tensor):
            torch.testing.assert_close(results[1][name], tensor, msg=lambda m, n=name: f"{n}: {m}")
    made = [event for event in results[0]["events"] if isinstance(event, Decision)]
    assert len({sum(one.shares) for one in made}) == 1
    return made


def test_who_wants_to_know_of_new_shares_hears_it_before_their_first_step() -> None:
    results = play_all(slowed)
    _, *later = check_same(results, slowed)
    assert later
    assert later[0].effect > 0.3
    # Until a step is accounted for, the sampler stands at it.
    assert results[0]["heard"] == [(one.from_step - 1, pytest.approx(one.gain_s / one.before_s)) for one in later
                                   if one.from_step <= 2 * -(-LENGTH // BATCH)]


def test_lbb_as_published_moves_shares_live() -> None:
    results = play_all(published)
    first, *later = check_same(results, published)
    assert first.reason == "the profile"
    rapid = [one for one in later if one.reason == "LBB, rapid tuning"]
    assert len(rapid) == 1, "the window allows no second one"
    assert rapid[0].effect >= 0.3
    assert rapid[0].shares[0] < first.shares[0]
    assert all(one in rapid or one.reason == "LBB, fine tuning" for one in later)


def priced(run: Run) -> dict[str, Any]:
    return script(run, slow_from=3, price=(0.05, 0.5))


def test_the_plans_price_is_in_what_decisions_expect() -> None:
    free, dear = play_all(slowed)[2]["events"], play_all(priced)[2]["events"]
    before, after = (next(e for e in events[1:] if isinstance(e, Decision)) for events in (free, dear))
    assert after.before_s == pytest.approx(before.before_s + 0.05 - 0.5 * before.before_s)
    assert [e.whole_s > 0 for e in dear if isinstance(e, Outcome)]


def vanishes(run: Run, directory: str) -> dict[str, Any]:
    """Rank 1 is killed in the middle of its profile; what the others hear is written down, for the call will not return."""
    model = mlp()
    run.wrap(model)
    controller = Controller(run.sessions[0], Sampler(LENGTH, BATCH, rank=run.rank, world=WORLD))

    def loss_of(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if run.rank == 1 and len(batch) > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return module(batch).mean()

    try:
        controller.profile(model, loss_of, lambda n: torch.randn(n, 12))
    except CommError as error:
        (Path(directory) / str(run.rank)).write_text(f"{type(error).__name__}: {error}")
    return {}


def test_a_worker_that_vanishes_is_named(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="rank 1"):
        play_all(vanishes, "module", str(tmp_path))
    for rank in (0, 2):
        said = (tmp_path / str(rank)).read_text()
        assert re.fullmatch(r"PeerLost: worker 1: .*\[E-PEER-LOST\]", said)
