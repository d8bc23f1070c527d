"""Workers of a job with a sampler leave and join at any step: each sample of an epoch is trained once, by any worker."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.balance import Noted

from commlayer.balance import Sampler
from commlayer.balance.schedule import CHANGE_DELAY_STEPS, with_joined

LENGTH, BATCH, EPOCHS, UNEVEN = 700, 6, 3, (3, 1, 2)


class Ahead:
    """A loader that draws that many batches early."""

    def __init__(self, sampler: Sampler, lead: int) -> None:
        self.batch_sampler, self.num_workers, self.prefetch_factor = sampler, 1, lead

    def __iter__(self) -> Generator[list[int], None, None]:
        held: list[list[int]] = []
        for batch in self.batch_sampler:
            held.append(batch)
            if len(held) > self.prefetch_factor:
                yield held.pop(0)
        yield from held


class Home(Noted):
    """A worker and its session, which stands where its job does as soon as it comes to know. `batch` is what it is at; it has
    none once its epochs are over."""

    total: float | None = None

    def __init__(self, job: Job, own: int, members: tuple[int, ...], given: dict[str, str] | None = None) -> None:
        super().__init__()
        self.job, self.own, self.members, self.may_leave, self.given = job, own, members, True, given or {}
        self.carried = self.entered = job.carried
        self.gone: dict[int, int] = {}
        self.sent: list[tuple[int, int]] = []
        """By epoch and sample: what of it is in a round that is under way, and what it has taken since."""
        self.since: list[tuple[int, int]] = []
        self.sampler = Sampler(LENGTH, BATCH, rank=members.index(own), world=len(members), shares=job.shares)
        self._batches = self._script(job.lead)
        self.batch: list[int] | None = []
        self.go()

    @property
    def step(self) -> int:
        return self.job.passes

    def parted(self, member: int) -> int:
        return self.gone.get(member, self.entered)

    def weight(self, n: float, total: float | None = None) -> None:
        self.n, self.total = n, total

    def look(self) -> None:
        """It has made the exchanges that were due."""
        self.members, self.carried = self.job.members, self.job.carried
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
            for batch in self.sampler.follow(Ahead(self.sampler, lead), self):
                yield batch if self.sampler.samples else []

    def go(self) -> None:
        self.batch = next(self._batches, None)


class Job:
    """Steps of all who are there. `learnt` is what is in weights that all have."""

    def __init__(self, lead: int, shares: Sequence[int] | None = None, every: int = 1, *, overlap: bool = False) -> None:
        self.lead, self.shares, self.ids, self.every, self.overlap = lead, shares, 3, every, overlap
        self.members, self.passes, self.carried, self.taken = (0, 1, 2), 0, 0, 0
        self.parted: dict[int, int] = {}
        self.homes = [Home(self, own, self.members) for own in range(3)]
        self.learnt: dict[int, list[int]] = {epoch: [] for epoch in range(EPOCHS)}
        self._under_way, self._come = False, False

    def step(self, event: str, which: int) -> None:
        """`event`: what happens in it."""
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
        """Of those who are left."""
        present = tuple(home.own for home in self.homes)
        self.parted |= {member: self.carried for member in self.members if member not in present}
        self.members, self.carried, self._under_way = present, self._begun, False
        for home in self.homes:
            for epoch, sample in home.sent:
                self.learnt[epoch].append(sample)

    def end_rounds(self) -> None:
        while self.carried < self.passes:
            self._exchange()

    def drain(self) -> None:
        if self._under_way:
            self._merge()
        if self.carried < self.passes:
            self._begin()
            self._merge()

    @property
    def over(self) -> bool:
        return self.homes[0].batch is None


def trained(job: Job, events: dict[int, tuple[str, int]]) -> None:
    """To the end, with each sample once in what all have learnt."""
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
def test_each_sample_is_trained_once_in_an_epoch_whoever_goes_and_comes_under_whatever_plan(
    events: list[tuple[int, str, int]], lead: int, shares: Sequence[int] | None, every: int, overlap: bool,
) -> None:
    trained(Job(lead, shares, every, overlap=overlap and every > 1), {step: (what, which) for step, what, which in events})


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("every", [4, 40])
def test_whoever_dies_at_whatever_point_of_a_round_what_it_had_not_shared_goes_out_again(every: int, overlap: bool) -> None:
    """Also in the last rounds of an epoch, and those that are under way as it ends."""
    steps = -(-LENGTH // BATCH)
    points = range(2 * every + 1) if every < 10 else range(0, 2 * every + 1, 9)
    for point in (*points, *(steps - 1 - point for point in points)):
        trained(Job(3, every=every, overlap=overlap), {point: ("dies", 1)})


@pytest.mark.parametrize(("every", "overlap"), [(40, False), (40, True), (118, False), (70, True), (300, True)])
def test_whoever_comes_is_let_in_by_the_end_of_an_epoch_however_long_rounds_are(every: int, overlap: bool) -> None:
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
def test_who_comes_gets_an_even_part(shares: dict[int, int], come: list[int], least: int, then: dict[int, int]) -> None:
    assert with_joined(shares, come, 12, least) == then
