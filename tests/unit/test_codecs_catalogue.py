"""docs/reference/codecs.md: every codec is in its table, and the table is what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlayer.compressors import parse
from commlayer.compressors.catalogue import CATALOGUE, main, renewed
from commlayer.compressors.parse import FACTORIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "codecs.md"


def test_every_codec_has_an_entry_that_a_plan_can_spell() -> None:
    assert set(CATALOGUE) == set(FACTORIES)
    for name, entry in CATALOGUE.items():
        assert entry.example.startswith(f"{name}(")
        assert parse(entry.example)
        assert "|" not in "".join(entry)


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert renewed(page) == page, "run `make docs`"


def test_the_command_writes_a_page_and_names_one_without_marks(tmp_path: Path) -> None:
    page = tmp_path / "codecs.md"
    page.write_text("before\n<!-- codecs: begin -->\nworn out\n<!-- codecs: end -->\nafter\n")
    assert main([str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "| `topk` |" in text
    assert "worn out" not in text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="the page has no <!-- codecs: begin -->"):
        main([str(page)])
    assert main([]) == 2
