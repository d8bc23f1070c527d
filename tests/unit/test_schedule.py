"""Which worker joins next, and in which step it begins: the rows of one step decide."""

from __future__ import annotations

import itertools

import pytest

from commlayer.engine.epochs.schedule import LEAD, Joining, Proposal, decide

STEP, NONE = 10, Proposal(0, 0, 0)


@pytest.mark.parametrize(("joined", "proposals", "member"), [
    (0, [], None), (0, [NONE, NONE], None),
    (0, [Proposal(1, 5, 2)], 5),
    (0, [NONE, Proposal(1, 5, 2), NONE], 5),  # some members know of it later
    (0, [Proposal(1, 6, 3), Proposal(1, 5, 2)], 5),  # the other one is proposed again
    (1, [Proposal(1, 5, 2)], None),  # it has joined
    (1, [Proposal(3, 7, 4), Proposal(2, 6, 3)], 6), (0, [Proposal(2, 6, 3)], None),
])
def test_rows_of_a_step_decide_in_any_order(joined: int, proposals: list[Proposal], member: int | None) -> None:
    for order in itertools.permutations(proposals):
        decided = decide(joined, STEP, order)
        assert (None if decided is None else decided.member) == member
        assert decided is None or decided[0] == joined + 1


def test_worker_begins_when_all_members_can_have_reported_it() -> None:
    assert decide(0, STEP, [Proposal(1, 5, 2)]) == Joining(1, 5, 2, STEP + LEAD)
