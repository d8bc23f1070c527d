"""Implements session.join(): a rank that runs out of batches takes part in the steps of the other ranks with weight 0, until
all ranks have run out.

Before each step, each rank sends a row of numbers: whether it has a batch of its own, and which averages of the last step its
script did not apply. A step therefore begins only if some rank has a batch, and all ranks know the steps in which some ranks
had no batch. In these steps no observer runs, because observers compare weights and times of ranks that train alike. A rank
without batches applies nothing itself. It copies the other ranks' reports on the last step, so that residuals and servers treat
the step alike on all ranks.

Under local steps there is a row for each exchange instead. A rank that runs out first takes part until its last steps have been
exchanged, then with weight 0. All ranks wait for the row of an exchange, so they overlap it less than without session.join().

Several sessions, such as those of a GAN's two models, enter one inside the other. The outermost leaves for all of them: a rank
without batches takes part in the next step of whichever session the other ranks train.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from commlayer.cluster.calls.messages import unpack
from commlayer.engine.components import Pending
from commlayer.engine.epochs.replica import share_optimizer
from commlayer.engine.guards.parameter_drift import SHARDED
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.model.alignment import align
from commlayer.errors import CommError, DeadlineExceeded, InvalidInput, exit_reason
from commlayer.observe.step_trace import Recorder

log = logging.getLogger("commlayer")

TWICE = "session.join() must not be called inside session.join(): call it once, around the loop over batches"
NOTHING, BATCH, STEPS = 0.0, 1.0, 2.0
"""What a rank has to contribute to a step: a batch; or, without further batches, local steps that are not exchanged yet."""
BITS = 48
"""Number of bits that ranks pack into one float64 of a row."""
SCALER_NBYTES = 64 << 10
"""Largest size of a GradScaler's state, which is some numbers."""
LOOK_S = 1e-3
"""Seconds between two looks at which of several sessions the other ranks train."""
_entered: list[UnevenInputs] = []
"""Sessions of this process that are inside session.join(), the outermost first."""


