"""Searches plans in a child process: a search in the trainer's own interpreter would slow its steps several times over.

The child loads no torch, knows no job, and ends with its parent: what it is asked comes by its standard input, what it finds
goes out by its standard output.
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

from commlayer.autotune.plan.plan_search import SearchOrder, SearchResult, search
from commlayer.errors import InvalidInput, InvalidState
from commlayer.records import Record

ROOT = Path(__file__).parents[3]
# The child must run the package that this process runs, installed or not, whatever lies in the current directory.
RUN = ("import sys; root = sys.argv.pop(1); root in sys.path or sys.path.insert(0, root); "
       "from commlayer.autotune.plan.planning_process import main; main()")
LENGTH = struct.Struct("<Q")
NICE = 5
"""Steps go before."""
LOOK_S = 5.0


class Answer(Record, frozen=True):
    """What was found, or why nothing was."""

    found: SearchResult | None = None
    error: str = ""
    wrong: bool = False
    """Whether what was asked is at fault."""


class PlanningProcess:
    """Started with the first search, or before by start(). One thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False

    def start(self) -> None:
        """OSError where no process can be made. Behind close() none is."""
        if self._process is None and not self._over:
            self._process = subprocess.Popen([sys.executable, "-P", "-c", RUN, str(ROOT)], stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, start_new_session=True)

    def search(self, order: SearchOrder) -> SearchResult:
        """What plan_search.search() says there: ValueError for what cannot be planned for, RuntimeError for any other failure,
        the end of the process among them."""
        self.start()
        process = self._process
        if process is None:
            raise InvalidState("E-SESSION-CLOSED", "the session is over")
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, order)
            data = _read(process.stdout)
        except (OSError, ValueError, EOFError):  # ended, or closed here meanwhile
            self.stop()
            raise InvalidState("E-PLANNER-ENDED", f"the process that plans has ended (exit code {process.wait()})") from None
        answer = msgspec.msgpack.decode(data, type=Answer)
        if answer.found is None:
            raise InvalidInput("E-PLAN-INPUT", answer.error) if answer.wrong else RuntimeError(answer.error)
        return answer.found

    def close(self) -> None:
        """For good."""
        self._over = True
        self.stop()

    def stop(self) -> None:
        """Ends the child, and with it a search under way; the next search starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not written yet is for nobody
                    pipe.close()


def main() -> None:
    """The child: one search after another until standard input ends."""
    os.nice(NICE)
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not print into an answer
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
    """Forked workers of a script hold its pipes open, so their end alone does not tell that it has gone."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


def _write(pipe: IO[bytes], what: SearchOrder | Answer) -> None:
    data = msgspec.msgpack.encode(what)
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    """EOFError where the other end has gone."""
    head = pipe.read(LENGTH.size)
    data = pipe.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""
    if not data:
        raise EOFError
    return data
