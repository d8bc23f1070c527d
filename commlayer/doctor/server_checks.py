"""Judges a coordinator's reply and the connection to it: pure functions over server_facts."""

from __future__ import annotations

from collections.abc import Iterator

from commlayer.doctor import network_checks
from commlayer.doctor.finding import Finding, fail, of_error, ok, warn
from commlayer.doctor.security_facts import PlanFile
from commlayer.doctor.server_facts import Link, Server

CLOCK_S, CLOCK_FAIL_S = 5.0, 3000.0
"""Certificates are valid from an hour before they are made: a clock that lags nearly as much fails with the next one."""
FAR_S = 0.3
SLOW_BPS = 2e6


def server(f: Server, *, keys: bool) -> Iterator[Finding]:
    if f.silent:
        yield fail("server", f"{f.address} does not answer as a coordinator",
                   "start `commlayer serve` there, which prints this address, and look again")
        return
    if f.error or f.said is None:
        yield of_error("server", f"{f.address}: {f.error.removeprefix(f'coordinator {f.address}: ')}")
        return
    info = f.said
    intro = f"{f.address} coordinates, with commlayer {info.version}"
    both = (("version", f.version, info.version), ("control protocol", f.protocol, info.protocol),
            ("wire format", f.wire, info.wire))
    differ = [what for what, mine, its in both if mine != its]
    if differ:
        yield fail("server", f"{intro}; here it is {f.version}: other {' and '.join(differ)}",
                   "install the same version on all machines")
    elif info.begun and info.free:
        yield ok("server", f"{intro}: its job has begun, and takes in homes in the place of {info.free} of its {info.workers} "
                           "workers who are gone (commlayer launch)")
    elif info.begun and info.full:
        yield warn("server", f"{intro}: its job has begun, and has its {info.workers} workers",
                   "wait until one is gone; who was cut off, or was killed, counts until its silence is judged (reconnect_s)")
    elif info.begun:
        yield warn("server", f"{intro}: its job has begun, with {info.workers} workers",
                   f"nobody else can join it now ({info.shut}): start anew, or wait for its end")
    else:
        of = f"{info.seated} of {info.workers} workers" if info.workers else f"{info.seated} workers"
        yield ok("server", f"{intro}: {of} and {len(info.servers)} server{'s' if len(info.servers) != 1 else ''} are there")
    yield from _carriers(f)
    yield _clock(f, keys)
    yield _round_trip(f)
    yield _full(f)


def _carriers(f: Server) -> Iterator[Finding]:
    """Checks the transport that gradients would use to each server."""
    for path in f.ways:
        if path.tcp is not None and path.tcp.answer == "open":
            yield ok("carrier", f"TCP to {path.tcp.what} {path.address}")
        elif path.streams == "open" and path.tcp is None:
            yield ok("carrier", f"gRPC streams at {path.streams_at}")
        elif path.streams == "open":
            yield warn("carrier", f"gRPC streams at {path.streams_at}, since TCP to server {path.address} does not get through",
                       "open that port, too: TCP costs less, and the start waits 5 s for it")
        elif path.tcp is not None:
            yield from network_checks.reached(path.tcp)
        elif path.streams:
            yield of_error("carrier", path.streams)
        else:
            takes = "takes gRPC streams alone" if path.streams_at else "takes no gRPC streams"
            yield fail("carrier", f"server {path.address} {takes}, and carrier is \"{f.carrier}\" here",
                       "set carrier alike on server and workers, or leave it out")


def _clock(f: Server, keys: bool) -> Finding:
    off = abs(f.clock_s)
    side = "ahead of" if f.clock_s > 0 else "behind"
    if off - f.clock_error_s < CLOCK_S:
        return ok("clock", f"within {max(off, f.clock_error_s, 0.001):.3g} s of the server's")
    seen = f"{spell(off)} {side} the server's"
    remedy = "set it by a time server: timedatectl set-ntp true"
    if keys and off > CLOCK_FAIL_S:
        return fail("clock", f"{seen}: certificates are judged by it", remedy)
    return warn("clock", f"{seen}: logs of both will not fit together", remedy)


def _round_trip(f: Server) -> Finding:
    seen = f"{1e3 * f.round_trip_s:.3g} ms to the server and back"
    if f.round_trip_s > FAR_S:
        return warn("latency", seen, "use a server nearer to all: each step waits for at least one round trip")
    return ok("latency", seen)


def _full(f: Server) -> Finding:
    lost = [way for way, why in (("to", f.full_up), ("from", f.full_down)) if why]
    if not lost:
        return ok("packets", "full-size packets pass both ways" if f.said and not f.said.begun
                  else "full-size packets pass to the server")
    return fail("packets", f"small packets pass, full-size ones {' and '.join(lost)} the server do not",
                "a link on the way has a smaller MTU and does not say so: ip link set dev INTERFACE mtu 1280 on both ends")


def link(f: Link) -> Iterator[Finding]:
    if f.error:
        yield warn("link", f"not measured: {f.error}", "leave the job time to begin, or --no-bandwidth")
    elif min(f.up_bps, f.down_bps) < SLOW_BPS:
        yield warn("link", f"{rate(f.up_bps)} up, {rate(f.down_bps)} down",
                   "close what else uses the link; `commlayer plan whatif` says what it is good for")
    else:
        yield ok("link", f"{rate(f.up_bps)} up, {rate(f.down_bps)} down")


def plans(mine: PlanFile | None, f: Server) -> Iterator[Finding]:
    """Checks that the local plan file equals the job's."""
    if mine and mine.digest and f.said and f.said.plan and f.said.plan != mine.digest:
        yield fail("plan", f"hash {mine.digest} here, {f.said.plan} at the server", "give all workers the same plan file")


def rate(bps: float) -> str:
    """
    >>> rate(94.1e6), rate(3.2e9), rate(800e3)
    ('94 Mb/s', '3.2 Gb/s', '0.8 Mb/s')
    """
    if bps >= 1e9:
        return f"{bps / 1e9:.2g} Gb/s"
    return f"{bps / 1e6:.0f} Mb/s" if bps >= 10e6 else f"{bps / 1e6:.1f} Mb/s"


def spell(seconds: float) -> str:
    """
    >>> spell(7.2), spell(600), spell(7300), spell(3 * 86400)
    ('7 s', '10 minutes', '2.0 hours', '3.0 days')
    """
    for unit, of, digits in (("days", 86400.0, 1), ("hours", 3600.0, 1), ("minutes", 60.0, 0)):
        if seconds >= 1.5 * of:
            return f"{seconds / of:.{digits}f} {unit}"
    return f"{seconds:.0f} s"
