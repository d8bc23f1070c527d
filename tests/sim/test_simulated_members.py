"""Who takes part, as state machines under random loss, delay, deaths, freezes and restarts; what must not be is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from commlayer.cluster.membership import coordinator_journal, epoch_change, membership
from commlayer.cluster.membership.coordinator_journal import CoordinatorRecord
from commlayer.cluster.membership.membership import State
from commlayer.cluster.membership.sites import AdmissionState
from tests.sim.simulated_members import Members

LEAST = 120


def test_all_members_learn_the_same_epoch_under_any_faults() -> None:
    counts = Counter[str]()
    for seed in range(LEAST):
        world = Members(seed)
        assert world.run() == [], f"python -m bench chaos --members --schedules 1 --seed {seed}"
        counts += world.counts
    least = {"begun": 0.9, "epochs": 1.2, "grown": 0.5, "killed": 0.4, "frozen": 0.4, "hung": 0.1, "quiet": 0.1,
             "coordinators killed": 0.4, "lost": 5.0}
    assert {what: counts[what] for what, part in least.items() if counts[what] < LEAST * part} == {}


REGROUPED, TICK, BEAT = epoch_change.next_epoch, membership.tick, membership.heartbeat
PACKED = coordinator_journal.without_times
ADMITTED = epoch_change.admission


def same_number(state: State) -> State:
    after = REGROUPED(state)
    if after.epoch is None or state.epoch is None:
        return after
    return msgspec.structs.replace(after, epoch=msgspec.structs.replace(after.epoch, generation=state.epoch.generation))


def forgetful(kept: CoordinatorRecord) -> CoordinatorRecord:
    epoch = kept.state.epoch
    assert epoch is not None
    first = msgspec.structs.replace(kept.state, epoch=msgspec.structs.replace(epoch, generation=1))
    return PACKED(msgspec.structs.replace(kept, state=first))


def impatient(state: State, now: float, dead_after_s: float, patience_s: float, ended_after_s: float) -> State:
    return TICK(state, now, dead_after_s / 4, patience_s / 4, ended_after_s)


def hasty(state: State, token: str, report: Any) -> State:
    return state if report is None else membership.evict(state, [t for t, p in state.registrations.items() if p.rank == 0],
                                                         "it hangs")


def mute(state: State, *arguments: Any) -> Any:
    after, pulse = BEAT(state, *arguments)
    return after, msgspec.structs.replace(pulse, epoch=None)


def deaf(state: State, token: str, now: float, report: Any = None) -> Any:
    return BEAT(state, token, now, report and msgspec.structs.replace(report, heard=()))


def too_few(state: State) -> State:
    result = REGROUPED(msgspec.structs.replace(state, min_workers=min(1, state.min_workers)))
    return msgspec.structs.replace(result, min_workers=state.min_workers)


def boundless(state: State, *now: float, **more: int) -> AdmissionState:
    return msgspec.structs.replace(ADMITTED(msgspec.structs.replace(state, max_workers=64), *now, **more), size=0)


@pytest.mark.parametrize(("where", "name", "wrong", "line"), [
    (epoch_change, "admission", boundless, "of at most"),
    (epoch_change, "next_epoch", same_number, "has not heard of epoch"),
    (coordinator_journal, "without_times", forgetful, "has not heard of epoch"),
    (epoch_change, "next_epoch", too_few, "are the least"),
    (membership, "tick", impatient, "and is dead"),
    (epoch_change, "record_overdue", hasty, "has not hung, and is dead"),
    (membership, "heartbeat", mute, "has not heard of epoch"),
    (membership, "heartbeat", deaf, "and is dead"),
    (membership, "has_news", lambda *_: False, "does not know"),
    (membership, "over", lambda _: False, "has not heard that the job is over"),
])
def test_simulation_detects_each_mutation(where: Any, name: str, wrong: Callable[..., Any], line: str,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, wrong)
    assert any(line in problem for seed in range(60) for problem in Members(seed).run())
