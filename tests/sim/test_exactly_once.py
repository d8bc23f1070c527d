"""What a worker keeps and what a server takes, as state machines under random loss, repetition, reordering and restarts."""

from __future__ import annotations

from collections import Counter

import pytest

from commlayer.transport.inflight import InFlightRequests
from tests.sim import schedules
from tests.sim.schedules import Done, Options
from tests.sim.simulated_sums import Sums, World

SCHEDULES = 300


def test_every_contribution_counts_once_under_any_faults() -> None:
    """`python -m bench chaos --schedules 1000000` runs more."""
    counts = Counter[str]()
    for seed in range(SCHEDULES):
        world = World(seed)
        assert world.run() == [], seed
        counts += world.counts
    assert counts["connections broken"] > SCHEDULES, "hardly anything broke"
    assert counts["servers killed"] > SCHEDULES / 10, "hardly any server was killed"


@pytest.mark.parametrize("wrong", ["a contribution that counts twice", "one that is not asked for again",
                                   "a sum that is not kept"])
def test_simulation_detects_each_mutation(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "a contribution that counts twice":
        emit = Sums.emit
        monkeypatch.setattr(Sums, "emit", lambda self, r, acc, out: (self._under_way.append(self._under_way[0]),
                                                                     emit(self, r, acc, out))[1])
    elif wrong == "one that is not asked for again":
        monkeypatch.setattr(InFlightRequests, "pending", lambda self: [])
        monkeypatch.setattr("tests.sim.simulated_sums.MOST_EVENTS", 2000)
    else:
        monkeypatch.setattr(World, "_keep", lambda self, bucket, words, state: self._count(bucket))
        monkeypatch.setattr(World, "_arrive_at_server", _killing(World._arrive_at_server))
    done = Done()
    for seed in range(20):
        schedules.one(Options(1, seed, 0.0, None), seed, done)
    assert done.wrong > 0


def _killing(arrive: object) -> object:
    def arrives(self: World, rank: int) -> None:
        arrive(self, rank)  # type: ignore[operator]
        if self.journal and self.chance.random() < 0.02:
            self._killed()

    return arrives
