"""Judges keys, settings and plan file: pure functions over security_facts."""

from __future__ import annotations

from collections.abc import Iterator

from commlayer.config import Config, host_port, is_loopback
from commlayer.doctor.finding import Finding, fail, of_error, ok, warn
from commlayer.doctor.security_facts import KeysFolder, PlanFile

SOON_S = 30 * 86400.0
"""A run may take weeks, and after its certificate expires a node cannot connect again."""


def keys(f: KeysFolder, *, serves: bool) -> Iterator[Finding]:
    """`serves`: whether other nodes connect to this one."""
    if f.error:
        yield of_error("keys", f.error.removeprefix("keys: "))
        return
    if f.revoked:
        yield fail("keys", f"the certificate of {f.name} is on its own list of the revoked",
                   f"make another: commlayer keys add {f.name} --again")
        return
    until_s, what = min((f.until, f"the certificate of {f.name}"), (f.ca_until, "the CA"))
    days = (until_s - f.now) / 86400
    again = f"commlayer keys add {f.name} --again" if what != "the CA" else "make another CA: commlayer keys init --dir"
    if until_s - f.now < SOON_S:
        yield warn("keys", f"{what} in {f.folder} ends in {days:.0f} days", again)
    else:
        yield ok("keys", f"{f.name} in {f.folder}, good for {days:.0f} days; list {f.list_number}, {f.listed} revoked")
    if f.readable:
        paths = " ".join(f"{f.folder}/{name}" for name in f.readable)
        yield warn("keys", f"others of this machine may read {', '.join(f.readable)}", f"chmod 600 {paths}")
    if f.ca_key:
        yield warn("keys", "the CA's own key lies there: who has it decides who takes part",
                   "keep it on one machine: copy only the folder nodes/NAME")
    if f.dials_only and serves:
        yield fail("keys", f"{f.name} was made with --dials-only, but is to be dialled",
                   f"commlayer keys add {f.name} --again, without --dials-only; or --join a server elsewhere")


def settings(config: Config) -> Iterator[Finding]:
    """Checks security settings of a node that connects to others or accepts connections."""
    away = [host for host in (config.bind, config.advertise, host_port(config.join)[0] if config.join else "") if host]
    if all(is_loopback(host) for host in away):
        return
    if config.insecure and not config.keys:
        yield warn("secure", "plain text: everybody on the way can read and change it",
                   "commlayer keys init, then COMMLAYER_KEYS on every machine (docs/security.md)")
    elif config.join and not config.token:
        yield fail("secure", "no secret, and a job that is joined has one", "set COMMLAYER_KEYS or COMMLAYER_TOKEN_FILE")


def plan(f: PlanFile, *, nodes: int) -> Iterator[Finding]:
    if f.error:
        yield of_error("plan", f.error, "make it again: commlayer plan make --out FILE")
        return
    seen = f"{f.path}: hash {f.digest}, {f.buckets} buckets, {f.servers} servers"
    if nodes and f.nodes and f.nodes != nodes:
        yield fail("plan", f"{seen}, made for {f.nodes} nodes, and there are {nodes}", "make it for this cluster")
    else:
        yield ok("plan", seen)
