"""What a loop's body may do without moving the LoadBalancer's steps: two ranks, as threads, that hand each other their rows."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from commlayer.autotune.shares import driver as balancing
from commlayer.autotune.shares.driver import LoadBalancer
from commlayer.autotune.shares.policy import WorkerTime
from commlayer.balance import Decision, Line, Sampler, solve
from commlayer.balance.time_models import in_pieces_s

WORLD = 2
LINES = [Line(0.001, 0.001), Line(0.004, 0.001)]


class Exchange:
    """Rows between threads: each rank's come in the order in which it starts them."""

    def __init__(self) -> None:
        self.rows: list[list[list[float]]] = [[] for _ in range(WORLD)]
        self.news = threading.Condition()
        self.local = threading.local()

    def begin(self, rank: int) -> None:
        """In the thread of this rank."""
        self.local.rank, self.local.read = rank, 0

    def start(self, *row: float) -> None:
        with self.news:
            self.rows[self.local.rank].append(list(row))
            self.news.notify_all()

    def read(self) -> list[list[float]]:
        with self.news:
            at = self.local.read
            assert self.news.wait_for(lambda: all(len(rows) > at for rows in self.rows), timeout=20)
            self.local.read += 1
            return [rows[at] for rows in self.rows]

    def report(self, shares: Any) -> None:
        """As the job's controller does after each step."""
        if shares is not None:
            self.start(*shares.row())
            shares.receive([WorkerTime(*row) for row in self.read()], 0.1)


class Session:
    """One that averages nothing and counts steps."""

    plan = None

    def __init__(self, exchange: Exchange) -> None:
        self.steps = 0
        self.observers = SimpleNamespace(shares=None)
        self.members, self.own, self.may_leave = (0,), 0, False
        self.followers: dict[str, Any] = {}
        self.given: dict[str, str] = {}
        self.decisions: list[str] = []
        self.connection = SimpleNamespace(rows=SimpleNamespace(rows=lambda _: exchange), members=None, on_shares=[],
                                          say=lambda what, _level: self.decisions.append(what),
                                          terms=SimpleNamespace(price=None), explain=lambda error: error)

    @property
    def inspect(self) -> Session:
        return self

    def weight(self, n: float, total: float | None = None) -> None:
        pass

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    @property
    def step(self) -> int:
        return self.steps

    carried = step

    def catch_up(self, *, wholly: bool = False) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {"exchanges": self.steps}

    def laps(self) -> list[Any]:
        return []


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Exchange:
    rows_of_all = Exchange()
    monkeypatch.setattr(balancing, "reporting", lambda _connection, observers: observers)
    monkeypatch.setattr(balancing.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(balancing.dist, "get_world_size", lambda: WORLD)
    return rows_of_all


@pytest.mark.parametrize("first", [0, 2])
def test_one_rank_may_save_in_the_body(exchange: Exchange, first: int) -> None:
    """It commits that rank's step early, from the first step on or when the ranks know each other."""
    def train(rank: int) -> tuple[LoadBalancer, list[str]]:
        exchange.begin(rank)
        session = Session(exchange)
        sampler = Sampler(80, 8, rank=rank, world=WORLD)
        controller = LoadBalancer(session, sampler, measure=lambda step, n: LINES[rank].time_s(n))  # type: ignore[arg-type]
        for _ in controller.follow(sampler):
            session.steps += 1
            exchange.report(session.observers.shares)
            if rank == 0 and sampler.step >= first:
                sampler.state_dict()
        return controller, session.decisions

    with ThreadPoolExecutor(WORLD) as threads:
        (saves, lines), (other, received) = threads.map(train, range(WORLD))
    assert lines == received
    assert saves.events == other.events
    assert any(isinstance(event, Decision) for event in saves.events)
    assert saves.sampler.step == other.sampler.step == 10


def test_a_fast_rank_with_little_memory_gets_more_than_it_holds_at_once(exchange: Exchange) -> None:
    """Memory of both would do for the batch; the fast one computes most of it all the same, in micro-batches."""
    lines, caps = [Line(0.008, 0.004), Line(0.001, 0.004)], [0, 16]
    best = solve(lines, 128, [None, 16])
    assert best.micro_batches[1] > 1

    def train(rank: int) -> tuple[list[int], LoadBalancer]:
        exchange.begin(rank)
        session, sizes = Session(exchange), list[int]()
        sampler = Sampler(128 * 16, 128, rank=rank, world=WORLD, cap=caps[rank])
        controller = LoadBalancer(session, sampler,  # type: ignore[arg-type]
                                measure=lambda step, n: in_pieces_s(lines[rank], n, caps[rank] or 128))
        for batch in controller.follow(sampler):
            sizes.append(len(batch))
            session.steps += sampler.last
            if sampler.last:
                exchange.report(session.observers.shares)
        return sizes, controller

    with ThreadPoolExecutor(WORLD) as threads:
        (_, controller), (sizes, _) = threads.map(train, range(WORLD))
    times = [in_pieces_s(lines[rank], share, caps[rank] or 128) for rank, share in controller.shares.items()]
    assert max(times) <= 1.05 * best.makespan_s
    assert max(sizes) <= 16
