"""How those who are left go on, in random schedules of members, a coordinator and servers; what must not be is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from commlayer.cluster.membership import epoch_change
from commlayer.cluster.membership.membership import State
from commlayer.cluster.servers.bucket_sum import BucketSum
from commlayer.engine.epochs import agreement
from commlayer.engine.epochs.agreement import AgreementOutcome, Vote, VoterState
from commlayer.records import Epoch, ServerInfo
from commlayer.records import Member as MemberRecord
from tests.sim.simulated_agreement import Agreement
from tests.sim.simulated_member import Member

LEAST = 150


def test_those_who_are_left_go_on_alike_whoever_dies_when() -> None:
    counts = Counter[str]()
    for seed in range(LEAST):
        world = Agreement(seed)
        assert world.run() == [], f"python -m bench chaos --agreement --schedules 1 --seed {seed}"
        counts += world.counts
    least = {"killed": 0.5, "gone over": 0.6, "steps committed": 3.0, "finished": 1.0, "rounds together": 0.7,
             "calls lost": 1.0, "connections broken": 0.3}
    assert {what: counts[what] for what, part in least.items() if counts[what] < LEAST * part} == {}
    assert {"rounds whole", "rounds all here", "rounds apart", "rounds broken off", "goings over broken off"} <= counts.keys()


FOUND, REGROUPED = agreement.outcome, epoch_change.next_epoch


def from_ones_own_step(
    state: VoterState, epoch: Epoch, step: int, words: list[Vote], *votes: Any,
) -> tuple[VoterState, AgreementOutcome]:
    after, result = FOUND(state, epoch, step, words, *votes)
    return after, AgreementOutcome.TOGETHER if words else result


def at_once(state: VoterState, epoch: Epoch, step: int, words: list[Vote], sure: list[Vote], finished: Any
            ) -> tuple[VoterState, AgreementOutcome]:
    """On first words, which may be old."""
    return FOUND(state, epoch, step, words, [], finished)


def too_few(state: State) -> State:
    result = REGROUPED(msgspec.structs.replace(state, min_workers=min(1, state.min_workers)))
    return msgspec.structs.replace(result, min_workers=state.min_workers)


def deaf(member: Member) -> None:
    """To a message that the coordinator sent once, while this worker switched to the epoch."""
    member.error = None


@pytest.mark.parametrize(("where", "name", "wrong", "line", "seed"), [
    (agreement, "outcome", from_ones_own_step, "have other sums of step", 140),
    (agreement, "outcome", at_once, "have the step whole that was abandoned here", 180),
    (agreement, "servers_to_notify", lambda *_: [], "server 0 drops", 0),
    (agreement, "missed", lambda *_: False, "further", 0),
    (BucketSum, "end", lambda *_: None, "paid", 0),
    (epoch_change, "next_epoch", too_few, "are the least", 0),
    (epoch_change, "next_epoch", lambda state: state, "are left", 0),
    (Member, "_follows", deaf, "further", 500),
])
def test_what_must_not_be_is_found(where: Any, name: str, wrong: Callable[..., Any], line: str, seed: int,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, wrong)
    assert any(line in problem for n in range(seed, seed + 60) for problem in Agreement(n).run())


# ---- branches that the schedules do not need


def epoch(generation: int, *ranks: int, servers: int = 0) -> Epoch:
    return Epoch(generation, tuple(MemberRecord(rank, rank, "a", 1) for rank in ranks),
                tuple(ServerInfo(number, "a:1") for number in range(servers)))


BEFORE, AFTER, LAST = epoch(1, 0, 1, 2, 3), epoch(2, 0, 1, 2), epoch(3, 0, 1)


def test_a_second_vote_binds_in_one_view() -> None:
    """After it others may wait for this member without a vote, so it must continue once it has all of its step."""
    bound, _ = agreement.second(VoterState(), AFTER, Vote(5), [Vote(5)] * 3, complete=False)
    assert not agreement.first(bound, AFTER, Vote(5)).ends
    assert agreement.first(bound, LAST, Vote(5)).ends
    _, vote = agreement.second(bound, LAST, Vote(5), [], complete=True)
    assert vote is not None
    assert vote.vote.step == 6


@pytest.mark.parametrize(("state", "newest", "finished", "lets_in", "calls"), [
    (VoterState(), AFTER, [-1], True, True),
    (VoterState(completed=5), AFTER, [-1], True, False),
    (VoterState(), AFTER, [6], True, False),
    (VoterState(), epoch(2, 0, 1, 2, 3, 4), [], True, True),
    (VoterState(), epoch(2, 0, 1, 2, 3, 4), [], False, False),
    (VoterState(), epoch(3, 0, 1, 2, 3), [], True, True),
    (VoterState(), BEFORE, [], True, False),
])
def test_which_members_send_a_first_vote(
        state: VoterState, newest: Epoch, finished: list[int], lets_in: bool, calls: bool) -> None:
    assert agreement.calls(state, 5, BEFORE, newest, finished, lets_in=lets_in) == calls
