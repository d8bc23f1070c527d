"""Locks the folder of a journal, so that one process writes to it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from commlayer.errors import InvalidInput

LOCK_TRIES, LOCK_RETRY_S = 10, 0.02
"""Retries of locking the folder, and the pause between two. Another process may hold the lock for an instant while it checks
whether the lock is free."""


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
    for left in reversed(range(LOCK_TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError:
            if left:
                time.sleep(LOCK_RETRY_S)
    os.close(lock)
    raise InvalidInput("E-JOURNAL-IN-USE", f"journal: {folder} {taken}")
