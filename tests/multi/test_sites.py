"""Rendezvous of sites at a coordinator; torch's process group and store there, over real sockets with sites as threads; quotas;
attribution of waits.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import logging
import re
import threading
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from support.attached import assert_refused, outcome
from support.coordinators import (
    WAIT_S,
    Failures,
    Opened,
    quick,
    until,
)
from support.internals import hang_suspects, rendezvous_of, store_of
from support.keys import (
    Folders,
)
from support.membership import PATIENCE_S, several
from support.site_groups import HOMES, asked, joined, leave, met, options, together

from commlayer.cluster.calls import messages, site_client
from commlayer.cluster.calls.coordinator_channel import CoordinatorChannel
from commlayer.cluster.calls.messages import Overdue
from commlayer.cluster.calls.site_client import KvClient, SiteLease
from commlayer.cluster.membership import client, epoch_change, kv_store, membership, sites
from commlayer.cluster.membership.coordinator import MAX_WORKERS, Coordinator
from commlayer.cluster.membership.membership import State
from commlayer.cluster.membership.rendezvous_service import WAIT_EXPIRES_S, RendezvousService
from commlayer.cluster.membership.sites import PendingWait
from commlayer.cluster.processes.relayed_group import PART_NBYTES, PARTS_IN_FLIGHT, RelayedGroup
from commlayer.cluster.processes.world_store import WorldStore
from commlayer.errors import CommError, CorruptFrame, PeerLost, Refused
from commlayer.transport.handshake import RefusalLog


def come(state: sites.Sites, *all_: messages.Join, now: float = 0.0) -> tuple[sites.Sites, list[messages.JoinReply]]:
    replies = []
    for one in all_:
        state, reply = sites.register(state, one, now)
        replies.append(reply)
    return state, replies


def test_ranks_follow_registration_order_and_requests() -> None:
    a, b, c = asked("a"), asked("b", workers=2), asked("c", place=0)
    state, replies = come(sites.Sites(4), a, b)
    assert [r.rank for r in replies] == [messages.ANY] * 2
    assert replies[1].missing == "3 of 4 workers have joined (a, b with 2); waiting for 1 more"
    state, _ = come(state, c)
    _, (of_a, of_b, of_c) = come(state, a, b, c)
    assert [(r.node, r.rank, r.world, r.nodes) for r in (of_c, of_a, of_b)] == [(0, 0, 4, 3), (1, 1, 4, 3), (2, 2, 4, 3)]


@pytest.mark.parametrize(("one", "pattern"), [
    (asked("d", workers=3), r"\b3 workers.*\b2 of the job's 3 .*a \(pid.*E-WORKERS"),
    (asked("d", place=1), r"node-rank 1\b.* a \(pid.*E-RANK\]"),
    (asked("d", place=3), r"node-rank 3\b.* 0 to 2 \[E-RANK\]"),
    (msgspec.structs.replace(asked("d"), version="0.0"), r"0\.0\b.*E-VERSION"),
])
def test_mismatched_site_is_refused_with_a_reason_without_effect(one: messages.Join, pattern: str) -> None:
    state, _ = come(sites.Sites(3), asked("a", place=1))
    after, (reply,) = come(state, one)
    assert re.search(pattern, reply.error)
    assert after == state


def test_late_or_misdirected_site_is_refused_with_a_reason() -> None:
    assert re.search("--workers N.*E-WORKERS", come(sites.Sites(0), asked("a"))[1][0].error)
    state, _ = come(sites.Sites(1), asked("a"))
    assert re.search(r"\b0 of the job's 1 .*E-WORKERS", come(state, asked("b"))[1][0].error)


def test_site_that_leaves_before_the_start_resets_the_rendezvous() -> None:
    a, b = asked("a"), asked("b")
    state, _ = come(sites.Sites(2), a, b)
    state, _ = come(state, msgspec.structs.replace(b, leave="exit code 1"))
    _, (told,) = come(state, a)
    assert re.search(r"^home b \(pid .*: exit code 1; .*E-RENDEZVOUS-ENDED", told.error)
    state, _ = come(state, asked("a"), again := asked("b"))
    assert come(state, again)[1][0].rank == 1


def test_silence_resets_the_rendezvous_only_before_the_start() -> None:
    a, b = asked("a"), asked("b")
    state, _ = come(sites.Sites(2), a, b)
    state = sites.mark_seen(state, a.token, 40.0)
    assert "home b" in come(sites.tick(state, 45.0, 10.0), a)[1][0].error
    begun = msgspec.structs.replace(state, begun=True)
    assert sites.tick(begun, 45.0, 10.0) == begun
    assert sites.tick(begun, 45.0, 10.0, {0}) == begun, "home a was heard 5 s ago"
    left = sites.tick(begun, 45.0, 10.0, {0, 1})
    assert list(left.present) == [a.token], "it may have left unnoticed"
    assert "after its workers ended" in left.left[1]


def test_site_that_leaves_a_running_job_removes_only_its_ranks() -> None:
    a, b = asked("a"), asked("b", workers=2)
    state, _ = come(sites.Sites(3), a, b)
    state, _ = come(msgspec.structs.replace(state, begun=True), msgspec.structs.replace(b, leave="finished"))
    assert {rank: why.partition(")")[2] for rank, why in state.left.items()} == dict.fromkeys((1, 2), " has left: finished")
    assert [sites.staying(state, now, 10.0) for now in (9.0, 11.0)] == [True, False]
    ranks = range(state.workers)
    assert [sites.staying(state, 9.0, 10.0, ranks[n:]) for n in (0, 1)] == [False, True], "all of whose workers are dead"
    assert come(state, a)[1][0].rank == 0
    assert "has left: finished" in come(state, b)[1][0].error
    assert not sites.staying(come(state, msgspec.structs.replace(a, leave="finished"))[0], 0.0, 10.0)


def test_site_joining_a_running_job_gets_new_ranks_or_a_reason() -> None:
    a, b = asked("a"), asked("b", workers=2)
    state, _ = come(sites.Sites(3), a, b)
    state, _ = come(msgspec.structs.replace(state, begun=True), msgspec.structs.replace(b, leave="finished"))
    shut = sites.AdmissionState("the job runs and has its 3 workers")
    again, wide = asked("b"), asked("b", workers=3)
    full = msgspec.structs.replace(shut, full=True)
    for one, door, pattern in ((again, shut, "3 workers.*E-JOB-CLOSED"), (again, full, "3 workers.*E-JOB-FULL"),
                               (wide, sites.AdmissionState("", 1), r"\b3 workers.*\b2 of the job's 3 .*E-WORKERS")):
        after, reply = sites.register(state, one, 1.0, door)
        assert re.search(pattern, reply.error)
        assert after == state
    state, seat = sites.register(state, again, 1.0, sites.AdmissionState("", 1))
    assert (seat.joins, seat.rank, seat.world) == (True, 3, 2)
    state, seat = sites.register(state, asked("c"), 2.0, sites.AdmissionState("", 2))
    assert (seat.joins, seat.rank, seat.world) == (True, 4, 3)
    assert sites.register(state, a, 2.0, sites.AdmissionState("", 3))[1].rank == 0, "who is here is answered as ever"


def test_site_retries_after_a_temporary_refusal() -> None:
    state, _ = come(sites.Sites(1), asked("a"))
    state = msgspec.structs.replace(state, begun=True)
    for door, waited_s, waits in ((sites.AdmissionState("full", 1, retry_reason="one is silent"), 99.0, True),
                                  (sites.AdmissionState("full", 1, all_present=True), 2.0, True),
                                  (sites.AdmissionState("full", 1, all_present=True), 3.0, False),
                                  (sites.AdmissionState("over"), 0.0, False)):
        after, reply = sites.register(state, msgspec.structs.replace(asked("b"), waited_s=waited_s), 1.0, door, 3.0)
        assert (after, bool(reply.missing), bool(reply.error), reply.rank) == (state, waits, not waits, messages.ANY)


def test_a_home_joins_a_running_job_only_once_its_earlier_process_is_known_to_run_or_not() -> None:
    first, again = (msgspec.structs.replace(asked("a"), certificate="anna") for _ in range(2))
    state, _ = come(sites.Sites(2, min_workers=1), first)
    state = msgspec.structs.replace(sites.assign(state, 99.0), begun=True)
    free = sites.AdmissionState("", 1, all_present=True)
    for waited_s, certificate, joins in ((2.0, "anna", False), (3.0, "anna", True), (2.0, "ben", True)):
        one = msgspec.structs.replace(again, waited_s=waited_s, certificate=certificate)
        after, reply = sites.register(state, one, 1.0, free, 3.0)
        assert (reply.error, bool(reply.missing), reply.joins) == ("", not joins, joins)
        assert (after == state) != joins


@pytest.mark.parametrize(("certificates", "again", "now", "found"), [
    (("anna", "ben"), ("0", "anna"), 5.0, 0), (("anna", "ben"), ("x", "anna"), 5.0, None),  # on another machine
    (("anna", "ben"), ("0", "anna"), 4.9, None),  # a moment ago it answered
    (("anna", "ben"), ("0", "cleo"), 5.0, None), (("", ""), ("0", ""), 5.0, None),  # without keys it is unknown
    (("rack", "rack"), ("1", "rack"), 5.0, 1), (("rack", "rack"), ("x", "rack"), 5.0, None),  # a shared certificate
])
def test_restarted_site_is_recognized_by_its_certificate(
        certificates: tuple[str, str], again: tuple[str, str], now: float, found: int | None) -> None:
    every = [msgspec.structs.replace(asked(str(n)), certificate=of) for n, of in enumerate(certificates)]
    state, _ = come(sites.Sites(2), *every)
    one = msgspec.structs.replace(asked(again[0]), certificate=again[1])
    token = sites.predecessor(state, one, now, 3.0, {0: 2.0, 1: 2.0})
    assert token == ("" if found is None else every[found].token)


TWO_OF_FOUR = sites.Sites(4, min_workers=2, last_call_s=5.0)


def test_job_starts_with_the_minimum_after_a_wait_and_with_the_maximum_at_once() -> None:
    a, b, c, d = (asked(name) for name in "abcd")
    state, (first,) = come(TWO_OF_FOUR, a)
    assert (first.complete, first.missing) == (False, "1 of at least 2 workers is here (a); waiting for 1 more")
    state, (second,) = come(state, b, now=10.0)
    assert (second.complete, second.missing) == (False, "2 of at least 2 workers are here (a, b): starting")
    assert not sites.tick(state, 14.9, 30.0).ranks_assigned
    state, _ = come(state, c, now=14.0)
    assert not sites.tick(state, 18.9, 30.0).ranks_assigned, "each arrival begins the last call again"
    begins = sites.tick(state, 19.0, 30.0)
    assert [(reply.rank, reply.world) for reply in come(begins, a, b, c, now=19.0)[1]] == [(0, 3), (1, 3), (2, 3)]
    _, (full,) = come(state, d, now=14.0)
    assert (full.rank, full.world) == (3, 4)


def test_site_arriving_during_the_start_joins_later_up_to_the_maximum() -> None:
    a, b, c, d, e = (asked(name) for name in "abcde")
    state = sites.tick(come(TWO_OF_FOUR, a, b)[0], 5.0, 30.0)
    after, (early,) = come(state, c, now=6.0)
    assert (after, early.error, early.complete, bool(early.missing)) == (state, "", False, True)
    state = msgspec.structs.replace(state, begun=True)
    for one, size, rank in ((c, 2, 2), (d, 3, 3)):
        state, reply = sites.register(state, one, 7.0, sites.AdmissionState("", size))
        assert (reply.joins, reply.rank, reply.world) == (True, rank, size + 1)
    refused = sites.register(state, e, 8.0, sites.AdmissionState("", 4))[1]
    assert re.search(r"\b0 of the job's 4 .*E-WORKERS", refused.error)


def test_job_may_start_with_another_number_after_a_failed_start() -> None:
    a, b, c = (asked(name) for name in "abc")
    state = sites.tick(come(TWO_OF_FOUR, a, b)[0], 5.0, 30.0)
    state, _ = come(state, msgspec.structs.replace(b, leave="exit code 1"))
    assert "E-RENDEZVOUS-ENDED" in come(state, a)[1][0].error
    state, _ = come(state, asked("a"), asked("b"), c, now=50.0)
    assert sites.tick(state, 55.0, 30.0).workers == 3
    of_two = State(0, 0, min_workers=2, max_workers=4)
    for world in (2, 3):
        first = messages.worker_request("job", 0, world)
        registered, _ = membership.join(of_two, first, 0.0)
        assert registered.workers == world
        of_two = membership.leave(registered, first.token, "exit code 1")
    assert membership.join(of_two, messages.worker_request("job", 0, 5), 0.0)[1].error.endswith("[E-WORKERS]")


def test_elastic_jobs_have_a_default_maximum(opened: Opened) -> None:
    opened.append(coordinator := Coordinator(quick(min_workers=2)))
    assert status_of(coordinator).workers == MAX_WORKERS


def test_store_capacity_grows_with_the_members() -> None:
    service = RendezvousService(64, quick(min_workers=1), dict, RefusalLog())
    few, many = asked("few", workers=4), asked("many", workers=28)
    for home, shares in ((few, {few.token: kv_store.MAX_KEPT_NBYTES}),
                         (many, {few.token: 4 * kv_store.EACH_NBYTES, many.token: 28 * kv_store.EACH_NBYTES})):
        service.register(home)
        asyncio.run(service.handle(messages.KvRequest(home.token)))
        assert service._store._share_nbytes == shares


NAME = "n" * kv_store.MAX_NAME_NBYTES


@pytest.mark.parametrize(("act", "values"), [
    (lambda store: store.put("a", [((NAME + "n", 0), b"")]), "257.*256"),
    (lambda store: store.add("a", (NAME + "n", 0), 1, "once"), "257.*256"),
    (lambda store: store.add("a", ("n", 0), 1, NAME + "n"), "257.*256"),
    (lambda store: store.values([("n", 0), ("n", 0)]), "2 keys.* 1 "),
])
def test_long_names_and_duplicate_keys_are_refused(act: Any, values: str) -> None:
    with pytest.raises(CorruptFrame, match=f"{values}.*E-FRAME"):
        act(kv_store.KvStore({"a": 1}))


def test_stored_bytes_are_charged_to_their_site_and_freed_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MAX_KEPT_NBYTES", 1 << 14)
    monkeypatch.setattr(kv_store, "EACH_NBYTES", 0)
    store = kv_store.KvStore({"a": 1, "b": 1})
    store.put("a", [((NAME, 0), b"12"), ((NAME, 0), b"1")])
    assert store.nbytes == {"a": len(NAME) + 1 + kv_store.KEY_NBYTES}
    store.add("a", ("sum", messages.ANY), 1, "first")
    refused = set[str]()
    for number in range(100):
        try:
            store.add("b", ("sum", messages.ANY), 1, str(number))
            store.put("b", [((f"{number}", 1), bytes(100))])
        except CommError as error:
            refused.add(error.code)
    assert refused == {"E-QUOTA"}
    assert (1 << 13) - 1024 < store.nbytes["b"] <= 1 << 13
    charged = store.nbytes["a"]
    store.add("a", ("sum", messages.ANY), 1, "second")
    assert store.nbytes["a"] == charged + kv_store.KEY_NBYTES + len("second"), "additions of others do not count for a"
    store.drop([*store.rows])
    assert store.nbytes.total() == 0


def test_duplicate_addition_is_recognized_after_any_number_of_others() -> None:
    store = kv_store.KvStore({"a": 1, "b": 1})
    sums = [store.add("a", ("sum", 0), 1, "mine"), *(store.add("b", ("sum", 0), 1, f"{n}") for n in range(2000))]
    assert sums == [*range(1, 2002)]
    assert store.add("a", ("sum", 0), 1, "mine") == 1, "its own sum again"
    assert store.values([("sum", 0)]) == (b"2001",)


def test_values_of_departed_sites_are_kept_up_to_the_total_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MAX_KEPT_NBYTES", 4000)
    monkeypatch.setattr(kv_store, "EACH_NBYTES", 0)
    store = kv_store.KvStore()
    for number in range(20):
        store.allow({"stays": 1, f"{number}": 1})
        store.put(f"{number}", [((f"{number}", number), bytes(1000))])
    store.allow({"stays": 1})
    assert [*store.rows] == [(f"{number}", number) for number in (18, 19)]
    again = kv_store.KvStore({"stays": 1}, store.rows.items())
    assert (again.rows, again.nbytes) == (store.rows, store.nbytes)


def test_additions_of_a_departed_site_are_charged_until_the_key_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MAX_KEPT_NBYTES", 4000)
    monkeypatch.setattr(kv_store, "EACH_NBYTES", 0)
    store = kv_store.KvStore({"stays": 1, "leaves": 1})
    store.add("stays", ("sum", messages.ANY), 1, "first")
    store.add("leaves", ("sum", messages.ANY), 1, "second")
    store.put("leaves", [(("value", 1), bytes(900))])
    monkeypatch.setattr(kv_store, "MAX_KEPT_NBYTES", 1000)
    store.allow({"stays": 1})
    assert [*store.rows] == [("sum", messages.ANY)]
    store.drop([*store.rows])
    assert set(store.nbytes.values()) == {0}


def test_additions_start_from_the_stored_value() -> None:
    store = kv_store.KvStore({"a": 1})
    store.put("a", [(("sum", 0), b"5"), (("text", 0), b"five")])
    assert [store.add("a", ("sum", 0), 2, once) for once in ("a", "a", "b")] == [7, 7, 9]
    assert_refused(outcome(lambda: store.add("a", ("text", 0), 1, "c")), "E-FRAME", "CorruptFrame: ", "text", "not a number")


def test_large_reply_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MAX_FOUND_NBYTES", 10)
    store = kv_store.KvStore({"a": 1})
    store.put("a", [(("a", 0), bytes(6)), (("b", 0), bytes(6))])
    assert store.values([("a", 0)]) == (bytes(6),)
    assert_refused(outcome(lambda: store.values([("a", 0), ("b", 0)])), "E-FRAME", "CorruptFrame: ", "12 bytes", "10 ")


def test_every_collective_equals_that_of_gloo(opened: Opened) -> None:
    def act(group: RelayedGroup, rank: int) -> list[Any]:
        mine, seen = torch.tensor([1.0 + rank, -rank]), []
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            group.allreduce([x := mine.clone()], options(reduceOp=op)).wait()
            seen.append(x.tolist())
        rows = [torch.empty(2) for _ in range(HOMES)]
        group.allgather([rows], [mine]).wait()
        flat = torch.empty(2 * HOMES)
        group.all_gather_single(flat, mine).wait()
        assert torch.equal(flat, torch.cat(rows))
        group.broadcast([x := mine.clone()], options(rootRank=2)).wait()
        seen += [x.tolist(), [row.tolist() for row in rows]]
        group.reduce([x := mine.clone()], options(rootRank=1, reduceOp=dist.ReduceOp.SUM)).wait()
        assert x.tolist() == ([6.0, -3.0] if rank == 1 else mine.tolist())
        group.gather([[*rows]] if rank == 0 else [], [2 * mine], options(rootRank=0)).wait()
        assert rank or [row.tolist() for row in rows] == [[2.0, 0.0], [4.0, -2.0], [6.0, -4.0]]
        group.scatter([x := torch.empty(1)], [list(torch.arange(3.0).view(3, 1))] if rank == 0 else [],
                      options(rootRank=0)).wait()
        assert x.item() == rank
        group.barrier().wait()
        return seen

    rows = [[1.0, 0.0], [2.0, -1.0], [3.0, -2.0]]
    expected = [[6.0, -3.0], [2.0, -1.0], [3.0, 0.0], [1.0, -2.0], rows[2], rows]
    assert together(met(opened)[1], act) == [expected] * HOMES


def test_gather_for_another_number_of_workers_is_refused_and_the_group_continues(opened: Opened) -> None:
    """As in a framework that keeps the number from the start of the job."""
    def act(group: RelayedGroup, rank: int) -> tuple[str, float]:
        line = outcome(lambda: group.allgather([[torch.empty(2) for _ in range(HOMES + 1)]], [torch.ones(2)]).wait())
        group.allreduce([x := torch.ones(1)], options(reduceOp=dist.ReduceOp.SUM)).wait()
        return line, x.item()

    for line, total in together(met(opened)[1], act):
        assert_refused(line, "E-COLLECTIVE", f"{HOMES + 1} output tensors", f"{HOMES} workers")
        assert total == HOMES


def test_large_tensors_are_chunked_and_freed_after_delivery(opened: Opened) -> None:
    parts = 5 * PARTS_IN_FLIGHT
    numel = parts * PART_NBYTES // 8 - 3

    def act(group: RelayedGroup, rank: int) -> bool:
        state = torch.arange(numel) if rank == 0 else torch.zeros(numel, dtype=torch.int64)
        group.broadcast([state], options(rootRank=0)).wait()
        for _ in range(2 * PARTS_IN_FLIGHT):  # the next collective releases it
            group.barrier().wait()
        return torch.equal(state, torch.arange(numel))

    desks = met(opened)[1]
    assert together(desks, act) == [True] * HOMES
    kept = opened[0]._rendezvous._store.nbytes.total()
    assert kept < HOMES * 2 * PARTS_IN_FLIGHT * 1024, "a few empty parts"


def test_store_implements_the_torch_interface(opened: Opened) -> None:
    desks = met(opened, 2)[1]
    stores = [WorldStore(desk, 20.0) for desk in desks]
    plain = [dist.PrefixStore("a", store) for store in stores]
    plain[0].set("key", "value")
    assert plain[1].get("key") == b"value"
    assert [plain[0].add("n", 2), plain[1].add("n", 3)] == [2, 5]
    assert [plain[1].check(["key"]), plain[1].check(["key", "other"])] == [True, False]
    assert_refused(outcome(lambda: plain[1].wait(["other"], datetime.timedelta(seconds=0.1))), "E-DEADLINE", "0.1 s", "a/other")
    assert_refused(outcome(lambda: plain[1].delete_key("key")), "E-OWNER", "a/key")
    assert plain[0].delete_key("key")
    assert not plain[1].check(["key"])


def test_silent_site_is_named_and_the_others_do_not_hang(opened: Opened) -> None:
    def act(group: RelayedGroup, rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(RuntimeError) as raised:
            group.barrier().wait()
        with pytest.raises(RuntimeError):  # and nothing that is asked for later is mixed up with it
            group.barrier().wait()
        return str(raised.value)

    told = together(met(opened)[1], act, timeout_s=0.5)
    assert told[0] == told[2]
    assert re.search(r"\b0\.5 s from rank 1\b.*E-DEADLINE", told[0])


def test_ended_coordinator_is_named_before_the_deadline(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_client, "CALL_S", 0.3)
    desk, *_ = met(opened, 1)[1]
    opened[0].close()
    begin = time.monotonic()
    line = outcome(lambda: desk.request(begin + 600.0, want=[("a", 0)]))
    assert_refused(line, "E-PEER-LOST", "PeerLost: ", "coordinator 127.0.0.1:")
    assert time.monotonic() - begin < 20.0


def test_waits_for_a_departed_site_end_immediately(opened: Opened) -> None:
    desks = met(opened, 2)[1]
    begin = time.monotonic()
    heard: list[str] = []

    def wait() -> None:
        try:
            desks[0].request(time.monotonic() + 60.0, want=[("never", 1)])
        except CommError as error:
            heard.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    leave(opened, desks[1], "exit code 1")
    waiting.join(20.0)
    assert re.search(": exit code 1;.*E-RENDEZVOUS-ENDED", heard[0])
    assert time.monotonic() - begin < 20.0


def test_unreachable_coordinator_and_missing_sites_are_one_line(opened: Opened) -> None:
    said: list[str] = []
    line = outcome(lambda: SiteLease("127.0.0.1:9", quick(join_deadline_s=0.3), asked("a"), said.append).register_and_wait(5.0))
    assert_refused(line, "E-DEADLINE", "DeadlineExceeded: ", "127.0.0.1:9", "0.3 s")
    assert said == ["waiting for the coordinator at 127.0.0.1:9 to answer, 0 of 0.3 s"]
    coordinator = opened.add(Coordinator(quick(token="secret-of-the-job"), workers=2))
    line = outcome(lambda: SiteLease(coordinator.address, quick(token="another-secret"), asked("a"),
                                     said.append).register_and_wait(5.0))
    assert_refused(line, "E-SECRET")
    alone = SiteLease(coordinator.address, quick(token="secret-of-the-job"), asked("a"), said.append)
    line = outcome(lambda: alone.register_and_wait(0.1))
    assert_refused(line, "E-DEADLINE", "DeadlineExceeded: ", "1 of 2 workers ", "(a) ", "0.1 s", "--wait")
    alone.close("it gave up")


def test_site_of_another_version_is_refused_before_its_script_starts(opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick(), workers=1))
    another = msgspec.structs.replace(asked("a"), version="0.0")
    with pytest.raises(Refused, match=r"home a \(pid \d+\): .*0\.0\b.*E-VERSION"):
        SiteLease(coordinator.address, quick(), another, lambda _: None).register_and_wait(5.0)


def test_mismatched_keys_are_one_line(
    opened: Opened, folders: Folders, capfd: pytest.CaptureFixture[str],
) -> None:
    coordinator = opened.add(Coordinator(quick(keys=str(folders.server)), workers=1))
    for keys, code in ((folders.foreign, "E-CERTIFICATE-CA"), (folders.revoked, "E-CERTIFICATE-REVOKED"), ("", "E-TLS")):
        held = quick(keys=str(keys)) if keys else quick(token="secret-of-another")
        refused = SiteLease(coordinator.address, held, asked("a"), lambda _: None)
        with pytest.raises(Refused, match=code):
            refused.register_and_wait(5.0)
        refused.close("it was refused")
    assert "ssl" not in capfd.readouterr().err, "gRPC writes of TLS what no user can read"
    good = SiteLease(coordinator.address, quick(keys=str(folders.dials)), asked("a"), lambda _: None)
    assert good.register_and_wait(5.0).rank == 0
    good.close("the test is over")


def test_worker_started_without_join_gets_a_hint(opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick(), workers=3))
    line = outcome(lambda: client.join(coordinator.address, messages.worker_request("job", 0, 1), quick(), lambda _: None))
    assert_refused(line, "E-WORKERS", "1 workers", "3: ", "`commlayer join`")


def test_sites_end_immediately_after_a_coordinator_restart() -> None:
    coordinator = Coordinator(quick(), workers=1)
    config = quick(port=int(coordinator.address.rpartition(":")[2]))
    attendance = SiteLease(coordinator.address, config, asked("a"), lambda _: None)
    desk = KvClient(coordinator.address, config, attendance.request.token)
    try:
        attendance.register_and_wait(10.0)
        desk.request(time.monotonic() + 10.0, put=[(("key", messages.ANY), b"value")])
        coordinator.close()
        coordinator = Coordinator(config, workers=1)
        assert attendance.ended.wait(20.0)
        assert attendance.why == sites.RESTARTED
        line = outcome(lambda: desk.request(time.monotonic() + 10.0, want=[("key", messages.ANY)]))
        assert_refused(line, "E-RENDEZVOUS-ENDED")
    finally:
        desk.close()
        attendance.close("done")
        coordinator.close()


@pytest.mark.parametrize("begins", [False, True])
def test_leave_reply_contains_whether_the_job_had_started(opened: Opened, begins: bool) -> None:
    opened.append(coordinator := Coordinator(quick(min_workers=1), workers=1))
    lease = SiteLease(coordinator.address, quick(), asked("a"), lambda _: None)
    lease.register_and_wait(WAIT_S)
    if begins:
        joined(opened, coordinator, 1)
    lease.close("it breaks off")
    assert lease.begun is begins


PART = bytes(PART_NBYTES)


def status_of(coordinator: Coordinator) -> messages.StatusReply:
    """The status that the doctor reads."""
    link = CoordinatorChannel(coordinator.address, quick().token, None)
    try:
        return link.call("Status", messages.StatusRequest(), messages.StatusReply, WAIT_S)
    finally:
        link.close()


def there(desk: KvClient, *keys: messages.StoreKey) -> list[bool]:
    results = desk.request(time.monotonic() + WAIT_S, want=keys, wait=False).values
    return [value is not None for value in results]


def test_wait_error_names_the_departed_site_and_not_the_coordinator(opened: Opened) -> None:
    coordinator, desks = met(opened, 3, min_workers=2)
    members = joined(opened, coordinator, 3)
    members[2].leave("it breaks off")
    with pytest.raises(PeerLost, match="it breaks off.*E-PEER-LOST") as one:
        desks[0].request(time.monotonic() + WAIT_S, want=[("joining2/window0", 2)])
    assert one.value.peer == "worker 2"
    with pytest.raises(CommError, match="worker 2: .*it breaks off.*E-PEER-LOST") as another:
        desks[2].request(time.monotonic() + WAIT_S, want=[("joining2/window0", 0)])
    assert another.value.peer == f"coordinator {coordinator.address}", "its own row is there"


def test_workers_of_a_departed_site_leave_with_it(opened: Opened) -> None:
    """Although nobody reports their end: a job scheduler kills all processes of a machine at once."""
    coordinator, desks = met(opened, 3, min_workers=2, dead_after_s=WAIT_S)
    members = joined(opened, coordinator, 3)
    leave(opened, desks[2], "this home was interrupted")
    until(lambda: members[0].newest.generation > 1, "a newer epoch")
    assert [m.rank for m in members[0].newest.members] == [0, 1]


def test_workers_of_a_site_that_finishes_leave_by_themselves(opened: Opened) -> None:
    """Their own reports may come later, for example while a coordinator starts again."""
    coordinator, desks = met(opened, 3, min_workers=2, dead_after_s=WAIT_S)
    members = joined(opened, coordinator, 3)
    for desk in desks:
        leave(opened, desk, messages.FINISHED)
    assert not coordinator.over.is_set()
    for member in members:
        member.leave()
    assert coordinator.over.wait(WAIT_S)
    assert coordinator.failure == ""


@pytest.mark.parametrize("is_complete", [False, True])
def test_all_or_none_pass_a_barrier_that_a_lost_member_has_called(opened: Opened, *, is_complete: bool) -> None:
    coordinator, desks = met(opened, 3, min_workers=2)
    members, keys = joined(opened, coordinator, 3), [("barrier", rank) for rank in range(3)]

    def call(rank: int, wait_s: float = 0.0) -> tuple[bytes | None, ...]:
        """That rank's call of the barrier, or one part of its wait."""
        return desks[rank].request(time.monotonic() + wait_s, put=[(keys[rank], PART)], want=keys).values

    assert call(2) == (None, None, PART)
    assert call(0) == (PART, None, PART)
    if is_complete:
        assert call(1) == (PART,) * 3
    members[2].leave("it breaks off")
    for rank in (0, 1, 0):
        if is_complete:
            assert call(rank) == (PART,) * 3
        else:
            with pytest.raises(PeerLost, match="it breaks off.*E-PEER-LOST"):
                call(rank, WAIT_S)


