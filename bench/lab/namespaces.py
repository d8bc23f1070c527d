"""Creates, configures and removes the lab's network namespaces, one lab at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO

from bench import Unmeasurable

PREFIX = "commlab-"
INTERFACE = "wan0"

# Buffers for 1 Gb/s and about 200 ms of round trip and queue. TCP metrics are not cached, so that runs do not influence each
# other.
SYSCTLS = (
    "net.ipv4.tcp_rmem=4096 131072 67108864",
    "net.ipv4.tcp_wmem=4096 65536 67108864",
    "net.ipv4.tcp_no_metrics_save=1",
    "net.ipv6.conf.all.disable_ipv6=1",
)


class LabUnavailable(Unmeasurable):
    """The lab cannot run on this machine; the message is one line with what is missing."""


def require() -> None:
    """Raises LabUnavailable unless namespaces and TUN devices can be created."""
    if os.geteuid() != 0:
        raise LabUnavailable("the WAN lab makes network namespaces and needs root; run it as root or with sudo")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise LabUnavailable("the WAN lab needs /dev/net/tun, which is missing here; load the kernel module tun")
    if not shutil.which("ip"):
        raise LabUnavailable("the WAN lab needs the command ip; install iproute2")


def take_lock(deadline_s: float) -> IO[str]:
    """Takes the machine-wide lock: two labs at once would distort each other's measurements. Release it with drop_lock."""
    from commlayer.files import try_lock  # here, since rivals' environments lack commlayer

    path = Path(tempfile.gettempdir()) / "commlab.lock"
    lock = open(path, "a+")  # noqa: SIM115 - it stays open as long as the lab does
    if not try_lock(lock.fileno(), deadline_s):
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise LabUnavailable(f"another lab (process {holder}) has held {path} for {deadline_s:g} s")
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def drop_lock(lock: IO[str]) -> None:
    # Unlocked explicitly, since a forked child may still hold a copy of the descriptor.
    fcntl.flock(lock, fcntl.LOCK_UN)
    lock.close()


def present() -> list[str]:
    """All lab namespaces on this machine, including those left by dead labs."""
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.glob(f"{PREFIX}*")) if folder.is_dir() else []


def make(count: int) -> list[str]:
    """Creates namespaces for `count` hosts, after removing what dead labs left. The caller must hold the lock."""
    for name in present():
        remove(name)
    names = [f"{PREFIX}{os.getpid()}-{i}" for i in range(count)]
    for name in names:
        _ip("netns", "add", name)
    return names


def congestion_control() -> str:
    """TCP's congestion control here, also in namespaces. They may only choose what the machine allows; the lab keeps it."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def configure(name: str, address: str, mtu: int) -> None:
    """Sets the address and MTU of the namespace's device, and the lab's TCP settings."""
    lines = ("link set lo up", f"addr add {address}/24 dev {INTERFACE}", f"link set {INTERFACE} mtu {mtu} up")
    _ip("-n", name, "-batch", "-", given="\n".join(lines) + "\n")
    _ip("netns", "exec", name, "sysctl", "-q", "-w", *SYSCTLS)


def remove(name: str) -> None:
    """Kills every process in the namespace and deletes it."""
    for _ in range(50):
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        if not pids:
            break
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def device_drops(name: str) -> int:
    """Packets that the TUN device dropped because the router did not read in time; 0 in a valid run."""
    counter = f"/sys/class/net/{INTERFACE}/statistics/tx_dropped"
    answer = subprocess.run(["ip", "netns", "exec", name, "cat", counter], capture_output=True, text=True)
    return int(answer.stdout or 0)


def _ip(*args: str, given: str | None = None) -> None:
    done = subprocess.run(["ip", *args], input=given, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise LabUnavailable(f"`ip {' '.join(args)}` failed: {reason}")
