"""Homes behind routers that translate addresses, and one server: in the open, or behind a router that forwards its ports."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from bench.lab import namespaces

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

    def __init__(self, homes: int, *, forwards: bool = False) -> None:
        """`forwards`: the server has a private address, too, and its router forwards all ports to it. Such a router does not
        forward what the server itself sends to the router's address."""
        self.homes, self._forwards = homes, forwards
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
            for name, address in zip(self.names, [PRIVATE if self._forwards else SERVER, *[PRIVATE] * self.homes], strict=True):
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
                    if self._forwards and not place:
                        _rewrite(packet, 12, _address(SERVER), 0, _ports(packet)[0])
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
        if self._forwards:
            _rewrite(packet, 16, _address(PRIVATE), 2, port)
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
