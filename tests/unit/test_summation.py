"""The summation service as a state machine, and as a server over a transport."""

from __future__ import annotations

import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.coordinators import until
from support.loopback import Hub
from support.summation import VALUES, Doubles, ask, hub_of_a_test, next_stalled, push, served, service, value  # noqa: F401  (a fixture)

from commlayer.cluster.servers.bucket_sum import MOST_FOLLOWED, Reply
from commlayer.cluster.servers.server_codecs import CodecOps
from commlayer.cluster.servers.summation import Summation
from commlayer.cluster.servers.summation_server import Stalled
from commlayer.compressors import make_codec
from commlayer.errors import CorruptFrame, InvalidInput, PeerLost, RecordError
from commlayer.records import Bucket, Slice
from commlayer.transport.protocol import SERVER_BASE, Flag, Kind, Message, key


def test_member_that_has_reconnected_gets_its_result_or_is_asked_for_its_contribution() -> None:
    core, ops = service()

    def again(member: int, step: int = 0) -> list[tuple[int, int, int]]:
        return [(r.peer, r.header.kind, r.header.step) for r in core.answer_reconnected(ask(Kind.AGAIN, member, step))]

    assert again(0) == [(0, Kind.AGAIN, 0)]
    for member in (0, 1):
        core.push(push(member, VALUES[member]), 0.0)
        assert again(member) == [], "the result comes later"
    assert again(2) == [(2, Kind.AGAIN, 0)]
    core.push(push(2, VALUES[2]), 0.0)
    assert again(0) == [(0, Kind.RESULT, 0)]
    assert again(0, 1) == [(0, Kind.AGAIN, 1)]
    assert core.answer_reconnected(ask(Kind.AGAIN, 0, 0, generation=0)) == []
    core.remove([2])
    assert again(2) == []
    assert ops.added == VALUES
    with pytest.raises(CorruptFrame):
        core.answer_reconnected(ask(Kind.AGAIN, 0, 0, generation=2))


def test_worker_that_follows_receives_results_and_no_sum_waits_for_it() -> None:
    core, ops = service()
    follower = 9

    def follow(step: int) -> list[tuple[int, int, int]]:
        return [(r.peer, r.header.kind, r.header.step) for r in core.follow(ask(Kind.FOLLOW, follower, step))]

    def exchange(step: int) -> list[tuple[int, int]]:
        replies = [reply for m in range(3) for reply in core.push(push(m, VALUES[m], step=step), 0.0)]
        assert len({bytes(reply.body) for reply in replies}) == 1
        return [(reply.peer, reply.header.kind) for reply in replies]

    members = [(m, Kind.RESULT) for m in range(3)]
    assert [*follow(0), *follow(1)] == []
    assert [exchange(0), exchange(1)] == [[*members, (follower, Kind.FOLLOWED)]] * 2
    assert exchange(2) == members
    assert [*follow(1), *follow(2)] == [(follower, Kind.FOLLOWED, 1), (follower, Kind.FOLLOWED, 2)], "the last two are kept"
    (late,) = core.follow(ask(Kind.FOLLOW, follower, 0))
    assert (late.header.kind, late.header.flags, late.body) == (
        Kind.FOLLOWED, Flag.ABANDON | Flag.LOST, b"this server no longer has the result")
    assert ops.added == VALUES * 3
    assert follow(3) == []
    core.remove([follower])
    assert exchange(3) == members


def test_worker_that_follows_hears_of_another_plan() -> None:
    core, _ = service()
    assert core.follow(ask(Kind.FOLLOW, 9, 0)) == []
    (reply,) = core.end_follows()
    assert (reply.peer, reply.header.flags, reply.header.step) == (9, Flag.ABANDON, 0)
    assert core.end_follows() == []
    (late,) = core.follow(ask(Kind.FOLLOW, 9, 1))
    assert late.body == reply.body, "its request was on its way"
    (early,) = core.follow(ask(Kind.FOLLOW, 9, 0, generation=0))
    assert (early.body, early.header.generation) == (reply.body, 0)


