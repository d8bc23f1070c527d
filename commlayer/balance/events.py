"""What goes into the balancer and what it says. Records only; knows no models and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.balance.models import Line
from commlayer.records import Record


class Measurement(Record, frozen=True):
    """A worker's compute seconds in a step. A worker without share may report a batch that it computed for itself."""

    worker: int
    batch: int
    compute_s: float


class Joined(Record, frozen=True):
    """A worker that can take part from now on; without a line it is first given as little as is allowed."""

    worker: int
    cap: int | None = None
    line: Line | None = None


class Vanished(Record, frozen=True):
    """A worker that is gone, for whatever reason."""

    worker: int


Input = Measurement | Joined | Vanished


class Decision(Record, frozen=True):
    """New shares for all members from a future step on, why, and what they should bring."""

    step: int
    from_step: int
    workers: tuple[int, ...]
    shares: tuple[int, ...]
    micro_batches: tuple[int, ...]
    reason: str
    before_s: float
    """Expected time of an iteration with the shares in force; infinite where they cannot be computed any more."""
    after_s: float
    effect: float = 0.0
    """The straggler effect in the step that it was decided by."""

    @property
    def gain_s(self) -> float:
        return self.before_s - self.after_s

    @property
    def by_worker(self) -> dict[int, int]:
        return dict(zip(self.workers, self.shares, strict=True))


class Outcome(Record, frozen=True):
    """What a decision brought: the median of the first iterations under it against what it expected."""

    step: int
    decided: int
    """The step of the decision."""
    expected_s: float
    measured_s: float
    reason: str
    effect: float = 0.0
    """The straggler effect that is left: of the last of these steps."""
    whole_s: float = 0.0
    """Of a whole step meanwhile, communication and all; 0 where nobody measured it."""

    @property
    def error(self) -> float:
        return self.measured_s / self.expected_s - 1


class Note(Record, frozen=True):
    """Something noticed that changed no share: a refused measurement, a suspected spike, nobody left."""

    step: int
    text: str


Event = Decision | Outcome | Note


def straggler_effect(times_s: Sequence[float]) -> float:
    """LBB's SE, (longest - shortest) / mean, of those that computed."""
    return (max(times_s) - min(times_s)) / (sum(times_s) / len(times_s)) if times_s else 0.0


def said(event: Decision | Outcome) -> str:
    """In a line, for people."""
    if isinstance(event, Outcome):
        whole = f"; a whole step takes {event.whole_s * 1e3:.1f} ms" if event.whole_s else ""
        return (f"the shares decided at step {event.decided} brought {event.measured_s * 1e3:.1f} ms a step, expected were "
                f"{event.expected_s * 1e3:.1f} ms ({event.error:+.0%}); straggler effect {event.effect:.2f}{whole}")
    shares = ", ".join(f"worker {w} {share}" for w, share in zip(event.workers, event.shares, strict=True))
    return (f"new shares from step {event.from_step}: {shares}; {event.reason} (straggler effect {event.effect:.2f}): expected "
            f"{event.after_s * 1e3:.1f} ms a step instead of {event.before_s * 1e3:.1f} ms")
