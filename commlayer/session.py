"""attach(): a PyTorch model trains through commlayer. The PyTorch surface; everything below it knows no model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlayer.config import Config, read_config
from commlayer.ddp import DDPDriver, HookState
from commlayer.job import checkpoint
from commlayer.job.accepted_models import Claim, check_dtypes, check_model, device_of, refuse_ddp_around
from commlayer.job.attached_model import AttachedModel
from commlayer.job.connection import Connection
from commlayer.job.exchange_schedule import ExchangeSchedule
from commlayer.job.inspection import Inspected, Inspection
from commlayer.job.observers import Observers
from commlayer.job.rendezvous import Start
from commlayer.job.start import connect
from commlayer.job.step_in_backward import refuse
from commlayer.job.step_loop import StepLoop
from commlayer.job.switch import switch as go_over
from commlayer.optim import Outer
from commlayer.records import Plan
from commlayer.runtime.forward_order import ForwardOrder
from commlayer.runtime.hooks import Hooks
from commlayer.runtime.model_job import buffers_of, job_of, parameters_of
from commlayer.runtime.shared_buffers import agree
from commlayer.runtime.write_gradients import targets_of


class Driver(Inspected, Protocol):
    """How a session gets at gradients: hooks on the parameters, or DDP's communication hook."""

    def no_sync(self) -> AbstractContextManager[None]: ...

    def weight(self, n: float, total: float | None) -> None: ...

    def report(self, loss: float | torch.Tensor) -> None: ...

    def synchronize(self) -> None: ...

    def drain(self) -> bool: ...

    def detach(self) -> None: ...


