"""Measurements for planning: steps, codecs, links, contention, and trial batches."""

from __future__ import annotations

import heapq
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.coordinators import until
from support.loopback import Hub
from support.workers import Rig
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import commlayer
from commlayer.autotune.measure import batch_trial, calibration, link_rates
from commlayer.autotune.measure.batch_trial import BatchTrial, make_batch_function, out_of_memory
from commlayer.autotune.measure.step_times import median_timing
from commlayer.balance import Sampler
from commlayer.balance.profile import profile
from commlayer.cluster.servers import summation_server
from commlayer.cluster.servers.summation import Summation
from commlayer.cluster.servers.summation_server import SumServer
from commlayer.errors import DeadlineExceeded
from commlayer.observe.step_trace import RecordedStep
from commlayer.transport.protocol import SERVER_BASE, Handle, Header, Kind, key, make_send_handle
from commlayer.transport.protocol import complete_send as completed


def step(shift: float) -> RecordedStep:
    marks = {"backward": 1.6 + shift, "summed": 2.0, "end": 2.1}
    return RecordedStep({2: 1.0 + shift, 1: 1.2 + shift, 0: 1.5 + shift}, marks, [])


def test_times_are_medians_from_the_first_gradient() -> None:
    timing = median_timing([step(0.0), step(0.1), step(9.0)], 4, {0: 0, 1: 1, 2: 2})
    assert timing.ready_s == pytest.approx((0.5, 0.2, 0.0, 0.6)), "one without a gradient is ready at the end"
    assert timing.needed_s == pytest.approx((0.0, 1.1 / 3, 2.2 / 3, 1.1))
    assert (timing.backward_s, timing.forward_s) == pytest.approx((0.6, 1.1))


@given(st.floats(0, 1e-3), st.floats(1e-12, 1e-6))
def test_line_fit_recovers_its_parameters(floor: float, slope: float) -> None:
    sizes = [1 << 12, 1 << 16, 1 << 20]
    line = calibration.fit(sizes, [floor + slope * n for n in sizes])
    assert line.error < 1e-6
    assert all(line(n) == pytest.approx(floor + slope * n, rel=1e-6) for n in sizes)


@pytest.mark.parametrize("values", [[5.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1e-5, 1e-3, 1.0]])
def test_line_fit_is_non_negative_and_reports_its_error(values: list[float]) -> None:
    sizes = [10, 100, 1000]
    line = calibration.fit(sizes, values)
    assert line.floor_s >= 0
    assert line.slope_s >= 0
    assert line.error == pytest.approx(max(abs(line(n) / v - 1) for n, v in zip(sizes, values, strict=True)))


def test_codecs_are_measured_in_the_form_that_a_plan_runs() -> None:
    dense, sparse = calibration.measure_codecs(("identity()", "topk(ratio=0.01)"), sizes=(1000, 50_000), repeats=2)
    assert dense.nbytes(50_000) == pytest.approx(16 + 4 * 50_000, rel=0.01)
    assert sparse.nbytes(50_000) < 0.1 * dense.nbytes(50_000)
    assert min(dense.encode(1000), dense.decode(1000), sparse.encode(1000), sparse.decode(1000)) > 0


