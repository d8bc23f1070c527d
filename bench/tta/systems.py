"""The systems that `bench tta` compares, with their start arguments."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
HOME = ROOT / ".rivals"
"""Folder of the virtual environments that `make rivals` creates."""
SPARSE = "topk(ratio=0.01, values='int8')"


class System(NamedTuple):
    """One system to measure; `start` has the arguments for bench.paced.worker."""

    name: str
    group: str
    """"bound" (no network), "rival", "fixed" (a plan of ours that the user chose) or "auto"."""
    start: dict[str, Any]
    environment: str = ""
    """The virtual environment that it needs; "" is the current one."""
    only: str = ""
    """The only link on which it is measured; "" is all links."""

    def python(self) -> str:
        return str(HOME / self.environment / "bin" / "python") if self.environment else sys.executable

    def missing(self) -> str:
        """Why the system cannot run on this machine, in one line; "" if it can."""
        return _missing(self.environment) if self.environment else ""


def _ours(name: str, group: str = "fixed", only: str = "", **arguments: Any) -> System:
    return System(name, group, {"kind": "commlayer", **arguments}, only=only)


SYSTEMS = {
    system.name: system
    for system in (
        System("ideal", "bound", {"kind": "together"}),
        System("alone", "bound", {"kind": "alone"}),
        System("DDP fp32", "rival", {"kind": "ddp"}),
        System("DDP fp16", "rival", {"kind": "ddp", "hook": "fp16"}),
        System("DDP PowerSGD", "rival", {"kind": "ddp", "hook": "powersgd", "matrix_approximation_rank": 2,
                                         "start_powerSGD_iter": 10}),
        System("post-local SGD H=4", "rival", {"kind": "post_local_sgd", "every": 4, "start": 10}),
        System("torchft DiLoCo H=20", "rival", {"kind": "torchft_diloco", "every": 20}, "torchft"),
        System("torchft DiLoCo H=100", "rival", {"kind": "torchft_diloco", "every": 100}, "torchft"),
        System("hivemind", "rival", {"kind": "hivemind", "steps": 4, "local": False}, "hivemind"),
        System("hivemind local H=20", "rival", {"kind": "hivemind", "steps": 20, "local": True}, "hivemind"),
        System("DeMo-like", "rival", {"kind": "demo"}),
        System("SparseLoCo-like H=15", "rival", {"kind": "sparseloco", "every": 15}),
        _ours("fp16", compression="fp16"),
        _ours("int4", compression="int4"),
        _ours("int4 forward", compression="int4", sync="forward"),
        _ours("int4 H=4 round", compression="int4", local={"every": 4}),
        _ours("int4 H=8 round", compression="int4", local={"every": 8}),
        _ours("topk 1 %", compression=SPARSE),
        _ours("topk 1 % updates", compression=SPARSE, local={"every": 1, "overlap": False}),
        _ours("auto", "auto", sync="auto"),
        _ours("auto exact", "auto"),
        _ours("auto, shares", "auto", only="uneven compute", shares=True, sync="auto"),
    )
}


def shown(name: str) -> str:
    """A system's name in tables and pictures.

    >>> shown("int4 H=8 round"), shown("torchft DiLoCo H=20"), shown("int4 forward")
    ('int4, 8 local steps', 'torchft DiLoCo, 20 local steps', 'int4 forward')
    """
    return re.sub(r" H=(\d+)( round)?$", r", \1 local steps", name)


HEADLINE = ("ideal", "alone", "auto", "int4 forward", "int4 H=8 round", "DDP fp16", "torchft DiLoCo H=20")
"""Systems of the summary, which are measured first."""
QUICK = ("ideal", "auto", "DDP fp16")


@cache
def _missing(environment: str) -> str:
    python = HOME / environment / "bin" / "python"
    if not python.exists():
        return f"{environment} is not installed: run `make rivals`"
    done = subprocess.run([python, "-c", f"import {environment}"], capture_output=True, text=True, timeout=120)
    last = (done.stderr.strip() or "no reason given").splitlines()[-1]
    return f"{environment} cannot be imported: {last}" if done.returncode else ""
