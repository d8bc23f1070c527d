"""Tracks which ranks wait in the homes' store, for which other ranks, and since when."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

STALE_S = 10.0
"""A waiting rank calls every MAX_WAIT_S; without a call for this long it no longer waits. A rank may repeat a lost call as late
as after home.BYTES_S: it does not count as waiting meanwhile, and its wait begins again then."""
MOST_NAMES = 4096
"""Most keys that one rank may wait for at once: one part for each member, several parts in flight, in each process group."""


class Unmet(NamedTuple):
    """A key that one rank is to write and has not written, with the ranks that wait for it."""

    rank: int
    waited_s: Mapping[int, float]
    """Seconds that each rank has waited, by rank."""
    limit_s: float
    """The longest limit that one of them gave."""


class _Wait(NamedTuple):
    begin_s: float
    seen_s: float
    limit_s: float


class Meetings:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, dict[int, dict[int, _Wait]]] = {}
        """By key and by the rank that is to write it, as readers report it: the waits, by waiting rank."""

    def waits(self, rank: int, want: Iterable[tuple[str, int]], limit_s: float, now: float) -> None:
        """Records that the rank waits for these keys, each given with the rank that is to write it."""
        with self._lock:
            many = len(self._names) > MOST_NAMES
            mine = sum(rank in by for owners in self._names.values() for by in owners.values()) if many else 0
            for name, of in want:
                by = self._names.get(name, {}).get(of, {})
                if rank not in by and mine >= MOST_NAMES:
                    continue
                mine += rank not in by
                begin_s = by[rank].begin_s if rank in by else now
                self._names.setdefault(name, {}).setdefault(of, {})[rank] = _Wait(begin_s, now, limit_s)

    def ends(self, rank: int, names: Iterable[str]) -> None:
        """The rank no longer waits for these keys, although they were not written."""
        with self._lock:
            for name in names:
                for by in self._names.get(name, {}).values():
                    by.pop(rank, None)

    def came(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._names.pop(name, None)

    def unmet(self, now: float) -> list[Unmet]:
        pending = []
        with self._lock:
            for name, owners in list(self._names.items()):
                for of, by in list(owners.items()):
                    owners[of] = {rank: wait for rank, wait in by.items() if now - wait.seen_s < STALE_S}
                    if by := owners[of]:
                        pending.append(Unmet(of, {rank: now - wait.begin_s for rank, wait in by.items()},
                                             max(wait.limit_s for wait in by.values())))
                    else:
                        del owners[of]
                if not owners:
                    del self._names[name]
        return pending
