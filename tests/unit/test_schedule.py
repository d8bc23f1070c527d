"""Which workers join next, and in which step they begin: the rows of one step decide."""

from __future__ import annotations

import itertools

import pytest

from commlayer.engine.epochs.schedule import LEAD, MOST_AT_ONCE, EpochProposal, Joining, decide, keep_majority, propose

STEP, NONE = 10, EpochProposal(0, 0, 0)


@pytest.mark.parametrize(("joined", "proposals", "members"), [
    (0, [], []), (0, [NONE, NONE], []),
    (0, [EpochProposal(1, 5, 2)], [5]),
    (0, [NONE, EpochProposal(1, 5, 2), NONE], [5]),  # some members know of it later
    (0, [EpochProposal(1, 6, 3), EpochProposal(1, 5, 2)], [5]),  # the other one is proposed again
    (0, [EpochProposal(1, 5, 3), EpochProposal(2, 6, 3)], [5, 6]),
    (0, [EpochProposal(1, 5, 2), EpochProposal(1, 5, 3), EpochProposal(2, 6, 3)], [5, 6]),
    (0, [EpochProposal(1, 6, 2), EpochProposal(1, 5, 3), EpochProposal(2, 6, 3)], [5, 6]),  # some members know of one of them
    (0, [EpochProposal(1, 5, 2), EpochProposal(1, 6, 3), EpochProposal(2, 5, 3)], [5]),  # none joins twice
    (1, [EpochProposal(1, 5, 2)], []),  # it has joined
    (1, [EpochProposal(3, 7, 4), EpochProposal(2, 6, 3)], [6, 7]), (0, [EpochProposal(2, 6, 3)], []),
    (0, [EpochProposal(1, 5, 3, 2)], [5, 6]),
    (2, [EpochProposal(3, 5, 3, 2), EpochProposal(5, 9, 3), EpochProposal(6, 7, 3, 2)], [5, 6, 9, 7, 8]),
    (0, [EpochProposal(1, 7, 5, 2), EpochProposal(1, 5, 3, 2), EpochProposal(3, 7, 5, 2)], [5, 6, 7, 8]),
    (0, [EpochProposal(1, 7, 5, 2), EpochProposal(2, 5, 3)], [7, 8]),  # a number inside a site
])
def test_rows_of_a_step_decide_in_any_order(joined: int, proposals: list[EpochProposal], members: list[int]) -> None:
    for order in itertools.permutations(proposals):
        decided = decide(joined, STEP, order)
        assert [one.member for one in decided] == members
        assert [one.number for one in decided] == [joined + place for place in range(1, len(members) + 1)]


A, B = EpochProposal(1, 5, 2), EpochProposal(1, 6, 3)


@pytest.mark.parametrize(("rows", "proposals"), [
    ([[A]], [A]), ([[A], [A]], [A]), ([[A], [NONE]], []), ([[A], [A], [B]], [A]), ([[A], [B], [NONE]], []),
    ([[A], [A], [EpochProposal(1, 5, 9)]], [A]),  # another generation
    ([[A, A, A], [NONE], [NONE]], []),  # a row counts once
    ([[A, B], [A, B], [NONE]], [A, B]),
])
def test_more_than_half_of_the_rows_admit_a_worker(rows: list[list[EpochProposal]], proposals: list[EpochProposal]) -> None:
    assert [p for p in keep_majority(rows) if p != NONE] == proposals


def test_worker_begins_when_all_members_can_have_reported_it() -> None:
    assert decide(0, STEP + LEAD, [EpochProposal(1, 5, 2)]) == [Joining(1, 5, 2, STEP + LEAD, 5)]


def test_workers_of_a_site_begin_together() -> None:
    assert decide(0, STEP, [EpochProposal(1, 5, 2, 2)]) == [Joining(1, 5, 2, STEP, 5, 2), Joining(2, 6, 2, STEP, 5, 2)]


@pytest.mark.parametrize(("new", "members"), [
    ([], []), ([[7], [5]], [7, 5]), ([[9], [8], [7], [6], [5]], [9, 8, 7, 6]), ([[4, 5], [9], [6, 7, 8]], [4, 5, 9, 6, 7, 8]),
])
def test_row_proposes_some_sites_in_order(new: list[list[int]], members: list[int]) -> None:
    proposals = propose(2, new, 4)
    assert len(proposals) == MOST_AT_ONCE
    assert [one.member for one in decide(2, STEP, proposals)] == members
