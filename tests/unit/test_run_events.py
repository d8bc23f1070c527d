"""Step events that a rank publishes to the event stream."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import commlayer
from commlayer.config import Config
from commlayer.engine.buckets.current_step import Counters
from commlayer.engine.buckets.units import Units
from commlayer.engine.job.run_events import LINK_S, RunEvents, check_folder
from commlayer.errors import InvalidInput
from commlayer.observe import events
from commlayer.observe.events import Event, LinkEvent, LogEvent, StepEvent
from commlayer.observe.link_monitor import Rates

BEGIN = 1000.0


class Rank:
    """A rank's event stream, and the counters that a worker would have."""

    def __init__(self) -> None:
        self.stream, self.counters, self.units = RunEvents(), Counters(), Units(2)
        self.stream.dense_nbytes = 400
        self.at, self.number = BEGIN, 0

    def step(self, seconds: float, exposed_s: float = 0.0, exchange_s: float = 0.0, sent_nbytes: int = 0) -> None:
        self.at, self.number = self.at + seconds, self.number + 1
        self.counters.exposed_s += exposed_s
        self.counters.exchange_s += exchange_s
        self.counters.count_bytes(sent_nbytes, sent_nbytes)
        self.stream.step(self.number, self.at, self.counters, self.units)

    def events(self, kind: type[Event] = StepEvent) -> list[Any]:
        found = [events.decode(line) for line in self.stream.log.since(0).lines]
        return [event for event in found if isinstance(event, kind)]


def test_short_steps_share_an_event_without_losses() -> None:
    rank = Rank()
    for _ in range(101):
        rank.step(0.1, exposed_s=0.03, exchange_s=0.05, sent_nbytes=10)
    rank.stream.flush()
    found = rank.events()
    assert len(found) <= 12
    assert found[0].step_s == 0.0, "nothing is known about the time before the first step"
    assert sum(event.steps for event in found) == found[-1].step == 101
    assert sum(event.sent_bytes for event in found) == 1010
    assert sum(event.dense_bytes for event in found) == 101 * 400
    for event in found[1:-1]:
        assert (event.step_s, event.compute_s, event.exposed_s, event.hidden_s) == pytest.approx((0.1, 0.07, 0.03, 0.02))


def test_long_step_has_its_own_event() -> None:
    rank = Rank()
    for _ in range(3):
        rank.step(5.0, exposed_s=1.0)
    assert [(event.step, event.steps, event.step_s) for event in rank.events()] == [(1, 1, 0.0), (2, 1, 5.0), (3, 1, 5.0)]


def test_waits_are_never_longer_than_the_step() -> None:
    rank = Rank()
    rank.step(2.0)
    rank.step(2.0, exposed_s=9.0, exchange_s=20.0)
    last = rank.events()[-1]
    assert (last.compute_s, last.exposed_s, last.hidden_s) == (0.0, 2.0, 2.0)


@pytest.mark.parametrize("loss", [2.5, torch.tensor(2.5), torch.tensor(2.5, requires_grad=True)])
def test_event_contains_the_last_loss(loss: Any) -> None:
    rank = Rank()
    rank.step(2.0)
    rank.stream.loss(9.0)
    rank.stream.loss(loss)
    rank.step(2.0)
    assert [event.loss for event in rank.events()] == [None, 2.5]


def test_non_finite_loss_is_reported_once() -> None:
    rank = Rank()
    for loss in (1.0, math.nan, math.inf, 1.0, math.nan):
        rank.stream.loss(loss)
        rank.step(2.0)
    assert [event.loss for event in rank.events()] == [1.0, None, None, 1.0, None]
    assert [event.level for event in rank.events(LogEvent)] == ["warning", "warning"]


def test_samples_and_shares_follow_the_weight() -> None:
    rank = Rank()
    rank.step(2.0)
    rank.stream.set_weight(32.0)
    rank.units.weight, rank.units.total = 3.0, 4.0
    for _ in range(4):
        rank.step(0.5)
    assert [(event.samples, event.share) for event in rank.events()] == [(0.0, 0.5), (64.0, 0.75), (64.0, 0.75)]


def test_link_bytes_are_reported_at_intervals() -> None:
    rank = Rank()
    rank.stream.rates(Rates(8e6, 80e6), Rates(10e6, 100e6))
    rank.stream.rtt_s = lambda: 0.03
    for _ in range(20):
        rank.step(1.0)
    found = rank.events(LinkEvent)
    assert len(found) <= 20 / LINK_S + 1
    assert (found[0].up_bytes_per_s, found[0].planned_down_bytes_per_s, found[0].rtt_s) == (1e6, 12.5e6, 0.03)


def test_read_only_folder_is_refused_before_the_job(tmp_path: Any) -> None:
    check_folder(Config())
    check_folder(Config(events=str(tmp_path / "new" / "deep")))
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidInput) as refused:
            check_folder(Config(events=str(bad)))
        assert refused.value.code == "E-EVENTS"


def test_event_file_that_fails_later_does_not_stop_training(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rank-3.jsonl").mkdir()
    stream = RunEvents()
    stream.open(Config(events=str(tmp_path)), rank=3, world=4, run="r", host="h")
    assert "[E-EVENTS]" in caplog.text
    stream.close()


class Unreadable(torch.Tensor):
    """A loss on a device that has failed."""

    def __float__(self) -> float:
        raise RuntimeError("CUDA error: device-side assert triggered\nmore")


def test_unreadable_loss_stops_neither_training_nor_close() -> None:
    rank = Rank()
    rank.stream.loss(torch.tensor(1.0).as_subclass(Unreadable))
    rank.step(2.0)
    rank.stream.loss(torch.tensor(1.0).as_subclass(Unreadable))
    rank.step(0.1)
    rank.stream.flush()
    assert [event.loss for event in rank.events()] == [None, None]
    assert [event.level for event in rank.events(LogEvent)] == ["warning", "warning"]


@pytest.mark.parametrize("loss", [torch.ones(3), torch.ones(0), torch.ones((), dtype=torch.complex64), "1.0", None, [1.0]])
def test_invalid_loss_is_refused_when_logged(loss: Any) -> None:
    model = torch.nn.Linear(2, 1)
    with commlayer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        for good in (torch.tensor([1.0]), 1, np.float32(2.0)):
            session.log_loss(good)
        with pytest.raises(InvalidInput, match="E-ARGUMENT"):
            session.log_loss(loss)
