"""Lines of Markdown, and the texts below the fields of a class."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import ModuleType

WIDTH = 124
MADE = "<!-- Generated from the code by `make docs`; do not edit. -->"


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def table_row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def texts_of(module: ModuleType, kind: str) -> dict[str, str]:
    """By field of the module's class `kind`, the string below it, in one line."""
    tree = ast.parse(inspect.getsource(module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    texts = {}
    for field, text in zip(body, [*body[1:], body[0]], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)):
                raise ValueError(f"{module.__name__}: {kind}.{field.target.id} has no text below it")
            texts[field.target.id] = " ".join(text.value.value.split())
    return texts
