"""Two sites behind NAT that accept no connections, and one reachable server: `commlayer join` trains there."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from support import site_training, sites
from support.lab import needs_lab

from bench.lab import namespaces

pytest.importorskip("cryptography", reason="cryptography is not installed")
from commlayer.cluster.keys import authority

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
SERVER, PRIVATE = "203.0.113.1", "192.168.1.2"
FIRST_PORT = 20_000
TCP = 6
MTU = 1500


def public(home: int) -> str:
    """Address of that site's router."""
    return f"203.0.113.{11 + home}"


class Nat:
    """Use it as a context. `dialled`: destinations of each site; `dropped`: packets from outside without a mapping."""

    def __init__(self, homes: int) -> None:
        self.homes = homes
        self.dialled: list[set[tuple[str, int]]] = [set() for _ in range(homes)]
        self.dropped = [0] * homes
        self._out: dict[tuple[int, int, bytes], int] = {}
        """Of a home's port and what it dials: the port outside."""
        self._back: dict[tuple[int, int, bytes], int] = {}
        self._over = threading.Event()

    def __enter__(self) -> Nat:
        namespaces.require()
        with ExitStack() as stack:
            stack.callback(namespaces.drop_lock, namespaces.take_lock(60.0))
            self.names = namespaces.make(self.homes + 1)
            stack.callback(lambda: [namespaces.remove(name) for name in self.names])
            self._devices = [_tun(name) for name in self.names]
            stack.callback(lambda: [os.close(device) for device in self._devices])
            for name, address in zip(self.names, [SERVER, *[PRIVATE] * self.homes], strict=True):
                namespaces.configure(name, address, MTU)
                if address == PRIVATE:
                    subprocess.run(["ip", "-n", name, "route", "add", "default", "dev", namespaces.INTERFACE], check=True)
            self._thread = threading.Thread(target=self._run)
            self._thread.start()
            stack.callback(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def popen(self, place: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """On the server (0), or site place - 1."""
        return subprocess.Popen(["ip", "netns", "exec", self.names[place], *argv], text=True, **options)

    def _end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            for device in select.select(self._devices, [], [], 0.1)[0]:
                packet = bytearray(os.read(device, 2 * MTU))
                if packet[0] >> 4 == 4 and packet[9] == TCP:
                    place = self._devices.index(device)
                    self._outwards(packet, place - 1) if place else self._inwards(packet)

    def _outwards(self, packet: bytearray, home: int) -> None:
        source, to, port = _ports(packet)[0], bytes(packet[16:20]), _ports(packet)[1]
        self.dialled[home].add((".".join(map(str, to)), port))
        if to != _address(SERVER):
            return  # another home's router: it would drop it
        known = (home, source, to + port.to_bytes(2, "big"))
        outside = self._out.setdefault(known, FIRST_PORT + len(self._out))
        self._back[home, outside, known[2]] = source
        _rewrite(packet, 12, _address(public(home)), 0, outside)
        os.write(self._devices[0], packet)

    def _inwards(self, packet: bytearray) -> None:
        source, port = _ports(packet)
        homes = [home for home in range(self.homes) if packet[16:20] == _address(public(home))]
        for home in homes:
            inside = self._back.get((home, port, bytes(packet[12:16]) + source.to_bytes(2, "big")))
            if inside is None:
                self.dropped[home] += 1
            else:
                _rewrite(packet, 16, _address(PRIVATE), 2, inside)
                os.write(self._devices[1 + home], packet)


def _tun(name: str) -> int:
    """A TUN device in that namespace. A separate thread enters it, and ends once it has the device."""
    results: list[int] = []

    def enter() -> None:
        with open(f"/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                return
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", namespaces.INTERFACE.encode(), IFF_TUN | IFF_NO_PI))
        results.append(device)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return results[0]


def _address(text: str) -> bytes:
    return bytes(map(int, text.split(".")))


def _ports(packet: bytearray) -> tuple[int, int]:
    head = 4 * (packet[0] & 15)
    source, to = struct.unpack_from(">HH", packet, head)
    return source, to


def _rewrite(packet: bytearray, at: int, address: bytes, port_at: int, port: int) -> None:
    """Another address and port, with both checksums as RFC 1624 has them change."""
    head = 4 * (packet[0] & 15)
    old_address, old_port = bytes(packet[at : at + 4]), bytes(packet[head + port_at : head + port_at + 2])
    new_port = port.to_bytes(2, "big")
    _change(packet, 10, old_address, address)
    _change(packet, head + 16, old_address + old_port, address + new_port)
    packet[at : at + 4] = address
    packet[head + port_at : head + port_at + 2] = new_port


def _change(packet: bytearray, at: int, old: bytes, new: bytes) -> None:
    total = ~struct.unpack_from(">H", packet, at)[0] & 0xFFFF
    total += sum(~word & 0xFFFF for (word,) in struct.iter_unpack(">H", old)) + sum(w for (w,) in struct.iter_unpack(">H", new))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into(">H", packet, at, ~total & 0xFFFF)


pytestmark = needs_lab
COMMAND = [sys.executable, "-m", "commlayer.cli.main"]
PORT = 7000
WAIT_S = 60.0


def dial(place: str, port: int) -> str:
    return f"import socket; socket.create_connection(({place!r}, {port}), 1.0); print('let in')"


@pytest.mark.nightly
def test_two_unreachable_sites_train_together(tmp_path: Path) -> None:
    authority.init(tmp_path / "keys", 1)
    names = ("server", "home-a", "home-b")
    keys = [str(authority.add(tmp_path / "keys", name, 1, dials_only=name != "server")) for name in names]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMMLAYER_")}
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": sites.ROOT,
                             "env": environment | sites.QUICK | {"COMMLAYER_CONFIG": ""}}
    with Nat(2) as nat:
        server = nat.popen(0, [*COMMAND, "serve", "--bind", f"{SERVER}:{PORT}", "--workers", "2", "--keys", keys[0]], **piped)
        assert server.stdout is not None
        assert server.stderr is not None
        assert json.loads(server.stdout.readline()) == {"control": f"{SERVER}:{PORT}", "data": f"{SERVER}:{PORT + 1}"}
        line = next(lines for lines in server.stderr if "on each other machine run: " in lines)
        assert line.endswith(f" run: commlayer join --keys ITS-KEYS {SERVER}:{PORT} SCRIPT\n")
        script = [f"{SERVER}:{PORT}", site_training.__file__, "plain"]
        both = [nat.popen(1 + home, [*COMMAND, "join", "--keys", keys[1 + home], *script], **piped) for home in range(2)]
        report = []
        for home in both:
            out, errors = home.communicate(timeout=WAIT_S)
            assert home.returncode == 0, errors
            report.append(json.loads(out.splitlines()[-1]))
        assert sorted(one["rank"] for one in report) == [0, 1]
        assert {one["sha"] for one in report} == set(site_training.torchrun_digests("plain", 2))
        assert nat.dialled == [{(SERVER, PORT), (SERVER, PORT + 1)}] * 2, "nothing else was tried"
        assert nat.dropped == [0, 0]
        for home in range(2):  # the translator does what it is there for
            denied = nat.popen(0, [sys.executable, "-c", dial(public(home), PORT)], **piped)
            assert "let in" not in denied.communicate(timeout=WAIT_S)[0]
        assert min(nat.dropped) > 0
        _, lines = server.communicate(timeout=WAIT_S)
        assert "home-a (pid " in lines
        assert server.returncode == 0, lines
