"""Writes the pages of docs/reference that come from the code: see PAGES.

`make docs` runs `python docs/generate.py`. tests/unit/test_docs.py fails while a page is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path

from reference_pages import api, commands, errors, events, settings, support

FOLDER = Path(__file__).parent / "reference"
PAGES = {"api.md": api.api, "cli.md": commands.cli, "settings.md": settings.settings, "errors.md": errors.errors,
         "events.md": events.event_kinds, "support.md": support.support}


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
