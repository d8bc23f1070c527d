"""Hooks on a model's parameters: tell a worker when gradients are final. Knows autograd; nothing of codecs or networks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType

import torch
from torch import nn
from torch.utils import checkpoint

from commlayer.runtime.worker import Worker

REENTRANT = (
    "activation checkpointing with use_reentrant=True runs a backward pass inside the backward pass, so gradients become final "
    "twice: pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
)
TAKEN = (
    "the gradient of a parameter of shape {} was taken away before backward() returned: a hook on it does this, as of an "
    "optimizer that steps inside backward; averages are there when backward() returns, so step then"
)


class Hooks:
    """Calls `ready(tensor, gradient)` for each parameter and `finish()` when the outermost backward pass ends.

    `finish` runs as an end callback of the autograd engine, so gradients are final when backward() returns: GradScaler and
    clipping read them before any step hook could run.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], worker: Callable[[], Worker], ready: Callable[[int, torch.Tensor], None],
        finish: Callable[[], None], active: Callable[[], bool], broke_off: Callable[[], None],
    ) -> None:
        """`active` says whether the pass is to be synchronised. `broke_off` hears, ahead of the next, of one that raised."""
        self._worker, self._ready, self._finish, self._active = worker, ready, finish, active
        self._broke_off = broke_off
        self._graph: int | None = None
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(number)) for number, p in enumerate(parameters) if p.requires_grad
        ]

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def final(parameter: torch.Tensor) -> None:
            graph = torch._C._current_graph_task_id()
            if graph != self._graph:  # it is a new pass; within one, that has been asked
                if not self._active():
                    return
                self._enter(graph)
            if parameter.grad is None:
                raise RuntimeError(TAKEN.format(tuple(parameter.shape)))
            self._ready(number, parameter.grad)

        return final

    def _enter(self, graph: int) -> None:
        """Once per backward pass: asks to be called at its end."""
        if _inside_checkpoint():
            raise RuntimeError(REENTRANT)
        worker = self._worker()
        worker.check()
        if self._graph is not None:
            if _inside_pass():
                worker.latch(RuntimeError(
                    "a backward pass began inside another: both have gradients to average, so neither's step can be completed. "
                    "Put the inner one into session.no_sync(), and attach again"
                ))
                worker.check()
            self._graph = None
            self._broke_off()
        self._graph = graph
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._graph = None
        self._finish()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _inside_checkpoint() -> bool:
    """Whether a reentrant checkpoint's backward is on this thread's stack."""
    return any(code.co_name == "backward" and code.co_filename == checkpoint.__file__ for code in _stack())


def _inside_pass() -> bool:
    """Whether a backward pass runs inside another: both are on the stack of the thread that began the outer one. A device's
    thread is autograd's own, so there the inner one stands alone."""
    own = isinstance(threading.current_thread(), threading._DummyThread)
    return sum(code.co_name == "_engine_run_backward" for code in _stack()) + own > 1


def _stack() -> Iterator[CodeType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
