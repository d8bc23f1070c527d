"""Seeds decide runs, and evidence decides verdicts: what went wrong in a run is found and said."""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
from typing import Any

import pytest
import torch
from torch import nn

from tests.chaos import outcomes, training, verdict
from tests.chaos.campaign import Row, summary
from tests.chaos.cluster import Evidence
from tests.chaos.dealing import dealt, trial
from tests.chaos.faults import FAULTS
from tests.chaos.outcomes import GOES_ON
from tests.chaos.reports import Began, Ended, Finding, Stepped, Summed
from tests.chaos.strikes import STRIKES
from tests.chaos.table import closing, problems, table
from tests.chaos.trials import STEPS, Setting, Trial

SETTING = Setting("identity()")


def evidence(**changes: Any) -> Evidence:
    """Of a run that went on: two workers with 1 and 4 of the samples of each step."""
    def samples(rank: int, step: int) -> tuple[int, ...]:
        first = 5 * (step % verdict.STEPS_PER_EPOCH)
        return (first,) if rank == 0 else tuple(range(first + 1, first + 5))

    stepped = [[Stepped(n + 1, f"digest {n}", samples(rank, n), float(n)) for n in range(STEPS)] for rank in range(2)]
    ended: list[Ended | None] = [Ended(STEPS, STEPS), Ended(STEPS, STEPS)]
    result = Evidence(stepped, ended, 1, 5.5, 42.0, (), 400, 0, (), (), 1e-7, "a line")
    return result._replace(**changes)


def test_trial_depends_only_on_its_seed_and_fault() -> None:
    assert STRIKES.keys() == FAULTS.keys()
    for seed in range(3 * len(dealt())):
        result = trial(seed, dealt())
        assert result == trial(seed, dealt()) == trial(seed, [result.fault])
        assert FAULTS[result.fault].fits(result.setting)
        assert f"--faults {result.fault} --seed {seed} --runs 1" in result.again
    assert {trial(seed, dealt()).fault for seed in range(len(dealt()))} == set(dealt())


def test_only_permanent_losses_may_end_a_run() -> None:
    for name in dealt():
        allowed = outcomes.allowed(Trial(0, name, SETTING, FAULTS[name].strikes, 1))
        assert any(one == GOES_ON or one.how == "goes on with" for one in allowed) != FAULTS[name].ends, name
    assert [str(one) for one in outcomes.allowed(Trial(0, "kill-worker", SETTING, "worker", 1))] == ["stops, naming worker 1"]


PLAIN = "undisturbed"


def judged(fault: str, result: Evidence) -> verdict.Verdict:
    return verdict.judge(Trial(7, fault, SETTING, "worker", 1, 5), result, evidence())


def test_run_that_continues_with_equal_bits_passes() -> None:
    text = judged("cut", evidence())
    assert (text.outcome, text.wrong) == ("goes on", ())
    assert text.recovery_s == pytest.approx(1.5)


def short(result: Evidence, steps: int, ends: list[Ended | None]) -> Evidence:
    return result._replace(stepped=[row[:steps] for row in result.stepped], ended=ends, off=math.nan, contributions=100)


def test_killed_worker_must_be_named_by_the_others() -> None:
    lost = short(evidence(), 9, [Ended(9, 9.0, "worker 1", "worker 1: no heartbeat"), None])
    assert judged("kill-worker", lost).wrong == ()
    (line,) = judged("kill-worker", lost._replace(ended=[Ended(9, 9.0, "server 0", "server 0: gone"), None])).wrong
    assert line == "the job stops, naming server 0; allowed: stops, naming worker 1"


@pytest.mark.parametrize(("change", "line"), [
    ({"shots": 0}, "the fault cut never fired"),
    ({"faults": (Finding("contributions", "the sum of step 3 ..."),)}, "the sum of step 3 ..."),
    ({"servers_left": ("server 0",)}, "server 0 did not end behind the job"),
    ({"left_files": ("server-0.journal/server.journal",)}, "server-0.journal/server.journal was left behind the job"),
    ({"off": 0.01}, "what was applied is off what was put in by 1.00e-02, allowed 1e-04"),
    ({"off": math.nan}, "what was applied is off what was put in by nan, allowed 1e-04"),
    ({"contributions": 399}, "399 contributions were in sums, 400 in the undisturbed run"),
])
def test_each_violation_has_its_line(change: dict[str, Any], line: str) -> None:
    assert line in judged("cut", evidence(**change)).wrong


