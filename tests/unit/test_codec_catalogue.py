"""docs/reference/codecs.md: every codec is in its table, and the table is what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

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


def test_the_command_writes_a_page_and_names_one_without_marks(tmp_path: Path) -> None:
    page = tmp_path / "codecs.md"
    page.write_text("before\n<!-- codecs: begin -->\nworn out\n<!-- codecs: end -->\nafter\n")
    assert codec_table.main([str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "| `topk` |" in text
    assert "worn out" not in text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="the page has no <!-- codecs: begin -->"):
        codec_table.main([str(page)])
    assert codec_table.main([]) == 2
