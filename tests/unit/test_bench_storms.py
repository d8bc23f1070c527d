"""What `bench storms` computes from what homes reported."""

from __future__ import annotations

import math

from bench.storms import command, figures, storm
from bench.storms.reports import Stepped
from bench.storms.storm import KILL, LEAVE, Record, Strike


def steps(first: int, last: int, *, every: int = 1, pause: float = 0.0) -> list[Stepped]:
    """A step a second from time 0 on, an exchange every `every` steps; the steps from 5 on come `pause` later."""
    return [Stepped(n, n // every, 4.0 - 0.1 * n, n + (pause if n >= 5 else 0.0)) for n in range(first, last + 1)]


def record(homes: dict[str, list[Stepped]], strikes: list[Strike], removals: list[tuple[float, str]]) -> Record:
    return Record(0.0, 10.0, homes, strikes, removals, [])


CALM = record({name: steps(0, 10) for name in ("worker 0", "worker 1", "worker 2")}, [], [])
KILLED = record({"worker 0": steps(0, 8, pause=2.0), "worker 1": steps(0, 8, pause=2.5), "worker 2": steps(0, 4)},
                [Strike(KILL, "worker 2", 4.1)], [(4.0, "worker 1"), (5.2, "worker 2")])


def test_throughput_counts_steps_of_the_job_and_batches_of_all_homes() -> None:
    assert figures.steps_per_s(CALM) == 1.0
    assert figures.batches_per_s(CALM) == 3.0
    assert figures.steps_per_s(KILLED) == 0.8
    assert figures.batches_per_s(KILLED) == (8 + 7 + 4) / 10


def test_loss_is_a_mean_of_recent_steps_of_all_homes() -> None:
    assert math.isclose(figures.loss_at(CALM, 5.0), 3.55)
    assert figures.seconds_to(CALM, 3.551) == 5.0
    assert figures.seconds_to(CALM, 1.0) == math.inf
    assert figures.seconds_to(KILLED, 3.551) > 5.0


def test_recovery_counts_from_the_decision_to_the_last_survivor() -> None:
    # Due were their exchanges at 5 s, before the decision; they completed them at 7 and 7.5 s.
    assert figures.usual_s(CALM) == 1.0
    assert [round(s, 6) for s in figures.recoveries(KILLED, 1.0)] == [2.3]


def test_recovery_does_not_count_the_detection_of_another_home() -> None:
    another = KILLED._replace(removals=[*KILLED.removals, (6.5, "worker 3"), (9.0, "worker 4")])
    assert [round(s, 6) for s in figures.recoveries(another, 1.0)] == [1.0]


def test_recovery_does_not_count_local_steps_that_were_left() -> None:
    local = record({"worker 0": steps(0, 10, every=3), "worker 2": steps(0, 4)}, [Strike(KILL, "worker 2", 4.1)],
                   [(4.2, "worker 2")])
    assert figures.recoveries(local, 3.0) == [0.0]


def test_only_kills_that_were_decided_on_have_a_recovery() -> None:
    left = KILLED._replace(strikes=[Strike(LEAVE, "worker 2", 4.1)])
    assert figures.recoveries(left, 1.0) == []
    assert figures.recoveries(KILLED._replace(removals=[]), 1.0) == []


def test_every_seed_deals_all_kinds() -> None:
    for seed in range(5):
        kinds = [fault.kind for fault in storm.schedule(125, 3600, 5, seed)]
        assert {*kinds[:4]} == {*storm.KINDS}
    assert storm.schedule(0, 3600, 5, 0) == []


def test_a_failed_job_keeps_nothing_and_slow_machines_void_rows() -> None:
    storms = {85.0: KILLED, 125.0: KILLED._replace(failed=True, errors=["the job failed"])}
    runs = command.Runs("commlayer", 4, "local", CALM, storms)
    result = command.result([runs], 10.0, 1.0)
    assert result["code"] == 1
    assert (result["summary"]["kept_85"], result["summary"]["kept_125"], result["summary"]["errors"]) == (0.8, 0.0, 1)
    assert result["summary"]["void_rows"] == 0
    assert result["summary"]["recovery_p95_s"] == 2.3
    half_as_fast = command.result([runs], 10.0, 2.0)
    assert half_as_fast["summary"]["void_rows"] == 3


def test_further_sizes_modes_and_systems_have_keys_of_their_own() -> None:
    first = command.Runs("commlayer", 4, "local", CALM, {85.0: KILLED})
    others = [first._replace(mode="sync"), first._replace(homes=8), first._replace(system="torchft")]
    summary = command.result([first, *others], 10.0, 1.0)["summary"]
    assert {"kept_85", "kept_85_sync", "kept_85_8_homes", "torchft_kept_85"} < summary.keys()
