"""The process's event loop for gRPC servers and streams, on a separate thread.

There is a single loop, because grpc.aio wakes all loops for the events of each.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from collections.abc import Coroutine
from typing import Any

_lock = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


def event_loop() -> asyncio.AbstractEventLoop:
    with _lock:
        if not _loops:
            # Not epoll: forked children would share it and remove its entries when they exit.
            loop = asyncio.SelectorEventLoop(selectors.PollSelector())
            threading.Thread(target=loop.run_forever, name="commlayer-grpc", daemon=True).start()
            _loops.append(loop)
        return _loops[0]


def run_on_loop(what: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """Runs a coroutine on the event loop and returns its result. Must not be called on the loop itself."""
    return asyncio.run_coroutine_threadsafe(what, event_loop()).result(timeout_s)


os.register_at_fork(after_in_child=_loops.clear)  # the thread exists only in the parent
