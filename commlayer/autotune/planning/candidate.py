"""A plan that a running job could switch to, with its predictions."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from commlayer.planner.costs import plan_excess
from commlayer.planner.model import DENSE, Basis, Question
from commlayer.records import Plan

Price = tuple[float, float]
"""A plan's predicted communication: seconds per step, and the fraction of computing that overlaps it."""

LEAVES = 0.95
"""Local steps replace averaged gradients only if they reduce the time to a loss to this fraction. Their convergence factors are
cautious for learning rates that decay; the margin is for errors of predicted step times. At a constant rate, 2 to 8 local steps
of 4 workers needed up to a third more steps than predicted, those of 8 workers up to 60 % more."""
MOST_STEPS = 3.0
"""A plan whose convergence factor exceeds this limit is never chosen: no predicted step time is accurate enough to justify
it."""
MODE_FIELDS = ("codes", "overlap", "local_steps", "fragments")
"""Fields of a plan that define its sync mode."""


class Candidate(NamedTuple):
    """A plan that a running job could switch to, with predictions for this plan and for the active one."""

    basis: Basis
    """The plan in the planner's form, and the inputs of the search. Workers use other names for some paths, which the planner
    cannot predict."""
    runnable: Plan
    """The same plan in the form that workers run, with buckets assigned to the running servers."""
    current: Plan
    """The planner's form of the plan that was active during the search."""
    current_s: float
    """Predicted step time of the plan that was active during the search, in seconds."""
    uncontended_s: float
    """Like `current_s`, but predicted without contention for the CPU."""
    price: Price
    current_price: Price
    steps: float = 1.0
    """Convergence factor of this plan: a cautious estimate of how many times as many steps it needs to reach a loss."""
    current_steps: float = 1.0
    """Convergence factor of the plan that was active during the search."""
    leaves: str = ""
    """Why the plan gives up averaging all gradients in every step; "" if it does not, or if the active plan had done so
    before."""
    alone_s: float = 0.0
    """Seconds that one machine alone needs for the progress of one dense training step; 0 if unknown."""
    hint: str = ""
    """Text about the benefit of local steps that the script has not allowed; "" if it is small."""
    auto_times: float = 0.0
    """By how many times local steps that the script has not allowed would be faster; 0: unknown, or it has allowed them."""
    uncapped_s: float = 0.0
    """Like `alone_s`, of the best plan without the homes' caps; 0: not searched."""
    alternatives: tuple[Candidate, ...] = ()
    """Other candidates, with predictions from the same costs. The alternatives are tried in this order if the step time of this
    plan permits."""

    @property
    def plan(self) -> Plan:
        return self.basis.plan

    @property
    def back(self) -> Candidate:
        """The plan that was active during the search, as a candidate for a roll-back."""
        return self._replace(basis=self.basis._replace(plan=self.current), price=self.current_price, steps=self.current_steps,
                             leaves="", alternatives=())

    @property
    def dense(self) -> bool:
        """True: the plan sends uncompressed gradients and averages them in every step."""
        return not self.leaves and all(b.codec == DENSE for b in self.plan.buckets)

    def in_executed_form(self, plan: Plan) -> Candidate:
        """Returns the candidate in the form in which ranks run it as `plan`: the script or the optimizer's states may force
        another sync mode than the planned one."""
        if all(getattr(plan, field) == getattr(self.runnable, field) for field in MODE_FIELDS):
            return self
        buckets = self.plan.buckets
        if plan.steps_locally:
            buckets = tuple(structs.replace(b, stale=False) for b in buckets)
        actual = structs.replace(self.plan, buckets=buckets, step_s=plan.step_s, steps=plan.steps,
                                 steps_high=plan.steps_high, **{field: getattr(plan, field) for field in MODE_FIELDS})
        return self._replace(basis=self.basis._replace(plan=actual), runnable=plan,
                             steps=estimate_factor(actual, self.basis.inputs))


def estimate_factor(plan: Plan, question: Question) -> float:
    """Returns a cautious estimate of a plan's convergence factor."""
    return 1.0 + plan_excess(plan, question).high
