"""What the plans of a job have to heed, and what the one in force was made from. Values alone: who decides reads them here.

=======================  ====================================================================
attribute                changed by
=======================  ====================================================================
asked, forbids           start.py, once
optimizer, loss          start.py, once
max_loss, learning       start.py, once
auto                     start.py; a session, whose user asks for a plan
suggested                autoplan/
useless                  whoever steps: module_driver.py, ddp_ways.py
balanced                 shares/, a controller
floor, harder            accuracy/
basis                    start.py, switch.py; autoplan/, for the plan that it has chosen
price                    autoplan/
=======================  ====================================================================
"""

from __future__ import annotations

from commlayer.engine.ways import Asked, Forbids
from commlayer.planner.model.cluster import Basis


class PlanTerms:
    """Of one job, from its start on."""

    def __init__(self) -> None:
        self.asked = Asked()
        """What attach() was told of how steps are exchanged; it holds for every plan."""
        self.forbids: Forbids = lambda _: ""
        """Why a plan cannot go a way here: see allowed_ways.py."""
        self.useless: Forbids = lambda _: ""
        """Why it would gain nothing, for whoever chooses."""
        self.auto = False
        """Whether the plan was left to commlayer."""
        self.suggested = False
        """On rank 0: whether the log has said that local steps would be sooner."""
        self.optimizer = ""
        """The family of the script's, as far as anybody knows."""
        self.balanced = False
        """Whether a controller moves shares of the batch, by what it measures of steps that are averaged."""
        self.loss, self.learning, self.max_loss, self.floor = "", "", 0.0, 0.0
        """The loss model's file, that of what ways cost in steps (empty: the shipped table), the budget (0: none was named),
        and the level (engine/codec_floor.py) below which the guard allows no codec."""
        self.harder = 1.0
        """How many times the excess of steps that is usual under a codec this model needs, as the guard has seen."""
        self.basis: Basis | None = None
        """On rank 0: what the plan in force was made from, where that is known."""
        self.price: tuple[float, float] | None = None
        """On rank 0: seconds of communication under the plan in force, and the part of computing that hides it."""