class UnevenInputs:
    """Runs session.join() for one attached module. Outside session.join() it sends nothing."""

    def __init__(
        self, model: nn.Module, context: DistributedJob, optimizer: Any, scaler: Any, deadline_s: float,
    ) -> None:
        self._model, self._context, self._optimizer, self._scaler = model, context, optimizer, scaler
        self._deadline_s = deadline_s
        self._rows = context.rows.section("which ranks still have batches in session.join()", stays=True)
        self.inside = False
        """True: this rank is inside session.join(), where ranks can be at different positions in their scripts."""
        self._sent = False
        """True: this rank has reported to the other ranks, for the current step, whether it has a batch."""
        self._active: dict[int, float] = {}
        """BATCH, STEPS or NOTHING for each rank, by the rank's number in messages: what it had to contribute to the last step
        whose rows this rank has received."""
        self._last: dict[int, float] = {}
        """The same for the last step to which any rank had something to contribute."""
        self._passes = 0
        """Largest number of training steps that any rank has reported."""
        self._step: Callable[[], None] | None = None
        """Takes part in one step of the other ranks. The value is None while this rank has batches."""

    def enter(self) -> None:
        """Called when session.join() begins. Raises the same ValueError on all ranks if session.join() is not supported in this
        job."""
        if problem := next(self._problems(), ""):
            raise InvalidInput("E-UNEVEN-INPUTS", problem)
        self.inside, self._sent, self._active, self._last, self._step = True, False, {}, {}, None
        _entered.append(self)

    def _problems(self) -> Iterator[str]:
        """Yields the reasons why session.join() is not supported in this job."""
        context, optimizer = self._context, self._optimizer
        if self.inside:
            yield TWICE
        if context.site.shards:
            yield ("session.join() is not supported with a sharded model, because all ranks of a site make each pass together: "
                   "give all ranks the same number of batches")
        if optimizer is None:
            yield ("session.join() copies the optimizer's state to ranks that run out of batches, but attach() got no "
                   "optimizer; remedy: attach(model, optimizer)")
        if self._scaler is None and _has_scaler():
            yield ("session.join(): the script has a GradScaler that attach() did not get, and its scale would differ between "
                   "ranks; remedy: attach(model, optimizer, grad_scaler=scaler)")
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if foreign := [name for name, p in self._model.named_parameters() if p.requires_grad and id(p) not in held]:
            yield (f"session.join(): {len(foreign)} parameters do not belong to the optimizer that attach() received, for "
                   f"example {foreign[0]}: the state of another optimizer is not copied; pass attach() an optimizer of all "
                   "parameters, or freeze these")
        if hasattr(optimizer, SHARDED):
            yield (f"session.join() is not supported with {type(optimizer).__name__}, which steps on all ranks together, "
                   "including those without batches; use the optimizer that it shards")

    def send(self) -> None:
        """Sends to the other ranks what this rank has to contribute, before a step's first gradient or in an exchange."""
        if self.inside and not self._sent:
            self._read()  # receives the rows of a step that was aborted
            self._sent = True
            context, local = self._context, self._context.local
            has = BATCH if self._step is None else STEPS if local is not None and local.unshared_steps else NOTHING
            bits, slices = context.worker.discarded()
            parts = (bits >> at & (1 << BITS) - 1 for at in range(0, slices, BITS))
            self._rows.start(has, float(context.passes), *map(float, parts))
            context.rows.send()

    def end_step(self) -> None:
        """Records that the step has ended or was aborted."""
        self._sent = False

    def all_active(self) -> bool:
        """Returns True if all ranks had a batch in the step whose sums have arrived, or else in the last step."""
        if not self.inside:
            return True
        self._read()
        return all(has == BATCH for has in self._active.values())

    def check_entered(self) -> None:
        """Raises ValueError in a backward pass of a session that is not inside session.join(), while another one is."""
        if _entered and not self.inside:
            raise InvalidInput("E-UNEVEN-INPUTS",
                               "a backward pass of this session runs inside another session's join(), so ranks that run out of "
                               "batches would not take part in it: enter both, with first.join(), second.join()")

    def _read(self) -> None:
        worker = self._context.worker
        if not self._rows.under_way:
            return
        try:
            with self._context.groups.waits("exchange of which ranks still have batches", self._context.rows.transport.missing):
                rows = self._rows.read_by_sender()
        except CommError as error:
            if isinstance(error, DeadlineExceeded):
                error.what += ": enter session.join() on all ranks, with the same sessions"
            self._context.drop_call(error)
            return
        before, self._active = self._active, {sender: row[0] for sender, row in rows.items()}
        self._passes = max(int(row[1]) for row in rows.values())
        some, own = any(self._active.values()), self._context.id
        if before and not self._active[own] and (some or not all(before.values())):
            source = next((n for n, active in (self._active if some else before).items() if active and n in rows), own)
            if source != own:
                worker.set_discarded(sum(int(part) << BITS * n for n, part in enumerate(rows[source][2:])))
        self._last = self._active if some else self._last

    def leave(self, step: Callable[[], None]) -> None:
        """Called when session.join() ends. `step` takes part in one step of the other ranks. The outermost session calls those
        of all sessions, until no rank has a batch. Afterwards all ranks copy the state of a rank that had the last batch."""
        self._step = step
        if _entered[0] is not self:
            return
        log.info("this rank has run out of batches and takes part in the other ranks' steps with weight 0")
        try:
            restore = [each._stand_aside() for each in _entered]
            waiting = [*_entered]
            while waiting:
                # A worker that joins in this step sends the row of this step, and has a batch.
                begins = next((session for session in waiting if session._context.members.admits_now), None)
                session = begins or _next(waiting)
                if begins or session._any_active():
                    assert session._step is not None
                    session._step()
                else:
                    waiting.remove(session)
            for each, act in zip(_entered, restore, strict=True):
                act()
                each._end_alike()
        except BaseException as error:
            for each in _entered:
                each._context.close(exit_reason(error))
            raise

    def end(self) -> None:
        """Called at the end of session.join(), also after an error. A session inside another one's join() ends with it."""
        ended = [*_entered] if _entered[0] is self else [self] if self._step is None else []
        for session in ended:
            session.inside = False
            _entered.remove(session)

    def _stand_aside(self) -> Callable[[], None]:
        """Gives this rank's gradients, or its further local steps, the weight 0. Returns a function that restores the
        weight."""
        worker, local = self._context.worker, self._context.local
        units, recorder = worker.units if local is None else local.weights, worker.recorder
        weight, units.weight = units.weight, 0.0
        worker.now.recorder = Recorder()  # discards the record of the unfinished step

        def restore() -> None:
            worker.now.recorder = recorder
            recorder.restart()
            units.weight = weight

        return restore

    def _any_active(self) -> bool:
        self._read()
        some = any(self._active.values())
        if not some:
            self._sent = False
        return some

    def _end_alike(self) -> None:
        """Lets all ranks continue alike after their last step. Under local steps each rank has its own optimizer state."""
        self.inside = False
        if self._context.local is None:
            self._context.retry_on_epoch_change(self._copy)
        else:
            self._context.components.complete(Pending.RUNNING)
            self._context.passes = self._passes

    def _copy(self) -> None:
        """Copies weights, buffers, and the state of optimizer and GradScaler from a rank that had the last batch to all ranks.
        It broadcasts all of this once per session.join(): with AdamW, three times the size of the model."""
        context = self._context
        numbers, groups = context.ranks if context.elastic else range(context.world), context.groups
        sources = [rank for rank, number in enumerate(numbers) if self._last.get(number)]
        if len(sources) in (0, len(numbers)):
            return
        source = sources[0]
        state = {} if self._scaler is None else self._scaler.state_dict()
        tensors: list[torch.Tensor] = [*(p.data for p in self._model.parameters()), *self._model.buffers()]
        align(tensors, groups, self._deadline_s, source)
        share_optimizer(self._optimizer, groups, source)
        data = groups.share_bytes(msgspec.msgpack.encode(state), SCALER_NBYTES, "the GradScaler's state", source=source)
        state = unpack(data, dict[str, bool | int | float], f"rank {source}", "the GradScaler's state")
        if state and self._scaler is not None and groups.rank != source:
            self._scaler.load_state_dict(state)
        self._context.components.loaded()


def _next(sessions: Sequence[UnevenInputs]) -> UnevenInputs:
    """Returns the session which the other ranks train next, or in which this rank can wait for them."""
    for session in sessions:
        session.send()
    deadline = time.monotonic() + sessions[0]._deadline_s
    while len(sessions) > 1 and time.monotonic() < deadline:
        for session in sessions:
            if session._rows.arrived or session._context.worker.error is not None:
                return session
        time.sleep(LOOK_S)
    return sessions[0]


def _has_scaler() -> bool:
    """Returns True if the script has an enabled GradScaler. The function scans all Python objects, which takes about 50 ms."""
    def some() -> bool:
        return any(issubclass(type(each), torch.amp.GradScaler) and each.is_enabled() for each in gc.get_objects())

    return some() and (gc.collect() >= 0 and some())  # counts only a GradScaler that is still referenced
