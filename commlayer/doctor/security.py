"""Checks a node's keys folder, security settings and plan file."""

from __future__ import annotations

import datetime
import stat
from collections.abc import Iterator
from pathlib import Path

from commlayer import planner, records
from commlayer.config import Config, host_port, is_loopback
from commlayer.doctor.report import Finding, fail, of_error, ok, warn
from commlayer.errors import RecordError
from commlayer.plan_file import plan_in
from commlayer.records import Record
from commlayer.transport.key_folder import KEY, TOKEN, Keys

SOON_S = 30 * 86400.0
"""A run may take weeks, and after its certificate expires a node cannot connect again."""


def check_keys(f: KeysFolder, *, serves: bool) -> Iterator[Finding]:
    """`serves`: whether other nodes connect to this one."""
    if f.error:
        yield of_error("keys", f.error.removeprefix("keys: "))
        return
    if f.revoked:
        yield fail("keys", f"the certificate of {f.name} is revoked",
                   f"make a new one: commlayer keys add {f.name} --again")
        return
    until_s, what = min((f.until, f"the certificate of {f.name}"), (f.ca_until, "the CA"))
    days = (until_s - f.now) / 86400
    again = f"commlayer keys add {f.name} --again" if what != "the CA" else "make a new CA: commlayer keys init --dir"
    if until_s - f.now < SOON_S:
        yield warn("keys", f"{what} in {f.folder} expires in {days:.0f} days", again)
    else:
        yield ok("keys", f"{f.name} in {f.folder}, valid for {days:.0f} days; list {f.list_number}, {f.listed} revoked")
    if f.readable:
        paths = " ".join(f"{f.folder}/{name}" for name in f.readable)
        yield warn("keys", f"other users of this machine can read {', '.join(f.readable)}", f"chmod 600 {paths}")
    if f.ca_key:
        yield warn("keys", "the CA's private key is in this folder; its owner can admit any node",
                   "keep it on one machine: copy only the folder nodes/NAME")
    if f.dials_only and serves:
        yield fail("keys", f"{f.name} was made with --dials-only, but other nodes must connect to it",
                   f"commlayer keys add {f.name} --again, without --dials-only; or --join a server elsewhere")


def check_settings(config: Config) -> Iterator[Finding]:
    """Checks security settings of a node that connects to others or accepts connections."""
    away = [host for host in (config.bind, config.advertise, host_port(config.join)[0] if config.join else "") if host]
    if all(is_loopback(host) for host in away):
        return
    if config.insecure and not config.keys:
        yield warn("secure", "plain text: anyone on the path can read and change it",
                   "commlayer keys init, then COMMLAYER_KEYS on every machine (docs/how-to/keys.md)")
    elif config.join and not config.token:
        yield fail("secure", "no secret, but joining a job needs one", "set COMMLAYER_KEYS or COMMLAYER_TOKEN_FILE")


def check_plan(f: PlanFile, *, nodes: int) -> Iterator[Finding]:
    if f.error:
        yield of_error("plan", f.error, "make it again: commlayer plan make --out FILE")
        return
    line = f"{f.path}: hash {f.digest}, {f.buckets} buckets, {f.servers} servers"
    if nodes and f.nodes and f.nodes != nodes:
        yield fail("plan", f"{line}, made for {f.nodes} nodes, but there are {nodes}", "make a plan for this cluster")
    else:
        yield ok("plan", line)


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


def read_keys(folder: Path, now: float) -> KeysFolder:
    from cryptography import x509

    try:
        mine = Keys(folder)
    except (RecordError, OSError, ValueError) as error:
        return KeysFolder(str(folder), str(error), now=now)
    certificate, authority = (x509.load_pem_x509_certificate(data) for data in (mine.certificate, mine.ca))
    revoked = mine.revoked()
    return KeysFolder(
        str(folder), "", mine.own.name, now, _seconds(certificate.not_valid_after_utc), _seconds(authority.not_valid_after_utc),
        mine.dials_only, mine.own.serial in revoked,
        mine.list_number, len(revoked),
        tuple(name for name in (KEY, TOKEN, CA_KEY) if _open(folder / name)), (folder / CA_KEY).exists(),
    )


def read_plan(path: Path, world: int = 0) -> PlanFile:
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
