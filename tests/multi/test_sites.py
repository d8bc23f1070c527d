"""Homes meet at a coordinator and get ranks; what torch's process group does there, over real sockets with homes as threads."""

from __future__ import annotations

import contextlib
import datetime
import re
import threading
import time
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from support.attached import assert_refused, outcome
from support.coordinators import all_opened, quick  # noqa: F401  (a fixture)
from support.keys import Folders, made_folders  # noqa: F401  (a fixture)
from support.site_groups import HOMES, asked, leave, met, options, together

from commlayer.cluster import client, kv_store, messages, site_client, sites
from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.site_client import KvClient, SiteLease
from commlayer.cluster.site_process_group import PART_NBYTES, PARTS_IN_FLIGHT, RelayedGroup, WorldStore
from commlayer.errors import CommError, CorruptFrame, Refused


def come(state: sites.Sites, *all_: messages.Join, now: float = 0.0) -> tuple[sites.Sites, list[messages.JoinReply]]:
    replies = []
    for one in all_:
        state, reply = sites.register(state, one, now)
        replies.append(reply)
    return state, replies


# ---- who gets which ranks


def test_ranks_go_in_order_of_coming_and_wishes_are_kept() -> None:
    a, b, c = asked("a"), asked("b", workers=2), asked("c", place=0)
    state, replies = come(sites.Sites(4), a, b)
    assert [r.rank for r in replies] == [messages.ANY] * 2
    assert replies[1].missing == "3 of 4 workers have joined (a, b with 2)"
    state, _ = come(state, c)
    _, (of_a, of_b, of_c) = come(state, a, b, c)
    assert [(r.node, r.rank, r.world, r.nodes) for r in (of_c, of_a, of_b)] == [(0, 0, 4, 3), (1, 1, 4, 3), (2, 2, 4, 3)]


@pytest.mark.parametrize(("one", "pattern"), [
    (asked("d", workers=3), r"\b3 workers.*\b2 of the job's 3 .*a \(pid.*E-WORKERS"),
    (asked("d", place=1), r"node-rank 1\b.* a \(pid.*E-RANK\]"),
    (asked("d", place=3), r"node-rank 3\b.* 0 to 2 \[E-RANK\]"),
    (msgspec.structs.replace(asked("d"), version="0.0"), r"0\.0\b.*E-VERSION"),
])
def test_who_does_not_fit_is_told_why_and_nothing_changes(one: messages.Join, pattern: str) -> None:
    state, _ = come(sites.Sites(3), asked("a", place=1))
    after, (reply,) = come(state, one)
    assert re.search(pattern, reply.error)
    assert after == state


def test_whoever_comes_late_or_nowhere_is_told_why() -> None:
    assert re.search("--workers N.*E-WORKERS", come(sites.Sites(0), asked("a"))[1][0].error)
    state, _ = come(sites.Sites(1), asked("a"))
    assert re.search(r"\b0 of the job's 1 .*E-WORKERS", come(state, asked("b"))[1][0].error)
    begun = msgspec.structs.replace(state, begun=True)
    assert re.search(r"\b1 workers.*E-JOB-CLOSED", come(begun, asked("b"))[1][0].error)


def test_a_home_that_goes_before_the_job_begins_ends_the_meeting_for_all_and_the_next_one_is_afresh() -> None:
    a, b = asked("a"), asked("b")
    state, _ = come(sites.Sites(2), a, b)
    state, _ = come(state, msgspec.structs.replace(b, leave="exit code 1"))
    _, (told,) = come(state, a)
    assert re.search(r"^home b \(pid .*: exit code 1; .*E-RENDEZVOUS-ENDED", told.error)
    state, _ = come(state, asked("a"), again := asked("b"))
    assert come(state, again)[1][0].rank == 1


def test_silence_is_a_reason_too_but_not_once_the_job_has_begun() -> None:
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


def test_who_leaves_a_running_job_is_gone_with_its_ranks_and_nobody_else_is() -> None:
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


def test_who_comes_to_a_running_job_takes_numbers_that_nobody_had_or_is_told_why_not() -> None:
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


def test_a_home_asks_again_while_what_keeps_it_out_may_pass() -> None:
    state, _ = come(sites.Sites(1), asked("a"))
    state = msgspec.structs.replace(state, begun=True)
    for door, waited_s, waits in ((sites.AdmissionState("full", 1, retry_reason="one is silent"), 99.0, True),
                                  (sites.AdmissionState("full", 1, all_present=True), 2.0, True),
                                  (sites.AdmissionState("full", 1, all_present=True), 3.0, False),
                                  (sites.AdmissionState("over"), 0.0, False)):
        after, reply = sites.register(state, msgspec.structs.replace(asked("b"), waited_s=waited_s), 1.0, door, 3.0)
        assert (after, bool(reply.missing), bool(reply.error), reply.rank) == (state, waits, not waits, messages.ANY)