class Wires:
    """A network in virtual time: my link and the servers', per direction; chunks of one connection are sent in sequence, and a
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
        self.clock, server, _, nbytes = heapq.heappop(self.arrivals)
        return link_rates.ChunkArrival(server, nbytes, self.clock)

    def now(self) -> float:
        return self.clock


@pytest.mark.parametrize(
    ("up_bps", "down_bps", "alpha_s", "servers"),
    [(1e6, 2e7, 0.03, (1e9,)), (1e8, 1e8, 0.03, (1e8, 1e8, 1e8)), (1e9, 1e9, 1e-3, (1e9, 1e9)), (2e7, 1e8, 0.02, (2e7,) * 6),
     (5e8, 5e8, 0.005, (2e9,))],
)
def test_probe_measures_the_link_rates(up_bps: float, down_bps: float, alpha_s: float, servers: tuple[float, ...]) -> None:
    wires = Wires(up_bps, down_bps, alpha_s, dict(enumerate(servers)))
    budget_s = max(0.5, 32 * alpha_s)
    results = list(wires.servers)
    round_trip_s = link_rates.round_trip(wires, 0, 10.0)
    assert round_trip_s == pytest.approx(2 * alpha_s, rel=0.05)
    up = link_rates.rate(wires, link_rates.UP, results, round_trip_s, budget_s / 2, 10.0)
    down = link_rates.rate(wires, link_rates.DOWN, results, round_trip_s, budget_s / 2, 10.0, expected_bps=up)
    assert (up, down) == pytest.approx((up_bps, down_bps), rel=0.05)
    under_way_s = 24 * alpha_s + 16 * link_rates.FIRST_NBYTES / up_bps + 4 * link_rates.LEAST_ROUND_TRIP_S
    assert wires.clock < budget_s + under_way_s, "and the bytes in flight then"
    assert not wires.arrivals


def test_unanswered_probe_names_the_server() -> None:
    with pytest.raises(DeadlineExceeded, match="E-DEADLINE") as error:
        link_rates.round_trip(link_rates.RequestNetwork(lambda *_: None), 3, 0.01)
    assert error.value.peer == "server 3"


def test_server_answers_probes_of_any_allowed_size() -> None:
    with Rig(1, "identity()") as rig:
        transport = rig.transports[0]
        for number, nbytes in enumerate((0, 1, 100_000)):
            header = Header(Kind.PROBE, 1, step=number, sender=0, used=nbytes)
            answer = transport.recv(SERVER_BASE, key(header._replace(kind=Kind.PROBE_OK)))
            transport.send(SERVER_BASE, header, b"x" * nbytes)
            assert bytes(transport.wait(answer, 1e12).body) == bytes(nbytes)


MOST = summation_server.MAX_PROBE_NBYTES


@pytest.mark.parametrize(("sizes", "sent", "dropped"), [
    ([MOST] * 3, True, False), ([MOST + 1], True, True), ([MOST // 2] * 2, False, False),
    ([MOST // 2, MOST // 2, 1], False, True), ([0] * 256, False, False), ([0] * 257, False, True),
])
def test_pending_probes_of_a_member_are_limited(sizes: list[int], sent: bool, dropped: bool) -> None:
    """`sent`: whether replies are sent at once, or never."""
    hub = Hub()
    member, local = hub.transport(0), hub.transport(SERVER_BASE)
    answers: list[Handle] = []

    def send(peer: int, header: Header, body: memoryview) -> Handle:
        assert (peer, header.kind, len(body)) == (0, Kind.PROBE_OK, sizes[len(answers)])
        answers.append(make_send_handle(peer, header))
        if sent:
            completed(answers[-1], header)
        return answers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "send", send)
        server = SumServer(Summation(0, 1, {}, {}), local, [0], stall_s=60.0)
        try:
            for number, nbytes in enumerate(sizes):
                member.send(SERVER_BASE, Header(Kind.PROBE, 1, step=number, used=nbytes))
            until(lambda: len(answers) == len(sizes) - dropped and len(server.dropped()) == dropped, "all are handled")
            assert all(why.endswith("[E-FRAME]") for why in server.dropped().values())
        finally:
            server.close()
            member.close()


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def mean_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = module(x + random.random() + np.random.rand()).mean()
    return out


def drawn() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


@pytest.mark.parametrize("ends", [False, True])
def test_trial_leaves_model_and_optimizer_unchanged(ends: bool) -> None:
    one, twin = model(), model()
    for each in (one, twin):
        random.seed(2), np.random.seed(2), torch.manual_seed(2)
        mean_of(each, torch.ones(4, 6)).backward()
    gradient = one[0].weight.grad
    trial = BatchTrial(one, mean_of, lambda samples: torch.randn(samples, 6))
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = drawn()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)

    def run(samples: int) -> float:
        if ends and samples > 5:
            raise MemoryError
        return trial(samples)

    with trial.preserve_state(begun=False):
        result = profile(run, 8)
    assert result.ended == ends
    assert len(result.points) == (2 if ends else 3)
    assert drawn() == expected
    assert one[0].weight.grad is gradient
    for (name, a), (_, b) in zip(one.state_dict().items(), twin.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(one.parameters(), twin.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.commit(2)
@pytest.mark.parametrize(("error", "memory"), [
    (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True), (MemoryError(), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried ..."), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False), (ValueError("no"), False),
])
def test_out_of_memory_errors_are_recognized(error: Exception, memory: bool) -> None:
    assert out_of_memory(error) == memory

    def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            raise error
        return mean_of(module, x)

    trial = BatchTrial(model(), loss_of, lambda samples: torch.randn(samples, 6))
    if memory:
        result = profile(trial, 16)
        assert (result.ended, [batch for batch, _ in result.points], result.cap) == (True, [2, 4], 3)
    else:
        with pytest.raises(type(error)):
            profile(trial, 16)


class Counted(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


def test_trial_batches_come_from_a_loader_or_function() -> None:
    loader = DataLoader(TensorDataset(torch.arange(9), torch.arange(9) * 2), batch_size=3)
    x, y = make_batch_function(loader)(4)
    assert (x.tolist(), y.tolist()) == ([0, 1, 2, 3], [0, 2, 4, 6])
    assert make_batch_function(lambda samples: "x" * samples)(3) == "xxx"
    with pytest.raises(ValueError, match="dataset Counted .*E-USER-CODE"):
        make_batch_function(DataLoader(Counted(), batch_size=3))
    with pytest.raises(ValueError, match="got int .*E-USER-CODE"):
        make_batch_function(3)


@pytest.mark.parametrize(("loss_of", "text"), [
    (lambda module, x: module(x), r"loss\b.*\(4, 1\).*E-USER-CODE"), (lambda module, x: 0.5, "loss is float.*E-USER-CODE"),
])
def test_loss_of_a_wrong_type_is_named(loss_of: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BatchTrial(model(), loss_of, lambda samples: torch.randn(samples, 6))(4)


def test_trial_of_a_model_that_waits_for_peers_is_refused() -> None:
    with pytest.raises(ValueError, match="SyncBatchNorm.*E-USER-CODE"):
        BatchTrial(nn.Sequential(nn.SyncBatchNorm(3)), mean_of, lambda samples: None)


@pytest.mark.parametrize(("given", "found_cap"), [(0, 8), (6, 6), (15, 8)])
def test_single_worker_trial_finds_the_cap(given: int, found_cap: int) -> None:
    """A job of one worker: its share is the batch, in pieces that fit; the trial stays within the allowed sizes."""
    one = nn.Linear(6, 1)
    sampler = Sampler(40, 20, rank=0, world=1, cap=given)
    with commlayer.attach(one) as session:
        controller = commlayer.LoadBalancer(session, sampler)
        (result,) = controller.profile(one, lambda module, x: _holds(module, x, 9), lambda samples: torch.randn(samples, 6))
        assert result.ended
        assert sampler.cap == result.cap == found_cap
        assert max(batch for batch, _ in result.points) <= (given or 20)
        sizes = [len(x) for (x,) in controller.follow(DataLoader(TensorDataset(torch.randn(40, 6)), batch_sampler=sampler))]
    assert max(sizes) <= found_cap
    assert sum(sizes) == 40


def _holds(module: nn.Module, x: torch.Tensor, most: int) -> torch.Tensor:
    if len(x) > most:
        raise MemoryError
    return mean_of(module, x)


def test_arguments_are_named() -> None:
    def profiled() -> None:
        with commlayer.attach(nn.Linear(6, 1)) as session:
            controller = commlayer.LoadBalancer(session, Sampler(40, 20, rank=0, world=1))
            controller.profile(nn.Linear(6, 1), mean_of, lambda samples: torch.randn(samples, 6), limit_s=0.0)

    with pytest.raises(ValueError, match=r"limit_s: .*0\.0.*E-SHARES-ARGUMENT"):
        profiled()


def takes(nbytes: int) -> Any:
    """A loss that holds so much for each sample."""
    def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return mean_of(module, x) + torch.ones(len(x) * nbytes // 4).sum() * 0

    return loss_of


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux reports the memory used")
@pytest.mark.parametrize(("room", "sharing", "least", "most"), [
    (50 << 20, 1, 8, 30), (50 << 20, 4, 3, 8), (1 << 40, 1, 64, 64)])
def test_cpu_trial_stops_before_memory_is_exhausted(
    room: int, sharing: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_trial, "room_nbytes", lambda: float(room))
    trial = BatchTrial(nn.Linear(6, 1), takes(2 << 20), lambda samples: torch.randn(samples, 6), sharing=sharing)
    result = profile(trial, 64, repeats=1)
    assert result.ended == (most < 64)
    assert least <= result.cap <= most
