"""Gathers what the keys folder, the settings and the plan file of this machine hold. Judges nothing; knows no connection."""

from __future__ import annotations

import datetime
import stat
from pathlib import Path

from commlayer import planner, records
from commlayer.errors import RecordError
from commlayer.plan_file import plan_in
from commlayer.records import Record
from commlayer.transport.key_folder import KEY, TOKEN, Keys

CA_KEY = "ca.key"


class KeysFolder(Record, frozen=True):
    """Times in seconds since 1970. `error`: why the folder does not let this node take part."""

    folder: str
    error: str = ""
    name: str = ""
    now: float = 0.0
    until: float = 0.0
    ca_until: float = 0.0
    dials_only: bool = False
    revoked: bool = False
    list_number: int = 0
    listed: int = 0
    """How many certificates are revoked."""
    readable: tuple[str, ...] = ()
    """Files that others of this machine may read and should not."""
    ca_key: bool = False
    """Whether the CA's own key lies there, too."""


class PlanFile(Record, frozen=True):
    """`error`: why it cannot be used."""

    path: str
    error: str = ""
    digest: str = ""
    buckets: int = 0
    servers: int = 0
    nodes: int = 0
    """How many nodes it was made for, 0 if it does not say."""


def keys(folder: Path, now: float) -> KeysFolder:
    from cryptography import x509

    try:
        mine = Keys(folder)
    except (RecordError, OSError, ValueError) as error:
        return KeysFolder(str(folder), str(error), now=now)
    certificate, authority = (x509.load_pem_x509_certificate(data) for data in (mine.certificate, mine.ca))
    revoked = mine.revoked()
    return KeysFolder(
        str(folder), "", mine.me.name, now, _seconds(certificate.not_valid_after_utc), _seconds(authority.not_valid_after_utc),
        mine.dials_only, mine.me.serial in revoked,
        mine.list_number, len(revoked),
        tuple(name for name in (KEY, TOKEN, CA_KEY) if _open(folder / name)), (folder / CA_KEY).exists(),
    )


def plan(path: Path, world: int = 0) -> PlanFile:
    try:
        made = plan_in(path)
        problems = planner.verify_alone(made, world)
    except ValueError as error:
        return PlanFile(str(path), str(error))
    nodes = max((len(bucket.by_node) for bucket in made.buckets), default=0)
    return PlanFile(str(path), problems[0] if problems else "", records.digest(made), len(made.buckets), made.servers, nodes)


def _seconds(when: datetime.datetime) -> float:
    return when.timestamp()


def _open(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    except OSError:
        return False
