"""What a chaos run is made of and what finds it wrong: seeds, proxies, frames seen from outside, verdicts; and real runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import msgpack

from bench.__main__ import main
from bench.chaos import cluster, oracle, strikes, verdict
from bench.chaos.campaign import Campaign, Row, summary
from bench.chaos.cluster import Cluster, Evidence, all_free
from bench.chaos.dealing import KEYED, dealt, trial
from bench.chaos.faults import FAULTS
from bench.chaos.kept import Kept
from bench.chaos.oracle import GOES_ON
from bench.chaos.proxy import DOWN, UP, Link, Proxy, end
from bench.chaos.reports import Began, Ended, Finding, Stepped
from bench.chaos.strikes import STRIKES
from bench.chaos.table import closing, problems, table
from bench.chaos.trials import STEPS, Setting, Trial
from bench.chaos.verdict import Verdict
from bench.chaos.wire import Seen, Stretch, digits, weights
from commlayer.errors import CommError
from commlayer.transport import framing
from commlayer.transport.crc import crc32c
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import Header, Kind

# ---- evidence of a run that went on after a fault, to be changed by tests of the verdict

SETTING = Setting("identity()")


def evidence(**changes: Any) -> Evidence:
    """Of a run that went on: two workers with 1 and 4 of the samples of each step."""
    def samples(rank: int, step: int) -> tuple[int, ...]:
        first = 5 * (step % verdict.STEPS_PER_EPOCH)  # type: ignore[attr-defined]
        return (first,) if rank == 0 else tuple(range(first + 1, first + 5))

    stepped = [[Stepped(n + 1, f"digest {n}", samples(rank, n), float(n)) for n in range(STEPS)] for rank in range(2)]
    ended: list[Ended | None] = [Ended(STEPS, STEPS), Ended(STEPS, STEPS)]
    result = Evidence(stepped, ended, 1, 5.5, 42.0, (), 400, 0, (), (), 1e-7, "a line")
    return result._replace(**changes)


# ---- the tests

def test_a_seed_says_everything_and_alone_the_same_as_among_others() -> None:
    assert STRIKES.keys() == FAULTS.keys()
    for seed in range(3 * len(dealt())):
        result = trial(seed, dealt())
        assert result == trial(seed, dealt()) == trial(seed, [result.fault])
        assert FAULTS[result.fault].fits(result.setting)
        assert f"--faults {result.fault} --seed {seed} --runs 1" in result.again
    assert {trial(seed, dealt()).fault for seed in range(len(dealt()))} == set(dealt())


def test_who_is_lost_for_good_is_named_and_everything_else_heals() -> None:
    for name in dealt():
        allowed = oracle.allowed(Trial(0, name, SETTING, FAULTS[name].strikes, 1))
        assert any(one == GOES_ON or one.how == "goes on with" for one in allowed) != FAULTS[name].ends, name
    assert [str(one) for one in oracle.allowed(Trial(0, "kill-worker", SETTING, "worker", 1))] == ["stops, naming worker 1"]


# ---- verdicts

PLAIN = "undisturbed"


def judged(fault: str, result: Evidence) -> verdict.Verdict:
    return verdict.judge(Trial(7, fault, SETTING, "worker", 1, 5), result, evidence())


def test_a_run_that_went_on_with_all_bits_is_right() -> None:
    text = judged("cut", evidence())
    assert (text.outcome, text.wrong) == ("goes on", ())
    assert text.recovery_s == pytest.approx(1.5)


def short(result: Evidence, steps: int, ends: list[Ended | None]) -> Evidence:
    return result._replace(stepped=[row[:steps] for row in result.stepped], ended=ends, off=math.nan, contributions=100)


def test_a_worker_that_was_killed_has_to_be_named_by_the_others() -> None:
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
def test_what_is_wrong_is_said(change: dict[str, Any], line: str) -> None:
    assert line in judged("cut", evidence(**change)).wrong


def test_a_bit_a_sample_a_hang_and_an_end_are_found() -> None:
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


def test_who_is_cut_off_is_named_by_the_others_and_has_to_end_by_itself() -> None:
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


def test_an_undisturbed_run_has_a_sum_for_each_step_where_sums_are_seen() -> None:
    assert verdict.whole(evidence())
    assert verdict.whole(evidence(contributions=None))
    assert verdict.whole(evidence(contributions=2 * (STEPS + 2)))
    assert not verdict.whole(evidence(contributions=2 * (STEPS + 2) - 1))
    assert not verdict.whole(evidence(contributions=0))


def test_what_is_shown_of_runs() -> None:
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


def test_a_run_counts_once_for_each_kind_of_finding_and_what_was_not_seen_counts_nowhere() -> None:
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


# ---- frames seen from outside


def framed(header: Header, body: bytes) -> bytes:
    return framing.encode(header, len(body), crc32c(body) if body else 0) + body


def test_each_result_says_whose_contributions_it_has() -> None:
    assert digits(sum(weights(3)), 3) == [1, 1, 1]
    seen = Seen(2)
    stretch = Stretch(seen)
    hello = msgpack.encode(Hello("job", 1))
    push, result = Header(Kind.PUSH, 1, 4, 2, sender=1), Header(Kind.RESULT, 1, 4, 2, sender=0x8000, weight=5.0)
    data = framed(Header(Kind.HELLO, sender=1), hello) + framed(push, b"payload") * 2
    for at in range(len(data)):
        stretch.feed(UP, data[at : at + 1])
    assert stretch.rank == 1
    stretch.feed(DOWN, framed(result, b"sum") + framed(result, b"sum"))
    assert (seen.contributions, seen.repeats, seen.faults) == (2, 1, [])
    stretch.feed(UP, framed(push, b"another"))
    stretch.feed(DOWN, framed(result, b"other") + framed(result._replace(step=5, weight=9.0), b"sum"))
    assert [fault.kind for fault in seen.faults] == ["payload", "payload", "contributions"]
    assert [fault.line for fault in seen.faults] == [
        "worker 1 sent another payload than before for generation 1, step 4, bucket 2, round 0",
        "worker 1 was told another sum than before for generation 1, step 4, bucket 2, round 0",
        "the sum of generation 1, step 5, bucket 2, round 0 has contributions [1, 2], allowed: one of each worker"]


# ---- the proxy


class Echo:
    """A server that sends back what it gets, behind a proxy; `near` is a connection through it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.ended = threading.Event()
        """The end of the server, and its reason."""
        threading.Thread(target=self._serve, daemon=True).start()
        self.link = Link(random.Random(3))
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = free.getsockname()
        self.proxy = Proxy(address, self.listener.getsockname(), [self.link], Seen(1), rank=0)
        self.near = socket.create_connection(address, 5.0)

    def _serve(self) -> None:
        while True:
            try:
                one, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(one,), daemon=True).start()

    def _echo(self, one: socket.socket) -> None:
        with one, contextlib.suppress(OSError):
            while data := one.recv(1000):
                one.sendall(data)
        self.ended.set()

    def asked(self, data: bytes) -> bytes:
        self.near.sendall(data)
        return self.near.recv(1000)

    def close(self) -> None:
        self.near.close()
        self.link.close()
        self.proxy.close()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    result = Echo()
    yield result
    result.close()


