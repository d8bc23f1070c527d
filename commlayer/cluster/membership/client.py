"""This process's membership: its registration at the coordinator, its heartbeats, and the news between two of them."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from commlayer.callbacks import ignore
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.coordinator_channel import CALL_S, MIN_BEAT_S, CoordinatorChannel
from commlayer.cluster.calls.messages import (
    MAX_EVENTS,
    MAX_EVENTS_NBYTES,
    Heartbeat,
    HeartbeatReply,
    Join,
    JoinReply,
    PeerExit,
    WatchRequest,
)
from commlayer.cluster.processes import child_processes, heartbeat_sidecar
from commlayer.config import Config
from commlayer.errors import CommError, DeadlineExceeded, PeerLost, Refused, without_code
from commlayer.observe.event_log import Batch, EventLog
from commlayer.records import Epoch
from commlayer.transport.keys.key_folder import Keys

log = logging.getLogger("commlayer")
ROUND_TRIPS = 16
"""Number of latest heartbeats whose shortest round-trip time is that of the link."""
WATCH_S = 60.0
"""Deadline of a Watch call, after which it is repeated. A Watch call costs the coordinator as much as a heartbeat."""
LAST_EVENTS_S = 1.0
"""Timeout of the call with a leaving process's last events."""
OnSilence = Callable[[float], None]
"""Called after every failed heartbeat once the coordinator has not answered for dead_after_s, with the seconds since its last
answer."""
OnLeft = Callable[[PeerExit], None]
OnEpoch = Callable[[Epoch], None]
"""Function that is called with a newer epoch when the coordinator reports one. Only the members of that epoch continue."""


class HeartbeatReport:
    """The fields that a process adds to its heartbeats. WorkerClient or DataServer sets `fields`, a function that returns
    fields about data connections and sums. The session of a worker sets `events`, its newest events."""

    def __init__(self) -> None:
        self.fields: Callable[[], Mapping[str, Any]] = dict
        self.events = EventLog(most=0)
        self._sent = Batch((), 0)
        """The events of the last heartbeat."""
        self._acknowledged = 0
        """Number of the first event that the coordinator might not have."""
        self._round_trips_s: deque[float] = deque(maxlen=ROUND_TRIPS)

    @property
    def rtt_s(self) -> float:
        """The shortest round-trip time of recent heartbeats; 0: unknown."""
        return min(self._round_trips_s, default=0.0)

    def next(self) -> dict[str, Any]:
        """Returns the fields of the next heartbeat."""
        fields = dict(self.fields())
        self._sent = batch = self.events.since(self._acknowledged, most=MAX_EVENTS, most_nbytes=MAX_EVENTS_NBYTES)
        if batch.lines:
            fields |= {"events": batch.lines, "first_event": batch.cursor - len(batch.lines), "time_s": time.time()}
        return fields

    def record_answer(self, round_trip_s: float) -> None:
        """Called when the coordinator has answered the last heartbeat."""
        self._acknowledged = self._sent.cursor
        self._round_trips_s.append(round_trip_s)

    @property
    def unsent(self) -> bool:
        return bool(self.events.since(self._acknowledged, most=1).lines)


def beat_timeout_s(config: Config) -> float:
    """Returns the timeout of a heartbeat. After an unanswered heartbeat, a second one still fits into dead_after_s. The timeout
    is always long enough for a new connection, because otherwise heartbeats could not begin again after an interruption."""
    return max(MIN_BEAT_S, min(CALL_S, config.dead_after_s / 3))


