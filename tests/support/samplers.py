"""Sessions for tests of samplers and dispatchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlayer.records import Plan


class Noted:
    """A session as a sampler sees it; keeps the weight."""

    def __init__(self) -> None:
        self.n = 0.0
        self.plan: Plan | None = None
        self.members: tuple[int, ...] = (0,)
        self.own, self.may_leave = 0, False
        self.followers: dict[str, Callable[[], str]] = {}
        self.given: dict[str, str] = {}

    @property
    def inspect(self) -> Noted:
        return self

    def weight(self, n: float, total: float | None = None) -> None:
        self.n = n

    step = carried = 0

    def parted(self, member: int) -> int:
        return 0

    def catch_up(self, *, wholly: bool = False) -> None:
        pass

    def drain(self) -> bool:
        raise AssertionError("no local steps here")

    def no_sync(self) -> Any:
        raise AssertionError("no micro-batches here")

    def stats(self) -> dict[str, float]:
        return {}


class Left(Noted):
    """A job whose members may leave."""

    def __init__(self, members: tuple[int, ...]) -> None:
        super().__init__()
        self.members, self.may_leave = members, True

    def parted(self, member: int) -> int:
        """All have gone in the step that is over."""
        return self.step - 1
