"""Chaos runs whose members go, and those over TLS: verdicts, and real runs."""

from __future__ import annotations

import itertools
import math
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.chaos import SETTING, evidence

from bench.chaos import strikes, verdict
from bench.chaos.campaign import Campaign, summary
from bench.chaos.cluster import Evidence
from bench.chaos.dealing import KEYED, dealt, trial
from bench.chaos.faults import FAULTS
from bench.chaos.reports import Began, Ended, Stepped
from bench.chaos.trials import STEPS, Setting, Trial


def left(**changes: Any) -> Evidence:
    """Three sites; the last is killed in step 4. Each step has 21 samples."""
    every, steps, began = iter(range(1000)), list[list[Stepped]]([[], [], []]), list[list[Began]]([[], [], []])
    for n in range(STEPS):
        if n % verdict.STEPS_PER_EPOCH == 0:
            every = iter(range(1000))
        members = (0, 1, 2) if n < 3 else (0, 1)
        for rank in members if n != 3 else (0, 1, 2):
            samples = tuple(next(every) for _ in range(21 // len(members))) if rank in members else (7,)
            began[rank].append(Began(n + 1, n // verdict.STEPS_PER_EPOCH, samples))
            if rank in members:
                steps[rank].append(Stepped(n + 1, f"digest {n}", samples, float(n), members))
    for n in range(3, STEPS):  # 21 cannot be halved
        more = (*began[0][n].samples, 900 + n)
        began[0][n], steps[0][n] = began[0][n]._replace(samples=more), steps[0][n]._replace(samples=more)
    ended: list[Ended | None] = [Ended(STEPS, STEPS), Ended(STEPS, STEPS), None]
    result = evidence(stepped=steps, ended=ended, off=math.nan, contributions=None, began=began,
                    replayed=[f"digest {n}" for n in range(STEPS)])
    return result._replace(**changes)


HOMES = Setting("identity()", workers=3, least=2)
MENDED = "stop-home", "cut-home", "partition-home", "kill-home-server", "storm-home-server", "kill-home-coordinator"
GONE_WITHOUT = "freeze-home", "isolate-home"


def test_a_home_that_is_killed_is_done_without_and_nothing_else_may_differ() -> None:
    killed = Trial(7, "kill-home", HOMES, "worker", 2, 3)

    def wrong(result: Evidence) -> tuple[str, ...]:
        return verdict.judge(killed, result, result).wrong

    text = verdict.judge(killed, left(), left())
    assert (text.outcome, text.wrong, text.steps) == ("goes on without worker 2", (), STEPS)
    other = left()
    other.stepped[1][20] = other.stepped[1][20]._replace(digest="another")
    assert wrong(other) == ("worker 1 has other weights than plain means give, from step 21 on",)
    assert wrong(left(replayed=[])) == ("worker 0 has other weights than plain means give, from step 1 on",)
    lost = left()
    lost.began[2][1] = lost.began[2][1]._replace(samples=(0,))
    assert wrong(lost) == ("8 samples were lost or used twice",), "of the dead, in a step that was whole"
    assert wrong(left(servers_left=("server 0",))) == ("server 0 did not end behind the job",)
    early = left()
    assert "worker 1 took 39 steps of 40" in wrong(early._replace(stepped=[early.stepped[0], early.stepped[1][:-1], []]))
    named = [Ended(9, 9.0, "worker 2", "worker 2: its process has ended"), None, None]
    assert verdict.judge(killed._replace(fault="kill-homes", number=1), left(ended=named), left()).wrong == ()
    assert wrong(left(ended=[named[0], named[0], None])) == (
        "the job stops, naming worker 2; allowed: goes on without worker 2",)


def test_a_home_that_comes_again_is_one_of_all_who_end_alike_and_has_samples() -> None:
    came = Trial(7, "rejoin-home", HOMES, "worker", 2, 3)
    present = left()
    began, stepped = [*present.began, present.began[1]], [*present.stepped, present.stepped[1]]
    present = present._replace(began=began, stepped=stepped, ended=[*present.ended, Ended(STEPS, STEPS)])

    def wrong(result: Evidence) -> tuple[str, ...]:
        return verdict.judge(came, result, result).wrong

    text = verdict.judge(came, present, present)
    assert (text.outcome, text.wrong) == ("goes on with worker 3", ())
    short = present._replace(stepped=[*stepped[:3], stepped[3][:-1]])
    assert wrong(short) == ("worker 3 ended after step 39, worker 0 after 40",)
    idle = present._replace(stepped=[*stepped[:3], [step._replace(samples=()) for step in stepped[3]]])
    assert wrong(idle) == ("worker 3 came again and was given none",)
    never = present._replace(stepped=[*stepped[:3], []])
    assert wrong(never)[0] == "the job goes on without worker 2; allowed: goes on with worker 3"
    other = present._replace(stepped=[*stepped[:3], [stepped[3][0]._replace(digest="another"), *stepped[3][1:]]])
    assert wrong(other) == ("worker 3 has other weights than plain means give, from step 1 on",)
    failed = present._replace(ended=[*present.ended[:3], Ended(9, 9.0, "worker 0", "worker 0: silent")])
    assert wrong(failed)[0] == "the job stops, naming worker 0; allowed: goes on with worker 3"


def test_a_home_that_wakes_or_is_cut_off_when_it_counts_as_dead_has_to_end_and_say_so() -> None:
    woken = Trial(7, "freeze-home", HOMES, "worker", 2, 3)

    def said(end: Ended | None, trial: Trial = woken) -> verdict.Verdict:
        result = left()
        return verdict.judge(trial, result._replace(ended=[*result.ended[:2], end]), result)

    ended = Ended(3, 9.0, "coordinator 127.0.1.3:1", "coordinator 127.0.1.3:1: declared this worker 2 dead: no heartbeat")
    dropped = Ended(3, 9.0, "server 0", "server 0: no result before the deadline")
    for fault, end in itertools.product(GONE_WITHOUT, (ended, dropped)):
        one = said(end, woken._replace(fault=fault))
        assert (one.outcome, one.wrong) == ("goes on without worker 2", ())
    assert said(None).wrong == ("worker 2, which is cut off, did not end within 42.0 s",)
    blames = said(Ended(3, 9.0, "worker 1", "worker 1: left the job"))
    assert blames.wrong == (
        "worker 2, which is cut off, stops, naming worker 1; allowed: stops, naming coordinator or server 0",)
    assert said(Ended(STEPS, 9.0)).wrong[0] == "the job goes on; allowed: goes on without worker 2"


def test_a_home_that_is_not_missed_has_not_been_frozen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    signals: list[int] = []
    lines = tmp_path / "coordinator.lines"
    lines.write_text("worker 1: no heartbeat for 0.9 s\n")
    coordinator, worker = SimpleNamespace(lines=lines), SimpleNamespace(signal=lambda number: signals.append(number) or 1)
    namespace: Any = SimpleNamespace(workers=[worker] * 3, coordinator=coordinator)
    monkeypatch.setattr(strikes, "TOLD_S", 0.1)
    woken = Trial(0, "freeze-home", HOMES, "worker", 2, 5)
    assert strikes.freeze_home(namespace, woken, random.Random(0)) == 0
    assert strikes.freeze_home(namespace, woken._replace(number=1), random.Random(0)) == 1
    assert signals == [signal.SIGSTOP, signal.SIGCONT] * 2, "it wakes, missed or not"


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    with Campaign() as result:
        yield result


@pytest.mark.parametrize("fault", [*MENDED, *GONE_WITHOUT])
def test_homes_bear_what_heals_and_do_without_the_one_that_does_not(fault: str, campaign: Campaign) -> None:
    row = campaign.one(Trial(0, fault, HOMES._replace(apart=True), FAULTS[fault].strikes, 0, 5))
    expected = "goes on" if fault in MENDED else "goes on without worker 0"
    assert (row.verdict.outcome, row.verdict.wrong) == (expected, ()), row.evidence.lines
    assert row.evidence.shots > 0
    assert (len(row.evidence.replayed), row.verdict.steps) == (STEPS, STEPS)


def test_a_share_of_the_seeds_has_keys_and_no_other_run_is_another_for_it() -> None:
    results = [trial(seed, dealt()) for seed in range(30 * len(dealt()))]
    keyed = [one for one in results if one.setting.keys]
    assert 0.8 * KEYED < len(keyed) / len(results) < 1.2 * KEYED
    assert {one.fault for one in results} - {one.fault for one in keyed} == {"clock-jump"}
    assert {one.fault for one in results if one.setting.least} == {
        "kill-home", "kill-homes", "rejoin-home", *MENDED, *GONE_WITHOUT}


def test_homes_go_on_without_one_and_connections_over_tls_are_found_and_cut() -> None:
    with Campaign() as campaign:
        rows = [campaign.one(Trial(0, "kill-home", HOMES, "worker", 0, 5)),
                campaign.one(Trial(0, "cut", SETTING._replace(keys=True), "worker", 1, 5))]
    assert [(row.verdict.outcome, row.verdict.wrong) for row in rows] == [("goes on without worker 0", ()), ("goes on", ())]
    assert [row.evidence.contributions for row in rows] == [None, None]
    assert (len(rows[0].evidence.replayed), rows[0].verdict.steps) == (STEPS, STEPS)
    assert rows[1].evidence.shots > 0
    report = summary(rows, 2)
    assert (report["went_on"], report["went_on_without"], report["over_tls"]) == (1, 1, 1)


def test_a_home_that_was_killed_comes_again_and_all_go_on() -> None:
    with Campaign() as campaign:
        row = campaign.one(Trial(0, "rejoin-home", HOMES, "worker", 1, 5))
    assert (row.verdict.outcome, row.verdict.wrong) == ("goes on with worker 3", ()), row.evidence.lines
    assert summary([row], 1)["went_on_with"] == 1
    assert row.evidence.stepped[3][0].members == (0, 2, 3)
