"""Finds the CUDA sources and resolves their includes, so that each family is one text.

The sources lie in <root>/cuda beside an editable install and in commlayer/_cuda in any other.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from commlayer.errors import InvalidInput

PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = (PACKAGE.parent / "cuda", PACKAGE / "_cuda")
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


def folder(candidates: tuple[Path, ...] = FOLDERS) -> Path:
    for candidate in candidates:
        if (candidate / "common.cuh").is_file():
            return candidate
    raise InvalidInput("E-GPU-CODE", f"CUDA sources: none in {' or '.join(map(str, candidates))}; install commlayer again")


@cache
def text(family: str) -> str:
    """A family's source with its headers inlined: the compiler needs no paths, and a cache keyed by the text stays right."""
    return _resolved(folder() / f"{family}.cu", set())


def _resolved(file: Path, seen: set[str]) -> str:
    def include(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return ""
        seen.add(name)
        return _resolved(file.with_name(name), seen)

    return _INCLUDE.sub(include, file.read_text("utf-8"))
