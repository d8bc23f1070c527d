"""The event loop of this process's gRPC servers and streams, on a thread of its own. Knows no calls.

There is one, whoever uses it: grpc.aio wakes every loop that it knows of for what concerns one of them.
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


def running() -> asyncio.AbstractEventLoop:
    with _lock:
        if not _loops:
            # An epoll would be shared with forked children, which take its entries out as they end.
            loop = asyncio.SelectorEventLoop(selectors.PollSelector())
            threading.Thread(target=loop.run_forever, name="commlayer-grpc", daemon=True).start()
            _loops.append(loop)
        return _loops[0]


def run(what: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """Its result. Not to be called on the loop itself."""
    return asyncio.run_coroutine_threadsafe(what, running()).result(timeout_s)


os.register_at_fork(after_in_child=_loops.clear)  # the thread is the parent's
