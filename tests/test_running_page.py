"""docs/running.md: its table is of the settings that there are, with their defaults and what they allow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_type_hints

from commlayer.config import ALIKE, ALIKE_SET, Config

PAGE = (Path(__file__).parents[1] / "docs" / "running.md").read_text("utf-8")


def written(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else ""


def test_the_table_of_settings_is_config() -> None:
    hints = get_type_hints(Config, include_extras=True)
    expected = []
    for name in Config.__struct_fields__:
        allowed = next(m.description for m in hints[name].__metadata__)
        mark = "=" if name in ALIKE else "~" if name in ALIKE_SET else ""
        expected.append((name, mark, written(getattr(Config(), name)), allowed))
    lines = [line for line in PAGE[PAGE.index("| `join` |"):].splitlines() if re.match(r"\| `\w+` \|", line)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(row[0].strip("`"), *row[1:4]) for row in rows] == expected
    assert all(row[4] for row in rows), "every setting says what it does"