class Membership:
    """This process's registration in the job.

    `keep`: True: a child process continues the heartbeats while this process's threads wait for the GIL (child_processes.py).
    """

    def __init__(self, link: CoordinatorChannel, request: Join, reply: JoinReply, config: Config,
                 on_failure: Callable[[CommError], None], ended: threading.Event, *, on_silence: OnSilence = ignore,
                 on_left: OnLeft = ignore, keep: bool = False) -> None:
        """The membership threads (heartbeats, Watch calls) call the functions, one at a time. They call `on_failure` at most
        once, with the first peer failure that the coordinator reports."""
        assert reply.epoch is not None
        self.epoch: Epoch = reply.epoch
        """The epoch that this process has switched to."""
        self.active_generation = 1 if reply.epoch.generation == 1 else 0
        """See Heartbeat. A worker that joins a running job takes part after its first `switch`."""
        self.newest: Epoch = reply.epoch
        """The newest epoch that the coordinator has sent; this process may not have switched to it yet."""
        self.on_epoch: OnEpoch = ignore
        self._epoch_arrived = threading.Condition()
        self._answered = 0
        """Number of answered heartbeats."""
        self.plan = reply.plan
        self.rank = reply.rank
        self.name = f"{request.kind} {reply.rank}"
        self.left: dict[str, PeerExit] = {}
        """Peers that left in order, by peer name. An orderly leave is a failure only if another process waits for that peer."""
        self.over = ended
        """Event that is set when every worker has left or died. A server may end then."""
        self.failed = False
        """True: the job ended before all of its last workers had finished."""
        self.remaining: tuple[str, ...] = ()
        """Names of workers that were still in the job when this process left."""
        self._channel, self._token, self._config = link, request.token, config
        self._on_failure, self._on_silence, self._on_left = on_failure, on_silence, on_left
        self.reachable = True
        """Whether the coordinator answered the last heartbeat."""
        self.report = HeartbeatReport()
        self._revision = 0
        """Revision of the last reply."""
        self._closing, self._busy = threading.Event(), threading.RLock()
        """`_busy` is held during a heartbeat and while its reply is processed."""
        self._failed = False
        self._keeper = heartbeat_sidecar.start_sidecar({
            "address": link.address, "secret": link.secret, "keys": str(link.keys.folder) if link.keys else "",
            "token": self._token, "every_s": config.heartbeat_s, "call_s": beat_timeout_s(config)}) if keep else None
        self._threads = [threading.Thread(target=self._beat, name="commlayer-heartbeat", daemon=True),
                         threading.Thread(target=self._watch, name="commlayer-watch", daemon=True)]
        for thread in self._threads:
            thread.start()

    def leave(self, reason: str = messages.FINISHED, exchanges: int = -1) -> bool:
        """Leaves the job, then closes. `exchanges`: number of completed exchanges, -1 if unknown. Returns whether the
        coordinator was reached; an unreachable coordinator is not an error."""
        if self._closing.is_set():
            self.close()
            return False
        self._stop()
        if self.reachable and self.report.unsent:
            with contextlib.suppress(CommError):
                self._send_beat(LAST_EVENTS_S)
        # The coordinator counts a process as dead if its orderly leave is not delivered, so the call is retried.
        patience_s = self._config.dead_after_s if reason == messages.FINISHED and self.reachable else 0.0
        pulse = self._channel.leave(self._token, reason, exchanges, deadline=time.monotonic() + patience_s,
                                    timeout_s=beat_timeout_s(self._config))
        if pulse is not None:
            exits = {g.peer for g in (*pulse.failed, *pulse.departed)} | {self.name}
            self.remaining = tuple(f"worker {m.rank}" for m in self.epoch.members if f"worker {m.rank}" not in exits)
        self.close()
        return pulse is not None

    def close(self) -> None:
        """Stops the heartbeats without leaving, so the coordinator will detect this process as dead. Idempotent."""
        self._stop()
        if self._keeper is not None:
            self._keeper.close()
        self._channel.close()
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join(timeout=2 * beat_timeout_s(self._config))

    def _stop(self) -> None:
        """Stops the heartbeats. A Watch call may wait until the channel is closed."""
        self._closing.set()
        if self._busy.acquire(timeout=2 * beat_timeout_s(self._config)):
            self._busy.release()

    def _send_beat(self, timeout_s: float) -> HeartbeatReply:
        beat = Heartbeat(self._token, generation=self.newest.generation, known_generation=self._known_generation,
                         active_generation=self.active_generation, **self.report.next())
        begin = time.monotonic()
        pulse = self._channel.call("Heartbeat", beat, HeartbeatReply, timeout_s)
        self.report.record_answer(time.monotonic() - begin)
        return pulse

    def _beat(self) -> None:
        known, silent_s, mark, timeout_s = True, 0.0, time.monotonic(), beat_timeout_s(self._config)
        while not self._closing.is_set():
            began = time.monotonic()
            with self._busy:
                if self._closing.is_set():
                    return
                try:
                    pulse = self._send_beat(timeout_s)
                except CommError as error:
                    if self.reachable and not self._failed and not self._closing.is_set():
                        log.warning("%s; training continues, but while the coordinator does not answer, a peer that dies is "
                                    "detected only when it stops responding", without_code(self._channel.explain(error)))
                    self.reachable = False
                    # A longer gap means that this process was stopped or waited for the GIL; only the usual interval counts as
                    # silence.
                    silent_s += min(time.monotonic() - mark, timeout_s + self._config.heartbeat_s)
                    if silent_s >= self._config.dead_after_s and not self._closing.is_set():
                        self._on_silence(silent_s)
                else:
                    if pulse.unknown_token and known:
                        log.warning("coordinator %s was restarted and has lost this job; training continues without failure "
                                    "detection", self._channel.address)
                    elif not self.reachable and not self._failed:
                        log.warning("coordinator %s answers again", self._channel.address)
                    self.reachable, silent_s = True, 0.0
                    known = not pulse.unknown_token
                    self._on_reply(pulse)
                    with self._epoch_arrived:
                        self._answered += 1
                        self._epoch_arrived.notify_all()
            mark = time.monotonic()
            if self._keeper is not None and not self._closing.is_set():
                self._keeper.check_running()
            self._closing.wait(max(0.0, began + self._config.heartbeat_s - time.monotonic()))

    def _watch(self) -> None:
        """Processes news from the coordinator as soon as there is some."""
        while not self._closing.is_set():
            request = WatchRequest(self._token, self.newest.generation, self._revision)
            try:
                pulse = self._channel.call("Watch", request, HeartbeatReply, WATCH_S)
            except DeadlineExceeded:
                continue  # there is no news
            except CommError:
                pulse = HeartbeatReply(revision=request.revision)
            with self._busy:
                if self._closing.is_set():
                    return
                if pulse.revision != request.revision:
                    self._on_reply(pulse)
                    continue
            self._closing.wait(self._config.heartbeat_s)

    def _on_reply(self, pulse: HeartbeatReply) -> None:
        self._revision = pulse.revision
        new = [departure for departure in pulse.departed if departure.peer not in self.left]
        self.left |= {departure.peer: departure for departure in new}
        if pulse.epoch is not None and pulse.epoch.generation > self.newest.generation:
            with self._epoch_arrived:
                self.newest = pulse.epoch
                self._epoch_arrived.notify_all()
            self.on_epoch(pulse.epoch)
        for departure in new:
            self._on_left(departure)
        if pulse.job_done:
            self.failed = pulse.job_failed
            self.over.set()
        failures = [PeerLost(departure.reason, peer=departure.peer) for departure in pulse.failed]
        # A peer that leaves with an error is a failure at once; one that has finished only if another process waits for it.
        unfinished = [departure for departure in pulse.departed
                      if departure.reason != messages.FINISHED and self.is_expected(departure.peer)]
        failures += [PeerLost(f"left the job: {departure.reason}", peer=departure.peer) for departure in unfinished]
        if pulse.dead:
            code = "E-EPOCH-ENDED" if pulse.silent and self._config.min_workers else ""
            failures.insert(0, PeerLost(f"declared this {self.name} dead: {pulse.dead}", peer=self._channel.peer, code=code))
        if failures and not self._failed and not self._closing.is_set():
            self._failed = True
            self._on_failure(root_cause(failures))

    def await_epoch(self, generation: int, timeout_s: float) -> Epoch:
        """Waits until the coordinator has sent an epoch with at least this generation, at most `timeout_s`. Returns the newest
        epoch: an older one as soon as the coordinator has answered a heartbeat that began during this call."""
        with self._epoch_arrived:
            settled = self._answered + 2
            self._epoch_arrived.wait_for(lambda: self.newest.generation >= generation or self._answered >= settled, timeout_s)
            return self.newest

    @property
    def _known_generation(self) -> int:
        """Generation of the newest epoch if it has the same members as this process's epoch, otherwise that of this process's
        epoch. The members are also the same after a worker has joined and has left before it took part."""
        newest = self.newest
        same = {m.rank for m in newest.members} == {m.rank for m in self.epoch.members}
        return newest.generation if same else self.epoch.generation

    def switch(self, epoch: Epoch) -> None:
        """Records that this process uses the process groups of that epoch."""
        self.epoch, self.active_generation = epoch, epoch.generation

    def subscribe(self, on_epoch: OnEpoch) -> None:
        """Subscribes to newer epochs. If a newer epoch has already arrived, calls `on_epoch` at once."""
        self.on_epoch = on_epoch
        if self.newest is not self.epoch:
            on_epoch(self.newest)

    def is_expected(self, peer: str) -> bool:
        """Returns whether the peer is a server, or a worker of the newest epoch."""
        return not peer.startswith("worker ") or any(peer == f"worker {m.rank}" for m in self.newest.members)