class Session:
    """One attached model. Made by `attach`; `switch` goes over to another plan."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._inspection = driver, Inspection(driver)

    @property
    def inspect(self) -> Inspection:
        """The plan in force, what was decided and why, traces, and what else is not needed every day."""
        return self._inspection

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate locally; the next one outside synchronises what has gathered."""
        return self._driver.no_sync()

    def weight(self, n: float, total: float | None = None) -> None:
        """How much this worker's gradients count from now on: its number of samples, or of tokens; all workers use one unit.

        It is divided by the setting `batch`, so that what is coded stays in the range of gradients: set that to the planned
        batch where n is large and gradients go as fp16. `total`: the sum over all workers, where the script knows it. Without
        it, a step in which that sum is not what it was in the step before sends what residuals go with twice.
        """
        own, whole = _amount("weight", n), None if total is None else _amount("total", total)
        if whole is not None and whole < own:
            raise ValueError(f"total {whole:g}: less than this worker's own weight {own:g}; give the sum over all workers")
        self._driver.weight(own, whole)

    def report(self, loss: float | torch.Tensor) -> None:
        """The training loss of a step, if the guard is to watch it, too. A tensor is read later, and waits for nothing."""
        self._driver.report(loss)

    def synchronize(self) -> None:
        """Averages what backward passes inside `no_sync` have gathered, or the script has written into `.grad`.

        A backward pass outside does it by itself: behind that there is nothing to do.
        """
        self._driver.synchronize()

    def drain(self) -> bool:
        """Brings in what the plan lets come late: `if session.drain(): optimizer.step()`. All ranks call it between two steps.

        Waits for results that are a step late and writes them into `.grad`; that of parameters without any becomes None. True
        if there are some. Under a plan of local steps it exchanges at once, and there is no step to make. For an evaluation
        of all that was learnt, or at the end. `save` needs no drain, but between two exchanges models differ from rank to rank.
        """
        return self._driver.drain()

    def state_dict(self) -> dict[str, Any]:
        """This worker's codec state (residuals among it) and step; servers' state is in `save`."""
        return checkpoint.worker_state(self._driver.connection)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before training, or at the step that it was taken at; to go back in a running job all ranks call `load`."""
        self._driver.when_connected(lambda: checkpoint.restore_worker(self._driver.connection, state))

    def save(self, directory: str | Path) -> None:
        """Writes a file per rank and per server into a folder of its own in `directory`. All ranks call it at the same step.

        When it is whole on all ranks it takes the place of the save before, which is there until then, whatever breaks off.
        """
        checkpoint.save(self._driver.connection, Path(directory))

    def load(self, directory: str | Path) -> None:
        """Takes up the newest whole save in `directory`, under the same plan and world. All ranks call it before training."""
        self._driver.when_connected(lambda: checkpoint.load(self._driver.connection, Path(directory)))

    def stats(self) -> dict[str, float]:
        """Counters since the start: steps, bytes, seconds in codecs, seconds that training waited."""
        return self._driver.connection.stats()

    def close(self, reason: str = "") -> None:
        """Leaves the job; called at exit, too. A `reason` says that the end was no orderly one: the others fail with it."""
        self._driver.detach()
        self._driver.connection.close(reason)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")


def switch(session: Session, plan: Plan) -> None:
    """Goes over to another plan between two steps; rank 0's counts. All ranks call it together.

    What residuals owe is paid under the new plan. ValueError, and nothing changed, if the plan does not fit the job.
    """
    session._driver.when_connected(lambda: _switch(session._driver.connection, plan))


def _switch(connection: Connection, plan: Plan) -> None:
    go_over(connection, plan)
    connection.auto = False  # a plan that somebody asked for is kept
    assert connection.worker is not None
    connection.worker.recorder.switch(on=False)


def _amount(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(f"{what} {value!r}: allowed is a finite number >= 0")
    return number


class _ModuleDriver:
    """Hooks on a plain module's parameters."""

    def __init__(
        self, model: nn.Module, connection: Connection, *, optimizer: Any, scaler: Any, config: Config, outer: Outer
    ) -> None:
        self.connection, self.observers = connection, Observers()
        self._model = model
        self._parameters = [p for _, p in parameters_of(model)]
        self._buffers = [name for name, _ in buffers_of(model)]
        self._syncing = True
        self._written: list[tuple[int, int, int] | None] = []
        """The gradients that the last step wrote."""
        self._order: ForwardOrder | None = None
        self._hooks: Hooks | None = None
        self._attached: AttachedModel | None = None
        schedule = ExchangeSchedule(model, self._parameters, self._buffers_now, optimizer=optimizer, outer=outer,
                                    connection=connection, observers=self.observers, deadline_s=config.deadline_s)
        self._loop = StepLoop(connection, self._parameters, list(model.named_parameters()), optimizer=optimizer, scaler=scaler,
                              config=config, observers=self.observers, schedule=schedule)
        if connection.worker is not None:
            self._attached = AttachedModel(model, parameters_of(model), optimizer)
            connection.on_close.append(self._attached.remove)
            agree(connection.worker.flows, [*[None] * len(self._parameters), *self._buffers_now()])
            self._order = ForwardOrder(model, {id(p): i for i, p in enumerate(self._parameters)})
            refuse_ddp_around(model)
            # Compiled modules pass attributes on to the one that they are made from.
            plain = vars(getattr(model, "_orig_mod", model))
            # Who trains through several wrappers (Accelerate) sets on any module what DDP reads.
            self._hooks = Hooks(self._parameters, lambda: self._loop.worker, self._ready, self._end,
                                lambda: self._syncing and plain.get("require_backward_grad_sync", True), self._loop.abandon)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def weight(self, n: float, total: float | None) -> None:
        self._loop.weigh(n, total)

    def report(self, loss: float | torch.Tensor) -> None:
        self._loop.report(loss)

    def when_connected(self, action: Callable[[], None]) -> None:
        action()

    def synchronize(self) -> None:
        if self._written != self._gradients():
            self._end()

    def drain(self) -> bool:
        return self._loop.drain(self._parameters)

    def detach(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        self._loop.detach()

    def _ready(self, number: int, gradient: torch.Tensor) -> None:
        if self._order is not None:
            self._loop.worker.reorder(self._order.take())
            self._order = None
        self._loop.ready(number, gradient)

    def _end(self) -> None:
        """A backward pass is over, or the script asks for it."""
        if self._attached is None:
            return
        self._attached.check(self._loop.worker.latch)
        if self._loop.count_local():
            return
        buffers = self._buffers_now()
        averages = self._loop.average([*(p.grad for p in self._parameters), *buffers],
                                      lambda: [*targets_of(self._loop.worker, self._parameters), *buffers])
        for p, average in zip(self._parameters, averages, strict=False):
            p.grad = average
        self._written = self._gradients()
        self._loop.written()
        self._loop.observe()

    def _gradients(self) -> list[tuple[int, int, int] | None]:
        """What tells whether gradients are what they were, and nobody has stepped with them."""
        return [None if p.grad is None else (id(p.grad), p.grad._version, p._version) for p in self._parameters]

    def _buffers_now(self) -> list[torch.Tensor]:
        # By name: a module may have put another tensor in a buffer's place.
        named = dict(self._model.named_buffers())
        return [named[name] for name in self._buffers]


def attach(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, plan: str | Path | Plan | Any = "auto",
    config: Config | dict[str, Any] | None = None, sync: str | Outer = "step", scaler: Any = None, process_group: Any = None,
) -> Session:
    """Averages the model's gradients over all workers of the job, from now on, in every backward pass.

    `plan`: "auto", the path of a plan file, a Plan, or one codec for everything, as such or as a plan spells it ("fp16()").
    `scaler`: the GradScaler in use, so that residuals are kept without its scale; from `optimizer` comes the learning rate, for
    codecs that correct for its changes.
    `sync`: an Outer says what plans of local steps do with the average of an exchange; otherwise that is taken as it is.
    `process_group`: the ranks to average over, all of which call this; otherwise all of the world, or those of a DDP module.
    Under torchrun nothing else is needed; initial parameters are taken from rank 0.

    >>> session = attach(model, optimizer, plan=commlayer.compressors.topk(ratio=0.01))     # doctest: +SKIP
    """
    ddp = isinstance(model, DistributedDataParallel)
    if ddp and process_group not in (None, model.process_group):
        raise ValueError("process_group: another one than that of the DistributedDataParallel module; leave it out")
    first = next(iter(model.parameters()), torch.empty(0)) if isinstance(model, nn.Module) else torch.empty(0)
    with Start(model.process_group if ddp else process_group, first.device) as start:
        if sync != "step" and not isinstance(sync, Outer):
            raise ValueError(f"sync: got {sync!r}, allowed: 'step', or an Outer for plans of local steps")
        outer = sync if isinstance(sync, Outer) else Outer()
        read = read_config(config)
        check_model(model)
        refuse(model.named_parameters())
        if isinstance(model, DistributedDataParallel):
            return Session(DDPDriver(model, HookState(plan, config=read, scaler=scaler, optimizer=optimizer)))
        tensors = [*(p.data for p in model.parameters()), *model.buffers()]
        if not tensors:
            raise ValueError("the model has no parameters")
        job, device = job_of(model), device_of(tensors)
        check_dtypes(job)
        claim = Claim(parameters_of(model))
        try:
            connection = connect(job, device, start, plan=plan, config=read, align=tensors, steps_locally=optimizer is not None,
                                 must={"wrapper": "none", "sync": str(sync)})
        except BaseException:
            claim.release()
            raise
    connection.on_close.append(claim.release)
    return Session(_ModuleDriver(model, connection, optimizer=optimizer, scaler=scaler, config=read, outer=outer))
