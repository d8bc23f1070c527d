"""The balancer in emulated clusters: how fast it recovers, that it keeps still otherwise, who is left out and taken back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.balancing import PAPER

from bench.reference.balance_cluster import Disturbance, PlayedCluster, PlayedStep, moves, run, slow_after
from bench.reference.balance_default import Ours
from commlayer.balance import Communication, Line
from commlayer.balance.balancer import Balancer, Decision, Joined, Measurement, Note, Outcome, Policy, Vanished


def cluster(*disturbances: Disturbance, noise: float = 0.01, seed: int = 0) -> PlayedCluster:
    return PlayedCluster(tuple(PAPER), 512, disturbances=disturbances, noise=noise, seed=seed)


def kept(steps: list[PlayedStep], total: int = 512) -> None:
    assert {sum(step.shares) for step in steps} == {total}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("worker", range(4))
def test_added_50_ms_costs_at_most_three_slow_iterations(worker: int, seed: int) -> None:
    mode = Ours(cluster(Disturbance(worker, 25, 65, added_s=0.05), seed=seed))
    steps = run(mode, mode.cluster, 105)
    kept(steps)
    assert slow_after(steps, 0, 25) == 0
    assert 1 <= slow_after(steps, 25, 65) <= 3 + (worker == 3), "the small worker may take one more correction"
    assert slow_after(steps, 65, 105) <= 3
    assert not any(step.slow for step in steps[31:65] + steps[71:]), "once recovered it stays"
    assert moves(steps) <= 8


@pytest.mark.parametrize("lead", [1, 2, 3])
def test_a_later_announcement_costs_its_lead(lead: int) -> None:
    mode = Ours(cluster(Disturbance(0, 25, 65, added_s=0.05)), Policy(lead=lead))
    steps = run(mode, mode.cluster, 65)
    assert slow_after(steps, 25, 65) == 1 + lead
    decisions = [event for event in mode.balancer.events if isinstance(event, Decision)]
    assert [decision.from_step - decision.step for decision in decisions] == [lead] * len(decisions)


@pytest.mark.parametrize("factor", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("worker", [0, 3])
def test_a_factor_is_balanced_too(worker: int, factor: float) -> None:
    mode = Ours(cluster(Disturbance(worker, 20, 120, factor=factor)))
    steps = run(mode, mode.cluster, 120)
    kept(steps)
    assert slow_after(steps, 20, 120) <= 4
    assert slow_after(steps, 40, 120) <= 2, "one that was left out is tried again once"


def test_heat_is_followed() -> None:
    heat = (Disturbance(0, 20, 150, factor=2.0, ramp=60), Disturbance(1, 40, 150, factor=1.5, ramp=20))
    mode = Ours(cluster(*heat))
    steps = run(mode, mode.cluster, 150)
    assert slow_after(steps, 20, 150) <= 3
    kept(steps)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02])
def test_nothing_moves_when_nothing_happens(noise: float) -> None:
    mode = Ours(cluster(noise=noise))
    assert moves(run(mode, mode.cluster, 200)) <= 1


def test_single_spikes_move_nothing() -> None:
    mode = Ours(cluster(*(Disturbance(step % 4, step, step + 1, factor=3.0) for step in range(10, 200, 10))))
    assert moves(run(mode, mode.cluster, 210)) == 0
    assert sum("one outlier" in event.text for event in mode.balancer.events if isinstance(event, Note)) == 19


def test_without_a_profile_it_finds_the_balance() -> None:
    mode = Ours(cluster(), profiled=False)
    steps = run(mode, mode.cluster, 40)
    kept(steps)
    assert steps[0].shares == (128, 128, 128, 128)
    assert slow_after(steps, 0, 40) <= 3


def test_a_worker_that_only_holds_up_is_left_out_and_taken_back() -> None:
    mode = Ours(cluster(Disturbance(3, 20, 100, added_s=0.3)), Policy(readmit_after=30))
    steps = run(mode, mode.cluster, 200)
    kept(steps)
    assert not any(step.shares[3] for step in steps[25:50])
    tried = [step.step for step in steps[25:100] if step.shares[3]]
    assert 1 <= len(tried) <= 4, "tried again, seldom, and left out again"
    assert steps[-1].shares[3] >= 15
    reasons = [event.reason for event in mode.balancer.events if isinstance(event, Decision)]
    for said in ("steps are faster without worker 3", "trial of worker 3"):
        assert said in reasons


def test_a_report_of_a_worker_without_share_brings_it_back() -> None:
    balancer = Balancer([Joined(0, line=Line(1e-3)), Joined(1, line=Line(1e-3)), Joined(2, line=Line(1e-3, 0.5))], 100)
    assert balancer.shares == {0: 50, 1: 50, 2: 0}
    told = [Measurement(0, 50, 0.05), Measurement(1, 50, 0.05)]
    decisions = [balancer.decide(step, [*told, Measurement(2, 10, 0.01)]) for step in range(4)]
    back = next(decision for decision in decisions if decision)
    assert back.reason == "steps are faster with worker 2"
    assert back.by_worker.get(2, 0) > 25


def test_deaths_and_joins_are_inputs() -> None:
    mode = Ours(PlayedCluster(tuple(PAPER), 512, noise=0.01, lives=((0, 30), (0, 999), (0, 999), (20, 999))))
    steps = run(mode, mode.cluster, 60)
    kept(steps)
    assert steps[19].shares[3] == 0
    assert steps[21].shares[3] > 10
    assert all(step.shares[0] == 0 for step in steps[31:])
    assert not any(step.slow for step in steps)


def test_a_newcomer_without_a_line_starts_with_the_least() -> None:
    balancer = Balancer([Joined(0, line=Line(1e-3)), Joined(1, line=Line(1e-3))], 100, Policy(minimum=2))
    joined = balancer.decide(0, [Joined(5)])
    assert joined is not None
    assert (joined.shares, joined.reason) == ((49, 49, 2), "worker 5 joined")
    told = [Measurement(0, 49, 0.049), Measurement(1, 49, 0.049), Measurement(5, 2, 0.002)]
    found = next(d for d in (balancer.decide(step, told) for step in range(1, 4)) if d)
    assert found.by_worker.get(5, 0) > 25


def test_a_newcomer_starts_with_the_least_whatever_memory_the_others_have() -> None:
    """A bound on what it gets in all, not on what it computes at once."""
    balancer = Balancer([Joined(0, 20, Line(1e-3)), Joined(1, 20, Line(1e-3))], 100, Policy(minimum=2))
    joined = balancer.decide(0, [Joined(5, 30)])
    assert joined is not None
    assert (joined.shares, joined.micro_batches) == ((49, 49, 2), (3, 3, 1))


def test_little_memory_is_used_more_than_once_where_that_is_faster() -> None:
    """Memory of all would do for the batch in one go, in 186 ms a step."""
    small = PlayedCluster(tuple(PAPER), 512, caps=(512, 96, 96, 16), noise=0.01)
    steps = run(Ours(small, profiled=False), small, 40)
    assert steps[-1].iteration_s < 0.116
    assert not any(step.slow for step in steps[10:])


def test_slow_links_of_many_are_left_out_and_the_rest_stays() -> None:
    lines, link = (Line(1e-3, 5e-3),) * 8, [0.1] * 6 + [10.0] * 2
    comm = Communication(lambda active: max(link[worker] for worker in active))
    eight = PlayedCluster(lines, 512, noise=0.01)
    steps = run(Ours(eight, Policy(readmit_after=1000), comm), eight, 30, comm)
    assert {tuple(bool(share) for share in step.shares) for step in steps} == {(True,) * 6 + (False,) * 2}
    assert steps[-1].iteration_s < 0.2


def test_a_death_between_announcement_and_effect_supersedes_and_both_take_force() -> None:
    balancer = Balancer([Joined(worker, line=Line(1e-3)) for worker in range(3)], 90, Policy(lead=3))
    slow = [Measurement(0, 30, 0.09), Measurement(1, 30, 0.03), Measurement(2, 30, 0.03)]
    assert balancer.decide(0, slow) is None
    first = balancer.decide(1, slow)
    assert first is not None
    second = balancer.decide(2, [*slow[:2], Vanished(2)])
    assert second is not None
    assert (first.from_step, second.from_step) == (4, 5)
    assert balancer.decide(3, slow[:2]) is None
    told = [Measurement(w, first.by_worker.get(w, 0), (3e-3, 1e-3)[w] * first.by_worker.get(w, 0)) for w in (0, 1)]
    assert balancer.decide(4, told) is None
    assert balancer.shares == {0: second.by_worker.get(0, 0), 1: second.by_worker.get(1, 0)}
    assert sum(balancer.shares.values()) == 90


def test_everyone_gone_is_said_and_the_next_one_takes_all() -> None:
    balancer = Balancer([Joined(0, line=Line(1e-3))], 10)
    assert balancer.decide(0, [Vanished(0)]) is None
    assert "no worker can take" in balancer.events[-1].text  # type: ignore[union-attr]
    back = balancer.decide(1, [Joined(1, line=Line(2e-3))])
    assert back is not None
    assert back.shares == (10,)


def test_more_workers_than_samples_leaves_the_slowest_out() -> None:
    balancer = Balancer([Joined(0, line=Line(1.0)), Joined(1, line=Line(2.0))], 5, Policy(minimum=2))
    decision = balancer.decide(0, [Joined(2, line=Line(3.0))])
    assert decision is not None
    assert sum(decision.shares) == 5
    assert decision.by_worker.get(2, 0) == 0


def test_one_for_whom_the_total_is_too_small_is_not_tried_for_ever() -> None:
    lines = [Line(1.0), Line(2.0), Line(3.0)]
    balancer = Balancer([Joined(w, line=line) for w, line in enumerate(lines)], 5, Policy(minimum=2, readmit_after=3))
    assert balancer.shares == {0: 3, 1: 2}
    told = [Measurement(0, 3, 3.0), Measurement(1, 2, 4.0)]
    assert [balancer.decide(step, told) for step in range(12)] == [None] * 12
    assert balancer.members[2].retry_after == 12, "it is looked at in steps 3 and 9, and then in step 21"


@pytest.mark.parametrize("bad_s", [math.nan, math.inf, 0.0, -1.0])
def test_a_bad_measurement_is_one_line_and_training_goes_on(bad_s: float) -> None:
    balancer = Balancer([Joined(worker, line=line) for worker, line in enumerate(PAPER)], 512)
    before = dict(balancer.shares)
    assert balancer.decide(0, [Measurement(2, 159, bad_s), Measurement(9, 5, 1.0)]) is None
    assert balancer.shares == before
    note = balancer.events[-1]
    assert isinstance(note, Note)
    assert note.text.startswith("worker 2: measured time")


def test_decisions_are_compared_with_what_came_of_them() -> None:
    mode = Ours(cluster(Disturbance(1, 25, 200, added_s=0.05)))
    run(mode, mode.cluster, 60)
    decisions = [event for event in mode.balancer.events if isinstance(event, Decision)]
    outcomes = [event for event in mode.balancer.events if isinstance(event, Outcome)]
    first = decisions[0]
    assert first.gain_s == pytest.approx(0.154 - 0.12, abs=0.006)
    of_first = next(outcome for outcome in outcomes if outcome.decided == first.step)
    assert of_first.expected_s == first.after_s
    assert abs(of_first.error) < 0.1
    assert of_first.reason == "measured times changed"


def test_a_change_must_win_back_what_it_costs() -> None:
    slower = Disturbance(1, 25, 200, added_s=0.02)
    assert moves(run(Ours(cluster(slower)), cluster(slower), 60)) >= 1
    dear = Policy(change_s=5.0, horizon=50)
    assert moves(run(Ours(cluster(slower), dear), cluster(slower), 60)) == 0


def test_micro_batches_are_measured_as_such() -> None:
    small = PlayedCluster(tuple(PAPER), 512, caps=(64, 64, 64, 8), noise=0.0)
    mode = Ours(small)
    steps = run(mode, small, 30)
    assert moves(steps) == 0
    assert not any(step.slow for step in steps)
    assert mode.balancer.latest.micro_batches == tuple(-(-s // c) for s, c in zip(steps[0].shares, small.caps, strict=True))  # type: ignore[operator]


def test_communication_decides_who_takes_part() -> None:
    """Worker 3 brings 4 % of the compute and a slow link."""
    behind = Communication(lambda active: 0.1 if 3 in active else 0.02)
    mode = Ours(cluster(), communication=behind)
    assert mode.shares(0)[3] == 0
    hidden = Ours(cluster(), communication=Communication(behind.seconds, overlap=0.97))
    assert hidden.shares(0)[3] == 20


def test_no_room_at_all_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"minimum batch 2\b.*E-SHARES-ARGUMENT"):
        Balancer([Joined(0, cap=0), Joined(1, cap=1)], 8, Policy(minimum=2))
    balancer = Balancer([Joined(0, cap=0), Joined(1, line=Line(1e-3))], 8)
    assert balancer.shares == {1: 8}
    assert balancer.decide(0, [Vanished(1)]) is None


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_comes_the_sum_is_kept(data: st.DataObject) -> None:
    total, minimum = data.draw(st.integers(8, 60)), data.draw(st.integers(1, 2))
    balancer = Balancer([Joined(worker, line=Line(1e-3, 1e-3)) for worker in range(3)], total, Policy(minimum, readmit_after=3))
    times = st.one_of(st.floats(1e-4, 10.0), st.sampled_from([math.nan, -1.0, math.inf]))
    for step in range(25):
        inputs: list[Measurement | Joined | Vanished] = [
            Measurement(worker, share, data.draw(times)) for worker, share in balancer.shares.items() if share
        ]
        change = data.draw(st.sampled_from(["none"] * 6 + ["join", "leave"]))
        if change == "join":
            inputs.append(Joined(data.draw(st.integers(0, 6)), data.draw(st.sampled_from([None, 8]))))
        if change == "leave" and len(balancer.members) > 1:
            inputs.append(Vanished(data.draw(st.sampled_from(sorted(balancer.members)))))
        decision = balancer.decide(step, inputs)
        if decision:
            assert sum(decision.shares) == total
            assert all(share == 0 or share >= minimum for share in decision.shares)
            assert set(decision.workers) <= set(balancer.members)
