"""Saves and restores the state of codecs as named arrays, and sets the keys of their random numbers.

The state of a codec with random numbers contains `shared` and `own` (keys; 0 until seeded) and `step`, which the codec counts.
Random numbers that must be equal on all senders use `shared`. Rounding uses `own`, because rounding errors that are equal on
all senders would not average out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from commlayer.compressors.codec import Codec, State, states
from commlayer.compressors.global_budget import BUDGET_LIMITS
from commlayer.compressors.kernels import Array, to_host
from commlayer.compressors.payload import on_device
from commlayer.compressors.selection import STATE_LIMITS
from commlayer.errors import InvalidInput
from commlayer.records import Spec

SERVER = -1
"""Sender number of the server, for the keys of results."""

MOST_KEY = (1 << 63) - 1
KEYS = {"shared": (0, MOST_KEY), "own": (0, MOST_KEY)}
"""Allowed range of the random-number keys in a codec's state."""


SAMPLE_NUMEL = 64
"""Number of elements of a state that is made only to see what it contains."""
LIMITS: Mapping[str, tuple[float, float]] = {**STATE_LIMITS, **KEYS, **BUDGET_LIMITS}


def snapshot(state: State) -> dict[str, Array]:
    """Returns copies in host memory of all values that a step depends on, by path, for example `inner.threshold`.

    Numbers become arrays without dimensions. Skips keys that start with `_`.
    """
    return {path: _saved(value) for path, _, _, value in _walk(state)}


def shared_snapshot(state: State) -> dict[str, Array]:
    """Returns the part of `snapshot` that must be equal on all senders: what random numbers or sums of all senders decide."""
    return {path: _saved(value) for path, owner, name, value in _walk(state) if "shared" in owner and name != "own"}


def shares_state(codec: Codec) -> bool:
    """Returns True if all senders must have an equal part of the codec's state."""
    return bool(shared_snapshot(codec.init(Spec((SAMPLE_NUMEL,)))))


def restore(state: State, arrays: Mapping[str, Array]) -> None:
    """Writes a snapshot (arrays or CPU tensors) into a state that `init` of the same codec and spec created.

    Checks all names and values first.
    """
    places = list(_walk(state))
    wanted, got = {path for path, *_ in places}, set(arrays)
    if wanted != got:
        raise InvalidInput("E-CODEC-STATE",
                           f"codec state: missing {sorted(wanted - got)}, unknown {sorted(got - wanted)}; the state is from a "
                           "different plan or codec")
    arrays = {path: np.asarray(value) for path, value in arrays.items()}
    for path, _, name, value in places:
        saved, dtype = arrays[path], np.float32 if _is_array(value) else number(value).dtype
        shape = tuple(value.shape) if _is_array(value) else ()
        if saved.shape != shape or saved.dtype != dtype:
            raise InvalidInput("E-CODEC-STATE", f"codec state {path}: got {saved.dtype} of shape {saved.shape}, expected "
                                                f"{np.dtype(dtype)} of shape {shape}")
        if not np.isfinite(saved).all():
            raise InvalidInput("E-CODEC-STATE",
                               f"codec state {path}: contains a number that is not finite; use an earlier checkpoint")
        least, most = LIMITS.get(name, (-math.inf, math.inf))
        if not shape and not least <= saved.item() <= most:
            raise InvalidInput("E-CODEC-STATE", f"codec state {path}: is {saved.item()}, but it must be {least} to {most}; use "
                                                "an earlier checkpoint")
    for _, owner in states(state):  # nothing was sent from a restored state, so nothing can be undone
        owner.update(dict.fromkeys({"_sent", "_added", "_moved", "_more", "_reweighed"} & owner.keys()))
    for path, owner, name, value in places:
        if on_device(value) and _is_array(value):
            value.copy_(value.new_tensor(arrays[path]))
        elif _is_array(value):
            value[:] = arrays[path]
        else:
            owner[name] = type(value)(arrays[path].item())


def server_snapshot(state: State) -> dict[str, Array]:
    """Returns a server's snapshot plus the data for `undo_server`, so a restarted server can resume from its journal."""
    arrays = snapshot(state)
    for path, owner in states(state):
        if "_added" in owner:
            arrays[f"{path}_sent"] = number(int(owner["_sent"] is not None))
            if owner["_added"] is not None:
                arrays[f"{path}_added"] = _saved(owner["_added"])
    return arrays


def restore_server(state: State, arrays: Mapping[str, Array], sent: Any) -> None:
    """Restores the state that `server_snapshot` returned. `sent`: the complete last result, whose memory must stay unchanged
    until the next `emit`."""
    restore(state, {path: value for path, value in arrays.items() if path.rsplit(".", 1)[-1] not in ("_sent", "_added")})
    for path, owner in states(state):
        if "_added" in owner:
            owner["_sent"] = sent if int(arrays[f"{path}_sent"]) else None
            owner["_added"] = arrays.get(f"{path}_added")


def number(value: float) -> Array:
    """Returns a number as an array without dimensions, of type float64 or int64, which represents the number exactly."""
    return np.array(value, np.float64 if isinstance(value, float) else np.int64)


def _saved(value: Any) -> Array:
    return np.array(to_host(value)) if _is_array(value) else number(value)


def _is_array(value: Any) -> bool:
    return not isinstance(value, int | float)


def _walk(state: State) -> Iterator[tuple[str, State, str, Any]]:
    """Yields (path, dict that contains the value, key in that dict, value) for all arrays and numbers that are saved."""
    for prefix, owner in states(state):
        for name, value in owner.items():
            if not isinstance(value, dict) and "._" not in f".{prefix}{name}":
                yield prefix + name, owner, name, value


def seed(state: State, job: str, bucket: int, sender: int) -> None:
    """Sets the random keys in a new state and in its nested states. `job`: any text that is equal on all workers."""
    keys = {"shared": _key(f"{job} {bucket}"), "own": _key(f"{job} {bucket} {sender}")}
    for _, owner in states(state):
        owner.update({name: keys[name] for name in keys.keys() & owner.keys()})


def _key(text: str) -> int:
    """Returns a key of 63 bits, which fits the int64 of a checkpoint."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
