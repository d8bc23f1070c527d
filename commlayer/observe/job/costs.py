"""Counts what a job costs: the bytes of each machine in this month, over all runs, and the energy of this run."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import msgspec

from commlayer.files import write_whole
from commlayer.observe.events import CostEvent, Event, PowerEvent, StepEvent
from commlayer.observe.job.job_view import JobView
from commlayer.records import complete

log = logging.getLogger("commlayer")

PENDING_S = 120.0
"""Seconds of training after which a machine whose power is not known makes the energy of the run unknown."""
JOULES = 3.6e6
"""Joules of a kWh."""


class MachineConsumption(msgspec.Struct):
    """Counts of one machine. `counted`: time of each rank's newest event: after a restart of the server, workers send events
    again."""

    sent_bytes: int = 0
    received_bytes: int = 0
    joules: float = 0.0
    pending_s: float = 0.0
    """Seconds of training before its power was known."""
    counted: dict[str, float] = msgspec.field(default_factory=dict)


class CostLedger(msgspec.Struct):
    """The file. `month`: of the bytes; `run`: of the energy."""

    month: str = ""
    run: str = ""
    machines: dict[str, MachineConsumption] = msgspec.field(default_factory=dict)


class Costs:
    """Counts the events of a job. If the file cannot be read, counting begins at 0; if it cannot be written, the error is
    reported once."""

    def __init__(self, file: Path | None = None, *, watts: float = 0.0, kwh_price: float = 0.0) -> None:
        """`watts`: power of one machine, given by the user; 0: `nvidia-smi` on the machine reports it."""
        self._file, self._watts, self._price, self._power = file, watts, kwh_price, dict[str, float]()
        self._ledger = CostLedger()
        if file is not None:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                self._ledger = msgspec.json.decode(file.read_bytes(), type=complete(CostLedger))

    def apply(self, view: JobView, event: Event) -> None:
        """Counts an event that `view` has applied."""
        worker = view.workers.get(event.rank)
        if worker is None:
            return
        name = worker.name or f"worker {event.rank}"
        if isinstance(event, PowerEvent):
            self._power[name] = event.watts
        elif isinstance(event, StepEvent):
            self._turn(time.strftime("%Y-%m", time.localtime(event.time)), view.job.run)
            machine, rank = self._ledger.machines.setdefault(name, MachineConsumption()), str(event.rank)
            if event.time <= machine.counted.get(rank, 0.0):
                return
            machine.counted[rank] = event.time
            machine.sent_bytes += event.up_bytes
            machine.received_bytes += event.down_bytes
            ranks = [each.number for each in view.present if each.name == worker.name]
            if event.rank == min(ranks, default=event.rank):  # the power is that of the whole machine
                self._add_energy(machine, event.steps * event.step_s, self._watts or self._power.get(name, 0.0))

    def _add_energy(self, machine: MachineConsumption, seconds: float, watts: float) -> None:
        machine.pending_s += seconds
        if watts:
            machine.joules, machine.pending_s = machine.joules + machine.pending_s * watts, 0.0

    def _turn(self, month: str, run: str) -> None:
        """Restarts the counts that belong to a month or a run if another one has begun. Bytes before a month's first event
        belong to the month before, also if a clock goes back."""
        ledger = self._ledger
        if month > ledger.month:
            ledger.month = month
            for machine in ledger.machines.values():
                machine.sent_bytes = machine.received_bytes = 0
        if run != ledger.run:
            ledger.run = run
            for machine in ledger.machines.values():
                machine.joules, machine.pending_s, machine.counted = 0.0, 0.0, {}

    @property
    def event(self) -> CostEvent | None:
        """What was counted so far; None before the first step."""
        ledger = self._ledger
        machines = {name: each for name, each in ledger.machines.items() if each.sent_bytes + each.received_bytes}
        if not machines:
            return None
        busiest, most = max(machines.items(), key=lambda each: each[1].sent_bytes + each[1].received_bytes)
        trained = [each for each in ledger.machines.values() if each.counted]
        known = all(each.pending_s < PENDING_S for each in trained)
        return CostEvent(
            month=ledger.month, sent_bytes=sum(each.sent_bytes for each in machines.values()),
            received_bytes=sum(each.received_bytes for each in machines.values()), busiest=busiest,
            busiest_bytes=most.sent_bytes + most.received_bytes,
            kwh=sum(each.joules for each in trained) / JOULES if known else 0.0, kwh_price=self._price)

    def save(self) -> None:
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole({self._file: msgspec.json.encode(self._ledger)})
        except OSError as error:
            log.warning("%s: the bytes of this month are not kept: %s", self._file, error.strerror)
            self._file = None
