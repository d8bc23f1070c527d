"""What a chaos run is made of and what finds it wrong: seeds, proxies, frames seen from outside, verdicts; and real runs."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import msgpack
from support.chaos import SETTING, evidence

from bench.chaos import cluster, oracle, verdict
from bench.chaos.campaign import Campaign, Row, summary
from bench.chaos.cluster import Cluster, Evidence, all_free
from bench.chaos.dealing import dealt, trial
from bench.chaos.faults import FAULTS
from bench.chaos.oracle import GOES_ON
from bench.chaos.proxy import DOWN, UP, Link, Proxy, end
from bench.chaos.reports import Ended, Finding
from bench.chaos.strikes import STRIKES
from bench.chaos.table import closing, problems, table
from bench.chaos.trials import STEPS, Trial
from bench.chaos.wire import Seen, Stretch, digits, weights
from commlayer.errors import CommError
from commlayer.transport import framing
from commlayer.transport.crc import crc32c
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import Header, Kind

# ---- seeds and what is allowed


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
