"""Derives a run from a seed: its fault, its job and the time of the strike."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.chaos.faults import FAULTS
from tests.chaos.trials import SETTINGS, Setting, Trial

FIRST, LAST = 3, 16
"""The fault strikes between these steps, so that there are steps before and after it."""
KEYED = 0.25
"""Fraction of the runs that use TLS, if the fault fits. Changing it does not change the other runs."""
JITTER_S = 0.02
"""Delay of up to a few steps, so that faults strike anywhere within a step."""


def dealt() -> tuple[str, ...]:
    """The faults that campaigns use, in this order."""
    return tuple(name for name in FAULTS if name != "none")


def trial(seed: int, faults: Sequence[str], line: str = "") -> Trial:
    """The run of that seed, on that line. A fault has the same run for a seed whether it is selected alone or with others."""
    name = faults[seed % len(faults)]
    fault, chance = FAULTS[name], random.Random(f"{name} {seed}")
    setting = chance.choice([s for s in SETTINGS if fault.fits(s)])
    if random.Random(f"{name} {seed} keys").random() < KEYED and fault.fits(setting._replace(keys=True)):
        setting = setting._replace(keys=True)
    number = chance.randrange({"worker": setting.workers, "server": setting.servers, "coordinator": 1}[fault.strikes])
    return Trial(seed, name, setting, fault.strikes, number, chance.randint(FIRST, LAST), chance.uniform(0.0, JITTER_S),
                 line)


def undisturbed(setting: Setting, line: str = "") -> Trial:
    """The run with which others are compared."""
    return Trial(0, "none", setting, line=line)
