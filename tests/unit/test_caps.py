"""Caps of a home: what a month and an hour allow, the count that processes share, and the limit of a process's rate."""

from __future__ import annotations

import datetime
import json
import math
import multiprocessing
import random
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec import structs
from support.autotuning import LINKS, Rank0, candidate, plan_of, texts
from support.mailbox import InboxTransport

from commlayer.autotune import plan_policy
from commlayer.autotune.measure.measurements import remove_caps
from commlayer.cli import pauses
from commlayer.cli.pauses import PauseRules
from commlayer.cluster.calls import home_traffic
from commlayer.cluster.calls.home_traffic import HomeTraffic
from commlayer.errors import InvalidInput, find_error_code
from commlayer.observe.caps import DOUBT_S, FILE_NBYTES, LEAVE_S, Caps, Month, add_to_month, next_month, parse_caps
from commlayer.planner.model import Link
from commlayer.transport.flow import traffic
from commlayer.transport.flow.traffic import Limit, Traffic
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE, Header, Kind

GB = 10**9
NOVEMBER = datetime.datetime(2026, 11, 1)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(home_traffic, "TRAFFIC", Traffic())  # other tests in this process have sent gigabytes
    monkeypatch.setattr(pauses, "HOME", HomeTraffic())
    return tmp_path / "commlayer"


@pytest.mark.parametrize("monthly", ["0GB", "0.0TB", "-1GB", "200", "GB", "200Gb", "200 gb", "1e3GB", "nanGB", "infTB",
                                     "200GB/s"])
