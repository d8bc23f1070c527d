"""Registers hooks on a model's parameters, optimizer and modules. The hooks report final gradients, the end of the backward
pass, and optimizer steps."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from commlayer.callbacks import ignore
from commlayer.engine.hooks.aliases import is_own_hook
from commlayer.engine.hooks.callbacks import in_compiled_autograd, uncompiled, weakly
from commlayer.engine.worker.worker import Worker
from commlayer.errors import InvalidState

log = logging.getLogger("commlayer")
RUNS = "_engine_run_backward"
"""Name of torch's function that runs a backward pass."""
REENTRANT = (
    "a backward pass runs inside another one, as in reentrant activation checkpointing: gradients are sent only when the "
    "outermost pass ends, instead of during the pass. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint to send "
    "them earlier"
)
TAKEN = (
    "the gradient of a parameter of shape {} was removed before backward() returned, by a hook on the parameter, for "
    "example that of an optimizer that steps inside backward; averages are complete when backward() returns, so step after "
    "it"
)
COMPILED = (
    "this backward pass runs under compiled autograd, which is not supported because it compiles the hooks that average "
    "gradients: set torch._dynamo.config.compiled_autograd=False, and call backward() outside compiled functions"
)


def _keep(_hooks: Hooks, _gradient: torch.Tensor) -> None:
    """Hook before a gradient is accumulated, which only refers to the hooks after it."""