def root_cause(lost: Sequence[CommError]) -> CommError:
    """Returns the root cause among failures that were reported together: the first failure that names none of the other failed
    peers. If every failure names another peer, returns the first one."""
    return next((one for one in lost
                 if not any(messages.blames_peer(one.what, other.peer) for other in lost if other is not one)),
                lost[0])


def join(address: str, request: Join, config: Config, on_failure: Callable[[CommError], None], *,
         deadline_s: float | None = None, ended: threading.Event | None = None, on_silence: OnSilence = ignore,
         on_left: OnLeft = ignore, keep: bool = False) -> Membership:
    """Registers this process and waits until all processes have joined: see CoordinatorChannel.register and Membership.

    `deadline_s` (default: config.join_deadline_s) limits the wait for the other processes. The wait for the coordinator's
    answer is always limited by config.join_deadline_s. The event `ended` becomes Membership.over.
    """
    ended = ended or threading.Event()
    link = CoordinatorChannel(address, config.token, Keys(config.keys) if config.keys else None)
    short = msgspec.structs.replace(request, plan=b"")  # a plan may be large, and the request is repeated often
    try:
        reply = link.register(lambda _: short, config.join_deadline_s if deadline_s is None else deadline_s,
                              config.join_deadline_s, plan=request.plan, ended=ended)
    except BaseException as error:
        if isinstance(error, CommError) and not isinstance(error, Refused):
            link.leave(request.token, "stopped waiting for the others")
        link.close()
        raise
    return Membership(link, request, reply, config, on_failure, ended, on_silence=on_silence, on_left=on_left, keep=keep)


def sidecar_main() -> None:
    """Entry point of a heartbeat sidecar (child_processes.py). The argument of the program is the parent's process id; all
    other settings are one JSON line on standard input."""
    line = child_processes.read_line()
    if not line:
        return
    setup = json.loads(line)
    link = CoordinatorChannel(setup["address"], setup["secret"], Keys(setup["keys"]) if setup["keys"] else None)

    def send(state: Literal["", "stopped", "ended"]) -> None:
        with contextlib.suppress(CommError):  # the worker's own thread has the same error, and logs it
            link.call("Heartbeat", Heartbeat(setup["token"], parent=state), HeartbeatReply, setup["call_s"])

    heartbeat_sidecar.run_heartbeats(int(sys.argv[1]), send, setup["every_s"])
