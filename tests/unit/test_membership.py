"""Membership decisions as functions of simulated time, without clock, threads or sockets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.membership import DEAD_AFTER_S, PLAN, after, beat, elastic, running, server, ticked, worker

from commlayer.cluster.calls.messages import ANY, FINISHED, Heartbeat, Join, hash_plan_bytes
from commlayer.cluster.membership import epoch_change, membership
from commlayer.cluster.membership.membership import State
from commlayer.transport.protocol import SERVER_BASE


def test_first_epoch_starts_when_all_members_are_registered() -> None:
    state, reply = after(State(0, 1), worker(1), server(0, node=1))
    assert (reply.error, reply.epoch, reply.plan) == ("", None, b"")
    state, reply = after(state, worker(0))
    epoch = reply.epoch
    assert epoch is not None
    assert [(m.rank, m.node, m.name, m.pid) for m in epoch.members] == [(0, 0, "host0", 100), (1, 1, "host1", 101)]
    assert [(s.id, s.address, s.node) for s in epoch.servers] == [(0, "127.0.0.1:7000", 1)]
    assert (epoch.generation, epoch.plan, reply.plan) == (1, hash_plan_bytes(PLAN), PLAN)
    assert epoch.gradients == 5
    for early in (worker(1), server(0)):
        assert after(state, early)[1].epoch == epoch, "members that came earlier get it when they ask again"
        assert after(state, early)[1].plan == PLAN


@pytest.mark.parametrize(("servers", "nodes"), [
    ([("host1", ANY), ("elsewhere", ANY), ("elsewhere", ANY), ("farther", ANY)], [1, 2, 2, 3]),
    ([("host0", 1), ("elsewhere", 0)], [1, 0]),
    ([("elsewhere", ANY), ("there", 5)], [6, 5]),
])
def test_node_of_a_server_is_declared_or_shared_with_workers_or_its_own(
    servers: list[tuple[str, int]], nodes: list[int],
) -> None:
    results = [server(number, rank=number, name=name, node=node) for number, (name, node) in enumerate(servers)]
    _, reply = after(State(0, len(results)), *results, worker(0, world=2), worker(1, world=2))
    assert reply.epoch is not None
    assert [s.node for s in reply.epoch.servers] == nodes


@given(st.permutations(range(6)))
def test_epoch_does_not_depend_on_registration_order(order: list[int]) -> None:
    requests = [server(0), server(1, rank=1), *(worker(i, world=4) for i in range(4))]
    requests[0] = server(0, rank=0)
    _, reply = after(State(0, 2), *(requests[i] for i in order))
    assert reply.epoch == running(4, 2).epoch


def test_worker_without_a_rank_gets_the_lowest_free_rank() -> None:
    state, reply = after(State(3, 0), worker(1, world=0), worker(0, token="x", rank=ANY, world=0))
    assert (reply.rank, reply.error) == (0, "")
    state, reply = after(state, worker(0, token="y", rank=ANY, world=0))
    assert reply.rank == 2
    assert reply.epoch is not None


REFUSALS = [
    (State(0, 0), [], worker(0, protocol=9), "E-VERSION", "worker 0 on host0 (pid 100): uses control protocol 9"),
    (State(0, 0), [worker(0)], worker(1, version="2.0"), "E-VERSION", "runs commlayer 2.0, but the job runs 1.0"),
    (State(0, 0), [worker(0)], worker(1, job="jobB"),
     "E-RANKS-DIFFER", "a different model than worker 0 on host0 (pid 100)"),
    *((State(0, 0), [worker(0)], worker(1, **{field: 4}), "E-RANKS-DIFFER", "a different model than worker 0 on host0")
      for field in ("gradients", "tensors", "elements")),
    (State(0, 0), [worker(0)], worker(1, world=3), "E-WORKERS", "expects 3 workers, but the job has 2"),
    (State(4, 0), [], worker(1), "E-WORKERS", "expects 2 workers, but the job has 4"),
    (State(0, 0), [], worker(0, world=0), "E-WORKERS", "commlayer serve --workers N"),
    (State(0, 0), [], worker(2), "E-RANK", "rank 2 is outside 0..1"),
    (State(0, 0), [], worker(-2), "E-RANK", "rank -2 is outside 0..1"),
    (State(0, 0), [worker(1)], worker(1, token="other", name="hostX", pid=7),
     "E-RANK", "worker 1 on hostX (pid 7): rank 1 is taken by host1 (pid 101)"),
    (State(0, 0), [worker(0)], worker(1, plan_digest="else"),
     "E-RANKS-DIFFER", "a different plan than worker 0 on host0 (pid 100)"),
    (State(0, 1), [server(0)], server(1), "E-JOB-FULL", "the job has its 1 servers already"),
    (State(0, 0), [], server(0), "E-JOB-FULL", "the job has its 0 servers already"),
    (State(0, 2), [server(0, rank=1)], server(1, rank=1), "E-RANK", "rank 1 is taken by host0 (pid 200)"),
    (State(2, 1), [worker(0), worker(1)], worker(5, rank=ANY, world=0), "E-JOB-FULL", "the job has its 2 workers already"),
    (running(2, 0), [], worker(1, token="late"), "E-JOB-CLOSED", "the job has begun with 2 workers"),
]


@pytest.mark.parametrize(("state", "first", "request_", "code", "line"), REFUSALS)
def test_refusal_gives_its_reason_and_changes_no_registration(
    state: State, first: list[Join], request_: Join, code: str, line: str,
) -> None:
    state, _ = after(state, *first)
    refused, reply = membership.join(state, request_, 1.0)
    assert line in reply.error
    assert reply.error.endswith(f"[{code}]")
    assert "\n" not in reply.error
    assert not any(report in reply.error for report in ("jobA", hash_plan_bytes(PLAN))), "digests of others stay theirs"
    assert refused.registrations == state.registrations
    assert refused.epoch == state.epoch


def test_waiting_member_receives_missing_members_and_reasons() -> None:
    state, reply = after(State(0, 2), worker(0, world=4), worker(1, world=4))
    assert reply.missing == "2 of 4 workers joined; missing: ranks 2, 3; 0 of 2 servers joined; missing: servers 0, 1"
    state, _ = after(state, server(0), server(1), worker(2, world=4, job="jobB"))
    refused = "2 of 4 workers joined; missing: ranks 2, 3; worker 2 was refused: trains a different model"
    assert membership.missing(state).startswith(refused)
    state, reply = after(state, worker(2, world=4))
    assert reply.missing == "3 of 4 workers joined; missing: rank 3", "a refusal is forgotten once the seat is taken"
    assert after(State(20, 0), worker(3, world=20))[1].missing.endswith("ranks 0, 1, 2, 4, 5, 6, 7, 8 and 11 more")
    assert membership.missing(State(0, 0)) == "0 of ? workers joined"


def test_silence_before_the_first_epoch_frees_the_registration() -> None:
    state, _ = after(State(3, 0), worker(0, world=3))
    state = membership.tick(state, 9.9, DEAD_AFTER_S)
    assert "w0" in state.registrations
    state = membership.tick(state, 10.0, DEAD_AFTER_S)
    assert not state.registrations
    _, reply = after(state, worker(0, world=3, token="restarted"), now=11.0)
    assert (reply.error, reply.rank) == ("", 0)


def test_suspended_coordinator_does_not_count_its_own_pause_as_silence() -> None:
    state, _ = after(State(3, 0), worker(0, world=3))
    assert membership.own_pause_s(state, 100.0) == 0.0
    state = membership.tick(state, 1.0, DEAD_AFTER_S)
    assert [membership.own_pause_s(state, now) for now in (1.3, 41.0)] == [0.0, 40.0]


def test_leaving_before_the_first_epoch_frees_the_registration() -> None:
    state, _ = after(State(0, 0), worker(0))
    assert not membership.leave(state, "w0", "waited in vain").registrations


def test_silence_in_an_epoch_is_a_failure_and_final() -> None:
    state = ticked(running(3), 0.0, 5.0)
    state = beat(state, "w0", "w1", "s0", now=5.0)
    state = ticked(state, 6.0, 9.0)
    assert membership.heartbeat(state, "w0", 9.0)[1].failed == ()
    state = ticked(state, 10.0, 10.0)
    state, pulse = membership.heartbeat(state, "w0", 10.0)
    assert [(gone.peer, gone.reason) for gone in pulse.failed] == [
        ("worker 2", "no heartbeat for 10.0 s from host2 (pid 102): it was killed or stopped, or its network failed")]
    state, own = membership.heartbeat(state, "w2", 10.5)
    assert own.dead == pulse.failed[0].reason, "one that comes back learns that it counts as dead"
    assert membership.heartbeat(ticked(state, 11.0, 12.0), "w1", 12.0)[1].failed == pulse.failed
    assert "no longer in this job" in after(state, worker(2, world=3))[1].error


def test_received_data_count_as_a_heartbeat() -> None:
    """The heartbeats of worker 2 do not pass a link that its gradients fill."""
    state = running(3)
    for now in range(1, 101):
        state = beat(state, "w0", "w1", now=float(now))
        state, _ = membership.heartbeat(state, "s0", float(now), Heartbeat("s0", heard=("worker 2",)))
        state = membership.tick(state, float(now), DEAD_AFTER_S)
    assert not any(place.dead for place in state.registrations.values())
    for now in range(101, 110):
        state = membership.tick(beat(state, "w0", "w1", "s0", now=float(now)), float(now), DEAD_AFTER_S)
    assert state.registrations["w2"].present
    assert membership.tick(state, 110.0, DEAD_AFTER_S).registrations["w2"].dead
    state, _ = membership.heartbeat(running(3), "w0", 9.0, Heartbeat("w0", heard=("worker 2",)))
    assert membership.tick(state, 10.0, DEAD_AFTER_S).registrations["w2"].dead, "only a server sees data"


def test_member_has_time_for_a_heartbeat_after_its_connection_was_reset() -> None:
    state = patient(running(3), 23.0)
    state, _ = membership.heartbeat(state, "s0", 23.5, Heartbeat("s0", missed=("worker 2",)))
    state = membership.tick(state, 24.0, DEAD_AFTER_S, 60.0)
    assert state.registrations["w2"].present
    back = membership.tick(beat(state, "w2", now=25.0), 26.0, DEAD_AFTER_S, 60.0)
    assert back.registrations["w2"].present
    for now in range(24, 35):
        state, _ = membership.heartbeat(state, "s0", float(now), Heartbeat("s0", missed=("worker 2",)))
        state = membership.tick(state, float(now), DEAD_AFTER_S, 60.0)
    assert state.registrations["w2"].dead, "if not, its process has ended"


def patient(state: State, stop: float) -> State:
    for now in range(1, int(stop) + 1):
        state = beat(state, "w0", "w1", "s0", now=float(now))
        state = membership.tick(state, float(now), DEAD_AFTER_S, 60.0)
    return state


def test_silent_member_may_return_within_a_limit() -> None:
    """A router changes its address, or a network drops for a minute: no evidence that the process has ended."""
    state = patient(running(3), 59.0)
    assert not any(place.dead for place in state.registrations.values())
    back = beat(state, "w2", now=59.5)
    assert not any(place.dead for place in patient(back, 60.0).registrations.values())
    assert [p.peer for p in patient(state, 60.0).registrations.values() if p.dead] == ["worker 2"]


@pytest.mark.parametrize(("token", "lines", "at"), [
    ("w2", {"parent": "ended"}, 0.0), ("s0", {"missed": ("worker 2",)}, 10.0), ("w2", {"parent": "stopped"}, 60.0)])
def test_process_state_reported_by_its_machine_decides_the_time_of_death(token: str, lines: dict[str, Any], at: float) -> None:
    """A stopped process may be a laptop that sleeps, so it has the same limit as a disconnected one."""
    state, _ = membership.heartbeat(running(3), token, 0.0, Heartbeat(token, **lines))
    for now in range(61):
        state = membership.tick(beat(state, "w0", "w1", "s0", now=float(now)), float(now), DEAD_AFTER_S, 60.0)
        assert bool(state.registrations["w2"].dead) == (now >= at), now


def test_orderly_leave_is_not_a_failure() -> None:
    state = membership.leave(running(3), "w2", "training finished")
    state, pulse = membership.heartbeat(state, "w0", 1.0)
    assert pulse.failed == ()
    assert [(gone.peer, gone.reason) for gone in pulse.departed] == [("worker 2", "training finished")]
    state = ticked(beat(ticked(state, 1.0, 9.0), "w0", "w1", "s0", now=9.0), 10.0, 15.0)
    assert membership.heartbeat(state, "w0", 15.0)[1].failed == (), "no more heartbeats are expected of it"


def heard(state: State, token: str, now: float) -> list[str]:
    """The members that it is informed of, by the first one's name."""
    pulse = membership.heartbeat(state, token, now)[1]
    return [gone.peer for gone in (*pulse.failed, *pulse.departed)]


