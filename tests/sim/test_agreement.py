"""In which step those who are left come to stand, by the words of one round and another."""

from __future__ import annotations

import pytest

from commlayer.engine import agreement
from commlayer.engine.agreement import AgreementOutcome, Vote, VoterState
from commlayer.records import Member, ServerInfo, View


def view(generation: int, *ranks: int, servers: int = 0) -> View:
    return View(generation, tuple(Member(rank, rank, "a", 1) for rank in ranks),
                tuple(ServerInfo(number, "a:1") for number in range(servers)))


BEFORE, AFTER, LAST = view(1, 0, 1, 2, 3), view(2, 0, 1, 2), view(3, 0, 1)


def words(*steps: int) -> list[Vote]:
    return [Vote(step, 1.0) for step in steps]


@pytest.mark.parametrize(("said", "sure", "finished", "found"), [
    (words(5, 5, 5), words(5, 5, 5), [-1], AgreementOutcome.TOGETHER),
    (words(5, 5, 5), words(5, 6, 5), [-1], AgreementOutcome.WHOLE),
    (words(5, 6, 5), [], [-1], AgreementOutcome.WHOLE),
    (words(5, 4, 5), [], [-1], AgreementOutcome.APART),
    (words(5, 5, 5), words(5, 5, 5), [6], AgreementOutcome.WHOLE),
    ([], [], [-1], AgreementOutcome.WHOLE),
])
def test_what_words_come_to(said: list[Vote], sure: list[Vote], finished: list[int], found: AgreementOutcome) -> None:
    after, what = agreement.outcome(VoterState(), AFTER, 5, said, sure, finished)
    assert what is found
    assert after.completed == (5 if found is AgreementOutcome.WHOLE else -1)
    assert after.rounds_sent == ((2, 1) if said else (0, 0))
    assert agreement.first(after, AFTER, Vote(5, 1.0)).what == ("step1" if said else "step0")
    assert agreement.first(after, LAST, Vote(5, 1.0)).what == "step0"


@pytest.mark.parametrize(("said", "here", "what", "step", "ends"), [
    (words(5, 5, 5), False, "sure0", 5, False),
    (words(5, 5, 5), True, "sure0", 6, False),
    ([], True, "sure0", 6, True),
    (words(5, 4, 5), False, None, 0, False),
])
def test_what_is_said_for_good(said: list[Vote], here: bool, what: str | None, step: int, ends: bool) -> None:
    _, says = agreement.second(VoterState(), AFTER, Vote(5, 1.0), said, complete=here)
    assert (says and (says.what, says.word, says.ends)) == (what and (what, Vote(step, 1.0), ends))


def test_for_good_is_for_one_view() -> None:
    """Behind it others may wait for this member where they say nothing, and then it has to go on once it has its step whole."""
    bound, _ = agreement.second(VoterState(), AFTER, Vote(5, 1.0), words(5, 5, 5), complete=False)
    assert not agreement.first(bound, AFTER, Vote(5, 1.0)).ends
    assert agreement.first(bound, LAST, Vote(5, 1.0)).ends
    _, says = agreement.second(bound, LAST, Vote(5, 1.0), [], complete=True)
    assert says is not None
    assert says.word.step == 6


@pytest.mark.parametrize(("state", "newest", "finished", "lets_in", "calls"), [
    (VoterState(), AFTER, [-1], True, True),
    (VoterState(completed=5), AFTER, [-1], True, False),
    (VoterState(), AFTER, [6], True, False),
    (VoterState(), view(2, 0, 1, 2, 3, 4), [], True, True),
    (VoterState(), view(2, 0, 1, 2, 3, 4), [], False, False),
    (VoterState(), view(3, 0, 1, 2, 3), [], True, True),
    (VoterState(), BEFORE, [], True, False),
])
def test_who_has_to_say_where_it_stands(
        state: VoterState, newest: View, finished: list[int], lets_in: bool, calls: bool) -> None:
    assert agreement.calls(state, 5, BEFORE, newest, finished, lets_in=lets_in) == calls


def test_each_server_is_told_by_one_of_those_who_stay() -> None:
    newest = view(2, 1, 2, 7, servers=3)
    told = {rank: [server.id for server in agreement.told_by(rank, BEFORE, newest)] for rank in (1, 2)}
    assert told == {1: [0, 2], 2: [1]}
    assert agreement.staying(BEFORE, newest) == [1, 2]
    assert (agreement.new_in(newest, BEFORE), agreement.gone_from(BEFORE, newest)) == ([7], [0, 3])
