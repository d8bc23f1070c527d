"""Faults happen to the sends they name, as often as they say, and are counted."""

from __future__ import annotations

import pytest
from support.faulty import Fault, Faulty, faulty
from support.loopback import Hub
from support.meshes import closing, data, soon

from commlayer.errors import PeerLost, code_of
from commlayer.transport.protocol import Kind, Transport


def arrivals(script: list[Fault], sends: int = 4, seed: int = 0) -> tuple[list[bytes], list[int]]:
    """Bodies that arrive of `sends` frames of one byte, and the shots."""
    hub = Hub()
    a, b = faulty(hub.transport(0), script, seed), hub.transport(1)
    with closing([a, b]):
        for i in range(sends):
            a.send(1, data(0, bucket=i, step=i), bytes([i]))
        a.send(1, data(0, step=1000), b"end")
        got: list[bytes] = []
        while (body := bytes(b.wait(b.recv(0), soon()).body)) != b"end":
            got.append(body)
    return got, a.shots


@pytest.mark.parametrize(("fault", "expected", "shots"), [
    (Fault("drop", nth=2), [0, 2, 3], 1),
    (Fault("drop", nth=2, times=2), [0, 3], 2),
    (Fault("drop", step=3), [0, 1, 2], 1),
    (Fault("drop", kind=Kind.PUSH), [0, 1, 2, 3], 0),
    (Fault("drop", peer=2), [0, 1, 2, 3], 0),
    (Fault("duplicate", nth=3), [0, 1, 2, 2, 3], 1),
])
def test_drop_and_duplicate(fault: Fault, expected: list[int], shots: int) -> None:
    assert arrivals([fault]) == ([bytes([i]) for i in expected], [shots])


def test_corrupt_flips_one_bit_of_a_copy() -> None:
    got, shots = arrivals([Fault("corrupt", nth=2)])
    assert shots == [1]
    assert [i for i in range(4) if got[i] != bytes([i])] == [1]
    assert (got[1][0] ^ 1).bit_count() == 1


def test_chance_is_seeded() -> None:
    script = [Fault("drop", rate=0.5, times=100)]
    first = arrivals(script, sends=40, seed=1)
    assert first == arrivals(script, sends=40, seed=1)
    assert 0 < first[1][0] < 40
    assert first != arrivals(script, sends=40, seed=2)


def test_each_fault_counts_its_own_shots() -> None:
    got, shots = arrivals([Fault("drop", nth=1), Fault("duplicate", nth=1), Fault("drop", step=99)])
    assert shots == [1, 1, 0]
    assert got == [b"\1", b"\1", b"\2", b"\3"]


def pair(script: list[Fault]) -> tuple[Faulty, Transport]:
    hub = Hub()
    return faulty(hub.transport(0), script), hub.transport(1)


def test_delay_lets_later_ones_overtake_and_then_delivers() -> None:
    a, b = pair([Fault("delay", delay_s=0.05)])
    with closing([a, b]):
        late = a.send(1, data(0), b"late")
        a.send(1, data(0), b"second")
        assert [bytes(b.wait(b.recv(0), soon()).body) for _ in range(2)] == [b"second", b"late"]
        a.wait(late, soon())


def test_close_ends_what_is_delayed() -> None:
    a, b = pair([Fault("delay", delay_s=3600)])
    with closing([a, b]):
        late = a.send(1, data(0), b"never")
        a.close()
        assert code_of(late.error()) == "E-SESSION-CLOSED"


def test_fail_ends_the_peer_on_both_sides() -> None:
    a, b = pair([Fault("fail", nth=2)])
    with closing([a, b]):
        assert a.send(1, data(0)).error() is None
        failed = a.send(1, data(0)).error()
        assert failed is not None
        assert (failed.code, failed.peer, failed.what) == ("E-PEER-LOST", "worker 1", "failed by the script")
        b.wait(b.recv(0), soon())
        with pytest.raises(PeerLost, match="worker 0: .*E-PEER-LOST"):
            b.wait(b.recv(0), soon())
        assert a.shots == [1]


def test_an_unknown_fault() -> None:
    with pytest.raises(ValueError, match="'explode'.*drop, delay, corrupt, duplicate, fail.*E-ARGUMENT"):
        faulty(Hub().transport(0), [Fault("explode")])
