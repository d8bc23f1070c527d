"""Runs one program on every host of a lab, or N times on loopback, and collects the JSON line that each rank prints.

Imports no commlayer, because the environments of rivals have none.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NoReturn

from bench.lab import Lab

ROOT = Path(__file__).resolve().parent.parent
TAIL_LINES = 12
_ports = itertools.count()


class RankFailed(RuntimeError):
    """A rank failed, printed no result, or missed the deadline. The message names the rank and shows the end of its stderr."""


def launch_hosts(
    lab: Lab | None, ranks: int, argv: Sequence[str], *, deadline_s: float = 300.0, env: Mapping[str, str] | None = None,
    watch: Callable[[Sequence[subprocess.Popen[Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Starts argv as ranks 0..ranks-1 and returns the last line of JSON that each prints, in rank order. Rank r runs on host r
    modulo the number of hosts, or on loopback if lab is None.

    Every rank gets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and OMP_NUM_THREADS=1; `env` overrides them.
    `watch` is called repeatedly with the ranks' processes. If one rank fails or the deadline passes, all are killed and
    RankFailed is raised.
    """
    common = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": lab.addresses[0] if lab else "127.0.0.1",
        "MASTER_PORT": str(_free_port(lab)),
        "GLOO_SOCKET_IFNAME": lab.interface if lab else "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
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
            if lab:
                child = lab.popen(rank % lab.hosts, argv, env=full, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            else:
                child = subprocess.Popen(
                    list(argv), env={**os.environ, **full}, stdin=subprocess.DEVNULL, stdout=out, stderr=err
                )
            children.append(child)
        _wait(children, outputs, deadline_s, watch)
        return [_last_json(rank, out, err) for rank, (out, err) in enumerate(outputs)]


def as_rank(run: Callable[[], object]) -> NoReturn:
    """Entry point of a rank: runs `run` and exits the process without destructors. After DDP has used a Gloo group, the group's
    destructor may join a thread that waits for the interpreter lock."""
    code = 0
    try:
        run()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        code = 1
    os._exit(code)


def slowest_s(answers: Sequence[Mapping[str, Any]]) -> list[float]:
    """Per step, the time of the slowest rank: a step ends when the last rank has finished it."""
    return [max(times) for times in zip(*(answer["step_s"] for answer in answers), strict=True)]


def median_step_s(answers: Sequence[Mapping[str, Any]]) -> float:
    return statistics.median(slowest_s(answers))


def _free_port(lab: Lab | None) -> int:
    if lab:
        # Only the lab's own programs listen in its namespaces. A new number each time avoids ports in TIME_WAIT.
        return 29500 + next(_ports) % 1000
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait(
    children: Sequence[subprocess.Popen[Any]], outputs: Sequence[tuple[IO[str], IO[str]]], deadline_s: float,
    watch: Callable[[Sequence[subprocess.Popen[Any]]], None] | None,
) -> None:
    until = time.monotonic() + deadline_s
    running = dict(enumerate(children))
    while running:
        if watch:
            watch(children)
        for rank, child in list(running.items()):
            code = child.poll()
            if code is None:
                continue
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
        if child.poll() is None:
            child.kill()
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
