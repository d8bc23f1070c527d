"""A torch.distributed Store on top of the coordinator's key-value store, for ranks in several sites."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d

from commlayer.cluster.calls.messages import ANY, MAX_KEYS
from commlayer.errors import CommError, InvalidState

if TYPE_CHECKING:
    from commlayer.cluster.calls.site_client import KvClient

_Store: Any = distributed_c10d.Store


class WorldStore(_Store):  # type: ignore[misc]
    """A torch.distributed Store on top of the coordinator's key-value store. The class has the methods that torch calls, some
    of them from C++."""

    def __init__(self, kv: KvClient, timeout_s: float, rank: int = ANY, owner: int = ANY) -> None:
        """`rank`: the coordinator's number of the rank that uses this store. `owner`: the rank to whose home all values belong;
        ANY: each value belongs to the home that writes it first."""
        super().__init__()
        self.kv, self._timeout_s, self._rank, self._owner = kv, timeout_s, rank, owner

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._call(lambda until: self.kv.request(until, put=[((key, self._owner), data)]))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [value or b"" for value in self._read_all(keys, self._timeout_s)]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        return int(self._call(lambda until: self.kv.request(until, add=((key, self._owner), value))).sum)

    def check(self, keys: list[str]) -> bool:
        return None not in self._read(keys, time.monotonic() + self._timeout_s, wait=False)

    def delete_key(self, key: str) -> bool:
        present = self.check([key])
        self._call(lambda until: self.kv.request(until, drop=[(key, self._owner)]))
        return present

    deleteKey = delete_key
    """The name of delete_key in torch's C++ code."""

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._read_all(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def _read_all(self, keys: list[str], timeout_s: float) -> tuple[bytes | None, ...]:
        values = self._read(keys, time.monotonic() + timeout_s, rank=self._rank, limit_s=timeout_s)
        if None in values:
            missing = [key for key, value in zip(keys, values, strict=True) if value is None]
            raise InvalidState("E-DEADLINE", f"wait timed out after {timeout_s:g} s, waiting for keys {', '.join(missing[:4])}")
        return values

    def _read(self, keys: list[str], until: float, **how: Any) -> tuple[bytes | None, ...]:
        values: tuple[bytes | None, ...] = ()
        for at in range(0, len(keys), MAX_KEYS):
            want = [(key, self._owner) for key in keys[at : at + MAX_KEYS]]
            values += self._call(lambda _, want=want: self.kv.request(until, want=want, **how)).values  # type: ignore[misc]
        return values

    def _call(self, call: Callable[[float], Any]) -> Any:
        """Makes a call and converts its errors to RuntimeErrors, the only errors that torch handles."""
        try:
            return call(time.monotonic() + self._timeout_s)
        except CommError as error:
            raise InvalidState("E-PROCESS-GROUP", str(error)) from error
