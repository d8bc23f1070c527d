"""Builds the documentation as a site in build/site, without network: `make docs`.

The pages are those of the repository, at the same relative paths, so every link works on both. The navigation is the order of
docs/README.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES, CONFIG = ROOT / "build" / "site-pages", ROOT / "build" / "zensical.toml"
COPIED = ("docs", "examples")
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+\.md)\)")


def stage() -> None:
    """Copies README, docs and examples to the folder from which the site is built."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for folder in COPIED:
        shutil.copytree(ROOT / folder, PAGES / folder, ignore=shutil.ignore_patterns("__pycache__", "*.toml"))
    for page in ROOT.glob("*.md"):
        shutil.copy(page, PAGES / page.name)
    for page in (PAGES / "docs" / "decisions").glob("*.md"):  # for contributors; guides answer a reader's search
        page.write_text(NOT_SEARCHED + page.read_text())


def navigation() -> str:
    """The sections of docs/README.md with their pages in order, as TOML."""
    sections = ['{ "commlayer" = "README.md" }']
    for part in (ROOT / "docs" / "README.md").read_text().split("\n**")[1:]:
        title = part.partition("**")[0].rstrip(",:")
        pages = ", ".join(f'{{ "{name[0].upper()}{name[1:]}" = "docs/{path}" }}' for name, path in LINK.findall(part))
        sections.append(f'{{ "{title}" = [{pages}] }}')
    return f"nav = [{', '.join(sections)}]\n"


def main() -> int:
    stage()
    settings, mark, rest = (ROOT / "docs" / "zensical.toml").read_text().partition("[project.theme]")
    CONFIG.write_text(settings + navigation() + mark + rest)
    command = [Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict", "-f", str(CONFIG)]
    code = subprocess.run(command, cwd=CONFIG.parent, timeout=300).returncode
    if code == 0:
        print("The site is in build/site. Its search needs a web server:\n"
              f"    {sys.executable} -m http.server --bind 127.0.0.1 --directory build/site 8000\n"
              "then open http://127.0.0.1:8000")
    return code


if __name__ == "__main__":
    sys.exit(main())
