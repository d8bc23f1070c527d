"""The limits within which a running job is planned: allowed sync modes, and codecs by loss budget and quality floor."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from commlayer import loss_budget
from commlayer.balance import loss_model
from commlayer.balance.loss_model import LossModel
from commlayer.compressors import parse
from commlayer.engine.job import codec_floor
from commlayer.engine.job.job import DistributedJob
from commlayer.planner.convergence import measured_local_steps
from commlayer.planner.model import Policy, Profile

YOUNG = 1000
"""Number of training steps in which a job counts as young. In these steps sparse codecs cost more than measured trainings
predict."""


class PlanLimits(NamedTuple):
    """Limits within which a search chooses a plan."""

    policy: Policy
    suggests: bool = False
    """True: the search also reports the benefit of local steps that the script has not allowed."""
    young: bool = False
    """True: the job is in its first YOUNG steps, in which codecs are int4 or finer if links permit."""


def codecs(context: DistributedJob) -> list[str]:
    """Returns the names of codecs that the loss budget and the quality floor allow, so measuring them is worthwhile."""
    return codec_floor.codecs_above_floor(context.terms.floor, loss_budget.names(_model(context), _budget(context)))


def collect_plan_limits(context: DistributedJob) -> PlanLimits:
    """Returns the limits that the script on rank 0 sets. A rank with other limits refuses the plan."""
    modes, terms = context.terms.allowed_modes(), context.terms
    able = not (context.norms_differ and context.matched) and {"updates", "local", "round"} <= modes
    takes_fragments = terms.requested.fragments is None
    policy = Policy(
        devices=("cpu",), optimizer=terms.optimizer, exact=not (able and terms.requested.exact is False),
        # Stale results would replace the gradients that scripts accumulate in `.grad` by older averages.
        forward="forward" in modes, staleness=False, fragments=takes_fragments,
    )
    return PlanLimits(policy, able and terms.requested.exact is None and not terms.suggested, context.passes < YOUNG)


def limit_to_budget(context: DistributedJob, profile: Profile, policy: Policy) -> tuple[Profile, Policy]:
    """Returns profile and policy limited by the loss budget (with the user's measured losses or the built-in ones), the
    quality floor, and the largest measured number of local steps."""
    if not policy.exact:
        policy = structs.replace(policy, max_local_steps=measured_local_steps(profile.learning))
    model = _model(context)
    if model is not None or context.terms.max_loss:
        policy = structs.replace(policy, max_loss=_budget(context))
    if model is not None:
        profile, policy = loss_budget.with_loss_penalties(profile, policy, model)
    if not context.terms.floor:
        return profile, policy
    names = policy.codecs or tuple(dict.fromkeys(cost.codec for cost in profile.codecs))
    fine = tuple(name for name in names if codec_floor.level(parse(name)) >= context.terms.floor * codec_floor.EQUAL)
    return profile, structs.replace(policy, codecs=fine)


def _budget(context: DistributedJob) -> float:
    return context.terms.max_loss or loss_budget.BUDGET


def _model(context: DistributedJob) -> LossModel | None:
    return loss_model.read(Path(context.terms.loss)) if context.terms.loss else None