def test_worker_may_not_request_results_without_limit() -> None:
    core, _ = service()
    for step in range(MOST_FOLLOWED):
        assert core.follow(ask(Kind.FOLLOW, 9, step)) == []
    with pytest.raises(CorruptFrame, match=r"worker 9: requests more than 8 .*E-FRAME"):
        core.follow(ask(Kind.FOLLOW, 9, MOST_FOLLOWED))


@pytest.mark.parametrize("lost", [True, False], ids=["journal is damaged", "journal ends earlier"])
def test_worker_that_follows_hears_of_results_that_a_restarted_server_has_lost(lost: bool) -> None:
    core, _ = service()
    if lost:
        core.forget(5)
    else:
        core.cells[5].idle(1)
        core.cells[5].sum.resumed = True
    assert [core.follow(ask(Kind.FOLLOW, 9, step)) for step in (2, 3)] == [[], []]
    replies = [reply for m in range(3) for reply in core.push(push(m, VALUES[m], step=3), 0.0)]
    assert [(r.header.step, r.header.flags) for r in replies if r.peer == 9] == [(2, Flag.ABANDON | Flag.LOST), (3, Flag.NONE)]
    assert core.cells[5].followers == {}
    (late,) = core.follow(ask(Kind.FOLLOW, 9, 1))
    assert late.header.flags == Flag.ABANDON | Flag.LOST


@pytest.mark.parametrize(("means", "words"), [
    (False, "has flag MEAN, .* sum.*E-FRAME"),
    (True, "lacks flag MEAN, .* mean .*E-FRAME"),
])
@pytest.mark.parametrize("liar", range(3))
def test_weights_are_known_to_the_server_and_a_wrong_claim_is_named(means: bool, words: str, liar: int) -> None:
    class Buffers(Doubles):
        def add_weighted(self, payload: memoryview, weight: float, first: bool) -> None:
            self.add(0, payload, [0.0], first)

    ops = Buffers()
    ops.means = means
    core, _ = service(ops=ops)
    right, wrong = (Flag.MEAN, Flag.NONE) if means else (Flag.NONE, Flag.MEAN)
    with pytest.raises(CorruptFrame, match=f"worker {liar}: {words}"):
        core.push(push(liar, VALUES[liar], flags=wrong), 0.0)
    assert ops.added == []
    assert [len(core.push(push(m, VALUES[m], flags=right), 0.0)) for m in range(3)] == [0, 0, 3], "the others continue"
    assert ops.added == VALUES


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_each_contribution_counts_once_in_member_order(senders: list[int]) -> None:
    core, ops = service()
    replies = [core.push(push(sender, VALUES[sender]), 0.0) for sender in senders]
    prefix = next((m for m in range(3) if m not in senders), 3)
    assert ops.added == VALUES[:prefix]
    if prefix == 3:
        last = next(reply for reply in replies if reply)
        assert [r.peer for r in last] == [0, 1, 2]
        header = last[0].header
        assert (header.kind, header.sender, header.weight, header.used) == (Kind.RESULT, SERVER_BASE, 6.0, 0b111)


def test_late_duplicate_gets_the_kept_result_and_old_steps_leave_the_window() -> None:
    core, _ = service()
    for step in range(4):
        for m in range(3):
            core.push(push(m, step + m, step), 0.0)
    again = core.push(push(1, 99.0, 2), 0.0)
    assert [(r.peer, value(r)) for r in again] == [(1, 9.0)]
    with pytest.raises(CorruptFrame, match=r"worker 1: .*round 0 of step 1\b.*round 0 of step 4\b.*E-STEPS-DIFFER"):
        core.push(push(1, 99.0, 1), 0.0)


