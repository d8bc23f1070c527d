"""Writes the tables of docs/benchmarks.md from the rows in bench/data/tta_runs.jsonl: `python -m bench.tta.page`.

A test checks that the page matches the rows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence

from bench.paced.race import LATE_PCT
from bench.report import PAGE, markdown, renewed
from bench.tta.links import NETWORKS, NO_LINK
from bench.tta.store import slow_motion, usual
from bench.tta.summary import AIMS, Aim, Place, Row, Times, by_place, loss_delta_pct
from bench.tta.systems import SYSTEMS, shown
from commlayer.files import write_whole

NAMES = {"1g-2ms": "1 Gb/s, 2 ms", "100m-30ms": "100 Mb/s, 30 ms", "50m-80ms": "50 Mb/s, 80 ms", "10m-80ms": "10 Mb/s, 80 ms",
         "40/200m": "40 / 200 Mb/s, 30 ms"}
EQUAL = 1e-9
FIXED = "int4 forward", "int4 H=4 round", "int4 H=8 round", "int4", "fp16"
RIVALS = tuple(name for name, system in SYSTEMS.items() if system.group == "rival" and name != "DDP fp16")


def figures(rows: Sequence[Row]) -> str:
    """The summary: goal, measured value, number of places and worst place of each figure."""
    times = Times(rows)
    measured = by_place(times)
    valid = [row for row in rows if not row.get("error")]
    late = [row for row in valid if row["late_pct"] > LATE_PCT]
    last = max(valid, key=lambda row: float(row["late_pct"]), default=None)
    where = "" if last is None else f"{_place(last['task'], last['link'])}, {shown(last['system'])}: {last['late_pct']:.1f} %"
    kept = "not measured" if last is None else f"no: {len(late)} rows" if late else "yes"
    lines = markdown("figure|what|wanted:|measured:|places:|worst", [
        *(_figure(aim, measured[aim.key], times) for aim in AIMS),
        ["pace_kept", f"no row has more than {LATE_PCT:g} % of its passes late", "yes", kept, f"{len(valid)} rows", where],
        ["void_rows, failed_rows", "rows that count for nothing", "-",
         f"{sum(bool(row.get('void')) for row in valid)}, {len(rows) - len(valid)}", f"{len(rows)} rows", ""],
    ])
    off = {task: delta for task in times.tasks if (delta := loss_delta_pct(times, task, "1g-2ms", "DDP fp16")) is not None}
    if off:
        each = ", ".join(f"{round(delta, 1) + 0.0:+.1f} % on {task} ({_seeds(len(times.of(task, '1g-2ms', 'DDP fp16')))})"
                         for task, delta in off.items())
        lines += ["", f"What final losses tell: DDP fp16 at 1 Gb/s, which loses next to nothing, ends {each} "
                  "from ideal's loss. Seeds and the moment at which a run ends make such differences, so a single seed cannot "
                  "show smaller ones."]
    return "\n".join(lines)


def _figure(aim: Aim, values: Mapping[Place, float], times: Times) -> list[str]:
    wanted = f"{'>=' if aim.least else '<='} {aim.wanted:g}"
    worst = aim.worst(values)
    if worst is None:
        return [aim.key, aim.what, wanted, "not measured", "0", ""]
    value = values[worst]
    measured = f"{value:.1f}" if aim.key.endswith("_pct") else f"{value:.2f}"
    kept = value >= aim.wanted - EQUAL if aim.least else value <= aim.wanted + EQUAL
    return [aim.key, aim.what, wanted, f"{measured if math.isfinite(value) else 'never'}{'' if kept else ' (missed)'}",
            str(len(values)), f"{_place(*worst)} ({_seeds(len(times.of(*worst, aim.system)))})"]


def _place(task: str, link: str) -> str:
    return task if link == NO_LINK else f"{task}, {NAMES.get(link, link)}"


def _seeds(count: int) -> str:
    return f"{count} seed{'' if count == 1 else 's'}"


def overview(rows: Sequence[Row]) -> str:
    """A line per task and link with sync="auto" and its alternatives."""
    times = Times(rows)
    columns = ["ideal"], ["alone"], ["DDP fp16"], RIVALS, FIXED, ["auto"]
    lines = [[_place(*place), *(_best(times, place, names) for names in columns)] for place in _places(times)]
    return "\n".join(markdown("task, link|one machine, no network:|each host alone:|DDP fp16:|best of the others:"
                              "|commlayer, a fixed plan:|commlayer, `sync=\"auto\"`:", lines))


def _best(times: Times, place: Place, names: Sequence[str]) -> str:
    """Seconds to the easy and the middle loss, of the system that reaches the middle loss first; with its name if needed."""
    if (name := times.best(*place, names)) is None:
        return ""
    longest_s = max(row["seconds"] for row in times.of(*place, name))
    seconds = (times.seconds(*place, name, target) for target in range(2))
    text = " / ".join(f"{s:.0f}" if math.isfinite(s) else f"above {longest_s:g}" for s in seconds)
    return text if len(names) == 1 else f"{text} ({shown(name)})"


def slow_motion_table(rows: Sequence[Row]) -> str:
    """A line per task and link: the newest races of sync="auto" in slow motion, and its alternatives with the same seeds."""
    lines = []
    for place in _places(all_times := Times(rows)):
        day = max(row["day"] for row in all_times.of(*place, "auto"))
        autos = [row for row in all_times.of(*place, "auto") if row["day"] == day]
        seeds = {row["seed"] for row in autos}
        times = Times([*autos, *(row for row in rows if row["system"] != "auto" and row["seed"] in seeds)])
        ratios = [times.ratio(*place, "auto", name) for name in ("ideal", "DDP fp16")]
        columns = ["ideal"], ["DDP fp16"], RIVALS, ["auto"]
        lines.append([_place(*place), *(_best(times, place, names) for names in columns),
                      *("" if r is None else f"{r:.2f}" if math.isfinite(r) else "-" for r in ratios), str(len(seeds)), day])
    return "\n".join(markdown("task, link|one machine, no network:|DDP fp16:|best of the others:"
                              "|commlayer, `sync=\"auto\"`:|over one machine:|over DDP fp16:|seeds:|measured", lines))


def _places(times: Times) -> list[Place]:
    """The tasks and links on which sync="auto" was measured."""
    links = list(NETWORKS)
    return sorted((place for place in times.places() if times.of(*place, "auto")),
                  key=lambda place: (place[0], links.index(place[1])))


PARTS: dict[str, tuple[Callable[[Sequence[Row]], str], Callable[[], list[Row]]]] = {
    "summary": (figures, usual), "overview": (overview, usual), "slow-motion": (slow_motion_table, slow_motion)}
"""The generated parts of the page, and the rows of each."""


def page(text: str) -> str:
    for name, (render, rows) in PARTS.items():
        text = renewed(text, name, render(rows()))
    return text


def main() -> int:
    write_whole({PAGE: page(PAGE.read_text("utf-8")).encode()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
