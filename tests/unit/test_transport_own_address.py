"""Which address and interface lead to another machine, as this machine's own tables have it."""

from __future__ import annotations

import socket
import sys

import pytest

from commlayer.engine.start import RankRow, _own_address
from commlayer.transport import own_address

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are told as Linux tells them")


def test_loopback_is_loopback() -> None:
    assert own_address.address_to("127.0.0.1") == "127.0.0.1"
    assert own_address.address_to("localhost") in ("127.0.0.1", "::1")
    assert own_address.interface_of("127.0.0.1") == "lo"


def test_an_address_of_this_machine_leads_to_itself() -> None:
    own = own_address.default_address()
    if own:
        assert own_address.address_to(own) == own
        assert own_address.interface_of(own) in {name for _, name in socket.if_nameindex()}


def test_what_leads_nowhere_is_empty() -> None:
    assert own_address.address_to("no.such.host.invalid") == ""
    assert own_address.interface_of("203.0.113.77") == ""


def test_a_name_of_several_addresses_is_taken_where_it_leads_away(monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_address.default_address()
    if not own or ":" in own:
        pytest.skip("no default route")
    results = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (address, 9)) for address in ("127.0.1.1", own)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: results)
    assert own_address.address_to("this-machine") == own


def test_where_the_master_is_loopback_the_way_to_another_machine_counts() -> None:
    own = own_address.default_address()
    mine = RankRow("a", "a", address="127.0.0.1")
    if own:
        assert _own_address(mine, [mine, RankRow("b", "b", address=own)]) == own
    assert _own_address(mine, [mine]) == ""


def test_no_interface_leads_to_this_machine() -> None:
    assert own_address.interface_towards(["127.0.0.1", "::1"]) == own_address.interface_towards([]) == ""
