"""Runs plan searches in a child process: a search in the trainer's interpreter would slow its steps several times.

The child loads no torch and ends with its parent. It reads orders from standard input and writes results to standard output.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import msgspec

from commlayer.autotune.search import SearchOrder, SearchResult, search
from commlayer.errors import InvalidInput, InvalidState
from commlayer.records import Record

ROOT = Path(__file__).parents[2]
# The child must import the same package as this process, installed or not, regardless of the current directory.
RUN = ("import sys; root = sys.argv.pop(1); root in sys.path or sys.path.insert(0, root); "
       "from commlayer.autotune.planning_process import main; main()")
LENGTH = struct.Struct("<Q")
NICE = 5
"""Training has priority over the search."""
LOOK_S = 5.0


class Answer(Record, frozen=True):
    """The result of a search, or the error."""

    found: SearchResult | None = None
    error: str = ""
    wrong: bool = False
    """Whether the order was invalid."""


class PlanningProcess:
    """Starts with the first search, or earlier by start(). Not thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False

    def start(self) -> None:
        """Raises OSError if the process cannot be started. Does nothing after close()."""
        if self._process is None and not self._over:
            self._process = subprocess.Popen([sys.executable, "-P", "-c", RUN, str(ROOT)], stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, start_new_session=True)

    def search(self, order: SearchOrder) -> SearchResult:
        """Runs search.search() in the child. Raises ValueError for an invalid order and RuntimeError for any other
        failure, including the end of the process."""
        self.start()
        process = self._process
        if process is None:
            raise InvalidState("E-SESSION-CLOSED", "the session is over")
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, order)
            data = _read(process.stdout)
        except (OSError, ValueError, EOFError):  # the child ended, or this end was closed
            self.stop()
            raise InvalidState("E-PLANNER-ENDED", f"the process that plans has ended (exit code {process.wait()})") from None
        answer = msgspec.msgpack.decode(data, type=Answer)
        if answer.found is None:
            raise InvalidInput("E-PLAN-INPUT", answer.error) if answer.wrong else RuntimeError(answer.error)
        return answer.found

    def close(self) -> None:
        """Ends the child permanently."""
        self._over = True
        self.stop()

    def stop(self) -> None:
        """Ends the child and a search in progress; the next search starts a new child."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unsent data is not needed
                    pipe.close()


def main() -> None:
    """Entry point of the child: runs searches until standard input ends."""
    os.nice(NICE)
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # print output must not mix with results
    while True:
        try:
            order = msgspec.msgpack.decode(_read(sys.stdin.buffer), type=SearchOrder)
        except EOFError:
            return
        try:
            answer = Answer(search(order))
        except ValueError as error:
            answer = Answer(error=str(error), wrong=True)
        except Exception as error:
            answer = Answer(error=f"{type(error).__name__}: {error}")
        try:
            _write(out, answer)
        except BrokenPipeError:
            return


def _follow(parent: int) -> None:
    """Exits when the parent ends: forked workers of the script keep the pipes open, so end of input is not reliable."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


def _write(pipe: IO[bytes], what: SearchOrder | Answer) -> None:
    data = msgspec.msgpack.encode(what)
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    """Raises EOFError if the other end is closed."""
    head = pipe.read(LENGTH.size)
    data = pipe.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""
    if not data:
        raise EOFError
    return data
