"""The coordinator's events: those that members send with heartbeats, and its own about members and waits.

Members are not trusted. A member's events must carry its own rank, their rate is limited, and they cannot report the state of
another member.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from commlayer.cluster.calls.messages import FINISHED, Heartbeat, version
from commlayer.cluster.membership.membership import Registration, State, missing_peers
from commlayer.cluster.membership.sites import PendingWait
from commlayer.errors import CorruptFrame, short_line
from commlayer.observe import events
from commlayer.observe.event_log import EventLog
from commlayer.observe.events import AnyEvent, Event, JobEvent, MemberEvent, MemberState, WaitEvent, WaitKind
from commlayer.records import MALFORMED, Epoch
from commlayer.transport.protocol import peer_name

RATE, BURST = 10.0, 256
"""Events per second, and at once, that one member may send. Further events are dropped."""
SKEW_S = 2.0
"""Difference between a member's clock and the coordinator's from which the times of the member's events are corrected."""
SHOWN_S = 3.0
"""Seconds of a wait in the key-value store before it is an event."""
REPEAT_S = 5.0
"""Seconds between two events about the same wait."""


def log_of_job() -> EventLog:
    """Creates the log of a job: minutes of a job with 64 workers."""
    return EventLog(most=16384, most_nbytes=4 << 20, retains=True)


class _Sender(NamedTuple):
    """The coordinator's record of one member's events: the number of the next event, how many events the member may send now,
    and since when."""

    next: int = 0
    allowance: float = BURST
    at: float = 0.0


class JobEvents:
    """Writes the job's events to a log. The tick thread calls `waits`, the event loop `received`, and either one `changed`."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self._senders: dict[str, _Sender] = {}
        self._reported: dict[WaitKind, tuple[tuple[str, ...], float]] = {}
        """Maps the kind of a wait to the names and the time of the last event about it."""
        self._homes: Mapping[str, str] = {}

    def received(self, beat: Heartbeat, state: State, now: float) -> None:
        """Adds the events of a heartbeat. Raises CorruptFrame if one is malformed."""
        place = state.registrations.get(beat.token)
        if place is None or place.join.kind != "worker":
            return
        known = self._senders.get(beat.token)
        if known is None:
            known = _Sender(at=now)
            self._senders = {token: sender for token, sender in self._senders.items() if token in state.registrations}
        lines = beat.events[max(0, known.next - beat.first_event):]
        allowance = min(float(BURST), known.allowance + RATE * max(0.0, now - known.at))
        lines = lines[:int(allowance)]
        self._senders[beat.token] = _Sender(max(known.next, beat.first_event + len(beat.events)), allowance - len(lines), now)
        clock = time.time()
        ahead_s = beat.time_s - clock if abs(beat.time_s - clock) > SKEW_S else 0.0
        for line in lines:
            if (event := _checked(line, place, state.epoch)) is not None:
                at = min(max(1.0, event.time - ahead_s), clock + SKEW_S)
                self.log.append(structs.replace(event, rank=place.rank, time=at))

    def changed(self, before: State, after: State) -> None:
        for event in changes(before, after):
            self.log.append(event)

    def homes(self, present: Mapping[str, str]) -> None:
        """Adds events about homes that have registered or left before the job begins. `present`: names by token."""
        for token, name in present.items():
            if token not in self._homes:
                self.log.append(MemberEvent(member=f"home {name}", name=name, state="waiting"))
        for token, name in self._homes.items():
            if token not in present:
                self.log.append(MemberEvent(member=f"home {name}", name=name, state="left"))
        self._homes = present

    def waits(self, present: Iterable[WaitEvent], now: float) -> None:
        """Adds events about waits that have begun, have other names than before, last, or have ended."""
        current = {wait.what: wait for wait in present}
        for what, wait in current.items():
            names, at = self._reported.get(what, ((), -REPEAT_S))
            if names != wait.names or now - at >= REPEAT_S:
                self._reported[what] = wait.names, now
                self.log.append(wait)
        for what in [what for what in self._reported if what not in current]:
            names, _ = self._reported.pop(what)
            self.log.append(WaitEvent(what=what, names=names, over=True))


def _checked(line: bytes, place: Registration, epoch: Epoch | None) -> AnyEvent | None:
    """Decodes a member's event. Returns None if members may not send events of this kind. The coordinator decides which run it
    is."""
    try:
        event = events.decode(line)
    except MALFORMED as error:
        raise CorruptFrame(f"sent a malformed event: {short_line(error, 200)}", peer=place.peer) from None
    match event:
        case MemberEvent() | WaitEvent(what="heartbeat" | "join"):
            return None
        case JobEvent():
            if epoch is None:
                return None
            return structs.replace(event, run=epoch.run, world=len(epoch.members), host=place.join.node_name)
    return event


def changes(before: State, after: State) -> Iterator[Event]:
    """Yields the events of a change of the coordinator's state: the job begins, members register, leave or die."""
    begins = before.epoch is None and after.epoch is not None
    if begins and after.epoch is not None:
        yield JobEvent(run=after.epoch.run, world=len(after.epoch.members), version=version())
    for token, place in after.registrations.items():
        known = before.registrations.get(token)
        if place.present and (known is None or begins):
            yield _member(place, "joined" if after.epoch is not None else "waiting")
        elif known is not None and known.present and not place.present:
            outside = after.epoch is not None and all(m.rank != place.rank for m in after.epoch.members)
            yield structs.replace(_member(place, "dead" if place.dead else "left"),
                                  continues=outside and place.join.kind == "worker")
    for token, place in before.registrations.items():
        if token not in after.registrations and place.present:
            yield _member(place, "left")


def _member(place: Registration, state: MemberState) -> MemberEvent:
    reason = place.dead or (place.left if place.left != FINISHED else "")
    return MemberEvent(member=place.peer, name=place.join.node_name, state=state, reason=reason)


def list_waits(state: State, pending: Sequence[PendingWait], now: float, since: float, noticed_s: float, dead_after_s: float,
               patience_s: float) -> Iterator[WaitEvent]:
    """Yields what the job waits for now: processes that have not joined, members without heartbeats, and calls between homes.

    `since`: when the coordinator began to wait for processes. `noticed_s`: silence from which a member counts as silent; the
    other limits are those of membership.tick.
    """
    if state.epoch is None:
        if names := missing_peers(state):
            yield WaitEvent(what="join", names=names, waited_s=now - since)
        return
    silent = [p for p in state.registrations.values() if p.present and p.silent_s(now) >= noticed_s]
    if silent:
        limits_s = [dead_after_s if p.missed_by and not p.join.restartable else max(dead_after_s, patience_s) for p in silent]
        yield WaitEvent(what="heartbeat", names=tuple(p.peer for p in silent),
                        waited_s=max(p.silent_s(now) for p in silent), limit_s=min(limits_s))
    stuck = {one.rank: max(one.waited_s.values(), default=0.0) for one in pending}
    stuck = {rank: waited_s for rank, waited_s in stuck.items() if waited_s >= SHOWN_S}
    if stuck:
        yield WaitEvent(what="call", names=tuple(map(peer_name, sorted(stuck))), waited_s=max(stuck.values()),
                        limit_s=min(one.limit_s for one in pending if one.rank in stuck))
