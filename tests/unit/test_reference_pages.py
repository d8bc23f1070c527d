"""The pages of docs/reference that come from the code are current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("generate", FOLDER / "generate.py")
assert SPEC is not None
assert SPEC.loader is not None
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_page_is_current(name: str) -> None:
    assert (FOLDER / "reference" / name).read_text() == generate.PAGES[name](), "run `make docs`"


def test_every_setting_and_command_is_on_its_page() -> None:
    settings, commands = ((FOLDER / "reference" / name).read_text() for name in ("settings.md", "cli.md"))
    assert all(f"| `{name}` |" in settings for name in generate.config.Config.__struct_fields__)
    assert {"commlayer serve", "commlayer plan create", "commlayer keys add"} <= {
        line.lstrip("# ") for line in commands.splitlines() if line.startswith("#")}


def test_a_setting_without_a_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "class Config:\n    join: str = ''\n    bind: str = ''\n"
    monkeypatch.setattr(generate.inspect, "getsource", lambda _: source)
    with pytest.raises(ValueError, match="the setting join has no text"):
        generate._setting_texts()