@pytest.mark.parametrize(("certificates", "again", "now", "found"), [
    (("anna", "ben"), ("0", "anna"), 5.0, 0), (("anna", "ben"), ("x", "anna"), 5.0, None),  # on another machine
    (("anna", "ben"), ("0", "anna"), 4.9, None),  # a moment ago it answered
    (("anna", "ben"), ("0", "cleo"), 5.0, None), (("", ""), ("0", ""), 5.0, None),  # without keys it is unknown
    (("rack", "rack"), ("1", "rack"), 5.0, 1), (("rack", "rack"), ("x", "rack"), 5.0, None),  # a shared certificate
])
def test_a_home_is_known_again_by_its_certificate_if_its_earlier_process_is_silent(
        certificates: tuple[str, str], again: tuple[str, str], now: float, found: int | None) -> None:
    every = [msgspec.structs.replace(asked(str(n)), certificate=of) for n, of in enumerate(certificates)]
    state, _ = come(sites.Sites(2), *every)
    one = msgspec.structs.replace(asked(again[0]), certificate=again[1])
    token = sites.predecessor(state, one, now, 3.0, {0: 2.0, 1: 2.0})
    assert token == ("" if found is None else every[found].token)


# ---- what the store takes

NAME = "n" * kv_store.MAX_NAME_NBYTES


@pytest.mark.parametrize(("act", "values"), [
    (lambda store: store.put([(NAME + "n", b"")], "a"), "257.*256"),
    (lambda store: store.add(NAME + "n", 1, "once", "a"), "257.*256"),
    (lambda store: store.add("n", 1, NAME + "n", "a"), "257.*256"), (lambda store: store.values(["n", "n"]), "2 keys.* 1 "),
])
def test_long_names_and_wishes_for_one_key_twice_are_refused(act: Any, values: str) -> None:
    with pytest.raises(CorruptFrame, match=f"{values}.*E-FRAME"):
        act(kv_store.KvStore())


def test_all_that_the_store_keeps_is_charged_and_dropped_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MAX_KEPT_NBYTES", 1 << 18)
    store = kv_store.KvStore()
    store.put([(NAME, b"12"), (NAME, b"1")], "a")
    assert store.nbytes == len(NAME) + 1 + kv_store.KEY_NBYTES
    for number in range(kv_store.MAX_TOKENS):
        with contextlib.suppress(CorruptFrame):
            store.add("sum", 1, str(number), "a")
    assert (1 << 18) - 1024 < store.nbytes <= 1 << 18
    assert store.add("sum", 1, "0", "a") == int(store.values(["sum"])[0] or b"") > 400, "what was refused is not added"
    store.drop([NAME, "sum"])
    assert store.nbytes == 0


def test_additions_start_from_the_value_that_was_set() -> None:
    store = kv_store.KvStore()
    store.put([("sum", b"5"), ("text", b"five")], "a")
    assert [store.add("sum", 2, once, "a") for once in ("a", "a", "b")] == [7, 7, 9]
    assert_refused(outcome(lambda: store.add("text", 1, "c", "a")), "E-FRAME", "CorruptFrame: ", "text", "not a number")


def test_an_answer_is_refused_before_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MAX_FOUND_NBYTES", 10)
    store = kv_store.KvStore()
    store.put([("a", bytes(6)), ("b", bytes(6))], "a")
    assert store.values(["a"]) == (bytes(6),)
    assert_refused(outcome(lambda: store.values(["a", "b"])), "E-FRAME", "CorruptFrame: ", "12 bytes", "10 ")


# ---- over sockets


def test_every_collective_gives_what_it_gives_in_a_rack(opened: list[Any]) -> None:
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


def test_large_tensors_go_in_parts_and_the_coordinator_forgets_what_all_have(opened: list[Any]) -> None:
    parts = 5 * PARTS_IN_FLIGHT
    numel = parts * PART_NBYTES // 8 - 3

    def act(group: RelayedGroup, rank: int) -> bool:
        state = torch.arange(numel) if rank == 0 else torch.zeros(numel, dtype=torch.int64)
        group.broadcast([state], options(rootRank=0)).wait()
        for _ in range(2 * PARTS_IN_FLIGHT):  # what comes behind lets go of it
            group.barrier().wait()
        return torch.equal(state, torch.arange(numel))

    desks = met(opened)[1]
    assert together(desks, act) == [True] * HOMES
    kept = opened[0]._rendezvous._store.nbytes
    assert kept < HOMES * 2 * PARTS_IN_FLIGHT * 1024, "a few empty parts"


