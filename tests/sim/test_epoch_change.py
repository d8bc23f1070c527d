"""A change of members: which continue, and which waits end."""

from __future__ import annotations

import re
import threading
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from support.coordinators import all_opened  # noqa: F401  (a fixture)
from support.membership import DEAD_AFTER_S, PLAN, elastic, members, worker
from support.site_groups import leave, met, options, together

from commlayer.cluster.calls.messages import FINISHED, Heartbeat, Join, pack
from commlayer.cluster.membership import epoch_change, membership
from commlayer.cluster.membership.coordinator_journal import CoordinatorRecord, without_times
from commlayer.cluster.membership.membership import State
from commlayer.cluster.processes.relayed_group import RelayedGroup
from commlayer.records import group_by_site


def without(state: State, *ranks: int) -> State:
    """Those fall silent."""
    for token, p in state.registrations.items():
        if not (p.join.kind == "worker" and p.rank in ranks):
            state, _ = membership.heartbeat(state, token, DEAD_AFTER_S)
    return epoch_change.next_epoch(membership.tick(state, DEAD_AFTER_S + 1.0, DEAD_AFTER_S))


def test_remaining_members_form_an_epoch_while_they_are_enough() -> None:
    state = without(elastic(), 0)
    assert members(state) == (2, [1, 2, 3])
    state, pulse = membership.heartbeat(state, "w2", 12.0, Heartbeat("w2", generation=1))
    assert pulse.epoch == state.epoch
    assert not pulse.failed, "it is no member any more, so its death is no failure"
    _, pulse = membership.heartbeat(state, "w2", 12.0, Heartbeat("w2", generation=2))
    assert pulse.epoch is None, "said once"
    _, pulse = membership.heartbeat(state, "w2", 12.0, Heartbeat("w2", parent="stopped"))
    assert pulse.epoch is None, "its child does not ask"
    state = epoch_change.next_epoch(membership.leave(state, "w3", "an error"))
    assert members(state) == (3, [1, 2])
    state = epoch_change.next_epoch(membership.leave(state, "w1", FINISHED, 7))
    assert members(state) == (3, [1, 2]), "one is not enough"


def test_generation_counts_admitted_and_removed_members() -> None:
    """It does not depend on how many of them an epoch removes at once."""
    together, apart = without(elastic(), 1, 3), elastic()
    for token in ("w1", "w3"):
        apart = epoch_change.next_epoch(membership.evict(apart, [token], "killed"))
    assert members(together) == members(apart) == (3, [0, 2])
    assert [together.registrations[token].removed_in for token in ("w1", "w3")] == [3, 3]
    for rank in (4, 5):
        together, _ = epoch_change.admit(together, newcomer(rank), 12.0)
    assert members(together) == (5, [0, 2, 4, 5])
    assert members(epoch_change.next_epoch(membership.evict(together, ["w0", "w4"], "killed"))) == (7, [2, 5])


def heard(state: State, *tokens: str, now: float) -> State:
    for token in tokens:
        state, _ = membership.heartbeat(state, token, now)
    return state


def waits(state: State, now: float = 10.0) -> bool:
    """Whether a home that comes is to ask again, where three seconds are silence."""
    return bool(epoch_change.admission(state, now, 3.0, 60.0).retry_reason)


def test_site_waits_at_a_full_job_while_a_worker_is_silent() -> None:
    assert not waits(heard(elastic(2, 1), "w0", "w1", now=9.0))
    assert waits(heard(elastic(2, 1), "w0", now=9.0))
    assert waits(heard(elastic(2, 0), "w0", now=9.0)), "with this one's death the job ends"


def test_a_site_is_admitted_where_one_of_the_remaining_workers_responds() -> None:
    """Otherwise it would have no weights to begin with."""
    left = without(elastic(3, 1), 2)
    assert waits(left, 99.0)
    assert not waits(heard(left, "w0", now=98.0), 99.0)


