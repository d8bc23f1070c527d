"""The controller in real training: shares move to the slower ranks' relief, and what is trained stays what it is.

Measured seconds come from lines that the tests fix, so decisions are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.attached import Run, Setting, coordinators, mlp, play, weights
from support.rank_pool import pool
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from commlayer.autotune.shares.driver import Controller
from commlayer.balance import Balancer, Decision, Joined, Line, Measurement, Note, Outcome, Sampler, shares
from commlayer.engine import spacing
from commlayer.engine.step import StepTiming
from commlayer.errors import InvalidInput

WORLD = 3
EPOCHS = 3
BATCH, LENGTH = 12, 67
LINES = [Line(0.001, 0.002), Line(0.002, 0.002), Line(0.006, 0.002)]
"""At rest 3 : 1.5 : 0.5."""
FAST = Line(0.0005, 0.001)


def dataset() -> TensorDataset:
    x = torch.randn(LENGTH, 12, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs(), x.sum(1).sin()], dim=1), torch.arange(LENGTH))


def train(run: Run, *, workers: int = 0, cap: tuple[int, ...] = (0, 0, 0), leave: bool = False, model: Any = None,
          least: int = 1, seconds: Callable[[int, int, int], float] | None = None, **fields: Any) -> dict[str, Any]:
    """`leave`: the loop ends in mid-epoch and begins anew, as one that saves and evaluates may do."""
    spacing.MOST_STEPS = 1  # a row after each step, whatever it costs
    model = mlp() if model is None else model
    wrapped = run.wrap(model)
    session: Any = None if run.alone else run.sessions[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = Sampler(LENGTH, BATCH, rank=0 if run.alone else run.rank, world=1 if run.alone else WORLD, seed=1, least=least,
                      cap=0 if run.alone else cap[run.rank])
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=0 if run.alone else workers,
                        persistent_workers=workers > 0 and not run.alone)
    controller = None
    if not run.alone:
        def measure(step: int, samples: int) -> float:
            if seconds is not None:
                return seconds(run.rank, step, samples)
            pieces = -(-samples // cap[run.rank]) if cap[run.rank] else 1
            return pieces * LINES[run.rank].time_s(samples / pieces)

        controller = Controller(session, sampler, measure=measure, **fields)
    trained: list[list[int]] = [[] for _ in range(EPOCHS)]
    for epoch in range(EPOCHS):
        for leaves in [2, math.inf] if leave else [math.inf]:
            sampler.set_epoch(epoch)
            first = sampler.step
            for x, y, index in sampler.follow(loader) if controller is None else controller.follow(loader):
                if sampler.samples:
                    trained[epoch] += index.tolist()
                (nn.functional.mse_loss(wrapped(x), y) * sampler.fraction).backward()
                if sampler.last:
                    optimizer.step()
                    optimizer.zero_grad()
                    if sampler.step == first + leaves:
                        break
    assert sampler.step == EPOCHS * -(-LENGTH // BATCH)
    found = weights(model) | {"trained": trained}
    if controller is not None:
        found |= {"events": controller.events, "lines": session.inspect.decisions(), "shares": controller.shares}
    return found


def loader_workers(run: Run) -> dict[str, Any]:
    return train(run, workers=1)


def micro_batches(run: Run) -> dict[str, Any]:
    """Caps that do not reach the batch: each rank computes its share in pieces of its own."""
    return train(run, cap=(5, 3, 1), workers=1)


def left_and_taken_up(run: Run) -> dict[str, Any]:
    return train(run, leave=True, workers=1)


def bad_times(run: Run) -> dict[str, Any]:
    """Rank 1 measures nonsense in two steps."""
    odd = {4: math.nan, 7: -1.0}

    def seconds(rank: int, step: int, samples: int) -> float:
        return odd[step] if rank == 1 and step in odd else LINES[rank].time_s(samples)

    return train(run, seconds=seconds)


def play_all(script: Any, how: str = "module") -> list[dict[str, Any]]:
    with coordinators(1, WORLD, 1) as made:
        return pool(WORLD).call(play, WORLD, script, Setting(how, addresses=tuple(m.address for m in made)))


def decisions(result: dict[str, Any]) -> list[Decision]:
    return [event for event in result["events"] if isinstance(event, Decision)]


def longest_s(shares: dict[int, int]) -> float:
    return max(LINES[rank].time_s(share) for rank, share in shares.items() if share)


def check(results: list[dict[str, Any]], script: Any) -> None:
    """As alone on the union; the same decisions on all ranks; sums kept; each sample once in each epoch."""
    expected = play(0, WORLD, script, None)
    for name, tensor in expected.items():
        if isinstance(tensor, torch.Tensor):
            torch.testing.assert_close(results[0][name], tensor, msg=lambda m, n=name: f"{n}: {m}")
            assert all(torch.equal(results[0][name], other[name]) for other in results[1:]), f"{name} differs between ranks"
    assert all(r["lines"] == results[0]["lines"] and r["shares"] == results[0]["shares"] for r in results)
    assert all(sum(d.shares) == BATCH for d in decisions(results[0]))
    for epoch in range(EPOCHS):
        assert sorted(i for r in results for i in r["trained"][epoch]) == list(range(LENGTH))


@pytest.mark.parametrize(("script", "how"), [
    (train, "module"), (train, "ddp"), (loader_workers, "module"), (loader_workers, "ddp"), (micro_batches, "module"),
    (left_and_taken_up, "module"),
], ids=lambda value: getattr(value, "__name__", value))
def test_shares_move_and_the_training_stays_the_same(script: Any, how: str) -> None:
    results = play_all(script, how)
    check(results, script)
    assert len(decisions(results[0])) >= 1
    if script is not micro_batches:
        assert longest_s(results[0]["shares"]) == longest_s(dict(enumerate(shares(LINES, BATCH))))
    sizes = [sum(len(epoch) for epoch in r["trained"]) for r in results]
    assert sizes[0] > sizes[1] > sizes[2]
    assert any(isinstance(event, Outcome) for event in results[0]["events"])
    assert "new shares from step" in results[0]["lines"][0]


def test_bad_times_are_said_and_left_out() -> None:
    results = play_all(bad_times)
    check(results, bad_times)
    said = [event.text for event in results[0]["events"] if isinstance(event, Note)]
    bad = [text for text in said if text.endswith("[E-TIME-MODEL]")]
    assert [text.partition(" s,")[0] for text in bad] == [f"worker 1: measured time {time}" for time in ("nan", "-1.0")]
    assert longest_s(results[0]["shares"]) == longest_s(dict(enumerate(shares(LINES, BATCH))))


def batch_norm(run: Run) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    return train(run, model=model, least=2)


def test_batch_norm_keeps_two_samples() -> None:
    results = play_all(batch_norm)
    assert decisions(results[0])
    assert all(min(d.shares) >= 2 for d in decisions(results[0]))


def known_before(run: Run) -> dict[str, Any]:
    return train(run, line=LINES[run.rank])


def test_lines_that_are_known_decide_with_the_first_exchange() -> None:
    results = play_all(known_before)
    check(results, known_before)
    (decision, *more) = decisions(results[0])
    assert not more
    assert list(decision.shares) == shares(LINES, BATCH)
    assert decision.step == 0
    assert decision.from_step == 3


class Slowed:
    """A session whose steps are measured as ever, but told as if its rank took so long for each."""

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


def really_measured(run: Run) -> dict[str, Any]:
    """The session's own measuring, of every step but the first after a begin."""
    spacing.MOST_STEPS = 1
    model = mlp()
    run.wrap(model)
    session: Any = Slowed(run.sessions[0], (0.001, 0.002, 0.006)[run.rank])
    sampler = Sampler(LENGTH, BATCH, rank=run.rank, world=WORLD)
    loader = DataLoader(dataset(), batch_sampler=sampler)
    controller = Controller(session, sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y, _ in controller.follow(loader):
            nn.functional.mse_loss(model(x), y).backward()
    return {"measured": session.measured, "shares": controller.shares, "events": controller.events}


def test_times_are_the_sessions_own_where_nobody_gives_any() -> None:
    results = play_all(really_measured)
    assert all(r["events"] == results[0]["events"] and r["shares"] == results[0]["shares"] for r in results)
    assert all(0 < lap.seconds < 60 for r in results for lap in r["measured"])
    assert len({lap.step for lap in results[0]["measured"]}) == len(results[0]["measured"]) > EPOCHS
    first = decisions(results[0])[0]
    assert first.step >= 1, "the first step after a begin may hold anything"
    assert results[0]["shares"][0] > BATCH // WORLD > results[0]["shares"][2], "what the session measured moves work"


def other_rank(run: Run) -> dict[str, Any]:
    model = mlp()
    run.wrap(model)
    sampler = Sampler(LENGTH, BATCH, rank=0, world=WORLD)
    controller = Controller(run.sessions[0], sampler)
    try:
        for x, y, _ in controller.follow(DataLoader(dataset(), batch_sampler=sampler)):
            nn.functional.mse_loss(model(x), y).backward()
    except InvalidInput as refused:
        return {"code": refused.code, "said": refused.what}
    return {"code": ""}


def test_a_sampler_of_another_rank_is_named() -> None:
    results = play_all(other_rank)
    assert [r["code"] for r in results] == ["E-SAMPLER-RANKS"] * WORLD
    assert all("rank 1 is for rank 0" in r["said"] for r in results)


def test_alone_it_only_hands_out() -> None:
    sampler = Sampler(LENGTH, BATCH, rank=0, world=1)
    controller = Controller(None, sampler)  # type: ignore[arg-type]
    seen = [i for _, _, index in controller.follow(DataLoader(dataset(), batch_sampler=sampler)) for i in index.tolist()]
    assert sorted(seen) == list(range(LENGTH))


def test_shares_that_were_given_hold_until_their_step_and_promise_nothing() -> None:
    """As after a resume, where the saved shares are for a step to come."""
    balancer = Balancer([Joined(w) for w in range(WORLD)], BATCH, shares={0: 2, 1: 2, 2: 8}, from_step=5)
    measured = [Measurement(w, n, LINES[w].time_s(n)) for w, n in enumerate((2, 2, 8))]
    found = [balancer.decide(step, measured) for step in range(7)]
    assert found[:5] == [None] * 5
    first = next(decision for decision in found if decision)
    assert first.before_s == pytest.approx(LINES[2].time_s(8), rel=0.1)
    assert not any(isinstance(event, Outcome) for event in balancer.events)


def resumed(run: Run) -> dict[str, Any]:
    """A sampler that is taken up with shares that were announced for later; the old controller's decisions go on."""
    spacing.MOST_STEPS = 1
    model = mlp()
    run.wrap(model)
    session = run.sessions[0]
    loaders = []
    for _ in range(2):
        sampler = Sampler(LENGTH, BATCH, rank=run.rank, world=WORLD)
        loaders.append((sampler, DataLoader(dataset(), batch_sampler=sampler, num_workers=1)))
    (before, loader), (after, other) = loaders

    def measure(step: int, samples: int) -> float:
        return LINES[run.rank].time_s(samples)

    for x, y, _ in Controller(session, before, measure=measure).follow(loader):
        nn.functional.mse_loss(model(x), y).backward()
        if before.announced[0] > before.step:
            break
    state = before.state_dict()
    after.load_state_dict(state)
    assert after.announced == before.announced
    controller = Controller(session, after, measure=measure)
    for epoch in range(EPOCHS):
        after.set_epoch(epoch)
        for x, y, _ in controller.follow(other):
            nn.functional.mse_loss(model(x), y).backward()
    return {"events": controller.events, "state": state, "shares": controller.shares, "from": before.announced[0]}


def test_after_a_resume_decisions_go_on_behind_what_was_announced() -> None:
    results = play_all(resumed)
    assert all(r["state"] == results[0]["state"] and r["shares"] == results[0]["shares"] for r in results)
    assert all(d.from_step > results[0]["from"] for d in decisions(results[0]))
    assert longest_s(results[0]["shares"]) == longest_s(dict(enumerate(shares(LINES, BATCH))))