def test_other_weights_samples_hangs_and_ends_are_detected() -> None:
    result = evidence()
    result.stepped[1][20] = result.stepped[1][20]._replace(digest="another")
    assert judged("cut", result).wrong == ("worker 1 has other weights than in the undisturbed run from step 21 on",)
    result = evidence()
    result.stepped[0][3] = result.stepped[0][3]._replace(samples=(0,))
    text = judged("cut", result)
    assert (text.lost_samples, text.wrong) == (2, ("2 samples were lost or used twice",))
    text = judged("cut", short(evidence(), 9, [None, Ended(9, 9.0)]))
    assert text.wrong[:2] == ("worker 0 did not end within 42.0 s", "the job hangs; allowed: goes on")
    text = judged("cut", short(evidence(), 9, [Ended(9, 9.0, "worker 1", "gone"), Ended(9, 9.0, "worker 1", "gone")]))
    assert text.wrong[0] == "the job stops, naming worker 1; allowed: goes on"


def test_isolated_worker_must_be_named_and_must_end() -> None:
    named, gone = Ended(9, 9.0, "worker 1", "worker 1: no heartbeat"), Ended(9, 9.0, "server 0", "server 0: closed its end")
    assert judged("isolate-worker", short(evidence(), 9, [named, gone])).wrong == ()
    ended = Ended(9, 9.0, "coordinator 127.0.1.2:1", "coordinator 127.0.1.2:1: no heartbeat")
    assert judged("isolate-worker", short(evidence(), 9, [named, ended])).wrong == ()
    assert judged("isolate-worker", short(evidence(), 9, [gone, gone])).wrong == (
        "the job stops, naming server 0; allowed: stops, naming worker 1",)
    assert judged("isolate-worker", short(evidence(), 9, [named, None])).wrong == (
        "worker 1, which is cut off, did not end within 42.0 s",)
    assert judged("isolate-worker", short(evidence(), 9, [named, named])).wrong == (
        "worker 1, which is cut off, stops, naming worker 1; allowed: stops, naming coordinator or server 0",)


def test_undisturbed_run_has_a_sum_for_each_step() -> None:
    assert verdict.whole(evidence())
    assert verdict.whole(evidence(contributions=None))
    assert verdict.whole(evidence(contributions=2 * (STEPS + 2)))
    assert not verdict.whole(evidence(contributions=2 * (STEPS + 2) - 1))
    assert not verdict.whole(evidence(contributions=0))


def test_table_and_problems_of_runs() -> None:
    rows = [Row(Trial(seed, "cut", SETTING, "worker", 1, 5), judged("cut", result), result)
            for seed, result in enumerate([evidence(), evidence(shots=0)])]
    assert table(rows).row_count == 1
    assert "cut, seed 1 (identity, 2 workers, 1 server; struck: worker 1):\n  the fault cut never fired" in problems(rows)
    assert "again: python -m bench chaos --faults cut --seed 1 --runs 1" in problems(rows)
    report = summary(rows, 3)
    assert {name: report[name] for name in ("asked", "runs", "violations", "never_fired", "contributions", "went_on")} == {
        "asked": 3, "runs": 2, "violations": 1, "never_fired": 1, "contributions": 800, "went_on": 1}
    assert closing(report).startswith("2 of 3 runs, 1 wrong.\n1 went on with")
    assert "again" not in rows[0].told()
    assert (rows[1].told()["again"], rows[1].told()["lines"]) == (rows[1].trial.again, ["a line"])


def test_run_counts_once_per_kind_of_finding() -> None:
    twice = evidence(faults=(Finding("contributions", "one sum"), Finding("contributions", "another")), contributions=7)
    unseen = evidence(contributions=None)
    trials = [Trial(seed, fault, SETTING, "worker", 1, 5) for seed, fault in enumerate(("cut", "slow-link"))]
    rows = [Row(trials[0], verdict.judge(trials[0], twice, evidence()), twice),
            Row(trials[1], verdict.judge(trials[1], unseen, unseen), unseen)]
    report = summary(rows, 2)
    assert {name: report[name] for name in ("lost_or_doubled", "watched_runs", "contributions", "went_on", "violations")} == {
        "lost_or_doubled": 1, "watched_runs": 1, "contributions": 7, "went_on": 1, "violations": 1}
    assert report["recovery_p95_s"] == pytest.approx(rows[0].verdict.recovery_s)
    assert rows[1].told()["contributions"] is None


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
GONE_WITHOUT = "freeze-home", "isolate-home"


