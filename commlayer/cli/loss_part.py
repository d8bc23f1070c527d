"""Parses a loss budget of the command line: a fraction, as in settings, or a percentage."""

from __future__ import annotations

import math

from commlayer.config import MOST_LOSS
from commlayer.errors import InvalidInput


def loss_part(option: str, text: str, *, above_0: bool = False) -> float:
    """The budget as a fraction. A text that is neither raises a one-line error.

    >>> loss_part("--max-loss", "0.02"), loss_part("--max-loss", "2%"), loss_part("--max-loss", "0.5 %")
    (0.02, 0.02, 0.005)
    """
    number = text.strip().removesuffix("%")
    try:
        part = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        part = math.nan
    if not (0 <= part <= MOST_LOSS) or (above_0 and not part):
        allowed = f"above 0, up to {MOST_LOSS:g}" if above_0 else f"from 0 to {MOST_LOSS:g}"
        raise InvalidInput("E-CLI-OPTION", f"{option} {text}: allowed is a part of the loss {allowed}, such as 0.02, or 2%")
    return part