def test_uncompressed_result_outlasts_the_beginning_of_a_later_sum() -> None:
    """Such a sum is built where its payload will be."""
    bucket = Bucket(5, (Slice(0, 0, 8),), "service", "identity()")
    ops, codec = CodecOps(make_codec(bucket), bucket, "job"), make_codec(bucket)
    core = Summation(0, 1, {5: ops}, {5: (0, 1)})

    def contribute(member: int, step: int) -> list[Reply]:
        out = memoryview(bytearray(ops.bound))
        nbytes = codec.start(np.full(8, 1.0 + member + 2 * step, np.float32), {}, out)
        return core.push(Message(member, push(member, 0.0, step, codec=ops.codec).header, out[:nbytes]), 0.0)

    def total(reply: Reply) -> float:
        out = np.empty(8, np.float32)
        assert codec.decode(reply.body, {}, out)
        return float(out[0])

    def follow(step: int) -> Reply:
        (reply,) = core.follow(ask(Kind.FOLLOW, 9, step))
        return reply

    for step in range(5):
        assert contribute(0, step) == [], "a sum has begun"
        if step:
            assert total(follow(step - 1)) == 3.0 + 4 * (step - 1)
        if step > 1:
            assert follow(step - 2).header.flags & Flag.ABANDON, "its memory is that of the new sum"
        assert [total(reply) for reply in contribute(1, step)] == [3.0 + 4 * step] * 2


@pytest.mark.parametrize(("fields", "words"), [
    ({"bucket": 6}, r"bucket 6\b.*E-FRAME"),
    ({"sender": 2}, r"worker 2\b.*E-FRAME"),
    ({"generation": 2}, r"generation 2\b.*E-FRAME"),
    ({"round": 1}, r"round 1\b.*E-FRAME"),
    ({"parts": 2}, r"part 0 of 2\b.*E-FRAME"),
    ({"codec": 8}, r"codec 8\b.*E-FRAME"),
    ({"weight": float("nan")}, "weight nan.*E-FRAME"),
    ({"weight": -1.0}, "weight -1.*E-FRAME"),
    ({"step": 1}, r"round 0 of step 1\b.*worker 0 .*round 0 of step 0\b.*E-STEPS-DIFFER"),
])
def test_protocol_violations_are_named_and_have_no_effect(fields: dict[str, object], words: str) -> None:
    core, ops = service()
    core.push(push(0, VALUES[0]), 0.0)
    with pytest.raises(CorruptFrame, match=f"worker 1: .*{words}"):
        core.push(push(1, VALUES[1], **fields), 0.0)
    core.push(push(1, VALUES[1]), 0.0)
    replies = core.push(push(2, VALUES[2]), 0.0)
    assert ops.added == VALUES
    assert len(replies) == 3


def test_corrupt_payload_names_its_sender_even_if_found_by_a_later_push() -> None:
    core, ops = service()
    core.push(Message(1, push(1, 0.0).header, memoryview(b"short")), 0.0)
    with pytest.raises(CorruptFrame, match=r"worker 1: 5 bytes\b.*\b8\b.*E-FRAME"):
        core.push(push(0, VALUES[0]), 0.0)
    assert ops.added == [VALUES[0]]
    core.push(push(1, VALUES[1]), 0.0)
    assert len(core.push(push(2, VALUES[2]), 0.0)) == 3


def test_frames_of_an_ended_generation_are_only_counted() -> None:
    """In the new plan the bucket may differ or be absent: a member that has not received the plan yet violates no rule."""
    core, ops = service()
    for number, message in enumerate((push(0, 1.0, generation=0), push(1, 1.0, generation=0, bucket=77, codec=9)), 1):
        assert core.push(message, 0.0) == []
        assert core.fenced == number
    core.undo(ask(Kind.UNDO, 0, 0, b"", generation=0, bucket=77, undone=1))
    assert core.snapshot(ask(Kind.STATE_GET, 0, 0, b"", generation=0, bucket=77)) == []
    assert (core.fenced, ops.added) == (4, [])
    with pytest.raises(CorruptFrame, match=r"worker 1: .*worker 0\b.*E-FRAME"):
        core.push(push(0, 1.0, generation=0)._replace(peer=1), 0.0)


JOINS = 7
"""Number of a worker that joins a job of workers 0 to 2."""


def contributed(core: Summation, *senders: int, step: int = 0, joined: int = 0, r: int = 0) -> list[int]:
    """The receivers of the result, after these contributions."""
    return [reply.peer for sender in senders
            for reply in core.push(push(sender, VALUES[sender % 3], step, r, joined=joined), 0.0)]


