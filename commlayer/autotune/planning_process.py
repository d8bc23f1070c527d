"""Runs plan searches in a child process: a search in the trainer's interpreter would make training steps several times as long.

The child does not import torch, and it ends with its parent. It reads a search order from standard input and writes the result
to standard output.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from commlayer.autotune.search import SearchOrder, SearchResult, search
from commlayer.errors import InvalidInput, InvalidState
from commlayer.records import Record

ROOT = Path(__file__).parents[2]
# The child must import the same package as this process, installed or not, regardless of the current directory.
RUN = ("import sys; root = sys.argv.pop(1); root in sys.path or sys.path.insert(0, root); "
       "from commlayer.autotune.planning_process import main; main()")
NICE = 5
"""Niceness of the planning process: training has priority over the search."""
LOOK_S = 5.0


class Answer(Record, frozen=True):
    """The result of a search, or the error."""

    found: SearchResult | None = None
    error: str = ""
    wrong: bool = False
    """True: the order was invalid, so the caller raises ValueError."""


class PlanningProcess:
    """Runs each search in a process of its own, which start() can start in advance. Not thread-safe, except for stop() and
    close()."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.over = self._searches = False

    def start(self) -> None:
        """Starts the process for the next search. Raises OSError if that is impossible. Does nothing after close()."""
        if self._process is None and not self.over:
            self._process = subprocess.Popen([sys.executable, "-P", "-c", RUN, str(ROOT)], stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, start_new_session=True)

    def search(self, order: SearchOrder) -> SearchResult:
        """Runs search.search() in the child and returns the result. Raises ValueError for an invalid order, and RuntimeError
        for any other failure, including the end of the child."""
        self.start()
        if (process := self._process) is None:
            raise InvalidState("E-SESSION-CLOSED", "the session is over")
        self._searches = True
        data, _ = process.communicate(msgspec.msgpack.encode(order))
        self._process, self._searches = None, False
        if process.returncode:
            raise InvalidState("E-PLANNER-ENDED", f"the planning process has ended (exit code {process.returncode})")
        answer = msgspec.msgpack.decode(data, type=Answer)
        if answer.found is None:
            raise InvalidInput("E-PLAN-INPUT", answer.error) if answer.wrong else RuntimeError(answer.error)
        return answer.found

    def close(self) -> None:
        """Ends the child permanently; later searches raise an error."""
        self.over = True
        self.stop()

    def stop(self) -> None:
        """Ends the child, and so a search in progress."""
        if (process := self._process) is not None:
            process.kill()
            if self._searches:
                process.wait()
            else:
                with contextlib.suppress(ValueError):  # the garbage collector has closed the pipes already
                    process.communicate()
                self._process = None


def main() -> None:
    """Entry point of the child: runs the search order on standard input."""
    os.nice(NICE)
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # print output must not mix with results
    data = sys.stdin.buffer.read()
    if not data:
        return
    try:
        answer = Answer(search(msgspec.msgpack.decode(data, type=SearchOrder)))
    except ValueError as error:
        answer = Answer(error=str(error), wrong=True)
    except Exception as error:
        answer = Answer(error=f"{type(error).__name__}: {error}")
    out.write(msgspec.msgpack.encode(answer))
    out.flush()


def _follow(parent: int) -> None:
    """Exits when the parent ends. The end of input is not reliable, because forked workers of the script keep the pipe open."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)
