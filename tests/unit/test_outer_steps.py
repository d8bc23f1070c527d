"""Local steps: norm-matched averaging, and the bucket order of overlapped outer steps."""

from __future__ import annotations

import heapq
import itertools
import math
import queue
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.loopback import Hub
from support.mailbox import Receives
from support.workers import Rig, SharedRows, on_ranks
from torch import nn

from commlayer.engine.components import Component
from commlayer.engine.sync.local_steps import Fragment, OuterSteps, StepWeights
from commlayer.engine.sync.norm_matching import norm_matching_factor, sum_of_squares
from commlayer.engine.worker.worker import Worker
from commlayer.optim import OuterSGD
from commlayer.planner import default_plan
from commlayer.planner.buckets import divide_into_fragments
from commlayer.records import Job, TensorInfo
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, make_send_handle

SHAPES, EVERY, STEPS = [(30, 20), (500,), (40, 10), (700,)], 4, 13
INF, NAN = math.inf, math.nan


def noise(*numbers: int, size: tuple[int, ...] = (1000,)) -> torch.Tensor:
    seed = sum(n * 97**i for i, n in enumerate(numbers))
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_squared_norms_are_bit_equal_in_any_order() -> None:
    x = noise(1, size=(3_000_000,)) * 1e-3
    x[7] = 0.2  # far beyond the others, to which everything is rounded
    result = sum_of_squares([x])
    assert result == pytest.approx(float(x.double().square().sum()), rel=1e-4)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = x[order].split(700_001)
    assert sum_of_squares([*parts]) == sum_of_squares([*reversed(parts)]) == result
    assert sum_of_squares([x.view(3, -1).t()]) == sum_of_squares([x.double()]) == result
    assert float(x[order].square().sum()) != float(x.square().sum()), "which floats by themselves do not give"


@pytest.mark.parametrize(("values", "wanted"), [
    ([], 0.0), ([0.0, 0.0], 0.0), ([3.0, 4.0], 25.0), ([1.0, INF], NAN), ([NAN, 1.0], NAN), ([1e-40, 0.0], 1e-80),
])
def test_squared_norms_of_tiny_values(values: list[float], wanted: float) -> None:
    assert sum_of_squares([torch.tensor(values)]) == pytest.approx(wanted, rel=1e-4, abs=0.0, nan_ok=True)
    assert sum_of_squares([torch.tensor(values), torch.zeros(3)]) == pytest.approx(wanted, rel=1e-4, abs=0.0, nan_ok=True)


@pytest.mark.parametrize("norms", [[], [(1, 4.0)] * 2], ids=["plain", "matched"])
@pytest.mark.parametrize(("mine", "others"), [(1.0, 1.0), (INF, 1.0), (1.0, INF), (NAN, NAN)])
def test_ranks_of_a_site_agree_whether_means_are_finite(norms: list[tuple[int, float]], mine: float, others: float) -> None:
    fragment = Fragment(0, {0: [(0, 2)]}, [torch.zeros(2)], [None])
    fragment.prepare([torch.tensor([0.0, -mine])], overlap=False)
    finite, _ = fragment.scale_to_norms(norms, lambda own: own + sum_of_squares([torch.tensor([others])]), has_weight=True)
    assert finite == (math.isfinite(mine) and math.isfinite(others))


@pytest.mark.parametrize(("rows", "square", "wanted"), [
    ([(1, 4.0)] * 4, 4.0, 1.0),  # all have come to the same place
    ([(1, 4.0)] * 4, 1.0, 2.0),  # nothing in common
    ([(1, 4.0)] * 4, 2.0, 2**0.5),
    ([(1, 4.0)] * 4, 0.1, 2.0),  # against each other: no more than that
    ([(1, 1.0)] * 4, 9.0, 1.0),  # longer than what it is of: it contains an inherited residual
    ([(1, 4.0)] * 9, 4 / 9, 3.0),
    ([(3, 4.0), (1, 8.0)], 4.0, 1.25**0.5),
    ([(3, 4.0), (1, 4.0)], 0.1, 1.6**0.5),  # with nothing in common: 4 * (9 + 1) / 16
    ([(1, 4.0), (0, NAN)], 4.0, 1.0),
    ([(0, 4.0), (0, 4.0)], 4.0, 1.0),
    ([(1, INF), (1, 4.0)], 4.0, 1.0),
    ([(1, 4.0), (1, 4.0)], 0.0, 1.0),
    ([(1, 4.0), (1, 4.0)], NAN, 1.0),
    ([(NAN, 4.0), (1, 4.0)], 1.0, 1.0),
    ([(1, 4.0)], 1.0, 1.0),
    ([], 1.0, 1.0),
])
def test_norm_matching_factor(rows: list[tuple[float, float]], square: float, wanted: float) -> None:
    assert norm_matching_factor(rows, square) == pytest.approx(wanted, rel=1e-12)


