"""Runs seeded schedules of the simulations, in parts that can be resumed.

`python -m bench chaos --schedules 1000000 --seconds 140 --resume schedules.json`, repeated until none are left. `--of` names
what is simulated.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from bench import Unmeasurable
from bench.report import Result
from commlayer.files import write_whole
from tests.sim.simulated_epochs import World as EpochWorld
from tests.sim.simulated_members import Members
from tests.sim.simulated_sums import World

MOST_FINDINGS = 5


class Schedule(Protocol):
    """One schedule, derived from a seed."""

    counts: Counter[str]
    """Number of events in it, by name."""

    def run(self) -> list[str]:
        """Returns the violations."""


KINDS: dict[str, Callable[[int], Schedule]] = {"sums": World, "members": Members, "epochs": EpochWorld}
"""Maps the name of each simulation to its class: the exchange of sums, membership, and epochs."""


class Done(msgspec.Struct):
    """What has been run so far: all seeds from `first` up to `first + schedules`, exclusive."""

    first: int = 0
    of: str = "sums"
    schedules: int = 0
    counts: dict[str, int] = {}
    wrong: int = 0
    seconds: float = 0.0
    findings: list[dict[str, Any]] = []


class Options(NamedTuple):
    """What to run. `seconds`: time limit, 0 for none. `resume`: a file that keeps the progress, None for none."""

    schedules: int
    seed: int
    seconds: float
    resume: Path | None
    of: str = "sums"

    @property
    def again(self) -> str:
        return f"python -m bench chaos --of {self.of} --schedules"


def run(options: Options) -> Result:
    done = _taken_up(options)
    begin, until = time.monotonic(), time.monotonic() + (options.seconds or float("inf"))
    before_s, before = done.seconds, done.schedules
    try:
        while done.schedules < options.schedules and time.monotonic() < until:
            one(options, done.first + done.schedules, done)
    finally:
        spent_s = time.monotonic() - begin
        done.seconds = before_s + spent_s
        if options.resume is not None:
            write_whole({options.resume: json.dumps(msgspec.to_builtins(done), indent=1).encode() + b"\n"})
    left = options.schedules - done.schedules
    return {"rows": list(done.findings), "summary": {
        "schedules": done.schedules, "seeds": f"{done.first} to {done.first + done.schedules - 1}", "left": left,
        **{name.replace(" ", "_"): count for name, count in done.counts.items()}, "wrong_schedules": done.wrong,
        "schedules_per_s": (done.schedules - before) / spent_s if spent_s else 0.0, "seconds": done.seconds},
        "code": int(done.wrong > 0)}


def one(options: Options, seed: int, done: Done) -> None:
    world = KINDS[options.of](seed)
    try:
        problems = world.run()
    except Exception as error:  # any exception of the state machines is a finding
        problems = [f"{type(error).__name__}: {error}"]
    done.schedules += 1
    done.counts = dict(Counter(done.counts) + world.counts)
    done.wrong += bool(problems)
    if problems and len(done.findings) < MOST_FINDINGS:
        done.findings.append({"seed": seed, "wrong": "; ".join(problems),
                              "again": f"{options.again} 1 --seed {seed}"})


def _taken_up(options: Options) -> Done:
    if options.resume is None or not options.resume.exists():
        return Done(first=options.seed, of=options.of)
    try:
        done = msgspec.json.decode(options.resume.read_bytes(), type=Done)
    except msgspec.MsgspecError as error:
        raise Unmeasurable(f"--resume {options.resume}: it is not what an earlier piece has written ({error})") from None
    if done.of != options.of:
        raise Unmeasurable(f"--resume {options.resume}: its schedules are of {done.of}; name another file")
    if done.first != options.seed:
        raise Unmeasurable(f"--resume {options.resume}: begins with seed {done.first}, asked for: --seed {options.seed}")
    return done