def test_finished_site_is_reported_as_finished(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    """At the end of a job one site is always the first to leave: no failure."""
    coordinator, _ = met(opened, 3, min_workers=1)
    with caplog.at_level(logging.INFO, "commlayer"):
        members = joined(opened, coordinator, 3)
        members[1].leave()
        members[2].leave("it breaks off")
    assert [line for r in caplog.records if (line := r.getMessage()).startswith("continuing")] == [
        "continuing with 2 workers; left: worker 1 (finished)", "continuing with 1 workers; left: worker 2"]


def test_values_of_an_epoch_are_kept_until_all_members_entered_the_next(opened: Opened) -> None:
    coordinator, desks = met(opened, 3, min_workers=2)
    members = joined(opened, coordinator, 3)
    soon = time.monotonic() + WAIT_S
    for rank, desk in enumerate(desks):
        desk.request(soon, put=[((f"of {rank}", messages.ANY), PART)], add=(("count", messages.ANY), 1))
    desks[2].request(soon, put=[(("part of 2", messages.ANY), PART)])
    members[2].leave("it breaks off")
    stay, keys = members[:2], [(name, messages.ANY) for name in ("of 0", "of 2", "count", "part of 2")]
    until(lambda: all(member.newest.generation == 2 for member in stay), "the next epoch")
    write_in_epoch(opened, coordinator, desks[0], 2, ("epoch2/group/0", 0))
    stay[0].switch(stay[0].newest)
    await_heartbeats(coordinator)
    assert there(desks[0], *keys) == [True] * 4, "one has not switched, and may ask for them"
    stay[1].switch(stay[1].newest)
    until(lambda: there(desks[0], *keys) == [False] * 4, "it is dropped")
    assert there(desks[1], ("epoch2/group/0", 0)) == [True]
    assert store_of(coordinator).nbytes.total() < 2 * PART_NBYTES


def write_in_epoch(opened: Opened, coordinator: Coordinator, desk: KvClient, generation: int, key: messages.StoreKey) -> None:
    """The site of that client writes the key, as a member of the epoch with this generation."""
    soon = time.monotonic() + WAIT_S
    desk.request(soon, put=[(("its own", messages.ANY), b"")])
    token = store_of(coordinator).owner(("its own", messages.ANY))
    opened.add(KvClient(coordinator.address, quick(), token, generation)).request(soon, put=[(key, PART)])


def await_heartbeats(coordinator: Coordinator) -> None:
    """Returns when each process has sent two heartbeats."""
    for place in [place for place in coordinator.state.registrations.values() if place.present]:
        for _ in range(2):
            before_s = coordinator.state.registrations[place.join.token].seen_s
            until(functools.partial(heard_since, coordinator, place.join.token, before_s), "a heartbeat")


def heard_since(coordinator: Coordinator, token: str, before_s: float) -> bool:
    return coordinator.state.registrations[token].seen_s > before_s


def test_worker_that_leaves_before_it_takes_part_ends_no_values(opened: Opened) -> None:
    """The others know that it has come and gone, and are still in the epoch before it."""
    coordinator, desks = met(opened, 3, min_workers=2)
    members = joined(opened, coordinator, 3)
    members[2].leave("it breaks off")
    stay = members[:2]
    until(lambda: all(member.newest.generation == 2 for member in stay), "the next epoch")
    for member in stay:
        member.switch(member.newest)
    write_in_epoch(opened, coordinator, desks[0], 2, ("epoch2/group/0", 0))
    request = messages.worker_request("job", 3, 0, elastic=True)
    passing = opened.add(client.join(coordinator.address, request, quick(), Failures()))
    until(lambda: all(member.newest.generation == 3 for member in stay), "a third worker")
    await_heartbeats(coordinator)
    assert epoch_change.settled_generation(coordinator.state) == 0, "it may need values of any epoch"
    passing.leave("it breaks off")
    until(lambda: all(member.newest.generation == 4 for member in stay), "two workers")
    await_heartbeats(coordinator)
    assert there(desks[1], ("epoch2/group/0", 0)) == [True]
    for member in stay:
        member.switch(member.newest)
    until(lambda: there(desks[1], ("epoch2/group/0", 0)) == [False], "it is dropped")


def test_query_for_a_free_place_in_a_running_job(opened: Opened) -> None:
    coordinator, _ = met(opened, 3, min_workers=1)
    assert (status_of(coordinator).free_seats, status_of(coordinator).closed_reason) == (0, ""), "it has not begun"
    members = joined(opened, coordinator, 3)
    lines = status_of(coordinator)
    assert (lines.free_seats, lines.full) == (0, True)
    assert lines.closed_reason.startswith("the job is running with all its 3 workers")
    members[2].leave("it breaks off")
    lines = status_of(coordinator)
    assert (lines.free_seats, lines.full, lines.closed_reason) == (1, False, "")
    for member in members[:2]:
        member.leave()
    assert (status_of(coordinator).free_seats, status_of(coordinator).closed_reason) == (0, "the job is over")


def test_running_job_without_sites_has_no_free_place(opened: Opened) -> None:
    opened.append(coordinator := Coordinator(quick(min_workers=1), workers=2))
    joined(opened, coordinator, 2, elastic=False)
    assert "admits no new members: worker 0, worker 1 cannot" in status_of(coordinator).closed_reason
    assert not status_of(coordinator).full
    opened.append(coordinator := Coordinator(quick(), workers=1))
    joined(opened, coordinator, 1)
    assert "no new members" in status_of(coordinator).closed_reason


def test_server_pause_does_not_count_as_silence_of_sites() -> None:
    now = [0.0]
    service = RendezvousService(2, quick(dead_after_s=10.0, heartbeat_s=1.0), dict, RefusalLog(), clock=lambda: now[0])
    anna, ben = (msgspec.structs.replace(messages.site_request(1, name=name), certificate=name) for name in ("anna", "ben"))
    again = msgspec.structs.replace(messages.site_request(1, name="anna"), certificate="anna")
    for one in (anna, ben):
        service.register(one)
    now[0] = 30.0
    service.replace_restarted_site(again, {}, 30.0)
    service.tick(still_s=30.0)
    service.replace_restarted_site(again, {})
    assert len(service.homes()) == 2
    now[0] = 60.0
    service.replace_restarted_site(again, {})
    assert not service.homes(), "the rendezvous has ended"


LIMIT_S = 300.0


def blamed(state: State, *rows: tuple[int, dict[int, float]], limit_s: float = LIMIT_S, ago_s: dict[int, float] | None = None
           ) -> list[int]:
    meetings = [PendingWait(rank, waited_s, limit_s) for rank, waited_s in rows]
    return sorted(epoch_change.hung_in_store(state, meetings, LIMIT_S, ago_s or {}, PATIENCE_S))


ALL = {0: 400.0, 1: 390.0, 3: 380.0}
SAID = [
    ("no rank waits", [], []),
    ("all others", [(2, ALL)], [2]),
    ("half of all present ranks", [(2, {0: 400.0, 1: 390.0})], [2]),
    ("in several places", [(2, {0: 400.0, 3: 390.0}), (2, ALL)], [2]),
    ("two at once", [(1, {0: 400.0, 3: 390.0}), (2, {0: 400.0, 3: 390.0})], [1, 2]),
    ("one alone", [(2, {0: 900.0})], []),
    ("not half for so long", [(2, {0: 900.0, 1: 290.0, 3: 280.0})], []),
    ("a rank that waits itself", [(2, ALL), (0, {2: 10.0})], []),
    ("a rank that waits for an unknown writer", [(0, {2: 400.0, 3: 390.0}), (1, {2: 400.0, 3: 390.0}), (-1, {0: 400.0})], [1]),
    ("a rank that waits for a hung one", [(2, {0: 400.0, 1: 390.0}), (3, {0: 400.0, 1: 390.0}), (2, {3: 10.0})], [2]),
    ("too few would be left", [(rank, {0: 400.0, 9: 400.0, 8: 400.0}) for rank in (1, 2, 3)], []),
    ("strangers' waiting", [(2, {0: 400.0, 8: 400.0, 9: 400.0})], []),
    ("a stranger", [(9, ALL)], []),
]


@pytest.mark.parametrize(("rows", "results"), [row[1:] for row in SAID], ids=[row[0] for row in SAID])
def test_blame_falls_on_a_member_awaited_by_half_that_waits_for_none(
        rows: list[tuple[int, dict[int, float]]], results: list[int]) -> None:
    assert blamed(several(), *rows) == results


def test_blame_keeps_the_minimum_number_of_members() -> None:
    rows = [(2, {0: 400.0, 1: 390.0}), (3, {0: 100.0, 1: 90.0})]
    assert blamed(several(least=2), *rows) == [2]
    assert blamed(several(least=3), *rows) == []


@pytest.mark.parametrize(("ago_s", "limit_s", "results"), [
    (0.5, LIMIT_S, []), (59.0, LIMIT_S, []), (60.0, LIMIT_S, [2]), (500.0, LIMIT_S, [2])])
def test_member_released_from_a_wait_has_time_to_arrive(ago_s: float, limit_s: float, results: list[int]) -> None:
    """A rank waited for a third rank, which has left."""
    assert blamed(several(), (2, ALL), limit_s=limit_s, ago_s={2: ago_s, 0: 0.0}) == results


def test_group_timeout_extends_the_wait() -> None:
    assert blamed(several(), (2, ALL), limit_s=500.0) == []
    assert blamed(several(), (2, ALL), limit_s=1.0) == [2]
    assert blamed(several(), (2, {0: 200.0, 1: 200.0, 3: 200.0}), limit_s=1.0) == [], "the coordinator's own holds"


@pytest.mark.parametrize("state", [several(least=0), several(unable=3), several(least=4)], ids=["all", "unable", "least"])
def test_fixed_membership_blames_no_member(state: State) -> None:
    assert blamed(state, (2, ALL)) == []


def summing(state: State) -> State:
    place = msgspec.structs.replace(state.registrations["s0"], overdue=Overdue(7))
    return msgspec.structs.replace(state, registrations={**state.registrations, "s0": place})


def test_only_the_sum_counts_while_it_waits() -> None:
    """As long as a rank may still wait in it."""
    assert blamed(summing(several()), (2, {0: 400.0, 1: 390.0})) == []
    assert blamed(several(), (2, {0: 400.0, 1: 390.0})) == [2]


def test_sum_without_waiting_ranks_does_not_count() -> None:
    """Its contributions are of ranks that are in a collective, or dead."""
    assert blamed(summing(several()), (2, ALL)) == [2]
    assert blamed(summing(several()), (2, {0: 400.0, 1: 390.0}), (-1, {3: 5.0})) == [2]
    assert blamed(summing(several()), (2, {0: 400.0, 3: 390.0}), (1, {0: 400.0, 3: 390.0})) == [1, 2]
    state = membership.evict(summing(several(least=1)), ["w0", "w3"], "killed")
    assert blamed(state, (2, {1: 400.0})) == [2]


def test_dead_members_neither_wait_nor_hang() -> None:
    state = membership.evict(several(), ["w0"], "killed")
    assert blamed(state, (2, {0: 400.0, 1: 390.0})) == []
    assert blamed(state, (2, {1: 400.0, 3: 390.0}), (0, {1: 400.0, 3: 390.0})) == [2]


def waiting(desks: Iterable[tuple[Any, int]], name: str, rank: int) -> tuple[list[threading.Thread], list[CommError]]:
    """At these store clients, as those ranks, for a part of that rank's."""
    errors = list[CommError]()

    def one(desk: Any, mine: int) -> None:
        try:
            desk.request(time.monotonic() + WAIT_S, want=[(name, rank)], rank=mine, limit_s=0.1)
        except CommError as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=each) for each in desks]
    for thread in threads:
        thread.start()
    return threads, errors