JOINED_OUTER_STEP = 1
"""Number of the outer step whose exchange is the first one of a worker that joins."""


class Giving(Component):
    """Lets the last rank join in an exchange, on another rank."""

    def __init__(self, worker: Worker, local: OuterSteps, give: Callable[[dict[str, torch.Tensor]], None]) -> None:
        self._worker, self._local, self._give = worker, local, give

    def begin_exchange(self) -> None:
        if self._worker.step == JOINED_OUTER_STEP:
            self._worker.now.joined = 1
            self._give(self._local.snapshot())


def trained(
    world: int, outer: OuterSGD, weights: list[float], fragments: int, *, overlap: bool, cut_nbytes: int = 4096,
    strided: bool = False, joining: int = 0,
) -> list[Any]:
    """By rank: its starts after each step, and its weights at the end. Steps are given, so all modes make the same. `joining`:
    1: the last rank joins the job."""
    job = Job(tuple(TensorInfo(f"t{i}", shape) for i, shape in enumerate(SHAPES)))
    plan = default_plan(job, codec="identity()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=1,
                        cut_nbytes=cut_nbytes)
    plan = type(plan)(plan.job, plan.buckets, plan.servers, 1, local_steps=EVERY, fragments=fragments,
                      overlap="round" if overlap else "")
    rows, given = SharedRows(world), queue.Queue[dict[str, torch.Tensor]]()
    with Rig(world - joining, "", plan=plan, of=job, joining=joining) as rig:
        def body(rank: int) -> Any:
            worker, first = rig.workers[rank], 0
            parameters = [nn.Parameter(torch.zeros(shape[::-1]).t() if strided else torch.zeros(shape)) for shape in SHAPES]
            local = OuterSteps(parameters, EVERY, outer, StepWeights(weights[rank]), fragments=fragments, overlap=overlap,
                               norms=rows.of(rank))
            if rank >= world - joining:
                local.join(given.get(timeout=20.0))
                torch._foreach_copy_([p.data for p in parameters], local.starts)  # as replica.py does
                worker.now.number, worker.now.joined = JOINED_OUTER_STEP, 1
                first = JOINED_OUTER_STEP * EVERY + EVERY // fragments - 1
            elif joining:
                rig.components[rank].add(Giving(worker, local, given.put if rank == 0 else lambda _: None))
            results = [[s.clone() for s in local.starts]] * first
            for step in range(first, STEPS):
                local.count()
                for n, p in enumerate(parameters):
                    p.data += moved(rank, step, n)
                if local.exchange_is_due:
                    local.exchange(worker, [], 20.0)
                    sources = [source for bucket in worker.buckets for source in bucket.sources]
                    assert overlap or not any(source is not None for source in sources), "applied changes take no memory"
                results.append([s.clone() for s in local.starts])
            local.drain(worker, [], 20.0)
            return results, [p.detach().clone() for p in parameters]

        return on_ranks(world, body)


def moved(rank: int, step: int, n: int) -> torch.Tensor:
    """Mostly the rank's own, and a little in common."""
    return 0.1 * noise(rank, step, n, size=SHAPES[n]) + 0.03 * noise(99, step, n, size=SHAPES[n])