def test_worker_that_joins_contributes_to_steps_that_count_it() -> None:
    core, ops = service()
    assert contributed(core, 0) == []
    core.add(1, JOINS)
    assert contributed(core, 1, 2) == [0, 1, 2], "not to a sum in progress"
    with pytest.raises(CorruptFrame, match=f"worker {JOINS}: its sender is not a member of this bucket's sum.*E-FRAME"):
        contributed(core, JOINS, step=1)
    assert contributed(core, 0, 1, 2, step=1) == [0, 1, 2], "nor to a step that does not count it"
    ops.added.clear()
    assert contributed(core, JOINS, 2, 1, 0, step=2, joined=1) == [0, 1, 2, JOINS]
    assert ops.added == [*VALUES, VALUES[JOINS % 3]], "in member order"
    core.add(2, JOINS + 1)
    assert contributed(core, 0, 1, 2, JOINS, JOINS + 1, step=3, joined=2) == [0, 1, 2, JOINS, JOINS + 1]


@pytest.mark.parametrize(("sender", "joined", "words"), [
    (1, 2, "worker 1: counts 2 workers that have joined, but this server knows of 1.*E-FRAME"),
    (JOINS + 1, 1, f"worker {JOINS + 1}: its sender is not a member of this bucket's sum.*E-FRAME"),
])
def test_wrong_number_of_joined_workers_is_refused_without_effect(sender: int, joined: int, words: str) -> None:
    core, _ = service()
    core.add(1, JOINS)
    assert contributed(core, 0, joined=1) == []
    with pytest.raises(CorruptFrame, match=words):
        contributed(core, sender, joined=joined)
    assert contributed(core, 1, 2, JOINS, joined=1) == [0, 1, 2, JOINS]


@pytest.mark.parametrize("wrong", range(3))
@pytest.mark.parametrize("joined", [0, 1])
@pytest.mark.parametrize("order", [(0, 1, JOINS, 2), (JOINS, 2, 1, 0), (1, JOINS, 0, 2)])
def test_member_that_counts_other_workers_than_most_is_named(wrong: int, joined: int, order: tuple[int, ...]) -> None:
    """Whoever sends first, and also if the worker that joins sends too early."""
    core, ops = service()
    core.add(1, JOINS)
    named, found = [], list[Any]()
    for sender in order:
        try:
            found += contributed(core, sender, joined=1 - joined if sender == wrong else 1 if sender == JOINS else joined)
        except CorruptFrame as error:
            found.append(error)
        while found and isinstance(error := found[-1], CorruptFrame):  # the server removes each that it names
            assert f"counts {1 - joined} workers that have joined, but other members of this step count {joined}" in str(error)
            named.append(error.peer)
            found = [reply.peer if isinstance(reply, Reply) else reply for reply in core.remove({int(error.peer.split()[1])})]
    early = [] if joined else [JOINS]
    assert named == [f"worker {peer}" for peer in (wrong, *early)]
    others = [peer for peer in (0, 1, 2, JOINS) if peer not in (wrong, *early)]
    assert found == others
    assert ops.added == [VALUES[peer % 3] for peer in others]


def test_highest_count_of_joined_workers_holds_if_no_count_is_that_of_most() -> None:
    core, _ = service()
    core.remove({2})
    core.add(1, JOINS)
    assert contributed(core, 0) == []
    with pytest.raises(CorruptFrame, match="worker 0: counts 0 workers that have joined, but.* count 1.*E-STEPS-DIFFER"):
        contributed(core, 1, joined=1)
    assert contributed(core, 0, JOINS, joined=1) == [0, 1, JOINS]


def test_workers_join_between_steps_and_not_between_rounds() -> None:
    core, _ = service(rounds=2)
    core.add(1, JOINS)
    assert contributed(core, 0, 1, 2) == [0, 1, 2]
    assert contributed(core, 0, r=1) == []
    with pytest.raises(CorruptFrame, match="worker 1: counts 1 workers that have joined, but.* count 0.*E-STEPS-DIFFER"):
        contributed(core, 1, joined=1, r=1)
    assert contributed(core, 0, 1, 2, r=1) == [0, 1, 2]


