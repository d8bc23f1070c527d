"""A hostile site at the coordinator's store, over real sockets: it changes no values of others and uses no quota of others."""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.attached import assert_refused, outcome
from support.coordinators import (
    WAIT_S,
    Opened,
    until,
)
from support.internals import config_from_options, rendezvous_of, store_of
from support.site_groups import joined, leave, met
from torch.distributed import distributed_c10d

from commlayer.cluster.calls import messages
from commlayer.cluster.calls.messages import ANY, MAX_KEYS, StoreKey
from commlayer.cluster.calls.site_client import KvClient
from commlayer.cluster.membership import kv_store, rendezvous_service
from commlayer.cluster.processes import site_process_group
from commlayer.cluster.processes.world_store import WorldStore
from commlayer.errors import CommError

CHUNK, TEXT, NUMBER, COUNT = ("world0/group0/0", 0), ("text", ANY), ("a number", ANY), ("count", ANY)
OWN = {CHUNK: b"chunk", TEXT: b"text", NUMBER: b"12"}


def soon() -> float:
    return time.monotonic() + WAIT_S


def read(desk: KvClient, *keys: StoreKey) -> tuple[bytes | None, ...]:
    return desk.request(soon(), want=keys, wait=False).values


ATTACKS: dict[str, dict[str, Any]] = {
    "overwrite a chunk": {"put": [(CHUNK, b"forged")]}, "drop a chunk": {"drop": [CHUNK]},
    "write a chunk first": {"put": [(("world0/group0/1", 0), b"forged")]},
    "among others": {"put": [(("fine", ANY), b""), (("own", 2), b""), (CHUNK, b"forged")]},
    "of a rank that may come": {"put": [(("epoch2/group0/0", 7), b"forged")]},
    "of a server": {"put": [(("x", -2), b"forged")]},
    "overwrite torch's key": {"put": [(TEXT, b"forged")]}, "drop torch's key": {"drop": [TEXT]},
    "add to a value": {"add": (NUMBER, 1)}, "add to a rank's number": {"add": (("sum", 0), 1)},
    "overwrite a number": {"put": [(COUNT, b"9")]}, "drop a number": {"drop": [COUNT]}}


def test_site_cannot_change_values_of_another(opened: Opened) -> None:
    coordinator, (zero, _, hostile) = met(opened, 3)
    zero.request(soon(), put=[*OWN.items()], add=(COUNT, 5))
    rows = dict(store_of(coordinator).rows)
    for name, attack in ATTACKS.items():
        line = outcome(lambda attack=attack: hostile.request(soon(), **attack))
        assert_refused(line, "E-OWNER")
        assert re.search(r"home \w \(pid \d+\) may not .*(worker (0|7|-2);|home \w \(pid \d+\) wrote it first)", line), name
        assert store_of(coordinator).rows == rows, name
    assert hostile.request(soon(), add=(COUNT, 1)).sum == 6, "a number that was begun by adding is everyone's"
    zero.request(soon(), put=[(CHUNK, b"again")], drop=[TEXT, NUMBER])
    assert read(hostile, CHUNK, TEXT, NUMBER, COUNT) == (b"again", None, None, b"6")


def test_forged_torch_key_is_attributed_and_local_group_values_stay_private(
        opened: Opened) -> None:
    _, (zero, _, hostile) = met(opened, 3)
    keys = ["world0/2/cpu/0", "world0/2/cuda/0"]
    for key in keys:
        hostile.request(soon(), put=[((key, ANY), b"address of the attacker")])
    between, inside = (WorldStore(zero, WAIT_S, 0, owner) for owner in (ANY, 0))
    assert re.search(r"home \w \(pid \d+\) wrote it first.*E-OWNER", outcome(lambda: between.set(keys[0], b"address")))
    assert not inside.check(keys)
    inside.set(keys[0], b"address")
    assert inside.get(keys[0]) == b"address"


