"""The lab's self-check: measures its links and compares them with their settings."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench.lab.lab import Lab, Link

PASS_SHARE = 0.95
OFFERED = 1.03  # senders offer slightly more than the link takes, so that a measured share below 1 is due to the link
ANSWER_S = 30.0
PROBE = Path(__file__).with_name("probe.py")


class Check(NamedTuple):
    """rows: one per checked value, {"what", "unit", "set", "got", "share", "ok"}. passed: every row is ok. device_dropped:
    packets lost because the router did not read in time. Rates are IP bits per second delivered to the receivers, offered as
    UDP."""

    rows: list[dict[str, Any]]
    passed: bool
    device_dropped: int


def sound(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether the lab met its limits between two counters(): no packet lost on the way into or out of the router, and at most
    5 % delivered more than 5 ms late. Otherwise the machine was too busy, and what was measured is void."""
    deliveries = after["deliveries"] - before["deliveries"]
    late = after["late_5ms"] - before["late_5ms"]
    lost = sum(
        b[key] - a[key] for a, b in zip(before["hosts"], after["hosts"], strict=True) for key in ("device_dropped", "refused")
    )
    return bool(lost == 0 and late <= (1 - PASS_SHARE) * deliveries)


class _Probe:
    """A probe process on one host, controlled by lines of text."""

    def __init__(self, lab: Lab, host: int) -> None:
        self.host = host
        argv = [sys.executable, "-I", "-S", str(PROBE)]
        self.child = lab.popen(host, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.answer()

    def send(self, line: str) -> None:
        self.child.stdin.write(line + "\n")  # type: ignore[union-attr]

    def answer(self) -> Any:
        out = self.child.stdout
        assert out
        ready, _, _ = select.select([out], [], [], ANSWER_S)
        line = out.readline() if ready else ""
        if not line:
            raise RuntimeError(f"the probe on host {self.host} gave no answer in {ANSWER_S:g} s")
        return json.loads(line)

    def request(self, line: str) -> Any:
        self.send(line)
        return self.answer()

    def close(self) -> None:
        assert self.child.stdin
        assert self.child.stdout
        self.child.kill()
        self.child.wait()
        self.child.stdin.close()
        self.child.stdout.close()


def check(lab: Lab, window_s: float = 0.3) -> Check:
    """Measures the links and compares them with their settings; takes some seconds. The links must be idle otherwise.

    Measures round trips first; then each host's uplink (it sends to all others), each downlink (all others send to it), then
    all hosts sending at once, each to the next. A rate is taken over window_s of the router's clock, once links are full.
    """
    if lab.hosts < 2:
        raise ValueError(f"hosts: got {lab.hosts}, a self-check needs at least 2")
    all_hosts = range(lab.hosts)
    links = lab.links
    with ExitStack() as stack:
        probes = [_Probe(lab, host) for host in all_hosts]
        for probe in probes:
            stack.callback(probe.close)
        rows = [_round_trip(lab, probes, host) for host in all_hosts]
        for host in all_hosts:
            others = [other for other in all_hosts if other != host]
            received_bps = _rates(lab, probes, {host: others}, window_s)
            rows.append(_rate_row(f"up {host}", sent_bps(links, host), sum(received_bps[other] for other in others)))
        for host in all_hosts:
            others = [other for other in all_hosts if other != host]
            received_bps = _rates(lab, probes, {other: [host] for other in others}, window_s)
            limit = min(links[host].down_bps, sum(links[other].up_bps for other in others))
            rows.append(_rate_row(f"down {host}", limit, received_bps[host]))
        received_bps = _rates(lab, probes, {host: [(host + 1) % lab.hosts] for host in all_hosts}, window_s)
        for host in all_hosts:
            target = (host + 1) % lab.hosts
            limit = min(links[host].up_bps, links[target].down_bps)
            rows.append(_rate_row(f"all at once, {host} to {target}", limit, received_bps[target]))
    return Check(rows, all(row["ok"] for row in rows), sum(host["device_dropped"] for host in lab.counters()["hosts"]))


def sent_bps(links: Sequence[Link], host: int) -> float:
    """The rate received from a host that sends equally to all others; a slow receiver takes less than its part."""
    others = [link for other, link in enumerate(links) if other != host]
    return sum(min(link.down_bps, links[host].up_bps / len(others)) for link in others)


def _rates(lab: Lab, probes: list[_Probe], senders: dict[int, list[int]], window_s: float) -> list[float]:
    """The rate on the wire at which each host receives."""
    for host, targets in senders.items():
        offered_bps = OFFERED * min(lab.links[host].up_bps, sum(lab.links[target].down_bps for target in targets))
        probes[host].request(f"send {lab.mtu - 28} {offered_bps:.0f} {' '.join(lab.addresses[target] for target in targets)}")
    time.sleep(0.1 + 2 * max(link.delay_s for link in lab.links))
    before = lab.counters()
    time.sleep(window_s)
    after = lab.counters()
    for host in senders:
        probes[host].request("stop")
    _drain(lab)
    wire_s = after["time_s"] - before["time_s"]
    return [8 * (b["received_nbytes"] - a["received_nbytes"]) / wire_s
            for a, b in zip(before["hosts"], after["hosts"], strict=True)]


def _drain(lab: Lab) -> None:
    """Waits until no packet is in flight, so that one measurement does not affect the next."""
    until = time.monotonic() + 2 + 4 * max(link.queue_s + link.delay_s for link in lab.links)
    while lab.counters()["in_flight"] and time.monotonic() < until:
        time.sleep(0.01)


def _round_trip(lab: Lab, probes: list[_Probe], host: int) -> dict[str, Any]:
    target = (host + 1) % lab.hosts
    set_s = lab.links[host].delay_s + lab.links[target].delay_s
    got_s = min(probes[host].request(f"ping {lab.addresses[target]} 5"))
    share = got_s / set_s if set_s else 1.0
    ok = set_s <= got_s <= set_s * 1.05 + 2e-3  # two small packets on the wire and four wake-ups
    return {
        "what": f"round trip {host} to {target}", "unit": "ms", "set": set_s * 1e3, "got": got_s * 1e3, "share": share, "ok": ok
    }  # fmt: skip


def _rate_row(what: str, limit_bps: float, received_bps: float) -> dict[str, Any]:
    return {"what": what, "unit": "Mb/s", "set": limit_bps / 1e6, "got": received_bps / 1e6, "share": received_bps / limit_bps,
            "ok": received_bps >= PASS_SHARE * limit_bps}