def test_site_waits_for_the_next_job_only_after_a_failed_one() -> None:
    ends = epoch_change.next_epoch(membership.leave(elastic(2, 2), "w1", "an error"))
    assert (waits(ends), membership.failure(ends)) == (True, "")
    over = membership.leave(ends, "w0", FINISHED)
    assert (waits(over), membership.failure(over)) == (True, "worker 1: left the job: an error")
    finished = membership.leave(membership.leave(elastic(2, 2), "w0", FINISHED), "w1", FINISHED)
    assert (waits(finished), membership.failure(finished)) == (False, "")
    _, pulse = membership.heartbeat(over, "s0", 1.0)
    assert (pulse.job_done, pulse.job_failed) == (True, True)
    without_the_dead = membership.leave(without(elastic(2, 1), 1), "w0", FINISHED)
    assert membership.failure(without_the_dead) == "", "those who were left have finished"


def test_departure_is_repeated_until_the_member_enters_an_epoch_without_it() -> None:
    state = epoch_change.next_epoch(membership.leave(elastic(), "w3", FINISHED, 7))

    def departures(state: State, token: str, **known: int) -> list[str]:
        return [gone.peer for gone in membership.heartbeat(state, token, 1.0, Heartbeat(token, **known))[1].departed]

    for token in ("w0", "w1"):
        assert departures(state, token, generation=2, known_generation=1) == ["worker 3"], "it may still wait for its part"
    state, _ = membership.heartbeat(state, "w0", 1.0, Heartbeat("w0", generation=2, known_generation=2))
    assert departures(state, "w0", generation=2, known_generation=2) == []
    assert departures(state, "w1", generation=2, known_generation=1) == ["worker 3"]
    assert (departures(state, "s0", generation=1), departures(state, "s0", generation=2)) == (["worker 3"], [])


def test_heartbeats_and_journal_do_not_grow_with_past_members() -> None:
    state, sizes = elastic(), list[tuple[int, int]]()
    first = state.registrations["w0"].join
    state = epoch_change.next_epoch(membership.leave(state, "w3", FINISHED, 1))
    for rank in range(4, 4 + 4 * epoch_change.MAX_FORMER):
        request = worker(rank, token=f"w{rank}", world=0, elastic=True, plan=PLAN, must_match=first.must_match)
        state, seat = epoch_change.admit(state, request, 1.0)
        assert seat.epoch is not None, seat.error
        state = epoch_change.next_epoch(membership.leave(state, f"w{rank}", FINISHED, 1))
        newest = members(state)[0]
        for token in ("w0", "w1", "w2"):
            state, pulse = membership.heartbeat(state, token, 1.0,
                                                Heartbeat(token, generation=newest, known_generation=newest,
                                                          active_generation=newest))
        sizes.append((len(pack(pulse)), len(pack(without_times(CoordinatorRecord("", "", state))))))
    assert len(state.registrations) <= 5 + epoch_change.MAX_FORMER
    half = len(sizes) // 2
    assert sizes[-1][0] == sizes[half][0] < 100
    assert sizes[-1][1] < 1.05 * sizes[half][1]
    state, pulse = membership.heartbeat(state, f"w{rank}", 1.0, Heartbeat(f"w{rank}"))
    assert not pulse.unknown_token, "the last of them are known still"


def test_too_few_remaining_members_receive_the_reason_and_the_remedy() -> None:
    state = without(elastic(3, 3), 1)
    assert members(state) == (1, [0, 1, 2])
    state, pulse = membership.heartbeat(state, "w0", 12.0)
    (gone,) = epoch_change.explain_end(state, pulse).failed
    assert gone.peer == "worker 1"
    assert gone.reason.endswith("; 2 workers are left, fewer than min_workers (3): restart all from the last checkpoint")