def test_waiting_members_are_notified_that_the_hung_member_is_dropped(opened: Opened) -> None:
    # A late heartbeat of a busy machine is no death.
    coordinator, desks = met(opened, 3, min_workers=2, deadline_s=0.2, reconnect_s=0.1, dead_after_s=WAIT_S)
    members = joined(opened, coordinator, 3)
    threads, errors = waiting([(desks[0], 0), (desks[1], 1)], "group/0", 2)
    for thread in threads:
        thread.join(WAIT_S)
    assert [type(error) for error in errors] == [PeerLost] * 2
    assert (errors[0].code, errors[0].peer) == ("E-PEER-LOST", "worker 2")
    assert "2 others waited 0.2 s for it" in errors[0].what
    until(lambda: members[0].newest.generation > 1, "a newer epoch")
    assert [m.rank for m in members[0].newest.members] == [0, 1]


def test_fixed_membership_ignores_waits(opened: Opened) -> None:
    coordinator, desks = met(opened, 2)
    assert desks[0].request(time.monotonic() + WAIT_S, want=[("a", 1)], wait=False, rank=0, limit_s=0.1).values == (None,)
    assert rendezvous_of(coordinator).pending_waits() == []


def test_wait_lasts_while_reported_and_until_the_key_exists() -> None:
    now = [0.0]
    service = RendezvousService(2, quick(min_workers=1), dict, RefusalLog(), clock=lambda: now[0])
    anna, ben = (messages.site_request(1, name=name) for name in ("anna", "ben"))
    for one in (anna, ben):
        service.register(one)

    def pending(waited_s: float) -> list[PendingWait]:
        want = (("a", 1), ("b", 1))
        asyncio.run(service.handle(messages.KvRequest(anna.token, want=want, rank=0, limit_s=5.0, waited_s=waited_s)))
        return service.pending_waits()

    assert pending(3.0) == [PendingWait(1, {0: 3.0}, 5.0)] * 2
    now[0] = 4.0
    assert service.pending_waits() == [PendingWait(1, {0: 7.0}, 5.0)] * 2
    asyncio.run(service.handle(messages.KvRequest(ben.token, put=((("a", 1), b"part"),))))
    assert pending(7.0) == [PendingWait(1, {0: 7.0}, 5.0)]
    now[0] = 4.0 + WAIT_EXPIRES_S
    assert service.pending_waits() == []