@pytest.mark.parametrize(("number", "member"), [(1, JOINS + 1), (3, JOINS + 1)])
def test_worker_joins_under_the_next_number(number: int, member: int) -> None:
    core, _ = service()
    core.add(1, JOINS)
    core.add(1, JOINS)  # another member reports it, too
    with pytest.raises(InvalidInput, match=rf"worker {member} joins as number {number}\b.*E-EPOCH"):
        core.add(number, member)
    assert core.joined == [JOINS]
    assert contributed(core, 0, 1, 2, JOINS, joined=1) == [0, 1, 2, JOINS]


@pytest.mark.parametrize("removed_first", [False, True])
def test_worker_that_leaves_before_its_first_step_is_not_waited_for(*, removed_first: bool) -> None:
    """Servers may receive its addition and its removal in any order."""
    core, _ = service()
    acts = [lambda: core.remove({JOINS}), lambda: core.add(1, JOINS)]
    for act in acts if removed_first else reversed(acts):
        act()
    assert contributed(core, JOINS, joined=1) == []
    assert contributed(core, 0, 1, 2, joined=1) == [0, 1, 2]


@pytest.mark.parametrize("has_sent", [False, True])
def test_sum_closes_without_a_member_that_has_left(*, has_sent: bool) -> None:
    """What it has sent counts. What arrives later from it is ignored."""
    core, ops = service()
    assert contributed(core, 0, 2, step=4) == []
    gone = 2 if has_sent else 1
    closed = [reply.peer for reply in core.remove({gone}) if not isinstance(reply, CorruptFrame)]
    assert closed == ([] if has_sent else [0, 2])
    if has_sent:
        assert contributed(core, 1, step=4) == [0, 1]
    assert ops.added == (VALUES if has_sent else [VALUES[0], VALUES[2]])
    assert core.remove({gone}) == []
    assert contributed(core, gone, step=4) == contributed(core, gone, step=5) == []
    assert core.stalled(99.0) == []


@pytest.mark.parametrize("in_round", [0, 1])
def test_later_rounds_of_a_step_have_the_members_that_are_left(in_round: int) -> None:
    """`in_round`: worker 2 leaves while its contribution to this round is being waited for by the others."""
    core, _ = service(rounds=2)
    if in_round == 1:
        assert contributed(core, 0, 1, 2) == [0, 1, 2]
    assert contributed(core, 0, 1, r=in_round) == []
    assert [reply.peer for reply in core.remove({2}) if not isinstance(reply, CorruptFrame)] == [0, 1]
    step, r = (0, 1) if in_round == 0 else (1, 0)
    assert contributed(core, 0, 1, step=step, r=r) == [0, 1]


def test_contribution_of_a_member_that_is_removed_meanwhile_is_ignored() -> None:
    core, ops = service()
    with ThreadPoolExecutor() as pool:
        with core.pause():
            late, removed = pool.submit(contributed, core, 2), pool.submit(core.remove, {2})
            until(lambda: 2 in core.gone, "the removal")
        assert (late.result(), removed.result()) == ([], [])
    assert contributed(core, 0, 1) == [0, 1]
    assert ops.added == VALUES[:2]


def test_breach_that_a_removal_uncovers_is_named() -> None:
    """A contribution is checked when it is added: here after the removal of the member before."""
    core, ops = service()
    core.push(Message(1, push(1, 0.0).header, memoryview(b"short")), 0.0)
    (breach,) = core.remove({0})
    assert isinstance(breach, CorruptFrame)
    assert (breach.peer, ops.added) == ("worker 1", [])
    assert contributed(core, 2) == []
    assert contributed(core, 1) == [1, 2]


class Kept(Doubles):
    """With a state that can be journaled."""

    def journal_state(self) -> bytes:
        return self.snapshot()

    def restore_from_journal(self, data: bytes, sent: memoryview) -> None:
        self.restore(data)


