"""Defines attach() and the Session that it returns, which together train a PyTorch model over several workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlayer.config import Config, read_config, read_launch
from commlayer.ddp import HookState, comm_hook
from commlayer.engine import checkpoint
from commlayer.engine.allowed_ways import check_local, check_overlap, forbids_of
from commlayer.engine.averages import Clipping, checked, clipping
from commlayer.engine.connection import JobContext
from commlayer.engine.ddp_modes import DDPWays
from commlayer.engine.guards import Claim, check_dtypes, check_model, device_of, refuse_steps_in_backward
from commlayer.engine.inspection import Inspected, Inspection
from commlayer.engine.module_driver import ModuleDriver
from commlayer.engine.observers import ObserverOrder, Observers
from commlayer.engine.optimizers import job_of, parameters_of, settings_of
from commlayer.engine.plan_choice import read_ways
from commlayer.engine.quiet_ddp import QuietDDP, check_silenceable, silenceable
from commlayer.engine.replica import Replica
from commlayer.engine.start import Start, connect, group_of
from commlayer.engine.switch import switch as go_over
from commlayer.errors import InvalidInput, cause_of
from commlayer.optim import Outer, family_of, usual
from commlayer.records import Plan

log = logging.getLogger("commlayer")


class Driver(Inspected, Protocol):
    """A session's access to the model's gradients: through hooks on the parameters, or through DDP's communication hook."""

    def no_sync(self) -> AbstractContextManager[None]: ...

    def join(self) -> AbstractContextManager[None]: ...

    def weight(self, n: float, total: float | None) -> None: ...

    def report(self, loss: float | torch.Tensor) -> None: ...

    def synchronize(self) -> None: ...

    def drain(self) -> bool: ...

    def detach(self) -> None: ...


