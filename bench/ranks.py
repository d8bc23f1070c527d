"""Runs one program on every host of a lab, or N times on loopback, and collects the JSON line that each rank prints.

Imports no commlayer, because the environments of rivals have none.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NoReturn

from bench.lab import Lab

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = timedelta(seconds=120)
"""Of a collective operation between ranks."""
TAIL_LINES = 12
_ports = itertools.count()


class RankFailed(RuntimeError):
    """A rank failed, printed no result, or missed the deadline. The message names the rank and shows the end of its stderr."""


def launch_hosts(
    lab: Lab | None, ranks: int, argv: Sequence[str], *, deadline_s: float = 300.0, env: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Starts argv as ranks 0..ranks-1 and returns the last line of JSON that each prints, in rank order. Rank r runs on host r
    modulo the number of hosts, or on loopback if lab is None.

    Every rank gets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and OMP_NUM_THREADS=1; `env` overrides them.
    If one rank fails or the deadline passes, RankFailed is raised. At the end all processes that ranks have started are killed.
    """
    common = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": lab.addresses[0] if lab else "127.0.0.1",
        "MASTER_PORT": str(_free_port(lab)),
        "GLOO_SOCKET_IFNAME": lab.interface if lab else "lo",
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        children: list[subprocess.Popen[Any]] = []
        stack.callback(_end, children)
        outputs: list[tuple[IO[str], IO[str]]] = []
        for rank in range(ranks):
            out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            outputs.append((out, err))
            full = {**common, "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                    "HOST_ADDRESS": lab.addresses[rank % lab.hosts] if lab else "127.0.0.1", **(env or {})}
            children.append(start(lab, rank % lab.hosts if lab else 0, argv, env=full, stdin=subprocess.DEVNULL, stdout=out,
                                  stderr=err, start_new_session=True))
        _wait(children, outputs, deadline_s)
        return [_last_json(rank, out, err) for rank, (out, err) in enumerate(outputs)]


def start(lab: Lab | None, host: int, argv: Sequence[str], *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
    """Starts a process on a host of the lab, or here, with `env` added to this process's environment."""
    full = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])), **env}
    return lab.popen(host, argv, env=full, **options) if lab else subprocess.Popen(argv, env={**os.environ, **full}, **options)


def program(module: str, *arguments: object) -> list[str]:
    """The command line of a rank: `module` ends with a call of `as_rank`."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def as_rank(run: Callable[..., dict[str, Any]]) -> NoReturn:
    """Entry point of a rank: prints what `run` returns for the arguments of the command line, and exits the process without
    destructors. After DDP has used a Gloo group, the group's destructor may join a thread that waits for the interpreter
    lock."""
    code = 0
    try:
        print(json.dumps(run(*sys.argv[1:])), flush=True)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        code = 1
    os._exit(code)


def host_config(**fields: Any) -> dict[str, Any]:
    """Settings for one rank per host that listens on the host's address. The lab's network is closed, so without encryption."""
    address = os.environ.get("HOST_ADDRESS", "127.0.0.1")
    # Each run finds its plan by itself.
    return {"ranks_per_node": 1, "bind": address, "insecure": address != "127.0.0.1", "cache": ""} | fields


def slowest_s(answers: Sequence[Mapping[str, Any]]) -> list[float]:
    """Per step, the time of the slowest rank: a step ends when the last rank has finished it."""
    return [max(times) for times in zip(*(answer["step_s"] for answer in answers), strict=True)]


def _free_port(lab: Lab | None) -> int:
    if lab:
        # Only the lab's own programs listen in its namespaces. A new number each time avoids ports in TIME_WAIT.
        return 29500 + next(_ports) % 1000
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait(children: Sequence[subprocess.Popen[Any]], outputs: Sequence[tuple[IO[str], IO[str]]], deadline_s: float) -> None:
    until = time.monotonic() + deadline_s
    running = dict(enumerate(children))
    while running:
        for rank, child in list(running.items()):
            if (code := child.poll()) is not None:
                del running[rank]
                if code:
                    raise RankFailed(f"rank {rank} of {len(children)} ended with code {code}:\n{_tail(outputs[rank][1])}")
        if running and time.monotonic() > until:
            rank = min(running)
            late = ", ".join(map(str, running))
            raise RankFailed(f"rank {late}: no end within {deadline_s:g} s; rank {rank} said last:\n{_tail(outputs[rank][1])}")
        time.sleep(0.02)


def _end(children: Sequence[subprocess.Popen[Any]]) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    for child in children:
        child.wait()


def _last_json(rank: int, out: IO[str], err: IO[str]) -> dict[str, Any]:
    out.seek(0)
    for line in reversed(out.read().splitlines()):
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise RankFailed(f"rank {rank} printed no line of JSON; its stderr ends:\n{_tail(err)}")


def _tail(err: IO[str]) -> str:
    err.seek(0)
    return "\n".join(err.read().splitlines()[-TAIL_LINES:]) or "(nothing)"
