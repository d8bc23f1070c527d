"""Workers of a sampler's job go and come, at any step: each sample of an epoch is trained once, whoever does it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_kit import Noted
from torch.utils.data import DataLoader

from commlayer.balance import Sampler
from commlayer.balance.roster import SOON_STEPS, Roster, widened

LENGTH, BATCH, EPOCHS, UNEVEN = 700, 6, 3, (3, 1, 2)


class Ahead:
    """A loader that draws so many batches ahead."""

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
    """A worker and its session. `batch` is what it is at; it has none once its epochs are over."""

    total: float | None = None

    def __init__(self, own: int, members: tuple[int, ...], lead: int, given: dict[str, str] | None = None,
                 shares: Sequence[int] | None = None) -> None:
        super().__init__()
        self.own, self.members, self.may_leave, self.given = own, members, True, given or {}
        self.sampler = Sampler(LENGTH, BATCH, rank=members.index(own), world=len(members), shares=shares)
        self._batches = self._script(lead)
        self.batch: list[int] | None = []
        self.go()

    def weight(self, n: float, total: float | None = None) -> None:
        self.n, self.total = n, total

    def _script(self, lead: int) -> Generator[list[int], None, None]:
        for epoch in range(EPOCHS):
            self.sampler.set_epoch(epoch)
            for batch in self.sampler.follow(Ahead(self.sampler, lead), self):
                yield batch if self.sampler.samples else []

    def go(self) -> None:
        self.batch = next(self._batches, None)


class Job:
    """Steps of all who are there."""

    def __init__(self, lead: int, shares: Sequence[int] | None = None) -> None:
        self.lead, self.ids = lead, 3
        self.homes = [Home(own, (0, 1, 2), lead, shares=shares) for own in range(3)]
        self.trained: dict[int, list[int]] = {epoch: [] for epoch in range(EPOCHS)}

    def step(self, event: str, which: int) -> None:
        """`event`: what happens in it."""
        if "dies" in event and len(self.homes) > 1:
            del self.homes[which % len(self.homes)]
        if "comes" in event:
            there = (*(home.own for home in self.homes), self.ids)
            name, say = next(iter(self.homes[0].followers.items()))
            self.homes.append(Home(self.ids, there, self.lead, {name: say()}))
            assert self.homes[-1].batch == [], "it brings nothing to the step in which it comes"
            self.ids += 1
        if "first" in event and len(self.homes) > 1:
            del self.homes[0]
        members = tuple(home.own for home in self.homes)
        weight = sum(home.n for home in self.homes)
        told = self.homes if "dies" not in event else self.homes[-1:] if "comes" in event else []
        assert {home.total for home in told} <= {None, weight}, "who says what all weigh, with nobody dead, is right"
        for home in self.homes:
            home.members = members
            assert home.sampler.epoch == self.homes[0].sampler.epoch
            self.trained[home.sampler.epoch] += home.batch or []
        for home in self.homes:
            home.go()
        assert {home.batch is None for home in self.homes} in ({True}, {False}), "all end together"

    @property
    def over(self) -> bool:
        return self.homes[0].batch is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 350), st.sampled_from(["dies", "comes", "dies, comes", "comes, first dies"]),
                          st.integers(0, 2)), max_size=6), st.integers(0, SOON_STEPS), st.sampled_from([None, UNEVEN]))
def test_each_sample_is_trained_once_in_an_epoch_whoever_goes_and_comes(
    events: list[tuple[int, str, int]], lead: int, shares: Sequence[int] | None,
) -> None:
    job, at = Job(lead, shares), {step: (what, which) for step, what, which in events}
    step = 0
    while not job.over:
        job.step(*at.get(step, ("", 0)))
        step += 1
    for epoch in range(EPOCHS):
        assert sorted(job.trained[epoch]) == list(range(LENGTH))
    assert {home.sampler.state_dict()["sampler"] for home in job.homes} == {job.homes[0].sampler.state_dict()["sampler"]}


def test_who_comes_has_its_part_from_the_step_on_in_which_the_others_have_less() -> None:
    job = Job(lead=5)
    for step in range(10):
        job.step({2: "dies", 9: "comes"}.get(step, ""), 1)
    shares = []
    for _ in range(SOON_STEPS + 2):
        shares.append([len(home.batch or []) for home in job.homes])
        job.step("", 0)
    assert shares[0] == [2, 2, 0], "the others have not taken over yet what the dead had"
    assert shares[SOON_STEPS - 7] == [3, 3, 0]
    assert shares[SOON_STEPS - 1] == [3, 3, 0]
    assert shares[SOON_STEPS] == [2, 2, 2]
    assert [home.sampler.rank for home in job.homes] == [0, 2, 3]


def test_epochs_that_the_others_are_through_with_have_no_batches_where_a_home_joins() -> None:
    job = Job(lead=0)
    while job.homes[0].sampler.epoch < 2:
        job.step("", 0)
    name, say = next(iter(job.homes[0].followers.items()))
    new = Home(3, (0, 1, 2, 3), 0, {name: say()})
    assert (new.sampler.epoch, new.sampler.step) == (2, job.homes[0].sampler.step)
    session = Noted()
    session.given = {name: say()}
    assert Sampler(LENGTH, BATCH, rank=0, world=1).epoch_of(session) == 2
    ahead = Sampler(LENGTH, BATCH, rank=0, world=1)
    ahead.set_epoch(3)
    with pytest.raises(ValueError, match=r"follow: epoch 3, and the running job that this home has joined is in epoch 2"):
        next(ahead.follow(Ahead(ahead, 0), session))


def test_a_state_of_workers_who_have_come_and_gone_is_dealt_to_those_who_load_it() -> None:
    job = Job(lead=0)
    for step in range(80):
        job.step({2: "dies", 3: "comes"}.get(step, ""), 1)
    state = job.homes[0].sampler.state_dict()
    made = [Sampler(LENGTH, BATCH, rank=rank, world=3) for rank in range(3)]
    for sampler in made:
        sampler.load_state_dict(state)
    assert [sampler.share(sampler.step) for sampler in made] == [2, 2, 2]


@pytest.mark.parametrize(("shares", "come", "least", "then"), [
    ({0: 8, 1: 4}, [2], 1, {0: 5, 1: 3, 2: 4}),
    ({0: 10, 1: 2}, [2], 2, {0: 4, 1: 4, 2: 4}),  # in proportion one would have 1
    ({0: 6, 1: 6}, [2], 5, {0: 6, 1: 6, 2: 0}),  # not even parts reach the least
    ({0: 12, 1: 0}, [2], 1, {0: 6, 1: 0, 2: 6}),
    ({}, [3, 4], 1, {3: 6, 4: 6}),
    ({0: 6, 1: 0}, [], 1, {0: 12, 1: 0}),
])
def test_who_comes_gets_an_even_part(shares: dict[int, int], come: list[int], least: int, then: dict[int, int]) -> None:
    assert widened(shares, come, 12, least) == then


def test_two_losses_that_are_heard_of_behind_one_step_are_one_announcement() -> None:
    """One between epochs, the other in the first step."""
    session, sampler = Noted(), Sampler(LENGTH, BATCH, rank=0, world=3)
    session.members, session.may_leave = (0, 1, 2), True
    loader: Any = DataLoader(range(LENGTH), batch_sampler=sampler)  # type: ignore[arg-type]
    for step, _ in enumerate(sampler.follow(loader, session)):
        if step == 3:
            break
    session.members = (0, 1)
    for step, _ in enumerate(sampler.follow(loader, session)):
        if step == 0:
            session.members = (0,)
        if step == 1:
            break
    assert sampler.announced == (5 + SOON_STEPS, {0: BATCH})


def test_numbers_are_given_in_the_order_of_the_sessions_and_never_twice() -> None:
    there = Roster()
    there.meet((0, 1))
    assert there.heed(4, (0, 1), {0: 3, 1: 3}, 6, 1) is None
    change = there.heed(4, (0, 7, 5), {0: 3, 1: 3}, 6, 1)
    assert change is not None
    assert (change.step, change.shares, change.lost) == (5 + SOON_STEPS, {0: 2, 2: 2, 3: 2}, {1: 4})
    assert (there.numbers, set(there.gone)) == ((0, 1, 7, 5), {1})