def by_hand(weights: list[float], parts: list[list[int]], *, overlap: bool, matched: bool, joining: int = 0
            ) -> list[list[torch.Tensor]]:
    """Starts after each step. A worker that joins begins at the starts, with weight 0 in its first exchange."""
    world = len(weights)
    starts = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    ranks = [[s.clone() for s in starts] for _ in range(world)]
    sent: Any = None
    turns, results, exchanges = itertools.cycle(parts), [], 0

    def merge(part: list[int], shares: list[float], changes: list[dict[int, torch.Tensor]],
              ends: list[dict[int, torch.Tensor]]) -> None:
        mean = {n: sum(share * change[n] for share, change in zip(shares, changes, strict=True)) for n in part}
        each = [sum(float(x.square().sum()) for x in change.values()) for change in changes]
        own = sum(share * square for share, square in zip(shares, each, strict=True))
        ratio = (own / sum(float(m.square().sum()) for m in mean.values())) ** 0.5
        scale = min(ratio, sum(share**2 for share in shares) ** -0.5) if matched else 1.0
        for n in part:
            starts[n] = starts[n] - scale * mean[n]
            for w, end in zip(ranks, ends, strict=True):
                w[n] = starts[n] + (w[n] - end[n])

    for step in range(STEPS):
        for rank, w in enumerate(ranks):
            for n in range(len(SHAPES)):
                w[n] = w[n] + moved(rank, step, n).double()
        if (step + 1) % (EVERY // len(parts)) == 0:
            if sent is not None:
                merge(*sent)
            part, present = next(turns), [*weights]
            for rank in range(world - joining, world):
                if exchanges <= JOINED_OUTER_STEP * len(parts):
                    present[rank], ranks[rank] = 0.0, [s.clone() for s in starts]
            exchanges += 1
            sent = (part, [w / sum(present) for w in present], [{n: starts[n] - w[n] for n in part} for w in ranks],
                    [{n: w[n] for n in part} for w in ranks])
            if not overlap:
                merge(*sent)
                sent = None
        results.append([*starts])
    return results


@pytest.mark.commit(8)
@pytest.mark.parametrize("overlap", [False, True], ids=["waited for", "overlapped"])
@pytest.mark.parametrize("fragments", [1, 2, 4])
@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [3.0, 1.0], [1.0] * 5], ids=str)
def test_matched_means_have_the_norm_of_the_deltas(weights: list[float], fragments: int, overlap: bool) -> None:
    world = len(weights)
    results = trained(world, OuterSGD(matched=True), weights, fragments, overlap=overlap)
    parts = PARTS[fragments]
    wanted = by_hand(weights, parts, overlap=overlap, matched=True)
    plain = by_hand(weights, parts, overlap=overlap, matched=False)
    for step, starts in enumerate(wanted):
        for behind, _ in results:
            for mine, first, hand in zip(behind[step], results[0][0][step], starts, strict=True):
                assert torch.equal(mine, first), "what ranks have in common is the same to the bit"
                torch.testing.assert_close(mine.double(), hand, rtol=1e-3, atol=1e-4)
    for _, end in results:
        assert all(torch.equal(mine, first) for mine, first in zip(end, results[0][1], strict=True))
    far = max(float((a - b).abs().max()) for a, b in zip(wanted[-1], plain[-1], strict=True))
    assert (far > 0.1) == (world > 1), "plain averages lead elsewhere"


@pytest.mark.parametrize("overlap", [False, True], ids=["waited for", "overlapped"])
@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_worker_joins_in_an_exchange_with_weight_0(fragments: int, overlap: bool) -> None:
    """Its first step is dropped: it begins at the starts of the others. It contributes to the next fragment as any other."""
    weights = [3.0, 1.0, 2.0]
    results = trained(3, OuterSGD(), weights, fragments, overlap=overlap, joining=1)
    wanted = by_hand(weights, PARTS[fragments], overlap=overlap, matched=False, joining=1)
    entered = JOINED_OUTER_STEP * EVERY + EVERY // fragments - 1
    for step, starts in enumerate(wanted):
        for rank, (got, _) in enumerate(results):
            if rank < 2 or step >= entered:
                for mine, first, hand in zip(got[step], results[0][0][step], starts, strict=True):
                    assert torch.equal(mine, first)
                    torch.testing.assert_close(mine.double(), hand, rtol=1e-3, atol=1e-4)
    for _, end in results:
        assert all(torch.equal(mine, first) for mine, first in zip(end, results[0][1], strict=True))


