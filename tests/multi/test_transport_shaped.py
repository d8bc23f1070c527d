"""Shaped links: their arithmetic, sharing between processes, and delivery at the right time."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.attached import assert_refused, outcome
from support.loopback import Hub
from support.meshes import data, soon

from commlayer.errors import PeerLost
from commlayer.transport.framing import HEADER_NBYTES
from commlayer.transport.protocol import SERVER_BASE
from commlayer.transport.shaped_links import HostLink, Shaped, ShapedLinks

KB = 1000 - HEADER_NBYTES
"""A body that makes a frame of 1000 bytes."""


def test_a_frame_takes_uplink_then_delay_then_what_the_downlink_is_slower(tmp_path: Path) -> None:
    links = ShapedLinks(tmp_path / "links", [HostLink(8e3, 8e6, 0.5), HostLink(8e6, 4e3), HostLink(16e3, math.inf)])
    assert [links.send(0, 0.0, 1000), links.send(0, 0.0, 1000), links.send(0, 9.0, 500)] == [1.0, 2.0, 9.5]
    assert links.receive(0, 1, 1.0, 1000) == 2.5, "the first bit arrives at 0.5, then the downlink needs two seconds"
    assert links.receive(0, 1, 2.0, 1000) == 4.5, "the downlink is busy"
    assert links.receive(0, 2, 2.0, 1000) == 2.5
    links.close()


def test_links_are_shared_through_their_file(tmp_path: Path) -> None:
    path, hosts = tmp_path / "links", [HostLink(8e3, 8e3)]
    links = ShapedLinks(path, hosts)
    assert links.send(0, 10.0, 1000) == 11.0
    program = f"""
from commlayer.transport.shaped_links import *
links = ShapedLinks({str(path)!r}, [HostLink(8e3, 8e3)])
print([links.send(0, 10.0, 1000) for _ in range(50)][-1])
"""
    children = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [float(child.communicate(timeout=60)[0]) for child in children]
    assert max(ends) == 11.0 + 100
    assert links.send(0, 10.0, 1000) == 112.0
    assert links.send(0, 500.0, 1000) == 501.0  # an idle link saves nothing up
    links.close()


@pytest.mark.parametrize("link", [HostLink(0, 1), HostLink(1, -1), HostLink(1, 1, -0.1), HostLink(math.nan, 1)])
def test_rates_that_make_no_sense(tmp_path: Path, link: HostLink) -> None:
    assert_refused(outcome(lambda: ShapedLinks(tmp_path / "links", [link])), "E-ARGUMENT", "host 0 ", f"{link.up_bps}")


Mesh = Callable[[list[HostLink]], list[Shaped]]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    """Ranks on hosts of their own, and server 0 on the host of rank 0."""
    with contextlib.ExitStack() as stack:
        def make(links: list[HostLink]) -> list[Shaped]:
            shaped, hosts = ShapedLinks(tmp_path / "links", links), {**{i: i for i in range(len(links))}, SERVER_BASE: 0}
            stack.callback(shaped.close)
            ends = [Shaped(end, shaped, hosts) for end in Hub().mesh(hosts)]
            for end in ends:
                stack.callback(end.close, 0.1)
            return ends

        yield make


def test_the_urgent_frame_goes_first_and_a_loss_comes_after_the_data(mesh: Mesh) -> None:
    a, b, _ = mesh([HostLink(8e6, 8e6, 0.01), HostLink(8e6, 8e6)])
    begin = time.monotonic()
    for bucket, order in ((0, 5), (1, 5), (2, 5), (3, 1)):
        a.send(1, data(0, bucket=bucket, order=order), bytes(50_000))
    a.close()
    arrived = [b.wait(b.recv(0), soon()).header.bucket for _ in range(4)]
    assert time.monotonic() - begin >= 4 * 50_000 / 1e6 + 0.01
    assert arrived in ([0, 3, 1, 2], [3, 0, 1, 2])
    assert_refused(outcome(lambda: b.wait(b.recv(0), soon())), "E-PEER-ENDED", "worker 0: ")


def test_a_host_shares_its_links_and_inside_it_nothing_is_shaped(mesh: Mesh) -> None:
    worker, other, server = mesh([HostLink(8e3, 8e6), HostLink(8e6, 8e6)])
    begin = time.monotonic()
    worker.send(SERVER_BASE, data(0), bytes(KB))
    assert server.wait(server.recv(0), soon()).peer == 0
    assert time.monotonic() - begin < 0.9
    for end in (worker, server):
        end.send(1, data(end.rank), bytes(KB))
    for peer in (0, SERVER_BASE):
        other.wait(other.recv(peer), soon())
    assert time.monotonic() - begin >= 2.0


def test_an_abort_fails_what_waits(mesh: Mesh) -> None:
    worker, _, _ = mesh([HostLink(1e3, 1e6), HostLink(1e6, 1e6)])
    handles = [worker.send(1, data(0, bucket=bucket), bytes(KB)) for bucket in range(3)]
    worker.abort(PeerLost("is gone", peer="worker 1"), 1)
    for handle in handles[1:]:
        with pytest.raises(PeerLost):
            worker.wait(handle, soon())