def test_bytes_pass_are_flipped_and_held(echo: Echo) -> None:
    assert echo.asked(b"hello") == b"hello"
    assert echo.link.shots == 0
    echo.link.ways[UP].flips = 1
    (bits,) = {bin(a ^ b).count("1") for a, b in zip(b"x", echo.asked(b"x"), strict=True)}
    assert (bits, echo.asked(b"y"), echo.link.shots) == (1, b"y", 1)
    echo.link.ways[DOWN].hold()
    echo.near.settimeout(0.2)
    with pytest.raises(TimeoutError):
        echo.asked(b"late")
    echo.link.ways[DOWN].release()
    echo.near.settimeout(5.0)
    assert (echo.near.recv(1000), echo.link.shots) == (b"late", 2)


def test_a_connection_that_ends_in_its_greeting_ends_at_the_dialler_too() -> None:
    """Whose it is has become known on one way, while the other waits."""
    links = [Link(random.Random(3)) for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
        free.close()
        proxy = Proxy(address, server.getsockname(), links, Seen(2))
        hello = framed(Header(Kind.HELLO, sender=1), msgpack.encode(Hello("job", 1)))
        with socket.create_connection(address, 5.0) as near:
            near.sendall(hello)
            far, _ = server.accept()
            assert far.recv(1000) == hello
            end(far, reset=True)
            with pytest.raises(ConnectionError):
                near.recv(1000) or (_ for _ in ()).throw(ConnectionResetError)
        proxy.close()


@pytest.mark.parametrize("halves", [False, True])
def test_a_cut_ends_what_there_is_and_half_of_one_is_heard_at_one_end(echo: Echo, halves: bool) -> None:
    assert echo.asked(b"hello") == b"hello"
    assert echo.link.cut(reset=True, halves=halves) == 1
    with pytest.raises(ConnectionError):
        echo.near.recv(1000) or (_ for _ in ()).throw(ConnectionResetError)
    assert echo.ended.wait(0.2 if halves else 5.0) == (not halves)
    assert echo.link.cut(reset=True) == 0


def test_a_connection_that_has_ended_is_not_cut(echo: Echo) -> None:
    assert echo.asked(b"hello") == b"hello"
    echo.near.shutdown(socket.SHUT_WR)
    assert echo.near.recv(1000) == b""
    until = time.monotonic() + 5.0
    while echo.link.open and time.monotonic() < until:
        time.sleep(0.01)
    assert echo.link.cut(reset=True) == 0


# ---- the command, and real runs


def test_what_cannot_begin_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommError, match="FileNotFoundError: .*'/none'.*E-COMM"), Campaign(inside="/none"):
        pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not all_free(["127.0.0.1"], [port])
        monkeypatch.setattr(cluster, "PORTS", range(port, port + 1))
        with pytest.raises(CommError, match=r"\b3 ports\b.*127\.0\.0\.1\b.*\b50\b.*E-ADDRESS"):
            Cluster(Trial(0, "none", SETTING), ("127.0.0.1", 1)).__enter__()
    with pytest.raises(CommError, match=r"192\.0\.2\.1:\d+: .*\(errno \d+\).*E-ADDRESS"):
        all_free(["192.0.2.1"], [port])


