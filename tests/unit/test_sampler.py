"""The sampler: each sample once per epoch of data, for any shares, prefetching, losses of workers and resumed jobs."""

from __future__ import annotations

import collections
from collections.abc import Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.balance import FakeSession, LeftMembers
from torch.utils.data import DataLoader, Dataset

from commlayer.balance import Sampler
from commlayer.balance.consumed_log import TABLE, ConsumedLog, ConsumedLogState, Permutation, count_samples, merged
from commlayer.balance.schedule import CHANGE_DELAY_STEPS, with_joined
from commlayer.records import Plan


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
        self.sessions = {rank: FakeSession() for rank in shares}
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
        return max(max(s.drawn, s.announced[0] + 1) for s in self.samplers.values())

    def announce(self, step: int, shares: dict[int, int], **more: Any) -> None:
        self.shares = shares
        for sampler in self.samplers.values():
            sampler.announce(step, shares, **more)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_sample_once_for_any_schedule(data: st.DataObject) -> None:
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
                fleet.sessions = {rank: FakeSession() for rank in ranks}
                for sampler in fleet.samplers.values():
                    sampler.load_state_dict(states[0])
                if len(trained) == length:
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


def test_last_step_is_proportionally_short_or_dropped() -> None:
    for drop, sizes in ((False, [[6, 2], [6, 2], [3, 1]]), (True, [[6, 2], [6, 2]])):
        fleet = Fleet(20, {0: 6, 1: 2}, {}, drop_last=drop)
        assert len(fleet.samplers[0]) == len(sizes)
        for _ in range(2):
            fleet.begin()
            seen = []
            while (batches := fleet.step()) is not None:
                seen.append([len(own) for own in batches.values()])
            assert seen == sizes


def test_small_batches_repeat_samples_evenly_with_their_true_weight() -> None:
    sampler = Sampler(9, 8, shares=[5, 3], rank=0, least=2, shuffle=False)
    session = FakeSession()
    batches = [(list(own), session.n) for own in sampler.follow(sampler, session)]
    assert batches == [([0, 1, 2, 3, 4], 5.0), ([8, 8], 1.0)]
    idle = Sampler(9, 8, shares=[5, 3], rank=1, least=2, shuffle=False)
    assert [(len(own), session.n) for own in idle.follow(idle, session)] == [(3, 3.0), (2, 0.0)]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return index


def test_weights_of_micro_batches_sum_to_one() -> None:
    sampler = Sampler(23, 10, shares=[7, 3], rank=0, cap=3, shuffle=False)
    seen = [(own, round(sampler.fraction, 3), sampler.last) for own in sampler.follow(sampler)]
    assert seen[:3] == [([0, 1, 2], 0.429, False), ([3, 4], 0.286, False), ([5, 6], 0.286, True)]
    assert len(sampler) == 0
    sampler.set_epoch(1)
    assert len(sampler) == len(list(sampler.follow(sampler)))


def test_token_weights_come_from_the_batch() -> None:
    class Accumulating(FakeSession):
        def no_sync(self) -> Any:
            import contextlib

            return contextlib.nullcontext()

    sampler = Sampler(8, 8, shares=[8], rank=0, cap=4, shuffle=False)
    session = Accumulating()
    seen = [(sampler.fraction, session.n) for _ in sampler.follow(sampler, session, weigh=lambda own: 1.0 + max(own))]
    assert seen == [(4 / 12, 12.0), (8 / 12, 12.0)]


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
    resumed.set_epoch(1)  # as scripts do; running steps continue
    assert [batch.tolist() for batch in resumed.follow(DataLoader(Numbers(), batch_sampler=resumed))] == again[3:]
    assert sorted({len(own) for own in again}) == [1, 5]


def test_step_counts_once_it_is_averaged() -> None:
    """A script that stops or saves between a batch and its backward pass has not trained that batch."""

    class Counting(FakeSession):
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
def test_no_sample_is_lost_after_resuming_with_another_number_of_workers(
    before: int, lost: dict[int, int], now: int, made_with: list[int] | None, sizes: list[int],
) -> None:
    """This includes batches announced by a worker lost shortly before and not reassigned yet."""
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
        sampler.announce(2, sampler.announced[1])  # different ones may be announced immediately
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


