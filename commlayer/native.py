"""Loads the native core; without it, logs that the slower fallback is used."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

log = logging.getLogger("commlayer")


def load() -> ModuleType | None:
    """Returns the compiled module commlayer._core. Returns None if the package was installed without a compiler."""
    try:
        return importlib.import_module("commlayer._core")
    except ImportError as error:
        log.warning("native core not available (%s): the default codecs use a slower fallback, and other codecs are "
                    "unavailable", error)
        return None


core: ModuleType | None = load()
