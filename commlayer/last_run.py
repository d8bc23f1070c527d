"""What a machine remembers of its last run of a job: the plan that stayed in force, and the rates of its link.

The next run of the same job starts with them. Measurements correct them as they correct every plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from commlayer import files, records
from commlayer.config import cache_folder
from commlayer.errors import RecordError
from commlayer.planner.model import Link
from commlayer.records import Plan, Record

MOST = 64
"""Number of jobs that are remembered."""
AUTO = "auto"


class LastRun(Record, frozen=True):
    """The last run of a job, as one rank knows it."""

    plan: Plan
    link: Link
    """Of this rank's node."""


def folder(setting: str) -> Path | None:
    """Returns the folder that the setting `cache` selects. Returns None if the setting is empty."""
    if setting == AUTO:
        return cache_folder() / "runs"
    return Path(setting) if setting else None


def list_remembered(path: Path | None) -> list[Path]:
    """Returns the files of remembered jobs in a folder, the latest first."""
    with contextlib.suppress(OSError):
        return sorted(path.glob("*.json"), key=lambda file: -file.stat().st_mtime) if path else []
    return []


def forget(path: Path | None) -> None:
    for file in list_remembered(path):
        file.unlink(missing_ok=True)


class LastRuns:
    """The last runs of one job on this machine, one run for each division of its workers into sites."""

    def __init__(self, path: Path | None = None, job: Mapping[str, str] | None = None) -> None:
        """`path`: folder of the files. None: no run is remembered. `job`: what makes it the same job: model, server, network
        and settings, as texts."""
        self._path, self._job = path, job or {}
        self._saved: LastRun | None = None

    def load(self, sites: Iterable[Sequence[int]]) -> LastRun | None:
        """Returns the last run with sites of these sizes. Returns None if there is no last run, or if another version of
        commlayer has written it."""
        if self._path is not None:
            with contextlib.suppress(OSError, RecordError):
                return records.decode(self._file(sites).read_bytes(), LastRun, "last run")
        return None

    def save(self, sites: Iterable[Sequence[int]], run: LastRun) -> None:
        """Writes a run, unless this object has just written the same. A folder that cannot be written is no reason to end a
        training."""
        if self._path is not None and run != self._saved:
            self._saved = run
            with contextlib.suppress(OSError):
                self._path.mkdir(parents=True, exist_ok=True)
                files.write_whole({self._file(sites): records.encode(run)})
                for old in list_remembered(self._path)[MOST:]:
                    old.unlink(missing_ok=True)

    def _file(self, sites: Iterable[Sequence[int]]) -> Path:
        assert self._path is not None
        what = [f"{name}={value}" for name, value in sorted(self._job.items())] + [f"{len(site)}" for site in sites]
        return self._path / f"{hashlib.sha256(chr(0).join(what).encode()).hexdigest()[:32]}.json"


def age(file: Path) -> float:
    """Returns the seconds since a file was written."""
    return max(0.0, time.time() - file.stat().st_mtime)
