"""The page about settings."""

from __future__ import annotations

from typing import get_type_hints

from commlayer.config import settings as config
from reference_pages.markdown import MADE, table_row, texts_of, wrap


def settings() -> str:
    fields = config.Config.__struct_fields__
    if sorted(fields) != sorted(name for names in config.GROUPS.values() for name in names):
        raise ValueError(f"config/settings.py: GROUPS names other settings than Config has: {sorted(fields)}")
    hints, texts, defaults = get_type_hints(config.Config, include_extras=True), texts_of(config, "Config"), config.Config()
    lines = [
        "# Settings", "", MADE, "",
        *wrap("A job runs with the defaults; settings change deadlines, limits and addresses. They are read from these "
               "sources, and the first one that has the setting wins: `attach(..., config={...})`, the environment "
               "(`COMMLAYER_` and the name in capitals, such as `COMMLAYER_BIND`), `commlayer.toml` in the current directory "
               "or the file that `COMMLAYER_CONFIG` names, and the default. Commands have options for some settings; see "
               "[cli.md](cli.md). Few users need the settings under Expert."), "",
        *wrap("**Same**: the value must be equal on all ranks. **All**: set it on all ranks or on none."),
    ]
    for group, names in config.GROUPS.items():
        lines += ["", f"## {group}", "", "| setting | default | allowed | ranks | meaning |", "| --- | --- | --- | --- | --- |"]
        for name in names:
            allowed = next(m.description for m in hints[name].__metadata__ if getattr(m, "description", None))
            default = getattr(defaults, name)
            shown = str(default).lower() if isinstance(default, bool) else str(default)
            ranks = "Same" if name in config.ALIKE else "All" if name in config.ALIKE_SET else ""
            lines.append(table_row(f"`{name}`", f"`{shown}`" if shown else "", allowed, ranks, texts[name]))
    return "\n".join([*lines, ""])
