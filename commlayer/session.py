"""Defines attach() and the Session that it returns, which together train a PyTorch model over several workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, SupportsFloat

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlayer.autotune.controller import TuningController
from commlayer.autotune.start import start_tuning
from commlayer.cluster.processes import object_collectives
from commlayer.config import Config, read_config
from commlayer.engine.checkpoints import checkpoint, resharded_state
from commlayer.engine.components import Pending
from commlayer.engine.epochs.plan_switch import switch
from commlayer.engine.epochs.replica import Replica
from commlayer.engine.guards.model_checks import (
    Claim,
    check_dtypes,
    check_model,
    choose_bucket_device,
    refuse_steps_in_backward,
)
from commlayer.engine.job.job import DistributedJob, end_dropped
from commlayer.engine.model.model_tensors import describe_model, loss_scale, trained_parameters
from commlayer.engine.model.optimizer_settings import check_optimizer, read_optimizer_settings, scaler_settings
from commlayer.engine.model.optimizer_state import OptimizerMemory
from commlayer.engine.model.shard_parameters import find_shards
from commlayer.engine.observers.inspection import Inspection
from commlayer.engine.observers.trace import trace_once
from commlayer.engine.start.connect import connect
from commlayer.engine.start.plan_choice import requested_plan
from commlayer.engine.start.rendezvous import StartExchange, resolve_process_group
from commlayer.engine.step.driver import SoloDriver
from commlayer.engine.step.quiet_ddp import QuietDDP, check_silenceable
from commlayer.engine.step.step_loop import StepLoop
from commlayer.engine.sync.sync_modes import LocalSteps, check_forward, check_local, forbidden_by_model, requested_modes
from commlayer.engine.worker.clipping import Clipping, check_clip_grad_norm, clipping
from commlayer.errors import CommError, InvalidInput, exit_reason
from commlayer.observe.power import PowerMeter
from commlayer.optim import default_outer, family_of
from commlayer.records import Plan

log = logging.getLogger("commlayer")


class Session:
    """A session of one attached model. `attach()` returns it."""

    def __init__(self, driver: SoloDriver | StepLoop, replica: Replica, clips: Clipping | None = None) -> None:
        self._driver, self._replica, self._clips = driver, replica, clips
        self._context = driver.context
        self._inspection = Inspection(self._context)
        self._resumed = 0
        """Training step of the checkpoint that resume() loaded; 0 if none was loaded."""

    @property
    def inspect(self) -> Inspection:
        """Diagnostics: the current plan, the decisions with their reasons, traces and measurements."""
        return self._inspection

    def no_sync(self) -> AbstractContextManager[None]:
        """Context manager for gradient accumulation: backward passes inside it exchange nothing. The next backward pass after
        it averages the accumulated gradients."""
        return self._driver.no_sync()

    def join(self) -> AbstractContextManager[None]:
        """Context manager for ranks with unequal numbers of batches. All ranks enter it, around the loop over batches.

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

        A script with several sessions, such as a GAN's, enters all of them: `with first.join(), second.join():`.

        Under local steps, a rank that leaves the loop first exchanges its last steps, and then takes part in the others'
        exchanges with weight 0. At the end all ranks have equal weights once flush() has exchanged what still overlaps. Each
        rank keeps its own optimizer state, as always under local steps. Inside the context, ranks wait for one another at each
        exchange.

        The plan does not change while a rank is out of batches. Under sync="forward", backward() waits for results inside the
        context. Schedulers are not copied: step them after the context. An exception inside ends the session, and the other
        ranks fail with its reason.
        """
        return self._driver.join()

    def weight(self, n: float) -> None:
        """Sets the weight of this worker's gradients from now on: its number of samples or tokens, in the same unit on all
        workers.

        The weight is divided by the setting `batch`, so that encoded values stay in the range of gradients. If n is large and
        gradients are sent as fp16, set `batch` to the planned batch size. Weights may change in every step: nothing is sent
        or encoded twice.
        """
        self._driver.weight(_amount(n))

    def log_loss(self, loss: float | torch.Tensor) -> None:
        """Passes a step's training loss to the event stream (`commlayer top`), and to the quality guard, which compares later
        losses with it. A tensor is read later, so the call does not wait for the device."""
        if not isinstance(loss, SupportsFloat) or (isinstance(loss, torch.Tensor) and (loss.numel() != 1 or loss.is_complex())):
            got = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise InvalidInput("E-ARGUMENT", f"loss: got {got}, allowed: a number, or a tensor with one element such as "
                                             "loss.mean()")
        self._context.stream.loss(loss)
        for controller in self._context.components.of(TuningController):
            controller.report(loss)

    def synchronize(self) -> None:
        """Averages gradients accumulated inside `no_sync`, or written into `.grad` by the script.

        Not needed after a backward pass outside `no_sync`, which averages by itself.
        """
        self._driver.synchronize()

    def flush(self) -> bool:
        """Completes exchanges whose averages the plan applies one step late: `if session.flush(): optimizer.step()`. All ranks
        call it between two steps.

        Waits for these averages and writes them into `.grad`; parameters without an average get None. Returns True if there
        were any such averages. Under local steps it exchanges the weight changes at once, and no optimizer step follows. Call
        it before an evaluation of the newest weights, or at the end.
        """
        self._outside_join("flush()")
        return self._driver.flush()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager for evaluation: inside it the model has weights and buffers that are the same on all ranks.

        Under local steps these are the averages of the last exchange, without the steps since then; the rank's own weights come
        back at the end. In all other cases the weights are the same anyway, and nothing changes. The method sends nothing, so
        ranks need not call it together. Do not train inside it.
        """
        with self._replica.averaged(self._context):
            yield

    def checkpoint(self, directory: str | Path, *, extra: Mapping[str, Any] = MappingProxyType({}), model: bool = True) -> None:
        """Writes a checkpoint: model, optimizer, GradScaler, step, and the codec state (residuals, momenta) of all ranks and
        servers. All ranks call it between the same two steps. A run that `resume`s equals one that continued, bit for bit.

        `extra`: further objects by name that have state_dict() and load_state_dict(), such as a sampler or a scheduler; their
        states are kept for each rank. `model`: False leaves out model, optimizer and GradScaler, for frameworks that save them
        themselves. The directory can be on a shared disk, or on one disk for each machine. The previous checkpoint in the
        directory is deleted once the new checkpoint is complete on all ranks. Under local steps it calls `flush()` first.
        """
        self._outside_join("checkpoint()")
        if not self._skip_after_join("checkpoint()"):
            checkpoint.save(self._context, self._replica, Path(directory), extra, model=model)

    def resume(self, directory: str | Path, *, extra: Mapping[str, Any] = MappingProxyType({})) -> bool:
        """Loads the newest complete checkpoint in `directory`. All ranks call it between two steps, usually right after
        attach(). Returns False, and changes nothing, if `directory` contains no checkpoint yet.

        Machines without the files receive the model from a machine that has them. Number of workers and plan can differ from
        those in the checkpoint: the residuals are then divided among this job's ranks.
        """
        self._outside_join("resume()")
        if self._skip_after_join("resume()"):
            return True
        directory, context = Path(directory), self._context
        try:
            context.components.complete(Pending.RUNNING)
            found = checkpoint.find(context.groups, context.rank, context.world, directory)
            if found is None:
                if context.rank == 0:
                    log.warning("resume(): there is no checkpoint in %s yet: training starts from the beginning", directory)
                return False
            local = checkpoint.load_training(context.groups, context.rank, found, self._replica, extra, context.site.shards)
        except CommError as error:
            raise checkpoint.not_loaded(context, directory, error) from None
        self._resumed = found.mark.step
        context.components.complete(Pending.STEP)
        checkpoint.load_codecs(context, found, directory, self._replica, local)
        context.components.loaded()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps, and residuals in tensors that are divided among all ranks, for
        torch.distributed.checkpoint: `dcp.save({"model": ..., "optimizer": ..., "commlayer": session})`. All ranks call it
        together, between the same two steps. `dcp.load` with another number of ranks divides the residuals among them."""
        self._outside_join("state_dict()")
        self._context.components.complete(Pending.ALL_STEPS)
        return resharded_state.collect_training_state(self._context, self._replica)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `dcp.load` has read into a result of `state_dict()`. All ranks call it together."""
        self._outside_join("load_state_dict()")
        resharded_state.load(self._context, self._replica, state)
        self._resumed = self._context.passes
        self._context.components.loaded()

    def switch(self, plan: Plan) -> None:
        """Switches to another plan and its sync mode, between two steps. All ranks call it; the plan given on rank 0 is used.

        Residuals that are not sent yet are sent under the new plan. Raises ValueError and changes nothing if the plan does not
        fit the job.
        """
        self._outside_join("switch()")
        context = self._context
        if not isinstance(context, DistributedJob):
            raise InvalidInput("E-PLAN-SWITCH", "switching to another plan needs other workers, but this job has only one")
        context.components.complete(Pending.STEP)
        switch(context, plan, requested=True)
        context.note_plan("requested")
        context.terms.auto = False  # automatic tuning keeps a plan that the user chose
        context.worker.recorder.switch(on=False)

    def _outside_join(self, what: str) -> None:
        self._context.check_process()
        if self._driver.in_join:
            raise InvalidInput("E-UNEVEN-INPUTS",
                               f"{what} must not be called inside session.join(): all ranks make this call together, and "
                               "some might be out of batches; call it before or after the context")

    def _skip_after_join(self, what: str) -> bool:
        """Returns True if this rank has just joined a running job, so that it must skip the call named `what`: the other ranks
        made that call before this rank joined."""
        if self._context.fresh:
            log.warning("%s: skipped, since this home has just joined a running job and received the state of its "
                        "workers", what)
        return self._context.fresh

    @property
    def step(self) -> int:
        """Number of training steps since the job began, dropped steps included.

        Each backward pass outside `no_sync` counts as a step. Under local steps, and in a script started without other workers,
        optimizer steps count instead (if attach() was given the optimizer). The value is 0 at the start, except in a home that
        joined a running job: `for step in range(session.step, steps)`.
        """
        return max(self._context.passes, self._resumed)

    @property
    def joined(self) -> bool:
        """True: this rank joined a job that was already running, and received weights and optimizer state from other ranks."""
        return self._context.joined is not None

    @property
    def rank(self) -> int:
        """This worker's index among all workers of the job; 0 in a script started alone."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """The number of workers; 1 in a script started alone. When homes leave or join, `world_size` and `rank` change between
        two steps."""
        return self._context.world

    def metrics(self) -> dict[str, float]:
        """Counters since attach(). The keys are the same with one worker, with DDP, with servers and with collectives.

        - `steps`: training steps, as in the property `step`.
        - `exchanges`: complete exchanges of gradients or weight changes: one per step, or one per `every` local steps.
        - `sent_nbytes`, `received_nbytes`: gradient payloads exchanged with servers and other nodes, without headers. Zeros
          that were not sent count. Collectives of torch.distributed are estimated: an all-reduce of b bytes over n ranks as a
          ring, 2 (n - 1) / n x b each way; others as direct sends. Sums inside a node do not count.
        - `encode_s`, `decode_s`: seconds in codecs.
        - `exposed_s`: seconds that training waited for results after backward passes.
        - `exchange_s`: seconds from sending an exchange's first bucket to the arrival of its last result. The part of it that
          is not in `exposed_s` was hidden behind computation.
        - `guard_s`: seconds of comparing compressed with exact gradients, for the quality guard.
        - `noise_scale`: the gradient noise scale in batches of one worker, as the quality guard's comparisons show it; 0: not
          known. If it is far above the number of workers, more workers save nearly as many steps as they add data.
        - `agreement`: mean cosine between two workers' weight changes under local steps with norm-matched averaging; 0: not
          known. See docs/explanation/plans.md.
        - `reconnects`, `resent_nbytes`, `kept_nbytes`: number of reconnections, bytes sent again after them, bytes kept in
          memory for that.
        """
        return self._context.metrics()

    def close(self, reason: str = "") -> None:
        """Leaves the job. If the script does not call it, the end of the process does, or the end of both model and session. A
        non-empty `reason` marks a failure: the other ranks fail with this text."""
        self._driver.detach()
        if self._clips is not None:
            self._clips.remove()
        self._context.close(reason)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self.close("" if error is None else exit_reason(error))


@torch.inference_mode(mode=False)  # its buffers are written outside an inference_mode() around the call
def attach(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, compression: Any = None,
    sync: str | LocalSteps | None = None, plan: str | Path | Plan | None = None, grad_scaler: Any = None,
    clip_grad_norm: float | None = None, process_group: Any = None, steps: int | None = None,
    config: Config | dict[str, Any] | None = None,
) -> Session:
    """Averages the model's gradients over all workers of the job, in every backward pass from now on.

    `optimizer`: the script's optimizer. It is needed for local steps, sync="forward", checkpoints of its state, and codecs that
    follow the learning rate.

    `compression`: one codec for all tensors, as text ("int4", "topk(ratio=0.01)") or from commlayer.compressors. `plan`: the
    path of a plan file, or a Plan. Without both, commlayer measures and chooses a codec and a path for each bucket.

    `sync`: how often workers exchange. "step": every step applies the average of all gradients. "forward": the same, but
    backward() returns at once and results arrive until the next forward pass needs them; weights are the same bit for bit.
    LocalSteps(every=H): workers take H steps of their own, then exchange weight changes. "auto": commlayer can choose local
    steps if they reach a loss sooner. The default is the mode of the plan, and "step" without a plan; a line in the log says
    when "auto" would reach a loss clearly sooner.

    `grad_scaler`: the GradScaler in use, so that residuals do not change with its scale. `clip_grad_norm`: clips at the start
    of the optimizer's step, like a call of torch.nn.utils.clip_grad_norm_ before that step. `process_group`: the ranks to
    average over, or a DeviceMesh of one dimension; all of them call attach(). The default is the world, or the group of a DDP
    module. `steps`: number of training steps that the script will take, for the time left that `commlayer top` shows. `config`:
    settings. Under torchrun nothing else is needed; initial parameters are copied from rank 0.

    >>> session = attach(model, optimizer, compression="topk(ratio=0.01)")                      # doctest: +SKIP
    """
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise InvalidInput("E-ARGUMENT", f"steps: got {steps!r}, allowed: a whole number of training steps, 1 or more")
    end_dropped()
    ddp, process_group = model if isinstance(model, DistributedDataParallel) else None, resolve_process_group(process_group)
    if ddp is not None and process_group not in (None, ddp.process_group):
        raise InvalidInput("E-PROCESS-GROUP",
                           "process_group: differs from the DistributedDataParallel module's group; leave it out")
    first = next(iter(model.parameters()), torch.empty(0)) if isinstance(model, nn.Module) else torch.empty(0)
    with StartExchange(process_group if ddp is None else ddp.process_group, first.device) as start:
        modes, requested = requested_modes(sync), requested_plan(compression, plan)
        outer = (sync.outer if isinstance(sync, LocalSteps) else None) or default_outer(family_of(optimizer))
        settings = read_config(config)
        check_model(model)
        refuse_steps_in_backward(model.named_parameters())
        if modes.updates:
            check_local(optimizer)
        norm = check_clip_grad_norm(clip_grad_norm, optimizer)
        named = trained_parameters(model)
        if modes.overlap == "forward":
            check_forward(model, named, optimizer)
        check_optimizer(optimizer)
        forbids = forbidden_by_model(model, named, optimizer)
        if ddp is not None:
            check_silenceable(ddp)
            model = ddp.module
            named = trained_parameters(model)
        shards = find_shards(model, process_group)
        tensors = [*(p.data for p in model.parameters()), *model.buffers()]
        if not tensors:
            raise InvalidInput("E-MODEL-UNSUPPORTED", "the model has no parameters")
        job, device = describe_model(model), choose_bucket_device(tensors)
        check_dtypes(job)
        claim, replica = Claim(named), Replica(model, optimizer, grad_scaler)
        object_collectives.allow(replica.most_nbytes)
        must = {"optimizer": "not given" if optimizer is None else "given",
                "clip_grad_norm": "not given" if norm is None else str(norm),
                "grad_scaler": scaler_settings(grad_scaler)}
        try:
            context = connect(job, device, start, OptimizerMemory([p for _, p in named], optimizer, outer), plan=requested,
                              config=settings, align=tensors, must=must, requested=modes, forbids=forbids, replica=replica,
                              shards=shards, settings=read_optimizer_settings(optimizer, model.named_parameters())
                              | {"loss scale of the GradScaler": f"{loss_scale(grad_scaler):g}"})
        except BaseException:
            claim.release()
            raise
    context.on_close.append(claim.release)
    context.stream.total_steps = steps or 0
    driver: SoloDriver | StepLoop
    if isinstance(context, DistributedJob):
        driver = StepLoop(model, context, optimizer=optimizer, scaler=grad_scaler, config=settings, outer=outer,
                          ddp=None if ddp is None else QuietDDP(ddp), clips=norm is not None)
        if settings.join and context.groups.local == 0:  # else nothing reads its events
            context.on_close.append(PowerMeter(context.stream.log).close)
        start_tuning(context, settings)
    else:
        driver = SoloDriver(model, context, optimizer)
    trace_once(context, settings.trace, planning=bool(context.components.of(TuningController)))
    return Session(driver, replica, clipping(named, optimizer, norm))


def _amount(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise InvalidInput("E-WEIGHT", f"weight: got {value!r}, but it must be a finite number, 0 or more")
    return number
