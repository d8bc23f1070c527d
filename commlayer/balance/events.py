"""Records that go into the balancer and come out of it."""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.balance.models import Line
from commlayer.records import Record


class Measurement(Record, frozen=True):
    """A worker's compute seconds in a step. A worker without a share may report a batch that it computed on its own."""

    worker: int
    batch: int
    compute_s: float


class Joined(Record, frozen=True):
    """A worker that can take part from now on. Without a line it first gets the smallest share."""

    worker: int
    cap: int | None = None
    line: Line | None = None


class Vanished(Record, frozen=True):
    """A worker that left or died."""

    worker: int


Input = Measurement | Joined | Vanished


class Decision(Record, frozen=True):
    """New shares for all members from a future step on, with reason and expected gain."""

    step: int
    from_step: int
    workers: tuple[int, ...]
    shares: tuple[int, ...]
    micro_batches: tuple[int, ...]
    reason: str
    before_s: float
    """Expected iteration time with the current shares; infinite if they are no longer possible."""
    after_s: float
    effect: float = 0.0
    """The straggler effect in the step of the decision."""

    @property
    def gain_s(self) -> float:
        return self.before_s - self.after_s

    @property
    def by_worker(self) -> dict[int, int]:
        return dict(zip(self.workers, self.shares, strict=True))


class Outcome(Record, frozen=True):
    """Compares the median of the first iterations under a decision with its prediction."""

    step: int
    decided: int
    """The step of the decision."""
    expected_s: float
    measured_s: float
    reason: str
    effect: float = 0.0
    """The straggler effect in the last of these steps."""
    whole_s: float = 0.0
    """Time of a whole step, including communication; 0 if it was not measured."""

    @property
    def error(self) -> float:
        return self.measured_s / self.expected_s - 1


class Note(Record, frozen=True):
    """An observation that changed no share: a refused measurement, a suspected spike, no worker left."""

    step: int
    text: str


Event = Decision | Outcome | Note


def straggler_effect(times_s: Sequence[float]) -> float:
    """LBB's straggler effect, (longest - shortest) / mean, over the workers that computed."""
    return (max(times_s) - min(times_s)) / (sum(times_s) / len(times_s)) if times_s else 0.0


def said(event: Decision | Outcome) -> str:
    if isinstance(event, Outcome):
        whole = f"; a whole step takes {event.whole_s * 1e3:.1f} ms" if event.whole_s else ""
        return (f"the shares decided at step {event.decided} brought {event.measured_s * 1e3:.1f} ms a step, expected were "
                f"{event.expected_s * 1e3:.1f} ms ({event.error:+.0%}); straggler effect {event.effect:.2f}{whole}")
    shares = ", ".join(f"worker {w} {share}" for w, share in zip(event.workers, event.shares, strict=True))
    return (f"new shares from step {event.from_step}: {shares}; {event.reason} (straggler effect {event.effect:.2f}): expected "
            f"{event.after_s * 1e3:.1f} ms a step instead of {event.before_s * 1e3:.1f} ms")