@pytest.mark.parametrize(("members", "text"), [
    ((0, 1), r"\b64 batches\b.*\b63\b.*E-SAMPLER-FOLLOW"),
    ((0,), r"\b2 workers\b.*job has 1\b.*E-SAMPLER-FOLLOW"),
])
def test_loaders_that_cannot_reassign_samples_are_refused_before_training(
    members: tuple[int, ...], text: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sampler = Sampler(400, 2)
    workers = 16 if len(members) == 2 else 0
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers, prefetch_factor=4 if workers else None)
    with pytest.raises(ValueError, match=text):
        next(iter(sampler.follow(loader, LeftMembers(members))))
    assert (sampler.drawn, sampler.step) == (0, 0)


LENGTH, BATCH, EPOCHS, UNEVEN = 700, 6, 3, (3, 1, 2)


class EarlyLoader(Ahead):
    """A loader that says how many batches it draws early."""

    def __init__(self, sampler: Sampler, lead: int) -> None:
        super().__init__(sampler, lead)
        self.batch_sampler, self.num_workers, self.prefetch_factor = sampler, 1, lead


class Home(FakeSession):
    """A worker and its session, which enters the job's epoch as soon as it learns of it.

    `batch`: its current batch; none once its epochs are over.
    """

    total: float | None = None

    def __init__(self, job: Job, own: int, members: tuple[int, ...], given: dict[str, str] | None = None) -> None:
        super().__init__()
        self.job, self.own, self.members, self.may_leave, self.joined_state = job, own, members, True, given or {}
        self.exchanged_steps = self.entered = job.exchanged_steps
        self.gone: dict[int, int] = {}
        self.sent: list[tuple[int, int]] = []
        """By epoch and sample: samples in the running outer step, and those drawn since."""
        self.since: list[tuple[int, int]] = []
        self.sampler = Sampler(LENGTH, BATCH, rank=members.index(own), world=len(members), shares=job.shares)
        self._batches = self._script(job.lead)
        self.batch: list[int] | None = []
        self.go()

    @property
    def step(self) -> int:
        return self.job.passes

    def steps_at_exit(self, member: int) -> int:
        return self.gone.get(member, self.entered)

    def weight(self, n: float, total: float | None = None) -> None:
        self.n, self.total = n, total

    def look(self) -> None:
        """It has made the due exchanges."""
        self.members, self.exchanged_steps = self.job.members, self.job.exchanged_steps
        self.gone |= self.job.parted

    def catch_up(self, *, wholly: bool = False) -> None:
        if wholly:
            self.job.end_rounds()
        self.look()

    def flush(self) -> bool:
        self.job.drain()
        self.look()
        return False

    def _script(self, lead: int) -> Generator[list[int], None, None]:
        for epoch in range(EPOCHS):
            self.sampler.set_epoch(epoch)
            for batch in self.sampler.follow(EarlyLoader(self.sampler, lead), self):
                yield batch if self.sampler.samples else []

    def go(self) -> None:
        self.batch = next(self._batches, None)


