"""Runs plan searches, and what-if questions, in a child process: in the trainer's interpreter they would make training steps
several times as long.

The child does not import torch, and it ends with its parent. It reads an order from standard input and writes the result
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

from commlayer.autotune.planning.search import SearchOrder, SearchResult, search
from commlayer.autotune.planning.what_if import LinkGains, estimate_gains
from commlayer.errors import InvalidInput, InvalidState
from commlayer.planner.model import Question
from commlayer.records import Record, complete

ROOT = Path(__file__).parents[3]
# The child must import the same package as this process, installed or not, regardless of the current directory.
RUN = ("import sys; root = sys.argv.pop(1); root in sys.path or sys.path.insert(0, root); "
       "from commlayer.autotune.planning.planning_process import main; main()")
NICE = 10
"""Niceness of the planning process: training has priority over the search."""
LOOK_S = 5.0


class PlanningOrder(Record, frozen=True):
    """A search, or else the inputs of a job for estimate_gains."""

    search: SearchOrder | None = None
    inputs: Question | None = None


class PlanningAnswer(Record, frozen=True):
    """The result, or the error."""

    found: SearchResult | None = None
    gains: LinkGains | None = None
    error: str = ""
    wrong: bool = False
    """True: the order was invalid, so the caller raises ValueError."""


class PlanningProcess:
    """Runs each search in a process of its own, which start() can start in advance. One thread at a time requests searches;
    another thread may request an answer to a what-if question."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._runs = threading.Lock()
        """Held while the child works on an order."""
        self.over = self._searches = self._asks = False

    def start(self) -> None:
        """Starts the process for the next search. Raises OSError if that is impossible. Does nothing after close()."""
        if self._process is None and not self.over:
            self._process = subprocess.Popen([sys.executable, "-P", "-c", RUN, str(ROOT)], stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, start_new_session=True)

    def search(self, order: SearchOrder) -> SearchResult:
        """Runs search.search() in the child and returns the result; ends a what-if question in progress. Raises ValueError for
        an invalid order, and RuntimeError for any other failure, including the end of the child."""
        if self._asks:
            self.stop()
        with self._runs:
            found = self._answer(PlanningOrder(order)).found
        assert found is not None, "the answer to a search"
        return found

    def gains(self, inputs: Question) -> LinkGains | None:
        """Runs what_if.estimate_gains() in the child; fails as `search` does. None: the child is busy."""
        if not self._runs.acquire(blocking=False):
            return None
        try:
            self._asks = True
            gains = self._answer(PlanningOrder(inputs=inputs)).gains
            assert gains is not None, "the answer to a what-if question"
            return gains
        finally:
            self._asks = False
            self._runs.release()

    def _answer(self, order: PlanningOrder) -> PlanningAnswer:
        self.start()
        if (process := self._process) is None:
            raise InvalidState("E-SESSION-CLOSED", "the session is over")
        self._searches = True
        data, _ = process.communicate(msgspec.msgpack.encode(order))
        self._process, self._searches = None, False
        if process.returncode:
            raise InvalidState("E-PLANNER-ENDED", f"the planning process has ended (exit code {process.returncode})")
        answer = msgspec.msgpack.decode(data, type=complete(PlanningAnswer))
        if answer.error:
            raise InvalidInput("E-PLAN-INPUT", answer.error) if answer.wrong else RuntimeError(answer.error)
        return answer

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
    """Entry point of the child: runs the order on standard input."""
    os.nice(NICE)
    with contextlib.suppress(OSError):  # the kernel may divide the CPU among sessions, and this process has one of its own
        Path("/proc/self/autogroup").write_text(str(NICE))
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # print output must not mix with results
    data = sys.stdin.buffer.read()
    if not data:
        return
    try:
        order = msgspec.msgpack.decode(data, type=complete(PlanningOrder))
        answer = PlanningAnswer(search(order.search) if order.search else None, estimate_gains(order.inputs)
                                if order.inputs else None)
    except ValueError as error:
        answer = PlanningAnswer(error=str(error), wrong=True)
    except Exception as error:
        answer = PlanningAnswer(error=f"{type(error).__name__}: {error}")
    out.write(msgspec.msgpack.encode(answer))
    out.flush()


def _follow(parent: int) -> None:
    """Exits when the parent ends. The end of input is not reliable, because forked workers of the script keep the pipe open."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)
