"""A torch.distributed Store on top of the coordinator's key-value store, for ranks in several homes."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.distributed import distributed_c10d

from commlayer.errors import CommError, InvalidState

ANY = -1


_Store: Any = distributed_c10d.Store


class Found(Protocol):
    @property
    def found(self) -> tuple[bytes | None, ...]: ...

    @property
    def sum(self) -> int: ...

    @property
    def over(self) -> bool:
        """The missing values will not come: their writers are gone."""
        ...


class Desk(Protocol):
    """Client of the key-value store; cluster/home.py implements it."""

    def ask(
        self, deadline: float, *, put: Sequence[tuple[str, bytes]] = (), drop: Sequence[str] = (),
        want: Sequence[tuple[str, int]] = (), add: tuple[str, int] | None = None, wait: bool = True, without: bool = False,
        view: int = 0, rank: int = ANY, limit_s: float = 0.0,
    ) -> Found: ...

    def close(self) -> None: ...


class WorldStore(_Store):  # type: ignore[misc]
    """The methods that torch needs. It calls them by name, also from C++."""

    def __init__(self, desk: Desk, timeout_s: float, rank: int = ANY) -> None:
        """`rank`: the coordinator's number of the rank that waits here."""
        super().__init__()
        self.desk, self._timeout_s, self._rank = desk, timeout_s, rank

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._asked(lambda until: self.desk.ask(until, put=[(key, data)]))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [value or b"" for value in self._all(keys, self._timeout_s)]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        return int(self._asked(lambda until: self.desk.ask(until, add=(key, value))).sum)

    def check(self, keys: list[str]) -> bool:
        values = self._asked(lambda until: self.desk.ask(until, want=[(key, ANY) for key in keys], wait=False)).found
        return None not in values

    def delete_key(self, key: str) -> bool:
        present = self.check([key])
        self._asked(lambda until: self.desk.ask(until, drop=[key]))
        return present

    deleteKey = delete_key
    """The name that torch's C++ code calls."""

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._all(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def _all(self, keys: list[str], timeout_s: float) -> tuple[bytes | None, ...]:
        until = time.monotonic() + timeout_s
        want = [(key, ANY) for key in keys]  # torch does not say which rank writes a key
        values: tuple[bytes | None, ...] = self._asked(
            lambda _: self.desk.ask(until, want=want, rank=self._rank, limit_s=timeout_s)).found
        if None in values:
            missing = [key for key, value in zip(keys, values, strict=True) if value is None]
            raise InvalidState("E-DEADLINE", f"wait timed out after {timeout_s:g} s, waiting for keys {', '.join(missing[:4])}")
        return values

    def _asked(self, call: Callable[[float], Any]) -> Any:
        """Converts errors to RuntimeErrors, the only ones that torch handles."""
        try:
            return call(time.monotonic() + self._timeout_s)
        except CommError as error:
            raise InvalidState("E-PROCESS-GROUP", str(error)) from error
