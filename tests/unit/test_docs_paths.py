"""What the documentation points at is there: files by their path, links between pages, and headings behind a link's '#'."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
KEPT = ("commlayer", "native", "cuda", "bench", "tests", "examples", "docs")
THERE = [f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for top in KEPT for path in [ROOT / top, *(ROOT / top).rglob("*")]]
"""Prose says `paths/late.py` where the room is clear: any path may end so."""
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")
PATH = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|md|cc|h|cu|cuh|toml))`|`([\w./-]+/)`")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_something(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: link to {target}"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{page.name}: link to {target}{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_prose_are_there(page: Path) -> None:
    for file, folder in PATH.findall(page.read_text()):
        name = file or folder
        assert any(path.endswith(f"/{name}") for path in THERE), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_conflict_markers(page: Path) -> None:
    assert not re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text(), re.MULTILINE)


def test_there_is_something_to_check() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert len(LINK.findall(text)) > 50
    assert len(PATH.findall(text)) > 20


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name in ("tutorials", "how-to", "explanation")],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_for_users_name_no_internals(page: Path) -> None:
    text = page.read_text()
    assert "decisions/" not in text
    assert [file for file, _ in PATH.findall(text) if file.endswith(".py") and not file.startswith("examples/")] == []
    assert not re.search(r"\b(decision|ADR) 0\d\d", text)
