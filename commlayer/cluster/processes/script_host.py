"""Runs a training script as one process of a home, as `commlayer join` starts it.

A script that creates the process group itself asks torch for sockets between all ranks, which homes behind NAT do not have.
That call is replaced: it returns the group of relayed_group.py, whose traffic between homes passes through the coordinator.
Rank and world size come from the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import logging
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commlayer.cluster.calls.home_traffic import HOME
from commlayer.config import JOIN_AGAIN, Launch, continue_wait_s, leave_reason_file, read_config, read_launch
from commlayer.errors import Coded, CommError, InvalidInput
from commlayer.observe.log_lines import LogLines

_LOG = logging.getLogger("commlayer")
PR_SET_PDEATHSIG = 1
AHEAD = ("this home joins a running job, and the other workers take part in collectives of its script only after its first "
         "step: move this call after the first step (a communication hook that the script registers makes such calls, too: use "
         "attach() instead)")
JOINING = 1 << 62
"""Generation of values that a home which joins writes before it takes part."""
OWN = (None, "", "env://")
"""Values of init_process_group's argument init_method with which a script leaves the rendezvous to the launcher."""


def begin_world(launch: Launch, inside: str, timeout_s: float = 0.0) -> None:
    """Creates torch's default process group. `inside`: the backend for groups within this machine. `timeout_s`: seconds after
    which a collective fails; 0: the setting deadline_s."""
    from commlayer.cluster.calls.site_client import KvClient
    from commlayer.cluster.processes import site_process_group

    config = read_config()  # from the environment, in which the launcher stores the settings used with the coordinator
    leave = config.min_workers > 0
    first = (launch.rank if launch.joins < 0 else launch.joins) - launch.local_rank
    # The job changes members while this home joins, and would drop values that belong to an earlier epoch.
    generation = 1 if launch.joins < 0 else JOINING
    site_process_group.init_world(
        KvClient(config.join, config, launch.home, generation), launch.rank, launch.world,
        range(first, first + launch.local_world), inside=inside, timeout_s=timeout_s or config.deadline_s, skip_lost=leave,
        paused_reason=AHEAD if launch.joins >= 0 else "", patience_s=continue_wait_s(config) if leave else 0.0)


def main() -> None:
    """Runs a training script: `python -m commlayer.cluster.processes.script_host PARENT line|traceback SCRIPT ARGS...`.
    PARENT is the launcher's process id. The second argument selects how errors are printed."""
    parent, how, script, *args = sys.argv[1:]
    try:
        _end_with(int(parent))
        HOME.start(read_config())
        _run(script, args)
    except BaseException as error:
        if how == "traceback" or not (line := line_for(error)):
            raise
        sys.last_value = error  # as Python does when it prints an error; the session sends it to the other ranks as the reason
        if not isinstance(error, KeyboardInterrupt):  # the launcher reports Ctrl-C
            sys.stderr.write(f"commlayer: {line}\n")  # one write, so that lines of several processes do not mix
            sys.stderr.flush()
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else JOIN_AGAIN if joins_again(error) else 1)


def joins_again(error: BaseException) -> bool:
    """Returns whether this home should join again after the error. Either the worker of this home had not joined the job yet.
    Or the job continues without this home because its heartbeats did not arrive. Or this home has lost the server, which the
    other homes may still have. Or another home was lost before the job began."""
    if not isinstance(error, CommError):
        return False
    lost_server = error.code == "E-PEER-LOST" and error.peer.startswith("server ")
    removed = lost_server or error.code in ("E-EPOCH-ENDED", "E-JOIN-MISSED", "E-RENDEZVOUS-ENDED")
    return error.code in ("E-JOB-ENDED", "E-JOB-FULL") or (removed and read_config().min_workers > 0)


def line_for(error: BaseException) -> str:
    """Returns the line that describes an error which ends a script: Ctrl-C, or an error of commlayer with a code. Returns ""
    for an error in the script itself or a bug, which need their traceback."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, Coded) else ""


def _run(script: str, args: list[str]) -> None:
    show_log_lines()
    _replace_torch_functions()
    if read_launch().joins >= 0:
        _ddp_alone()
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _end_with(parent: int) -> None:
    """Makes this process end as if by Ctrl-C when the launcher is killed (only on Linux). Shells make background processes and
    their children ignore SIGINT. This function restores the default, so that the launcher's SIGINT ends the process."""
    def interrupt(*_: Any) -> None:
        with contextlib.suppress(OSError):
            raise KeyboardInterrupt(leave_reason_file(parent).read_text())
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
        if os.getppid() != parent:
            raise KeyboardInterrupt


class _Unheard(LogLines):
    """Log handler that prints commlayer's log lines, unless the script has log handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or len(_LOG.handlers) > 1:
            return
        super().emit(record)


def show_log_lines() -> None:
    """Prints commlayer's log lines for the user who started the home. A script's own logging configuration takes precedence."""
    handler = _Unheard("commlayer")
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    root = logging.getLogger()
    # Python ignores the root logger's level for records of child loggers.
    _LOG.addFilter(lambda record: not root.handlers or record.levelno >= root.level)


def _replace_torch_functions() -> None:
    """Replaces torch's functions that create process groups or send objects, in every module from which scripts import them."""
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d

    from commlayer.cluster.processes import object_collectives, relayed_group

    object_collectives.install(relayed_group.NAME)
    for name, replacement in (("init_process_group", _init), ("new_group", _new_group)):
        wrapper = _wrap_constructor(getattr(dist, name), replacement)
        for module in (dist, distributed_c10d, device_mesh):
            setattr(module, name, wrapper)


def _ddp_alone() -> None:
    """Prevents DDP's constructor from comparing and sharing weights. A home that joins a running job receives its weights
    later, in attach()."""
    from torch.nn.parallel import DistributedDataParallel

    from commlayer.cluster.processes import site_process_group

    known = DistributedDataParallel.__init__

    @functools.wraps(known)
    def construct(*args: Any, **more: Any) -> None:
        with site_process_group.run_locally():
            known(*args, **more)

    DistributedDataParallel.__init__ = construct  # type: ignore[method-assign]


def _wrap_constructor(known: Callable[..., Any], construct: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(known)(functools.partial(construct, known))


def _init(known: Callable[..., Any], backend: str | None = None, init_method: str | None = None,
          timeout: datetime.timedelta | None = None, world_size: int = -1, rank: int = -1, store: Any = None,
          **more: Any) -> Any:
    import torch

    if store is not None:
        return known(backend, init_method, timeout, world_size, rank, store, **more)
    launch = read_launch()
    if init_method not in OWN or rank not in (-1, launch.rank) or world_size not in (-1, launch.world):
        raise InvalidInput("E-PROCESS-GROUP",
                           f"init_process_group(init_method={init_method!r}, rank={rank}, world_size={world_size}) is not "
                           "supported under `commlayer join`: leave these arguments out, or pass env:// with rank "
                           f"{launch.rank} of {launch.world}")
    inside = str(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    begin_world(launch, inside, timeout.total_seconds() if timeout else 0.0)
    return None


def _new_group(known: Callable[..., Any], ranks: Any = None, timeout: Any = None, backend: str | None = None,
               *args: Any, **more: Any) -> Any:
    import torch.distributed as dist

    from commlayer.cluster.processes import site_process_group

    members = range(dist.get_world_size()) if ranks is None else ranks
    return known(ranks, timeout, site_process_group.backend_for(members, backend), *args, **more)


if __name__ == "__main__":
    main()
