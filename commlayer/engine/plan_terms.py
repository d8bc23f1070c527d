"""Constraints on a job's plans, and the inputs from which the current plan was made. Values only.

=======================  ====================================================================
attribute                changed by
=======================  ====================================================================
asked, forbids           start.py, once
optimizer, loss          start.py, once
max_loss, learning       start.py, once
auto                     start.py; a session, whose user asks for a plan
suggested                autotune/plan
useless                  the drivers: module_driver.py, ddp_ways.py
balanced                 shares/, a controller
floor, error_multiplier            autotune/quality
basis                    start.py, switch.py; autotune/plan, for the plan that it has chosen
price                    autotune/plan
=======================  ====================================================================
"""

from __future__ import annotations

from commlayer.engine.ways import Asked, Forbids
from commlayer.planner.model.cluster import Basis


class PlanTerms:
    def __init__(self) -> None:
        self.asked = Asked()
        """The sync mode that the user requested in attach(); it holds for every plan."""
        self.forbids: Forbids = lambda _: ""
        """Why a plan cannot use a sync mode here: see allowed_ways.py."""
        self.useless: Forbids = lambda _: ""
        """Why a sync mode would bring no benefit here."""
        self.auto = False
        """Whether commlayer chooses the plan."""
        self.suggested = False
        """On rank 0: whether the log has suggested local steps."""
        self.optimizer = ""
        """The family of the script's optimizer; empty if unknown."""
        self.balanced = False
        """Whether a controller moves shares of the batch, from its measurements of averaged steps."""
        self.loss, self.learning, self.max_loss, self.floor = "", "", 0.0, 0.0
        """`loss`: the loss model's file. `learning`: the file of the steps that sync modes cost; empty for the shipped table.
        `max_loss`: the budget, 0 for none. `floor`: the level (engine/codec_floor.py) below which the guard allows no codec."""
        self.error_multiplier = 1.0
        """Factor on the usual excess of steps under a codec, for this model, as measured by the guard."""
        self.basis: Basis | None = None
        """On rank 0: the inputs of the current plan, if known."""
        self.price: tuple[float, float] | None = None
        """On rank 0: seconds of communication under the current plan, and the part of computing that hides it."""