def test_sizes_that_are_no_caps_are_refused(monthly: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_caps(monthly)
    assert find_error_code(caught.value) == "E-CLI-OPTION"


@pytest.mark.parametrize("share", ["0%", "-5%", "101%", "100.5%", "60", "0.6", "%", "60%,", "60%,50%", "22:00-07:00",
                                   "noon=50%",
                                   "22:00-25:00=50%", "60%,22:00-07:00=0%", "60%,22:00-07:00=110%", "=60%",
                                   "22:00-07:00="])
def test_shares_that_are_none_are_refused(share: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_caps("", share)
    assert find_error_code(caught.value) == "E-CLI-OPTION"
    assert repr(share) in str(caught.value)


@pytest.mark.parametrize(("share", "hour", "wanted"), [
    ("", 12, 1.0), ("60%", 12, 0.6), ("60%,22:00-07:00=100%", 12, 0.6), ("60%,22:00-07:00=100%", 23, 1.0),
    ("22:00-07:00=25.5%", 6, 0.255), ("22:00-07:00=25%", 7, 1.0), ("08:00-12:00=10%,10:00-14:00=20%,60%", 11, 0.1)])
def test_a_share_depends_on_the_hour(share: str, hour: int, wanted: float) -> None:
    assert parse_caps("", share).share(NOVEMBER.replace(hour=hour)) == pytest.approx(wanted)


@pytest.mark.parametrize(("used", "nbytes_s", "wanted"), [
    (0, 0, ""), (99.4 * GB, 0, ""), (99.6 * GB, 0, "pauses until 1 December"), (99 * GB, 0.2 * GB, ""),
    (99 * GB, 0.3 * GB, "pauses until 1 December"), (101 * GB, 0, "pauses until 1 December")])
def test_a_home_pauses_before_its_cap(used: float, nbytes_s: float, wanted: str) -> None:
    assert parse_caps("100GB").reason(used, nbytes_s, NOVEMBER.replace(day=20)) == wanted
    assert Caps().reason(used, nbytes_s, NOVEMBER) == ""


@pytest.mark.parametrize("left", [1e4, 1e6, 5e6, 1e8, 9e8])
@pytest.mark.parametrize("link_bps", [1e6, 1e8, 1e10])
def test_a_home_on_a_fast_line_leaves_before_its_cap(left: float, link_bps: float) -> None:
    """Its traffic is looked at once a second, from the first byte on, and goes on until it has left."""
    caps = Caps(1e9)
    used, nbytes_s, now = 1e9 - left, 0.0, datetime.datetime(2026, 11, 30)
    while not caps.reason(used, nbytes_s, now):
        nbytes_s = min(link_bps, caps.last_bps(used)) / 8
        used += nbytes_s
    for _ in range(int(LEAVE_S)):
        used += min(link_bps, caps.last_bps(used)) / 8
    assert used < 1e9


def test_the_year_turns() -> None:
    assert next_month(datetime.datetime(2026, 12, 31, 23, 59)) == datetime.datetime(2027, 1, 1)
    assert parse_caps("1GB").reason(GB, 0, datetime.datetime(2026, 12, 5)) == "pauses until 1 January"


def test_the_rate_of_a_month_uses_up_what_is_left() -> None:
    caps = parse_caps("100GB")
    middle = datetime.datetime(2026, 11, 16)
    assert caps.monthly_bps(0, NOVEMBER) * 30 * 86400 / 8 == pytest.approx(99.5 * GB)
    assert caps.monthly_bps(49.5 * GB, middle) * 15 * 86400 / 8 == pytest.approx(50 * GB)
    assert caps.monthly_bps(100 * GB, middle) == 1e3
    assert Caps().monthly_bps(100 * GB, middle) == math.inf


def run_months(rng: random.Random, cap: int, *, wrong_clocks: bool, wants: Sequence[float]) -> list[float]:
    """A home of 20 Mb/s that trains all the time, for three months. In each step of 5 minutes it sends and receives what its
    plan wants, at most what the cap allows. It starts again 40 times a month, which costs a transfer of its state, and its
    plan changes. Its clock is wrong for up to 50 minutes at a time, by up to 40 days. Returns what it really sent in each
    month, as a part of the cap."""
    caps, month, step_s = Caps(cap), Month(), 300.0
    real, jump, wanted, full, sent = NOVEMBER.timestamp(), 0.0, wants[0], "", dict.fromkeys((11, 12, 1), 0.0)
    wrong, begin = 0, real - 1000
    while real < datetime.datetime(2027, 2, 1).timestamp():
        wrong -= 1
        if wrong == 0:
            jump = 0.0
        elif wrong < 0 and wrong_clocks and rng.random() < 0.001:
            wrong, jump = rng.randrange(1, 10), rng.uniform(-40, 40) * 86400
        wanted = rng.choice(wants) if rng.random() < 0.002 else wanted
        month = month.after_traffic(0, real + jump, real - begin)
        used, here = month.used, month.local_time
        bps = min(40e6, caps.monthly_bps(used, here))
        restarts = rng.random() < 40 / 8640
        full = "" if restarts else full
        if full == f"{here:%Y-%m}" or caps.reason(used, bps / 8, here):
            full, nbytes = f"{here:%Y-%m}", 0.0
        else:
            nbytes = min(wanted * 20e6, bps) * step_s / 8 + restarts * cap / 10000
        month = month.after_traffic(int(nbytes), real + jump, real - begin)
        sent[datetime.datetime.fromtimestamp(real).month] += nbytes
        real += step_s
    return [total / cap for total in sent.values()]


@pytest.mark.parametrize("seed", range(4))
def test_a_cap_holds_in_simulated_months(seed: int) -> None:
    parts = run_months(random.Random(seed), 200 * GB, wrong_clocks=seed % 2 > 0, wants=(0.1, 1.0, 2.0))
    assert all(0.99 <= part <= 1 for part in parts), parts


def test_a_plan_that_sends_little_leaves_the_rest_of_a_month_unused() -> None:
    assert max(run_months(random.Random(1), 2000 * GB, wrong_clocks=False, wants=(0.01,))) < 0.1


def at(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


def test_a_clock_that_jumps_is_believed_after_an_hour() -> None:
    month = Month().after_traffic(100, at("2026-11-30T12:00"), 50.0)
    month = month.after_traffic(5, at("2026-12-31T12:00"), 60.0)
    assert (month.used, f"{month.local_time:%d %H:%M:%S}") == (105, "30 12:00:10")
    month = month.after_traffic(1, at("2026-11-30T12:00:20"), 70.0)
    assert (month.used, month.doubted_s) == (106, 0.0)
    month = month.after_traffic(1, at("2026-12-31T12:00"), 80.0).after_traffic(1, at("2026-12-31T13:00"), 80.0 + DOUBT_S)
    assert (month.used, f"{month.local_time:%m-%d}") == (1, "12-31")
    back = month.after_traffic(1, at("2026-11-30T14:00"), 90.0 + DOUBT_S).after_traffic(1, at("2026-11-30T15:00"),
                                                                                        90.0 + 2 * DOUBT_S)
    assert (back.used, f"{back.local_time:%m-%d}") == (110, "11-30"), "bytes of December may be of November"


def test_after_a_restart_of_the_machine_its_clock_is_believed() -> None:
    month = Month().after_traffic(100, at("2026-11-30T12:00"), 5000.0).after_traffic(1, at("2026-12-02T12:00"), 100.0)
    assert (month.used, month.doubted_s) == (1, 0.0)
    for year in range(1990, 2030):
        month = month.after_traffic(2, at(f"{year}-12-02T12:00"), 10.0 - year / 1000)
    assert 0 < len(msgspec.json.encode(month)) < FILE_NBYTES


def _add(times: int) -> None:
    for _ in range(times):
        add_to_month(3)


def test_processes_of_a_home_count_together(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_add, args=(200,)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert add_to_month(0).used == 4 * 200 * 3
    assert list(json.loads((folder / "traffic.json").read_text())["months"].values()) == [2400]


@pytest.mark.parametrize("text", ["{", "[]", '{"months": {"2026-11": -5}}', '{"months": {"2026-11": "5"}}', "\0",
                                  '{"at": 1e300}'])
def test_a_damaged_count_is_refused_and_kept(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "traffic.json").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        add_to_month(5)
    assert find_error_code(caught.value) == "E-FILE"
    assert (folder / "traffic.json").read_text() == text


def test_a_folder_that_cannot_be_written_is_refused(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(InvalidInput) as caught:
        PauseRules("", if_busy=False, caps=parse_caps("1GB"))
    assert find_error_code(caught.value) == "E-FILE"
    PauseRules("", if_busy=False, caps=parse_caps("", "60%"))


def test_two_homes_with_a_cap_need_two_folders() -> None:
    first = PauseRules("", if_busy=False, caps=parse_caps("1GB"))
    with pytest.raises(InvalidInput) as caught:
        PauseRules("", if_busy=False, caps=parse_caps("2GB"))
    assert find_error_code(caught.value) == "E-CLI-OPTION"
    assert first.reason() == ""


def test_a_home_pauses_for_the_rest_of_the_month_and_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [at("2026-11-29T12:00"), 1000.0]

    def passes(seconds: float) -> str:
        now[:] = [each + seconds for each in now]
        return home.reason()

    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[1])
    monkeypatch.setattr(time, "clock_gettime", lambda _: now[1])
    home = PauseRules("", if_busy=False, caps=parse_caps("1GB"))
    assert passes(10.0) == ""
    add_to_month(990 * 10**6)
    assert passes(10.0) == "pauses until 1 December", "at this rate the cap is near"
    assert {passes(60.0) for _ in range(1000)} == {"pauses until 1 December"}, "a join would cost too much"
    assert passes(86400.0) == ""


def test_a_home_whose_traffic_cannot_be_counted_any_more_pauses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "ASK_S", 0.0)
    home = PauseRules("", if_busy=False, caps=parse_caps("1GB"))
    assert home.reason() == ""
    text = (folder / "traffic.json").read_text()
    (folder / "traffic.json").write_text("?")
    assert home.reason().startswith("pauses until its traffic can be counted")
    (folder / "traffic.json").write_text(text)
    assert home.reason() == ""


def test_a_limit_holds_on_average_and_follows_its_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    limit = Limit()
    limit.count(10**9)
    assert limit.hold_s() == 0.0
    limit.set(8e6)
    assert limit.hold_s() == 0.0
    for _ in range(100):
        clock[0] += limit.hold_s()
        limit.count(500_000)
    assert clock[0] - 100.0 == pytest.approx(50.0, rel=0.02)
    debt_s = limit.hold_s() + traffic.BURST_S
    limit.set(4e6)
    assert limit.hold_s() + traffic.BURST_S == pytest.approx(2 * debt_s)
    clock[0] += 1000.0
    limit.count(500_000)
    assert limit.hold_s() + traffic.BURST_S == pytest.approx(1.0), "a pause gives no credit"
    limit.set(0.0)
    assert limit.hold_s() == 0.0


def test_a_transfer_of_a_state_leaves_half_of_a_share_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    process = Traffic()
    process.hold_state(10**6, 5.0)
    assert clock[0] == 100.0
    process.gradients.set(8e6)
    process.states.set(4e6)
    for _ in range(20):
        process.hold_state(10**6, 5.0)
    assert clock[0] - 100.0 == pytest.approx(2 * 19, rel=0.02)
    assert process.gradients.hold_s() < 1.0


def test_a_home_is_allowed_the_smaller_of_link_share_and_month(monkeypatch: pytest.MonkeyPatch) -> None:
    home = HomeTraffic()
    monkeypatch.setattr(home, "_caps", Caps(0.0, parse_caps("", "60%").shares))
    assert home.allowed_bps(20e6) == pytest.approx(12e6)
    assert home.allowed_bps(0.0) == 0.0
    monkeypatch.setattr(home, "_caps", parse_caps("1GB"))
    home.count()
    left_s = (next_month(datetime.datetime.now()) - datetime.datetime.now()).total_seconds()
    assert home.allowed_bps(1e12) == pytest.approx(0.5 * 8 * 0.995e9 / max(60.0, left_s), rel=0.01)
    assert home.allowed_bps(1e12, 1e11) == 1e11, "an exchange must not last longer than others wait"
    assert HomeTraffic().allowed_bps(20e6) == 20e6


def test_rates_without_caps_are_known() -> None:
    links = (Link(1e6, 5e7, 0.01), Link(2e7, 5e7, 0.01))
    assert remove_caps(links, [1e7, 2e7]) == (Link(1e7, 5e7, 0.01), links[1])
    assert remove_caps(links, [1e6, 2e7]) == remove_caps(links, [0.0, 0.0]) == ()


def test_a_plan_under_a_cap_is_compared_with_what_the_active_plan_would_take() -> None:
    """The measured steps of 0.2 s were not limited yet; under the cap they would take 20 s."""
    free = tuple(Link(10 * link.up_bps, link.down_bps, link.alpha_s) for link in LINKS)
    rank = Rank0()
    rank.state = structs.replace(rank.state, uncapped=free)
    rank.search(0.2)
    assert rank.state.order is not None
    assert (rank.state.order.uncapped, rank.state.order.checks) == (free, False)
    lines = rank.found(candidate(plan_of(1.0), 20.0)._replace(uncapped_s=0.5))
    assert "2.00 x as long" in texts(lines)
    rank.switch()
    rank.step(1.1, times=plan_policy.TRIED + 1)
    assert rank.state.proposal is None, "it stays, though steps were shorter before the cap"


@pytest.mark.parametrize(("planned", "now", "wanted"), [
    ([0.0, 1e6], [0.0, 1.2e6], False), ([0.0, 1e6], [0.0, 1.3e6], True), ([0.0, 1e6], [0.0, 0.7e6], True),
    ([0.0], [1e6], True), ([0.0], [0.0], False)])
def test_a_cap_that_changes_is_planned_again(planned: list[float], now: list[float], wanted: bool) -> None:
    assert plan_policy.caps_changed(planned, now) == wanted


@pytest.mark.parametrize("probe", [False, True])
def test_connections_keep_the_limit_and_count_their_bytes(probe: bool) -> None:
    ours, theirs = InboxTransport(Hello("job", 0)), InboxTransport(Hello("job", SERVER_BASE))
    kind, nbytes = (Kind.PROBE if probe else Kind.DATA), 400_000
    deadline, before = time.monotonic() + 30.0, traffic.TRAFFIC.sent_nbytes
    try:
        ours.dial(SERVER_BASE, theirs.listen("127.0.0.1"), deadline)
        traffic.TRAFFIC.gradients.set(3.2e6)
        begin = time.monotonic()
        for _ in range(2):
            ours.wait(ours.send(SERVER_BASE, Header(kind), bytes(range(250)) * (nbytes // 500)), deadline)
            assert len(theirs.wait(theirs.recv(0), deadline).body) == nbytes // 2
        took_s = time.monotonic() - begin
    finally:
        traffic.TRAFFIC.gradients.set(0.0)
        ours.close()
        theirs.close()
    assert traffic.TRAFFIC.sent_nbytes - before >= traffic.WIRE * nbytes
    assert probe or took_s > 0.7, "the last part is not waited for"
