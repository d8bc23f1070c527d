"""This rank's events: sums up its steps, and appends events to its log (observe/events.py)."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from msgspec import structs

from commlayer.cluster.calls.home_traffic import HOME
from commlayer.cluster.calls.messages import version
from commlayer.config import Config
from commlayer.engine.buckets.current_step import Counters
from commlayer.engine.buckets.units import Units
from commlayer.errors import InvalidInput, find_error_code, short_line, without_code
from commlayer.observe.event_files import EventFile
from commlayer.observe.event_log import EventLog
from commlayer.observe.events import (
    AloneEvent,
    JobEvent,
    LinkEvent,
    LogEvent,
    LogLevel,
    MemberEvent,
    PlanEvent,
    PlanReason,
    StepEvent,
)
from commlayer.observe.link_monitor import Rates
from commlayer.planner.plan_rules import main_codec, summarize_plan
from commlayer.records import Plan, digest
from commlayer.transport.flow.traffic import TRAFFIC

log = logging.getLogger("commlayer")

CHANGED = 0.15
"""Relative change of the speed over one machine alone that has an event."""
STEP_S, LINK_S = 1.0, 5.0
"""Shortest time in seconds between two events about steps, and between two about the link."""
LEAST_UP = 0.1
"""Least fraction of both directions that counts as sent."""
NO_UNITS = Units(1)


class RunEvents:
    """Appends the events of one session. The training thread calls most methods; `log` and `text` are thread-safe."""

    def __init__(self) -> None:
        self.log = EventLog(0)
        self.total_steps = 0
        """Number of steps that the script will take; 0: unknown."""
        self.dense_nbytes = 0
        """Size of one step's gradients as float32."""
        self.rtt_s: Callable[[], float] = float
        """Returns the round-trip time to the coordinator; 0: unknown."""
        self._files: list[EventFile] = []
        self._since = self._linked = 0.0
        """Values of time.perf_counter() at the last events about steps and about the link; 0 before the first."""
        self._steps, self._last = 0, 0
        """Number of steps since the last event about steps, and number of the last step."""
        self._samples = self._own_samples = 0.0
        """Samples since the last event about steps, and samples of this rank in each step."""
        self._loss: float | torch.Tensor | None = None
        self._finite = True
        self._counters, self._units = Counters(), NO_UNITS
        self._totals: dict[str, float] = {}
        """Counters at the end of the last step that has an event, with this process's traffic."""
        self._link, self._alone = LinkEvent(), AloneEvent()

    def open(self, config: Config, *, rank: int, world: int, run: str, host: str) -> None:
        """Begins the run: writes to the folder of the setting `events` from now on, if it is set."""
        self.log.rank = rank
        settings = structs.replace(config, token="", token_file="", events="")
        self.log.append(JobEvent(run=run, name=Path(sys.argv[0] or "python").name, host=host, world=world, version=version(),
                                 settings=digest(settings)))
        if config.events:
            try:
                self._files.append(EventFile(self.log, Path(config.events) / f"rank-{rank}.jsonl"))
            except InvalidInput as error:  # check_folder() was called before the job began; other ranks depend on this one now
                log.warning("%s", error)

    def step(self, number: int, ended: float, counters: Counters, units: Units) -> None:
        """Counts a step that ended at `ended` by time.perf_counter(). Called after every step, so it must be fast."""
        self._steps += 1
        self._samples += self._own_samples
        self._last, self._counters, self._units = number, counters, units
        if ended - self._since >= STEP_S:
            self._emit(ended)

    def _emit(self, ended: float) -> None:
        steps, counters, units = self._steps, self._counters, self._units
        now = counters.as_dict() | {"up_nbytes": TRAFFIC.sent_nbytes, "down_nbytes": TRAFFIC.received_nbytes}
        new = {name: total - self._totals.get(name, 0) for name, total in now.items()}
        if self._totals.get("exchanges") and min(new["exchanges"], new["sent_nbytes"]) > 0:
            HOME.exchange_nbytes = new["sent_nbytes"] / new["exchanges"]
            HOME.up_part = max(LEAST_UP, counters.sent_nbytes / (counters.sent_nbytes + counters.received_nbytes))
        # Nothing is known about the time before the first event, which reports that training has begun.
        step_s = (ended - self._since) / steps if self._since else 0.0
        exposed_s = min(step_s, max(0.0, new["exposed_s"]) / steps)
        hidden_s = max(0.0, new["exchange_s"] / steps - exposed_s) if self._since else 0.0
        self.log.append(StepEvent(
            step=self._last, total=self.total_steps, steps=steps, step_s=step_s, compute_s=step_s - exposed_s,
            exposed_s=exposed_s, hidden_s=min(step_s, hidden_s), sent_bytes=int(new["sent_nbytes"]),
            received_bytes=int(new["received_nbytes"]), up_bytes=int(new["up_nbytes"]), down_bytes=int(new["down_nbytes"]),
            dense_bytes=steps * self.dense_nbytes,
            loss=self._read_loss(), share=units.weight / units.total if units.total else 0.0, samples=self._samples))
        self._since, self._totals, self._steps, self._samples = ended, now, 0, 0.0
        if ended - self._linked >= LINK_S and (self._link != LinkEvent() or self.rtt_s()):
            self._linked = ended
            self.log.append(structs.replace(self._link, rtt_s=self.rtt_s()))

    def flush(self) -> None:
        """Appends the event of the steps that have none yet. Called before the session ends."""
        if self._steps:
            self._emit(time.perf_counter())

    def loss(self, loss: float | torch.Tensor) -> None:
        """Keeps the loss for the next event about steps. A tensor is read then, at most once a second."""
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss

    def _read_loss(self) -> float | None:
        if self._loss is None:
            return None
        try:
            loss = float(self._loss)
        except RuntimeError as error:  # a GPU error, which the next operation on the GPU raises as well
            self._loss = None
            self.text(f"the loss at step {self._last} could not be read: {short_line(error, 200)}", logging.WARNING)
            return None
        if self._finite and not math.isfinite(loss):
            self.text(f"the loss is {loss} at step {self._last}", logging.WARNING)
        self._finite = math.isfinite(loss)
        return loss if self._finite else None

    def set_weight(self, samples: float) -> None:
        """Sets this rank's samples in each step from now on."""
        self._own_samples = samples

    def rates(self, measured: Rates, planned: Rates) -> None:
        """Sets the rates of this node's link for later events."""
        self._link = LinkEvent(
            up_bytes_per_s=measured.up_bps / 8, down_bytes_per_s=measured.down_bps / 8,
            planned_up_bytes_per_s=planned.up_bps / 8, planned_down_bytes_per_s=planned.down_bps / 8)

    def plan(self, plan: Plan, reason: PlanReason) -> None:
        self.log.append(PlanEvent(digest=digest(plan), summary=summarize_plan(plan), codec=main_codec(plan),
                                  local_steps=plan.local_steps, step_s=plan.step_s, convergence_factor=plan.steps,
                                  reason=reason))

    def over_alone(self, event: AloneEvent) -> None:
        """Appends the speed compared with the fastest machine alone, if it has changed by more than noise."""
        before = self._alone
        if abs(event.over_alone - before.over_alone) > CHANGED * before.over_alone or event.auto_times != before.auto_times:
            self._alone = event
            self.log.append(event)

    def text(self, text: str, level: int = logging.INFO) -> None:
        name: LogLevel = "error" if level >= logging.ERROR else "warning" if level >= logging.WARNING else "info"
        self.log.append(LogEvent(level=name, code=find_error_code(text), text=without_code(text)))

    def failure(self, text: str, code: str, error: BaseException) -> None:
        """Appends an error with the places in the code that led to it, innermost first, as the innermost matter most."""
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
        self.log.append(LogEvent(level="error", code=code, text=without_code(text), traceback=" < ".join(places)))

    def left(self, reason: str) -> None:
        """Appends this rank's end. The coordinator has this event from the rank's leave, so it is only for the rank's file."""
        self.log.append(MemberEvent(member=f"worker {self.log.rank}", state="left", reason=reason))

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []


def check_folder(config: Config) -> None:
    """Raises InvalidInput if the folder of the setting `events` cannot be written to."""
    folder = Path(config.events).absolute()
    existing: Sequence[Path] = [path for path in (folder, *folder.parents) if path.exists()] if config.events else ()
    if existing and not (existing[0].is_dir() and os.access(existing[0], os.W_OK)):
        raise InvalidInput("E-EVENTS", f"events: {existing[0]} is not a folder that can be written to; set events to another "
                                       "folder, or leave it out")
