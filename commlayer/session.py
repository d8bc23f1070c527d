"""attach() and what it returns: a PyTorch model trains through commlayer. engine/step_loop.py runs the steps."""

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
from commlayer.engine.accepted_models import Claim, check_dtypes, check_model, device_of, refuse_steps_in_backward
from commlayer.engine.allowed_ways import check_local, check_overlap, forbids_of
from commlayer.engine.clipping import Clipping, checked, clipping
from commlayer.engine.connection import Connection
from commlayer.engine.ddp_ways import DDPWays
from commlayer.engine.inspection import Inspected, Inspection
from commlayer.engine.model_job import job_of, parameters_of
from commlayer.engine.module_driver import ModuleDriver
from commlayer.engine.observers import Observers, Place
from commlayer.engine.optimizer_settings import settings_of
from commlayer.engine.quiet_ddp import QuietDDP, check_silenceable, silenceable
from commlayer.engine.rendezvous import Start, group_of
from commlayer.engine.replica import Replica
from commlayer.engine.start import connect
from commlayer.engine.switch import switch as go_over
from commlayer.engine.ways import read_ways
from commlayer.errors import InvalidInput, cause_of
from commlayer.optim import Outer, family_of, usual
from commlayer.records import Plan

log = logging.getLogger("commlayer")


class Driver(Inspected, Protocol):
    """How a session gets at gradients: hooks on the parameters, or DDP's communication hook."""

    def no_sync(self) -> AbstractContextManager[None]: ...

    def join(self) -> AbstractContextManager[None]: ...

    def weight(self, n: float, total: float | None) -> None: ...

    def report(self, loss: float | torch.Tensor) -> None: ...

    def synchronize(self) -> None: ...

    def drain(self) -> bool: ...

    def detach(self) -> None: ...


