"""Processes that begin with torch and commlayer imported: forked from one that has done nothing else.

An import of torch takes seconds of a core, and a suite starts some hundred ranks. Each is a process of its own all the same,
with its own environment, signals and end; scripts end as the interpreter would end them.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from support import ROOT, forked_children

PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "hypothesis", "pytest", "commlayer.session",
           "commlayer.ddp", "commlayer.cluster.servers.server_process", "commlayer.cluster.servers.data_server"]
"""torch._dynamo: the first optimizer of a process imports it."""


def clean_environment() -> dict[str, str]:
    """This process's environment without settings that would reach the package."""
    return {k: v for k, v in os.environ.items() if not k.startswith("COMMLAYER_")} | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "COMMLAYER_CACHE": ""}


@functools.cache
def start_fork_server() -> Any:
    """Starts the fork server, once, and returns its context. The first call belongs before the threads that use gRPC: the
    environment changes for a moment, and C code that reads it meanwhile crashes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with _environment(clean_environment() | {"OMP_NUM_THREADS": "1"}):
        multiprocessing.forkserver.ensure_running()
    return context


def started(target: Callable[..., None], *args: Any, environment: dict[str, str], leader: int = 0) -> Any:
    """A process that runs target(*args), in the process group of `leader` (0: its own)."""
    process = start_fork_server().Process(target=_begin, args=(target, args, environment, leader))
    process.start()
    return process


def script(path: str, arguments: tuple[str, ...], out: Any, errors: str) -> None:
    """What `python -u path arguments` does, its output to that pipe and its errors to that file."""
    os.dup2(out.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    out.close()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGUSR1)  # writes the stacks of a process that does not end
    sys.argv = [path, *arguments]
    sys.path[0:0] = [str(Path(path).parent)]
    code = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 128 + signal.SIGINT
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(*sys.exc_info())
        code = 1
    exit_process(code)


def exit_process(code: int) -> NoReturn:
    """Ends this process as the interpreter would: after its threads, with exit functions."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _begin(target: Callable[..., None], args: tuple[Any, ...], environment: dict[str, str], leader: int) -> None:
    while leader and os.getpgid(leader) != leader:  # which it makes itself
        time.sleep(0.001)
    os.setpgid(0, leader)
    multiprocessing.set_start_method("fork", force=True)  # as for a script, whose DataLoader workers need it
    os.environ.clear()
    os.environ.update(environment)
    forked_children.fork_children_of_this_process()
    target(*args)


@contextlib.contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
