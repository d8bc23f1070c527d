"""What TLS and gRPC cost a data connection: bodies over them and over plain TCP, in turn, between two processes on loopback,
and between two hosts of the lab. Knows the lab and what its processes print."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench import Unmeasurable
from bench.baselines import ROOT
from bench.lab import Lab, LabUnavailable, sound
from bench.report import Result

LINE_BPS, ONE_WAY_S = 1e9, 0.0005
SIZES = {"4 MiB": 4 << 20, "64 KiB": 64 << 10}
BURST_NBYTES = {"loopback": 64 << 20, "1 Gb/s": 16 << 20}
TIMES = 9
DEADLINE_S = 120.0


def run(quick: bool) -> Result:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = _keys(Path(folder) / "keys")
        rows += [_row("loopback", size, keys, None, quick) for size in list(SIZES)[: 1 if quick else None]]
        try:
            with Lab(hosts=2, up_bps=LINE_BPS, down_bps=LINE_BPS, delay_s=ONE_WAY_S) as lab:
                before = lab.counters()
                row = _row("1 Gb/s", "4 MiB", keys, lab, quick)
                rows.append(row | {"void": not sound(before, lab.counters())})
        except LabUnavailable as reason:
            rows.append({"where": "1 Gb/s", "void": True, "why": str(reason)})
    return {"rows": rows, "summary": {f"{figure}_{r['where']}_{r['body']}".replace(" ", ""): r[figure]
                                      for figure in ("tls_vs_plain", "grpc_vs_tcp") for r in rows if figure in r}}


def _keys(folder: Path) -> dict[str, str]:
    try:
        from commlayer.control import authority
    except ImportError as error:
        raise Unmeasurable(f"{error.name} is not installed") from None
    authority.init(folder)
    return {name: str(authority.add(folder, name)) for name in ("sink", "source")}


def _row(where: str, size: str, keys: dict[str, str], lab: Lab | None, quick: bool) -> dict[str, Any]:
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
            *command, "send", "--keys", keys["source"], "--address", address, "--ports", json.dumps(ports),
            "--body", str(SIZES[size]), "--burst", str(BURST_NBYTES[where]), "--times", str(3 if quick else TIMES)])
        told = json.loads(source.communicate(timeout=DEADLINE_S)[0])
    finally:
        for process in (sink, source):
            if process is not None:
                process.kill()
                process.wait()
    # Of both ends: it is a share of a core, and says more than seconds where others are busy.
    return {"where": where, "body": size, "plain_gb_s": median(told["plain"]), "tls_gb_s": median(told["tls"]),
            "grpc_gb_s": median(told["grpc"]),
            "tls_vs_plain": median(t / p for p, t in zip(told["plain"], told["tls"], strict=True)),
            "grpc_vs_tcp": median(g / p for p, g in zip(told["plain"], told["grpc"], strict=True)),
            "plain_cpu_s_gb": told["plain_cpu"], "tls_cpu_s_gb": told["tls_cpu"], "grpc_cpu_s_gb": told["grpc_cpu"],
            "void": False}


def _start(lab: Lab | None, host: int, argv: list[str], **pipes: Any) -> subprocess.Popen[str]:
    env = {"PYTHONPATH": str(ROOT)}
    if lab:
        return lab.popen(host, argv, env=env, stdout=subprocess.PIPE, text=True, **pipes)
    return subprocess.Popen(argv, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, **pipes)