@pytest.mark.parametrize("state", [elastic(least=0), elastic(unable=3)])
def test_members_are_fixed_unless_min_workers_is_set_and_all_are_elastic(state: State) -> None:
    state = without(state, 0)
    assert members(state) == (1, [0, 1, 2, 3])
    state, pulse = membership.heartbeat(state, "w1", 12.0)
    (gone,) = epoch_change.explain_end(state, pulse).failed
    assert (gone.peer, "min_workers" in gone.reason) == ("worker 0", False)


def ended() -> State:
    state = elastic()
    for rank in range(4):
        state = membership.leave(state, f"w{rank}", FINISHED, 7)
    return state


def newcomer(rank: int, **fields: Any) -> Join:
    return msgspec.structs.replace(worker(rank, world=0, plan=b"", plan_digest=""), elastic=True, **fields)


def in_pairs(state: State) -> State:
    """With two workers in each home."""
    places = {token: msgspec.structs.replace(p, join=msgspec.structs.replace(p.join, node=p.rank // 2, site_world=2))
              if p.join.kind == "worker" else p for token, p in state.registrations.items()}
    assert state.epoch is not None
    pairs = tuple(p.member for p in sorted(places.values(), key=lambda p: p.rank) if p.join.kind == "worker")
    return msgspec.structs.replace(state, registrations=places, epoch=msgspec.structs.replace(state.epoch, members=pairs))


def test_worker_that_is_lost_takes_its_home_along() -> None:
    state = without(in_pairs(elastic()), 1)
    assert members(state) == (3, [2, 3])
    assert re.search(r"^its home \(host1\) has lost worker 1: no heartbeat for 11\.0 s", state.registrations["w0"].dead)
    _, pulse = membership.heartbeat(state, "w0", 12.0)
    assert "has lost worker 1" in pulse.dead, "it is told so"
    state = epoch_change.next_epoch(membership.leave(in_pairs(elastic()), "w2", "an error"))
    assert members(state) == (3, [0, 1])
    assert state.registrations["w3"].dead == "its home (host2) has lost worker 2: left the job: an error"


def test_worker_that_has_finished_does_not_take_its_home_along() -> None:
    state = epoch_change.next_epoch(membership.leave(in_pairs(elastic()), "w1", FINISHED, 7))
    assert members(state) == (2, [0, 2, 3])
    assert state.registrations["w0"].present


def test_workers_of_a_home_enter_together() -> None:
    state = epoch_change.next_epoch(membership.evict(in_pairs(elastic()), ["w0"], "killed"))
    one, other = (newcomer(rank, node=4, site_world=2) for rank in (4, 5))
    state, reply = epoch_change.admit(state, other, 12.0)
    waits = "1 of the 2 workers of this home have joined"
    assert (members(state), reply.epoch, reply.missing) == ((3, [2, 3]), None, waits)
    state, reply = membership.join(state, other, 13.0)
    assert (reply.epoch, reply.missing) == (None, waits), "it asks again"
    state, reply = epoch_change.admit(state, one, 13.0)
    assert (members(state), reply.epoch) == ((5, [2, 3, 4, 5]), state.epoch)
    assert membership.join(state, other, 14.0)[1].epoch == state.epoch
    assert state.epoch is not None
    assert group_by_site(state.epoch.members) == [(2, 3), (4, 5)]


def test_worker_whose_home_is_lost_before_it_enters_is_told_so() -> None:
    state = epoch_change.next_epoch(membership.evict(in_pairs(elastic()), ["w0"], "killed"))
    state = msgspec.structs.replace(state, max_workers=5)
    for rank in (4, 5):
        state, _ = epoch_change.admit(state, newcomer(rank, node=4, site_world=3), 0.0)
    state = epoch_change.next_epoch(membership.leave(state, "w4", "stopped waiting for the others"))
    assert members(state) == (3, [2, 3])
    error = membership.join(state, newcomer(5, node=4, site_world=3), 1.0)[1].error
    assert re.search("its home .* has lost worker 4: left the job: stopped waiting", error)


def test_joining_member_gets_the_last_position_and_an_unused_rank() -> None:
    state = without(elastic(), 0)
    assert epoch_change.admission(state).size == 3
    state, seat = epoch_change.admit(state, newcomer(4), 12.0)
    assert (members(state), seat.epoch, seat.error) == ((3, [1, 2, 3, 4]), state.epoch, "")
    assert "with all its 4 workers" in epoch_change.admit(state, newcomer(5), 12.0)[1].error
    state = epoch_change.next_epoch(membership.leave(state, "w4", "killed, say"))
    assert members(state) == (4, [1, 2, 3])


def test_job_of_two_grows_to_its_maximum() -> None:
    state = msgspec.structs.replace(elastic(2), max_workers=4)
    for rank, size in ((2, 2), (3, 3)):
        assert (epoch_change.admission(state).closed_reason, epoch_change.admission(state).size) == ("", size)
        state, reply = epoch_change.admit(state, newcomer(rank), 12.0)
        assert (reply.error, members(state)) == ("", (rank, list(range(rank + 1))))
    assert epoch_change.admission(state).full
    assert epoch_change.admit(state, newcomer(4), 12.0)[1].error.endswith("[E-JOB-FULL]")


@pytest.mark.parametrize(("state", "join", "line"), [
    (elastic(), newcomer(4), "with all its 4 workers; it admits another when one has left"),
    (elastic(least=0), newcomer(4), "unless it is served with --min-workers"),
    (elastic(least=0), msgspec.structs.replace(newcomer(4), elastic=False), "a running job admits no new members"),
    (elastic(unable=3), newcomer(4), "worker 3 cannot continue after others leave"),
    (ended(), newcomer(4), "the job is over"),
    (without(elastic(), 0), newcomer(0), "admits only processes of"),
    (without(elastic(), 0), newcomer(4, job="another"), "trains a different model than worker"),
    (without(elastic(), 0), newcomer(4, job="another", gradients=7), " (7 trained tensors here, 5 there)"),
    (without(elastic(), 0), newcomer(4, version="0.0"), "runs commlayer 0.0, but the job runs 1.0"),
])
def test_refused_join_has_a_reason_and_no_effect(state: State, join: Join, line: str) -> None:
    taken = epoch_change.admit(state, join, 12.0)
    assert line in taken[1].error
    assert ("--min-workers" in taken[1].error) == ("--min-workers" in line)
    assert taken[0] == state


def test_collectives_of_scripts_continue_without_a_departed_site(opened: list[Any]) -> None:
    """The same for early and late ranks. What a rank sent before it left counts for both."""
    _, desks = met(opened)
    opened[0]._rendezvous.begin()
    gone = threading.Event()

    def act(group: RelayedGroup, rank: int) -> list[Any]:
        group.skip_lost = True
        first = torch.tensor([1.0 + rank])
        group.allreduce([first]).wait()
        if rank == 0:
            leave(opened, desks[0])
            gone.set()
            return []
        gone.wait(20.0)
        total, mean, root = (torch.tensor([1.0 + rank]) for _ in range(3))
        rows, complete = [torch.empty(1) for _ in range(3)], torch.empty(3)
        group.allreduce([total]).wait()
        group.allreduce([mean], options(reduceOp=dist.ReduceOp.AVG)).wait()
        group.broadcast([root], options(rootRank=0)).wait()
        own = torch.tensor([1.0 + rank])
        for work in (lambda: group.allgather([rows], [own]), lambda: group.all_gather_single(complete, own),
                     lambda: group.gather([rows] if rank == 1 else [], [own], options(rootRank=1))):
            with pytest.raises(RuntimeError, match=r"\brank 0\b"):
                work().wait()
        assert [row.item() for row in group.allgather_present(own)] == [2.0, 3.0]
        group.barrier().wait()
        group.allreduce([own]).wait()
        return [first.item(), total.item(), mean.item(), root.item(), own.item()]

    assert together(desks, act)[1:] == [[6.0, 5.0, 2.5, 2.0, 5.0]] * 2
