"""Derives the keys of a codec's random numbers from the job, the bucket and the sender.

The state of a codec with random numbers holds `shared`, `own` (0 until seeded) and `step`, which the codec counts. Draws that
must be equal on all senders use `shared`. Rounding uses `own`, since a dither that all senders share does not average out.
"""

from __future__ import annotations

import hashlib

from commlayer.compressors.codec import State

SERVER = -1
"""The sender id of results."""

MOST_KEY = (1 << 63) - 1
KEYS = {"shared": (0, MOST_KEY), "own": (0, MOST_KEY)}
"""Limits of the keys in a state."""


def seed(state: State, job: str, bucket: int, sender: int) -> None:
    """Sets the keys in a fresh state and in its nested states. `job` is any text that the workers share."""
    keys = {"shared": _key(f"{job} {bucket}"), "own": _key(f"{job} {bucket} {sender}")}
    _set(state, keys)


def _set(state: State, keys: dict[str, int]) -> None:
    for name, value in state.items():
        if isinstance(value, dict):
            # Nested states under a number are alike: each gets keys of its own.
            _set(value, {which: _key(f"{key} {name}") for which, key in keys.items()} if name.isdigit() else keys)
        elif name in keys:
            state[name] = keys[name]


def _key(text: str) -> int:
    """63 bits, so that the int64 of a checkpoint holds the key."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