def test_job_must_continue_without_a_killed_home_and_otherwise_equal() -> None:
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
    exits = left()
    exits.stepped[2].append(Stepped(4, "digest 3", (7,), 3.0))
    assert wrong(exits) == ("1 samples were lost or used twice",)
    exits.stepped[0][-1] = exits.stepped[0][-1]._replace(exits={2: 3})
    assert wrong(exits) == (), "they count until its exit"
    assert wrong(left(servers_left=("server 0",))) == ("server 0 did not end behind the job",)
    early = left()
    assert "worker 1 took 39 steps of 40" in wrong(early._replace(stepped=[early.stepped[0], early.stepped[1][:-1], []]))
    named = [Ended(9, 9.0, "worker 2", "worker 2: its process has ended"), None, None]
    assert verdict.judge(killed._replace(fault="kill-homes", number=1), left(ended=named), left()).wrong == ()
    assert wrong(left(ended=[named[0], named[0], None])) == (
        "the job stops, naming worker 2; allowed: goes on without worker 2",)


def test_rejoined_home_must_end_like_the_others_and_have_samples() -> None:
    came = Trial(7, "rejoin-home", HOMES, "worker", 2, 3)
    present = left()
    began = [*present.began, [start._replace(samples=()) for start in present.began[1]]]
    stepped = [*present.stepped, present.stepped[1]]
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


def test_evicted_home_must_end_with_a_message() -> None:
    woken = Trial(7, "freeze-home", HOMES, "worker", 2, 3)

    def said(end: Ended | None, trial: Trial = woken) -> verdict.Verdict:
        result = left()
        return verdict.judge(trial, result._replace(ended=[*result.ended[:2], end]), result)

    ended = Ended(3, 9.0, "coordinator 127.0.1.3:1", "coordinator 127.0.1.3:1: declared this worker 2 dead: no heartbeat")
    dropped = Ended(3, 9.0, "server 0", "server 0: no result before the deadline")
    for fault, last in itertools.product(GONE_WITHOUT, (ended, dropped)):
        one = said(last, woken._replace(fault=fault))
        assert (one.outcome, one.wrong) == ("goes on without worker 2", ())
    assert said(None).wrong == ("worker 2, which is cut off, did not end within 42.0 s",)
    blames = said(Ended(3, 9.0, "worker 1", "worker 1: left the job"))
    assert blames.wrong == (
        "worker 2, which is cut off, stops, naming worker 1; allowed: stops, naming coordinator or server 0",)
    assert said(Ended(STEPS, 9.0)).wrong[0] == "the job goes on; allowed: goes on without worker 2"


def test_replay_finds_sums_that_lack_a_lost_worker() -> None:
    """The last bucket of step 2 lacks worker 1, which did not complete it."""
    model, optimizer = training.made(8)
    weights = list(model.parameters())
    buckets = [[(0, 0, 50)], [(0, 50, 96), *((n, 0, p.numel()) for n, p in enumerate(weights) if n)]]
    samples, digests = [(0,), (1, 2)], []
    for lacking in (0, 1):
        gradients = []
        for used in samples:
            x, y = (torch.stack(part) for part in list(zip(*(training.Samples(168)[n] for n in used), strict=True))[1:])
            gradients.append([g * len(used) for g in torch.autograd.grad(nn.functional.mse_loss(model(x), y), weights)])
        for bucket, lacks in zip(buckets, (0, lacking), strict=True):
            among = gradients[: 2 - lacks]
            for tensor, start, stop in bucket:
                p = weights[tensor]
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                total = functools.reduce(torch.add, (g[tensor] for g in among)).mul(1.0 / (1 if lacks else 3))
                p.grad.view(-1)[start:stop] = total.view(-1)[start:stop]
        optimizer.step()
        digests.append(training.digest(weights))
    threads = torch.get_num_threads()

    def replayed(sure: bool, digest: str = digests[1]) -> list[str]:
        near, far = multiprocessing.Pipe()
        training.replay(far, 3, 8, [Summed(digests[0], [(used, True) for used in samples]),
                                    Summed(digest, [(samples[0], True), (samples[1], sure)])], buckets)
        return near.recv()

    try:
        assert replayed(sure=False) == digests
        assert replayed(sure=True)[0] == digests[0]
        assert replayed(sure=True)[1] != digests[1]
        assert replayed(sure=False, digest="another")[1] not in ("another", digests[1])
    finally:
        torch.set_num_threads(threads)
