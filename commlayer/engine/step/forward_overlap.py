"""Implements sync="forward": backward() returns before averages arrive, and each update is applied on arrival. Results are
bit for bit the same as without overlap.

    launch        after backward: `.grad` gets placeholders (pending-gradient marks) that raise if they are used
    step()        the optimizer applies the averages that have arrived; it keeps its hyperparameters for the others
    forward       each module waits for its own tensors; the model as a whole waits for tensors of modules that are not called
    end           when the next backward pass begins: the remaining averages arrive, the step ends, observers read it

If a weight is used outside its module, a deferred tensor (deferred.py) waits for it. hooks/gradient_mark.py handles access to
pending gradients. Some steps need all averages at once: a loss scaler, a closure, observers of sums or times. A step of this
kind waits for its averages at the end of its backward pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from commlayer.engine.hooks.aliases import gradient_held, has_later_hook, hooked_by_script, weight_held
from commlayer.engine.hooks.callbacks import weakly
from commlayer.engine.hooks.forward_order import ModuleHook, before_forward
from commlayer.engine.hooks.gradient_mark import GradientMark, GradientMarks
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.model.optimizers import find_closure, watch
from commlayer.engine.step.deferred import defer, undefer
from commlayer.engine.worker.partial_step import PartialStep
from commlayer.errors import CommError, InvalidInput, StepAbandoned
from commlayer.optim.pieces import Group, copy_hyperparameters, step_piece

log = logging.getLogger("commlayer")


class ForwardOverlap:
    """Overlaps the exchanges of one attached module with its next forward pass. At most one step's exchange is running."""

    def __init__(
        self, model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, scaler: Any,
        context: DistributedJob, deadline_s: float, buffers: Sequence[torch.Tensor], *, clips: bool,
        launch: Callable[[Sequence[torch.Tensor | None]], None], ended: Callable[..., None], observe: Callable[[], None],
    ) -> None:
        """`named`: the parameters with their names, in the order of their numbers. `clips`: True if the optimizer's step begins
        with clipping by the norm of all gradients. `launch` sends gradients and buffers. `ended(known, dropped=...)` is called
        when all averages of a step have arrived, `observe` later, before the next step."""
        self._parameters = [p for _, p in named]
        # If the user did not ask for this overlap, the script may use gradients as under any other plan.
        self._waits = context.terms.requested.overlap != "forward"
        self._marks = GradientMarks(named, self._final if self._waits else None)
        self._numbers = {id(p): number for number, p in enumerate(self._parameters)}
        self._optimizer, self._scaler, self._context, self._clips = optimizer, scaler, context, clips
        self._deadline_s, self._launch, self._ended, self._observe = deadline_s, launch, ended, observe
        self._lock = threading.RLock()
        self._running: PartialStep | None = None
        self._stepping = self._unobserved = self._shared = False
        self._warned: set[str] = set()
        self._error: CommError | None = None
        self._seen: set[int] = set()
        """Numbers of the tensors in modules that were called since the last call of the complete model."""
        self._model_called = False
        self._handles: list[Any] = []
        self._hook(model, buffers)

    def _hook(self, model: nn.Module, buffers: Sequence[torch.Tensor]) -> None:
        numbers = self._numbers | {id(b): len(self._parameters) + i for i, b in enumerate(buffers)}
        for module in model.modules():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if (tensor_numbers := [numbers[id(tensor)] for tensor in tensors if id(tensor) in numbers]) and module is not model:
                hook = ModuleHook(partial(self._before_module, tensor_numbers), compiled=False)
                self._handles.append(before_forward(module, hook, prepend=True))
        # Compiled code calls no module hooks, so its tensors are waited for before it runs.
        model_hook = ModuleHook(torch.compiler.disable(partial(self._before_model, set(numbers.values()))), compiled=True)
        self._end_watch = watch(self._before_step, self._after_step)
        self._handles += [
            before_forward(model, model_hook, prepend=True),
            *(p.register_hook(partial(self._before_accumulation, p)) for p in self._parameters),
            self._optimizer.register_state_dict_pre_hook(lambda _: self._finish_updates()),
            self._optimizer.register_load_state_dict_pre_hook(lambda *_: self._finish_updates()),
        ]

    def can_overlap(self) -> bool:
        """Returns True if the step whose backward pass has just ended can overlap with the next forward pass."""
        if self._scaler is not None and self._scaler.is_enabled():
            return self._warn_once("a GradScaler needs all gradients to decide whether to skip a step")
        if self._stepping:
            return self._warn_once("the optimizer's closure needs its gradients at once")
        return True

    def _warn_once(self, why: str) -> bool:
        if why not in self._warned:
            self._warned.add(why)
            log.warning("sync='forward' has no effect in this step: %s, so backward() waits for the averages", why)
        return False

    def launch(self, buffers: Sequence[torch.Tensor]) -> None:
        """Starts to exchange all gradients and buffers, without waiting. Replaces `.grad` by placeholders."""
        with self._lock:
            for p, mark in zip(self._parameters, self._marks, strict=True):
                if p.dtype != mark.dtype:
                    raise InvalidInput("E-MODEL-CHANGED",
                                       f"parameter {mark.owner} has dtype {p.dtype}, but had {mark.dtype} when the model was "
                                       "attached: sync='forward' does not support this change; convert the model before "
                                       "attach()")
            # The condition can differ between ranks. A step completed here is still observed at the same point as on other
            # ranks.
            finish = self._waits and (self._shared or any(p.grad is None or has_later_hook(p) for p in self._parameters))
            self._shared = False
            # The exchange reads and writes detached aliases of the buffers, because use of an alias does not wait.
            tensors = [*(p.grad for p in self._parameters), *(b.detach() for b in buffers)]
            self._launch(tensors)
            self._running = PartialStep(self._context.worker, tensors, self._parameters, buffers, self._deadline_s)
            for p, mark in zip(self._parameters, self._marks, strict=True):
                p.grad = mark.fresh()
            for number, buffer in enumerate(buffers, len(self._parameters)):
                defer(buffer, weakly(self._wait_for, (number,)))
            if finish:
                self.end()

    def _before_step(self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if optimizer is not self._optimizer:
            return
        with self._lock:
            self._stepping = True
            try:
                if self._running is not None:
                    self._withhold(self._running, args, kwargs)
            except BaseException:
                self._stepping = False  # the step will not run
                raise
            undefer(self._optimizer)

    def _withhold(self, step: PartialStep, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Writes the averages that have arrived, and makes the optimizer skip all other parameters. Waits for all averages if a
        closure, clipping or a hook of the script needs them in this step."""
        step.withheld = []
        closure = find_closure(args, kwargs)
        if step.deferred or self._clips or closure is not None or hooked_by_script(self._optimizer):
            self._take(step, step.wait_all)
            self._drop_not_finite(step)
            return
        self._take(step, step.arrived)
        self._drop_not_finite(step)
        numbered = [*enumerate(zip(self._parameters, self._marks, strict=True))]
        # This precedes the next loop, because the wait can receive further averages.
        if zeroed := [number for number, (p, mark) in numbered if p.grad is mark and mark.zeroed]:
            self._take(step, partial(step.wait, zeroed))
        # The optimizer applies nothing for zeroed gradients, but does step gradients that the script replaced.
        step.discarded -= {number for number, (p, mark) in numbered if p.grad is not None and not mark.zeroed}
        for number, (p, mark) in numbered:
            if p.grad is mark:
                step.withheld.append(number)
                p.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer is not self._optimizer:
            return
        with self._lock:
            self._stepping = False
            if (step := self._running) is None:
                return
            withheld, step.withheld = set(step.withheld), []
            step.applied.update(number for number, p in enumerate(self._parameters)
                                if number not in withheld and number not in step.discarded and p.grad is not None)
            exposed = []
            for group in optimizer.param_groups:
                numbers = withheld.intersection(self._numbers.get(id(p), -1) for p in group["params"])
                values = copy_hyperparameters(group) if numbers else {}
                for number in sorted(numbers):
                    step.deferred[number] = values
                    self._parameters[number].grad = self._marks[number]
                    if weight_held(self._parameters[number]) or not defer(
                            self._parameters[number], weakly(self._wait_for, (number,))):
                        exposed.append(number)
            if not self._model_called:
                exposed += sorted(withheld - self._seen)
            self._model_called = False
            self._wait_for(exposed)
            if step.deferred:
                defer(self._optimizer, weakly(self._finish_updates))

    def _before_module(self, numbers: Sequence[int]) -> None:
        self._seen.update(numbers)
        self._wait_for(numbers)

    def _before_model(self, numbers: set[int]) -> None:
        unseen, self._seen, self._model_called = numbers - self._seen, set(), True
        self._wait_for(sorted(unseen))

    def _wait_for(self, numbers: Iterable[int]) -> None:
        """Waits for the averages of tensors that are about to be used, and applies their updates. `numbers`: the tensors'
        numbers."""
        with self._lock:
            if (step := self._running) is None:
                return
            # A result that arrived before an error has been written but not applied. Waiting for it raises that error.
            wanted = [n for n in numbers if n in step.deferred or (n >= len(self._parameters) and not step.complete(n))]
            if wanted:
                self._take(step, partial(step.wait, wanted), quietly=True)
            if self._running is not None and step.over and not self._stepping:
                self._end(step)

    def _finish_updates(self) -> None:
        """Waits until all weights and buffers contain the last step's updates."""
        if (step := self._running) is not None:
            self._wait_for(range(len(step.averages)))

    def _before_accumulation(self, p: torch.Tensor, _gradient: torch.Tensor) -> None:
        """Ends the previous step when a backward pass is about to add its first gradient. Called by gradient hooks."""
        if self._running is not None or self._unobserved:
            self.end_and_observe()
        if self._waits and not self._shared:
            self._shared = gradient_held(p)

    def end_and_observe(self) -> None:
        """Ends the previous step and lets observers read its gradients and times."""
        with self._lock:
            self.end(quietly=True)
            if self._unobserved:
                self._unobserved = False
                self._observe()

    def end(self, *, quietly: bool = False) -> bool:
        """Ends the running step: waits for its averages that have not arrived, and applies them. Returns True if a step was
        running. `quietly`: as in `_take`."""
        with self._lock:
            if (step := self._running) is None:
                return False
            self._take(step, step.wait_all, quietly=quietly)
            if self._running is not None:
                self._end(step)
            return True

    def _final(self, number: int, mark: GradientMark) -> torch.Tensor:
        """Returns a gradient that the script reads. If the average for this gradient has not arrived, the step is completed
        first."""
        with self._lock:
            if self._running is not None and not self._running.complete(number) and (
                    mark is self._marks[number] or mark.value is self._running.averages[number]):
                self.end()
        p = self._parameters[number]
        gradient = p.grad if mark.value is None else mark.value
        return torch.zeros_like(p) if gradient is None or gradient is mark else gradient

    def _end(self, step: PartialStep) -> None:
        worker = self._context.worker
        with torch.inference_mode(mode=False):
            step.end()
        worker.mark_applied(step.applied - step.discarded)
        for number in step.discarded:
            worker.mark_discarded(number)
        self._ended(step.applied | step.discarded, dropped=step.dropped)
        self._unobserved = True
        self._forget(step)

    def _forget(self, step: PartialStep) -> None:
        undefer(self._optimizer)
        self._marks.reset()
        self._running = None
        for act in step.on_end:
            act()

    def call_at_end(self, act: Callable[[], None]) -> None:
        """Calls `act` when the running step has ended, or at once if no step is running."""
        with self._lock:
            if self._running is None:
                act()
            else:
                self._running.on_end.append(act)

    def _take(self, step: PartialStep, come: Callable[[], Sequence[int]], *, quietly: bool = False) -> None:
        """Applies or writes results when they have arrived. `quietly`: no exception if a peer has abandoned the step after this
        rank's optimizer step. It would end a later iteration of the script, whose backward pass the other ranks make."""
        try:
            with torch.inference_mode(mode=False):  # the caller may be an evaluation
                numbers = come()
        except StepAbandoned as error:
            quietly = quietly and bool(step.deferred)
            self._abandon(step)
            if not quietly:
                raise
            log.warning("%s", error)
            return
        except CommError as error:
            self._explain(step, error)
            raise
        due: dict[int, torch.Tensor] = {}
        for number in numbers:
            if number >= len(self._parameters):
                undefer(step.buffers[number - len(self._parameters)])
            elif number in step.deferred and number in step.not_finite:
                self._discard(step, number)
            elif number in step.deferred and (average := step.averages[number]) is not None:
                due[number] = average
            else:
                self._write(step, number)
        if due:
            self._apply(step, due)

    def _write(self, step: PartialStep, number: int) -> None:
        """Records that a parameter needs no update any more, and writes the average, if there is one, into `.grad`."""
        p, mark, average = self._parameters[number], self._marks[number], step.averages[number]
        if step.deferred.pop(number, None) is not None:
            undefer(p)
            step.applied.add(number)
        elif p.grad is not mark or mark.zeroed:
            step.discarded.add(number)
        self._reveal(number, average)

    def _reveal(self, number: int, average: torch.Tensor | None, *, clear: bool = False) -> None:
        """Replaces a parameter's placeholder by its average; by zeros if the script has cleared the placeholder, or `clear`."""
        p, mark = self._parameters[number], self._marks[number]
        if p.grad is mark:
            p.grad = average.zero_() if (mark.zeroed or clear) and average is not None else average
        self._marks.store_average(number, average)

    def _discard(self, step: PartialStep, number: int) -> None:
        """Drops an update whose average is not finite, when the optimizer's step has already run."""
        del step.deferred[number]
        undefer(self._parameters[number])
        step.discarded.add(number)
        step.dropped = True
        self._reveal(number, None)

    def _drop_not_finite(self, step: PartialStep) -> None:
        """Removes averages that have arrived and are not finite, before the optimizer's step."""
        for number in step.not_finite:
            p = self._parameters[number]
            if p.grad is not None and p.grad is step.averages[number]:
                p.grad = None
                step.discarded.add(number)
                step.dropped = True

    def _apply(self, step: PartialStep, averages: Mapping[int, torch.Tensor]) -> None:
        """Applies averages that have arrived after the optimizer's step, with the hyperparameters of that step. `averages`: by
        parameter number."""
        groups: dict[int, Group] = {}
        previous = {}
        for number, average in sorted(averages.items()):
            p, values = self._parameters[number], step.deferred[number]
            undefer(p)
            previous[number], p.grad = p.grad, average
            groups.setdefault(id(values), {**values, "params": []})["params"].append(p)
        try:
            # Same conditions as the script's own call of step(), whatever the caller has set.
            kind = self._parameters[next(iter(averages))].device.type
            with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast(kind, enabled=False):
                step_piece(self._optimizer, [*groups.values()])
        except BaseException as error:
            step.worker.latch(error)
            raise
        for number, grad in previous.items():
            self._parameters[number].grad = grad
            self._reveal(number, averages[number])
            del step.deferred[number]
        step.applied.update(averages)
        step.worker.mark_applied_early(averages)

    def _abandon(self, step: PartialStep) -> None:
        """Abandons the step: no update has been applied. `.grad` contains this rank's own gradients again, or zeros after the
        optimizer's step, so that no later step applies them."""
        for tensor in (*self._parameters, *step.buffers):
            undefer(tensor)
        for number in range(len(self._parameters)):
            self._reveal(number, step.averages[number], clear=bool(step.deferred))
        self._forget(step)

    def _explain(self, step: PartialStep, error: CommError) -> None:
        """Adds to an error's text how many parameters the failed step has updated. Changes each error once."""
        if step.deferred and error is not self._error:
            self._error = error
            done, total = len(step.applied), len(step.applied) + len(step.deferred)
            error.what += (f"; step {step.step} updated {done} of {total} parameters: resume from a checkpoint" if done
                           else f"; step {step.step} updated no parameter")

    def detach(self) -> None:
        """Removes the hooks. The running step can still be completed."""
        self._end_watch()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def drop(self) -> None:
        """Drops averages that have not arrived, because the session has closed."""
        with self._lock:
            if (step := self._running) is None:
                return
            if step.deferred:
                log.warning("step %d: the averages for %d parameters did not arrive before the session closed, so these "
                            "parameters are not updated", step.step, len(step.deferred))
            self._abandon(step)
            for p, mark in zip(self._parameters, self._marks, strict=True):
                p.grad = None if p.grad is mark else p.grad
