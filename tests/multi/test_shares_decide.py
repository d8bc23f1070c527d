"""What balancing decides, by tables of rows: when ranks tell their times, which shares follow and from which step."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.autotune.shares import policy
from commlayer.autotune.shares.driver import OwnTimes
from commlayer.autotune.shares.policy import Announce, RankStart, ShareEvent, SharesState, WorkerTime, WorkMoves
from commlayer.balance import Communication, Decision, Line, Note, Outcome, Policy, shares
from commlayer.balance.profile import WorkerProfile, initial_shares
from commlayer.errors import CommError

WORLD, BATCH = 3, 24
LINES = [Line(0.001, 0.002), Line(0.002, 0.002), Line(0.006, 0.002)]
EVEN = {0: 8, 1: 8, 2: 8}


def start(place: int, **fields: float) -> RankStart:
    known = RankStart(place, BATCH, 0, 1, 0, WORLD - 1, 0, 1.0, 0.0)
    return known._replace(**fields)


def begun(rows: list[RankStart] | None = None, **fields: Any) -> SharesState:
    return policy.begin(rows or [start(rank) for rank in range(WORLD)], EVEN, -1, **{"policy": Policy()} | fields)


def rows_of(state: SharesState, lines: list[Line] = LINES, **fields: float) -> list[WorkerTime]:
    """What ranks with these lines say of a step under the newest shares."""
    newest = state.balancer.latest.by_worker
    row = WorkerTime(0, 0.0, 0.0, 0, 0.0, 0.1, 0.0, 0.0, policy.checksum(state))._replace(**fields)
    return [row._replace(computed=newest[rank], compute_s=line.time_s(newest[rank])) for rank, line in enumerate(lines)]


def heard(state: SharesState, step: int, **fields: float) -> tuple[SharesState, list[Any]]:
    """A row is sent after `step` and read when the next one is over."""
    state, actions = policy.decide(policy.told(state, step), rows_of(state, **fields), step + 1)
    return state, list(actions)


def announced(actions: list[Any]) -> list[Decision]:
    return [action.decision for action in actions if isinstance(action, Announce)]


def test_decisions_load_no_torch() -> None:
    look = "import sys, commlayer.autotune.shares.policy; print(sorted({'torch', 'grpc', 'scipy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# ---- which shares, and from when


@pytest.mark.parametrize(("lookahead", "from_step"), [(0, 6), (1, 7), (4, 10)])
def test_new_shares_are_for_a_step_that_no_loader_has_drawn(lookahead: int, from_step: int) -> None:
    """Told after step 5 and heard when step 6 is the next to train."""
    state, actions = heard(begun(), 5, lookahead=lookahead)
    (decision,) = announced(actions)
    assert (decision.step, decision.from_step) == (5, from_step)
    assert decision.shares[0] > decision.shares[1] > decision.shares[2]
    assert state.announced == (decision,)
    assert ShareEvent(decision) in actions


def test_the_loader_that_draws_farthest_ahead_counts() -> None:
    state = policy.told(begun(), 5)
    rows = rows_of(state)
    rows[1] = rows[1]._replace(lookahead=3)
    _, actions = policy.decide(state, rows, 6)
    assert announced(list(actions))[0].from_step == 9


def test_what_is_balanced_stays() -> None:
    best = dict(enumerate(shares(LINES, BATCH)))
    state = policy.begin([start(r, known=1, slope_s=LINES[r].slope_s, intercept_s=LINES[r].intercept_s) for r in range(WORLD)],
                         best, -1, policy=Policy())
    for step in range(6):
        state, actions = heard(state, step)
        assert announced(actions) == []


def test_no_second_decision_before_the_first_holds() -> None:
    state, actions = heard(begun(), 0, lookahead=3)
    (decision,) = announced(actions)
    for step in range(1, decision.from_step):
        state, actions = heard(state, step, lookahead=3)
        assert announced(actions) == []


def test_a_rank_that_measured_nothing_says_nothing() -> None:
    state = policy.told(begun(), 0)
    silent = [row._replace(computed=0, compute_s=0.0) for row in rows_of(state)]
    after, actions = policy.decide(state, silent, 1)
    assert actions == ()
    assert after.balancer.latest == state.balancer.latest


@pytest.mark.parametrize("time_s", [math.nan, math.inf, -1.0, 0.0])
def test_a_time_that_is_none_is_noted_and_left_out(time_s: float) -> None:
    state = policy.told(begun(), 0)
    rows = rows_of(state)
    rows[1] = rows[1]._replace(compute_s=time_s)
    _, actions = policy.decide(state, rows, 1)
    notes = [action.event for action in actions if isinstance(action, ShareEvent) and isinstance(action.event, Note)]
    assert [note.text.split(":")[0] for note in notes if "measured time" in note.text] == ["worker 1"]


def test_an_outcome_comes_with_what_a_whole_step_took() -> None:
    state, events = begun(), []
    for step in range(8):
        state, actions = heard(state, step, step_s=0.25)
        events += [action.event for action in actions if isinstance(action, ShareEvent)]
    outcomes = [event for event in events if isinstance(event, Outcome)]
    assert outcomes
    assert {outcome.whole_s for outcome in outcomes} == {0.25}


def test_two_times_of_one_share_make_a_jump_seen_in_one_row() -> None:
    state = begun()
    for step in range(6):
        state, _ = heard(state, step)
    newest = state.balancer.latest.by_worker
    for before_s, told in ((0.0, "one outlier"), (4 * LINES[0].time_s(newest[0]), "new time model")):
        rows = rows_of(state)
        rows[0] = rows[0]._replace(compute_s=4 * rows[0].compute_s, before_s=before_s)
        _, actions = policy.decide(policy.told(state, 6), rows, 7)
        said = [action.event.text for action in actions if isinstance(action, ShareEvent) and isinstance(action.event, Note)]
        assert any(told in text for text in said)


@pytest.mark.parametrize(("given", "price", "expected_s"), [
    (None, (0.05, 0.0), 0.05), (None, (0.0, 0.0), 0.0), (Communication(lambda _: 0.02), (0.05, 0.0), 0.02),
])
def test_communication_costs_what_the_job_was_told_or_else_what_rank_0_says(
    given: Communication | None, price: tuple[float, float], expected_s: float,
) -> None:
    state = begun() if given is None else begun(communication=given)
    free, told = heard(begun(), 0)[1], heard(state, 0, comm_s=price[0], overlap=price[1])[1]
    assert announced(told)[0].before_s == pytest.approx(announced(free)[0].before_s + expected_s)


def test_ranks_that_believe_in_different_shares_are_named() -> None:
    state = policy.told(begun(), 7)
    rows = rows_of(state)
    rows[1] = rows[1]._replace(shares=rows[1].shares + 1)
    with pytest.raises(CommError, match=r"worker 1: .*step 7\b.*E-RANKS-DIFFER"):
        policy.decide(state, rows, 8)


def test_the_check_sum_tells_shares_and_steps_apart() -> None:
    state = begun()
    after, _ = heard(state, 0)
    later, _ = heard(state, 1)
    assert len({policy.checksum(state), policy.checksum(after), policy.checksum(later)}) == 3


def test_work_moves_when_its_step_begins_and_once() -> None:
    state, actions = heard(begun(), 0, lookahead=2)
    (decision,) = announced(actions)
    assert decision.from_step == 3
    assert policy.step_begins(state, 2) == (state, ())
    after, (moves,) = policy.step_begins(state, 3)
    assert moves == WorkMoves(decision.gain_s / decision.before_s)
    assert policy.step_begins(after, 4) == (after, ())
    lost = decision.__class__(0, 3, decision.workers, decision.shares, decision.micro_batches, "gone", math.inf, 0.1)
    assert policy.step_begins(state._replace(announced=(lost,)), 3)[1] == (WorkMoves(1.0),)


# ---- when ranks tell


@pytest.mark.parametrize(("given", "cost_s", "every"), [
    (None, 0.0, 1), (None, 0.001, 1), (None, 0.0011, 2), (None, 0.01, 10), (None, 9.0, 64), (3, 9.0, 3), (3, 0.0, 3),
])
def test_rows_come_as_often_as_they_cost_one_per_cent_or_as_was_asked(given: int | None, cost_s: float, every: int) -> None:
    state, _ = heard(begun(every=given), 0, cost_s=cost_s)
    state = policy.told(state, 4)
    assert [step for step in range(4, 4 + every + 1) if policy.due(state, step)] == [4 + every]


def test_the_rank_that_pays_most_for_rows_decides_how_often_they_come() -> None:
    state = policy.told(begun(), 0)
    rows = rows_of(state)
    rows[1] = rows[1]._replace(cost_s=0.01)
    rows[2] = rows[2]._replace(step_s=0.2)
    assert policy.decide(state, rows, 1)[0].every == 5


def test_the_first_row_comes_after_the_step_that_ranks_began_at() -> None:
    state = begun([start(rank, step=5) for rank in range(WORLD)])
    assert policy.due(state, 5)
    assert not policy.due(policy.told(state, 5), 5)


# ---- the start


@pytest.mark.parametrize(("rank", "fields", "text"), [
    (1, {"rank": 0}, r"rank 1 .*rank 0\b.*E-SAMPLER-RANKS"),
    (2, {"batch": 12}, r"rank 2 .*step 0 .*batch 12\b.*rank 0.*batch 24\b.*E-SAMPLER-RANKS"),
    (2, {"step": 4}, r"rank 2 .*step 4 .*rank 0.*step 0\b.*E-SAMPLER-RANKS"),
    (0, {"last_worker": 3}, r"rank 0 .*worker 3\b.*0 to 2\b.*E-SAMPLER-RANKS"),
])
def test_samplers_that_do_not_belong_together_are_named(rank: int, fields: dict[str, float], text: str) -> None:
    rows = [start(one, **fields if one == rank else {}) for one in range(WORLD)]
    with pytest.raises(ValueError, match=text):
        begun(rows)


def test_the_largest_of_the_smallest_batches_holds_for_all() -> None:
    state, actions = heard(begun([start(0), start(1, least=4), start(2)]), 0)
    assert state.policy.minimum == 4
    assert min(announced(actions)[0].shares) == 4


def test_shares_of_a_profile_hold_until_their_step_and_keep_their_promise() -> None:
    profiles = [WorkerProfile(tuple((n, line.time_s(n)) for n in (1, 2, 4, 8, 16, 24)), 24, False) for line in LINES]
    first = initial_shares(profiles, BATCH, EVEN, step=3)
    state = policy.begin([start(rank) for rank in range(WORLD)], first.decision.by_worker, 3, policy=Policy(), opening=first)
    assert state.balancer.latest == first.decision
    later = policy.begin([start(rank) for rank in range(WORLD)], EVEN, 4, policy=Policy(), opening=first)
    assert later.balancer.latest.by_worker == EVEN, "shares that somebody announced since go before those of the profile"


@pytest.mark.parametrize("lbb", [False, True])
def test_a_decision_leaves_the_state_before_it_as_it_was(lbb: bool) -> None:
    """So that the same rows mean the same, however often they are read."""
    state = begun(lbb=lbb)
    for step in range(5):
        once, first = heard(state, step)
        again, second = heard(state, step)
        assert first == second
        assert policy.checksum(once) == policy.checksum(again)
        state = once
    assert state.balancer.latest.by_worker != EVEN


# ---- ranks decide alike


times = st.sampled_from([0.0, math.nan, 0.004, 0.01, 0.03, 0.1])
measured = st.tuples(times, times, st.integers(0, 3), st.floats(0, 0.01), st.floats(0, 0.2))
told = st.lists(measured, min_size=WORLD, max_size=WORLD)


@settings(max_examples=40, deadline=None)
@given(st.lists(told, min_size=5, max_size=25))
def test_ranks_that_hear_the_same_rows_do_the_same_at_the_same_steps(steps: list[list[tuple[float, ...]]]) -> None:
    states, done = [begun(), begun()], [list[Any](), list[Any]()]
    for step, rows in enumerate(steps):
        for rank in range(2):
            state = states[rank]
            if policy.due(state, step):
                newest = state.balancer.latest.by_worker
                row = [WorkerTime(newest[one], s, before_s, ahead, cost_s, step_s, 0.0, 0.0, policy.checksum(state))
                       for one, (s, before_s, ahead, cost_s, step_s) in enumerate(rows)]
                state, actions = policy.decide(policy.told(state, step), row, step + 1)
                done[rank].append([repr(action) for action in actions])
                for decision in announced(list(actions)):
                    assert sum(decision.shares) == BATCH
                    assert min(decision.shares) >= 1
                    assert decision.from_step > step
            state, moves = policy.step_begins(state, step + 1)
            done[rank].append([step, *moves])
            states[rank] = state
    assert done[0] == done[1]


# ---- a rank's own times


def test_a_row_holds_what_was_measured_since_the_last() -> None:
    own = OwnTimes()
    own.begins(4, 8)
    own.begins(5, 8)
    own.took(3, 9.0)
    own.took(4, 0.2)
    own.took(5, 0.1)
    for cost_s in (0.3, 0.02, 0.04):
        own.costs(cost_s)
    assert own.row(5, 10.0, lookahead=2, price=(0.5, 0.25), shares=7.0) == WorkerTime(8, 0.1, 0.2, 2, 0.02, 0.0, 0.5, 0.25, 7.0)
    assert own.row(7, 11.0, lookahead=2, price=(0.0, 0.0), shares=7.0) == WorkerTime(0, 0.0, 0.0, 2, 0.02, 0.5, 0.0, 0.0, 7.0)
    own.took(5, 0.1)
    own.begins(6, 8)
    own.afresh()
    own.took(6, 0.1)
    after = own.row(9, 99.0, lookahead=0, price=(0.0, 0.0), shares=7.0)
    assert (after.computed, after.step_s) == (0, 0.5), "evaluation lies between two passes"
    own.given(5, 0.7)
    assert own.row(10, 99.5, lookahead=0, price=(0.0, 0.0), shares=7.0)[:3] == (5, 0.7, 0.0)
