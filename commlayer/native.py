"""Loads the native core, or logs once that the slower fallback runs instead."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

log = logging.getLogger("commlayer")


def load() -> ModuleType | None:
    """The compiled module commlayer._core, or None where the package was installed without a compiler."""
    try:
        return importlib.import_module("commlayer._core")
    except ImportError as error:
        log.warning("native core not available (%s): default codecs run on a slower fallback, others are refused", error)
        return None


core: ModuleType | None = load()
