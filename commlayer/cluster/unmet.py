"""Who waits for whose part where homes meet, and for how long. Knows no clock, no view, and not what names mean."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

STALE_S = 10.0
"""Who waits asks every MAX_WAIT_S; who has not asked for so long waits no more. A call that is lost without a word is made anew
after up to home.BYTES_S: who made it seems to wait for nobody meanwhile, and its waits begin anew then."""
MOST_NAMES = 4096
"""That one rank waits for at once: a part for each member, and some parts at once in each group."""


class Unmet(NamedTuple):
    """A name under which one rank is to leave its part, and has not."""

    rank: int
    waited_s: Mapping[int, float]
    """By rank that waits for it: for how long."""
    limit_s: float
    """The longest that any of those may wait, as they say."""


class _Wait(NamedTuple):
    begin_s: float
    seen_s: float
    limit_s: float


class Meetings:
    """Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, dict[int, dict[int, _Wait]]] = {}
        """By name, and by whose part it is as they say who wait: those, by rank."""

    def waits(self, rank: int, want: Iterable[tuple[str, int]], limit_s: float, now: float) -> None:
        """For each name, which is that rank's to leave."""
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
        """It waits for these no more, though they have not come."""
        with self._lock:
            for name in names:
                for by in self._names.get(name, {}).values():
                    by.pop(rank, None)

    def came(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._names.pop(name, None)

    def unmet(self, now: float) -> list[Unmet]:
        found = []
        with self._lock:
            for name, owners in list(self._names.items()):
                for of, by in list(owners.items()):
                    owners[of] = {rank: wait for rank, wait in by.items() if now - wait.seen_s < STALE_S}
                    if by := owners[of]:
                        found.append(Unmet(of, {rank: now - wait.begin_s for rank, wait in by.items()},
                                           max(wait.limit_s for wait in by.values())))
                    else:
                        del owners[of]
                if not owners:
                    del self._names[name]
        return found
