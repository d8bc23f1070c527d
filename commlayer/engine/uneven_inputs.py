"""session.join(): a rank that runs out of batches takes part in the steps of the others with weight 0, until all have run out.

Each rank sends before a step whether it has a batch of its own. So no rank begins a step in which nobody has one, and all
know the step in which a rank had none: then observers rest, since they compare weights and times of ranks that train alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from commlayer.cluster.rank_rows import Rows
from commlayer.engine.connection import Connection
from commlayer.engine.initial_sync import align
from commlayer.engine.observers import Observers, Place
from commlayer.engine.parameter_drift import SHARDED
from commlayer.engine.replica import share_optimizer
from commlayer.errors import CommError, InvalidInput
from commlayer.observe import Recorder


class UnevenInputs:
    """Of one attached plain module. Outside of session.join() it sends nothing."""

    def __init__(
        self, model: nn.Module, connection: Connection, optimizer: Any, scaler: Any, observers: Observers, deadline_s: float,
    ) -> None:
        self._model, self._connection, self._optimizer, self._scaler = model, connection, optimizer, scaler
        self._observers, self._deadline_s = observers, deadline_s
        self._rows: Rows | None = None
        self._sent = False
        """Whether this rank has sent its flag for the step under way."""
        self._active: list[bool] = []
        """By place, which ranks had a batch in the last step of which the flags were read."""
        self._last: list[bool] = []
        """The same of the last step in which any had."""

    def enter(self) -> None:
        """session.join() begins. ValueError where it is not possible, on all ranks alike."""
        made = self._connection
        if made.in_join:
            raise InvalidInput("E-UNEVEN-INPUTS",
                               "session.join() inside session.join(): allowed once around a loop over batches")
        if made.worker is not None:
            self._check()
            assert made.rows is not None
            self._rows = self._rows or made.rows.rows("the ranks that still have batches, as session.join() asks")
        made.in_join, self._sent, self._active, self._last = True, False, [], []

    def _check(self) -> None:
        made = self._connection
        terms, plan = made.terms, made.plan
        if plan is not None and plan.steps_locally:
            raise InvalidInput("E-UNEVEN-INPUTS",
                               f"session.join(): the plan has local steps (every={plan.local_steps}), which all ranks must "
                               "make "
                               "in equal number; allowed: plans that average gradients in every step")
        if terms.auto and terms.asked.exact is False:
            raise InvalidInput("E-UNEVEN-INPUTS",
                               "session.join(): exact=False lets the automatic plan take local steps, which all ranks must "
                               "make "
                               "in equal number; remedy: leave exact out")
        if made.members is not None:
            raise InvalidInput("E-UNEVEN-INPUTS",
                               "session.join(): workers may leave this job (min_workers); allowed there: the same number of "
                               "batches on all, as commlayer.balance.Sampler gives")
        if made.rows is None:
            raise InvalidInput("E-UNEVEN-INPUTS",
                               "session.join(): the ranks have no torch.distributed process group; remedy: start them with "
                               "torchrun")
        if self._optimizer is None:
            raise InvalidInput("E-UNEVEN-INPUTS",
                               "session.join() copies the optimizer's state to ranks that run out of batches, and attach() got "
                               "no optimizer; remedy: attach(model, optimizer)")
        if hasattr(self._optimizer, SHARDED):
            raise InvalidInput("E-UNEVEN-INPUTS",
                               f"session.join(): {type(self._optimizer).__name__} steps on all ranks together, also those "
                               "without batches; allowed: the optimizer that it shards")

    # ---- around a step

    def send(self) -> None:
        """Before a step's first gradient."""
        self._tell(active=True)

    def passed(self) -> None:
        """The step is over, or was broken off."""
        self._sent = False

    def all_active(self) -> bool:
        """Whether all ranks had a batch in the step whose sums are in, or in the last one."""
        if not self._connection.in_join or self._rows is None:
            return True
        self._read(self._rows)
        return all(self._active)

    def _tell(self, *, active: bool) -> None:
        if self._connection.in_join and self._rows is not None and not self._sent:
            self._read(self._rows)  # of a step that was broken off
            self._sent = True
            try:
                self._rows.start(float(active))
            except CommError as error:
                self._connection.broke(error)

    def _read(self, rows: Rows) -> None:
        worker = self._connection.worker
        if not rows.under_way or worker is None:
            return
        assert self._connection.groups is not None
        try:
            with self._connection.groups.waits("exchange of session.join()"):
                heard = rows.read(self._deadline_s, worker.now.failed)
        except CommError as error:
            self._connection.broke(error)
            return
        self._active = [bool(row[0]) for row in heard]
        self._last = self._active if any(self._active) else self._last

    # ---- this rank has no more batches

    def leave(self, step: Callable[[], None]) -> None:
        """session.join() ends. `step` takes part in one step of the others; when none has a batch, all become equal again."""
        worker, rows = self._connection.worker, self._rows
        if worker is not None and rows is not None:
            units, recorder = worker.units, worker.recorder
            weight, total, told = units.weight, units.total, units.told
            worker.weigh(0.0, None)
            worker.recorder = Recorder()  # the step that it was in is none
            while self._any_active(rows):
                step()
            worker.recorder = recorder
            recorder.restart()
            worker.weigh(weight, total if told else None)
            if self._last and not all(self._last):
                self._copy(self._last.index(True))

    def _any_active(self, rows: Rows) -> bool:
        self._tell(active=False)
        self._read(rows)
        if not any(self._active):
            self._sent = False
        return any(self._active)

    def _copy(self, source: int) -> None:
        """All ranks take weights, buffers, and the state of optimizer and GradScaler from a rank that had the last batch."""
        groups = self._connection.groups
        assert groups is not None
        state = {} if self._scaler is None else self._scaler.state_dict()
        try:
            tensors: list[torch.Tensor] = [*(p.data for p in self._model.parameters()), *self._model.buffers()]
            align(tensors, groups, self._deadline_s, source)
            share_optimizer(self._optimizer, groups, self._deadline_s, source)
            state = msgspec.msgpack.decode(groups.share_bytes(msgspec.msgpack.encode(state), source=source))
        except CommError as error:
            self._connection.broke(error)
        if state and self._scaler is not None and groups.rank != source:
            self._scaler.load_state_dict(state)
        for drift in self._observers.at(Place.PARAMETER_DRIFT):
            drift.loaded()  # compares all of it before the next step