WITHOUT_SERVER = "PeerLost: server 1: connection lost, and it could not be reached again"


def test_leave_caused_by_a_peer_is_held_until_the_fate_of_that_peer_is_known() -> None:
    """Otherwise all members that still reach a server would blame the first that lost it."""
    began = ticked(running(3, servers=2), 0.0, 1.0)
    state = membership.leave(beat(began, "w0", "w1", "s0", now=9.5), "w2", WITHOUT_SERVER)
    assert heard(state, "w0", 9.6) == []
    assert heard(beat(state, "s0", now=9.7), "w0", 9.8) == [], "another living member proves nothing"
    stopped, _ = membership.heartbeat(state, "s1", 9.7, Heartbeat("s1", parent="stopped"))
    assert heard(stopped, "w0", 9.8) == [], "nor does its machine"
    dead = ticked(state, 2.0, 10.0)
    assert heard(dead, "w0", 11.1) == ["server 1", "worker 2"]
    lives = beat(state, "s1", now=9.7)
    assert heard(lives, "w0", 9.8) == ["worker 2"], "so it was its own link"
    assert heard(after(state, server(1))[0], "w0", 9.8) == ["worker 2"], "it was started again"
    assert heard(beat(lives, "s1", now=9.9), "s0", 10.0) == ["worker 2"]
    assert heard(membership.leave(state, "s1", "its own error"), "w0", 9.7) == ["server 1", "worker 2"]