@pytest.mark.parametrize("rounds", [1, 2])
def test_restarted_server_waits_for_a_worker_that_has_joined(rounds: int) -> None:
    """`rounds`: 2: it was killed between the two rounds of a step, which all members have begun. 1: between two steps."""
    core, _ = service(ops=Kept(rounds))
    entries: dict[int, tuple[bytes, bytes]] = {}
    core.add(1, JOINS)
    core.journal_state(lambda bucket, words, state: entries.update({bucket: (words, state)}))
    assert contributed(core, 0, 1, 2, JOINS, joined=1) == [0, 1, 2, JOINS]
    again, _ = service(ops=Kept(rounds))
    with pytest.raises(RecordError, match="E-JOURNAL"):  # it does not know the member that has joined
        again.restore_from_journal(5, *entries[5])
    again.add(1, JOINS)
    again.restore_from_journal(5, *entries[5])
    step, r = (0, 1) if rounds == 2 else (1, 0)
    assert contributed(again, 0, 1, 2, step=step, r=r, joined=1) == []
    assert contributed(again, JOINS, step=step, r=r, joined=1) == [0, 1, 2, JOINS]


class Means(Doubles):
    in_means = assumes_total = True

    def scale(self, acc: Any, factor: float) -> None:
        acc[0] *= factor


def total_of(core: Summation, step: int, total: float, *weights: float) -> float:
    for m, weight in enumerate(weights):
        replies = core.push(push(m, 1.0, step=step, weight=weight, total=total), 0.0)
    return value(replies[0])


@pytest.mark.parametrize(("corrected", "shares"), [(True, [2 / 3, 1.0, 0.1, 1.5]), (False, [2 / 3, 1.0, 0.1, 10.0])])
def test_sums_are_divided_by_the_true_total_weight(*, corrected: bool, shares: list[float]) -> None:
    """`corrected`: workers keep what the limit of 1.5 leaves out."""
    ops = Means()
    ops.assumes_total = corrected
    core, _ = service(2, ops=ops)
    totals = [(2.0, 1.0, 2.0), (3.0, 2.0, 1.0), (3.0, 10.0, 20.0), (30.0, 1.0, 2.0)]
    got = [total_of(core, step, total, *weights) for step, (total, *weights) in enumerate(totals)]
    assert got == pytest.approx([2.0 * share for share in shares])


@pytest.mark.parametrize("wrong", [0.0, 2.0, 4.0])
def test_member_that_assumes_another_total_weight_is_named(wrong: float) -> None:
    core, ops = service(2, ops=Means())
    total_of(core, 0, 2.0, 1.0, 2.0)
    core.push(push(0, 1.0, step=1, total=3.0), 0.0)
    with pytest.raises(CorruptFrame, match=r"worker 1: .*E-FRAME"):
        core.push(push(1, 1.0, step=1, total=wrong), 0.0)
    assert len(ops.added) == 3


def test_undo_needs_all_members_and_happens_once() -> None:
    core, ops = service(2)
    for m in range(2):
        core.push(push(m, 0.1), 0.0)
    assert ops.residual != 0.0
    for m in range(2):
        core.push(push(m, 2.0, 1, undone=1), 0.0)
    assert (ops.last, ops.residual) == ((4.0, 4.0), 0.0)  # nothing is left of the step before
    core.push(push(0, 1.0, 2, undone=1), 0.0)
    with pytest.raises(CorruptFrame, match="worker 1: applied all .*worker 0 did not.*E-STEPS-DIFFER"):
        core.push(push(1, 1.0, 2), 0.0)


def test_stalled_names_missing_and_waiting_members() -> None:
    core, _ = service()
    core.push(push(2, 1.0), now=10.0)
    core.push(push(0, 1.0), now=11.0)
    assert core.stalled(9.0) == []
    (stall,) = core.stalled(10.0)
    assert (stall.bucket, stall.step, stall.missing, stall.waiting, stall.since) == (5, 0, (1,), (0, 2), 10.0)
    core.push(push(1, 1.0), now=12.0)
    assert core.stalled(99.0) == []


