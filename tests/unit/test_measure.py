"""What planning measures: times of steps, costs of codecs, rates of links. Made-up clocks where time would decide."""

from __future__ import annotations

import heapq
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.loopback import Hub
from support.workers import Rig

from commlayer.autotune.measure import calibration, link_rates
from commlayer.autotune.measure.step_times import timing_of
from commlayer.cluster import summation_server
from commlayer.cluster.summation import Summation
from commlayer.cluster.summation_server import SumServer
from commlayer.errors import DeadlineExceeded
from commlayer.observe.step_trace import RecordedStep
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, key


def step(shift: float) -> RecordedStep:
    marks = {"backward": 1.6 + shift, "summed": 2.0, "end": 2.1}
    return RecordedStep({2: 1.0 + shift, 1: 1.2 + shift, 0: 1.5 + shift}, marks, [])


def test_times_are_medians_since_backward_began_to_give() -> None:
    timing = timing_of([step(0.0), step(0.1), step(9.0)], 4, {0: 0, 1: 1, 2: 2})
    assert timing.ready_s == pytest.approx((0.5, 0.2, 0.0, 0.6)), "one without a gradient is ready at the end"
    assert timing.needed_s == pytest.approx((0.0, 1.1 / 3, 2.2 / 3, 1.1))
    assert (timing.backward_s, timing.forward_s) == pytest.approx((0.6, 1.1))


@given(st.floats(0, 1e-3), st.floats(1e-12, 1e-6))
def test_a_line_is_found_again(floor: float, slope: float) -> None:
    sizes = [1 << 12, 1 << 16, 1 << 20]
    line = calibration.fit(sizes, [floor + slope * n for n in sizes])
    assert line.error < 1e-6
    assert all(line(n) == pytest.approx(floor + slope * n, rel=1e-6) for n in sizes)


@pytest.mark.parametrize("values", [[5.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1e-5, 1e-3, 1.0]])
def test_no_line_falls_below_nothing_and_its_error_is_told(values: list[float]) -> None:
    sizes = [10, 100, 1000]
    line = calibration.fit(sizes, values)
    assert line.floor_s >= 0
    assert line.slope_s >= 0
    assert line.error == pytest.approx(max(abs(line(n) / v - 1) for n, v in zip(sizes, values, strict=True)))


def test_codecs_are_measured_as_a_plan_runs_them() -> None:
    dense, sparse = calibration.measure_codecs(("identity()", "topk(ratio=0.01)"), sizes=(1000, 50_000), repeats=2)
    assert dense.nbytes(50_000) == pytest.approx(16 + 4 * 50_000, rel=0.01)
    assert sparse.nbytes(50_000) < 0.1 * dense.nbytes(50_000)
    assert min(dense.encode(1000), dense.decode(1000), sparse.encode(1000), sparse.decode(1000)) > 0


class Wires:
    """A network in virtual time: my link and the servers', each way; chunks of one connection go one after the other, and a
    connection has no more under way than a window which doubles each round trip."""

    def __init__(self, up_bps: float, down_bps: float, alpha_s: float, servers: dict[int, float]) -> None:
        self.rates, self.alpha_s, self.servers = (up_bps, down_bps), alpha_s, servers
        self.clock = 0.0
        self.mine = [0.0, 0.0]
        self.theirs = {(server, way): 0.0 for server in servers for way in (0, 1)}
        self.opened = {(server, way): (0.0, 0.0) for server in servers for way in (0, 1)}
        self.arrivals: list[tuple[float, int, int, int]] = []
        self.nbytes = 0

    def ask(self, server: int, way: int, nbytes: int) -> None:
        self.nbytes += nbytes
        sent_nbytes, free = self.opened[server, way]
        # Before n bytes have been sent, log2(n / 14 kB) round trips have passed.
        opened = max(0.0, math.log2(max(sent_nbytes, 1) / 14e3)) * 2 * self.alpha_s
        begin = max(self.clock, opened, free)
        self.opened[server, way] = (sent_nbytes + nbytes, begin)
        mine = max(begin, self.mine[way]) + 8 * nbytes / self.rates[way]
        self.mine[way] = mine
        theirs = max(mine, self.theirs[server, way] + 8 * nbytes / self.servers[server])
        self.theirs[server, way] = theirs
        heapq.heappush(self.arrivals, (theirs + 2 * self.alpha_s, server, way, nbytes))

    def next(self, patience_s: float) -> link_rates.ChunkArrival:
        self.clock, *what = heapq.heappop(self.arrivals)
        return link_rates.ChunkArrival(*what, self.clock)

    def now(self) -> float:
        return self.clock


