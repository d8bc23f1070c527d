"""The allowed outcomes of a run, as a function of its fault and its job."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.chaos.trials import Trial


class Outcome(NamedTuple):
    """How a job ends: it goes on with the undisturbed run's bits, goes on with or without one of `peers`, or the remaining
    workers stop and name one of `peers`."""

    how: str
    peers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.how} {' or '.join(self.peers)}" if self.peers else self.how


GOES_ON = Outcome("goes on")


def _named(trial: Trial) -> Outcome:
    return Outcome("stops, naming", (trial.victim,))


def _without(trial: Trial) -> Outcome:
    return Outcome("goes on without", (trial.victim,))


RULES: dict[str, Callable[[Trial], tuple[Outcome, ...]]] = {
    # A worker or server that is lost for good ends a job whose numbers are fixed.
    "kill-worker": lambda trial: (_named(trial),),
    "freeze-worker": lambda trial: (_named(trial),),
    "isolate-worker": lambda trial: (_named(trial),),
    "lose-server": lambda trial: (_named(trial),),
    # Homes that may leave are dropped while enough are left.
    "kill-home": lambda trial: (_without(trial),),
    "freeze-home": lambda trial: (_without(trial),),
    "isolate-home": lambda trial: (_without(trial),),
    # A home that comes again gets a new worker number.
    "rejoin-home": lambda trial: (Outcome("goes on with", (f"worker {trial.setting.workers}",)),),
    "kill-homes": lambda trial: (Outcome("stops, naming", tuple(f"worker {number}" for number in trial.victims)),),
}


def alone(trial: Trial) -> tuple[str, ...]:
    """The peers of which a victim that is alive but cut off must name one in its error. Empty if that does not apply."""
    if trial.fault not in ("isolate-worker", "isolate-home", "freeze-home"):
        return ()
    return "coordinator", *(f"server {number}" for number in range(trial.setting.servers))


def leaves(trial: Trial) -> tuple[str, ...]:
    """Processes whose journal remains after a finished job, because they are not there to remove it."""
    return ("coordinator",) if trial.fault == "lose-coordinator" else ()


def allowed(trial: Trial) -> tuple[Outcome, ...]:
    """Faults without a rule heal: they cost no step and no bit."""
    rule = RULES.get(trial.fault)
    return rule(trial) if rule is not None else (GOES_ON,)
