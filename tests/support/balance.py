"""Sessions for tests of samplers and dispatchers; the machines of the LBB paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlayer.balance.time_models import LinearTime
from commlayer.records import Plan

PAPER = [LinearTime(slope_ms / 1e3, launch_ms / 1e3) for slope_ms, launch_ms in
         [(0.5931, 5.90), (0.5808, 7.15), (0.6023, 8.29), (2.6714, 50.98)]]
"""M40, GTX 1070, GTX 1070, GTX 750, from the paper's two tables."""


class FakeSession:
    """The session interface that a sampler uses; records the weight."""

    def __init__(self) -> None:
        self.n = 0.0
        self.plan: Plan | None = None
        self.members: tuple[int, ...] = (0,)
        self.own, self.may_leave, self.context = 0, False, None
        self.followers: dict[str, Callable[[], str]] = {}
        self.joined_state: dict[str, str] = {}

    @property
    def inspect(self) -> FakeSession:
        return self

    def weight(self, n: float, total: float | None = None) -> None:
        self.n = n

    step = exchanged_steps = 0

    @property
    def confirmed(self) -> int:
        return self.exchanged_steps

    def steps_at_exit(self, member: int) -> int:
        return 0

    def catch_up(self, *, wholly: bool = False) -> None:
        pass

    def flush(self) -> bool:
        raise AssertionError("no local steps here")

    def no_sync(self) -> Any:
        raise AssertionError("no micro-batches here")

    def metrics(self) -> dict[str, float]:
        return {}


class LeftMembers(FakeSession):
    """A job whose members may leave."""

    def __init__(self, members: tuple[int, ...]) -> None:
        super().__init__()
        self.members, self.may_leave = members, True

    def steps_at_exit(self, member: int) -> int:
        """All members left in the finished step."""
        return self.step - 1