class Job:
    """Steps of all present workers. `learnt`: samples in the weights of all."""

    def __init__(self, lead: int, shares: Sequence[int] | None = None, every: int = 1, *, overlap: bool = False) -> None:
        self.lead, self.shares, self.ids, self.every, self.overlap = lead, shares, 3, every, overlap
        self.members, self.passes, self.exchanged_steps, self.taken = (0, 1, 2), 0, 0, 0
        self.parted: dict[int, int] = {}
        self.homes = [Home(self, own, self.members) for own in range(3)]
        self.learnt: dict[int, list[int]] = {epoch: [] for epoch in range(EPOCHS)}
        self._under_way, self._come = False, False

    def step(self, event: str, which: int) -> None:
        """What each worker trains in the next step; None at the end of the epoch, which is the same for all."""
        if "dies" in event and len(self.homes) > 1:
            del self.homes[which % len(self.homes)]
        self._come |= "comes" in event
        # A worker joins where the others wait for an exchange.
        ends = self.homes[0].sampler._trained.is_last_step()
        come = self._come and (ends or (self.taken + 1 >= self.every and (self._under_way or not self.overlap)))
        if come:
            self._let_in()
        if "first" in event and len(self.homes) > 1:
            del self.homes[0]
        members = tuple(home.own for home in self.homes)
        report = self.homes if set(self.members) <= set(members) else self.homes[-1:] if come else []
        assert {home.total for home in report} <= {None, sum(home.n for home in self.homes)}, "the given sum is right"
        for home in self.homes:
            assert home.sampler.epoch == self.homes[0].sampler.epoch
            home.since += [(home.sampler.epoch, sample) for sample in home.batch or []]
        self.passes, self.taken = self.passes + 1, self.taken + 1
        if self.taken >= self.every:
            self._exchange()
        if "plan" in event:
            self.drain()
            self.every, self.overlap = (1, 4, 90)[which], "round" in event and which > 0
        for home in self.homes:
            if home.own % 2:  # the optimizers of the others were skipped: they come to know as they catch up
                home.look()
        for home in self.homes:
            home.go()
        assert {home.batch is None for home in self.homes} in ({True}, {False}), "all end together"

    def _let_in(self) -> None:
        present = (*(home.own for home in self.homes), self.ids)
        name, say = next(iter(self.homes[0].followers.items()))
        self.homes.append(Home(self, self.ids, present, {name: say()}))
        assert self.homes[-1].batch == [], "it brings nothing to the step in which it comes"
        self.ids, self._come = self.ids + 1, False

    def _exchange(self) -> None:
        if self._under_way:
            self._merge()
        self._begin()
        if not self.overlap:
            self._merge()

    def _begin(self) -> None:
        self._under_way, self._begun, self.taken = True, self.passes, 0
        for home in self.homes:
            home.sent, home.since = home.since, []

    def _merge(self) -> None:
        """Among the remaining workers."""
        present = tuple(home.own for home in self.homes)
        self.parted |= {member: self.exchanged_steps for member in self.members if member not in present}
        self.members, self.exchanged_steps, self._under_way = present, self._begun, False
        for home in self.homes:
            for epoch, sample in home.sent:
                self.learnt[epoch].append(sample)

    def end_rounds(self) -> None:
        while self.exchanged_steps < self.passes:
            self._exchange()

    def drain(self) -> None:
        if self._under_way:
            self._merge()
        if self.exchanged_steps < self.passes:
            self._begin()
            self._merge()

    @property
    def over(self) -> bool:
        return self.homes[0].batch is None


def trained(job: Job, events: dict[int, tuple[str, int]]) -> None:
    """Runs to the end; each sample is learnt once."""
    step = 0
    while not job.over:
        job.step(*events.get(step, ("", 0)))
        step += 1
    for epoch in range(EPOCHS):
        assert sorted(job.learnt[epoch]) == list(range(LENGTH))
    assert {home.sampler.state_dict()["sampler"] for home in job.homes} == {job.homes[0].sampler.state_dict()["sampler"]}


EVENTS = ["dies", "comes", "dies, comes", "comes, first dies", "plan", "plan of rounds", "dies, plan of rounds"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 350), st.sampled_from(EVENTS), st.integers(0, 2)), max_size=8),
       st.integers(0, CHANGE_DELAY_STEPS), st.sampled_from([None, UNEVEN]), st.sampled_from([1, 2, 5, 70]), st.booleans())
