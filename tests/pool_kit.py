"""Long-lived rank processes in one Gloo group, and a job's coordinator and servers in the test's own process.

A test hands the pool a function of its module; every rank runs it. Starting ranks and servers costs an import of torch each, so
ranks are kept from test to test, and workers join servers that run as threads here. Run as a script, this file is a rank.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
START_S = 60.0
CALL_S = 60.0


class Failed(NamedTuple):
    """What a rank's function ended with, in place of a result."""

    rank: int
    kind: str
    text: str
    trace: str


class PoolError(AssertionError):
    """A rank failed, or did not answer in time."""


class Pool:
    """`world` rank processes. `call` runs a function on each; after a failure they are killed and started anew."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._ranks: list[tuple[subprocess.Popen[bytes], multiprocessing.connection.Connection]] = []
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
            mine, theirs = socket.socketpair()
            environment = clean_environment() | rank_environment(rank, self.world, self._store.port)
            process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], env=environment,
                                       pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()
            self._ranks.append((process, multiprocessing.connection.Connection(mine.detach())))
        deadline = time.monotonic() + START_S
        ready = [self._answer(rank, deadline) for rank in range(self.world)]
        if ready != ["ready"] * self.world:
            self.kill()
            raise PoolError(f"the ranks did not start: {ready}")

    def kill(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.wait()
            pipe.close()
        self._ranks.clear()
        self._store = None

    def close(self) -> None:
        """Lets idle ranks end by themselves."""
        for process, pipe in self._ranks:
            pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
        self.kill()


_pools: dict[int, Pool] = {}


def pool(world: int = 2) -> Pool:
    """The pool of that size; one for the whole test session."""
    if world not in _pools:
        _pools[world] = Pool(world)
        atexit.register(_pools[world].close)
    return _pools[world]


def clean_environment() -> dict[str, str]:
    """This process's environment without settings that would reach the package."""
    return {k: v for k, v in os.environ.items() if not k.startswith("COMMLAYER_")} | {"PYTHONPATH": str(ROOT)}


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """As torchrun sets it for one process per node."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
    }


def quick(**fields: Any) -> dict[str, Any]:
    """Settings of a small job: many small buckets, short deadlines."""
    return {"deadline_s": 20.0, "join_deadline_s": 30.0, "heartbeat_s": 0.5, "dead_after_s": 5.0,
            "fuse_nbytes": 2048, "cut_nbytes": 4096} | fields


class Servers:
    """A coordinator and its servers as threads of this process: what `commlayer serve` runs, with their state in reach."""

    def __init__(self, workers: int, servers: int = 1, **fields: Any) -> None:
        from commlayer.config import read_config
        from commlayer.control.coordinator import Coordinator
        from commlayer.control.serving import Serving

        self._config = read_config(quick(**fields), environ={}, cwd="/nonexistent")
        self._ended = threading.Event()
        self._failures: list[BaseException] = []
        self._coordinator = Coordinator(self._config, workers=workers, servers=servers, ended=self._ended)
        self.address = self._coordinator.address
        self.serving = [Serving(self._config.bind, 0, self._config) for _ in range(servers)]
        self._threads = [threading.Thread(target=self._serve, args=(s,), daemon=True) for s in self.serving]
        for thread in self._threads:
            thread.start()

    def _serve(self, serving: Any) -> None:
        from commlayer.control import client, messages

        request = messages.server(serving.address)
        try:
            member = client.join(self.address, request, self._config, lambda _: None, ended=self._ended)
            serving.start(member.view, member.plan, member.rank)
            self._ended.wait()
            member.leave()
        except BaseException as error:
            if not self._ended.is_set():  # otherwise the test ended before its workers joined
                self._failures.append(error)

    def residuals(self) -> dict[int, Any]:
        """What the servers keep back, by bucket."""
        cells = [cell for serving in self.serving for cell in serving._server._core.cells.values()]
        return {cell.bucket: cell.ops._state["residual"].clone() for cell in cells if "residual" in cell.ops._state}

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(10.0)
        for serving in self.serving:
            serving.close()
        self._coordinator.close()
        if self._failures:
            raise self._failures[0]

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _put(pipe: multiprocessing.connection.Connection, value: Any) -> None:
    """Tensors by value: torch's own way with these pipes shares memory and needs both ends alive."""
    pipe.send_bytes(pickle.dumps(value))


def _rank(descriptor: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    sys.path[:0] = [str(Path(__file__).parent)]
    pipe = multiprocessing.connection.Connection(descriptor)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
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
    os._exit(0)


# ---- trees of real processes


class Tree:
    """A training script, each rank a process of its own, all in one process group, as under a terminal."""

    def __init__(self, script: str, world: int, *, args: tuple[str, ...] = (), settings: dict[str, Any] | None = None) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        mine = {f"COMMLAYER_{k.upper()}": str(v) for k, v in (settings or {}).items()}
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(world):
            environment = clean_environment() | rank_environment(rank, world, self._store.port) | mine
            self.processes.append(subprocess.Popen(
                [sys.executable, "-u", script, *args], env=environment, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                process_group=self.processes[0].pid if self.processes else 0,
            ))

    def until(self, rank: int, word: str) -> str:
        """Reads that rank's output up to the first line that begins with `word`; the suite's time limit bounds it."""
        stream = self.processes[rank].stdout
        assert stream is not None
        for line in stream:
            if line.startswith(word):
                return line.strip()
        raise PoolError(f"rank {rank} ended without saying {word!r}: {self.processes[rank].communicate()[1]}")

    def interrupt(self) -> None:
        os.killpg(self.processes[0].pid, signal.SIGINT)

    def ended(self, timeout_s: float) -> list[tuple[int, str]]:
        """Exit code and standard error of every rank; fails if one is still there after that time."""
        deadline = time.monotonic() + timeout_s
        return [self.ended_one(rank, deadline - time.monotonic()) for rank in range(len(self.processes))]

    def ended_one(self, rank: int, timeout_s: float) -> tuple[int, str]:
        process = self.processes[rank]
        try:
            _, errors = process.communicate(timeout=max(0.1, timeout_s))
        except subprocess.TimeoutExpired:
            raise PoolError(f"rank {rank} has not ended in time") from None
        return process.returncode, errors

    def close(self) -> None:
        for process in self.processes:
            process.kill()  # a stopped process, too
        for process in self.processes:
            process.communicate()


@contextlib.contextmanager
def tree(script: str, world: int, **kwargs: Any) -> Iterator[Tree]:
    made = Tree(script, world, **kwargs)
    try:
        yield made
    finally:
        made.close()


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


if __name__ == "__main__":
    # By its module name, so that what it sends is of classes that the other end knows.
    importlib.import_module("pool_kit")._rank(int(sys.argv[1]))
