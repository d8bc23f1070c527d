"""The default of optional callbacks."""

from __future__ import annotations


def ignore(*_: object, **__: object) -> None:
    """Does nothing."""