@pytest.mark.parametrize("name", ["", " (ben)"])
def test_leave_caused_by_a_departed_peer_waits_for_the_same_verdict(name: str) -> None:
    state = membership.leave(running(3), "w2", "PeerLost: server 0: connection lost")
    state = membership.leave(state, "w1", f"it had an error: worker 2{name}: left the job: PeerLost: server 0: connection lost")
    assert heard(state, "w0", 1.0) == []
    assert heard(beat(state, "s0", now=1.0), "w0", 1.1) == ["worker 1", "worker 2"]


@pytest.mark.parametrize("reason", ["finished", "KeyboardInterrupt", "ValueError: no room", "PeerLost: server 7: no such one",
                                    "PeerLost: worker 2: itself", "PeerLost: coordinator 10.0.0.1:1: no answer"])
def test_leave_without_a_cause_is_announced_immediately(reason: str) -> None:
    assert heard(membership.leave(running(3), "w2", reason), "w0", 0.1) == ["worker 2"]


def test_suspended_coordinator_evicts_no_member() -> None:
    state = ticked(running(3), 0.0, 3.0)
    state = membership.tick(state, 600.0, DEAD_AFTER_S)
    assert not any(place.dead for place in state.registrations.values())
    state = beat(state, "w0", "w1", "s0", now=605.0)
    state = ticked(state, 600.0, 607.0)
    assert [p.peer for p in state.registrations.values() if p.dead] == ["worker 2"], "the 3 s before the stop still count"


