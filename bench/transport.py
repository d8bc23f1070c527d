"""What commlayer makes of a connection. Knows the lab, and what the processes of a measurement print.

Bodies travel in frames over TCP, in TLS, over gRPC and over a bare socket, in turn, between two processes on loopback and
between two hosts of the lab; dense sums over servers and over Gloo's all-reduce (transport_sums.py); a server's own adding
(transport_server.py).
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench import Unmeasurable, transport_server, transport_sums
from bench.baselines import ROOT
from bench.lab import Lab, LabUnavailable, sound
from bench.report import Result

SIZES = {"4 MiB": 4 << 20, "64 KiB": 64 << 10}
BODY = "4 MiB"
"""The one of which the summary speaks: about what a bucket is."""
ALL = "socket,plain,tls,grpc"
RATIOS = (("vs_socket", "plain", "socket"), ("tls_vs_plain", "tls", "plain"), ("grpc_vs_tcp", "grpc", "plain"))


class Place(NamedTuple):
    """Where bodies travel."""

    name: str
    bps: float
    """0: over loopback."""
    one_way_s: float
    burst_nbytes: int
    times: int
    kinds: str = ALL
    key: str = ""


LOOPBACK = Place("loopback", 0.0, 0.0, 64 << 20, 9, key="loopback")
FAST = Place("1 Gb/s", 1e9, 0.0005, 16 << 20, 9, key="1g")
# A burst takes some 8 s, so that the round trip and the opening of the window do not hide the steady rate.
LONG = Place("100 Mb/s, 150 ms", 100e6, 0.075, 96 << 20, 3, "socket,plain", "100m_150ms")
LINES = FAST, LONG
# What no sender gets past: the lab counts IP bytes at MTU 1500, and of 1500 a segment has 1448 for its payload (20 are IP's, 20
# TCP's and 12 its timestamps'), 0.965. A part of a body, some 50,000 bytes at 100 Mb/s and 500,000 at 1 Gb/s, has 68 of header.
# So about 0.95 of a line's nominal bits is a full one (over Ethernet, which frames each packet with 38 bytes more, 0.94).
DEADLINE_S = 240.0


def run(quick: bool) -> Result:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = _keys(Path(folder) / "keys")
        rows += [_row(LOOPBACK, size, keys, None, quick) for size in list(SIZES)[: 1 if quick else None]]
        for line in LINES[: 1 if quick else None]:
            try:
                with Lab(hosts=2, up_bps=line.bps, down_bps=line.bps, delay_s=line.one_way_s) as lab:
                    before = lab.counters()
                    row = _row(line, BODY, keys, lab, quick)
                    rows.append(row | {"void": not sound(before, lab.counters()), "congestion": lab.congestion})
            except LabUnavailable as reason:
                rows.append({"where": line.name, "void": True, "why": str(reason)})
    sums, more = transport_sums.run(quick)
    added, server = transport_server.run(quick)
    return {"rows": rows + sums + added, "summary": summarised(rows) | more | server}


def summarised(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What rows that count say: ratios of ways to each other, and which part of a line's bits were a body's."""
    result: dict[str, Any] = {}
    for place in (LOOPBACK, *LINES):
        for row in rows:
            if row["void"] or row["where"] != place.name or row["body"] != BODY:
                continue
            result |= {figure if place is FAST else f"{figure}_{place.key}": row[figure]
                       for figure in ("tls_vs_plain", "grpc_vs_tcp") if figure in row}
            result[f"tcp_vs_socket_{place.key}"] = row["vs_socket"]
            if place.bps:
                result |= {f"{name}_vs_line_{place.key}": 8e9 * row[f"{kind}_gb_s"] / place.bps
                           for name, kind in (("tcp", "plain"), ("socket", "socket"))}
    return result


def _keys(folder: Path) -> dict[str, str]:
    try:
        from commlayer.cluster import authority
    except ImportError as error:
        raise Unmeasurable(f"{error.name} is not installed") from None
    authority.init(folder)
    return {name: str(authority.add(folder, name)) for name in ("sink", "source")}


def _row(place: Place, size: str, keys: dict[str, str], lab: Lab | None, quick: bool) -> dict[str, Any]:
    """One process takes, another sends; the median over bursts in turn."""
    address = lab.addresses[0] if lab else "127.0.0.1"
    command = [sys.executable, "-m", "bench.transport_worker"]
    source = None
    sink = _start(lab, 0, [*command, "take", "--keys", keys["sink"], "--address", address], stdin=subprocess.PIPE)
    try:
        assert sink.stdout
        if not select.select([sink.stdout], [], [], DEADLINE_S)[0]:
            raise TimeoutError(f"the taking process said no ports within {DEADLINE_S:.0f} s")
        ports = json.loads(sink.stdout.readline())
        source = _start(lab, 1, [
            *command, "send", "--keys", keys["source"], "--address", address, "--ports", json.dumps(ports), "--body",
            str(SIZES[size]), "--burst", str(place.burst_nbytes), "--times", str(3 if quick else place.times),
            "--kinds", place.kinds])
        figures = json.loads(source.communicate(timeout=DEADLINE_S)[0])
    finally:
        for process in (sink, source):
            if process is not None:
                process.kill()
                process.wait()
    kinds = place.kinds.split(",")
    row: dict[str, Any] = {"where": place.name, "body": size, "void": False}
    for kind in kinds:
        row |= {f"{kind}_gb_s": median(figures[kind])}
        # Of both ends: it is a share of a core, and says more than seconds where others are busy.
        row |= {f"{kind}_cpu_s_gb": figures[f"{kind}_cpu"]}
    for figure, kind, other in RATIOS:
        if kind in kinds:
            row[figure] = median(mine / its for mine, its in zip(figures[kind], figures[other], strict=True))
    return row


def _start(lab: Lab | None, host: int, argv: list[str], **pipes: Any) -> subprocess.Popen[str]:
    env = {"PYTHONPATH": str(ROOT)}
    if lab:
        return lab.popen(host, argv, env=env, stdout=subprocess.PIPE, text=True, **pipes)
    return subprocess.Popen(argv, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, **pipes)
