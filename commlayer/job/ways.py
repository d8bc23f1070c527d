"""How a script wants its steps exchanged: attach's `every=` and `codes=`, checked, and laid into a plan. Exchanges nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from msgspec import structs

from commlayer.records import Plan

CODES = ("gradients", "updates")


class Ways(NamedTuple):
    """What attach() was told, the same on all ranks."""

    every: int | None = None
    """Steps to an exchange; None: as many as the plan says."""
    updates: bool = False
    """Whether each rank steps on its own gradients, and the change of its weights is what is coded."""
    overlap: bool = False
    """Whether an exchange runs while the next steps are taken."""
    fragments: int = 1
    """In so many parts, one after the other, the model is exchanged."""
    forward: bool = False
    """Whether results of a step come in during the next forward pass."""

    def __str__(self) -> str:
        more = (", overlap='round'" if self.overlap else "") + (f", fragments={self.fragments}" if self.fragments > 1 else "")
        more += ", overlap='forward'" if self.forward else ""
        return f"every={self.every or 'as planned'}, codes={CODES[self.updates]!r}{more}"


def read_ways(
    every: int | None, codes: str | None, optimizer: Any, *, overlap: str | None = None, fragments: int = 1,
) -> Ways:
    """ValueError, a line, for what cannot be."""
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise ValueError(f"every: got {every!r}, allowed: a whole number of steps to an exchange, 1 or more")
    if codes not in (None, *CODES):
        raise ValueError(f"codes: got {codes!r}, allowed: {', '.join(map(repr, CODES))}")
    several = every is not None and every > 1
    if several and codes == "gradients":
        raise ValueError(f"codes='gradients' with every={every}: gradients are averaged in every step; leave codes out, or "
                         "take every=1")
    if several or codes == "updates":
        _check_optimizer(f"every={every}" if several else "codes='updates'", optimizer)
    if overlap not in (None, "round", "forward"):
        raise ValueError(f"overlap: got {overlap!r}, allowed: 'round', with every=2 or more, or 'forward'")
    if overlap == "forward" and (several or codes == "updates"):
        raise ValueError("overlap='forward' brings a step's gradients in ahead of the next step; allowed: without every and "
                         "codes='updates', which exchange weights and have overlap='round'")
    if overlap == "round" and not several:
        raise ValueError(f"overlap='round' with every={every}: an exchange runs while a round of several local steps computes; "
                         "allowed: every=2 or more")
    if not isinstance(fragments, int) or isinstance(fragments, bool) or fragments < 1 or (every or 1) % fragments:
        raise ValueError(f"fragments: got {fragments!r} with every={every}, allowed: a divisor of every, since one fragment is "
                         "exchanged every H / fragments steps")
    return Ways(every, several or codes == "updates", overlap == "round", fragments, overlap == "forward")


def _check_optimizer(what: str, optimizer: Any) -> None:
    if not hasattr(optimizer, "register_step_post_hook"):
        raise ValueError(f"{what}: got optimizer {type(optimizer).__name__}, allowed: a torch.optim.Optimizer, behind whose "
                         f"steps weights are exchanged: attach(model, optimizer, {what})")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"{what}: LBFGS makes a number of backward passes of its own to a step, which differs from rank to "
                         "rank; allowed: an optimizer that takes one, such as AdamW, or every=1 with gradients")


def stepping(plan: Plan, ways: Ways) -> Plan:
    """The plan with as many local steps as attach() was told. ValueError if it says otherwise itself."""
    if ways.updates and any(b.stale for b in plan.buckets):
        raise ValueError("plan: has results that are a step late, and updates are coded, which ranks step on: make it without "
                         "staleness")
    if ways.every is None or ways.every == plan.local_steps:
        return plan
    if plan.local_steps > 1:
        raise ValueError(f"every={ways.every}, but the plan is one of {plan.local_steps} local steps: leave every out, or make "
                         "the plan with max_local_steps=1")
    # What was predicted is the time of a step that exchanges.
    return structs.replace(plan, local_steps=ways.every, step_s=0.0, free_s=0.0)
