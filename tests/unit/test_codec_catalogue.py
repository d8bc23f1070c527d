"""docs/reference/codecs.md: every codec is in its table, and the table is what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from commlayer.compressors import parse
from commlayer.compressors.plan_codecs import FACTORIES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "reference" / "codecs.md"
SPEC = importlib.util.spec_from_file_location("codec_table", DOCS / "codec_table.py")
assert SPEC is not None
assert SPEC.loader is not None
codec_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(codec_table)


def test_every_codec_has_an_entry_that_a_plan_can_spell() -> None:
    assert set(codec_table.CATALOGUE) == set(FACTORIES)
    for name, entry in codec_table.CATALOGUE.items():
        assert entry.example.startswith(f"{name}(")
        assert parse(entry.example)
        assert "|" not in "".join(entry)


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert codec_table.renewed(page) == page, "run `make docs`"
