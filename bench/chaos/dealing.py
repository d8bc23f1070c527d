"""From a seed to a run: which fault, of which job, and when it strikes. Pure. Starts nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.chaos.faults import FAULTS
from bench.chaos.trials import SETTINGS, Setting, Trial

FIRST, LAST = 3, 16
"""Between these steps a fault strikes: some are behind, and some are left to go wrong in."""
KEYED = 0.25
"""So many of the runs are over TLS, where their fault fits that: no other run is another for it."""
JITTER_S = 0.02
"""A few steps, so that it strikes anywhere within one."""


def dealt() -> tuple[str, ...]:
    """The faults that are dealt out, in turn."""
    return tuple(name for name in FAULTS if name != "none")


def trial(seed: int, faults: Sequence[str]) -> Trial:
    """The one of that seed; of a fault by itself the same as among others."""
    name = faults[seed % len(faults)]
    fault, chance = FAULTS[name], random.Random(f"{name} {seed}")
    setting = chance.choice([s for s in SETTINGS if fault.fits(s)])
    if random.Random(f"{name} {seed} keys").random() < KEYED and fault.fits(setting._replace(keys=True)):
        setting = setting._replace(keys=True)
    number = chance.randrange({"worker": setting.workers, "server": setting.servers, "coordinator": 1}[fault.strikes])
    return Trial(seed, name, setting, fault.strikes, number, chance.randint(FIRST, LAST), chance.uniform(0.0, JITTER_S))


def undisturbed(setting: Setting) -> Trial:
    """What the others are compared with."""
    return Trial(0, "none", setting)
