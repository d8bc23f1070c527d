"""Link utilization and latency of the transport between two hosts of the lab.

Measures how well dense gradients fill the link in both directions at once. Then measures round trips of urgent frames and
of another connection while the link is full.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from bisect import bisect_left
from statistics import median
from typing import Any, NamedTuple

from bench.baselines import ROOT, launch_hosts
from bench.lab import Lab, sound
from bench.lab.self_check import PROBE
from bench.report import Result

ONE_WAY_S = 0.015
LINKS = {"100/100": (100e6, 100e6, 8 << 20), "40/200": (40e6, 200e6, 4 << 20)}
"""Uplink and downlink in bit/s, and elements of the model: 16 and 8 MB as fp16."""
CUTS = {"256 KiB": 256 << 10, "4 MiB": 4 << 20}
SLOW_BPS = 10e6
WARMUP, STEPS, TIMES = 2, 5, 10
EDGES = (0.05, 0.95)
"""The rate is taken between these fractions of a step's bytes, without ramp-up and tail."""
POLL_S = 0.01


def run(quick: bool) -> Result:
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for link, (up_bps, down_bps, numel) in LINKS.items():
        for cut in list(CUTS)[: 1 if quick or link != "100/100" else None]:
            with Lab(hosts=2, up_bps=up_bps, down_bps=down_bps, delay_s=ONE_WAY_S) as lab:
                row = _fill(lab, link, cut, numel)
            rows.append(row)
            summary[f"fill_{link}_{cut}".replace(" ", "")] = min(row["up"], row["back"])
    with Lab(hosts=2, up_bps=SLOW_BPS, down_bps=SLOW_BPS, delay_s=ONE_WAY_S) as lab:
        waits, x = _waits(lab)
    return {"rows": rows + waits, "summary": summary | x}


class _Watch:
    """Polls the bytes that each host has sent, on a thread."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._stop = lab, threading.Event()
        self.at_s: list[float] = []
        self.sent: list[list[int]] = [[] for _ in range(lab.hosts)]
        self._thread = threading.Thread(target=self._poll, name="watch")

    def _poll(self) -> None:
        while not self._stop.wait(POLL_S):
            counters = self._lab.counters()
            self.at_s.append(counters["time_s"])
            for sent, host in zip(self.sent, counters["hosts"], strict=True):
                sent.append(host["sent_nbytes"])

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def rate_bps(self, host: int, begin_s: float, end_s: float) -> float:
        """Sending rate of a host in that interval, without the first and last bytes (see EDGES)."""
        first, last = bisect_left(self.at_s, begin_s), bisect_left(self.at_s, end_s)
        sent, at_s = self.sent[host][first:last], self.at_s[first:last]
        low, high = (bisect_left(sent, sent[0] + edge * (sent[-1] - sent[0])) for edge in EDGES)
        return 8 * (sent[high] - sent[low]) / (at_s[high] - at_s[low])


def _fill(lab: Lab, link: str, cut: str, numel: int) -> dict[str, Any]:
    """Utilization of both directions: host 1 pushes to the server on host 0, which sends the sums back."""
    config = json.dumps({"cut_nbytes": CUTS[cut], "fuse_nbytes": CUTS[cut]})
    command = [sys.executable, "-m", "bench.wire_worker", "train", "--numel", str(numel), "--steps", str(WARMUP + STEPS),
               "--config", config]
    before = lab.counters()
    with _Watch(lab) as watch:
        replies = launch_hosts(lab, lab.hosts, command, deadline_s=100.0)
    took = [
        (min(begin for begin, _ in ends), max(end for _, end in ends))
        for ends in zip(*(t["steps"][WARMUP:] for t in replies), strict=True)
    ]
    step_s = median(end - begin for begin, end in took)
    up_bps = lab.links[0].up_bps
    bound_s = 2 * numel * 8 / up_bps + 2 * ONE_WAY_S
    up, back = (median(watch.rate_bps(host, *ends) for ends in took) / up_bps for host in (1, 0))
    return {"link": f"{link} Mb/s", "what": f"fp16, tensors cut to {cut}", "step_ms": step_s * 1e3, "bound_ms": bound_s * 1e3,
            "up": up, "back": back, "void": not sound(before, lab.counters()), "congestion": lab.congestion}


class _Waits(NamedTuple):
    idle_s: float
    full_s: float


def _waits(lab: Lab) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Round trips over an idle and over a full link: of urgent frames, and of another connection."""
    before = lab.counters()
    probe = [sys.executable, "-I", "-S", str(PROBE)]
    probes = [lab.popen(host, probe, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for host in (0, 1)]
    for one in probes:
        assert one.stdout
        one.stdout.readline()  # printed once the probe listens
    pinger = probes[1]

    def ping(times: int) -> list[float]:
        assert pinger.stdin
        assert pinger.stdout
        pinger.stdin.write(f"ping {lab.addresses[0]} {times}\n")
        seconds: list[float] = json.loads(pinger.stdout.readline())
        return seconds

    idle = ping(TIMES)
    env = {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "bench.wire_worker"]
    lab.popen(0, [*command, "echo"], env={**env, "HOST_ADDRESS": lab.addresses[0]}, stdout=subprocess.DEVNULL)
    asks = lab.popen(1, [*command, "ask", "--address", lab.addresses[0], "--times", str(TIMES)], env=env,
                     stdout=subprocess.PIPE, text=True)
    assert asks.stdout
    asks.stdout.readline()  # printed once the link is full
    full = ping(TIMES)
    urgent = json.loads(asks.stdout.readline())
    asks.wait(30.0)
    void = not sound(before, lab.counters())
    waits = {
        "another connection": _Waits(median(idle), median(full)),
        "urgent frame, same connection": _Waits(median(urgent["idle_s"]), median(urgent["bulk_s"])),
    }
    rows = [
        {"link": f"{SLOW_BPS / 1e6:g} Mb/s", "what": f"round trip, {what}", "idle_ms": idle_s * 1e3, "full_ms": full_s * 1e3,
         "x": full_s / idle_s, "void": void, "congestion": lab.congestion}
        for what, (idle_s, full_s) in waits.items()
    ]
    return rows, {"control_x_idle": rows[0]["x"], "urgent_x_idle": rows[1]["x"]}

