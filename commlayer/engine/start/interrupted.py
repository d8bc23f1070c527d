"""Prints one line per rank on Ctrl-C instead of a traceback. The script's own signal handlers stay."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from commlayer.errors import CommError

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
TORCHS = "_distributed_excepthook"
"""Name of torch's exception hook, which prints the rank before each line of Python's traceback."""


def print_one_line(rank: int) -> None:
    """Replaces sys.excepthook on this rank, unless the script has installed its own hook."""
    before: Hook = sys.excepthook
    around = [cell.cell_contents for cell in before.__closure__ or ()] if getattr(before, "__name__", "") == TORCHS else []
    if sys.__excepthook__ not in (before, *around):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if line := interrupt_line(error):
            sys.stderr.write(f"commlayer: rank {rank}: {line}\n")  # print() would write twice
            sys.stderr.flush()
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def interrupt_line(error: BaseException) -> str:
    """Returns the line to print if this rank or another rank was interrupted by Ctrl-C; "" for all other errors."""
    if isinstance(error, KeyboardInterrupt):
        frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)
                  if frame.f_globals.get("__name__") == "__main__"]
        return "interrupted" + (f" in {Path(frames[-1][0].f_code.co_filename).name}, line {frames[-1][1]}" if frames else "")
    return str(error) if isinstance(error, CommError) and KeyboardInterrupt.__name__ in str(error) else ""
