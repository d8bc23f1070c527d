"""Simulates membership: workers, a server and a coordinator as state machines in a simulated network.

Workers join, send heartbeats, switch to new epochs, are killed, freeze, hang, join late and finish. By seed, calls and replies
are late or lost; of some workers only data arrives for a while. The coordinator is killed before or after journal writes and
restarted with its journal.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from commlayer.cluster.calls import messages
from commlayer.cluster.calls.messages import FINISHED, Heartbeat, HeartbeatReply, Join, JoinReply, Overdue
from commlayer.cluster.membership import coordinator_journal, epoch_change, membership
from commlayer.cluster.membership.coordinator_journal import CoordinatorRecord
from commlayer.cluster.membership.membership import State
from commlayer.records import Epoch

BEAT_S, TICK_S, DEAD_AFTER_S, PATIENCE_S, ENDED_AFTER_S = 1.0, 0.25, 4.0, 7.0, 3.0
LIMIT_S, JUDGED_S = 3.0, 6.0
"""LIMIT_S: a sum waits this long for a hanging worker before the server reports it. JUDGED_S: after that the others wait this
long for a verdict."""
ASK_S = 0.5
"""A joining process repeats its request after this time."""
CALM_S, END_S, OVER_S = 16.0, 32.0, 46.0
"""After CALM_S there are no more faults, at END_S all workers have finished, and at OVER_S everything has ended."""
PLAN = b"a plan"


class Killed(Exception):
    """The coordinator is killed in the middle of an operation."""


class Process:
    """A worker or the server."""

    def __init__(self, request: Join) -> None:
        self.request = request
        self.rank = request.rank
        self.epoch: Epoch | None = None
        self.known_generation = 0
        self.awake_s = 0.0
        """The process is frozen until then."""
        self.quiet_s = 0.0
        """Until then no heartbeat of the process arrives, only its data."""
        self.hangs_s = math.inf
        """From then on the process only sends heartbeats."""
        self.end = ""
        """Why the process has ended: killed, refused, finished, or an error; empty while it runs."""

    @property
    def peer(self) -> str:
        return f"{self.request.kind} {self.rank}"


class Members:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.workers = self.chance.randint(2, 4)
        self.least = self.chance.choice((0, *range(1, self.workers + 1)))
        self.most = self.workers + self.chance.randint(0, 2) if self.least else 0
        """The largest number of workers, which may be more than the job begins with; 0: as many as it begins with."""
        self.loss, self.lag_s = self.chance.choice((0.0, 0.1, 0.3)), self.chance.choice((0.05, 0.6))
        self.state = self._fresh()
        self.up = True
        """Whether the coordinator runs."""
        self.disk: CoordinatorRecord | None = None
        """The coordinator's journal."""
        self.now, self.counts = 0.0, Counter[str]()
        self.problems: list[str] = []
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._heard: dict[str, float] = {}
        """When the coordinator last heard from each process, since its last start."""
        self._epochs: dict[int, Epoch] = {}
        """The epoch of each generation, as sent to any process."""
        self._dead: set[str] = set()
        self.processes = [self._born(messages.server_request("10.99.0.1:7001", number=0))]
        self.processes += [self._born(self._worker(rank)) for rank in range(self.workers)]
        if self.least:
            for late in range(self.chance.randint(0, 3)):
                self.processes.append(self._born(self._worker(self.workers + late), self.chance.uniform(5.0, CALM_S)))
        self._deal()

    def _fresh(self) -> State:
        """Before any worker has registered. With `most`, the first worker reports the number with which the job begins."""
        return State(0 if self.most else self.workers, 1, min_workers=self.least, max_workers=self.most)

    # ---- events

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), act))

    def _born(self, request: Join, born_s: float = 0.0) -> Process:
        process = Process(msgspec.structs.replace(request, token=f"{self.chance.getrandbits(64):x}"))
        self.at(born_s + self.chance.random(), lambda: self._asks(process))
        return process

    def _worker(self, rank: int) -> Join:
        return messages.worker_request("a job", rank, self.workers if rank < self.workers else 0, plan=PLAN,
                                       elastic=self.least > 0)

    def _deal(self) -> None:
        """Schedules the faults."""
        for process in self.processes[1:]:
            if (dice := self.chance.random()) < 0.3:
                self.at(self.chance.uniform(0.0, CALM_S), lambda p=process: self._kill(p))  # type: ignore[misc]
            elif dice < 0.6:
                self.at(self.chance.uniform(0.0, CALM_S - 12.0), lambda p=process: self._freeze(p))  # type: ignore[misc]
            elif dice < 0.7:
                self.at(self.chance.uniform(5.0, CALM_S - 4.0), lambda p=process: self._hang(p))  # type: ignore[misc]
            elif dice < 0.85:
                self.at(self.chance.uniform(3.0, CALM_S), lambda p=process: self._quieten(p))  # type: ignore[misc]
        for _ in range(self.chance.choice((0, 0, 1, 2))):
            self.at(self.chance.uniform(0.0, CALM_S), self._down)
        for process in self.processes[1:]:
            self.at(self.chance.uniform(END_S - 1.0, END_S), lambda p=process: self._finishes(p))  # type: ignore[misc]
        self.at(TICK_S, self._ticks)

    def _kill(self, process: Process) -> None:
        if not process.end:
            process.end = "killed"
            self.counts["killed"] += 1

    def _freeze(self, process: Process) -> None:
        process.awake_s = self.now + self.chance.uniform(0.5, 12.0)
        self.counts["frozen"] += 1

    def _quieten(self, process: Process) -> None:
        if process.epoch is not None and not process.end:
            process.quiet_s = self.now + self.chance.uniform(DEAD_AFTER_S, 1.5 * PATIENCE_S)
            self.counts["quiet"] += 1

    def _hang(self, process: Process) -> None:
        if process.epoch is not None and not process.end:
            process.hangs_s = self.now
            self.counts["hung"] += 1
            for other in self.processes[1:]:
                if other is not process:
                    self.at(self.now + LIMIT_S + JUDGED_S, lambda p=other: self._expires(p, process))  # type: ignore[misc]

    def _expires(self, process: Process, late: Process) -> None:
        """Ends a process whose step is late by more than its own deadline and that of a verdict, because of a late member."""
        if not process.end and process.epoch is not None and math.isinf(process.hangs_s) and self._of_its(process, late.peer):
            self._leaves(process, f"{late.peer}: sent nothing")

    def _down(self) -> None:
        if self.up:
            self.up = False
            self.counts["coordinators killed"] += 1
            self.at(self.now + self.chance.uniform(0.1, 3.0), self._comes_up)

    def _comes_up(self) -> None:
        self.up = True
        self._heard = {}
        if self.disk is not None:
            self.state = coordinator_journal.resumed_state(self.disk, self.now)
            self._heard = dict.fromkeys(self.state.registrations, self.now)
        else:
            self.state = self._fresh()

    # ---- the coordinator, as in coordinator.py

    def _writes(self, before: State) -> None:
        self.state = epoch_change.next_epoch(self.state)
        epoch = self.state.epoch
        ranks = [] if epoch is None or epoch == before.epoch else [m.rank for m in epoch.members]
        if epoch is not None and (again := [rank for rank in ranks if f"worker {rank}" in self._dead]):
            self._wrong(f"epoch {epoch.generation} has worker {again[0]}, which somebody was told is dead")
        if epoch is None or not membership.has_news(before, self.state):
            return
        dice = self.chance.random() if self.now < CALM_S else 1.0
        if dice >= 0.02:
            self.disk = coordinator_journal.without_times(CoordinatorRecord("", "", self.state))
        if dice < 0.04:
            self._down()
            raise Killed

    def _joined(self, request: Join) -> JoinReply:
        before = self.state
        late = before.epoch is not None and request.token not in before.registrations and request.kind == "worker"
        self.state, seat = (epoch_change.admit if late else membership.join)(before, request, self.now)
        self._heard[request.token] = self.now
        self._writes(before)
        return seat

    def _beaten(self, beat: Heartbeat) -> HeartbeatReply:
        before = self.state
        self._heard |= {beat.token: self.now} | {p.request.token: self.now for p in self.processes if p.peer in beat.heard}
        self.state, pulse = membership.heartbeat(before, beat.token, self.now, beat)
        state, self.state = self.state, epoch_change.record_overdue(self.state, beat.token, beat.overdue)
        for process in self.processes[1:]:
            place = self.state.registrations.get(process.request.token)
            if place is not None and place.dead and state.registrations[process.request.token].present \
                    and math.isinf(process.hangs_s):
                self._wrong(f"{place.peer} has not hung, and is dead: {place.dead}")
        pulse = epoch_change.explain_end(self.state, pulse)
        self._writes(before)
        return pulse

    def _left(self, process: Process, reason: str) -> HeartbeatReply:
        before = self.state
        self.state = membership.leave(before, process.request.token, reason, 0)
        self._writes(before)
        return HeartbeatReply()

    def _ticks(self) -> None:
        self.at(self.now + TICK_S, self._ticks)
        if not self.up:
            return
        before = self.state
        self.state = membership.tick(before, self.now, DEAD_AFTER_S, PATIENCE_S, ENDED_AFTER_S)
        for token, place in self.state.registrations.items():
            if place.dead and not before.registrations[token].dead and self.now - self._heard[token] < DEAD_AFTER_S:
                self._wrong(f"{place.peer} was heard {self.now - self._heard[token]:.2f} s ago and is dead: {place.dead}")
        try:
            self._writes(before)
        except Killed:
            return

    # ---- calls

    def _calls(self, process: Process, act: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Calls the coordinator. Request and reply may be lost; a frozen caller receives the reply when it wakes."""

        def arrives() -> None:
            if not self.up or self._lost() or self.now < process.quiet_s:
                return
            try:
                answer = act()
            except Killed:
                return
            if not self._lost():
                self.at(self.now + self._lag(), lambda: self._hears(process, answer, then))

        self.at(self.now + self._lag(), arrives)

    def _hears(self, process: Process, answer: Any, then: Callable[[Any], None]) -> None:
        if self.now < process.awake_s:
            self.at(process.awake_s, lambda: self._hears(process, answer, then))
        elif not process.end:
            then(answer)

    def _lost(self) -> bool:
        lost = self.now < CALM_S and self.chance.random() < self.loss
        self.counts["lost"] += lost
        return lost

    def _lag(self) -> float:
        return self.chance.uniform(0.0, self.lag_s)

    def _again(self, process: Process, seconds: float, act: Callable[[Process], None]) -> bool:
        """Whether the process can act now; if it has not ended, schedules the next time."""
        if process.end:
            return False
        self.at(max(self.now + seconds, process.awake_s), lambda: act(process))
        return self.now >= process.awake_s

    # ---- processes

    def _asks(self, process: Process) -> None:
        if process.epoch is None and self._again(process, ASK_S, self._asks):
            self._calls(process, lambda: self._joined(process.request), lambda seat: self._seated(process, seat))

    def _seated(self, process: Process, seat: JoinReply) -> None:
        if process.epoch is not None:
            return
        if seat.error:
            process.end = f"refused: {seat.error}"
        elif seat.epoch is not None:
            process.rank = seat.rank
            self._takes(process, seat.epoch)
            self._beats(process)

    def _beats(self, process: Process) -> None:
        if not self._again(process, BEAT_S, self._beats):
            return
        assert process.epoch is not None
        gone = tuple(p.peer for p in self.processes[1:] if p.end)
        serves = process.request.kind == "server"
        sending = tuple(p.peer for p in self.processes[1:]
                        if p.epoch is not None and not p.end and p.awake_s <= self.now < p.hangs_s)
        beat = Heartbeat(process.request.token, generation=process.epoch.generation,
                         known_generation=process.known_generation, active_generation=process.known_generation,
                         missed=gone if serves else (),
                         heard=sending if serves else (), overdue=self._overdue() if serves else None)
        self._calls(process, lambda: self._beaten(beat), lambda pulse: self._pulse(process, pulse))

    def _overdue(self) -> Overdue | None:
        """The server's report on sums that wait for hanging workers, all of one step."""
        hung = [p for p in self.processes[1:] if not p.end and self.now >= p.hangs_s]
        late = tuple(p.rank for p in hung if self.now - p.hangs_s >= LIMIT_S)
        return Overdue(1, late, LIMIT_S) if hung else None

    def _pulse(self, process: Process, pulse: HeartbeatReply) -> None:
        if pulse.epoch is not None:
            self._takes(process, pulse.epoch)
        assert process.epoch is not None
        self._dead |= {gone.peer for gone in pulse.failed}
        serves = process.request.kind == "server"
        if pulse.unknown_token:
            self._wrong(f"the coordinator does not know {process.peer}, whom it has told of epoch {process.epoch.generation}")
        if pulse.dead or pulse.unknown_token:
            process.end = pulse.dead or "nobody knows it"
        elif serves and pulse.job_done:
            process.end = "over"
        elif not serves and (lost := [gone for gone in pulse.failed if self._of_its(process, gone.peer)]):
            self._leaves(process, f"{lost[0].peer}: {lost[0].reason}")
        elif not serves and (left := [g for g in pulse.departed if g.reason != FINISHED and self._of_its(process, g.peer)]):
            self._leaves(process, f"{left[0].peer}: {left[0].reason}")

    def _of_its(self, process: Process, peer: str) -> bool:
        assert process.epoch is not None
        return peer == "server 0" or any(f"worker {m.rank}" == peer for m in process.epoch.members)

    def _takes(self, process: Process, epoch: Epoch) -> None:
        """Switches the process to an epoch."""
        if process.epoch is not None and epoch.generation < process.epoch.generation:
            return  # a late reply
        if (other := self._epochs.setdefault(epoch.generation, epoch)) != epoch:
            self._wrong(f"epoch {epoch.generation} is {_named(other)} to one and {_named(epoch)} to another")
        if epoch.generation > 1 and len(epoch.members) < self.least:
            self._wrong(f"epoch {epoch.generation} has {len(epoch.members)} members, and {self.least} are the least")
        if len(epoch.members) > (self.most or self.workers):
            self._wrong(f"epoch {epoch.generation} has {len(epoch.members)} of at most {self.most or self.workers} members")
        self.counts["grown"] += len(epoch.members) > self.workers
        if len({m.rank for m in epoch.members}) < len(epoch.members):
            self._wrong(f"epoch {epoch.generation} has a rank twice")
        process.epoch = epoch
        self.at(self.now + self.chance.random(),
                lambda: setattr(process, "known_generation", max(process.known_generation, epoch.generation)))

    def _leaves(self, process: Process, reason: str) -> None:
        process.end = reason

        def said(_: Any) -> None: ...

        for _ in range(3):  # a lost leave is sent again
            self._calls(process, lambda: self._left(process, reason), said)

    def _finishes(self, process: Process) -> None:
        if not math.isinf(process.hangs_s):
            self._kill(process)  # a worker that hangs is killed: the others may not notice, if none was left to wait for it
        elif not process.end:
            self._leaves(process, FINISHED)

    # ---- invariants

    def run(self) -> list[str]:
        """Runs the schedule and returns the violations."""
        self._until(END_S - 1.5)
        self._settled()
        self._until(OVER_S)
        began = self.state.epoch is not None
        if began and not membership.over(self.state):
            self._wrong("all have ended, and the coordinator does not hold it to be over")
        server = self.processes[0]
        # If all its calls are lost for long enough, the server is dead like any other process.
        if began and server.end != "over" and not self.state.registrations[server.request.token].dead:
            self._wrong(f"the server has not heard that the job is over: {server.end or 'it beats'}")
        self.counts["epochs"] += len(self._epochs)
        self.counts["begun"] += began
        return self.problems

    def _until(self, seconds: float) -> None:
        while self._events and self._events[0][0] <= seconds and not self.problems:
            self.now, _, act = heapq.heappop(self._events)
            self.counts["events"] += 1
            act()
        self.now = seconds

    def _settled(self) -> None:
        """Long after the last fault, all running workers have one epoch, and none of its members is gone; or all have ended."""
        epoch, present = self.state.epoch, [p for p in self.processes[1:] if not p.end]
        if epoch is None or self.problems:
            return
        if self.state.min_workers and len(present) < self.least and present:
            self._wrong(f"{len(present)} go on, and {self.least} are the least")
        members = {m.rank for m in epoch.members}
        if present and {p.rank for p in present} != members:
            self._wrong(f"{sorted(p.rank for p in present)} are there, and epoch {epoch.generation} is {_named(epoch)}")
        for process in present:
            if process.epoch != epoch:
                self._wrong(f"{process.peer} has not heard of epoch {epoch.generation}")
            place = self.state.registrations.get(process.request.token)
            if place is None:
                self._wrong(f"the coordinator does not know {process.peer}")
            elif place.dead:
                self._wrong(f"{process.peer} is dead and does not know it")

    def _wrong(self, what: str) -> None:
        self.problems.append(f"at {self.now:.2f} s: {what}")


def _named(epoch: Epoch) -> list[int]:
    return [m.rank for m in epoch.members]
