"""Defines the demo's settings, the settings of each worker, and the reports of workers."""

from __future__ import annotations

import msgspec

from commlayer.records import Record, complete

ALONE, DDP, COMMLAYER = RUNS = ("alone", "DDP fp16", "commlayer")
STEP_S = 0.2
"""Seconds that a step of one machine takes: the pace of a small GPU, held by sleeping."""
RTT_S = 0.04


class DemoSettings(Record, frozen=True):
    """The settings of the demo: the connection of each home, and the seconds that each run trains."""

    homes: int
    up_bps: float
    down_bps: float
    seconds: int
    seed: int = 0
    page: bool = False
    """True: `commlayer serve` also serves the job's page."""


class WorkerSettings(Record, frozen=True):
    """The settings of one worker of the demo."""

    run: str
    home: int
    homes: int
    """Number of workers of this run."""
    seed: int = 0
    store: str = ""
    """File through which the ranks of DDP exchange addresses."""
    ports: tuple[int, ...] = ()
    """The relay's ports towards the ranks of DDP with smaller numbers, by rank."""


class WorkerReport(Record, frozen=True):
    """A report of a worker: Gloo's port, that it is ready to start, or the end of a step."""

    run: str
    home: int
    port: int = 0
    ready: bool = False
    step: int = 0
    at_s: float = 0.0
    """Seconds since the start of training."""
    loss: float | None = None
    """Validation loss; None after most steps."""
    every: int = 1
    """Number of steps between two exchanges of the present plan."""
    late: float = 0.0
    """Fraction of the passes that this machine computed slower than the pace."""
    native: bool = True


_decoder = msgspec.json.Decoder(complete(WorkerReport))


def read_report(line: bytes) -> WorkerReport | None:
    """Parses a line of a worker's output. Returns None if the line is no report."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None
