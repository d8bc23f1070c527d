"""The user's choice of sync mode: checks attach()'s `every=`, `codes=` and so on, and writes them into a plan.

From then on, only the plan defines how steps are exchanged. The modes that not every rank can use:

    forward     results arrive during the next forward pass                   (Plan.overlap)
    updates     each rank steps on its own gradients, H = 1                   (Plan.codes)
    local       the same with H above 1                                       (Plan.local_steps)
    round       exchanges that run while the next outer step computes         (Plan.overlap)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import structs

from commlayer.errors import InvalidInput
from commlayer.planner.model.fragments import most_fragments
from commlayer.records import Plan

CODES = ("gradients", "updates")
OVERLAPS = ("round", "forward")
WAYS = ("forward", "updates", "local", "round")
Forbids = Callable[[str], str]
"""For one of `WAYS`, the reason why this rank cannot use it; "" if it can."""


class Asked(NamedTuple):
    """The arguments of attach(), the same on all ranks. None: as the plan defines. They hold for every plan of the job."""

    every: int | None = None
    codes: str | None = None
    overlap: str | None = None
    fragments: int | None = None
    exact: bool | None = None
    """True: every plan must step on the average of all gradients, apart from coding. None: only plans that the script requests
    may deviate. False: the automatic plan may take local steps."""

    @property
    def updates(self) -> bool:
        """Whether changes of weights are exchanged, whatever the plan defines."""
        return (self.every or 1) > 1 or self.codes == "updates"

    def __str__(self) -> str:
        codes = CODES[1] if self.updates else self.codes
        more = "" if codes is None else f", codes={codes!r}"
        more += "" if self.overlap is None else f", overlap={self.overlap!r}"
        more += "" if self.fragments is None else f", fragments={self.fragments}"
        more += "" if self.exact is None else f", exact={self.exact}"
        return f"every={self.every or 'as planned'}{more}"


def read_ways(every: Any, codes: Any, *, overlap: Any = None, fragments: Any = None, exact: Any = None) -> Asked:
    """ValueError, of one line, for values that no plan can have."""
    if every is not None and not _whole(every):
        raise InvalidInput("E-SYNC-EVERY", f"every: got {every!r}, allowed: a whole number of steps to an exchange, 1 or more")
    if codes not in (None, *CODES):
        raise InvalidInput("E-SYNC-MODE", f"codes: got {codes!r}, allowed: {', '.join(map(repr, CODES))}")
    several = every is not None and every > 1
    if several and codes == "gradients":
        raise InvalidInput("E-SYNC-MODE",
                           f"codes='gradients' with every={every}: gradients are averaged in every step; leave codes out, or "
                           "take every=1")
    if overlap not in (None, *OVERLAPS):
        raise InvalidInput("E-SYNC-MODE",
                           f"overlap: got {overlap!r}, allowed: 'round', with every=2 or more or codes='updates', or 'forward'")
    if overlap == "forward" and (several or codes == "updates"):
        raise InvalidInput("E-SYNC-FORWARD",
                           "overlap='forward' brings a step's gradients in ahead of the next step; allowed: without every and "
                           "codes='updates', which exchange weights; these have overlap='round'")
    if fragments is not None and not _whole(fragments):
        raise InvalidInput("E-SYNC-FRAGMENTS",
                           f"fragments: got {fragments!r} with every={every}, allowed: a divisor of every, since one fragment "
                           "is exchanged every H / fragments steps")
    if exact is not None and not isinstance(exact, bool):
        raise InvalidInput("E-SYNC-MODE", f"exact: got {exact!r}, allowed: True or False")
    request = Asked(every, codes, overlap, fragments, exact)
    if exact and (request.updates or overlap == "round"):
        raise InvalidInput("E-SYNC-MODE",
                           f"{request}: each rank steps on its own gradients then; allowed: exact=True without every, "
                           "codes='updates' and overlap='round'")
    return request


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def stepping(plan: Plan, asked: Asked) -> Plan:
    """The plan with attach()'s arguments in it. ValueError if they conflict."""
    if asked.updates and any(b.stale for b in plan.buckets):
        raise InvalidInput("E-SYNC-MODE",
                           "plan: has results that are a step late, and updates are coded, which ranks step on: make it "
                           "without staleness")
    if asked.every is not None and asked.every != plan.local_steps > 1:
        raise InvalidInput("E-SYNC-PLAN",
                           f"every={asked.every}, but the plan is one of {plan.local_steps} local steps: leave every out, or "
                           "make the plan with max_local_steps=1")
    if asked.exact and (plan.steps_locally or any(b.stale for b in plan.buckets)):
        how = "late results" if not plan.steps_locally else "coded updates" if plan.local_steps == 1 else \
            f"{plan.local_steps} local steps"
        raise InvalidInput("E-SYNC-PLAN",
                           f"exact=True, but the plan is one of {how}: leave exact out, or make the plan without them")
    every = asked.every or plan.local_steps
    if asked.codes == "gradients" and (every > 1 or plan.codes == "updates"):
        what = f"is one of {every} local steps" if every > 1 else "is one of coded updates"
        raise InvalidInput("E-SYNC-PLAN",
                           f"codes='gradients', but the plan {what}: leave codes out, or make the plan without them")
    if asked.overlap == "round" and every == 1 and "updates" not in (asked.codes, plan.codes):
        raise InvalidInput("E-SYNC-MODE",
                           f"overlap='round' with every={asked.every}: a step on averaged gradients waits for them; allowed: "
                           "every=2 or more, or codes='updates'")
    if asked.overlap is not None and plan.overlap not in ("", asked.overlap):
        raise InvalidInput("E-SYNC-PLAN",
                           f"overlap={asked.overlap!r}, but the plan has overlap={plan.overlap!r}: leave overlap out")
    fragments = 1 if asked.fragments is None else most_fragments(asked.fragments, every, len(plan.buckets))
    if asked.fragments is not None and (every % asked.fragments or plan.fragments not in (1, fragments, asked.fragments)):
        has = f", and the plan has {plan.fragments}" if plan.fragments > 1 else ""
        raise InvalidInput("E-SYNC-FRAGMENTS",
                           f"fragments: got {asked.fragments} with every={every}{has}, allowed: a divisor of every, since one "
                           "fragment is exchanged every H / fragments steps")
    laid = structs.replace(
        plan, local_steps=every, codes=asked.codes or plan.codes, overlap=asked.overlap or plan.overlap,
        fragments=plan.fragments if asked.fragments is None else fragments)
    asked_of = ("local_steps", "overlap", "fragments", "steps_locally")
    if all(getattr(laid, name) == getattr(plan, name) for name in asked_of):
        return laid
    # The prediction is for steps that exchange, and wait for it.
    return structs.replace(laid, step_s=0.0, free_s=0.0, steps=0.0, steps_high=0.0)


def in_updates(plan: Plan) -> Plan:
    """The plan with coded updates in every step, and no late results, where averaged gradients would let ranks diverge."""
    buckets = tuple(structs.replace(b, stale=False) if b.stale else b for b in plan.buckets)
    return structs.replace(plan, codes="updates", overlap="", buckets=buckets)


def ways_of(plan: Plan) -> list[tuple[str, str]]:
    """Which of `WAYS` a plan uses, with a description."""
    modes = [("forward", "overlap='forward'")] if plan.overlap == "forward" else []
    if plan.local_steps > 1:
        modes.append(("local", f"of {plan.local_steps} local steps"))
    elif plan.codes == "updates":
        modes.append(("updates", "of coded updates"))
    return modes + ([("round", "overlap='round'")] if plan.overlap == "round" else [])