class Session:
    """One attached model, returned by `attach()`. The function `switch` changes its plan."""

    def __init__(self, driver: Driver, clips: Clipping | None = None) -> None:
        self._driver, self._inspection, self._clips = driver, Inspection(driver), clips

    @property
    def inspect(self) -> Inspection:
        """Diagnostics: the current plan, the decisions with their reasons, traces and measurements."""
        return self._inspection

    def no_sync(self) -> AbstractContextManager[None]:
        """Context manager for gradient accumulation: backward passes inside it exchange nothing. The next backward pass outside
        averages the accumulated gradients."""
        return self._driver.no_sync()

    def join(self) -> AbstractContextManager[None]:
        """Context manager for ranks with unequal numbers of batches, on a plain module. All ranks enter it, around the loop
        over batches.

        >>> with session.join():                                    # doctest: +SKIP
        ...     for x, y in loader:
        ...         optimizer.zero_grad()
        ...         loss_of(model(x), y).backward()
        ...         optimizer.step()

        A rank that leaves the loop takes part in the other ranks' steps until all ranks have left. Its gradients have weight 0,
        so an average covers only the ranks that still have batches. At the end all ranks have the weights, buffers, optimizer
        state and GradScaler state of a rank that had the last batch. Give a GradScaler to attach(), and step the optimizer
        inside the context: averages of the last step that no optimizer applied count as discarded. Residuals of error feedback
        stay on their ranks.

        The plan does not change while a rank is out of batches. With overlap="forward", backward() waits for results inside the
        context. Schedulers are not copied: step them after the context. An exception inside ends the session, and the other
        ranks fail with its reason. Not supported: local steps, jobs whose workers might leave, and DistributedDataParallel,
        which has its own join().
        """
        return self._driver.join()

    def weight(self, n: float, total: float | None = None) -> None:
        """Sets the weight of this worker's gradients from now on: its number of samples or tokens, in the same unit on all
        workers.

        The weight is divided by the setting `batch`, so that encoded values stay in the range of gradients. If n is large and
        gradients are sent as fp16, set `batch` to the planned batch size. `total` is the sum over all workers, if the script
        knows it. Without `total`, when the sum differs from that of the previous step, buckets with residuals are sent twice.
        """
        own, summed = _amount("weight", n), None if total is None else _amount("total", total)
        if summed is not None and summed < own:
            raise InvalidInput("E-WEIGHT",
                               f"total {summed:g} is less than this worker's own weight, {own:g}; give the sum over all "
                               "workers")
        if summed is not None and self._driver.connection.in_join:
            raise InvalidInput("E-UNEVEN-INPUTS",
                               "weight(total=...) is not supported inside session.join(): the sum changes when a rank runs "
                               "out of batches; leave total out")
        self._driver.weight(own, summed)

    def report(self, loss: float | torch.Tensor) -> None:
        """Reports a step's training loss to the quality guard, which compares it over time. A tensor is read later, so the call
        does not wait for the device."""
        self._driver.report(loss)

    def synchronize(self) -> None:
        """Averages gradients accumulated inside `no_sync`, or written into `.grad` by the script.

        Not needed after a backward pass outside `no_sync`, which averages by itself.
        """
        self._driver.synchronize()

    def drain(self) -> bool:
        """Completes exchanges whose averages the plan delivers late: `if session.drain(): optimizer.step()`. All ranks call it
        between two steps.

        Waits for one-step-stale results and writes them into `.grad`; parameters without a result get None. Returns True if
        there were any. Under a plan of local steps it exchanges the weight changes at once, and no optimizer step follows. Call
        it before an evaluation, or at the end. `save_residuals` needs no drain, but under local steps models differ between
        ranks until the next exchange.
        """
        self._outside_join("drain()")
        return self._driver.drain()

    def state_dict(self) -> dict[str, Any]:
        """This worker's codec state (with residuals) and step. `save_residuals` also saves the servers' state."""
        return checkpoint.worker_state(self._driver.connection)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a result of `state_dict`, before training or at the step of the saved state. To return to an earlier step of
        a running job, all ranks call `load_residuals` instead."""
        if not self._fresh("load_state_dict()"):
            self._driver.when_connected(lambda: checkpoint.restore_worker(self._driver.connection, state))

    def save_residuals(self, directory: str | Path) -> None:
        """Writes the codec state of each rank and server that is kept between steps (residuals, momenta).

        The model and the optimizer are not included: the script saves them itself, at the same step. All ranks call it. Each
        save has its own folder. The previous save is deleted once this one is complete on all ranks.
        """
        self._outside_join("save_residuals()")
        if not self._fresh("save_residuals()"):
            checkpoint.save(self._driver.connection, Path(directory))

    def load_residuals(self, directory: str | Path) -> None:
        """Loads the newest complete save in `directory`. All ranks call it before training, under the plan and number of
        workers that were saved."""
        self._outside_join("load_residuals()")
        if not self._fresh("load_residuals()"):
            self._driver.when_connected(lambda: self._load(Path(directory)))

    def _load(self, directory: Path) -> None:
        checkpoint.load(self._driver.connection, directory)
        for drift in self._driver.observers.at(ObserverOrder.PARAMETER_DRIFT):
            drift.loaded()

    def _outside_join(self, what: str) -> None:
        if self._driver.connection.in_join:
            raise InvalidInput("E-UNEVEN-INPUTS",
                               f"{what} must not be called inside session.join(): all ranks make this call together, and "
                               "some might be out of batches; call it before or after the context")

    def _fresh(self, what: str) -> bool:
        """Whether this rank has just joined a running job, so that it must skip the call named `what`. The other ranks made
        that call before this rank joined."""
        if self._driver.connection.fresh:
            log.warning("%s: skipped, since this home has just joined a running job and received the state of its "
                        "workers", what)
        return self._driver.connection.fresh

    @property
    def step(self) -> int:
        """Number of training steps since the job began, dropped steps included.

        Each backward pass outside `no_sync` counts as a step. Under local steps, and in a script started without other workers,
        optimizer steps count instead (if attach() was given the optimizer). The value is 0 at the start, except in a home that
        joined a running job: `for step in range(session.step, steps)`.
        """
        return self._driver.connection.passes

    @property
    def joined(self) -> bool:
        """Whether this rank joined a job that was already running, and received weights and optimizer state from others."""
        return self._driver.connection.joined is not None

    @property
    def rank(self) -> int:
        """This worker's index among all workers of the job; 0 in a script started alone."""
        return self._driver.connection.rank

    @property
    def world(self) -> int:
        """The number of workers; 1 in a script started alone. When homes leave or join, `world` and `rank` change between two
        steps."""
        return self._driver.connection.world

    def stats(self) -> dict[str, float]:
        """Counters since attach(). The keys are the same with one worker, with DDP, with servers and with collectives.

        - `steps`: training steps, as in the property `step`.
        - `exchanges`: complete exchanges of gradients or weight changes: one per step, or one per `every` local steps.
        - `sent_nbytes`, `received_nbytes`: gradient payloads exchanged with servers and other nodes, without headers. Zeros
          that were not sent count. Collectives of torch.distributed are estimated: an all-reduce of b bytes over n ranks as a
          ring, 2 (n - 1) / n x b each way; others as direct sends. Sums inside a node do not count.
        - `encode_s`, `decode_s`: seconds in codecs.
        - `exposed_s`: seconds that training waited for results after backward passes.
        - `guard_s`: seconds of comparing compressed with exact gradients, for the quality guard.
        - `reconnects`, `resent_nbytes`, `kept_nbytes`: number of reconnections, bytes sent again after them, bytes kept in
          memory for that.
        """
        return self._driver.connection.stats()

    def close(self, reason: str = "") -> None:
        """Leaves the job. Called at exit if the script does not call it. A non-empty `reason` marks a failure: the other ranks
        fail with this text."""
        self._driver.detach()
        if self._clips is not None:
            self._clips.remove()
        self._driver.connection.close(reason)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self.close("" if error is None else cause_of(error))