def test_a_worker_that_is_killed_is_named_and_a_server_that_is_killed_goes_on() -> None:
    with Campaign() as campaign:
        rows = [campaign.one(Trial(0, fault, SETTING, FAULTS[fault].strikes, 0, 5))
                for fault in ("kill-worker", "kill-server", "cut")]
        rows.append(campaign.one(Trial(0, "clock-jump", SETTING._replace(apart=True), "server", 0, 5)))
    assert [(row.verdict.outcome, row.verdict.wrong) for row in rows] == [
        ("stops, naming worker 0", ()), ("goes on", ()), ("goes on", ()), ("goes on", ())]
    assert (rows[3].evidence.shots, rows[3].told()["struck"]) == (1, "server 0")
    assert all(row.evidence.contributions for row in rows)
    assert rows[1].evidence.off < 1e-5


# ---- a job whose coordinator is killed for its rest

APART = Setting("identity()", servers=2, apart=True)


def kill_until_the_end(result: Cluster, trial: Trial, chance: random.Random) -> int:
    """The coordinator, which is started again after the last step of its job."""
    struck, until = result.coordinator.signal(signal.SIGKILL), time.monotonic() + 20.0
    while not all((result.folder / f"applied-{rank}").exists() for rank in range(2)) and time.monotonic() < until:
        time.sleep(0.01)
    result.restart_coordinator()
    return struck


