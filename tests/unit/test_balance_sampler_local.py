"""Samplers under local steps: what was dealt stays open until the exchange that carries it, across saves and losses."""

from __future__ import annotations

import pytest
from support.balance import Left, Noted

from commlayer.autotune.shares.driver import LoadBalancer
from commlayer.balance import Sampler
from commlayer.records import Plan


def test_local_steps_are_followed_and_refused_where_shares_are_moved_by_what_steps_take() -> None:
    sampler, session = Sampler(40, 8, rank=0, shares=[4, 0, 4]), Noted()
    loop = sampler.follow(sampler, session)
    next(loop)
    session.plan = Plan("", (), local_steps=4)
    assert len([*loop]) == 4
    assert sampler.step == 5
    for plan, line in (
        (Plan("", (), local_steps=4), r"every 4 steps \(local_steps\)"),
        (Plan("", (), codes="updates", overlap="round"), "overlap='round'"),
    ):
        session.plan = plan
        with pytest.raises(ValueError, match=f"LoadBalancer: .*{line}.*E-SHARES-ARGUMENT"):
            LoadBalancer(session, sampler)  # type: ignore[arg-type]


def test_a_job_that_goes_on_from_a_save_between_two_exchanges_still_hands_out_again_what_the_lost_had_not_shared() -> None:
    """Of three steps two are local ones that no exchange has seen."""
    before = [Sampler(400, 4, rank=rank, world=2, shuffle=False) for rank in range(2)]
    for sampler in before:
        session = Left((0, 1))
        for step, _ in enumerate(loop := sampler.follow(sampler, session), start=1):
            session.step, session.carried = step, 1
            if step == 3:
                loop.close()
    sampler, session = Sampler(400, 4, rank=0, world=2, shuffle=False), Left((0, 1))
    sampler.load_state_dict(before[0].state_dict())
    session.carried, seen = -2, list[int]()
    session.parted = lambda member: -2  # type: ignore[method-assign]
    for own in sampler.follow(sampler, session):
        seen += own
        session.members = (0,)
        session.step += 1
        session.carried = session.step
    assert sorted({*range(400)} - {*seen}) == [0, 1, 2, 3, 4, 5, 8, 9], "what all had, and its own"
    assert len(seen) == len(set(seen))


def test_of_a_save_whose_job_had_lost_somebody_the_ranks_that_go_on_take_up_what_those_had_who_were_left() -> None:
    """Of three the first is lost, its second step with it; the third step is a local one that no exchange has seen."""
    before = [Sampler(240, 6, rank=rank, world=3, shuffle=False) for rank in range(3)]
    for sampler in before[1:]:
        session = Left((0, 1, 2))
        session.parted = lambda member: 1  # type: ignore[method-assign]
        for step, _ in enumerate(loop := sampler.follow(sampler, session), start=1):
            session.step, session.carried = step, 2
            session.members = (1, 2) if step > 1 else (0, 1, 2)
            if step == 3:
                loop.close()
    states = [sampler.state_dict() for sampler in before[1:]]
    assert states[0] == states[1]
    sampler, session = Sampler(240, 6, rank=0, world=2, shuffle=False), Left((0, 1))
    sampler.load_state_dict(states[0])
    session.carried, seen = -1, list[int]()
    session.parted = lambda member: -1  # type: ignore[method-assign]
    for own in sampler.follow(sampler, session):
        seen += own
        session.members = (0,)  # any worker was the third
        session.step += 1
        session.carried = session.step
    assert sorted({*range(240)} - {*seen}) == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 14, 15]
    assert len(seen) == len(set(seen))
