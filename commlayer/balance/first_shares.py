"""Computes the first shares from all workers' profiles. Pure: every worker gets the same shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from commlayer.balance.events import Decision, Note, straggler_effect
from commlayer.balance.fits import fit_cubic, fit_line, fit_piecewise
from commlayer.balance.models import Cubic, Line, Piecewise, in_pieces_s
from commlayer.balance.profiling import Points, WorkerProfile
from commlayer.balance.recursive_fit import checked_time
from commlayer.balance.share_solver import FREE, Communication, solve
from commlayer.errors import InvalidInput
from commlayer.records import Record

SharesOf = Callable[[Sequence[Cubic], int, Sequence[int | None], int], list[int]]
"""Shares from cubic models, total, caps and minimum."""


class Opening(Record, frozen=True):
    """The first decision. `lines` are the models near these shares, from which the balancer continues."""

    decision: Decision
    lines: tuple[Line, ...]
    cubics: tuple[Cubic, ...]
    notes: tuple[Note, ...] = ()
    """Measured times that were invalid and dropped."""


def opening(
    profiles: Sequence[WorkerProfile], total: int, before: Mapping[int, int], *, step: int, minimum: int = 1,
    exclude: bool = False, communication: Communication = FREE, shares_of: SharesOf | None = None,
) -> Opening:
    """Shares from `step` on that replace `before`. `shares_of` replaces the default solver. ValueError if a worker has no
    room."""
    needed = 2 * minimum - 1  # so that a share above the cap can be cut into parts of at least the minimum
    for worker, profile in enumerate(profiles):
        if profile.ended and profile.cap < needed:
            raise InvalidInput("E-SHARES-ARGUMENT",
                               f"worker {worker}: its memory holds {profile.cap} samples (headroom kept), needed are {needed}: "
                               "free memory, take a smaller model, or start without it")
    refused: list[Note] = []
    points = [_sound(worker, profile.points, step, refused) for worker, profile in enumerate(profiles)]
    models = [_model(measured) for measured in points]
    caps = [profile.cap if profile.ended else None for profile in profiles]
    cubics = tuple(_cubic(measured) for measured in points)
    if shares_of is None:
        shares = list(solve(models, total, caps, minimum=minimum, exclude=exclude, communication=communication).shares)
    else:
        shares = shares_of(cubics, total, caps, minimum)

    def times(of: Sequence[int]) -> list[float]:
        return [_time_s(models[worker], caps[worker], share) for worker, share in enumerate(of) if share]

    def step_s(of: Sequence[int]) -> float:
        makespan_s = max(times(of), default=math.inf)
        return makespan_s + communication.exposed_s(tuple(worker for worker, share in enumerate(of) if share), makespan_s)

    now = [before.get(worker, 0) for worker in range(len(profiles))]
    pieces = [-(-share // (cap or total)) for share, cap in zip(shares, caps, strict=True)]
    decision = Decision(step, step, tuple(range(len(profiles))), tuple(shares), tuple(pieces), "the profile", step_s(now),
                        step_s(shares), straggler_effect(times(now)))
    at = [max(1, -(-share // max(1, parts))) for share, parts in zip(shares, pieces, strict=True)]
    lines = tuple(_near(measured, batch) for measured, batch in zip(points, at, strict=True))
    return Opening(decision, lines, cubics, tuple(refused))


def _sound(worker: int, points: Points, step: int, refused: list[Note]) -> Points:
    sound = []
    for batch, time_s in points:
        try:
            sound.append((batch, checked_time(worker, time_s)))
        except ValueError as error:
            refused.append(Note(step, f"in the profile, {error}"))
    return sound


def _model(points: Points) -> Line | Piecewise:
    return fit_piecewise(points).model if len(points) > 1 else _near(points, 1)


def _near(points: Points, batch: int) -> Line:
    """The line through the points on both sides of a batch. A worker without points is assumed slow, so that it begins
    with little."""
    if len(points) < 2:
        size, time_s = points[0] if points else (1, 1.0)
        return Line(time_s / size)
    low, high = next(((a, b) for a, b in pairwise(points) if batch <= b[0]), points[-2:])
    slope_s = (high[1] - low[1]) / (high[0] - low[0])
    now_s = low[1] + slope_s * (batch - low[0])
    if slope_s < 0 or now_s <= 0:
        return fit_line((low, high)).model
    # A convex curve's line may start below zero: then use the line through zero that is exact at this batch.
    return Line(slope_s, now_s - slope_s * batch) if now_s >= slope_s * batch else Line(now_s / batch)


def _cubic(points: Points) -> Cubic:
    if len(points) > 1:
        return fit_cubic(points).model
    return Cubic(0.0, 0.0, _near(points, 1).slope_s, 0.0)


def _time_s(model: Line | Piecewise, cap: int | None, share: int) -> float:
    return in_pieces_s(model, share, cap) if cap and share > cap else model.time_s(share)
