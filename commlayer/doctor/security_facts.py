"""Gathers facts of this machine's keys folder and plan file."""

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
    """Times are seconds since 1970. `error`: why this node cannot take part with this folder."""

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
    """Number of revoked certificates."""
    readable: tuple[str, ...] = ()
    """Secret files that other users of this machine may read."""
    ca_key: bool = False
    """Whether the folder also holds the CA's private key."""


class PlanFile(Record, frozen=True):
    """`error`: why the plan cannot be used."""

    path: str
    error: str = ""
    digest: str = ""
    buckets: int = 0
    servers: int = 0
    nodes: int = 0
    """Nodes that the plan was made for, 0 if it does not state them."""


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
        plan_ = plan_in(path)
        problems = planner.verify_alone(plan_, world)
    except ValueError as error:
        return PlanFile(str(path), str(error))
    nodes = max((len(bucket.by_node) for bucket in plan_.buckets), default=0)
    return PlanFile(str(path), problems[0] if problems else "", records.digest(plan_), len(plan_.buckets), plan_.servers, nodes)


def _seconds(when: datetime.datetime) -> float:
    return when.timestamp()


def _open(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    except OSError:
        return False