@pytest.mark.parametrize(
    ("up_bps", "down_bps", "alpha_s", "servers"),
    [(1e6, 2e7, 0.03, (1e9,)), (1e8, 1e8, 0.03, (1e8, 1e8, 1e8)), (1e9, 1e9, 1e-3, (1e9, 1e9)), (2e7, 1e8, 0.02, (2e7,) * 6),
     (5e8, 5e8, 0.005, (2e9,))],
)
def test_a_probe_finds_the_rates(up_bps: float, down_bps: float, alpha_s: float, servers: tuple[float, ...]) -> None:
    wires = Wires(up_bps, down_bps, alpha_s, dict(enumerate(servers)))
    budget_s = max(0.5, 32 * alpha_s)
    results = list(wires.servers)
    round_trip_s = link_rates.round_trip(wires, 0, 10.0)
    assert round_trip_s == pytest.approx(2 * alpha_s, rel=0.05)
    up = link_rates.rate(wires, link_rates.UP, results, round_trip_s, budget_s / 2, 10.0)
    down = link_rates.rate(wires, link_rates.DOWN, results, round_trip_s, budget_s / 2, 10.0, expected_bps=up)
    assert (up, down) == pytest.approx((up_bps, down_bps), rel=0.05)
    under_way_s = 24 * alpha_s + 16 * link_rates.FIRST_NBYTES / up_bps + 4 * link_rates.LEAST_ROUND_TRIP_S
    assert wires.clock < budget_s + under_way_s, "and what was under way then"
    assert not wires.arrivals


def test_a_probe_without_an_answer_names_the_server() -> None:
    with pytest.raises(DeadlineExceeded, match="E-DEADLINE") as error:
        link_rates.round_trip(link_rates.RequestNetwork(lambda *_: None), 3, 0.01)
    assert error.value.peer == "server 3"


def test_a_server_answers_probes_of_any_allowed_size() -> None:
    with Rig(1, "identity()") as rig:
        transport = rig.transports[0]
        for number, nbytes in enumerate((0, 1, 100_000)):
            header = Header(Kind.PROBE, 1, step=number, sender=0, used=nbytes)
            answer = transport.recv(SERVER_BASE, key(header._replace(kind=Kind.PROBE_OK)))
            transport.send(SERVER_BASE, header, b"x" * nbytes)
            assert bytes(transport.wait(answer, 1e12).body) == bytes(nbytes)


def test_a_member_that_requests_too_large_a_probe_is_dropped() -> None:
    hub = Hub()
    member, local = hub.transport(0), hub.transport(SERVER_BASE)
    server = SumServer(Summation(0, 1, {}, {}), local, [0], stall_s=60.0)
    most = summation_server.MAX_PROBE_NBYTES
    try:
        for number in range(3):
            header = Header(Kind.PROBE, 1, step=number, used=most)
            answer = member.recv(SERVER_BASE, key(header._replace(kind=Kind.PROBE_OK)))
            member.send(SERVER_BASE, header)
            assert len(member.wait(answer, time.monotonic() + 20.0).body) == most
        member.send(SERVER_BASE, header._replace(used=most + 1))
        deadline = time.monotonic() + 20.0
        while not server.dropped() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.dropped() == {0: f"requests a probe reply of {most + 1} bytes, allowed {most} [E-FRAME]"}
    finally:
        server.close()
        member.close()
