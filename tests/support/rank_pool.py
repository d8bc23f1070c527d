"""Long-lived rank processes in one Gloo group, and a job's coordinator and servers in the test's own process.

A test hands the pool a function of its module; every rank runs it. Ranks are kept from test to test, and workers join servers
that run as threads here.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import multiprocessing.connection
import os
import pickle
import re
import select
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import processes
from support.processes import clean_environment

START_S = 100.0
CALL_S = 100.0
"""Both less than the suite's own limit for a test. Bounds, which only what hangs or a machine that others fill ever meets."""


UPTIME_S = 400 * 86400.0
"""Added to the clock of ranks, as on machines that have been up for long."""


class Failed(NamedTuple):
    """The error with which a rank's function ended."""

    rank: int
    kind: str
    text: str
    trace: str


class PoolError(AssertionError):
    """A rank failed, or did not answer in time."""


class Pool:
    """`world` rank processes. `call` runs a function on each; after a failure they are killed and started again."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._ranks: list[tuple[Any, multiprocessing.connection.Connection]] = []
        self._store: Any = None

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_S) -> list[Any]:
        """function(rank, *args) on every rank; the results in rank order."""
        if not self._ranks:
            self._start()
        deadline = time.monotonic() + timeout_s
        try:
            for _, pipe in self._ranks:
                _put(pipe, (function.__module__, function.__qualname__, args))
            results = [self._answer(rank, deadline) for rank in range(self.world)]
        except BaseException:
            self.kill()
            raise
        failed = [r for r in results if isinstance(r, Failed)]
        if failed:
            self.kill()
            raise PoolError("\n".join(f"rank {f.rank}: {f.kind}: {f.text}\n{f.trace}" for f in failed))
        return results

    def ready(self, module: str) -> None:
        """All ranks have started and imported that module, so processes with a limited wait for ranks may start."""
        self.call(_loaded, module)

    def _answer(self, rank: int, deadline: float) -> Any:
        _, pipe = self._ranks[rank]
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            return Failed(rank, "TimeoutError", "no answer before the deadline", "")
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return Failed(rank, "EOFError", "the process ended", "")

    def _start(self) -> None:
        import torch.distributed as dist

        # The store lives here, as with torchrun's agent, so that no port has to be guessed.
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            mine, theirs = multiprocessing.Pipe()
            environment = clean_environment() | rank_environment(rank, self.world, self._store.port)
            self._ranks.append((processes.started(_rank, theirs, environment=environment), mine))
            theirs.close()
        deadline = time.monotonic() + START_S
        ready = [self._answer(rank, deadline) for rank in range(self.world)]
        if ready != ["ready"] * self.world:
            self.kill()
            raise PoolError(f"the ranks did not start: {ready}")

    def kill(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks.clear()
        self._store = None

    def close(self) -> None:
        """Lets idle ranks end by themselves."""
        for process, pipe in self._ranks:
            pipe.close()
            process.join(10.0)
        self.kill()


_pools: dict[int, Pool] = {}


def pool(world: int = 2) -> Pool:
    """The pool of that size; one for the whole test session."""
    if world not in _pools:
        _pools[world] = Pool(world)
        atexit.register(_pools[world].close)
    return _pools[world]


def ranks_first(world: int) -> Any:
    """A fixture for all tests of the module that assigns it: the pool of that size is ready before servers start."""

    @pytest.fixture(autouse=True)
    def _ranks(request: pytest.FixtureRequest) -> None:
        pool(world).ready(request.module.__name__)

    return _ranks


def _loaded(_rank: int, module: str) -> None:
    importlib.import_module(module)


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """As torchrun sets it for one process per node."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
    }


def quick(**fields: Any) -> dict[str, Any]:
    """Settings of a small job: many small buckets, short deadlines, once all have come together."""
    return {"deadline_s": 20.0, "join_deadline_s": 90.0, "heartbeat_s": 0.5, "dead_after_s": 5.0,
            "fuse_nbytes": 2048, "cut_nbytes": 4096} | fields


class Servers(contextlib.AbstractContextManager["Servers"]):
    """A coordinator and its servers as threads of this process: what `commlayer serve` runs, with their state in reach."""

    def __init__(self, workers: int, servers: int = 1, **fields: Any) -> None:
        from commlayer.cluster.membership.coordinator import Coordinator
        from commlayer.cluster.servers.data_server import DataServer
        from commlayer.config import read_config

        processes.start_fork_server()
        self._config = read_config(quick(**fields), environ={}, cwd="/nonexistent")
        self._ended = threading.Event()
        self._failures: list[BaseException] = []
        self._coordinator = Coordinator(self._config, workers=workers, servers=servers, ended=self._ended)
        self.address = self._coordinator.address
        self.serving = [DataServer(self._config.bind, 0, self._config) for _ in range(servers)]
        self._threads = [threading.Thread(target=self._serve, args=(s,), daemon=True) for s in self.serving]
        for thread in self._threads:
            thread.start()

    def _serve(self, serving: Any) -> None:
        from commlayer.cluster.calls import messages
        from commlayer.cluster.membership import client

        request = messages.server_request(serving.address)
        try:
            member = client.join(self.address, request, self._config, lambda _: None, ended=self._ended)
            serving.start(member.epoch, member.plan, member.rank, await_epoch=member.await_epoch)
            self._ended.wait()
            member.leave()
        except BaseException as error:
            if not self._ended.is_set():  # otherwise the test ended before its workers joined
                self._failures.append(error)

    def residuals(self) -> list[Any]:
        """Residual slices of all servers."""
        from commlayer.cluster.servers.server_codecs import CodecOps

        cells = [cell for serving in self.serving if serving.sums is not None for cell in serving.sums.cells.values()]
        return [part for cell in cells if isinstance(cell.ops, CodecOps) for part in cell.ops.residuals()]

    def has_results(self) -> bool:
        """Whether the first server keeps a result."""
        sums = self.serving[0].sums
        return sums is not None and any(cell.results for cell in sums.cells.values())

    def refuse_plans(self, server: int, reason: str) -> None:
        """That server refuses every change of plan."""
        def refuse(*_: object) -> None:
            raise ValueError(reason)

        self.serving[server]._switch_plan = refuse

    def send(self, worker: int, header: Any, body: bytes) -> None:
        """Sends from the first server, whether the plan allows it or not."""
        self.serving[0].transport.send(worker, header, body)

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(10.0)
        for serving in self.serving:
            serving.close()
        self._coordinator.close()
        if self._failures:
            raise self._failures[0]

    def __exit__(self, *_: object) -> None:
        self.close()