class Session:
    """One attached model. Made by `attach`; `switch` goes over to another plan."""

    def __init__(self, driver: Driver, clips: Clipping | None = None) -> None:
        self._driver, self._inspection, self._clips = driver, Inspection(driver), clips

    @property
    def inspect(self) -> Inspection:
        """The plan in force, what was decided and why, traces, and what else is not needed every day."""
        return self._inspection

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate locally; the next one outside synchronises what has gathered."""
        return self._driver.no_sync()

    def join(self) -> AbstractContextManager[None]:
        """For ranks with unequal numbers of batches, on a plain module. All ranks enter it, around the loop over batches.

        >>> with session.join():                                    # doctest: +SKIP
        ...     for x, y in loader:
        ...         optimizer.zero_grad()
        ...         loss_of(model(x), y).backward()
        ...         optimizer.step()

        A rank that leaves the loop takes part in the steps of the others until all have left. Its gradients count with weight
        0, so an average is over the ranks that still have batches. At the end all ranks have the weights, buffers, optimizer
        state and GradScaler state of a rank that had the last batch. Residuals of error feedback stay with their ranks. While
        a rank is out of batches, the plan does not change. Under overlap="forward" backward() waits for results inside.
        Schedulers are not copied: step these after the context. An exception inside ends the session: the other ranks fail
        with its reason. Local steps, jobs whose workers may leave, and DistributedDataParallel, which has its own join(), are
        refused.
        """
        return self._driver.join()

    def weight(self, n: float, total: float | None = None) -> None:
        """How much this worker's gradients count from now on: its number of samples, or of tokens; all workers use one unit.

        It is divided by the setting `batch`, so that what is coded stays in the range of gradients: set that to the planned
        batch where n is large and gradients go as fp16. `total`: the sum over all workers, where the script knows it. Without
        it, a step in which that sum is not what it was in the step before sends what residuals go with twice.
        """
        own, whole = _amount("weight", n), None if total is None else _amount("total", total)
        if whole is not None and whole < own:
            raise InvalidInput("E-WEIGHT",
                               f"total {whole:g}: less than this worker's own weight {own:g}; give the sum over all workers")
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
        of all that was learnt, or at the end. `save_residuals` needs no drain, but between two exchanges models differ from
        rank to rank.
        """
        self._outside_join("drain()")
        return self._driver.drain()

    def state_dict(self) -> dict[str, Any]:
        """This worker's codec state (residuals among it) and step; servers' state is in `save_residuals`."""
        return checkpoint.worker_state(self._driver.connection)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before training, or at the step that it was taken at; to go back in a running job all ranks call `load_residuals`."""
        if not self._fresh("load_state_dict()"):
            self._driver.when_connected(lambda: checkpoint.restore_worker(self._driver.connection, state))

    def save_residuals(self, directory: str | Path) -> None:
        """Writes what codecs keep between steps (residuals, momenta), for each rank and server.

        The model and the optimizer are not in it: the script saves them itself, at the same step. All ranks call it. Each save
        has its own folder; the save before is deleted once this one is complete on all ranks.
        """
        self._outside_join("save_residuals()")
        if not self._fresh("save_residuals()"):
            checkpoint.save(self._driver.connection, Path(directory))

    def load_residuals(self, directory: str | Path) -> None:
        """Loads the newest complete save in `directory`, under the same plan and world. All ranks call it before training."""
        self._outside_join("load_residuals()")
        if not self._fresh("load_residuals()"):
            self._driver.when_connected(lambda: self._load(Path(directory)))

    def _load(self, directory: Path) -> None:
        checkpoint.load(self._driver.connection, directory)
        for drift in self._driver.observers.at(Place.PARAMETER_DRIFT):
            drift.loaded()

    def _outside_join(self, what: str) -> None:
        if self._driver.connection.in_join:
            raise InvalidInput("E-UNEVEN-INPUTS",
                               f"{what} inside session.join(): all ranks make this call together, and some may be out of "
                               "batches; allowed: before or after it")

    def _fresh(self, what: str) -> bool:
        """Whether this rank has just joined a running job: the others, who are past that, take no part in it."""
        if self._driver.connection.fresh:
            log.warning("%s: nothing is done, since this home has joined a running job, and has what its workers have", what)
        return self._driver.connection.fresh

    @property
    def step(self) -> int:
        """How many training steps the job has made since it began, dropped ones among them. Backward passes outside of no_sync
        count; under local steps optimizer steps do, and alone, if an optimizer was given. At the start that is 0, but in a home
        that has joined a running job:
        `for step in range(session.step, steps)`."""
        return self._driver.connection.passes

    @property
    def rank(self) -> int:
        """This worker's place among all of the job; 0 in a script that is started alone."""
        return self._driver.connection.rank

    @property
    def world(self) -> int:
        """How many workers there are: 1 alone. Where homes leave and come, it changes behind a step, and `rank` with it."""
        return self._driver.connection.world

    def stats(self) -> dict[str, float]:
        """Counters since the start. The keys are the same alone, with DDP, with servers and with collectives.

        `steps`: training steps, as in `step`. `exchanges`: those of gradients or changes of weights that are whole: one a step,
        or under local steps one for `every` steps.
        `sent_nbytes`, `received_nbytes`: payloads of gradients that this rank exchanged with servers and with other nodes, with
        zeros that did not travel, without headers. A torch.distributed collective counts by a formula: an all-reduce of b
        bytes over n ranks as a ring, 2 (n - 1) / n x b each way; others as direct sends. Sums inside a node do not count.
        `encode_s`, `decode_s`: seconds in codecs. `exposed_s`: seconds that training waited for results, after backward passes.
        `guard_s`: seconds of comparing with exact gradients (docs/tuning.md).
        `reconnects`, `resent_nbytes`, `kept_nbytes`: connections that were made again, what was sent again over them, and what
        is kept for that.
        """
        return self._driver.connection.stats()

    def close(self, reason: str = "") -> None:
        """Leaves the job; called at exit, too. A `reason` says that the end was no orderly one: the others fail with it."""
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
    """Averages the model's gradients over all workers of the job, from now on, in every backward pass.

    `plan`: "auto", the path of a plan file, a Plan, or one codec for everything, as such or as a plan spells it ("fp16()").
    `scaler`: the GradScaler in use, so that residuals are kept without its scale; from `optimizer` comes the learning rate, for
    codecs that correct for its changes.
    `every`: each rank takes so many steps on its own gradients, then the changes of weights are exchanged and averaged.
    `codes`: "updates" does that with every=1, too: for optimizers like Adam under sparse codecs. Otherwise "gradients".
    `overlap`: "round" lets such an exchange run while the next step, or `every`, are taken. `fragments`: by parts, in turns.
    "forward", without `every`, lets backward() return at once and results come in until the next forward pass needs them, with
    the same weights bit for bit. `max_norm`: clips as the optimizer's step begins, as clip_grad_norm_ ahead of it would.
    `sync`: an Outer says what is done with the average of such an exchange; otherwise that is taken as it is, except under
    Adam and its like, where it is made as long as the changes that it is of (Outer(matched=True)).
    Under plan="auto" every step uses the average of all gradients. `exact=False` lets the automatic plan take local steps where
    they reach a loss in at most 85 % of the time. `exact=True` refuses local steps from whoever asks for them.
    `process_group`: the ranks to average over, all of which call this; otherwise all of the world, or those of a DDP module.
    It may be a DeviceMesh of one dimension.
    Under torchrun nothing else is needed; initial parameters are taken from rank 0.

    >>> session = attach(model, optimizer, plan=commlayer.compressors.topk(ratio=0.01))     # doctest: +SKIP
    """
    ddp, process_group = isinstance(model, DistributedDataParallel), group_of(process_group)
    if ddp and process_group not in (None, model.process_group):
        raise InvalidInput("E-PROCESS-GROUP",
                           "process_group: another one than that of the DistributedDataParallel module; leave it out")
    first = next(iter(model.parameters()), torch.empty(0)) if isinstance(model, nn.Module) else torch.empty(0)
    with Start(model.process_group if ddp else process_group, first.device) as start:
        if sync != "step" and not isinstance(sync, Outer):
            raise InvalidInput("E-SYNC-MODE", f"sync: got {sync!r}, allowed: 'step', or an Outer for plans of local steps")
        outer = sync if isinstance(sync, Outer) else usual(family_of(optimizer))
        read = read_config(config)
        check_model(model)
        refuse_steps_in_backward(model.named_parameters())
        asked, wrapped = read_ways(every, codes, overlap=overlap, fragments=fragments, exact=exact), None
        if asked.updates:
            check_local(optimizer, f"every={every}" if every not in (None, 1) else "codes='updates'")
        norm = checked(max_norm, optimizer)
        if asked.overlap == "forward":
            check_overlap(model, parameters_of(model), optimizer)
        if isinstance(model, DistributedDataParallel):
            if not (asked.updates or (read.min_workers and read_launch().home and silenceable(model))):
                state = HookState(plan, config=read, scaler=scaler, optimizer=optimizer, exact=exact)
                forbids = forbids_of(model, parameters_of(model.module), optimizer, state)
                state.ways = DDPWays(model, optimizer, asked=asked, forbids=forbids, outer=outer, deadline_s=read.deadline_s)
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
            connection = connect(job, device, start, plan=plan, config=read, align=tensors, must=must, asked=asked,
                                 settings=settings_of(optimizer, model.named_parameters()),
                                 forbids=forbids, optimizer=family_of(optimizer), replica=Replica(model, optimizer, scaler))
        except BaseException:
            claim.release()
            raise
    connection.on_close.append(claim.release)
    made = ModuleDriver(model, connection, optimizer=optimizer, scaler=scaler, config=read, outer=outer,
                        ddp=None if wrapped is None else QuietDDP(wrapped), clips=norm is not None)
    made.join_round()
    return Session(made, clipping(parameters_of(model), optimizer, norm))


