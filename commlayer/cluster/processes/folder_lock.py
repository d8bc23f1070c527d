"""Locks folders against other processes: a journal's for the life of its process, a CA's for one command."""

from __future__ import annotations

import os
import time
from pathlib import Path

from commlayer.errors import InvalidInput

CHECK_S, RETRY_S = 0.2, 0.02
"""Seconds for which another process may hold a journal's lock while it only checks whether the lock is free, and seconds
between two attempts."""


def try_lock(descriptor: int, wait_s: float) -> bool:
    """Locks an open file against other processes and other descriptors, while the descriptor is open. Returns False if another
    one holds the lock for `wait_s`."""
    import fcntl  # Windows lacks it

    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
        time.sleep(RETRY_S)


def lock_folder(folder: Path, name: str, taken: str) -> int:
    """Creates the folder and locks the file `name` in it (empty: the folder itself). The lock lasts while the returned
    descriptor is open. Raises InvalidInput if the folder cannot be created or, with the text `taken`, if another process holds
    the lock."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / name, (os.O_RDWR | os.O_CREAT if name else os.O_RDONLY) | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidInput("E-JOURNAL", f"journal: {folder} cannot be created: {error.strerror}; name a folder that this user "
                                        "may write to") from None
    if try_lock(lock, CHECK_S):
        return lock
    os.close(lock)
    raise InvalidInput("E-JOURNAL-IN-USE", f"journal: {folder} {taken}")
