"""Shaped links: the arithmetic on a clock that the test turns, sharing between processes, delivery for real."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.loopback import Hub
from support.meshes import PATIENCE_S, data, soon

from commlayer.errors import PeerLost
from commlayer.transport.framing import HEADER_NBYTES
from commlayer.transport.protocol import SERVER_BASE
from commlayer.transport.shaped_links import CHUNK_NBYTES, HostLink, Shaped, ShapedLinks, shaped

KB = 1000 - HEADER_NBYTES
"""A body that makes a frame of 1000 bytes: one second on a link of 8 kb/s."""


class TurnedClock:
    """Time passes when the test says so; it says so only after a sleeper has asked for that very time."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._now = 0.0
        self._sleepers: list[float] = []

    def now(self) -> float:
        return self._now

    def sleep_until(self, at: float, wake: threading.Event) -> None:
        with self._turn:
            self._sleepers.append(at)
            self._turn.notify_all()
            while self._now < at and not wake.is_set():
                self._turn.wait(0.05)  # `wake` is set without a word to us
            self._sleepers.remove(at)
            self._turn.notify_all()

    def until_asleep(self, *times: float) -> None:
        """Until exactly these times are slept for: all that was to happen before has happened."""

        def asleep() -> bool:
            have = sorted(set(self._sleepers))
            return len(have) == len(times) and all(map(math.isclose, have, times))

        with self._turn:
            assert self._turn.wait_for(asleep, PATIENCE_S), f"expected sleep until {times}, but they do until {self._sleepers}"

    def turn(self, *times: float) -> None:
        """To the first of these times, once exactly they are slept for."""
        self.until_asleep(*times)
        with self._turn:
            self._now = times[0]
            self._turn.notify_all()


class Net:
    """Ranks 0, 1, 2 on hosts of their own and server 0 on the host of rank 0, over one hub."""

    def __init__(self, folder: Path, links: list[HostLink]) -> None:
        self.clock, self.links, hub = TurnedClock(), ShapedLinks(folder / "links", links), Hub()
        hosts = {0: 0, 1: 1, 2: 2, SERVER_BASE: 0}
        self.ends: dict[int, Shaped] = {t.rank: shaped(t, self.links, hosts, self.clock) for t in hub.mesh(hosts)}

    def close(self) -> None:
        for end in self.ends.values():
            end.close()
        self.links.close()


@pytest.fixture
def uneven(tmp_path: Path) -> Iterator[Net]:
    """Frames of 1000 bytes take host 0 one second out, host 1 two seconds in, and are half a second under way."""
    net = Net(tmp_path, [HostLink(8e3, 8e6, 0.5), HostLink(8e6, 4e3), HostLink(16e3, math.inf)])
    yield net
    net.close()


def test_one_frame_takes_uplink_then_delay_then_what_the_downlink_is_slower(uneven: Net) -> None:
    handle = uneven.ends[1].recv(0)
    sending = uneven.ends[0].send(1, data(0), bytes(KB))
    uneven.clock.turn(1.0)  # out
    uneven.clock.turn(0.5 + 2.0)  # first bit at 0.5, then two seconds of downlink
    assert len(uneven.ends[1].wait(handle, soon()).body) == KB
    uneven.ends[0].wait(sending, soon())
    assert uneven.clock.now() == 2.5
    assert uneven.ends[0].sent_nbytes == {1: 1000}
    assert uneven.ends[1].received_nbytes == {0: 1000}


def test_frames_queue_on_both_links_and_the_urgent_one_goes_first(uneven: Net) -> None:
    for bucket, order in ((1, 5), (2, 5), (3, 1)):
        uneven.ends[0].send(1, data(0, bucket=bucket, order=order), bytes(KB))
        if bucket == 1:
            uneven.clock.until_asleep(1.0)  # on the wire
    for times in ((1.0,), (2.0, 2.5), (2.5, 3.0), (3.0, 4.5), (4.5,), (6.5,)):
        uneven.clock.turn(*times)  # out at 1, 2 and 3; in at 2.5, 4.5 and 6.5: the downlink is busy
    one = uneven.ends[1]
    assert [one.wait(one.recv(0), soon()).header.bucket for _ in range(3)] == [1, 3, 2]


def test_a_large_frame_takes_its_bytes_over_the_rate_however_it_is_cut(uneven: Net) -> None:
    nbytes = 3 * CHUNK_NBYTES + 104
    uneven.ends[0].send(2, data(0), bytes(nbytes - HEADER_NBYTES))
    for at in (*(n * CHUNK_NBYTES / 1000 for n in (1, 2, 3)), nbytes / 1000, nbytes / 1000 + 0.5):
        uneven.clock.turn(at)
    assert len(uneven.ends[2].wait(uneven.ends[2].recv(), soon()).body) == nbytes - HEADER_NBYTES


def test_a_host_shares_its_links_and_inside_it_nothing_is_shaped(uneven: Net) -> None:
    worker, server = uneven.ends[0], uneven.ends[SERVER_BASE]
    worker.send(SERVER_BASE, data(0), bytes(KB))
    assert server.wait(server.recv(0), soon()).peer == 0
    assert uneven.clock.now() == 0.0
    worker.send(2, data(0), bytes(KB))
    uneven.clock.until_asleep(1.0)
    server.send(2, data(SERVER_BASE), bytes(KB))
    for times in ((1.0, 2.0), (1.5, 2.0), (2.0,), (2.5,)):
        uneven.clock.turn(*times)
    two = uneven.ends[2]
    assert [two.wait(two.recv(), soon()).peer for _ in range(2)] == [0, SERVER_BASE]


def test_senders_with_a_short_delay_are_not_held_up_by_those_with_a_long_one(uneven: Net) -> None:
    uneven.ends[0].send(2, data(0), bytes(KB))  # out at 1.0, there at 1.5
    uneven.clock.turn(1.0)
    uneven.clock.until_asleep(1.5)
    uneven.ends[1].send(2, data(1), bytes(KB))  # 8 Mb/s: out and there at 1.001
    uneven.clock.turn(1.001, 1.5)
    two = uneven.ends[2]
    message = two.wait(two.recv(), soon())
    uneven.clock.turn(1.5)
    assert [message.peer, two.wait(two.recv(), soon()).peer] == [1, 0]


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
    with pytest.raises(ValueError, match=rf"host 0 .*{link.up_bps}\b.*E-ARGUMENT"):
        ShapedLinks(tmp_path / "links", [link])


def test_for_real_a_slow_link_takes_at_least_its_time_and_a_loss_comes_behind_the_data(tmp_path: Path) -> None:
    links = ShapedLinks(tmp_path / "links", [HostLink(8e6, 8e6, 0.01), HostLink(8e6, 8e6)])
    a, b = (shaped(t, links, {0: 0, 1: 1}) for t in Hub().mesh(range(2)))
    begin = time.monotonic()
    for bucket in range(4):
        a.send(1, data(0, bucket=bucket), bytes(25_000))
    a.close()
    got = [b.wait(b.recv(0), soon()).header.bucket for _ in range(4)]
    assert time.monotonic() - begin >= 4 * 25_000 / 1e6 + 0.01
    assert got == [0, 1, 2, 3]
    with pytest.raises(PeerLost, match="worker 0: .*E-PEER-ENDED"):
        b.wait(b.recv(0), soon())
    b.close()
    links.close()
