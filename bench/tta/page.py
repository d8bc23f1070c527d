"""The tables of docs/wan.md and README.md, of the rows that are kept with the project: `python -m bench.tta.page`.

Whatever a page says of a row is what the row has; a test compares them. Measures nothing.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.paced.race import reached
from bench.tta.links import NETWORKS, NO_LINK
from bench.tta.store import Store, longest
from bench.tta.summary import Row
from bench.tta.systems import SYSTEMS
from commlayer.files import between, write_whole

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "bench" / "tta_runs.jsonl"
BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"
NAMES = {"1g-2ms": "1 Gb/s, 2 ms", "100m-30ms": "100 Mb/s, 30 ms", "50m-80ms": "50 Mb/s, 80 ms", "10m-80ms": "10 Mb/s, 80 ms",
         "40/200m": "40 / 200 Mb/s, 30 ms"}
FIXED = "int4 forward", "int4 H=4 round", "int4 H=8 round", "int4", "fp16"
RIVALS = tuple(name for name, system in SYSTEMS.items() if system.group == "rival" and name != "DDP fp16")
Group = Sequence[Row]
"""Rows of one task, link and system, which differ in seeds."""


def groups(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """In the order of tasks, then links, then systems as the bench has them. Without rows that failed."""
    links, systems = [NO_LINK, *NETWORKS], list(SYSTEMS)
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["task"], links.index(row["link"]), systems.index(row["system"]), row["seed"])):
        if not row.get("error"):
            found.setdefault((row["task"], row["link"], row["system"]), []).append(row)
    return found


def counted(group: Group) -> Group:
    """Rows that count; if none does, all."""
    return [row for row in group if not row.get("void")] or group


def seconds(group: Group, target: int) -> float:
    """The median over seeds to that target; infinite if it was not reached."""
    found = [reached(row["curve"], row["targets"][target]) for row in counted(group)]
    return statistics.median(math.inf if s is None else s for s in found)


def void(group: Group) -> bool:
    return all(row.get("void") for row in group)


def table(rows: Sequence[Row]) -> str:
    """Everything, a line for each task, link and system."""
    lines = ["| task | link | system | seeds | s a step | s to the easy loss | middle | hard | loss at the end | kB up a step "
             "| CPU s | late % |", "| --- | --- | --- |" + " ---: |" * 9]
    for (task, link, system), group in groups(rows).items():
        def of(value: Callable[[Row], float], group: Group = group) -> float:
            return statistics.median(value(row) for row in counted(group))

        lengths = {row["seconds"] for row in group}
        said = system if lengths == {60.0} else f"{system} ({max(lengths):g} s)"
        left = sum(bool(row.get("void")) for row in group)
        seeds = f"{len(group) - left} ({left} void)" if 0 < left < len(group) else str(len(group))
        cells = [task, NAMES.get(link, link), said, seeds, f"{of(lambda r: r['s_per_step']):.3f}",
                 *(_told(seconds(group, target)) for target in range(3)), f"{of(lambda r: r['curve'][-1][2]):.3f}",
                 f"{of(lambda r: r['up_kb']):.0f}", f"{of(lambda r: r['cpu_s']):.0f}",
                 f"{of(lambda r: r['late_pct']):.1f}{', void' if void(group) else ''}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def overview(rows: Sequence[Row]) -> str:
    """A line for each task and link that auto was measured on, with what a user would have had without it."""
    found = groups(rows)
    lines = ["| task, link | one machine, no network | each host alone | DDP fp16 | best of the others "
             "| commlayer, a fixed plan | commlayer, `plan=\"auto\"` |", "| --- |" + " ---: |" * 6]
    for task, link, system in found:
        if system == "auto":
            def cell(names: Sequence[str], where: str = link, task: str = task) -> str:
                return _best({name: found[task, where, name] for name in names if (task, where, name) in found})

            cells = [f"{task}, {NAMES.get(link, link)}", cell(["ideal"], NO_LINK), cell(["alone"], NO_LINK), cell(["DDP fp16"]),
                     cell(RIVALS), cell(FIXED), cell(["auto"])]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _best(measured: dict[str, list[Row]]) -> str:
    """Seconds to the easy and the middle loss of whichever is first at the middle loss, by name where it may be any."""
    if not measured:
        return ""
    name = min(measured, key=lambda name: (seconds(measured[name], 1), seconds(measured[name], 0)))
    group = measured[name]
    told = " / ".join(_whole(seconds(group, target), group) for target in range(2)) + (", void" if void(group) else "")
    return told if name in ("ideal", "alone", "DDP fp16", "auto") else f"{told} ({name})"


def _told(found: float) -> str:
    return f"{found:.1f}" if math.isfinite(found) else "-"


def _whole(found: float, group: Group) -> str:
    return f"{found:.0f}" if math.isfinite(found) else f"above {max(row['seconds'] for row in group):g}"


PAGES = {ROOT / "docs" / "wan.md": table, ROOT / "README.md": overview}


def main() -> int:
    rows = longest(Store(KEPT).rows.values())
    for path, made in PAGES.items():
        write_whole({path: between(path.read_text("utf-8"), BEGIN, END, made(rows)).encode()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
