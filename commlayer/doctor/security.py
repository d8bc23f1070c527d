"""Checks a node's keys folder, security settings and plan file."""

from __future__ import annotations

import functools
import stat
from collections.abc import Iterator
from pathlib import Path

from commlayer import planner, records
from commlayer.config import Config, host_port, is_loopback
from commlayer.doctor.report import Finding, fail, of_error, ok, warn
from commlayer.errors import RecordError
from commlayer.plan_file import plan_in
from commlayer.records import Plan
from commlayer.transport.key_folder import KEY, TOKEN, Keys

SOON_S = 30 * 86400.0
"""A run may take weeks, and after its certificate expires a node cannot connect again."""
CA_KEY = "ca.key"


def check_keys(folder: Path, now_s: float, *, serves: bool) -> Iterator[Finding]:
    """`now_s`: seconds since 1970. `serves`: whether other nodes connect to this one."""
    from cryptography import x509

    try:
        mine = Keys(folder)
    except (RecordError, OSError, ValueError) as error:
        yield of_error("keys", str(error).removeprefix("keys: "))
        return
    name, revoked = mine.own.name, mine.revoked()
    again = f"commlayer keys add {name} --again"
    if mine.own.serial in revoked:
        yield fail("keys", f"the certificate of {name} is revoked", f"make a new one: {again}")
        return
    certificates = [x509.load_pem_x509_certificate(data) for data in (mine.certificate, mine.ca)]
    ends = [certificate.not_valid_after_utc.timestamp() - now_s for certificate in certificates]
    if min(ends) < SOON_S:
        what, remedy = ((f"the certificate of {name}", again) if ends[0] <= ends[1] else
                        ("the CA", "make a new CA: commlayer keys init --dir"))
        yield warn("keys", f"{what} in {folder} expires in {min(ends) / 86400:.0f} days", remedy)
    else:
        yield ok("keys", f"{name} in {folder}, valid for {min(ends) / 86400:.0f} days; list {mine.list_number}, {len(revoked)} "
                 "revoked")
    readable = [file for file in (KEY, TOKEN, CA_KEY) if _is_open(folder / file)]
    if readable:
        yield warn("keys", f"other users of this machine can read {', '.join(readable)}",
                   f"chmod 600 {' '.join(f'{folder}/{file}' for file in readable)}")
    if (folder / CA_KEY).exists():
        yield warn("keys", "the CA's private key is in this folder; its owner can admit any node",
                   "keep it on one machine: copy only the folder nodes/NAME")
    if mine.dials_only and serves:
        yield fail("keys", f"{name} was made with --dials-only, but other nodes must connect to it",
                   f"{again}, without --dials-only; or --join a server elsewhere")


def _is_open(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    except OSError:
        return False


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


@functools.cache
def own_plan(path: Path | None) -> Plan | str:
    """The plan, or why it cannot be used."""
    if path is None:
        return "no plan"
    try:
        plan = plan_in(path)
        return next(iter(planner.verify_alone(plan, 0)), plan)
    except ValueError as error:
        return str(error)


def own_digest(path: Path | None) -> str:
    """Empty without a usable plan."""
    plan = own_plan(path)
    return "" if isinstance(plan, str) else records.digest(plan)


def check_plan(path: Path, plan: Plan | str, nodes: int) -> Iterator[Finding]:
    """`nodes`: those of the job, 0 if unknown."""
    if isinstance(plan, str):
        yield of_error("plan", plan, "make it again: commlayer plan make --out FILE")
        return
    line = f"{path}: hash {records.digest(plan)}, {len(plan.buckets)} buckets, {plan.servers} servers"
    planned = max((len(bucket.by_node) for bucket in plan.buckets), default=0)
    if nodes and planned and planned != nodes:
        yield fail("plan", f"{line}, made for {planned} nodes, but there are {nodes}", "make a plan for this cluster")
    else:
        yield ok("plan", line)