def test_site_cannot_report_waits_of_another(opened: Opened) -> None:
    coordinator, desks = met(opened, 3, min_workers=1, deadline_s=0.2, reconnect_s=0.1)
    joined(opened, coordinator, 3)
    waiting([(desks[0], 0), (desks[0], 1)], "group/0", 2)
    until(lambda: bool(rendezvous_of(coordinator).pending_waits()), "a rank waits")
    desks[1].request(time.monotonic() + WAIT_S, want=[("group/0", 2)], wait=False, rank=0, limit_s=0.1)  # nor ends its waits
    assert {rank for one in rendezvous_of(coordinator).pending_waits() for rank in one.waited_s} == {0}


def test_arrival_during_the_second_check_is_in_time(opened: Opened) -> None:
    coordinator, desks = met(opened, 3, min_workers=2, deadline_s=0.2, reconnect_s=0.1)
    joined(opened, coordinator, 3)
    coordinator._config = msgspec.structs.replace(coordinator._config, heartbeat_s=WAIT_S)
    threads, errors = waiting([(desks[0], 0), (desks[1], 1)], "group/0", 2)
    until(lambda: bool(hang_suspects(coordinator)), "a rank seems to hang")
    assert list(hang_suspects(coordinator)) == [2]
    desks[2].request(time.monotonic() + WAIT_S, put=[(("group/0", 2), b"part")])
    for thread in threads:
        thread.join(WAIT_S)
    assert (errors, rendezvous_of(coordinator).pending_waits()) == ([], [])
