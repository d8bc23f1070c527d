"""Throughput of the transport, against a plain socket and against Gloo.

Sends message bodies over a plain socket, TCP frames, TLS and gRPC: between two processes on loopback and between two hosts of
the lab. transport_sums.py compares dense sums over servers with Gloo's all-reduce. transport_server.py measures a server's
summation.
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
"""The size that the summary uses: about the size of a bucket."""
ALL = "socket,plain,tls,grpc"
RATIOS = (("vs_socket", "plain", "socket"), ("tls_vs_plain", "tls", "plain"), ("grpc_vs_tcp", "grpc", "plain"))


class Place(NamedTuple):
    """A link to measure."""

    name: str
    bps: float
    """0 means loopback."""
    one_way_s: float
    burst_nbytes: int
    times: int
    kinds: str = ALL
    key: str = ""


LOOPBACK = Place("loopback", 0.0, 0.0, 64 << 20, 9, key="loopback")
FAST = Place("1 Gb/s", 1e9, 0.0005, 16 << 20, 9, key="1g")
# A burst takes about 8 s, so the round trip and TCP's slow start do not hide the steady rate.
LONG = Place("100 Mb/s, 150 ms", 100e6, 0.075, 96 << 20, 3, "socket,plain", "100m_150ms")
LINES = FAST, LONG
# Upper bound for any sender: the lab counts IP bytes at MTU 1500. Of 1500 bytes a segment carries 1448 of payload (20 bytes are
# IP's, 20 TCP's, 12 for timestamps): 0.965. A part of a body, about 50,000 bytes at 100 Mb/s and 500,000 at 1 Gb/s, has a
# header of 68 bytes. So a full link delivers about 0.95 of its nominal rate (0.94 over Ethernet, with 38 more bytes a packet).
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
    """Summary of the rows that are not void: throughput ratios between transports, and throughput relative to the link rate."""
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
        from commlayer.cluster.keys import authority
    except ImportError as error:
        raise Unmeasurable(f"{error.name} is not installed") from None
    authority.init(folder)
    return {name: str(authority.add(folder, name)) for name in ("sink", "source")}


def _row(place: Place, size: str, keys: dict[str, str], lab: Lab | None, quick: bool) -> dict[str, Any]:
    """One process receives; another sends bursts, alternating between the transports. The row has medians over bursts."""
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
        # CPU seconds of both ends; more robust than wall time on a busy machine.
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
