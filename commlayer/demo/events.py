"""What workers tell the demo's parent: one line of JSON each, on standard output. Knows no torch and no screen."""

from __future__ import annotations

import os

import msgspec

from commlayer.records import Record, encode


class Began(Record, frozen=True, tag="began"):
    """A run's workers and servers are up; training starts."""

    run: int
    numel: int
    """Parameters of the model."""
    native: bool


class Progress(Record, frozen=True, tag="progress"):
    """Where a run stands; its sums are rank 0's, since the run began."""

    run: int
    step: int
    loss: float
    accuracy: float
    """On the test set, when last looked at."""
    train_s: float
    """Training time, without looking at the test set."""
    exposed_s: float
    """Of it, waiting for communication."""
    sent_nbytes: int
    """Payloads of this worker."""

    @property
    def step_s(self) -> float:
        return self.train_s / max(1, self.step)

    @property
    def step_nbytes(self) -> float:
        return self.sent_nbytes / max(1, self.step)

    @property
    def exposed(self) -> float:
        return self.exposed_s / self.train_s if self.train_s else 0.0


class Ended(Record, frozen=True, tag="ended"):
    """A run is over. Its last Progress says with what."""

    run: int
    reached: bool


Event = Began | Progress | Ended
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def tell(event: Event) -> None:
    """In a worker. One write, so that lines of several processes do not mix."""
    os.write(1, encode(event) + b"\n")


def read(line: bytes) -> Event | None:
    """The event on that line, None for what other code printed."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None