def test_groups_inside_a_site_use_their_own_store(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (_, one, hostile) = met(opened, 3)
    world = SimpleNamespace(ids=(0, 1, 2), home=frozenset({1}), name="world0", inside_store=WorldStore(one, WAIT_S, 1, 1))
    monkeypatch.setattr(site_process_group, "_worlds", [world])
    monkeypatch.setattr(site_process_group, "is_relayed", lambda: True)
    taken = list[Any]()

    def helper(group_size: int, group_rank: int, global_ranks_in_group: list[int], backend: str, store: Any) -> None:
        taken.append(store)

    for ranks in ([], [0, 1], [1]):
        site_process_group._with_own_store(helper, 1, 0, ranks, "gloo", store="the world's")
    assert taken[:2] == ["the world's"] * 2
    taken[2].set("id", b"where to connect")
    assert read(hostile, ("world0/id", 1), ("world0/id", ANY)) == (b"where to connect", None)
    assert {"global_ranks_in_group", "store"} <= inspect.signature(distributed_c10d._new_process_group_helper).parameters.keys()


def test_departed_site_or_its_replacement_has_no_effect(opened: Opened) -> None:
    coordinator, (zero, _, hostile) = met(opened, 3, min_workers=2)
    joined(opened, coordinator, 3)
    zero.request(soon(), put=[*OWN.items()])
    leave(opened, hostile, "it comes again")
    line = outcome(lambda: hostile.request(soon(), put=[(("new", ANY), b"")]))
    assert re.search("it comes again", line)
    impostor = opened.add(KvClient(coordinator.address, config_from_options(coordinator), "another home"))
    assert_refused(outcome(lambda: impostor.request(soon(), put=[(CHUNK, b"forged")])), "E-RENDEZVOUS-ENDED")
    assert read(zero, *OWN) == tuple(OWN.values())


SHARE = 1 << 20


def filled(desk: KvClient, rows: Callable[[int], dict[str, Any]]) -> str:
    """Writes until the coordinator refuses; the line."""
    for number in range(20_000):
        try:
            desk.request(soon(), **rows(number))
        except CommError as error:
            return str(error)
    raise AssertionError("no end")


@pytest.mark.parametrize("rows", [
    lambda number: {"put": [((f"{number}", ANY), bytes(100_000))]},
    lambda number: {"put": [((f"{number} {n}", 2), b"") for n in range(500)]},
    lambda number: {"put": [((f"{number} {n}" + "x" * 200, 2), b"") for n in range(500)], "add": ((f"{number}", ANY), 1)},
], ids=["large", "many", "names and numbers"])
def test_site_can_fill_only_its_own_quota(rows: Any, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MAX_KEPT_NBYTES", 3 * SHARE)
    monkeypatch.setattr(kv_store, "EACH_NBYTES", 0)
    coordinator, (zero, _, hostile) = met(opened, 3)
    assert_refused(filled(hostile, rows), "E-QUOTA", f"{SHARE}")
    store = store_of(coordinator)
    assert store.nbytes.total() <= SHARE
    assert sum(len(name) + len(row.value) for (name, _), row in store.rows.items()) <= SHARE
    zero.request(soon(), put=[(("mine", 0), bytes(250_000 // 2))], add=(COUNT, 1))
    assert read(hostile, ("mine", 0)) == (bytes(125_000),)


def test_waiting_calls_are_limited_per_site(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_service, "MAX_WAITS", 4)
    coordinator, (zero, one, hostile) = met(opened, 3)
    lines = list[str]()

    def wait(number: int) -> None:
        lines.append(outcome(lambda: hostile.request(time.monotonic() + 20.0, want=[(f"never {number}", ANY)])))

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    until(lambda: bool(lines), "the first is refused")
    assert_refused(lines[0], "E-QUOTA")
    assert max(rendezvous_of(coordinator)._waiting.values()) <= 4
    got = list[tuple[bytes | None, ...]]()
    waiting = threading.Thread(target=lambda: got.append(zero.request(soon(), want=[("late", 1)]).values))
    waiting.start()
    one.request(soon(), put=[(("late", 1), b"there")])
    waiting.join(WAIT_S)
    assert got == [(b"there",)]
    hostile.close()
    for thread in threads:
        thread.join(WAIT_S)
    store = store_of(coordinator)
    until(lambda: not store._waiting, "what waited is forgotten")


def test_number_of_keys_per_call_is_limited(opened: Opened) -> None:
    _, (_, _, hostile) = met(opened, 3)
    wanted = [(f"{number}", ANY) for number in range(MAX_KEYS + 4)]
    assert_refused(outcome(lambda: hostile.request(soon(), want=wanted, wait=False)), "E-FRAME", f"{MAX_KEYS + 3}")
    store = WorldStore(hostile, WAIT_S, 2)
    store.set("7", b"x")
    assert not store.check([name for name, _ in wanted]), "torch's store asks in several calls"
    assert messages.MAX_KEYS >= 1024