def attach(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, plan: str | Path | Plan | Any = "auto",
    config: Config | dict[str, Any] | None = None, sync: str | Outer = "step", scaler: Any = None, process_group: Any = None,
    every: int | None = None, codes: str | None = None, overlap: str | None = None, fragments: int | None = None,
    max_norm: float | None = None, exact: bool | None = None,
) -> Session:
    """Averages the model's gradients over all workers of the job, in every backward pass from now on.

    `plan`: "auto", the path of a plan file, a Plan, or one codec for all tensors, as an object or as text ("fp16()").

    `optimizer`: source of the learning rate for codecs that correct for its changes. `scaler`: the GradScaler in use, so that
    residuals are kept without its scale.

    `every`: each rank takes that many steps on its own gradients, then the weight changes are exchanged and averaged. `codes`:
    "updates" compresses weight changes (pseudo-gradients) with every=1, too: for optimizers like Adam with sparse codecs. The
    default is "gradients".

    `overlap`: "round" runs an exchange during the next `every` steps. "forward", without `every`, lets backward() return at
    once; results arrive until the next forward pass needs them, and weights are the same bit for bit. `fragments`: the number
    of parts of the model that are exchanged one after the other.

    `sync`: an Outer, the outer optimizer that applies averaged weight changes. By default the average is applied as it is; for
    Adam and similar optimizers it is scaled to the norm of the ranks' changes (Outer(matched=True)).

    Under plan="auto" every step uses the average of all gradients. `exact=False` permits local steps if they reach a loss in at
    most 85 % of the time. `exact=True` refuses local steps, also if other arguments ask for them.

    `max_norm`: clips at the start of the optimizer's step, as clip_grad_norm_ before it would. `process_group`: the ranks to
    average over, or a DeviceMesh of one dimension; all of them call attach(). The default is the world, or the group of a DDP
    module. Under torchrun nothing else is needed; initial parameters are copied from rank 0.

    >>> session = attach(model, optimizer, plan=commlayer.compressors.topk(ratio=0.01))     # doctest: +SKIP
    """
    ddp, process_group = isinstance(model, DistributedDataParallel), group_of(process_group)
    if ddp and process_group not in (None, model.process_group):
        raise InvalidInput("E-PROCESS-GROUP",
                           "process_group: differs from the DistributedDataParallel module's group; leave it out")
    first = next(iter(model.parameters()), torch.empty(0)) if isinstance(model, nn.Module) else torch.empty(0)
    with Start(model.process_group if ddp else process_group, first.device) as start:
        if sync != "step" and not isinstance(sync, Outer):
            raise InvalidInput("E-SYNC-MODE", f"sync: got {sync!r}, allowed: 'step', or an Outer for plans of local steps")
        outer = sync if isinstance(sync, Outer) else usual(family_of(optimizer))
        settings = read_config(config)
        check_model(model)
        refuse_steps_in_backward(model.named_parameters())
        modes, wrapped = read_ways(every, codes, overlap=overlap, fragments=fragments, exact=exact), None
        if modes.updates:
            check_local(optimizer, f"every={every}" if every not in (None, 1) else "codes='updates'")
        norm = checked(max_norm, optimizer)
        if modes.overlap == "forward":
            check_overlap(model, parameters_of(model), optimizer)
        if isinstance(model, DistributedDataParallel):
            if not (modes.updates or (settings.min_workers and read_launch().home and silenceable(model))):
                state = HookState(plan, config=settings, scaler=scaler, optimizer=optimizer, exact=exact)
                forbids = forbids_of(model, parameters_of(model.module), optimizer, state)
                state.ways = DDPWays(model, optimizer, requested=modes, forbids=forbids, outer=outer,
                                     deadline_s=settings.deadline_s)
                return Session(_DDPDriver(model, state), clipping(parameters_of(model.module), optimizer, norm))
            check_silenceable(model)
            wrapped, model = model, model.module
        tensors = [*(p.data for p in model.parameters()), *model.buffers()]
        if not tensors:
            raise InvalidInput("E-MODEL-UNSUPPORTED", "the model has no parameters")
        job, device = job_of(model), device_of(tensors)
        check_dtypes(job)
        claim = Claim(parameters_of(model))
        must = {"wrapper": "none" if wrapped is None else "DistributedDataParallel", "sync": str(sync),
                "trained parameters": str(len(parameters_of(model))),
                "optimizer": "not given" if optimizer is None else "given"}
        try:
            forbids = forbids_of(wrapped or model, parameters_of(model), optimizer)
            connection = connect(job, device, start, plan=plan, config=settings, align=tensors, must=must, requested=modes,
                                 settings=settings_of(optimizer, model.named_parameters()),
                                 forbids=forbids, optimizer=family_of(optimizer), replica=Replica(model, optimizer, scaler))
        except BaseException:
            claim.release()
            raise
    connection.on_close.append(claim.release)
    driver = ModuleDriver(model, connection, optimizer=optimizer, scaler=scaler, config=settings, outer=outer,
                          ddp=None if wrapped is None else QuietDDP(wrapped), clips=norm is not None)
    driver.join_round()
    return Session(driver, clipping(parameters_of(model), optimizer, norm))