def switch(session: Session, plan: Plan) -> None:
    """Goes over to another plan, and its way of exchanging steps, between two steps. All ranks call it; rank 0's plan counts.

    What residuals owe is paid under the new plan. ValueError, and nothing changed, if the plan does not fit the job.
    """
    session._outside_join("switch()")
    session._driver.when_connected(lambda: _switch(session._driver.connection, plan))


def _switch(connection: Connection, plan: Plan) -> None:
    go_over(connection, plan, asked=True)
    connection.terms.auto = False  # a plan that somebody asked for is kept
    assert connection.worker is not None
    connection.worker.recorder.switch(on=False)


class _DDPDriver:
    """A session's way to the gradients of a DistributedDataParallel module: the hook above."""

    def __init__(self, model: DistributedDataParallel, state: HookState) -> None:
        self._model, self._state = model, state
        state.claim(parameters_of(model.module))
        try:
            model.register_comm_hook(state, comm_hook)
        except BaseException:
            state.release()
            raise
        if model.process_group.size() > 1:
            state.module = model.module  # the hook learns of it in the first backward pass only
            state.watch(parameters_of(model.module))
        self._ended: tuple[Connection, Observers] | None = None

    @property
    def connection(self) -> Connection:
        return self._state.connection if self._ended is None else self._ended[0]

    @property
    def observers(self) -> Observers:
        return self._state.observers if self._ended is None else self._ended[1]

    def no_sync(self) -> AbstractContextManager[None]:
        return self._model.no_sync()

    def join(self) -> AbstractContextManager[None]:
        raise InvalidInput("E-UNEVEN-INPUTS",
                           "session.join() is for plain modules; a DistributedDataParallel module has its own, which works "
                           "with "
                           "commlayer: with ddp_model.join(): ...")

    def weight(self, n: float, total: float | None) -> None:
        self._state.weight(n, total)

    def report(self, loss: float | torch.Tensor) -> None:
        self._state.report(loss)

    def synchronize(self) -> None:
        """Nothing to do: DDP ends every backward pass with the averages in place."""

    def drain(self) -> bool:
        return self._state.drain(list(self._model.parameters()))

    def when_connected(self, action: Callable[[], None]) -> None:
        self._state.when_connected(action)

    def detach(self) -> None:
        """DDP has no way to take a hook out again: it keeps the state, which drops what this session still shows."""
        self._ended = self._ended or (self._state.connection, self._state.observers)
        self._state.detach()


def _amount(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise InvalidInput("E-WEIGHT", f"{what} {value!r}: allowed is a finite number >= 0")
    return number
