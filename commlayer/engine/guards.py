"""Checks before attach() whether a model is supported, and then in every step whether its trained parameters are averaged.

A parameter that is unfrozen, added or replaced after attach() would not be averaged, and ranks would silently diverge. A
parameter that is frozen or removed later counts as unused.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import methodcaller
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from commlayer.engine.gradient_mark import GradientMark
from commlayer.engine.hooks import before_forward
from commlayer.engine.optimizers import HeldParameters, closure_of, watch
from commlayer.errors import InvalidInput, InvalidState, coded
from commlayer.records import Job

log = logging.getLogger("commlayer")

REMEDY = "session.close(), then attach again"
NAMED = 3
"""Largest number of parameters that one log line names."""

class AttachedModel:
    """The parameters of one session's model and optimizer when attach() was called. `check` runs in every step and takes
    microseconds."""

    def __init__(
        self, model: nn.Module, named: Sequence[tuple[str, torch.Tensor]], optimizer: Any,
    ) -> None:
        """`named`: the averaged parameters with their names."""
        self._model, self._optimizer = model, optimizer
        self._names, self._named = {name for name, _ in named}, {id(p) for _, p in named}
        self._kept = [p for _, p in named]  # keeps their ids from being reused
        self._known = {id(p) for group in self._groups() for p in group}
        self._frozen: list[torch.Tensor] = []
        self._look()

    def _look(self) -> None:
        """Records the current parameters, modules and optimizer groups, for later comparison."""
        self._within: list[Mapping[str, Any]] = [table for module in self._model.modules()
                                              for table in (module._parameters, module._modules)]
        self._seen = self._marks()
        self._frozen = [p for _, p in self._others()]
        self._grouped = [[*map(id, group)] for group in self._groups()]

    def check(self, latch: Callable[[BaseException], None], stranger: Any = None) -> None:
        """Raises ValueError with the name of a parameter that is trained but not averaged. The error is also passed to `latch`,
        so that no further step is possible.

        `stranger`: an optimizer without averaged parameters that is about to step; it is checked only if it has another
        parameter of this model. None: all parameters are checked.
        """
        try:
            if self._changed() and (stranger is None or self._holds_others(stranger)):
                self._check()
        except ValueError as error:
            latch(error)
            raise

    def _changed(self) -> bool:
        grouped = [[*map(id, group)] for group in self._groups()]
        return grouped != self._grouped or any(map(_trained, self._frozen)) or self._marks() != self._seen

    def _holds_others(self, optimizer: Any) -> bool:
        others = {id(p) for _, p in self._others()}
        return any(id(p) in others for group in optimizer.param_groups for p in group["params"])

    def _check(self) -> None:
        for name, p in self._others():
            if p.requires_grad:
                how = ("was frozen when the model was attached, and no longer is" if any(p is old for old in self._frozen) else
                       "replaced another parameter" if name in self._names else "was added")
                raise InvalidInput("E-MODEL-CHANGED",
                                   f"parameter {name} {how}: its gradient is not averaged, so each rank would train its own "
                                   f"copy; call {REMEDY}")
        for number, group in enumerate(self._groups()):
            for place, p in enumerate(group):
                if p.requires_grad and id(p) not in self._known and not is_averaged(p):
                    raise InvalidInput("E-MODEL-CHANGED",
                                       f"parameter {place} of the optimizer's group {number}, of shape {tuple(p.shape)}, "
                                       "was added after attach() and belongs to no attached model: its gradient is not "
                                       f"averaged; call {REMEDY}, with a model that contains the parameter")
        self._look()

    def _marks(self) -> list[int]:
        """Returns the Python ids of all parameters and submodules of the model's modules."""
        return [*map(id, chain.from_iterable(map(methodcaller("values"), self._within)))]

    def _others(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self._model.named_parameters():
            if id(p) not in self._named:
                yield name, p

    def _groups(self) -> list[list[Any]]:
        return [group["params"] for group in getattr(self._optimizer, "param_groups", ())]


def _trained(p: torch.Tensor) -> bool:
    return p.requires_grad


# ---- checks whether a model can be attached, before anything is exchanged. Errors name the unsupported part.

DTYPES = ("float32", "float16", "bfloat16", "float64")
SHARDED = ("each rank has only a shard of it, but commlayer averages complete gradients: use a plain module or "
           "DistributedDataParallel")
STEP_AFTER_BACKWARD = ("averages are complete when backward() returns, so step after it, with one optimizer over "
                       "model.parameters()")

_claims: Any = WeakIdKeyDictionary()
"""Maps a parameter to the session (a Claim) that averages its gradients."""


def is_averaged(parameter: torch.Tensor) -> bool:
    """Returns True if a session of this process averages the parameter's gradients."""
    return (holder := _claims.get(parameter)) is not None and holder() is not None


class Claim:
    """Reserves the parameters that one session averages, so that no other session averages them."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Reserves the parameters. Raises ValueError and reserves none if another session averages one of them."""
        parameters = []
        for name, p in named:
            if is_averaged(p):
                raise InvalidInput("E-ATTACHED-TWICE",
                                   f"{name or 'a parameter'} is attached already, by itself or inside a "
                                   "DistributedDataParallel module, so its gradient would be averaged twice: attach a "
                                   "model once, or close the other session first")
            parameters.append(p)
        for p in parameters:
            _claims[p] = weakref.ref(self)
        self._parameters = parameters

    def release(self) -> None:
        for p in self._parameters:
            _claims.pop(p, None)
        self._parameters = []


def check_model(model: nn.Module) -> None:
    """Raises ValueError with the name of a module, parameter or buffer that cannot be averaged."""
    if not isinstance(model, nn.Module):
        raise InvalidInput("E-MODEL-UNSUPPORTED", f"model: got {type(model).__name__}, but it must be a torch.nn.Module")
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        for sharded, called in (("FullyShardedDataParallel", "FullyShardedDataParallel"), ("FSDPModule", "fully_shard()")):
            if sharded in kinds:
                raise InvalidInput("E-MODEL-UNSUPPORTED", f"{name or 'the model'} is under {called}: {SHARDED}")
    for name, p in model.named_parameters():
        check_parameter(name, p)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InvalidInput("E-MODEL-UNSUPPORTED",
                               f"{name} has no shape before the first forward pass of its lazy module: run the model once "
                               "on a batch, then call attach()")


def check_parameter(name: str, p: torch.Tensor) -> None:
    if not is_lazy(p) and p.is_inference():
        raise InvalidInput("E-MODEL-UNSUPPORTED",
                           f"{name} was created inside torch.inference_mode(), so it cannot be trained: create the model "
                           "outside inference_mode()")
    if any(kind.__name__ == "DTensor" for kind in type(p).__mro__):
        raise InvalidInput("E-MODEL-UNSUPPORTED", f"{name} is a DTensor (FSDP2 or tensor parallelism): {SHARDED}")


def refuse_steps_in_backward(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError for parameters marked by apply_optimizer_in_backward, whose steps use this rank's own gradients."""
    for name, p in named:
        for optimizer in getattr(p, "_in_backward_optimizers", ()):
            raise InvalidInput("E-STEP-IN-BACKWARD",
                               f"{name} is updated inside backward by {type(optimizer).__name__} "
                               f"(apply_optimizer_in_backward), with this rank's own gradient: {STEP_AFTER_BACKWARD}")


def check_dtypes(job: Job) -> None:
    for info in job.tensors:
        if info.dtype not in DTYPES:
            raise InvalidInput("E-MODEL-UNSUPPORTED",
                               f"{info.name} is {info.dtype}, but its dtype must be one of {', '.join(DTYPES)}; "
                               "requires_grad=False excludes a parameter")


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Returns the device of the tensors. Raises ValueError if they are on several devices, or on an unsupported one."""
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1 or not devices[0].startswith(("cpu", "cuda")):
        raise InvalidInput("E-MODEL-UNSUPPORTED",
                           f"the model is on {', '.join(devices)}, but each process must use one CPU or one CUDA device")
    return tensors[0].device


def refuse_ddp_around(model: nn.Module) -> None:
    """Registers a check for the model's first forward pass. The check raises ValueError if a DDP module around the model
    averages its gradients, too."""

    def look(_module: nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling():
            return
        handle.remove()
        outer = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if outer is not None and any(module is model for module in outer.module.modules()):
            raise InvalidInput("E-ATTACHED-TWICE",
                               "the model is attached and also inside a DistributedDataParallel module, so gradients would "
                               "be averaged twice: attach the DistributedDataParallel module instead, or leave it out")

    handle = before_forward(model, look)


# ---- names the parameters that an optimizer updates although no session averages their gradients. A script can intend that,
# for example with a model of each rank's own, so training continues.

_looked_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Maps an optimizer to its number of parameters when a session last looked for parameters that are not averaged."""


class LocalParameters:
    """Logs which parameters of an optimizer belong to no attached model: at the optimizer's first step, because by then its
    models are attached, and when the optimizer has received more parameters."""

    def __init__(self) -> None:
        self._logged: set[tuple[object, ...]] = set()
        """Kind and shapes of what was logged, because a script can create an equal optimizer many times."""

    def look(self, optimizer: Optimizer) -> None:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if _looked_at.get(optimizer) == count:
            return
        _looked_at[optimizer] = count
        others = {id(p): (p, group.get("param_names", ())[place:place + 1], number, place)
                  for number, group in enumerate(optimizer.param_groups) for place, p in enumerate(group["params"])
                  if p.requires_grad and not is_averaged(p)}
        kind = (type(optimizer), *(p.shape for p, *_ in others.values()))
        if not others or kind in self._logged:
            return
        self._logged.add(kind)
        names, by_ddp = _find(others)
        texts = [f"{(*own, names.get(key, 'a parameter'))[0]} (parameter {place} of group {number}, shape {tuple(p.shape)})"
                 for key, (p, own, number, place) in others.items() if key not in by_ddp]
        if texts:
            log.warning("%s", coded(
                "E-PARAMETER-LOCAL",
                f"{type(optimizer).__name__} updates {len(texts)} parameters that belong to no attached model: "
                f"{', '.join(texts[:NAMED])}{', ...' if len(texts) > NAMED else ''}. Their gradients are not averaged, so each "
                "rank trains its own copy: attach a module that contains them, unless each rank should train its own"))


def _find(wanted: Collection[int]) -> tuple[dict[int, str], set[int]]:
    """Searches all modules of the process for parameters, given by id. Returns their names, which begin with the class of the
    outermost module, and the ids of those that a DistributedDataParallel module averages. Takes about 0.1 s."""
    # isinstance() would read the attribute __class__ of every object, which can run code.
    modules = [thing for thing in gc.get_objects() if nn.Module in type(thing).__mro__]
    parents = {id(child): (module, name) for module in modules for name, child in vars(module).get("_modules", {}).items()}
    names = {}
    for module in modules:
        for name, p in vars(module).get("_parameters", {}).items():
            if id(p) in wanted:
                path, outer, passed = [name], module, {id(module)}
                while id(outer) in parents and id(parents[id(outer)][0]) not in passed:
                    outer, inside = parents[id(outer)]
                    passed.add(id(outer))
                    path.append(inside)
                names[id(p)] = ".".join([type(outer).__name__, *reversed(path)])
    return names, {id(p) for module in modules if isinstance(module, DistributedDataParallel) for p in module.parameters()}


# ---- checks before every optimizer step that the gradients which it applies were averaged

OUTSIDE = -1
"""Value of torch._C._current_graph_task_id() in a thread that runs no backward pass."""
WITNESSES = 8
"""Number of gradients that are compared to detect that an optimizer steps a second time with the same gradients."""
Gradient = tuple[int, int, int]
"""Identity of a gradient: its parameter's number, the id of its tensor, and the tensor's version."""
Applied = weakref.WeakKeyDictionary[Optimizer, list[Gradient]]
"""Maps an optimizer to some of the gradients with which it stepped last."""

REMEDY_LAST = ("make the last backward pass of each optimizer step outside no_sync(), or call session.synchronize() before the "
               "step")
REMEDY_LOCAL = "call backward() outside no_sync(), or session.synchronize() before the optimizer's step"


class StepGuard:
    """Checks before each optimizer step of one session that its gradients were averaged. It counts exchanges, and records for
    each parameter the count at its last optimizer step. The gradient tensors themselves are not compared, so a script can clip,
    scale or replace gradients, or step twice with them."""

    def __init__(
        self, attached: AttachedModel, named: Sequence[tuple[str, torch.Tensor]], latch: Callable[[BaseException], None],
    ) -> None:
        """`latch` stores an error, so that no later step of this rank succeeds, and reports it to the other ranks."""
        self._attached, self._latch = attached, latch
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        self._dtypes = [p.dtype for p in self._parameters]
        self._held, self._local_parameters = HeldParameters(self._parameters), LocalParameters()
        self._checked = False
        """True: `check` was called since the last optimizer step."""
        self._exchanges = 0
        self.own: set[int] = set()
        """Numbers of the parameters to whose gradients a backward pass inside no_sync() has added since the last exchange."""
        self._stepped_at = [0] * len(self._parameters)
        self._applied: Applied = weakref.WeakKeyDictionary()
        self._begun: tuple[list[int], Applied] = [], self._applied
        """Copies of `_stepped_at` and `_applied` from the beginning of the running step with a closure."""
        self.local_step: Callable[[bool], bool] = _not_local
        """Function that is called before each optimizer step. It returns True if steps are local, so that gradients need not be
        averaged. Its argument is True if the step must be counted now, because its gradients come from no exchange and no
        counted backward pass."""
        self._end = watch(self._before_step, self._after_step)

    def exchanged(self) -> None:
        """Counts an exchange, in which all parameters take part. Under local steps it counts a backward pass that belongs to a
        step."""
        self._exchanges += 1
        self.own.clear()

    def check(self) -> None:
        """Checks parameters after a backward pass. Raises ValueError if a trained parameter is not averaged."""
        self._attached.check(self._latch)
        self._checked = True

    def remove(self) -> None:
        self._end()

    @property
    def inside(self) -> bool:
        """True: an optimizer's step is running now, for example because its closure calls backward()."""
        return bool(self._held.stepping())

    def awaits_step(self, optimizer: Any) -> bool:
        """Returns True if this optimizer has not stepped since the last exchange."""
        return any(self._stepped_at[number] < self._exchanges for number in self._held.by(optimizer))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        mine = self._held.by(optimizer)
        if mine and torch._C._current_graph_task_id() != OUTSIDE:
            raise InvalidState("E-STEP-IN-BACKWARD",
                               f"{type(optimizer).__name__} updates {self._names[mine[0]]} inside backward, with this "
                               f"rank's own gradient: {STEP_AFTER_BACKWARD}")
        if not self._checked:
            self._attached.check(self._latch, None if mine else optimizer)
        self._local_parameters.look(optimizer)
        if not mine:
            return
        self._checked = False
        if not self.inside:  # an optimizer may call another
            closure = closure_of(args, kwargs)
            late = self._late(optimizer, mine, self._stepped_at, self._applied)
            if closure is not None:
                self._begun = [*self._stepped_at], self._applied.copy()
            counts = bool(late or closure is not None) and not self.awaits_step(optimizer)
            if not self.local_step(counts) and closure is None:
                self._judge(optimizer, mine, late)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not (mine := self._held.by(optimizer)):
            return
        if not self.inside and closure_of(args, kwargs) is not None:
            # An exchange by the closure counts. A step that this one has called used the same gradients.
            self._judge(optimizer, mine, self._late(optimizer, mine, *self._begun))
        for number in mine:
            self._stepped_at[number] = self._exchanges
        self._applied[optimizer] = self._witnesses(mine)

    def _late(self, optimizer: Optimizer, mine: Sequence[int], stepped_at: Sequence[int], applied: Applied) -> list[int]:
        """Returns the numbers of the parameters whose gradients have not taken part in an exchange since their last optimizer
        step, or not completely. Empty if another optimizer, such as a preconditioner, has already stepped with the same
        gradients."""
        others = [witnesses for one, witnesses in applied.items() if one is not optimizer]
        if others and (witnesses := self._witnesses(mine)) and witnesses in others:
            return []
        return [n for n in mine if (stepped_at[n] >= self._exchanges or n in self.own)
                and self._parameters[n].grad is not None]

    def _judge(self, optimizer: Optimizer, mine: Sequence[int], late: Sequence[int]) -> None:
        """Raises ValueError, also passed to `latch`, if the optimizer is about to apply gradients that were not averaged since
        its last step."""
        if not late:
            return
        if (witnesses := self._witnesses(mine)) and witnesses == self._applied.get(optimizer):
            return
        if not (own := [n for n in late if _any(self._parameters[n].grad)]):
            return
        p, name = self._parameters[own[0]], self._names[own[0]]
        if p.dtype != self._dtypes[own[0]]:
            before, now = (str(dtype).removeprefix("torch.") for dtype in (self._dtypes[own[0]], p.dtype))
            error = InvalidInput("E-MODEL-CHANGED",
                                 f"parameter {name} had dtype {before} when the model was attached, but has {now} now, so "
                                 "its gradient is not averaged; call session.close(), then attach again")
        elif own[0] in self.own and self._stepped_at[own[0]] < self._exchanges:
            more = f" and those of {len(own) - 1} others" if len(own) > 1 else ""
            error = InvalidInput("E-GRADIENT-LOCAL",
                                 f"a backward pass inside no_sync() added to the gradient of {name}{more} after it was "
                                 f"averaged, so each rank would apply its own sum; {REMEDY_LAST}")
        else:
            more = f", nor those of {len(own) - 1} others" if len(own) > 1 else ""
            error = InvalidInput("E-GRADIENT-LOCAL",
                                 f"the gradient of {name} was not averaged since the last step of its optimizer{more}, so "
                                 f"each rank would apply its own gradient; {REMEDY_LOCAL}")
        self._latch(error)
        raise error

    def _witnesses(self, mine: Sequence[int]) -> list[Gradient]:
        """Returns the identities of some of these parameters' gradients. They are enough to detect that a script has replaced
        gradients."""
        chosen = mine[::max(1, len(mine) // WITNESSES)]
        return [(n, id(grad), grad._version) for n in chosen if (grad := self._parameters[n].grad) is not None]


def _not_local(_whole: bool) -> bool:
    return False


def _any(grad: torch.Tensor | None) -> bool:
    """Returns True if the gradient has nonzero values; False for a placeholder of an average that has not arrived."""
    if grad is None or isinstance(grad, GradientMark):
        return False
    return bool((grad._values() if grad.is_sparse else grad).any())
