"""The policy of batch shares: which shares follow from the rows of all ranks, and from which step."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.autotune.shares import policy
from commlayer.autotune.shares.policy import RankStart, SharesState, WorkerTime
from commlayer.balance import Decision
from commlayer.balance.balancer import Note, SharePolicy
from commlayer.balance.profile import WorkerProfile, initial_shares
from commlayer.balance.time_models import (
    LinearTime,
)
from commlayer.errors import CommError

WORLD, BATCH = 3, 24
LINES = [LinearTime(0.001, 0.002), LinearTime(0.002, 0.002), LinearTime(0.006, 0.002)]
EVEN = {0: 8, 1: 8, 2: 8}


def start(place: int, **fields: float) -> RankStart:
    known = RankStart(place, BATCH, 0, 1, 0, WORLD - 1, 0, 1.0, 0.0)
    return known._replace(**fields)


def begun(rows: list[RankStart] | None = None, **fields: Any) -> SharesState:
    return policy.begin(rows or [start(rank) for rank in range(WORLD)], EVEN, -1, **{"policy": SharePolicy()} | fields)


def rows_of(state: SharesState, step: int, lines: list[LinearTime] = LINES, **fields: float) -> list[WorkerTime]:
    """The rows of ranks with these lines after a step under the newest shares."""
    newest = state.balancer.latest.by_worker
    row = WorkerTime(step, shares=policy.checksum(state))._replace(**fields)
    return [row._replace(computed=newest[rank], compute_s=line.time_s(newest[rank])) for rank, line in enumerate(lines)]


def read(state: SharesState, step: int, step_s: float = 0.1, **fields: float) -> tuple[SharesState, list[Decision], list[Any]]:
    """A row of `step` is read after the next one: the decision, if there is one, and the events."""
    return decided(state, rows_of(state, step, **fields), step + 1, step_s)


def decided(
    state: SharesState, rows: list[WorkerTime], now: int, step_s: float = 0.1,
) -> tuple[SharesState, list[Decision], list[Any]]:
    state, decision, events = policy.decide(state, rows, step_s, now)
    return state, [] if decision is None else [decision], events


@pytest.mark.parametrize(("lookahead", "other", "from_step"), [(0, 0, 6), (1, 0, 7), (4, 0, 10), (0, 3, 9)])
def test_new_shares_apply_to_a_step_that_no_loader_has_drawn(lookahead: int, other: int, from_step: int) -> None:
    """The times of step 5 are read when step 6 is the next to train."""
    rows = rows_of(begun(), 5, lookahead=lookahead)
    rows[1] = rows[1]._replace(lookahead=max(lookahead, other))
    state, (decision,), events = decided(begun(), rows, 6)
    assert (decision.step, decision.from_step) == (5, from_step)
    assert decision.shares[0] > decision.shares[1] > decision.shares[2]
    assert state.announced == (decision,)
    assert decision in events


def test_no_second_decision_before_the_first_takes_effect() -> None:
    state, (decision,), _ = read(begun(), 0, lookahead=3)
    for step in range(1, decision.from_step):
        state, decisions, _ = read(state, step, lookahead=3)
        assert decisions == []


@pytest.mark.parametrize("time_s", [math.nan, math.inf, -1.0, 0.0])
def test_impossible_time_is_logged_and_ignored(time_s: float) -> None:
    rows = rows_of(begun(), 0)
    rows[1] = rows[1]._replace(compute_s=time_s)
    _, _, events = decided(begun(), rows, 1)
    notes = [event.text for event in events if isinstance(event, Note)]
    assert [note.split(":")[0] for note in notes if "measured time" in note] == ["worker 1"]
    silent = [row._replace(computed=0, compute_s=0.0) for row in rows]
    assert decided(begun(), silent, 1)[1:] == ([], []), "ranks that have measured nothing"


def test_ranks_with_different_shares_are_named() -> None:
    rows = rows_of(begun(), 7)
    rows[1] = rows[1]._replace(shares=rows[1].shares + 1)
    with pytest.raises(CommError, match=r"worker 1: .*step 7\b.*E-RANKS-DIFFER"):
        decided(begun(), rows, 8)
    state = begun()
    sums = {policy.checksum(state), policy.checksum(read(state, 0)[0]), policy.checksum(read(state, 1)[0])}
    assert len(sums) == 3, "shares and steps count"


@pytest.mark.parametrize(("rank", "fields", "text"), [
    (1, {"rank": 0}, r"rank 1 .*rank 0\b.*E-SAMPLER-RANKS"),
    (2, {"batch": 12}, r"rank 2 .*step 0 .*batch 12\b.*rank 0.*batch 24\b.*E-SAMPLER-RANKS"),
    (2, {"step": 4}, r"rank 2 .*step 4 .*rank 0.*step 0\b.*E-SAMPLER-RANKS"),
    (0, {"last_worker": 3}, r"rank 0 .*worker 3\b.*0 to 2\b.*E-SAMPLER-RANKS"),
])
def test_mismatched_samplers_are_named(rank: int, fields: dict[str, float], text: str) -> None:
    rows = [start(one, **fields if one == rank else {}) for one in range(WORLD)]
    with pytest.raises(ValueError, match=text):
        begun(rows)


def test_profile_shares_apply_until_their_step_at_the_promised_time() -> None:
    profiles = [WorkerProfile(tuple((n, line.time_s(n)) for n in (1, 2, 4, 8, 16, 24)), 24, False) for line in LINES]
    first = initial_shares(profiles, BATCH, EVEN, step=3)
    starts = [start(rank) for rank in range(WORLD)]
    state = policy.begin(starts, first.decision.by_worker, 3, policy=SharePolicy(), opening=first)
    assert state.balancer.latest == first.decision
    later = policy.begin([start(rank) for rank in range(WORLD)], EVEN, 4, policy=SharePolicy(), opening=first)
    assert later.balancer.latest.by_worker == EVEN, "shares announced since then replace the profile's"


def test_decisions_do_not_modify_the_previous_state() -> None:
    """So equal rows give equal decisions however often they are read."""
    state = begun()
    for step in range(5):
        once, *first = read(state, step)
        again, *second = read(state, step)
        assert first == second
        assert policy.checksum(once) == policy.checksum(again)
        state = once
    assert state.balancer.latest.by_worker != EVEN


times = st.sampled_from([0.0, math.nan, 0.004, 0.01, 0.03, 0.1])
measured = st.tuples(times, times, st.integers(0, 3), st.floats(0, 0.2))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(measured, min_size=WORLD, max_size=WORLD), min_size=5, max_size=25))
def test_ranks_that_read_equal_rows_decide_alike(steps: list[list[tuple[float, ...]]]) -> None:
    states, done = [begun(), begun()], [list[Any](), list[Any]()]
    for step, rows in enumerate(steps):
        for rank, state in enumerate(states):
            newest = state.balancer.latest.by_worker
            row = [WorkerTime(step, newest[one], s, before_s, ahead, 0.0, 0.0, policy.checksum(state))
                   for one, (s, before_s, ahead, _) in enumerate(rows)]
            after, decisions, events = decided(state, row, step + 1, max(step_s for *_, step_s in rows))
            for decision in decisions:
                assert sum(decision.shares) == BATCH
                assert min(decision.shares) >= 1
                assert decision.from_step > step
            states[rank], parts = policy.apply_due_decisions(after, step + 1)
            done[rank].append([repr(decisions), repr(events), parts])
    assert done[0] == done[1]
