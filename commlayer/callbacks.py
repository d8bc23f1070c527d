"""The default of optional callbacks."""

from __future__ import annotations


def ignore(*_: object) -> None:
    """Does nothing."""
