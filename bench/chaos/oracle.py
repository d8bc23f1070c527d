"""What a run may end with: a function of the fault and the job it struck. The one place that says so. Knows no processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bench.chaos.trials import Trial


class Outcome(NamedTuple):
    """How a job ends: all finish with the undisturbed run's bits, or those that are left stop, and name one of `peers`."""

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
    # Who is lost for good ends a job: it has a fixed number of workers and servers.
    "kill-worker": lambda trial: (_named(trial),),
    "freeze-worker": lambda trial: (_named(trial),),
    "isolate-worker": lambda trial: (_named(trial),),
    "lose-server": lambda trial: (_named(trial),),
    # Homes that may go are done without, as long as enough are left.
    "kill-home": lambda trial: (_without(trial),),
    "freeze-home": lambda trial: (_without(trial),),
    "isolate-home": lambda trial: (_without(trial),),
    # One that comes again is taken in, under a number that nobody had.
    "rejoin-home": lambda trial: (Outcome("goes on with", (f"worker {trial.setting.workers}",)),),
    "kill-homes": lambda trial: (Outcome("stops, naming", tuple(f"worker {number}" for number in trial.victims)),),
}


def alone(trial: Trial) -> tuple[str, ...]:
    """Whom a victim that is alive and no longer of the job has to name in its end. Empty where it owes none."""
    if trial.fault not in ("isolate-worker", "isolate-home", "freeze-home"):
        return ()
    return "coordinator", *(f"server {number}" for number in range(trial.setting.servers))


def leaves(trial: Trial) -> tuple[str, ...]:
    """Whose journal stays behind a job that went on: nobody is there to remove it."""
    return ("coordinator",) if trial.fault == "lose-coordinator" else ()


def allowed(trial: Trial) -> tuple[Outcome, ...]:
    """Everything that heals costs no step and no bit."""
    rule = RULES.get(trial.fault)
    return rule(trial) if rule is not None else (GOES_ON,)