def _parts(fragments: int) -> list[list[int]]:
    job = Job(tuple(TensorInfo(f"t{i}", shape) for i, shape in enumerate(SHAPES)))
    plan = default_plan(job, codec="identity()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=1, cut_nbytes=4096)
    return [sorted({s.tensor for place in places for s in plan.buckets[place].slices})
            for places in divide_into_fragments(plan.buckets, fragments)]


PARTS = {fragments: _parts(fragments) for fragments in (1, 2, 4)}


def test_weight_of_a_fragment_is_the_mean_since_its_last_exchange() -> None:
    weights = StepWeights(1.0)
    weights.divide(2)
    weights.count()
    weights.weight = 3.0
    weights.count()
    assert weights.take(0) == 2.0
    weights.count()
    assert (weights.take(0), weights.take(1)) == (3.0, 7.0 / 3.0)
    assert weights.take(1) == 3.0, "no step yet: that of the next one"
    weights.count()
    weights.divide(4)
    assert [weights.take(fragment) for fragment in range(4)] == [3.0] * 4


@pytest.mark.parametrize(("fragments", "resumed"), [(2, [3.0, 2.0]), (3, [2.0] * 3)])
def test_weights_of_fragments_are_resumed(fragments: int, resumed: list[float]) -> None:
    """With another number of fragments, all of them contain the steps that no exchange has sent completely."""
    weights, other = StepWeights(1.0), StepWeights(0.0)
    weights.divide(2)
    weights.count()
    weights.take(0)
    weights.weight = 3.0
    weights.count()
    other.divide(fragments)
    other.restore(weights.snapshot())
    assert [other.take(fragment) for fragment in range(fragments)] == resumed


WORLD, BUCKETS = 3, 8


class TurnedHub(Hub):
    """Pushes and results wait for `turn()`: then each worker's link carries one frame out, and one in from each server."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[tuple[int, int], list[Any]] = {}
        self.count_bytes: list[tuple[int, int, str, int]] = []
        """Turn, worker, "up" or "down", bucket."""
        self.turns = self._seq = 0

    def transport(self, rank: int) -> Any:
        return Turned(self, super().transport(rank))

    def queue(self, end: Any, peer: int, header: Header, body: bytes) -> Any:
        operation = make_send_handle(peer, header)
        line = (end.rank, peer if end.rank >= SERVER_BASE else -1)  # of a worker one, of a server one to each worker
        self._seq += 1
        item = (header.step, header.order, self._seq, operation, end, peer, header, body)
        heapq.heappush(self.waiting.setdefault(line, []), item)
        return operation

    def turn(self) -> None:
        gone = [heapq.heappop(line) for _, line in sorted(self.waiting.items()) if line]
        self.turns += 1
        for *_, operation, end, peer, header, body in gone:
            up = header.kind == Kind.PUSH
            self.count_bytes.append((self.turns, end.rank if up else peer, "up" if up else "down", header.bucket))
            end.send(peer, header, body).on_done(
                lambda sent, operation=operation: operation.fail(sent.error()) if sent.error() else
                operation.complete(sent.message()))


class Turned:
    """One end."""

    def __init__(self, hub: TurnedHub, end: Any) -> None:
        self.__dict__.update(_hub=hub, _end=end)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._end, name, value)

    def send(self, peer: int, header: Header, body: Any = b"") -> Any:
        if header.kind in (Kind.PUSH, Kind.RESULT):
            return self._hub.queue(self._end, peer, header, bytes(body))
        return self._end.send(peer, header, body)

    def send_all(self, peers: Sequence[int], header: Header, body: Any = b"") -> None:
        for peer in peers:
            self.send(peer, header, body)

    request = Receives.request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)


def test_results_arrive_while_other_buckets_are_still_uploaded() -> None:
    hub = TurnedHub()
    with Rig(WORLD, "int4()", shapes=[(1000,)] * BUCKETS, hub=hub) as rig:
        assert len(rig.plan.buckets) == BUCKETS
        rounds = []
        for worker in rig.workers:
            parameters = [nn.Parameter(torch.ones(1000)) for _ in range(BUCKETS)]
            local = OuterSteps(parameters, 4, OuterSGD(), StepWeights(1.0), overlap=True)
            for step in range(4):
                local.count()
                torch._foreach_mul_([p.data for p in parameters], 0.9 - 0.1 * step)
            local.exchange(worker, [], 20.0)
            assert worker._paths.drain(20.0), "all of it is coded, and waits at the link"
            rounds.append(local)
        while any(hub.waiting.values()):
            hub.turn()
        for worker, local in zip(rig.workers, rounds, strict=True):
            local.complete(worker, [], 20.0)
    for rank in range(WORLD):
        up, down = ([(turn, bucket) for turn, *of, bucket in hub.count_bytes if of == [rank, way]] for way in ("up", "down"))
        assert [bucket for _, bucket in up] == [bucket for _, bucket in down], "both in the order of the next forward pass"
        assert [bucket for _, bucket in up] == [*reversed(range(BUCKETS))]
        for (sent, _), (came, _) in zip(up[2:], down, strict=False):
            assert came < sent, "a result is here before the next but one goes out"
    assert hub.turns == BUCKETS + 1, "an outer step takes the time of one direction, and one bucket's"
