"""Makes callbacks that do not keep their object alive, and callbacks that torch.compile does not trace."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def in_compiled_autograd() -> bool:
    """Returns True if compiled autograd runs this thread's backward pass. (Importing torch's module to check this would take
    seconds.)"""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)


def in_backward() -> bool:
    """Returns True in a thread that runs a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def after_backward(act: Callable[[], None]) -> None:
    """Calls `act` when this thread's backward pass ends; at once if none is running."""
    if in_backward():
        torch.autograd.Variable._execution_engine.queue_callback(uncompiled(act))
    else:
        act()


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Excludes a hook that autograd calls, and all functions that the hook calls, from torch.compile, because a compiled
    function might call backward().

    torch.compiler.disable does the same, but its wrapper is slower. The slower call is used for torch 2.6, which lacks the
    faster call.
    """
    inner = hook.func if isinstance(hook, functools.partial) else hook
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        disabled: Callable[..., Any] = torch.compiler.disable(hook)
        return disabled
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(getattr(inner, "__func__", inner).__code__, frames._FrameExecStrategy(skip, skip))
    return hook


def weakly(method: Callable[..., T], *first: Any) -> Callable[..., T | None]:
    """Returns a function that calls the method, with these arguments first, as long as the method's object exists.

    Threads, and hooks that run after a gradient is accumulated, must not keep a session alive: torch does not show the garbage
    collector what such hooks refer to.
    """
    function, owner = method.__func__, weakref.ref(method.__self__)  # type: ignore[attr-defined]

    def call(*args: Any, **kwargs: Any) -> T | None:
        return None if (found := owner()) is None else function(found, *first, *args, **kwargs)

    return call
