"""The sampler: each sample once an epoch on whichever worker, whatever is announced, drawn ahead, lost or resumed."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.balance import Left, Noted
from torch.utils.data import DataLoader, Dataset

from commlayer.balance import Sampler
from commlayer.balance.sampler import CHANGE_DELAY_STEPS


class Ahead:
    """A loader that draws some batches early, as with DataLoader workers."""

    def __init__(self, sampler: Sampler, depth: int) -> None:
        self.sampler, self.depth = sampler, depth

    def __iter__(self) -> Iterator[list[int]]:
        drawn: collections.deque[list[int]] = collections.deque()
        for batch in self.sampler:
            drawn.append(batch)
            if len(drawn) > self.depth:
                yield drawn.popleft()
        yield from drawn


class Fleet:
    """All workers of a job in lockstep, without a network."""

    def __init__(self, length: int, shares: dict[int, int], depths: dict[int, int], **fields: Any) -> None:
        self.fields, self.batch, self.length = fields, sum(shares.values()), length
        self.samplers = {rank: self.make(rank, shares) for rank in shares}
        self.depths = depths
        self.sessions = {rank: Noted() for rank in shares}
        self.loops: dict[int, Iterator[list[int]]] = {}
        self.shares = shares

    def make(self, rank: int, shares: dict[int, int]) -> Sampler:
        return Sampler(self.length, self.batch, shares=shares, rank=rank, **self.fields)

    def begin(self) -> None:
        for rank, sampler in self.samplers.items():
            self.loops[rank] = sampler.follow(Ahead(sampler, self.depths.get(rank, 0)), self.sessions[rank])

    def step(self) -> dict[int, list[int]] | None:
        """What each worker trains in the next step; None at the end of the epoch, which is the same for all."""
        results: dict[int, list[int] | None] = {rank: next(loop, None) for rank, loop in self.loops.items()}
        ended = {batch is None for batch in results.values()}
        assert len(ended) == 1, "all workers have equally many steps"
        if None in results.values():
            return None
        return {rank: batch if self.sessions[rank].n else [] for rank, batch in results.items() if batch is not None}

    @property
    def drawn(self) -> int:
        """The first step for which shares may be announced."""
        return max(max(s.drawn, s._schedule.newest_step + 1) for s in self.samplers.values())

    def announce(self, step: int, shares: dict[int, int], **more: Any) -> None:
        self.shares = shares
        for sampler in self.samplers.values():
            sampler.announce(step, shares, **more)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_sample_once_whatever_happens(data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, 4))
    batch = data.draw(st.integers(workers, 24))
    length = data.draw(st.integers(batch, 150))

    def draw_shares(ranks: list[int]) -> dict[int, int]:
        cuts = sorted(data.draw(st.integers(0, batch)) for _ in ranks[1:])
        return dict(zip(ranks, [b - a for a, b in zip([0, *cuts], [*cuts, batch], strict=True)], strict=True))

    depths = {rank: data.draw(st.integers(0, 5)) for rank in range(10)}
    fleet = Fleet(length, draw_shares(list(range(workers))), depths, seed=3)
    newest = workers - 1
    for _ in range(2):
        trained: list[int] = []
        fleet.begin()
        while (batches := fleet.step()) is not None:
            now = {s.step for s in fleet.samplers.values()}
            assert len(now) == 1
            event = data.draw(st.sampled_from(["none", "none", "shares", "die", "join", "resume"]))
            if event == "die" and len(fleet.samplers) > 1:
                dead = data.draw(st.sampled_from(sorted(fleet.samplers)))
                for table in (fleet.samplers, fleet.loops, fleet.sessions):
                    table.pop(dead)
                del batches[dead]
                later = data.draw(st.integers(0, 3))
                fleet.announce(fleet.drawn + later, draw_shares(sorted(fleet.samplers)), lost={dead: now.pop()})
            trained += [i for own in batches.values() for i in own]
            if event == "shares":
                fleet.announce(fleet.drawn + data.draw(st.integers(0, 3)), draw_shares(sorted(fleet.samplers)))
            elif event in ("join", "resume"):
                states = [sampler.state_dict() for sampler in fleet.samplers.values()]
                assert all(state == states[0] for state in states), "a state is the same on all workers"
                ranks = sorted(fleet.samplers)
                if event == "join":
                    newest += 1
                    ranks.append(newest)
                old = fleet.shares
                fleet.loops.clear()
                fleet.samplers = {rank: fleet.make(rank, {0: batch}) for rank in ranks}
                fleet.sessions = {rank: Noted() for rank in ranks}
                for sampler in fleet.samplers.values():
                    sampler.load_state_dict(states[0])
                ended = [sampler._trained.is_finished() for sampler in fleet.samplers.values()]
                if all(ended):
                    break  # follow would begin the next epoch
                fleet.begin()
                if event == "join":
                    fleet.announce(fleet.drawn, draw_shares(ranks))
                fleet.shares = old if event == "resume" else fleet.shares
        assert sorted(trained) == list(range(length))


def test_shares_take_effect_at_their_step() -> None:
    fleet = Fleet(80, {0: 5, 1: 3}, {0: 4, 1: 0})
    fleet.begin()
    sizes = []
    for step in range(10):
        batches = fleet.step()
        assert batches is not None
        sizes.append([len(own) for own in batches.values()])
        if step == 1:
            assert fleet.drawn == 6, "rank 0 has drawn four batches beyond the one in training"
            fleet.announce(7, {0: 2, 1: 6})
    assert sizes == [[5, 3]] * 7 + [[2, 6]] * 3
    assert fleet.step() is None


def test_the_last_step_is_short_in_proportion_or_left_out() -> None:
    for drop, sizes in ((False, [[6, 2], [6, 2], [3, 1]]), (True, [[6, 2], [6, 2]])):
        fleet = Fleet(20, {0: 6, 1: 2}, {}, drop_last=drop)
        assert len(fleet.samplers[0]) == len(sizes)
        for _ in range(2):
            fleet.begin()
            seen = []
            while (batches := fleet.step()) is not None:
                seen.append([len(own) for own in batches.values()])
            assert seen == sizes


def test_small_batches_repeat_their_samples_evenly_and_weigh_what_they_are() -> None:
    sampler = Sampler(9, 8, shares=[5, 3], rank=0, least=2, shuffle=False)
    session = Noted()
    batches = [(list(own), session.n) for own in sampler.follow(sampler, session)]
    assert batches == [([0, 1, 2, 3, 4], 5.0), ([8, 8], 1.0)]
    idle = Sampler(9, 8, shares=[5, 3], rank=1, least=2, shuffle=False)
    assert [(len(own), session.n) for own in idle.follow(idle, session)] == [(3, 3.0), (2, 0.0)]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return index


def test_with_dataloader_workers() -> None:
    sampler = Sampler(Numbers(), 8, shares=[5, 3], rank=0, seed=1)
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=1, prefetch_factor=2, persistent_workers=True)
    assert len(loader) == 7
    first = [batch.tolist() for batch in sampler.follow(loader)]
    assert [len(own) for own in first] == [5] * 6 + [1]
    again: list[list[int]] = []
    state: dict[str, Any] = {}
    for batch in sampler.follow(loader):
        again.append(batch.tolist())
        if len(again) == 2:
            assert sampler.drawn > sampler.step
            sampler.announce(sampler.drawn + 1, [1, 7])
        if len(again) == 3:
            state = sampler.state_dict()
    resumed = Sampler(Numbers(), 8, shares=[5, 3], rank=0, seed=1)
    resumed.load_state_dict(state)
    resumed.set_epoch(1)  # as scripts do; what is under way goes on
    assert [batch.tolist() for batch in resumed.follow(DataLoader(Numbers(), batch_sampler=resumed))] == again[3:]
    assert sorted({len(own) for own in again}) == [1, 5]


def test_a_step_counts_when_it_was_averaged() -> None:
    """A script that breaks off, or saves, between a batch and its backward pass has not trained that batch."""

    class Counting(Noted):
        steps = 0

        def metrics(self) -> dict[str, float]:
            return {"exchanges": self.steps}

    sampler, session = Sampler(40, 8, rank=0, world=1), Counting()
    session.plan = SimpleNamespace(steps_locally=False)  # type: ignore[assignment]
    for _ in sampler.follow(sampler, session):
        assert sampler.step == session.steps
        if session.steps == 2:
            break
        session.steps += 1
        sampler.state_dict()
        assert sampler.step == session.steps
    assert sampler.step == 2


@pytest.mark.parametrize(("before", "lost", "now", "made_with", "sizes"), [
    (3, {}, 2, None, [4, 4]),
    (2, {}, 4, None, [2, 2, 2, 2]),
    (3, {}, 2, [7, 1], [7, 1]),
    (3, {2: 1}, 2, None, [4, 4]),
])
def test_resumed_with_another_number_of_workers_no_sample_is_lost(
    before: int, lost: dict[int, int], now: int, made_with: list[int] | None, sizes: list[int],
) -> None:
    """Also what a worker that was lost shortly before had been given, which was announced and not handed out again yet."""
    old = [Sampler(56, 8, rank=rank, world=before, seed=1) for rank in range(before)]
    loops = [sampler.follow(Ahead(sampler, 2)) for sampler in old]
    trained: list[int] = []
    for step in range(2):
        trained += [i for rank, loop in enumerate(loops) for i in next(loop) if step < lost.get(rank, 99)]
    for sampler in old:
        sampler.announce(4, [8, *[0] * (before - 1)], lost=lost)
    state = old[0].state_dict()
    new = [Sampler(56, 8, rank=rank, world=now, shares=made_with, seed=1) for rank in range(now)]
    for sampler in new:
        sampler.load_state_dict(state)
        sampler.announce(2, sampler.announced[1])  # others than these may be announced at once
    assert len({str(sampler.state_dict()) for sampler in new}) == 1
    steps = list(zip(*(sampler.follow(sampler) for sampler in new), strict=True))
    assert [len(own) for own in steps[0]] == sizes
    assert sorted([*trained, *(i for step in steps for own in step for i in own)]) == list(range(56))


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Sampler(5, 8, rank=0, world=2), r"dataset\b.*\b5\b.*\b8\b.*E-SAMPLER-ARGUMENT"),
    (lambda: Sampler(50, 3, rank=0, world=4), r"batch 3\b.*\b4\b.*E-SHARES-ARGUMENT"),
    (lambda: Sampler(50, 8, rank=0, shares=[5, 2]), r"shares\b.*\[5, 2\].*\b7\b.*\b8\b.*E-SHARES-ARGUMENT"),
    (lambda: Sampler(50, 8, rank=0, shares=[9, -1]), "shares: worker 1 .*-1.*E-SHARES-ARGUMENT"),
    (lambda: Sampler(50, 8, rank=0, shares=[7, 1], least=2), r"shares: worker 1 .*\b1,.*least 2\b.*E-SHARES-ARGUMENT"),
    (lambda: Sampler(50, 8, rank=0, shares=[4, 4], least=4, cap=5), r"cap 5\b.*\b7\b.*E-SHARES-ARGUMENT"),
    (lambda: Sampler(50, 8, rank=0, shares=[8], least=0), r"least 0\b.*E-SHARES-ARGUMENT"),
    (lambda: Sampler(50, 8, rank=0, shares=[8]).set_epoch(-1), "epoch -1.*E-SAMPLER-ARGUMENT"),
    (lambda: Sampler(50, 8, rank=0, shares=[8]).announce(0, [8], lost={1: 5}),
     r"worker 1\b.*step 5\b.*-64 to 0\b.*E-SAMPLER-ARGUMENT"),
    (lambda: Sampler(50, 8, rank=0, shares=[8]).load_state_dict(Sampler(50, 8, rank=0, shares=[8], seed=1).state_dict()),
     r"seed is 1\b.*\b0\b.*E-SAMPLER-STATE"),
    (lambda: list(Sampler(50, 8, rank=0, shares=[8]).follow([[1]])), "batch_sampler=sampler.*E-SAMPLER-FOLLOW"),
])
def test_misuse_is_one_line(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_shares_for_a_drawn_step_are_refused() -> None:
    sampler = Sampler(50, 8, rank=0, shares=[8])
    next(batches := sampler.follow(Ahead(sampler, 2)))
    with pytest.raises(ValueError, match=r"announce: step 2\b.*step 3\b.*E-SAMPLER-ARGUMENT"):
        sampler.announce(2, [8])
    batches.close()


def test_a_loss_is_heard_of_however_far_a_loader_has_drawn_that_may_be_followed() -> None:
    sampler, session = Sampler(400, 2, rank=0, world=2, shuffle=False), Left((0, 1))
    seen: list[int] = []
    for own in sampler.follow(Ahead(sampler, CHANGE_DELAY_STEPS), session):
        seen += own
        session.step = session.carried = len(seen)
        if len(seen) == 5:
            assert sampler.drawn - sampler.step == CHANGE_DELAY_STEPS + 1, "the one at hand among them"
            session.members = (0,)
    assert sorted(seen) == sorted({*range(400)} - {1, 3, 5, 7}), "those that the other had trained"


@pytest.mark.parametrize(("members", "text"), [
    ((0, 1), r"\b64 batches\b.*\b63\b.*E-SAMPLER-FOLLOW"),
    ((0,), r"\b2 workers\b.*job has 1\b.*E-SAMPLER-FOLLOW"),
])
def test_what_cannot_be_handed_out_again_is_refused_before_training(
    members: tuple[int, ...], text: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sampler = Sampler(400, 2)
    workers = 16 if len(members) == 2 else 0
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers, prefetch_factor=4 if workers else None)
    with pytest.raises(ValueError, match=text):
        next(iter(sampler.follow(loader, Left(members))))
    assert (sampler.drawn, sampler.step) == (0, 0)
