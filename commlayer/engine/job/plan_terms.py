"""Constraints on a job's plans, and the inputs from which the current plan was made."""

from __future__ import annotations

import dataclasses

from commlayer.engine.sync.sync_modes import MODES, Forbids, RequestedModes, requested_otherwise
from commlayer.last_run import LastRuns
from commlayer.planner.model import Basis


def _allow(_mode: str) -> str:
    return ""


@dataclasses.dataclass
class PlanTerms:
    requested: RequestedModes = dataclasses.field(default_factory=RequestedModes)
    """The sync mode that the user requested in attach(); it applies to every plan."""
    forbids: Forbids = _allow
    """Function that returns why a plan cannot use a sync mode in this job, or ""; see sync_modes.py."""
    useless: Forbids = _allow
    """Function that returns why a sync mode would bring no benefit in this job, or "". Set by step_loop.py."""
    auto: bool = False
    """True: commlayer chooses the plan. False: the user does."""
    optimizer: str = ""
    """Name of the family of the script's optimizer, such as "adam"; empty if unknown."""
    loss: str = ""
    """Path of the loss model, which predicts the loss of each codec."""
    learning: str = ""
    """Path of the table of convergence factors; empty: the built-in table."""
    max_loss: float = 0.0
    """Allowed increase of the loss by compression, relative to uncompressed training; 0: no limit."""
    suggested: bool = False
    """True: the log has already suggested local steps. Used only on rank 0."""
    said_slower: bool = False
    """True: the log has already said that one machine alone would be faster."""
    balanced: bool = False
    """True: a LoadBalancer changes the ranks' shares of the batch."""
    floor: float = 0.0
    """Precision level (see the function `level`) of the coarsest codec that the quality guard allows."""
    basis: Basis | None = None
    """The current plan and the inputs from which it was made, if known. Used only on rank 0."""
    last_runs: LastRuns = dataclasses.field(default_factory=LastRuns)
    """Records of earlier runs of the job on this machine."""
    price: tuple[float, float] | None = None
    """Two numbers about the current plan: seconds of communication per step, and the fraction of them that overlaps with
    computation. None if unknown. Used only on rank 0."""

    def forbidden_modes(self) -> dict[str, str]:
        """Maps each sync mode to the reason why a planner cannot choose it; to "" if it can. Reasons can differ between ranks,
        so ranks exchange them."""
        return {mode: requested_otherwise(self.requested, mode) or self.forbids(mode) or self.useless(mode) for mode in MODES}

    def allowed_modes(self) -> set[str]:
        """Returns the sync modes that a planner can choose on this rank."""
        return {mode for mode, why in self.forbidden_modes().items() if not why}
