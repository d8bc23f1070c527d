"""Table of the faults: what they are, which process they strike, and which jobs they fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.chaos.trials import Setting

FULL_NBYTES = 8 << 10
"""Maximum file size that simulates a full disk: no journal fits."""


def _any(setting: Setting) -> bool:
    return not setting.least


def _apart(setting: Setting) -> bool:
    return setting.apart and not setting.least


def _without_keys(setting: Setting) -> bool:
    """Certificates depend on the clock, and gRPC uses the system's clock, which cannot be set for one process."""
    return _apart(setting) and not setting.keys


def _over_tcp(setting: Setting) -> bool:
    return setting.carrier == "tcp" and not setting.least


def _homes(setting: Setting) -> bool:
    """Jobs of homes, some of which may leave."""
    return setting.least > 0


def _homes_beside(setting: Setting) -> bool:
    """Homes whose server runs in the coordinator's process."""
    return _homes(setting) and not setting.apart


def _homes_apart(setting: Setting) -> bool:
    return _homes(setting) and setting.apart


class Fault(NamedTuple):
    """A kind of fault.

    `strikes`: the kind of victim. `ends`: the victim does not come back, so timeouts are short. `full`: no journal fits, from
    the start. `heals`: work is interrupted until the victim is back. `says`: the log line by which the victim, a server, shows
    the fault; if empty, the strike counts. `joins`: the victim, a home, is restarted and joins the others as an additional
    worker.
    """

    what: str
    strikes: str
    fits: Callable[[Setting], bool] = _any
    ends: bool = False
    full: bool = False
    heals: bool = True
    says: str = ""
    joins: bool = False

    @property
    def loses(self) -> bool:
        """Whether the workers that it strikes are lost to the others, so that no orderly end is expected of them."""
        return self.strikes == "worker" and (self.ends or self.joins)


NO_ROOM = "a crash of this server will end the job"
"""Logged by a server without a journal."""
FAULTS: dict[str, Fault] = {
    "none": Fault("nothing: what the others are compared with", "worker", heals=False),
    "kill-worker": Fault("SIGKILL", "worker", ends=True),
    "stop-worker": Fault("SIGSTOP for a moment", "worker"),
    "freeze-worker": Fault("SIGSTOP for good", "worker", ends=True),
    "kill-server": Fault("SIGKILL, and started again", "server"),
    "stop-server": Fault("SIGSTOP for a moment", "server"),
    "restart-storm": Fault("SIGKILL and started again, time after time", "server"),
    "lose-server": Fault("SIGKILL, and not started again", "server", ends=True),
    "kill-coordinator": Fault("SIGKILL, and started again", "coordinator", _apart),
    "lose-coordinator": Fault("SIGKILL, and not started again", "coordinator", _apart, heals=False),
    "cut": Fault("data connections are reset or closed", "worker"),
    "cut-control": Fault("control connections are reset or closed", "worker", _over_tcp),
    "half-open": Fault("connections end at the worker, and nobody tells the server", "worker", _over_tcp),
    "partition": Fault("one way is blocked, for a moment", "worker"),
    "isolate-worker": Fault("one way is blocked, for good", "worker", ends=True),
    "slow-link": Fault("every piece of data is late", "worker", heals=False),
    "flip-bits": Fault("bits of data are flipped on the way", "worker", _over_tcp),
    "flip-control": Fault("bits of control messages are flipped on the way", "worker"),
    "clock-jump": Fault("SIGKILL, and started again with a clock hours to a year off", "server", _without_keys),
    "full-disk": Fault("no room for journals", "server", full=True, heals=False, says=NO_ROOM),
    "full-disk-later": Fault("SIGKILL, and started again without room for a journal", "server", says=NO_ROOM),
    "strangers": Fault("connections that say nothing, or nonsense", "server", heals=False),
    "kill-home": Fault("SIGKILL of a home, and enough are left", "worker", _homes_beside, ends=True),
    "kill-homes": Fault("SIGKILL of two homes, and too few are left", "worker", _homes_beside, ends=True),
    "rejoin-home": Fault("SIGKILL of a home, and it is started again", "worker", _homes_beside, joins=True),
    "stop-home": Fault("SIGSTOP of a home for a moment", "worker", _homes),
    "freeze-home": Fault("SIGSTOP of a home until it counts as dead, and SIGCONT", "worker", _homes, ends=True),
    "cut-home": Fault("a home's connections, of data and control, are reset or closed", "worker", _homes),
    "partition-home": Fault("nothing passes between a home and the others, for a moment", "worker", _homes),
    "isolate-home": Fault("nothing passes to a home, from it, or either way, for good", "worker", _homes, ends=True),
    "kill-home-server": Fault("SIGKILL of the homes' server, and started again", "server", _homes),
    "storm-home-server": Fault("SIGKILL of the homes' server, time after time", "server", _homes),
    "kill-home-coordinator": Fault("SIGKILL of the homes' coordinator, and started again", "coordinator", _homes_apart),
}
"""By the names that `python -m bench chaos --faults` accepts."""