@pytest.mark.parametrize(("fault", "waits", "line"), [
    # Servers wait for it for longer than this run may take, so it is theirs to tell.
    ("kill-coordinator", cluster.PATIENT, "worker 0: ended while no coordinator was running, according to its servers"),
    ("lose-coordinator", cluster.UNTOLD, "all workers have ended: this server ends too"),
])
def test_a_job_that_ends_without_its_coordinator_leaves_nothing_behind(
    fault: str, waits: dict[str, float], line: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STRIKES, "kill-coordinator", kill_until_the_end)
    monkeypatch.setattr(cluster, "UNTOLD", waits)
    with Campaign() as campaign:
        row = campaign.one(Trial(0, fault, APART, "coordinator", 0, 5))
    assert (row.verdict.outcome, row.verdict.wrong) == ("goes on", ())
    assert line in row.evidence.lines


# ---- a campaign of chaos in pieces

def test_a_campaign_in_pieces_makes_each_run_once_and_shows_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results: list[int] = []

    def run(self: Campaign, seeds: Any, faults: Any) -> Iterator[Row]:
        for seed in seeds:
            results.append(seed)
            wanted = trial(seed, faults)
            verdict = Verdict("goes on", (Finding("left", "a file"),) * (seed % 2), 0.5 if seed % 2 else math.nan, 40, 0)
            ended = [Ended(40, 1.0), None]
            yield Row(wanted, verdict, Evidence([[], []], ended, 1, 0.0, 1.5, (), None, 3, (), (), math.nan, "a line"))

    monkeypatch.setattr(Campaign, "run", run)
    monkeypatch.setattr(Campaign, "__enter__", lambda self: self)
    monkeypatch.setattr(Campaign, "__exit__", lambda self, *_: None)
    file, report = tmp_path / "runs", tmp_path / "runs.json"

    def piece(runs: int, *more: str) -> int:
        chosen = ["--faults", "cut,slow-link", "--seed", "4", "--runs", str(runs), "--resume", str(file), *more]
        return main(["chaos", *chosen, "--json", str(report)])

    for _ in range(3):
        piece(5, "--seconds", "1e-9")
    assert results == [4, 5, 6]
    assert piece(5) == 1
    assert results == [4, 5, 6, 7, 8]
    pieces = json.loads(report.read_text())
    file.unlink()
    piece(5)
    assert results[5:] == results[:5]
    assert json.loads(report.read_text()) == pieces
    assert [row["seed"] for row in pieces["rows"]] == [4, 5, 6, 7, 8]
    assert (pieces["summary"]["asked"], pieces["summary"]["violations"]) == (5, 2)
    with pytest.raises(ValueError, match=r"cut of seed 8\b.*E-CLI-OPTION"):
        Kept(file, range(4, 8), ("cut", "slow-link"))
    with pytest.raises(ValueError, match=r"cut of seed 4\b.*E-CLI-OPTION"):
        Kept(file, range(4, 9), ("slow-link", "cut"))
    with pytest.raises(ValueError, match="without hosts.*E-CLI-OPTION"):
        Kept(file, range(4, 9), ("cut", "slow-link"), "40ms")
    file.write_bytes(b"{}")
    with pytest.raises(ValueError, match="runs: .*Expected .*E-CLI-OPTION"):
        Kept(file, range(4, 9), ("cut", "slow-link"))


# ---- chaos runs whose members go, and those over TLS

def left(**changes: Any) -> Evidence:
    """Three sites; the last is killed in step 4. Each step has 21 samples."""
    every, steps, began = iter(range(1000)), list[list[Stepped]]([[], [], []]), list[list[Began]]([[], [], []])
    for n in range(STEPS):
        if n % verdict.STEPS_PER_EPOCH == 0:  # type: ignore[attr-defined]
            every = iter(range(1000))
        members = (0, 1, 2) if n < 3 else (0, 1)
        for rank in members if n != 3 else (0, 1, 2):
            samples = tuple(next(every) for _ in range(21 // len(members))) if rank in members else (7,)
            began[rank].append(Began(n + 1, n // verdict.STEPS_PER_EPOCH, samples))  # type: ignore[attr-defined]
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
    for fault, last in itertools.product(GONE_WITHOUT, (ended, dropped)):
        one = said(last, woken._replace(fault=fault))
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