class Hooks:
    """Calls `ready(tensor, gradient)` for each parameter when its gradient is final, and `finish()` when the outermost backward
    pass ends. `tensor` is the parameter's number.

    `finish` runs as an end callback of the autograd engine, so gradients are averages when backward() returns. GradScaler and
    clipping read gradients before any step hook could run.

    A script's hooks on a parameter can change its gradient before it is averaged, as under DDP, even if they were registered
    later. The hook of this class must therefore be the parameter's last one. If it is not, the gradient waits for `finish`, and
    the hook becomes the last one for the next pass.

    Under reentrant activation checkpointing each segment is a backward pass inside the outer one. A parameter used in several
    segments gets its gradient in several parts. In this case `ready` is not called, and `finish` receives all gradients.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], worker: Callable[[], Worker], ready: Callable[[int, torch.Tensor], None],
        finish: Callable[[], None], active: Callable[[], bool], added: Callable[[int], None], aborted: Callable[[], None],
    ) -> None:
        """Registers the hooks. `active` returns True if the current backward pass should average gradients. If not, `added`
        receives the numbers of the parameters to whose gradients it adds. If a backward pass raised an exception, `aborted`
        is called before the next pass."""
        self._worker, self._ready, self._finish, self._active = worker, ready, finish, active
        self._added, self._aborted = added, aborted
        self._graphs: set[int] = set()
        """Autograd's ids of the current backward pass and of passes nested in it. An id is added when a hook of its pass first
        runs."""
        self._root: Callable[[], object] = ignore
        """Weak reference to the tensor on which the script called backward() for the current pass."""
        self._segmented = self._holds = self._logged = False
        """Three flags about the current backward pass. `_segmented`: it has nested passes. `_holds`: `ready` is not called.
        `_logged`: the log reports that `ready` is not called."""
        self._climbing: list[Any] = []
        self._brought: list[torch.Tensor] = []
        """Parameters that have received a gradient in the current backward pass."""
        self._overtaken: list[tuple[Any, int]] = []
        """Hooks of this class, as dict of hooks and key, after which another hook runs on the same parameter."""
        trained = [(number, p) for number, p in enumerate(parameters) if p.requires_grad]
        self._handles = {number: p.register_post_accumulate_grad_hook(uncompiled(weakly(self._final, number)))
                         for number, p in trained}
        self._keeping = [p.register_hook(uncompiled(functools.partial(_keep, self))) for _, p in trained[:1]]

    def _final(self, number: int, parameter: torch.Tensor) -> None:
        graph = torch._C._current_graph_task_id()
        if graph not in self._graphs:  # a new pass
            if not self._active():
                self._added(number)
                return
            self._enter(graph)
        self._brought.append(parameter)
        # An error of torch later in this pass says more than a removed gradient, which `_end` reports.
        if self._holds or parameter.grad is None:
            return
        hooks: Any = parameter._post_accumulate_grad_hooks
        if next(reversed(hooks), key := self._handles[number].id) == key or self._is_final(hooks, key):
            self._ready(number, parameter.grad)

    def _is_final(self, hooks: Any, key: int) -> bool:
        """Returns True if commlayer registered all hooks that run after this class's hook. `key`: the key of this class's hook.
        Hooks of a script can still change the gradient."""
        self._overtaken.append((hooks, key))
        return key not in hooks or all(map(is_own_hook, [*hooks.values()][[*hooks].index(key):]))

    def _enter(self, graph: int) -> None:
        """Starts a backward pass at its first hook call, and registers the callback for its end. Raises the worker's error, if
        there is one."""
        if in_compiled_autograd():
            self._worker().latch(InvalidState("E-COMPILED", COMPILED))
            self._worker().check()
        worker, node, root = self._worker(), _node_around(), _root()
        worker.check()
        if self._graphs and graph > max(self._graphs) and (node is None or self._root() is not root):
            if node is None and _inside_pass():
                worker.latch(InvalidState("E-GRADIENT-TWICE",
                                          "a backward pass began inside another, and both have gradients to average, so "
                                          "neither step can be completed: run the inner one under session.no_sync(), and "
                                          "attach again"))
                worker.check()
            self._clear()
            self._aborted()
        if not self._graphs:
            self._root = ignore if root is None else weakref.ref(root)
        self._graphs.add(graph)
        if node is None:
            torch.autograd.Variable._execution_engine.queue_callback(uncompiled(self._end))
            return
        self._segmented = self._holds = True
        if not self._logged:
            self._logged = True
            log.info("%s", REENTRANT)
        self._climb(node)

    def _climb(self, node: Any) -> None:
        """Registers the callback for the end of the outer backward pass that runs this autograd node. The callback is queued
        when the outer pass reaches its next nodes."""
        def queue(_gradients: Any) -> None:
            for handle in handles:
                handle.remove()
            torch.autograd.Variable._execution_engine.queue_callback(uncompiled(self._end))

        handles = [after.register_prehook(queue) for after, _ in node.next_functions if after is not None]
        self._climbing += handles

    def _end(self) -> None:
        if not self._graphs:
            return  # already ended
        if (node := _node_around()) is not None:
            self._climb(node)
            return
        taken_parameter = next((p for p in self._brought if p.grad is None), None)
        self._holds = self._segmented
        for hooks, key in self._overtaken:
            if key in hooks:
                hooks[key] = hooks.pop(key)  # torch calls hooks in the order of insertion; move_to_end() does not change it
        self._clear()
        if taken_parameter is not None:
            self._worker().latch(InvalidState("E-HOOKS-TAKEN", TAKEN.format(tuple(taken_parameter.shape))))
            self._worker().check()
        self._finish()

    def end_broken(self) -> None:
        """Reports that the last backward pass of the job raised an exception. Without this call, the next pass would report the
        exception."""
        if self._graphs:
            self._clear()
            self._aborted()

    def _clear(self) -> None:
        self._graphs.clear()
        self._brought.clear()
        self._overtaken.clear()
        self._segmented = False
        for handle in self._climbing:
            handle.remove()
        self._climbing.clear()

    def remove(self) -> None:
        for handle in (*self._handles.values(), *self._keeping):
            handle.remove()



def _node_around() -> Any:
    """Returns the autograd node of an outer backward pass whose backward() runs this thread's pass, as in a reentrant
    checkpoint. Returns None if there is no such node."""
    inside = False
    for frame in _stack():
        if frame.f_code.co_name == RUNS:
            if inside:
                return None
            inside = True
        elif inside and frame.f_code.co_name == "backward" and frame.f_code.co_varnames:
            node = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(node, torch._C._FunctionBase):
                return node
    return None


def _root() -> torch.Tensor | None:
    """Returns the tensor on which the outermost backward pass of this thread was called. Returns None on a device's thread,
    whose stack does not contain the call."""
    if isinstance(threading.current_thread(), threading._DummyThread):
        return None
    frames = [frame for frame in _stack() if frame.f_code.co_name == RUNS]
    outputs = frames[-1].f_locals.get("t_outputs") if frames else None
    return outputs[0] if outputs and isinstance(outputs[0], torch.Tensor) else None


def _inside_pass() -> bool:
    """Returns True if a backward pass runs inside another one, according to the stack of this thread. The stack of the thread
    that started the outer pass contains both passes. A device's thread belongs to autograd, so its stack contains only the
    inner pass."""
    own = isinstance(threading.current_thread(), threading._DummyThread)
    return sum(frame.f_code.co_name == RUNS for frame in _stack()) + own > 1


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
