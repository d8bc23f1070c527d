"""Link probes, and rates already observed in steps: calculated by hand, and with real ranks and servers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support import rank_pool
from support.attached import Run, Setting, coordinators, mlp, play, train_step
from support.rank_pool import pool

from commlayer.autotune import job_actions
from commlayer.autotune.measure import calibration, link_rates
from commlayer.autotune.measure.calibration import CollectiveCosts
from commlayer.autotune.measure.probes import (
    BUSY,
    DRAINED,
    FAST_BPS,
    SENDING,
    SeenTraffic,
    communication_bound,
    find_limiting_rates,
    known_links,
    plan_probe_turns,
    probe_own_link,
)
from commlayer.observe.interface_counters import Direction, Throughput
from commlayer.observe.link_monitor import PAYLOAD
from commlayer.observe.step_trace import RecordedStep
from commlayer.planner.model import LinearCost, Link

WORLD, SERVERS, BUDGET_S = 2, 2, 0.2
_ranks = rank_pool.ranks_first(WORLD)
BUSILY = Throughput(Direction(1e5, 0.9), Direction(9e4, 0.8))
SELDOM = Throughput(Direction(1e5, 0.2), Direction(9e4, 0.2))
TOLD = (PAYLOAD * 1e5, PAYLOAD * 9e4)


@pytest.mark.parametrize(("seen", "steps_s", "round_trip_s", "wanted"), [
    (SeenTraffic(BUSILY, 2.0), 2.0, 0.08, TOLD),
    (None, 2.0, 0.08, (0.0, 0.0)),
    (SeenTraffic(SELDOM, 2.0), 2.0, 0.08, (0.0, 0.0)),
    (SeenTraffic(SELDOM, 8.0), 2.0, 0.08, TOLD),  # the script did something else, too
    (SeenTraffic(Throughput(Direction(1e5, BUSY), SELDOM.down), 4.0), 4.0, 0.08, (TOLD[0], 0.0)),
    (SeenTraffic(Throughput(Direction(FAST_BPS, 1.0), BUSILY.down), 2.0), 2.0, 0.08, (0.0, TOLD[1])),  # it may be processors
    (SeenTraffic(BUSILY, 0.5), 0.5, 0.08, (0.0, 0.0)),  # of a few round trips, in which windows open
    (SeenTraffic(Throughput(Direction(), Direction()), 2.0), 2.0, 0.08, (0.0, 0.0)),
])
def test_traffic_during_most_of_a_step_gives_the_link_rate(
    seen: SeenTraffic | None, steps_s: float, round_trip_s: float, wanted: tuple[float, float],
) -> None:
    assert find_limiting_rates(seen, steps_s, round_trip_s) == pytest.approx(wanted)


@pytest.mark.parametrize(("backward_s", "wanted"), [(0.3, True), (1.0, True), (1.01, False), (1.9, False)])
def test_traffic_overlapped_with_compute_gives_no_link_rate(backward_s: float, wanted: bool) -> None:
    steps = [RecordedStep({}, {"backward": backward_s + more, "end": 2.0 + more}, []) for more in (0.0, 0.0, 5.0)]
    assert communication_bound(steps) == wanted


@pytest.mark.parametrize(("nodes", "round_trip_s", "everywhere", "wanted"), [
    (4, 0.01, True, 4), (4, 0.02, True, 3), (4, 0.03, True, 2), (4, 0.08, True, 1), (4, 0.3, True, 1), (2, 0.02, True, 2),
    (64, 0.02, True, 3), (64, 0.08, True, 1), (3, 0.08, False, 3), (64, 0.08, False, 4), (1, 0.08, False, 1),
])
def test_nodes_send_probes_in_sequence_within_the_time(
    nodes: int, round_trip_s: float, everywhere: bool, wanted: int,
) -> None:
    turns, turn_s = plan_probe_turns(nodes, 1.28, round_trip_s, everywhere=everywhere)
    assert turns == wanted
    least_s = (SENDING + DRAINED) * round_trip_s
    assert turn_s >= least_s, "windows open, and bytes in flight arrive"
    assert 2 * turns * turn_s == pytest.approx(max(1.28, 2 * turns * least_s)), "however many nodes"


class Pings:
    """A network that answers after these seconds, in virtual time."""

    def __init__(self, *seconds: float) -> None:
        self.answers, self.clock = iter(seconds), 0.0

    def ask(self, server: int, way: int, nbytes: int) -> None:
        self.clock += next(self.answers)

    def next(self, patience_s: float) -> link_rates.ChunkArrival:
        return link_rates.ChunkArrival(0, 1, self.clock)

    def now(self) -> float:
        return self.clock


@pytest.mark.parametrize(("seconds", "wanted", "requested"), [
    ((0.08, 0.081), 0.08, 2), ((0.2, 0.08, 0.084), 0.08, 3), ((0.2, 0.1, 0.15, 0.08), 0.08, 4),
])
def test_round_trip_is_known_after_two_agree(seconds: tuple[float, ...], wanted: float, requested: int) -> None:
    network = Pings(*seconds)
    assert link_rates.round_trip(network, 0, 1.0) == pytest.approx(wanted)
    assert next(network.answers, None) is None
    assert requested == len(seconds)


UP_ALONE = Throughput(BUSILY.up, SELDOM.down)
KNOWN = [(BUSILY, BUSILY), (BUSILY, SELDOM), (SELDOM, SELDOM), (BUSILY, UP_ALONE)]
"""By case, then by rank."""
LAST = Link(3e5, 4e5, 0.02)
ROUND_TRIPS = (0.08, 0.04, 0.8, 0.039, 0.81)
"""Of two ranks that remember LAST, by case."""


def probing(run: Run) -> list[dict[str, Any]]:
    """By case, the rates that this rank measures, and the directions for which it requested more than a ping."""
    run.wrap(mlp())
    made, results = run.sessions[0].inspect.context, []
    cases = [(case, None, 0.0) for case in KNOWN] + [((SELDOM, SELDOM), LAST, seconds) for seconds in ROUND_TRIPS]
    for case, last, round_trip_s in cases:
        asked: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            if last is not None:
                patch.setattr(link_rates, "round_trip", lambda *_, round_trip_s=round_trip_s: round_trip_s)
            probe = made.uplink.probe

            def ask(server: int, up_nbytes: int, down_nbytes: int, done: Any, probe: Any = probe, asked: Any = asked) -> None:
                if max(up_nbytes, down_nbytes) > 1:
                    asked.append("up" if up_nbytes > 1 else "down")
                probe(server, up_nbytes, down_nbytes, done)

            patch.setattr(made.uplink, "probe", ask)
            nodes = known_links(made, BUDGET_S, SeenTraffic(case[run.rank], 60.0), 60.0, last=last)
            up_bps, down_bps, alpha_s = probe_own_link(made, nodes, BUDGET_S)
            made.groups.barrier()
        results.append({"found": (up_bps, down_bps), "alpha_s": alpha_s, "asked": [way for way, _ in itertools.groupby(asked)]})
    return results


@pytest.mark.nightly
def test_rates_known_from_steps_are_not_probed() -> None:
    # Over loopback a round trip takes nothing; the test checks which rank requests which probe.
    results = pool(WORLD).call(play, WORLD, probing, Setting("module", servers=SERVERS))
    report, half, nothing, behind_another, *last_runs = zip(*results, strict=True)
    for result in report:
        assert result["asked"] == []
        assert result["found"] == pytest.approx(TOLD)
        assert result["alpha_s"] > 0
    for result in (*half, *nothing, *behind_another):
        assert result["asked"] == ["up", "down"], "where one does not know, all send, and then receive"
        assert min(result["found"]) > max(TOLD), "loopback is faster than the fabricated rates"
    for round_trip_s, ranks in zip(ROUND_TRIPS, last_runs, strict=True):
        for result in ranks:
            holds = 0.04 <= round_trip_s <= 0.8
            assert result["asked"] == ([] if holds else ["up", "down"])
            assert (result["found"] == (LAST.up_bps, LAST.down_bps)) == holds


QUICK_BPS, POOR_BPS, NEAR_S, AWAY_S = 1e12, 1e6, 1e-4, 0.02
STARTS: dict[str, tuple[str | None, float, float, bool, bool]] = {
    "loopback": (None, POOR_BPS, NEAR_S, True, True), "loopback, auto": ("auto", POOR_BPS, NEAR_S, True, True),
    "loopback, forward": ("forward", POOR_BPS, NEAR_S, True, True),
    "fast": (None, QUICK_BPS, NEAR_S, True, True), "fast, auto": ("auto", QUICK_BPS, NEAR_S, True, True),
    "slow": (None, POOR_BPS, NEAR_S, True, False),
    "far": (None, QUICK_BPS, AWAY_S, False, False), "far, auto": ("auto", QUICK_BPS, AWAY_S, True, False),
}
"""Sync mode, rate and round trip of links; whether links are measured before the first step, and whether that step is DDP's.
Only the first ones know that all ranks are on one machine."""


def started(run: Run, names: list[str]) -> list[tuple[bool, bool, set[tuple[str, str]]]]:
    """For each start: whether links were measured, whether the first step kept the plan, and its paths and codecs."""
    results = []
    for name in names:
        sync, bps, round_trip_s, *_ = STARTS[name]
        rates: list[float] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link_rates, "round_trip", lambda *_, seconds=round_trip_s: seconds)
            patch.setattr(link_rates, "rate", lambda *_, bps=bps, rates=rates, **__: rates.append(bps) or bps)
            patch.setattr(calibration, "measure_collectives",
                          lambda *_, bps=bps: CollectiveCosts(across=LinearCost(NEAR_S / 4, 8 / bps)))
            if "loopback" not in name:
                patch.setattr(job_actions, "is_loopback", lambda _host: False)
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            wrapped = run.wrap(model, optimizer=optimizer, sync=sync)
        session = run.sessions[-1]
        first = session.inspect.plan
        train_step(wrapped, optimizer, run.rank, 0)
        results.append((bool(rates), session.inspect.plan == first, {(b.path, b.codec) for b in first.buckets}))
        session.flush()
    return results


@pytest.mark.parametrize(("how", "names"), [("module", [*STARTS]), ("ddp", ["loopback"])])
def test_the_first_step_is_that_of_ddp_on_one_machine_and_over_fast_links(how: str, names: list[str]) -> None:
    with coordinators(len(names), WORLD, 1) as jobs:
        setting = Setting(how, tuple(job.address for job in jobs), plan="auto", fields=(("cache", ""),))
        results = pool(WORLD).call(play, WORLD, started, setting, names)
    for name, ranks in zip(names, zip(*results, strict=True), strict=True):
        *_, measures, plain = STARTS[name]
        assert any(is_measured for is_measured, *_ in ranks) is measures, "a node with the only server measures nothing"
        for _, is_kept, buckets in ranks:
            assert is_kept, name
            assert (buckets == {("allreduce", "identity()")}) is plain, (name, buckets)