def test_snapshot_and_restore_continue_at_the_saved_step() -> None:
    core, ops = service(1)
    core.push(push(0, 0.1, 6), 0.0)
    (kept,) = core.snapshot(ask(Kind.STATE_GET))
    assert (kept.peer, kept.header.kind, kept.header.sender) == (0, Kind.STATE, SERVER_BASE)
    other, fresh = service(1)
    (ok,) = other.restore(ask(Kind.STATE, 0, 7, bytes(kept.body)))
    assert (ok.peer, ok.header.kind) == (0, Kind.STATE_OK)
    assert fresh.residual == ops.residual != 0.0
    with pytest.raises(CorruptFrame, match=r"round 0 of step 6\b.*round 0 of step 7\b.*E-STEPS-DIFFER"):
        other.push(push(0, 0.1, 6), 0.0)
    assert value(other.push(push(0, 0.1, 7), 0.0)[0]) == value(core.push(push(0, 0.1, 7), 0.0)[0])


@pytest.mark.parametrize("kind", [Kind.STATE, Kind.STATE_GET])
@pytest.mark.parametrize(("fields", "words"), [
    ({"bucket": 6}, r"bucket 6\b.*E-FRAME"),
    ({"sender": 2}, r"worker 2\b.*E-FRAME"),
    ({"generation": 2}, r"generation 2\b.*E-FRAME"),
])
def test_state_requests_and_restores_obey_the_same_rules(kind: Kind, fields: dict[str, object], words: str) -> None:
    core, ops = service()
    do = core.restore if kind == Kind.STATE else core.snapshot
    ops.residual = 3.0
    with pytest.raises(CorruptFrame, match=f"worker 1: .*{words}"):
        do(ask(kind, 1, 4, struct.pack("<d", 1.0), **fields))
    assert do(ask(kind, 1, 4, struct.pack("<d", 1.0), generation=0)) == []
    core.push(push(0, 1.0), 0.0)
    with pytest.raises(CorruptFrame, match=rf"worker 1: sent {kind.name} .*step 0\b.*E-FRAME"):
        do(ask(kind, 1, 4, struct.pack("<d", 1.0), undone=int(kind == Kind.STATE_GET)))
    assert ops.residual == 3.0
    core.push(push(1, 1.0), 0.0)
    assert len(core.push(push(2, 1.0), 0.0)) == 3, "the running sum was not disturbed"


class Strict(Doubles):
    def restore(self, data: bytes | memoryview) -> None:
        raise ValueError("of another plan")


def test_mismatched_state_is_blamed_on_its_sender_without_effect() -> None:
    core, _ = service(1, ops=Strict())
    first = core.push(push(0, 0.1, 3), 0.0)
    with pytest.raises(CorruptFrame, match="worker 0: .*state.*: of another plan.*E-FRAME"):
        core.restore(ask(Kind.STATE, 0, 9, b"?"))
    assert value(core.push(push(0, 5.0, 3), 0.0)[0]) == value(first[0])
    assert len(core.push(push(0, 5.0, 4), 0.0)) == 1


def test_body_longer_than_any_payload_is_not_stored() -> None:
    core, _ = service()
    with pytest.raises(CorruptFrame, match=r"worker 2: sent 9 bytes\b.*\b8\b.*E-FRAME"):
        core.push(Message(2, push(2, 0.0).header, memoryview(bytes(9))), 0.0)
    assert core.stalled(99.0) == []


def test_each_contribution_body_is_released_once_and_duplicates_never() -> None:
    core, _ = service()
    released: list[Message] = []
    sent = [push(1, 1.0), push(1, 1.0), push(0, 1.0), push(2, 1.0), push(2, 1.0)]
    for message in sent:
        core.push(message, 0.0, released.append)
    assert sorted(map(id, released)) == sorted(map(id, (sent[0], *sent[2:4])))


class Broken(Doubles):
    def emit(self, r: int, acc: list[float], out: memoryview) -> int:
        raise MemoryError("no room")


