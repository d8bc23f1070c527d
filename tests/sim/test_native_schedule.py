"""The simulation's C loop under the address and undefined-behaviour sanitizers: bit for bit what its Python twin gives."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from oracle.fifo import TimedTask as Task
from oracle.schedule import PortableSchedule
from support.fuzz_build import NATIVE, SANITIZE
from support.schedules import Load, chain, flatten, one_node, random_problem

from commlayer.planner.problem import Problem

COMPILER = shutil.which("g++") or shutil.which("clang++")
PROBLEMS = 400


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("schedule")
    probe = folder / "probe.cc"
    probe.write_text("int main() { return 0; }\n")
    if subprocess.run([COMPILER, *SANITIZE, probe, "-o", folder / "probe"], capture_output=True, check=False).returncode:
        pytest.skip("the compiler has no sanitizer runtime")
    sources = [*(NATIVE / "src").glob("schedule*.cc"), NATIVE / "tests" / "schedule.cc"]
    command = [COMPILER, "-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", *SANITIZE]
    command += [f"-I{NATIVE / 'include'}", *map(str, sources), "-o", str(folder / "driver")]
    build = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert build.returncode == 0, build.stderr
    return folder / "driver"


def fields(problem: Problem) -> Iterator[str]:
    """A problem in the driver's terms: every field under its own name, so that a new one is asked for there."""
    counts = {"lanes": len(problem.lanes), "lines": len(problem.line_lanes) - 1, "buckets": problem.buckets}
    everything = {**problem._asdict(), **counts}
    for name, value in everything.items():
        yield line(name, value.tolist() if isinstance(value, np.ndarray) else [value])


def line(name: str, values: list[float]) -> str:
    return " ".join([name, str(len(values)), *(v.hex() if isinstance(v, float) else str(int(v)) for v in values)])


def answers(driver: Path, text: list[str]) -> list[list[float]]:
    ran = subprocess.run([driver], input="\n".join(text), capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [[float.fromhex(word) for word in row.split()[1:]] for row in ran.stdout.splitlines()]


def bits(values: list[float]) -> list[str]:
    return [value.hex() for value in values]


@pytest.mark.timeout(200)
@pytest.mark.nightly
def test_native_loop_stays_within_its_arrays_and_equals_the_portable_one(driver: Path) -> None:
    text, expected = [], []
    for seed in range(PROBLEMS):
        problem, rng = random_problem(seed), random.Random(seed)
        twin = PortableSchedule(problem)
        counts = [b - a for a, b in pairwise(problem.bucket_options.tolist())]
        choice = [rng.randrange(n) for n in counts]
        step_s, starts, ends = twin.trace(choice)
        chosen = rng.randrange(problem.buckets)
        swept = [b for b in range(problem.buckets) if counts[b] == counts[chosen]]
        text += [*fields(problem), line("run", choice), line("sweep", [*swept, math.inf, 0]),
                 line("sweep", [chosen, step_s, 0]), line("sweep", [chosen, math.inf, 1])]
        alone = twin.sweep(choice, [chosen], step_s)
        expected += [([step_s, *starts, *ends], math.inf), (twin.sweep(choice, swept, math.inf), math.inf), (alone, step_s),
                     (alone, min(alone))]
    circle = (Task((("up:a", 1.0),), (1,)), Task((("up:a", 1.0),), (0,)))
    cyclic = flatten([Load((circle, chain(("up:a", 1.0))))], one_node((0.0,), 0.0))
    *answer, (error, *_), (found_s, *_) = answers(driver, [*text, *fields(cyclic), line("run", [0]), line("run", [1])])
    assert error < 0 < found_s
    assert len(answer) == len(expected)
    for mine, (theirs, limit) in zip(answer, expected, strict=True):
        # Times above a limit need not be reported.
        known = [b if a != math.inf or b <= limit else math.inf for a, b in zip(mine, theirs, strict=True)]
        assert bits(mine) == bits(known)
