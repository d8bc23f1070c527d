"""Where homes meet at a coordinator: bytes by name, for whoever asks to wait for. Lives on one event loop; knows no meaning."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

from commlayer.errors import CorruptFrame

MAX_KEPT_NBYTES = 512 << 20
"""Of all values together. Groups drop what everybody has read: more than a few parts for each member has been forgotten."""
MAX_KEYS = 1 << 20
KEY_NBYTES = 128
"""What a key is charged beside its value."""


class MeetingStore:
    """All calls come from the loop's thread."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._sums: dict[str, tuple[int, set[str]]] = {}
        self._nbytes = 0
        self._changed = asyncio.Event()

    def put(self, pairs: Iterable[tuple[str, bytes]]) -> None:
        """CorruptFrame for more than it keeps; what a key held is replaced."""
        for name, value in pairs:
            nbytes = self._nbytes + len(value) + KEY_NBYTES - self._cost(name)
            if nbytes > MAX_KEPT_NBYTES or len(self._values) >= MAX_KEYS:
                raise CorruptFrame(f"the coordinator keeps {self._nbytes} bytes of homes already, allowed {MAX_KEPT_NBYTES}")
            self._values[name], self._nbytes = value, nbytes
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._nbytes -= self._cost(name)
            self._values.pop(name, None)

    def add(self, name: str, amount: int, once: str) -> int:
        """To a number; its new value, which is also there as text. What was added under the same name `once` counts once."""
        total, known = self._sums.setdefault(name, (0, set()))
        if once not in known:
            known.add(once)
            total += amount
            self._sums[name] = total, known
            self.put([(name, str(total).encode())])
        return total

    def found(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        return tuple(self._values.get(name) for name in names)

    async def change(self, timeout_s: float) -> None:
        """Until something is put, or that time is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def _cost(self, name: str) -> int:
        return len(self._values[name]) + KEY_NBYTES if name in self._values else 0