def test_server_failure_is_sent_to_all_members_and_blames_none(
    hub: tuple[Hub, list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("commlayer.cluster.servers.summation_server.FAILURE_NOTICE_S", 0.0)
    members = served(hub, Broken())
    waiting = [m.recv(SERVER_BASE, key(push(0, 0.0).header._replace(kind=Kind.RESULT))) for m in members]
    for m, transport in enumerate(members):
        transport.send(SERVER_BASE, push(m, 1.0).header, push(m, 1.0).body)
    for transport, handle in zip(members, waiting, strict=True):
        assert next_stalled(transport) == Stalled(5, 0, (), failed="failed: MemoryError: no room")
        with pytest.raises(PeerLost, match="server 0: .*E-PEER-LOST"):
            transport.wait(handle, time.monotonic() + 30.0)
    (text,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert text.getMessage() == "server 0: failed: MemoryError: no room (step 0, bucket 5) [E-COMM]"
    assert text.exc_info, "with a traceback, for developers of the server"
    assert "dropped" not in caplog.text


class Picky(Doubles):
    def add(self, r: int, payload: memoryview, acc: list[float], first: bool) -> None:
        raise ValueError("not these bytes")


def test_payload_refused_by_the_codec_is_blamed_on_its_sender(hub: tuple[Hub, list[Any]]) -> None:
    members = served(hub, Picky(), stall_s=0.0)
    members[1].send(SERVER_BASE, push(1, 1.0).header, push(1, 1.0).body)
    assert next_stalled(members[1]).missing == (0, 2)
    members[0].send(SERVER_BASE, push(0, 1.0).header, push(0, 1.0).body)
    while not (text := next_stalled(members[1])).dropped:
        pass
    assert (text.missing, text.dropped, text.failed) == ((0, 2), {0: "not these bytes [E-FRAME]"}, "")


class Noted(Doubles):
    """What was done, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def undo(self, slices: int) -> bool:
        self.done.append(f"undo {slices}")
        return True

    def restore(self, data: bytes | memoryview) -> None:
        self.done.append("restore")


def test_rollback_without_effect_is_not_journaled() -> None:
    """Otherwise each 68-byte request would write a bucket's state to disk."""
    bucket = Bucket(5, (Slice(0, 0, 8), Slice(1, 0, 8)), "service", "error_feedback(int8())")
    ops = CodecOps(make_codec(bucket), bucket, "job")
    core, kept = Summation(0, 1, {5: ops}, {5: (0,)}), list[int]()
    out = memoryview(bytearray(ops.bound))
    codec = make_codec(bucket)
    nbytes = codec.start(np.ones(16, np.float32), codec.init(bucket.spec), out)
    header = push(0, 0.0, weight=1.0, total=1.0, codec=ops.codec).header
    assert len(core.push(Message(0, header, out[:nbytes]), 0.0)) == 1
    core.journal_state(lambda number, *_: kept.append(number))
    kept.clear()
    for undone, times in ((0b01, 1), (0b01, 1), (0, 1), (0b11, 2)):
        core.undo(ask(Kind.UNDO, 0, 0, b"", undone=undone))
        core.snapshot(ask(Kind.STATE_GET, 0, 0, b"", undone=undone))
        assert kept == [5] * times


def test_duplicate_request_is_executed_once_and_answered_twice(hub: tuple[Hub, list[Any]]) -> None:
    ops = Noted()
    member = served(hub, ops, members=1)[0]
    requests = [ask(Kind.UNDO, 0, 0, b"", used=1, undone=3), ask(Kind.STATE, 0, 4, b"state", used=2),
                ask(Kind.STATE_GET, 0, 0, b"", used=3, undone=1)]
    for request in (*requests, *requests):
        member.send(SERVER_BASE, request.header, request.body)
    for kind, step in ((Kind.STATE_OK, 4), (Kind.STATE, 0)) * 2:
        answer = member.recv(SERVER_BASE, key(requests[1].header._replace(kind=kind, step=step)))
        assert member.wait(answer, time.monotonic() + 30.0).header.used in (2, 3)
    assert ops.done == ["undo 3", "restore", "undo 1"]
    member.send(SERVER_BASE, push(0, 1.0, 4).header, push(0, 1.0, 4).body)
    assert member.peers == (SERVER_BASE,), "no member was dropped"
