"""Benchmarks of the project: `python -m bench NAME`. commlayer itself never imports them."""

from __future__ import annotations


class Unmeasurable(RuntimeError):
    """This machine cannot make the measurement (no root, no compiler, no GPU). The message is one line with what is missing."""
