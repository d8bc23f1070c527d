"""The state for joining workers, which is sent through the coordinator's store. Members are threads with store clients."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pytest
from support.coordinators import WAIT_S, Opened
from support.site_groups import joined, met

from commlayer.cluster.calls.messages import ANY, StoreKey
from commlayer.cluster.calls.site_client import KvClient
from commlayer.cluster.processes import site_process_group
from commlayer.cluster.processes.relayed_group import PART_NBYTES
from commlayer.engine.epochs import state_relay
from commlayer.engine.epochs.state_relay import BATCH_NBYTES, NewestEpoch, StateRelay
from commlayer.errors import CommError, DeadlineExceeded, PeerLost
from commlayer.records import Epoch, Member

WORLD, JOINS, MOST_NBYTES = 4, (2, 3), 1 << 30
OWN, COMMON = bytes(range(256)) * (5 * PART_NBYTES // 512), bytes(reversed(range(256))) * (40 * PART_NBYTES // 256)
"""Two and a half parts, and 40 parts."""


def epoch(generation: int, *ranks: int) -> Epoch:
    return Epoch(generation, tuple(Member(rank, rank, "host") for rank in ranks), ())


FIRST = epoch(2, *range(WORLD))


class Desks:
    """Store clients by rank. Each thread uses that of its own rank."""

    def __init__(self, clients: list[KvClient]) -> None:
        self.clients, self._own = clients, threading.local()
        self.nbytes = Counter[int]()
        """Bytes that each rank has written."""
        self.written: set[StoreKey] = set()
        self.slow: Mapping[int, float] = {}
        """Seconds that a write of a rank takes."""
        for rank, client in enumerate(clients):
            client.request = partial(self._request, rank, client.request)  # type: ignore[method-assign]

    def _request(self, place: int, request: Callable[..., Any], *args: Any, **named: Any) -> Any:
        nbytes = sum(len(value) for _, value in named.get("put", ()))
        time.sleep(self.slow.get(place, 0.0) if nbytes else 0.0)
        self.nbytes[place] += nbytes
        self.written |= {key for key, _ in named.get("put", ())} | ({named["add"][0]} if named.get("add") else set())
        return request(*args, **named)

    def left(self) -> list[StoreKey]:
        """Keys that were written and not deleted."""
        keys = [*self.written]
        values = self.clients[0].request(time.monotonic() + WAIT_S, want=keys, wait=False).values
        return [key for key, value in zip(keys, values, strict=True) if value is not None]

    def be(self, rank: int) -> None:
        self._own.rank = rank

    def own(self) -> KvClient:
        return self.clients[self._own.rank]

    def run(self, *acts: Callable[[], Any]) -> list[Any]:
        """The results of acts, which run as the ranks in order."""
        def one(rank: int) -> Any:
            self.be(rank)
            return acts[rank]()

        with ThreadPoolExecutor(len(acts)) as pool:
            return [*pool.map(one, range(len(acts)))]


@pytest.fixture(name="desks")
def store_clients(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> Desks:
    """Windows of the state are short."""
    desks = Desks(met(opened, WORLD)[1])
    monkeypatch.setattr(site_process_group, "kv_client", desks.own)
    monkeypatch.setattr(state_relay, "WINDOW", 2)
    return desks


def relay(newest: NewestEpoch, at: Epoch, own: int, limit_s: float = WAIT_S) -> StateRelay:
    return StateRelay(newest, at, own, limit_s, 0.0, MOST_NBYTES)


def only(own: int) -> StateRelay:
    return relay(NewestEpoch(lambda: FIRST, 0.0), FIRST, own)


@pytest.mark.parametrize(("own", "common"), [(b"", b""), (OWN, b""), (b"", COMMON), (OWN, COMMON), (COMMON, OWN)])
def test_all_members_give_the_state_once_to_all_joining_workers(own: bytes, common: bytes, desks: Desks) -> None:
    entered: list[float] = []

    def enter(*state: bytes) -> tuple[bytes, ...]:
        entered.append(time.monotonic())
        return state

    def give(rank: int) -> float:
        only(rank).give(own if rank == 0 else b"other", common, [0, 1], JOINS)
        return time.monotonic()

    *gave, first, second = desks.run(lambda: give(0), lambda: give(1), lambda: only(2).take(enter), lambda: only(3).take(enter))
    assert first == second == (own, common)
    assert max(entered) <= min(gave)
    batches = -(-len(own) // BATCH_NBYTES) - (-len(common) // BATCH_NBYTES)
    assert 0 <= desks.nbytes.total() - len(own) - len(common) <= 100 + batches, "each byte is uploaded once"
    last = f"/end{max(name.rpartition('/end')[2] for name, _ in desks.written if '/end' in name)}"
    assert {name for name, _ in desks.left()} == {f"state/2.2.2{last}"}, "all is deleted but what the last member may yet read"


def test_member_with_a_slow_uplink_gives_less(desks: Desks) -> None:
    desks.slow = {0: 0.1}
    *_, taken, _ = desks.run(
        lambda: only(0).give(b"", COMMON, [0, 1], JOINS), lambda: only(1).give(b"", COMMON, [0, 1], JOINS),
        lambda: only(2).take(lambda *state: state), lambda: only(3).take(lambda *state: state))
    assert taken == (b"", COMMON)
    assert desks.nbytes[0] < desks.nbytes[1]


def test_member_whose_state_has_another_size_gives_nothing(desks: Desks) -> None:
    *_, taken, _ = desks.run(
        lambda: only(0).give(OWN, COMMON, [0, 1], JOINS), lambda: only(1).give(b"", COMMON[1:], [0, 1], JOINS),
        lambda: only(2).take(lambda *state: state), lambda: only(3).take(lambda *state: state))
    assert taken == (OWN, COMMON)
    assert desks.nbytes[1] == 0


@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_others_begin_again_if_one_leaves(leaves: int, desks: Desks) -> None:
    """Worker 0 has announced the state, worker 1 has begun to give it, or worker 2 has read it in part."""
    epochs = [FIRST] * WORLD
    newest = [NewestEpoch(partial(epochs.__getitem__, rank), WAIT_S) for rank in range(WORLD)]
    remaining = [rank for rank in range(WORLD) if rank != leaves]

    def leave() -> None:
        announced = msgspec.msgpack.encode((len(OWN), len(COMMON), [0, 1], JOINS))
        put = {0: [(("state/2", 0), announced), (("state/3", 0), announced)],
               1: [(("state/2.2.2/giver1", ANY), b"\1")], 2: [(("state/2.2.2/end0", 2), b"")]}[leaves]
        desks.own().request(time.monotonic() + WAIT_S, put=put)
        time.sleep(0.5)
        epochs[:] = [epoch(3, *remaining)] * WORLD

    def give(rank: int) -> None:
        newest[rank].run(lambda now: relay(newest[rank], now, rank).give(
            OWN, COMMON, [m.rank for m in now.members if m.rank not in JOINS],
            [m.rank for m in now.members if m.rank in JOINS]))

    def take(rank: int) -> tuple[bytes, ...]:
        return newest[rank].run(lambda now: relay(newest[rank], now, rank).take(lambda *state: state))

    acts = [leave if rank == leaves else partial(take if rank in JOINS else give, rank) for rank in range(WORLD)]
    taken = desks.run(*acts)
    assert [taken[rank] for rank in JOINS if rank != leaves] == [(OWN, COMMON)] * (len(JOINS) - (leaves in JOINS))


def test_changes_of_other_members_do_not_disturb_a_transfer(desks: Desks) -> None:
    """A worker registers and leaves again and again. Ranks learn of it at different times, some not at all."""
    epochs = [FIRST] * WORLD
    newest = [NewestEpoch(partial(epochs.__getitem__, rank), WAIT_S) for rank in range(WORLD)]
    over = threading.Event()

    def change() -> None:
        for generation in range(3, 1000):
            if over.wait(0.01):
                return
            epochs[generation % (WORLD - 1)] = epoch(generation, *range(WORLD), *([9] if generation % 2 else []))

    def give(rank: int) -> None:
        newest[rank].run(lambda now: relay(newest[rank], now, rank).give(OWN, COMMON, [0, 1], JOINS))

    def take(rank: int) -> tuple[bytes, ...]:
        return newest[rank].run(lambda now: relay(newest[rank], now, rank).take(lambda *state: state))

    with ThreadPoolExecutor(1) as pool:
        changes = pool.submit(change)
        *_, first, second = desks.run(lambda: give(0), lambda: give(1), lambda: take(2), lambda: take(3))
        over.set()
        changes.result()
    assert epochs[0].generation > 5
    assert first == second == (OWN, COMMON)
    assert desks.nbytes.total() < 1.1 * len(OWN + COMMON), "each byte is uploaded once"


def test_giver_that_hangs_is_dropped_because_all_others_wait_for_it(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, clients = met(opened, WORLD, min_workers=2, deadline_s=0.5, reconnect_s=0.1, dead_after_s=WAIT_S)
    joined(opened, coordinator, WORLD)
    desks = Desks(clients)
    monkeypatch.setattr(site_process_group, "kv_client", desks.own)

    def hang() -> None:
        until, given = time.monotonic() + WAIT_S, ("state/3.3.1/given0", ANY)
        batch = desks.own().request(until, add=(given, 1)).sum - 1
        desks.own().request(until, put=[((f"state/3.3.1/giver{batch}", ANY), b"\1")])

    def lost(act: Callable[[StateRelay], Any], rank: int) -> str:
        with pytest.raises(PeerLost) as caught:
            act(StateRelay(NewestEpoch(lambda: FIRST, 0.0), FIRST, rank, 0.5, WAIT_S, MOST_NBYTES))
        return f"{caught.value.peer}: {caught.value.what}"

    def give(one: StateRelay) -> None:
        one.give(b"", COMMON, [0, 1, 2], [3])

    lines = desks.run(partial(lost, give, 0), hang, partial(lost, give, 2),
                      partial(lost, lambda one: one.take(lambda *state: state), 3))
    assert all(re.match(r"worker 1: .*[23] others waited 0\.5 s for it", line) for line in lines if line), lines


def test_missing_giver_ends_the_wait_at_the_deadline_by_name(desks: Desks) -> None:
    desks.be(2)
    with pytest.raises(DeadlineExceeded, match=r"worker 0: .*state for a joining worker.*E-DEADLINE") as caught:
        relay(NewestEpoch(lambda: FIRST, 0.0), FIRST, 2, limit_s=0.3).take(lambda *state: state)
    assert caught.value.peer == "worker 0"


def test_error_of_the_store_is_raised_if_no_newer_epoch_arrives(desks: Desks, opened: Opened) -> None:
    desks.be(2)
    opened[0].close()
    with pytest.raises(CommError):
        relay(NewestEpoch(lambda: FIRST, 0.1), FIRST, 2, limit_s=1.0).take(lambda *state: state)
