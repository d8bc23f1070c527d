"""Which codecs a running job may plan with, by its loss budget and its guard's floor. Knows a connection; plans nothing."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from commlayer import loss_budget
from commlayer.balance import tuner_loss
from commlayer.balance.tuner_loss import LossModel
from commlayer.compressors import parse
from commlayer.job.connection import Connection
from commlayer.planner.model.cluster import Policy, Profile
from commlayer.runtime import codec_floor


def codecs(connection: Connection) -> list[str]:
    """Those that are worth measuring."""
    return codec_floor.at_least(connection.floor, loss_budget.names(_model(connection), connection.max_loss))


def bounded(connection: Connection, profile: Profile, policy: Policy) -> tuple[Profile, Policy]:
    """Losses as they were measured, if they were, within the budget; and no codec below the guard's floor."""
    model = _model(connection)
    if model is not None:
        profile, policy = loss_budget.priced(profile, structs.replace(policy, max_loss=connection.max_loss), model)
    if not connection.floor:
        return profile, policy
    known = policy.codecs or tuple(dict.fromkeys(cost.codec for cost in profile.codecs))
    fine = tuple(name for name in known if codec_floor.level(parse(name)) >= connection.floor * codec_floor.EQUAL)
    return profile, structs.replace(policy, codecs=fine)


def _model(connection: Connection) -> LossModel | None:
    return tuner_loss.read(Path(connection.loss)) if connection.loss else None
