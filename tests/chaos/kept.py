"""Keeps the runs of a campaign in a file, so that an interrupted campaign can be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from commlayer.errors import InvalidInput
from commlayer.files import write_whole
from commlayer.records import MALFORMED
from tests.chaos.campaign import Row
from tests.chaos.dealing import trial


class _File(msgspec.Struct):
    """`line`: the hosts' links, "" without hosts."""

    line: str
    rows: list[Row]


class Kept:
    """`rows`: all runs, those of earlier parts first. Without a path they are only kept in memory.

    Raises ValueError if the file holds anything else than runs of these seeds and faults.
    """

    def __init__(self, path: Path | None, seeds: Sequence[int], faults: Sequence[str], line: str = "") -> None:
        self._path, self._line = path, line
        self.rows: list[Row] = []
        if path is not None and path.exists():
            self.rows = _read(path, line)
        trials = {seed: trial(seed, faults, line) for seed in seeds}
        for row in self.rows:
            if trials.get(row.trial.seed) != row.trial:
                raise InvalidInput("E-CLI-OPTION",
                                   f"--resume {path}: holds {row.trial.fault} of seed {row.trial.seed}, which is not asked "
                                   "for: "
                                   "give the seed, the faults and no fewer runs than before, or another file")
        seeds_done = {row.trial.seed for row in self.rows}
        self.left = [seed for seed in seeds if seed not in seeds_done]
        """Seeds that had no run when this object was created."""

    def add(self, row: Row) -> None:
        """Writes the run at once, since the next run may be interrupted. Leaves out the evidence that is no longer needed."""
        small = row.evidence._replace(stepped=[], began=(), replayed=(), lines="\n".join(row.tail))
        self.rows.append(row._replace(evidence=small))
        if self._path is not None:
            write_whole({self._path: msgspec.msgpack.encode(_File(self._line, self.rows))})


def _read(path: Path, line: str) -> list[Row]:
    try:
        file = msgspec.msgpack.decode(path.read_bytes(), type=_File)
    except MALFORMED as error:
        raise InvalidInput("E-CLI-OPTION", f"--resume {path}: it is not what an earlier piece has written ({error})") from None
    if file.line != line:
        where = f"on hosts of the lab, line {file.line}," if file.line else "without hosts of the lab"
        raise InvalidInput("E-CLI-OPTION", f"--resume {path}: its runs were made {where}: name another file")
    return file.rows
