"""Entry point of a benchmark rank: runs it, then exits without destructors.

Imports no commlayer, because the environments of rivals have none.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def as_rank(run: Callable[[], object]) -> NoReturn:
    """Runs `run` and exits the process without destructors. After DDP has used a Gloo group, the group's destructor may join a
    thread that waits for the interpreter lock."""
    code = 0
    try:
        run()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        code = 1
    os._exit(code)
