"""The keys of a codec's random numbers. Knows states, a job, a bucket and a sender; not how numbers are drawn from a key.

A codec that draws has in its state the numbers `shared`, `own` (0 until seeded) and `step`, which it counts itself. What all
senders must draw alike takes `shared`; rounding takes `own`, since a dither that all share does not average out.
"""

from __future__ import annotations

import hashlib

from commlayer.compressors.codec import State

SERVER = -1
"""The sender of results."""

MOST_KEY = (1 << 63) - 1
KEYS = {"shared": (0, MOST_KEY), "own": (0, MOST_KEY)}
"""What the keys of a state may be."""


def seed(state: State, job: str, bucket: int, sender: int) -> None:
    """Sets the keys in a fresh state and in the states inside it. `job` is any text that the workers share."""
    keys = {"shared": _key(f"{job} {bucket}"), "own": _key(f"{job} {bucket} {sender}")}
    _set(state, keys)


def _set(state: State, keys: dict[str, int]) -> None:
    for name, value in state.items():
        if isinstance(value, dict):
            # A state under a number is one of several like it: each draws for itself.
            _set(value, {which: _key(f"{key} {name}") for which, key in keys.items()} if name.isdigit() else keys)
        elif name in keys:
            state[name] = keys[name]


def _key(text: str) -> int:
    """63 bits, so that a checkpoint's int64 holds them."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
