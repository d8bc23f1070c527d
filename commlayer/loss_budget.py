"""Applies a loss budget to codecs: measured loss penalties replace estimates, and codecs without a measurement are excluded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import structs

from commlayer.balance.loss_model import LossModel, family
from commlayer.codec_spec import SPARSE, parse_spec
from commlayer.errors import InvalidInput
from commlayer.planner.data.tables import DEFAULT_CODECS, profile_from_tables
from commlayer.planner.model import Cluster, Policy, Profile

DENSE = "identity()"
BUDGET = 0.05
"""Default loss budget of the quality guard: loss increase relative to dense training."""


def penalty(model: LossModel, codec: str) -> float:
    """Loss increase that a codec causes, relative to dense training; infinite if the model has no measurement of it."""
    if codec == DENSE:
        return 0.0
    return model.penalty(codec, parse_spec(codec).ratio or 1.0)


def names(model: LossModel | None, max_loss: float) -> list[str]:
    """Codecs that a profile should include: the default ones, and each measured codec at its smallest ratio within the
    budget."""
    if model is None:
        return list(DEFAULT_CODECS)
    candidates = dict.fromkeys(DEFAULT_CODECS)
    for name in sorted({point.codec for point in model.points}):
        if name not in SPARSE:
            candidates |= dict.fromkeys(_codecs_with_costs([f"{name}()"]))
        elif (least := model.least_ratio(name, max_loss)) is not None:
            candidates |= dict.fromkeys(_codecs_with_costs([f"{name}(ratio={_up(least):g})"]))
    return list(candidates)


def with_loss_penalties(profile: Profile, policy: Policy, model: LossModel) -> tuple[Profile, Policy]:
    """Returns the profile with measured loss penalties, and the policy with only measured codecs allowed. Raises ValueError if
    the policy names a codec that was not measured."""
    penalties = {cost.codec: penalty(model, cost.codec) for cost in profile.codecs}
    unmeasured = [codec for codec in policy.codecs if math.isinf(penalties.get(codec, 0.0))]
    if unmeasured:
        ranges = ", ".join(f"{name} {low:g}:{high:g}" for name, low, high in _measured(model))
        raise InvalidInput("E-LOSS-MODEL",
                           f"loss model: codec {unmeasured[0]} was not measured; measured are {ranges} (name, smallest and "
                           "largest ratio); measure it with `commlayer tune`")
    costs = tuple(structs.replace(c, task_loss=p) if math.isfinite(p := penalties[c.codec]) else c for c in profile.codecs)
    allowed = [codec for codec in (policy.codecs or penalties) if math.isfinite(penalties.get(codec, 0.0))]
    if not allowed:  # an empty tuple would allow all
        raise InvalidInput("E-LOSS-MODEL",
                           f"loss model: none of the codecs {', '.join(sorted(penalties))} was measured; measure them with "
                           "`commlayer tune`")
    return structs.replace(profile, codecs=costs), structs.replace(policy, codecs=tuple(allowed))


def tables(cluster: Cluster, model: LossModel, max_loss: float) -> Profile:
    """Makes a profile from the built-in tables, with the default codecs and those of the loss model."""
    return profile_from_tables(cluster, names(model, max_loss))


def first_codec(model: LossModel, max_loss: float, codecs: Sequence[str], sparse: str, ratio: float) -> str:
    """Codec of a job's first steps, before a plan exists: the first of `codecs` within the loss budget. If none is, `sparse`
    with its smallest ratio within the budget (at least `ratio`), or else no compression."""
    for codec in codecs:
        if penalty(model, codec) <= max_loss:
            return codec
    least = model.least_ratio(family(sparse.replace("{ratio}", "1")), max_loss)
    return DENSE if least is None else sparse.replace("{ratio}", f"{max(ratio, _up(least)):g}")


def _measured(model: LossModel) -> Iterable[tuple[str, float, float]]:
    for name in sorted({point.codec for point in model.points}):
        ratios = [point.ratio for point in model.points if point.codec == name]
        yield name, min(ratios), max(ratios)


def _codecs_with_costs(codecs: list[str]) -> list[str]:
    """Returns `codecs` if the built-in tables contain their costs, else an empty list."""
    try:
        profile_from_tables(Cluster(()), codecs)
    except ValueError:
        return []
    return codecs


def _up(ratio: float) -> float:
    """Rounds a ratio up to two digits; rounding up keeps the loss within its budget.

    >>> _up(0.02341), _up(1.0), _up(0.01)
    (0.024, 1.0, 0.01)
    """
    unit = 10.0 ** (math.floor(math.log10(ratio)) - 1)
    return min(1.0, float(f"{math.ceil(ratio / unit - 1e-9) * unit:.2g}"))
