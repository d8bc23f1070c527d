"""A component of the functions that a test gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlayer.engine.components import Component, ComponentOrder


class Calls(Component):
    """Calls `functions`, by the names of Component's methods."""

    def __init__(self, order: ComponentOrder = ComponentOrder.OTHER, **functions: Callable[..., Any]) -> None:
        self.order = order
        vars(self).update(functions)