def test_the_store_is_one_for_torch(opened: list[Any]) -> None:
    desks = met(opened, 2)[1]
    stores = [WorldStore(desk, 20.0) for desk in desks]
    plain = [dist.PrefixStore("a", store) for store in stores]
    plain[0].set("key", "value")
    assert plain[1].get("key") == b"value"
    assert [plain[0].add("n", 2), plain[1].add("n", 3)] == [2, 5]
    assert [plain[1].check(["key"]), plain[1].check(["key", "other"])] == [True, False]
    assert_refused(outcome(lambda: plain[1].wait(["other"], datetime.timedelta(seconds=0.1))), "E-DEADLINE", "0.1 s", "a/other")
    assert plain[1].delete_key("key")
    assert not plain[0].check(["key"])


def test_who_says_nothing_is_named_and_the_others_do_not_hang(opened: list[Any]) -> None:
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


def test_a_coordinator_that_has_ended_is_named_before_the_deadline(opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_client, "CALL_S", 0.3)
    desk, *_ = met(opened, 1)[1]
    opened[0].close()
    begin = time.monotonic()
    line = outcome(lambda: desk.request(begin + 600.0, want=[("a", 0)]))
    assert_refused(line, "E-PEER-LOST", "PeerLost: ", "coordinator 127.0.0.1:")
    assert time.monotonic() - begin < 20.0


def test_whoever_waits_for_a_home_that_has_gone_hears_it_at_once(opened: list[Any]) -> None:
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


def test_a_coordinator_that_is_not_there_or_others_that_do_not_come_are_a_line(opened: list[Any]) -> None:
    said: list[str] = []
    line = outcome(lambda: SiteLease("127.0.0.1:9", quick(join_deadline_s=0.3), asked("a"), said.append).meet(5.0))
    assert_refused(line, "E-DEADLINE", "DeadlineExceeded: ", "127.0.0.1:9", "0.3 s")
    assert said == ["waiting up to 0.3 s for the coordinator at 127.0.0.1:9 to answer"]
    coordinator = Coordinator(quick(token="secret-of-the-job"), workers=2)
    opened.append(coordinator)
    line = outcome(lambda: SiteLease(coordinator.address, quick(token="another-secret"), asked("a"), said.append).meet(5.0))
    assert_refused(line, "E-SECRET")
    alone = SiteLease(coordinator.address, quick(token="secret-of-the-job"), asked("a"), said.append)
    line = outcome(lambda: alone.meet(0.1))
    assert_refused(line, "E-DEADLINE", "DeadlineExceeded: ", "1 of 2 workers ", "(a) ", "0.1 s", "--wait")
    alone.close("it gave up")


def test_a_home_of_another_version_is_refused_before_its_script_starts(opened: list[Any]) -> None:
    coordinator = Coordinator(quick(), workers=1)
    opened.append(coordinator)
    another = msgspec.structs.replace(asked("a"), version="0.0")
    with pytest.raises(Refused, match=r"home a \(pid \d+\): .*0\.0\b.*E-VERSION"):
        SiteLease(coordinator.address, quick(), another, lambda _: None).meet(5.0)


def test_keys_that_do_not_fit_are_a_line(
    opened: list[Any], folders: Folders, capfd: pytest.CaptureFixture[str],
) -> None:
    coordinator = Coordinator(quick(keys=str(folders.server)), workers=1)
    opened.append(coordinator)
    for keys, code in ((folders.foreign, "E-CERTIFICATE-CA"), (folders.revoked, "E-CERTIFICATE-REVOKED"), ("", "E-TLS")):
        held = quick(keys=str(keys)) if keys else quick(token="secret-of-another")
        refused = SiteLease(coordinator.address, held, asked("a"), lambda _: None)
        with pytest.raises(Refused, match=code):
            refused.meet(5.0)
        refused.close("it was refused")
    assert "ssl" not in capfd.readouterr().err, "gRPC writes of TLS what no user can read"
    good = SiteLease(coordinator.address, quick(keys=str(folders.dials)), asked("a"), lambda _: None)
    assert good.meet(5.0).rank == 0
    good.close("the test is over")


def test_a_worker_that_dials_by_itself_is_told_of_launch(opened: list[Any]) -> None:
    coordinator = Coordinator(quick(), workers=3)
    opened.append(coordinator)
    line = outcome(lambda: client.join(coordinator.address, messages.worker_request("job", 0, 1), quick(), lambda _: None))
    assert_refused(line, "E-WORKERS", "1 workers", "3: ", "`commlayer join`")


def test_homes_end_at_once_where_their_coordinator_was_restarted() -> None:
    coordinator = Coordinator(quick(), workers=1)
    config = quick(port=int(coordinator.address.rpartition(":")[2]))
    attendance = SiteLease(coordinator.address, config, asked("a"), lambda _: None)
    desk = KvClient(coordinator.address, config, attendance.request.token)
    try:
        attendance.meet(10.0)
        desk.request(time.monotonic() + 10.0, put=[("key", b"value")])
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