def _put(pipe: multiprocessing.connection.Connection, value: Any) -> None:
    """Tensors by value: torch's own way with these pipes shares memory and needs both ends alive."""
    pipe.send_bytes(pickle.dumps(value))


def _rank(pipe: multiprocessing.connection.Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, monotonic = dist.get_rank(), time.monotonic
    time.monotonic = lambda: monotonic() + UPTIME_S
    _put(pipe, "ready")
    while True:
        try:
            module, name, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            break
        result: Any
        try:
            result = getattr(importlib.import_module(module), name)(rank, *args)
        except BaseException as error:
            result = Failed(rank, type(error).__name__, str(error), traceback.format_exc())
        _put(pipe, result)
        logging.getLogger("commlayer").setLevel(logging.NOTSET)  # a test may have disabled logging that the next one needs
    os._exit(0)


class Tree:
    """A training script, each rank a separate process, all in one process group, as under a terminal."""

    def __init__(self, script: str, world: int, *, args: tuple[str, ...] = (), settings: dict[str, Any] | None = None) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._errors = tempfile.TemporaryDirectory()
        mine = {f"COMMLAYER_{k.upper()}": str(v) for k, v in (settings or {}).items()}
        self.processes: list[Any] = []
        self._out: list[multiprocessing.connection.Connection] = []
        self._said = [b""] * world
        """What has been read of each rank and not been taken."""
        for rank in range(world):
            environment = clean_environment() | rank_environment(rank, world, self._store.port) | mine
            receiving, sending = multiprocessing.Pipe(duplex=False)
            self.processes.append(processes.started(processes.script, script, args, sending, self._errors_of(rank),
                                                    environment=environment, leader=self.processes[0].pid if rank else 0))
            sending.close()
            self._out.append(receiving)

    def _errors_of(self, rank: int) -> str:
        return f"{self._errors.name}/{rank}"

    def until(self, rank: int, word: str, timeout_s: float = START_S) -> str:
        """Reads that rank's output up to the first line that begins with `word`. PoolError with where all ranks stand, if one
        has ended (another one: with an error), or that line does not come in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            while b"\n" in self._said[rank]:
                line, self._said[rank] = self._said[rank].split(b"\n", 1)
                if line.startswith(word.encode()):
                    return line.decode()
            if select.select([self._out[rank]], [], [], 0.2)[0]:
                more = os.read(self._out[rank].fileno(), 1 << 16)
                self._said[rank] += more
                if not more:
                    break
            elif self.processes[rank].exitcode is not None or any(process.exitcode for process in self.processes):
                break
        for process in self.processes:
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        text = "\n".join(f"rank {n}, exit code {p.exitcode}: {Path(self._errors_of(n)).read_text()}"
                         for n, p in enumerate(self.processes))
        raise PoolError(f"rank {rank} has not said {word!r}: {text}")

    def interrupt(self) -> None:
        os.killpg(self.processes[0].pid, signal.SIGINT)

    def ended(self, timeout_s: float) -> list[tuple[int, str]]:
        """Exit code and standard error of every rank; fails if one is still running after that time."""
        deadline = time.monotonic() + timeout_s
        return [self.ended_one(rank, deadline - time.monotonic()) for rank in range(len(self.processes))]

    def ended_one(self, rank: int, timeout_s: float) -> tuple[int, str]:
        process = self.processes[rank]
        process.join(max(0.1, timeout_s))
        if process.exitcode is None:
            raise PoolError(f"rank {rank} has not ended in time")
        return process.exitcode, Path(self._errors_of(rank)).read_text()

    def close(self) -> None:
        """Lets idle ranks exit."""
        for process in self.processes:
            process.kill()  # a stopped process, too
        for process, out in zip(self.processes, self._out, strict=True):
            process.join()
            out.close()
        self._errors.cleanup()


@contextlib.contextmanager
def tree(script: str, world: int, **kwargs: Any) -> Iterator[Tree]:
    result = Tree(script, world, **kwargs)
    try:
        yield result
    finally:
        result.close()


def gone(pid: int, timeout_s: float) -> bool:
    """Whether no process has that id (or only a zombie), at the latest after that time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


SETTINGS = {"deadline_s": 6.0, "join_deadline_s": 60.0, "heartbeat_s": 0.5, "dead_after_s": 2.5,
            "fuse_nbytes": 2048, "cut_nbytes": 4096}
END_S = 25.0
"""Bounds the end of a run after a failure: the deadline, the time to see a death, and room for a loaded machine."""


def last_line(errors: str) -> str:
    """The line of the exception that ended a script; torch writes the rank in front."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in errors.splitlines()]
    results = [line for line in lines if re.match(r"[\w.]+(Error|Lost|Exceeded|Interrupt)\b", line)]
    assert results, errors
    return results[-1]
