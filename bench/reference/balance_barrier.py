"""Published load balancers that keep the barrier of each step, as modes of the simulated cluster (balance_cluster.py).

Equal shares (synchronous SGD), LB-BSP-like (new shares every step, by predicted speed), DLB (once per epoch, by measured
speed) and OmniLearn-like (a proportional controller on the iteration time, without a model).
"""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.balance.schedule import apportion

Caps = Sequence[int | None]


class Equal:
    """Synchronous SGD: equal shares for all workers."""

    def __init__(self, workers: int, total: int, caps: Caps = ()) -> None:
        self._shares = apportion([1.0] * workers, total, caps)

    def shares(self, step: int) -> Sequence[int]:
        return self._shares

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        pass


class LbBsp(Equal):
    """Shares proportional to predicted speed, a moving average of samples per second."""

    def __init__(self, workers: int, total: int, caps: Caps = (), smoothing: float = 0.5) -> None:
        super().__init__(workers, total, caps)
        self.total, self.caps, self.smoothing = total, caps, smoothing
        self._speeds: list[float] = []

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        seen = _speeds(self._shares, times_s)
        old = self._speeds or seen
        self._speeds = [self.smoothing * new + (1 - self.smoothing) * was for new, was in zip(seen, old, strict=True)]
        self._shares = apportion(self._speeds, self.total, self.caps)


class Dlb(Equal):
    """Shares proportional to the mean speed of the last epoch."""

    def __init__(self, workers: int, total: int, caps: Caps = (), epoch_steps: int = 98) -> None:
        super().__init__(workers, total, caps)
        self.total, self.caps, self.epoch_steps = total, caps, epoch_steps
        self._busy_s = [0.0] * workers

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        self._busy_s = [busy + time_s for busy, time_s in zip(self._busy_s, times_s, strict=True)]
        if (step + 1) % self.epoch_steps == 0:
            self._shares = apportion(_speeds(self._shares, self._busy_s), self.total, self.caps)
            self._busy_s = [0.0] * len(self._busy_s)


class Proportional(Equal):
    """Each share is corrected by its worker's deviation from the mean time; within the dead band nothing changes."""

    def __init__(self, workers: int, total: int, caps: Caps = (), gain: float = 0.5, dead_band: float = 0.05) -> None:
        super().__init__(workers, total, caps)
        self.total, self.caps, self.gain, self.dead_band = total, caps, gain, dead_band

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        mean_s = sum(times_s) / len(times_s)
        if max(abs(time_s / mean_s - 1) for time_s in times_s) < self.dead_band:
            return
        # Proportional in the logarithm of the time, so a very slow worker keeps a positive share.
        wanted = [share * (mean_s / time_s) ** self.gain for share, time_s in zip(self._shares, times_s, strict=True)]
        self._shares = apportion(wanted, self.total, self.caps)


def _speeds(shares: Sequence[int], times_s: Sequence[float]) -> list[float]:
    """Samples per second. A share that was rounded to 0 counts as half a sample; otherwise it would stay 0."""
    return [max(share, 0.5) / max(time_s, 1e-9) if time_s else 0.0 for share, time_s in zip(shares, times_s, strict=True)]