def switch(session: Session, plan: Plan) -> None:
    """Switches the session to another plan and its sync mode, between two steps. All ranks call it; the plan given on rank 0 is
    used.

    Residuals are sent under the new plan. Raises ValueError and changes nothing if the plan does not fit the job.
    """
    session._outside_join("switch()")
    session._driver.when_connected(lambda: _switch(session._driver.connection, plan))


def _switch(connection: JobContext, plan: Plan) -> None:
    go_over(connection, plan, requested=True)
    connection.terms.auto = False  # automatic tuning keeps a plan that the user chose
    assert connection.worker is not None
    connection.worker.recorder.switch(on=False)


class _DDPDriver:
    """A session's access to the gradients of a DistributedDataParallel module, through `comm_hook`."""

    def __init__(self, model: DistributedDataParallel, state: HookState) -> None:
        self._model, self._state = model, state
        state.claim(parameters_of(model.module))
        try:
            model.register_comm_hook(state, comm_hook)
        except BaseException:
            state.release()
            raise
        if model.process_group.size() > 1:
            state.module = model.module  # the hook finds the module in the first backward pass only
            state.watch(parameters_of(model.module))
        self._ended: tuple[JobContext, Observers] | None = None

    @property
    def connection(self) -> JobContext:
        return self._state.connection if self._ended is None else self._ended[0]

    @property
    def observers(self) -> Observers:
        return self._state.observers if self._ended is None else self._ended[1]

    def no_sync(self) -> AbstractContextManager[None]:
        return self._model.no_sync()

    def join(self) -> AbstractContextManager[None]:
        raise InvalidInput("E-UNEVEN-INPUTS",
                           "session.join() is only for plain modules; a DistributedDataParallel module has its own, which "
                           "works with commlayer: with ddp_model.join(): ...")

    def weight(self, n: float, total: float | None) -> None:
        self._state.weight(n, total)

    def report(self, loss: float | torch.Tensor) -> None:
        self._state.report(loss)

    def synchronize(self) -> None:
        """Does nothing: DDP ends every backward pass with the averages in `.grad`."""

    def drain(self) -> bool:
        return self._state.drain(list(self._model.parameters()))

    def when_connected(self, action: Callable[[], None]) -> None:
        self._state.when_connected(action)

    def detach(self) -> None:
        """Ends the hook's work. DDP cannot remove a hook and keeps its HookState, which drops the connection. The session keeps
        the connection for `inspect` and `stats`."""
        self._ended = self._ended or (self._state.connection, self._state.observers)
        self._state.detach()


def _amount(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise InvalidInput("E-WEIGHT", f"{what}: got {value!r}, but it must be a finite number, 0 or more")
    return number
