"""A process's client of the coordinator: joins a job, then sends heartbeats from a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from commlayer.cluster import heartbeat_child, messages
from commlayer.cluster.coordinator_channel import CoordinatorChannel, check_name, fingerprint, options, shown
from commlayer.cluster.tls_check import check
from commlayer.config import Config
from commlayer.errors import CommError, CorruptFrame, DeadlineExceeded, PeerLost, Refused, without_code
from commlayer.records import View
from commlayer.transport.key_folder import Keys

log = logging.getLogger("commlayer")

POLL_S = (0.02, 0.25)
"""First and longest pause between two join requests."""
CALL_S = 5.0
CHECK_S = 1.0
CLOCK_S = 300.0
"""A larger difference between two clocks is logged; no reply takes that long."""
ASK_S = 0.05
"""Shortest timeout of a heartbeat call."""
OnSilence = Callable[[float], None]
"""Called with the seconds without an answer from the coordinator, once they reach dead_after_s, after every attempt."""
OnLeft = Callable[[messages.Gone], None]
OnView = Callable[[View], None]
"""Called for a newer view, whose members continue without the others."""


class Membership:
    """A registration in the job. `on_failure` is called at most once, on the heartbeat thread, with the first death.

    `keep`: a child process continues the heartbeats while this process's threads wait for the GIL; see heartbeat_child.py.
    """

    def __init__(self, link: CoordinatorChannel, request: messages.Join, seat: messages.Seat, config: Config,
                 on_failure: Callable[[CommError], None], ended: threading.Event, on_silence: OnSilence, on_left: OnLeft, *,
                 keep: bool) -> None:
        assert seat.view is not None
        self.view: View = seat.view
        """The view that this process has switched to."""
        self.newest: View = seat.view
        """The newest view that the coordinator has sent."""
        self.on_view: OnView = lambda _: None
        self.plan = seat.plan
        self.rank = seat.rank
        self.name = f"{request.kind} {seat.rank}"
        self.left: dict[str, messages.Gone] = {}
        """Peers that left, by name. An orderly leave is a failure only if another process waits for that peer."""
        self.over = ended
        """Set when every worker has left or died, so that a server may end."""
        self.failed = False
        """Whether the job ended before its last workers finished."""
        self.staying: tuple[str, ...] = ()
        """Workers that were still in the job when this process left."""
        self._link, self._token = link, request.token
        self._on_failure, self._on_silence, self._on_left = on_failure, on_silence, on_left
        self._every_s, self._dead_after_s = config.heartbeat_s, config.dead_after_s
        # Shorter than the silence that kills, so that a stuck call leaves time for another.
        self._call_s = min(CALL_S, config.dead_after_s / 3)
        self.reachable = True
        """Whether the coordinator answered the last heartbeat."""
        self.missed: Callable[[], tuple[str, ...]] = tuple
        """Peers whose machine closed the data connection without an orderly end. Set by owners of data connections."""
        self.ended: Callable[[], tuple[str, ...]] = tuple
        """Workers that closed their connections in order. Set by a server, as the next two."""
        self.dropped: Callable[[], tuple[messages.Gone, ...]] = tuple
        """Workers that were disconnected because they broke the protocol."""
        self.overdue: Callable[[], messages.Overdue | None] = lambda: None
        """Workers that keep sums waiting."""
        self._closing = threading.Event()
        self._failed = False
        beats = [messages.pack(messages.Heartbeat(self._token, parent=parent)) for parent in ("", "stopped", "ended")]
        self._keeper = heartbeat_child.start(link.address, link.secret, beats, options(link.address), self._every_s,
                                             self._call_s, shown(link.keys), fingerprint(link.keys)) if keep else None
        self._thread = threading.Thread(target=self._beat, name="commlayer-heartbeat", daemon=True)
        self._thread.start()

    def leave(self, reason: str = messages.FINISHED, exchanges: int = -1) -> bool:
        """Leaves the job, then closes. Returns whether the coordinator was reached; if not, that is no error."""
        if self._closing.is_set():
            self.close()
            return False
        self._stop()
        # If an orderly leave is not delivered, it counts as death and fails the job, so it is retried over a full link.
        patience_s = self._dead_after_s if reason == messages.FINISHED and self.reachable else 0.0
        delivered, until = False, time.monotonic() + patience_s
        while not delivered:
            try:
                pulse = self._link.call("Leave", messages.Leave(self._token, reason, exchanges), messages.Pulse, self._call_s)
            except CommError as error:
                if isinstance(error, DeadlineExceeded) and time.monotonic() < until:
                    continue
                log.info("left without notice: %s", error)
                break
            gone = {g.peer for g in (*pulse.lost, *pulse.left)} | {self.name}
            self.staying = tuple(f"worker {m.rank}" for m in self.view.members if f"worker {m.rank}" not in gone)
            delivered = True
        self.close()
        return delivered

    def close(self) -> None:
        """Stops the heartbeats without leaving, so the coordinator will find this process dead. Idempotent."""
        self._stop()
        if self._keeper is not None:
            self._keeper.close()
        self._link.close()

    def _stop(self) -> None:
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * self._call_s)

    def _beat(self) -> None:
        known, silent_s, mark = True, 0.0, time.monotonic()
        while not self._closing.is_set():
            began = time.monotonic()
            wait_s = max(ASK_S, min(self._call_s, self._dead_after_s - silent_s))
            try:
                beat = messages.Heartbeat(self._token, self.missed(), generation=self.newest.generation, ended=self.ended(),
                                          in_force=self.view.generation, dropped=self.dropped(), overdue=self.overdue())
                pulse = self._link.call("Heartbeat", beat, messages.Pulse, wait_s)
            except CommError as error:
                if self.reachable and not self._failed and not self._closing.is_set():
                    log.warning("%s; training goes on, but a peer that dies now is noticed only by its silence",
                                without_code(error))
                self.reachable = False
                # A longer gap is this process's own (stopped, or waiting for the GIL), not silence of the coordinator.
                silent_s += min(time.monotonic() - mark, self._call_s + self._every_s)
                if silent_s >= self._dead_after_s and not self._closing.is_set():
                    self._on_silence(silent_s)
            else:
                if pulse.stranger and known:
                    log.warning("coordinator %s was restarted and does not know this job; training goes on", self._link.address)
                elif not self.reachable and not self._failed:
                    log.warning("coordinator %s answers again", self._link.address)
                self.reachable, silent_s = True, 0.0
                known = not pulse.stranger
                self._take(pulse)
            mark = time.monotonic()
            if self._keeper is not None and not self._closing.is_set():
                self._keeper.look()
            self._closing.wait(max(0.0, self._every_s - (time.monotonic() - began)))

    def _take(self, pulse: messages.Pulse) -> None:
        new = [gone for gone in pulse.left if gone.peer not in self.left]
        self.left |= {gone.peer: gone for gone in new}
        if pulse.view is not None and pulse.view.generation > self.newest.generation:
            self.newest = pulse.view
            self.on_view(pulse.view)
        for gone in new:
            self._on_left(gone)
        if pulse.over:
            self.failed = pulse.failed
            self.over.set()
        lost = [PeerLost(gone.reason, peer=gone.peer) for gone in pulse.lost]
        # A peer that leaves with an error is a failure at once; one that has finished only if another process waits for it.
        unfinished = [gone for gone in pulse.left if gone.reason != messages.FINISHED and self.awaited(gone.peer)]
        lost += [PeerLost(f"left the job: {gone.reason}", peer=gone.peer) for gone in unfinished]
        if pulse.dead:
            lost.insert(0, PeerLost(f"declared this {self.name} dead: {pulse.dead}", peer=f"coordinator {self._link.address}"))
        if lost and not self._failed and not self._closing.is_set():
            self._failed = True
            self._on_failure(first_cause(lost))

    def awaited(self, peer: str) -> bool:
        """Whether the peer is a server, or a worker of the newest view."""
        return not peer.startswith("worker ") or any(peer == f"worker {m.rank}" for m in self.newest.members)


def first_cause(lost: Sequence[CommError]) -> CommError:
    """Of several failures reported at once, one that was not caused by another of them."""
    return next((one for one in lost if not any(messages.names(one.what, other.peer) for other in lost if other is not one)),
                lost[0])


def join(address: str, request: messages.Join, config: Config, on_failure: Callable[[CommError], None], *,
         deadline_s: float | None = None, ended: threading.Event | None = None, on_silence: OnSilence = lambda _: None,
         on_left: OnLeft = lambda *_: None, keep: bool = False) -> Membership:
    """Registers and waits until all processes have joined. `keep`: see Membership.

    Raises Refused with the coordinator's reason. Raises DeadlineExceeded, naming the missing processes, or when the
    coordinator does not answer. `deadline_s` is config.join_deadline_s unless given. A longer one extends the wait for the
    others, but not the wait for an answer. `ended` stops the wait early and becomes Membership.over.
    """
    deadline_s = config.join_deadline_s if deadline_s is None else deadline_s
    answered_s = time.monotonic()
    deadline = answered_s + deadline_s
    ended = ended or threading.Event()
    check_name(address)
    keys = Keys(config.keys) if config.keys else None
    link = CoordinatorChannel(address, config.token, keys)
    missing, pause_s, wrong_clock = "", POLL_S[0], False
    # A plan may be large, and the request is repeated often.
    short = msgspec.structs.replace(request, plan=b"")
    known = keys is None  # whether the coordinator's certificate is not on the revocation list, which gRPC does not check
    try:
        while not ended.is_set():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                link.leave_quietly(request.token, "waited in vain")
                raise _late(address, missing, deadline_s)
            if time.monotonic() > answered_s + config.join_deadline_s:
                raise _late(address, "", config.join_deadline_s)
            if not known:
                known = link.look(min(CALL_S, max(0.001, left_s)))
                if not known:
                    ended.wait(min(pause_s, max(0.0, deadline - time.monotonic())))
                    pause_s = min(2 * pause_s, POLL_S[1])
                    continue
            try:
                seat = link.call("Join", short, messages.Seat, min(CALL_S, left_s))
                if seat.plan_wanted:
                    link.send_plan(request.plan, min(CALL_S, left_s))
            except (PeerLost, DeadlineExceeded):
                # The coordinator may not be up yet, or the network is down: wait until the deadline. But a bad certificate,
                # which gRPC does not report, is an error at once.
                check(address, keys, min(deadline, time.monotonic() + CHECK_S))
            else:
                if seat.error:
                    raise Refused(seat.error, peer=f"coordinator {address}")
                missing, answered_s = seat.missing, time.monotonic()
                wrong_clock = wrong_clock or _check_clock(seat.time_s, address)
                if seat.plan_wanted:
                    continue
                if seat.view is not None:
                    if messages.digest_of(seat.plan) != seat.view.plan:
                        raise CorruptFrame("sent a plan that does not match its digest", peer=f"coordinator {address}")
                    return Membership(link, request, seat, config, on_failure, ended, on_silence, on_left, keep=keep)
            ended.wait(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, POLL_S[1])
        link.leave_quietly(request.token, "stopped while waiting")
        raise CommError("stopped while waiting for the others to join", peer=f"coordinator {address}")
    except BaseException:
        link.close()
        raise


def _check_clock(time_s: float, address: str) -> bool:
    """Logs a clock that differs much from the coordinator's. Returns whether it does."""
    off_s = time.time() - time_s
    if abs(off_s) < CLOCK_S:
        return False
    log.warning("this machine's clock is %.1f hours %s that of coordinator %s: certificates and logs go by it; set it by a "
                "time server (timedatectl set-ntp true)", abs(off_s) / 3600, "ahead of" if off_s > 0 else "behind", address)
    return True


def _late(address: str, missing: str, deadline_s: float) -> DeadlineExceeded:
    peer = f"coordinator {address}"
    if not missing:
        return DeadlineExceeded(f"did not answer within {deadline_s:g} s: is it running, and is that its address?", peer=peer)
    head, semicolon, tail = missing.partition(";")
    return DeadlineExceeded(f"{head} before the deadline of {deadline_s:g} s{semicolon}{tail}", peer=peer)