def test_each_sample_is_trained_once_for_any_joins_losses_and_plans(
    events: list[tuple[int, str, int]], lead: int, shares: Sequence[int] | None, every: int, overlap: bool,
) -> None:
    trained(Job(lead, shares, every, overlap=overlap and every > 1), {step: (what, which) for step, what, which in events})


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("every", [4, 40])
def test_unshared_samples_of_a_lost_worker_are_reassigned(every: int, overlap: bool) -> None:
    """The worker is lost at any point of an outer step, also in the last ones of an epoch and those in progress at its end."""
    steps = -(-LENGTH // BATCH)
    points = range(2 * every + 1) if every < 10 else range(0, 2 * every + 1, 9)
    for point in (*points, *(steps - 1 - point for point in points)):
        trained(Job(3, every=every, overlap=overlap), {point: ("dies", 1)})


@pytest.mark.parametrize(("every", "overlap"), [(40, False), (40, True), (118, False), (70, True), (300, True)])
def test_joining_worker_is_admitted_before_the_end_of_an_epoch(every: int, overlap: bool) -> None:
    steps, job = -(-LENGTH // BATCH), Job(3, every=every, overlap=overlap)
    for step in range(steps):
        job.step("comes" if step == 5 else "", 0)
    assert len(job.homes) == 4
    trained(job, {})


@pytest.mark.parametrize(("shares", "come", "least", "then"), [
    ({0: 8, 1: 4}, [2], 1, {0: 5, 1: 3, 2: 4}),
    ({0: 10, 1: 2}, [2], 2, {0: 4, 1: 4, 2: 4}),  # in proportion one would have 1
    ({0: 6, 1: 6}, [2], 5, {0: 6, 1: 6, 2: 0}),  # not even parts reach the least
    ({0: 12, 1: 0}, [2], 1, {0: 6, 1: 0, 2: 6}),
    ({}, [3, 4], 1, {3: 6, 4: 6}),
    ({0: 6, 1: 0}, [], 1, {0: 12, 1: 0}),
])
def test_joining_worker_gets_an_equal_part(shares: dict[int, int], come: list[int], least: int, then: dict[int, int]) -> None:
    assert with_joined(shares, come, 12, least) == then


def test_local_steps_follow_fixed_shares() -> None:
    sampler, session = Sampler(40, 8, rank=0, shares=[4, 0, 4]), FakeSession()
    loop = sampler.follow(sampler, session)
    next(loop)
    session.plan = Plan("", (), local_steps=4)
    assert len([*loop]) == 4
    assert sampler.step == 5


def test_resume_between_exchanges_still_reassigns_samples_of_lost_workers() -> None:
    """Two of three steps are local and no exchange has included them."""
    before = [Sampler(400, 4, rank=rank, world=2, shuffle=False) for rank in range(2)]
    for sampler in before:
        session = LeftMembers((0, 1))
        for step, _ in enumerate(loop := sampler.follow(sampler, session), start=1):
            session.step, session.exchanged_steps = step, 1
            if step == 3:
                loop.close()
    sampler, session = Sampler(400, 4, rank=0, world=2, shuffle=False), LeftMembers((0, 1))
    sampler.load_state_dict(before[0].state_dict())
    session.exchanged_steps, seen = -2, list[int]()
    session.steps_at_exit = lambda member: -2  # type: ignore[method-assign]
    for own in sampler.follow(sampler, session):
        seen += own
        session.members = (0,)
        session.step += 1
        session.exchanged_steps = session.step
    assert sorted({*range(400)} - {*seen}) == [0, 1, 2, 3, 4, 5, 8, 9], "what all had, and its own"
    assert len(seen) == len(set(seen))


LENGTH_LOG = 300
GOLDEN = {1000: (125, 697, 303, 443, 285, 560), 4 * TABLE: (1112160, 746553, 2574298, 2094468, 12460, 1031196)}


def positions(ranges: list[tuple[int, int]]) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_each_position_is_consumed_once(data: st.DataObject) -> None:
    """An independent count of the applied samples is compared with what the log reports as left."""
    log = ConsumedLog(data.draw(st.integers(0, LENGTH_LOG)))
    workers = {0, 1, 2}
    step, newest = 0, 2
    given_out: dict[int, dict[int, list[tuple[int, int]]]] = {}
    applied: list[int] = []
    for _ in range(data.draw(st.integers(0, 30))):
        event = data.draw(st.sampled_from(["give", "give", "commit", "die", "join", "resume"]))
        if event == "give":
            counts = {w: data.draw(st.integers(0, 40)) for w in sorted(workers)}
            if sum(counts.values()) <= log.left:
                given_out[step] = log.assign(step, counts)
                assert {w: count_samples(r) for w, r in given_out[step].items()} == counts
                step += 1
        elif event == "commit" and given_out:
            oldest = min(given_out)
            missing = data.draw(st.sets(st.sampled_from(sorted(given_out[oldest])))) if given_out[oldest] else set()
            log.commit(oldest, missing)
            applied += [i for w, r in given_out.pop(oldest).items() if w not in missing for i in positions(r)]
        elif event == "die" and len(workers) > 1:
            dead = data.draw(st.sampled_from(sorted(workers)))
            workers.discard(dead)
            before = log.left
            lost = [i for gone in given_out.values() for i in positions(gone.pop(dead, []))]
            assert log.take_back(dead) == len(lost) == log.left - before
        elif event == "join":
            newest += 1
            workers.add(newest)
        elif event == "resume":
            log = ConsumedLog.of(msgspec.json.decode(msgspec.json.encode(log.state), type=ConsumedLogState))
        assert sorted(applied) == positions(log.done)
    for open_step in sorted(given_out):
        log.commit(open_step)
        applied += [i for r in given_out[open_step].values() for i in positions(r)]
    while log.left:
        applied += [i for r in log.assign(step, {0: min(7, log.left)}).values() for i in positions(r)]
        log.commit(step)
        step += 1
    assert sorted(applied) == list(range(log.length))
    assert log.done == merged([(0, log.length)])


def test_consumed_log_stays_small() -> None:
    log = ConsumedLog(10**12)
    for step in range(200):
        log.assign(step, {w: 1000 + w for w in range(8)})
        if step >= 10:
            log.commit(step - 10)
    assert len(msgspec.json.encode(log.state)) < 5000


@pytest.mark.parametrize(("act", "text"), [
    (lambda log: log.assign(0, {0: 1}), r"step 0\b.*E-SAMPLER-ARGUMENT"),
    (lambda log: log.assign(1, {0: 9}), r"step 1\b.*\b9\b.*\b8\b.*E-SAMPLER-ARGUMENT"),
    (lambda log: log.commit(5), r"step 5\b.*E-SAMPLER-ARGUMENT"),
    (lambda log: ConsumedLog.of(ConsumedLogState(4, [(0, 9)], {})), r"0 to 3\b.*E-SAMPLER-STATE"),
    (lambda log: ConsumedLog.of(ConsumedLogState(4, [(0, 2)], {0: {1: [(1, 3)]}})),
     r"position 1\b.*E-SAMPLER-STATE"),
])
def test_log_misuse_is_named(act: Any, text: str) -> None:
    log = ConsumedLog(10)
    log.assign(0, {0: 2})
    with pytest.raises(ValueError, match=text) as caught:
        act(log)
    assert "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(-5, 2**70), st.integers(0, 10**6), st.booleans())
def test_orders_are_permutations(length: int, seed: int, epoch: int, walk: bool) -> None:
    # Also the algorithm of long streams, at a length that can be counted.
    order = Permutation(length, seed, epoch, longest_table=0 if walk else length)
    cut = length // 3
    assert sorted(order.at([(0, cut), (cut, length)])) == list(range(length))


def test_long_streams_take_no_memory() -> None:
    length = 10**11
    order = Permutation(length, 3, 0)
    seen = order.at([(0, 500), (length - 500, length)])
    assert len(set(seen)) == 1000
    assert all(0 <= i < length for i in seen)
    # The mean of 1000 even draws is within five of its deviations of the middle.
    assert abs(sum(seen) / 1000 / length - 0.5) < 5 * 0.2887 / 1000**0.5


@pytest.mark.parametrize("length", [1000, 4 * TABLE])
def test_orders_differ_by_seed_and_epoch_and_never_by_machine(length: int) -> None:
    orders = {key: tuple(Permutation(length, *key).at([(0, 6)])) for key in [(0, 0), (0, 1), (1, 0)]}
    assert len(set(orders.values())) == 3
    # Written down once: all members of a job must agree on it, whatever they run on.
    assert orders[0, 0] == GOLDEN[length]
