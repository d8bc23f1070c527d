"""The native router as a child process, compiled on first use and controlled by lines of text."""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lab.namespaces import LabUnavailable

HERE = Path(__file__).resolve().parent
SOURCES = (HERE / "router.cc", HERE / "segments.h")
CACHE = HERE.parent.parent / "build" / "lab"
ANSWER_S = 10.0


def build(cache: Path = CACHE) -> Path:
    """Returns the router's binary, compiled if there is none for these sources."""
    name = "router-" + hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]
    binary = cache / name
    if binary.exists():
        return binary
    compiler = shutil.which("c++")
    if compiler is None:
        raise LabUnavailable("the WAN lab compiles its router and found no c++; install a C++17 compiler such as g++")
    cache.mkdir(parents=True, exist_ok=True)
    part = cache / f"{name}.{os.getpid()}"
    done = subprocess.run([compiler, "-O2", "-std=c++17", "-o", str(part), str(SOURCES[0])], capture_output=True, text=True)
    if done.returncode:
        raise LabUnavailable(f"{compiler} could not compile {SOURCES[0]}: {done.stderr.strip()[:400]}")
    part.replace(binary)
    return binary


class Router:
    """A running router. It ends with close() or with this process."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._turn = threading.Lock()
        self._pending = b""
        self._child = subprocess.Popen(
            [str(build()), str(seed), *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            self._expect("ready", self._answer())
        except BaseException:
            self.close()
            raise

    def set(self, host: int, values: dict[str, float]) -> None:
        """Changes a link from now on; packets already queued keep their times."""
        line = " ".join(f"{key} {float(value)!r}" for key, value in values.items())
        self._expect("ok", self._ask(f"set {host} {line}"))

    def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._ask("stats"))
        return answer

    def close(self) -> None:
        assert self._child.stdin
        assert self._child.stdout
        self._child.stdin.close()
        try:
            self._child.wait(5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()

    def _ask(self, line: str) -> str:
        assert self._child.stdin
        with self._turn:
            try:
                self._child.stdin.write(line.encode() + b"\n")
                self._child.stdin.flush()
            except BrokenPipeError:
                raise RuntimeError(f"the lab's router has ended (exit code {self._child.wait(5)})") from None
            return self._answer()

    def _answer(self) -> str:
        assert self._child.stdout
        until = time.monotonic() + ANSWER_S
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._child.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise RuntimeError(f"the lab's router gave no answer for {ANSWER_S:g} s")
            chunk = os.read(self._child.stdout.fileno(), 65536)
            if not chunk:
                raise RuntimeError(f"the lab's router has ended (exit code {self._child.wait(5)}); its reason stands above")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()

    @staticmethod
    def _expect(expected: str, received: str) -> None:
        if received != expected:
            raise ValueError(f"the lab's router answered {received!r}")
