"""Seeded schedules of the simulated world, any number, in pieces: each goes on where the one before it stopped. Starts nothing.

`python -m bench chaos --schedules 1000000 --seconds 140 --resume schedules.json`, again and again until none are left.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench import Unmeasurable
from bench.chaos.simulated import BUCKETS, STEPS, WORLD, World
from bench.report import Result
from commlayer.files import write_whole

MOST_FINDINGS = 5


class Done(msgspec.Struct):
    """What has been run so far: all seeds from `first` on, below `first + schedules`."""

    first: int = 0
    schedules: int = 0
    breaks: int = 0
    kills: int = 0
    events: int = 0
    contributions: int = 0
    wrong: int = 0
    seconds: float = 0.0
    findings: list[dict[str, Any]] = []


class Asked(NamedTuple):
    """`seconds`: 0 for as long as it takes; `resume`: a file that keeps what is done, None for none."""

    schedules: int
    seed: int
    seconds: float
    resume: Path | None


def run(asked: Asked) -> Result:
    done = _taken_up(asked)
    begin, until = time.monotonic(), time.monotonic() + (asked.seconds or float("inf"))
    before_s, before = done.seconds, done.schedules
    try:
        while done.schedules < asked.schedules and time.monotonic() < until:
            one(done.first + done.schedules, done)
    finally:
        spent_s = time.monotonic() - begin
        done.seconds = before_s + spent_s
        if asked.resume is not None:
            write_whole({asked.resume: json.dumps(msgspec.to_builtins(done), indent=1).encode() + b"\n"})
    left = asked.schedules - done.schedules
    return {"rows": list(done.findings), "summary": {
        "schedules": done.schedules, "seeds": f"{done.first} to {done.first + done.schedules - 1}", "left": left,
        "connections_broken": done.breaks, "servers_killed": done.kills, "events": done.events,
        "contributions": done.contributions, "wrong_schedules": done.wrong,
        "schedules_per_s": (done.schedules - before) / spent_s if spent_s else 0.0, "seconds": done.seconds},
        "code": int(done.wrong > 0)}


def one(seed: int, done: Done) -> None:
    world = World(seed)
    try:
        problems = world.run()
    except Exception as error:  # whatever the machines raise is a finding
        problems = [f"{type(error).__name__}: {error}"]
    done.schedules += 1
    done.breaks, done.kills, done.events = done.breaks + world.breaks, done.kills + world.kills, done.events + world.events
    done.contributions += BUCKETS * world.rounds * STEPS * WORLD
    done.wrong += bool(problems)
    if problems and len(done.findings) < MOST_FINDINGS:
        done.findings.append({"seed": seed, "wrong": "; ".join(problems),
                              "again": f"python -m bench chaos --schedules 1 --seed {seed}"})


def _taken_up(asked: Asked) -> Done:
    if asked.resume is None or not asked.resume.exists():
        return Done(first=asked.seed)
    try:
        done = msgspec.json.decode(asked.resume.read_bytes(), type=Done)
    except msgspec.MsgspecError as error:
        raise Unmeasurable(f"--resume {asked.resume}: it is not what an earlier piece has written ({error})") from None
    if done.first != asked.seed:
        raise Unmeasurable(f"--resume {asked.resume}: begins with seed {done.first}, asked for: --seed {asked.seed}")
    return done
