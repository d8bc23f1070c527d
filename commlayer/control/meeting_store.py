"""Where homes meet at a coordinator: bytes by name, for whoever asks to wait for. Lives on one event loop; knows no meaning."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

from commlayer.control.messages import MAX_REPLY_NBYTES
from commlayer.errors import CorruptFrame

MAX_KEPT_NBYTES = 512 << 20
"""Of all values together. Groups drop what everybody has read: more than a few parts for each member has been forgotten."""
MAX_NAME_NBYTES = 256
KEY_NBYTES = 256
"""What a key is charged beside its name and value."""
MAX_TOKENS = 4096
"""Of a number: the latest of what was added to it are told from what is said again."""
TOKEN_NBYTES = KEY_NBYTES + MAX_NAME_NBYTES
MAX_FOUND_NBYTES = MAX_REPLY_NBYTES - (1 << 20)
"""Of the values in one answer; the rest is for what is around them."""


class MeetingStore:
    """All calls come from the loop's thread."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._sums: dict[str, tuple[int, dict[str, None]]] = {}
        self._nbytes = 0
        self._changed = asyncio.Event()

    def put(self, pairs: Iterable[tuple[str, bytes]]) -> None:
        """CorruptFrame for more than it keeps; what a key held is replaced."""
        for name, value in pairs:
            self._charge(_charged(name) + len(value) - self._cost(name))
            self._values[name] = value
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._nbytes -= self._cost(name)
            self._values.pop(name, None)
            _, known = self._sums.pop(name, (0, {}))
            self._nbytes -= TOKEN_NBYTES * len(known)

    def add(self, name: str, amount: int, once: str) -> int:
        """To a number; its new value, which is also there as text. What was added under the same name `once` counts once."""
        total, known = self._sums.get(name, (0, {}))
        if once not in known:
            _charged(once)
            total += amount
            self.put([(name, str(total).encode())])
            self._charge(TOKEN_NBYTES)
            known[once] = None
            if len(known) > MAX_TOKENS:
                known.pop(next(iter(known)))
                self._nbytes -= TOKEN_NBYTES
            self._sums[name] = total, known
        return total

    def found(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        """CorruptFrame for more than an answer may hold, and for a name that is there twice."""
        if len(set(names)) < len(names):
            raise CorruptFrame(f"wants {len(names)} keys, of which {len(set(names))} differ; allowed: each once")
        values = tuple(self._values.get(name) for name in names)
        if (nbytes := sum(len(value) for value in values if value is not None)) > MAX_FOUND_NBYTES:
            raise CorruptFrame(f"wants {nbytes} bytes in one answer, allowed {MAX_FOUND_NBYTES}")
        return values

    async def change(self, timeout_s: float) -> None:
        """Until something is put, or that time is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def _cost(self, name: str) -> int:
        return _charged(name) + len(self._values[name]) if name in self._values else 0

    def _charge(self, nbytes: int) -> None:
        if self._nbytes + nbytes > MAX_KEPT_NBYTES:
            raise CorruptFrame(f"the coordinator keeps {self._nbytes} bytes of homes already, allowed {MAX_KEPT_NBYTES}")
        self._nbytes += nbytes


def _charged(name: str) -> int:
    nbytes = len(name.encode())
    if nbytes > MAX_NAME_NBYTES:
        raise CorruptFrame(f"a key of {nbytes} bytes, allowed {MAX_NAME_NBYTES}")
    return nbytes + KEY_NBYTES
