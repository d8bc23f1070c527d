"""Locks a journal's folder against other processes, as long as the process that writes the journal runs."""

from __future__ import annotations

import os
from pathlib import Path

from commlayer.errors import InvalidInput
from commlayer.files import try_lock

CHECK_S = 0.2
"""Seconds for which another process may hold a journal's lock while it only checks whether the lock is free."""


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
