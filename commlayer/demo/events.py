"""Events that workers report to the demo's parent process: one line of JSON each, on standard output."""

from __future__ import annotations

import os

import msgspec

from commlayer.records import Record, encode


class Began(Record, frozen=True, tag="began"):
    """The workers and servers of a run are up, and training starts."""

    run: int
    numel: int
    """Parameters of the model."""
    native: bool


class Progress(Record, frozen=True, tag="progress"):
    """Progress of a run; the sums are those of rank 0 since the run began."""

    run: int
    step: int
    loss: float
    accuracy: float
    """On the test set, at the last evaluation."""
    train_s: float
    """Training time, without evaluations."""
    exposed_s: float
    """The part of train_s spent waiting for communication."""
    sent_nbytes: int
    """Payload bytes that this worker sent."""

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
    """A run is over. Its last Progress holds the result."""

    run: int
    reached: bool


Event = Began | Progress | Ended
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def tell(event: Event) -> None:
    """Writes an event, in a worker. One write per event, so that lines of several processes do not mix."""
    os.write(1, encode(event) + b"\n")


def read(line: bytes) -> Event | None:
    """The event on that line, or None if other code printed the line."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None
