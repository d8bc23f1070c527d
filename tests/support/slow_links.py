"""A slow link between this process and the servers that it connects to, without root: the relay of the demo."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest

from commlayer.demo.links import LOOPBACK, LinkDirection, Relay
from commlayer.transport.endpoint import Address, StreamTransport


@contextlib.contextmanager
def slow_link(up_bps: float, down_bps: float, delay_s: float = 0.01) -> Iterator[None]:
    """All data connections that this process opens inside share one uplink and one downlink. Calls to the coordinator do not,
    and neither do torch's process groups."""
    up, down, dial, ports = LinkDirection(up_bps), LinkDirection(down_bps), StreamTransport.dial, dict[Address, int]()
    with Relay(delay_s) as relay, pytest.MonkeyPatch.context() as patch:

        def relayed(self: StreamTransport, peer: int, address: Address, deadline: float, answer_by: float = math.inf) -> None:
            if address not in ports:
                ports[address] = relay.listen(lambda: address[1], [up], [down])
            dial(self, peer, (LOOPBACK, ports[address]), deadline, answer_by)

        patch.setattr(StreamTransport, "dial", relayed)
        yield
