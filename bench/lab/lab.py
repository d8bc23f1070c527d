"""The lab as a Python object: hosts, links, processes on hosts, counters and clean-up. Packets are moved by the router."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from bench.lab import namespaces
from bench.lab.namespaces import INTERFACE, LabUnavailable
from bench.lab.router import Router

__all__ = ["Lab", "LabUnavailable", "Link"]

PerHost = float | Sequence[float]


class Link(NamedTuple):
    """One host's access link.

    A round trip between hosts i and j takes delay_s(i) + delay_s(j), so among equal hosts delay_s is the one-way delay. Each
    direction queues up to queue_s of its rate, then drops. `loss` is the probability that a sent segment is lost.
    """

    up_bps: float
    down_bps: float
    delay_s: float
    queue_s: float
    loss: float
    cut: bool


class Lab:
    """Hosts 0..n-1 at 10.99.0.1 and up, joined by shaped links; use it as a context.

    >>> with Lab(hosts=4, up_bps=100e6, down_bps=100e6, delay_s=0.015) as lab:
    ...     lab.popen(0, ["ping", "-c", "1", lab.addresses[1]]).wait(5)

    A link value is one number for all hosts, or one per host. Rates count IP bytes, with headers. Super-packets are cut into
    parts of 1/15 of the delay, within 0.25 to 1 ms on the slower link, so that slow links queue and drop single packets.

    TCP on the hosts uses the machine's congestion control, named in `congestion`. Report it with measurements: it changes
    what programs get from a link by tens of percent.
    """

    def __init__(
        self,
        hosts: int = 2,
        *,
        up_bps: PerHost = 100e6,
        down_bps: PerHost = 100e6,
        delay_s: PerHost = 0.015,
        queue_s: PerHost = 0.1,
        loss: PerHost = 0.0,
        mtu: int = 1500,
        seed: int = 0,
        lock_s: float = 600.0,
    ) -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts: got {hosts}, allowed are 1 to 250")
        settings = {"up_bps": up_bps, "down_bps": down_bps, "delay_s": delay_s, "queue_s": queue_s, "loss": loss}
        columns = {name: _per_host(name, value, hosts) for name, value in settings.items()}
        self.links = [_checked(Link(cut=False, **{name: column[i] for name, column in columns.items()})) for i in range(hosts)]
        self.hosts, self.mtu, self.interface = hosts, mtu, INTERFACE
        self.addresses = [f"10.99.0.{i + 1}" for i in range(hosts)]
        self.congestion = ""
        self.names: list[str] = []
        self._seed, self._lock_s = seed, lock_s
        self._open = ExitStack()
        self._children: list[subprocess.Popen[Any]] = []
        self._router: Router | None = None

    def __enter__(self) -> Lab:
        namespaces.require()
        with ExitStack() as stack:
            stack.enter_context(_Signals())
            stack.callback(namespaces.drop_lock, namespaces.take_lock(self._lock_s))
            stack.callback(self._remove_namespaces)
            self.congestion = namespaces.congestion_control()
            self.names = namespaces.make(self.hosts)
            self._router = Router(self.names, self._seed)
            stack.callback(self._router.close)
            for name, address in zip(self.names, self.addresses, strict=True):
                namespaces.configure(name, address, self.mtu)
            for host, link in enumerate(self.links):
                self._router.set(host, _words(link))
            stack.callback(self._end_children)
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def popen(
        self, host: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts argv on the host, with env added to this process's environment. The lab kills the process when it closes."""
        full = {**os.environ, **(env or {})}
        child = subprocess.Popen(["ip", "netns", "exec", self.names[host], *argv], env=full, **options)
        self._children.append(child)
        return child

    def set(self, host: int, **values: float) -> None:
        """Changes the given fields of the host's link from now on. A cut link also loses packets on their way to the host."""
        link = _checked(self.links[host]._replace(**values))  # type: ignore[arg-type]
        self._running().set(host, _words(link))
        self.links[host] = link

    def counters(self) -> dict[str, Any]:
        """The router's counters. Per host: bytes, packets, and drops by place. For the router: its clock, its CPU time and how
        late it delivered packets (late_max_s since the last call). device_dropped counts packets lost by TUN devices and should
        be 0."""
        stats = self._running().stats()
        for name, host in zip(self.names, stats["hosts"], strict=True):
            host["device_dropped"] = namespaces.device_drops(name)
        return stats

    def _running(self) -> Router:
        if self._router is None:
            raise RuntimeError("the lab is not running: use it as `with Lab(...) as lab:`")
        return self._router

    def _end_children(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()

    def _remove_namespaces(self) -> None:
        for name in self.names:
            namespaces.remove(name)


class _Signals:
    """Makes SIGTERM and SIGHUP leave through the context, as Ctrl-C does. Only the main thread can install the handlers."""

    def __enter__(self) -> None:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                self._before[number] = signal.signal(number, _leave)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
    raise SystemExit(128 + number)


def _per_host(name: str, value: PerHost, hosts: int) -> list[float]:
    values = [float(value)] * hosts if isinstance(value, int | float) else [float(v) for v in value]
    if len(values) != hosts:
        raise ValueError(f"{name}: got {len(values)} values, the lab has {hosts} hosts: give one value, or one per host")
    return values


def _checked(link: Link) -> Link:
    for name, value, good, allowed in (
        ("up_bps", link.up_bps, link.up_bps > 0, "above 0"),
        ("down_bps", link.down_bps, link.down_bps > 0, "above 0"),
        ("delay_s", link.delay_s, link.delay_s >= 0, "0 or more"),
        ("queue_s", link.queue_s, link.queue_s > 0, "above 0"),
        ("loss", link.loss, 0 <= link.loss < 1, "0 to below 1"),
    ):
        if not (good and math.isfinite(value)):
            raise ValueError(f"{name}: got {value}, allowed is {allowed}")
    return link


def _words(link: Link) -> dict[str, float]:
    return dict(zip(("up", "down", "delay", "queue", "loss", "cut"), link, strict=True))
