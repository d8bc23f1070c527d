"""Files that are there whole or not at all, whatever breaks off while they are written; pages of which a part is made anew.

Knows bytes and marks; no formats.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from commlayer.errors import InvalidInput


def write_whole(contents: Mapping[Path, bytes], *, durable: bool = False, mode: int = 0o666) -> None:
    """All of them, each in place of what was there, or none. OSError with the name of the one that cannot be written.

    `durable`: they outlast a power failure when this returns. `mode`: who may read them, from the first
    byte on, less the umask.
    """
    # By process, so that two that write the same file do not mix: the last one's stays.
    parts = {path: path.with_name(f"{path.name}.{os.getpid()}.part") for path in contents}
    path = next(iter(parts))
    try:
        for path, part in parts.items():
            with contextlib.suppress(FileNotFoundError):
                part.unlink()  # of a former process of that number, with another mode
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
                file.write(contents[path])
            if durable:
                sync(part)
        for path, part in parts.items():
            part.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        for part in parts.values():
            with contextlib.suppress(OSError):
                part.unlink()
    if durable:
        for folder in {path.parent for path in parts}:
            sync(folder)


def sync(path: Path) -> None:
    """A file's contents, or a folder's names, to the disk: no power failure leaves a name without its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def between(page: str, begin: str, end: str, made: str) -> str:
    r"""The page with that in place of what stands between the two marks, each on a line of its own. ValueError where one lacks.

    >>> between("a\n<\nold\n>\nb", "<", ">", "new")
    'a\n<\nnew\n>\nb'
    """
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise InvalidInput("E-FILE", f"the page has no {begin} before a {end}")
    return f"{before}{begin}\n{made}\n{end}{after}"
