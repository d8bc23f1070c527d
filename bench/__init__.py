"""Measurements of the project: `python -m bench NAME`. Knows the project; the project does not know it."""

from __future__ import annotations


class Unmeasurable(RuntimeError):
    """This machine cannot make the measurement (no root, no compiler, no GPU): one line that says what is missing."""