def test_job_ends_with_its_last_worker() -> None:
    state = running(2)
    assert not membership.over(State(0, 0))
    assert not membership.over(state)
    state = membership.leave(state, "w0", "finished")
    assert not membership.over(state)
    state = ticked(beat(ticked(state, 0.0, 9.0), "s0", now=9.0), 10.0, 10.0)
    assert membership.over(state), "left or dead, both are gone"
    assert not membership.empty(state)
    assert membership.heartbeat(state, "s0", 10.0)[1].job_done
    assert membership.empty(membership.leave(state, "s0", "finished"))


def test_servers_report_the_end_of_a_job_whose_workers_are_gone() -> None:
    """The coordinator was killed and restarted after all workers had ended. It waits for a worker that may still run."""
    def silent(ended: tuple[str, ...], teller: str = "s0", last_s: float = 0.0) -> State:
        state = running()
        state, _ = membership.heartbeat(state, "w2", last_s)
        state, _ = membership.heartbeat(state, teller, 5.0, Heartbeat(teller, ended=ended))
        return membership.tick(state, 6.0, DEAD_AFTER_S, 60.0, 6.0)

    every = ("worker 0", "worker 1", "worker 2")
    state = silent(every)
    assert membership.over(state)
    assert {p.left for p in state.registrations.values() if p.join.kind == "worker"} == {FINISHED}
    assert membership.heartbeat(state, "s0", 6.0)[1].job_done
    for other in (silent(every[:2]), silent(every, last_s=1.0), silent(every, teller="w0")):
        assert not membership.over(other)
        assert all(p.present for p in other.registrations.values())


