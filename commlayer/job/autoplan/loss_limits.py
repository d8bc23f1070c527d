"""What a running job may plan with: ways, and codecs by its loss budget and its guard's floor. Plans nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from commlayer import loss_budget
from commlayer.balance import tuner_loss
from commlayer.balance.tuner_loss import LossModel
from commlayer.compressors import parse
from commlayer.job.allowed_ways import allowed_ways, takes_fragments
from commlayer.job.autoplan.link_probes import RankMeasurement
from commlayer.job.connection import Connection
from commlayer.planner.model.cluster import Policy, Profile
from commlayer.runtime import codec_floor


def codecs(connection: Connection) -> list[str]:
    """Those that are worth measuring."""
    return codec_floor.at_least(connection.terms.floor, loss_budget.names(_model(connection), _budget(connection)))


def remembers(connection: Connection) -> bool:
    """Whether its optimizer does: then local steps leave ranks with different states."""
    return connection.stepped is not None and connection.stepped.remembers


def policy_of(connection: Connection, rows: Sequence[RankMeasurement] = ()) -> Policy:
    """What its script allows, as rank 0 sees it, and as all ranks told when they measured. Where another sees it otherwise, it
    refuses the plan."""
    ways = allowed_ways(connection)
    # Controllers refuse local steps; who weighs batches otherwise, as samplers do, weighs rounds of them, too.
    balanced = connection.terms.balanced or any(row.balanced for row in rows)
    return Policy(
        devices=("cpu",), optimizer=connection.terms.optimizer, exact=balanced or not {"updates", "local", "round"} <= ways,
        # Late results put old averages in place of what has gathered in `.grad`, which scripts add up.
        forward="forward" in ways, staleness=False, fragments=takes_fragments(connection),
    )


def bounded(connection: Connection, profile: Profile, policy: Policy) -> tuple[Profile, Policy]:
    """Within the budget, by losses that the user measured or else by the shipped ones; and no codec below the guard's floor."""
    model = _model(connection)
    if model is not None or connection.terms.max_loss:
        policy = structs.replace(policy, max_loss=_budget(connection))
    if model is not None:
        profile, policy = loss_budget.priced(profile, policy, model)
    if not connection.terms.floor:
        return profile, policy
    known = policy.codecs or tuple(dict.fromkeys(cost.codec for cost in profile.codecs))
    fine = tuple(name for name in known if codec_floor.level(parse(name)) >= connection.terms.floor * codec_floor.EQUAL)
    return profile, structs.replace(policy, codecs=fine)


def _budget(connection: Connection) -> float:
    return connection.terms.max_loss or loss_budget.BUDGET


def _model(connection: Connection) -> LossModel | None:
    return tuner_loss.read(Path(connection.terms.loss)) if connection.terms.loss else None
