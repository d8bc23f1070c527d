"""The page about what works with commlayer, from tests/support/matrix.py."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reference_pages.markdown import MADE, WIDTH, table_row, wrap


def support() -> str:
    root = Path(__file__).parents[2]
    sys.path.append(str(root / "tests"))
    from support import matrix

    direct = (root / "constraints.txt").read_text().partition("# ----")[0]
    pinned = [line.replace("==", " ") for line in direct.splitlines() if "==" in line]
    lines = [
        "# What works", "", MADE, "",
        *wrap("What was tried with commlayer, and what came out: scripts, models, optimizers, kinds of jobs and "
               "machines."), "",
        *wrap(f"As of {matrix.AS_OF}. **Works** means that tests show it, on Linux with CPUs and two or more processes, with "
               f"Python 3.11, {', '.join(pinned)}. **No GPU has run the GPU code yet.**"),
        "", "## Features and kinds of jobs", "",
        *wrap("Each cell is a case of `tests/multi/test_features.py`: all workers use the feature and end with equal weights. "
               "Where homes come and go, one home is killed inside a step. Then another one joins, except with Accelerate, "
               "Lightning and checkpoints. A code is that of the error with which the job ends instead."), "",
        table_row("feature", *matrix.KINDS.values(), "further tests"), table_row(*["---"] * (len(matrix.KINDS) + 2)),
        *(table_row(feature.title, *(f"`{matrix.REFUSED[name, kind].code}`" if (name, kind) in matrix.REFUSED else "yes"
                                for kind in matrix.KINDS), ", ".join(f"`{file}`" for file in feature.tests))
          for name, feature in matrix.FEATURES.items()), "",
        "Reasons of these errors:", "", *_refusals(matrix.FEATURES, matrix.KINDS, matrix.REFUSED),
    ]
    for title, rows in matrix.TABLES.items():
        lines += ["", f"## {title}", "", "| subject | verdict | what was tried | tests |", "| --- | --- | --- | --- |"]
        for row in rows:
            names: dict[str, list[str]] = {}
            for file, name in (test.split("::") for test in row.tests):
                names.setdefault(file, []).append(name)
            lines.append(table_row(row.subject, row.verdict, row.how, "; ".join(
                f"`{file}`: {', '.join(each)}" for file, each in names.items())))
    return "\n".join([*lines, ""])


def _refusals(features: dict[str, Any], kinds: dict[str, str], refused: dict[tuple[str, str], Any]) -> Iterator[str]:
    """One item for each reason in a kind of job."""
    titles: dict[tuple[str, str], list[str]] = {}
    for (feature, kind), refusal in refused.items():
        titles.setdefault((kinds[kind], refusal.why), []).append(features[feature].title)
    for (kind, why), refused_there in titles.items():
        yield from textwrap.wrap(f"- {kind}, {', '.join(refused_there)}: {why}.", WIDTH, subsequent_indent="  ",
                                 break_long_words=False, break_on_hyphens=False)