def test_world_size_limit() -> None:
    for world in (-1, SERVER_BASE + 1, 1 << 60):
        refusal = after(State(0, 0), worker(0, world=world))[1].error
        assert f"{world} workers, allowed: 1 to {SERVER_BASE}" in refusal
        assert refusal.endswith("[E-WORKERS]")
    _, reply = after(State(0, 0), worker(3, world=SERVER_BASE))
    assert reply.missing == (f"1 of {SERVER_BASE} workers joined; missing: ranks 0, 1, 2, 4, 5, 6, 7, 8 and "
                             f"{SERVER_BASE - 9} more")


@given(st.lists(st.tuples(st.sampled_from(["join", "beat", "leave", "tick"]), st.integers(0, 3), st.floats(0.0, 4.0))))
def test_no_history_gives_a_rank_twice_or_changes_an_epoch(events: list[tuple[str, int, float]]) -> None:
    state, now, epoch = State(3, 1), 0.0, None
    for what, who, later_s in events:
        now += later_s
        request = server(0) if who == 3 else worker(who, world=3)
        if what == "join":
            state, reply = membership.join(state, request, now)
            assert reply.error or reply.rank == (0 if who == 3 else who)
        elif what == "beat":
            state, _ = membership.heartbeat(state, request.token, now)
        elif what == "leave":
            state = membership.leave(state, request.token, "finished")
        else:
            state = membership.tick(state, now, DEAD_AFTER_S)
        seats = [place.peer for place in state.registrations.values()]
        assert len(seats) == len(set(seats))
        assert epoch is None or state.epoch == epoch
        epoch = state.epoch
        assert (epoch is None) == bool(membership.missing(state))


def newcomer(rank: int, node: int, workers: int) -> Join:
    return worker(rank, world=0, plan=b"", plan_digest="", elastic=True, node=node, site_world=workers)


def test_sites_that_enter_at_the_same_time_have_places_of_their_own() -> None:
    state = msgspec.structs.replace(elastic(3), max_workers=7)
    errors = []
    for rank, node in ((3, 3), (5, 5), (7, 7), (4, 3), (6, 5)):
        state, reply = epoch_change.admit(state, newcomer(rank, node, 2), 0.0)
        errors.append(reply.error)
    assert state.epoch is not None
    assert [m.rank for m in state.epoch.members] == [0, 1, 2, 3, 4, 5, 6]
    assert ["E-JOB-FULL" in error for error in errors] == [False, False, True, False, False]
    larger = msgspec.structs.replace(state, max_workers=8)
    assert "E-WORKERS" in epoch_change.admit(larger, newcomer(8, 8, 2), 0.0)[1].error
    assert epoch_change.admission(larger).size == 7
    entering, _ = epoch_change.admit(msgspec.structs.replace(state, max_workers=9), newcomer(8, 8, 2), 0.0)
    assert epoch_change.admission(entering).full
    assert not epoch_change.admission(membership.leave(entering, "w8", "has had enough")).full


def test_worker_learns_whether_it_is_dead_because_its_site_was_silent() -> None:
    for silent in (False, True):
        state = msgspec.structs.replace(elastic(3), max_workers=5)
        for rank in (3, 4):
            state, _ = epoch_change.admit(state, newcomer(rank, 3, 2), 0.0)
        state = beat(state, "w0", "w1", "w2", "w4", *(() if silent else ("w3",)), now=DEAD_AFTER_S)
        state = membership.tick(state, DEAD_AFTER_S + 1.0, DEAD_AFTER_S)
        state = epoch_change.next_epoch(state if silent else membership.evict(state, ["w3"], "was started again"))
        pulses = [membership.heartbeat(state, token, 12.0)[1] for token in ("w0", "w3", "w4")]
        assert [(bool(pulse.dead), pulse.silent) for pulse in pulses] == [(False, False), (True, silent), (True, silent)]


def test_only_members_and_epochs_are_news() -> None:
    state = running(3, 1)
    token = worker(1).token
    heard, _ = membership.heartbeat(state, token, 5.0, Heartbeat(token, missed=("worker 2",), active_generation=1))
    assert heard != state
    assert not membership.has_news(state, heard)
    died, left = membership.evict(state, [token], "is gone"), membership.leave(state, token, FINISHED)
    blamed = membership.leave(state, token, "worker 2: connection lost")
    renewed, _ = membership.join(state, msgspec.structs.replace(worker(1), serial="7"), 5.0)
    for changed in (died, left, blamed, renewed, msgspec.structs.replace(state, epoch=None)):
        assert membership.has_news(state, changed)
    assert membership.has_news(State(0, 1), after(State(0, 1), worker(1))[0])
