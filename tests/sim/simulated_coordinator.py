"""The coordinator of a simulated job: membership, and the key-value store through which homes exchange messages."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from commlayer.cluster.calls import messages
from commlayer.cluster.calls.messages import FINISHED, Heartbeat, HeartbeatReply, Join, KvReply, KvRequest
from commlayer.cluster.membership import epoch_change, membership
from commlayer.cluster.membership.membership import State
from commlayer.cluster.membership.rendezvous_service import RendezvousService
from commlayer.cluster.membership.sites import AdmissionState
from commlayer.records import Epoch
from commlayer.transport.handshake import RefusalLog

PLAN = b"a plan"


class Beaten(NamedTuple):
    """The reply to a heartbeat, and the coordinator's version at that time."""

    pulse: HeartbeatReply
    version: int


class Desk:
    """Answers calls at once; the caller simulates delays and losses."""

    def __init__(self, workers: int, servers: int, least: int) -> None:
        self.state = State(workers, servers, min_workers=least)
        self.version = 0
        """Changes whenever a reply could change, so that a waiting caller need not ask again before."""
        for number in range(servers):
            self._joins(messages.server_request(f"10.99.0.{number + 1}:7001", number=number))
        self._rendezvous = RendezvousService(workers, float("inf"), self._lost, RefusalLog(), least, lambda: 0.0, self._door,
                                             last_call_s=float("inf"))
        for rank in range(workers):
            self._joins(messages.worker_request("a job", rank, workers, plan=PLAN, elastic=True))
            self._attends(rank)
        self._rendezvous.begin()

    def _attends(self, rank: int) -> None:
        reply = self._rendezvous.register(msgspec.structs.replace(messages.site_request(1), token=home_of(rank)))
        assert not reply.error, reply.error

    def _joins(self, request: Join) -> None:
        request = msgspec.structs.replace(request, token=f"{request.kind} {request.rank}")
        late = self.state.epoch is not None
        self.state, seat = (epoch_change.admit if late else membership.join)(self.state, request, 0.0)
        assert not seat.error, seat.error

    @property
    def epoch(self) -> Epoch:
        assert self.state.epoch is not None
        return self.state.epoch

    @property
    def there(self) -> list[int]:
        """Workers of the epoch that the coordinator considers present."""
        return [m.rank for m in self.epoch.members if self.state.registrations[token_of(m.rank)].present]

    def holds_dead(self, rank: int) -> bool:
        return bool(self.state.registrations[token_of(rank)].dead)

    @property
    def least(self) -> int:
        return self.state.min_workers

    def _lost(self) -> dict[int, str]:
        return {p.rank: p.dead or f"left the job: {p.left}" for p in self.state.registrations.values()
                if p.join.kind == "worker" and (p.dead or p.left not in ("", FINISHED))
                and not membership.verdict_pending(self.state, p)}

    def _door(self) -> AdmissionState:
        return epoch_change.admission(self.state)

    # ---- calls

    def ask(self, request: KvRequest) -> KvReply:
        """RendezvousService.handle for a request that does not wait."""
        call = self._rendezvous.handle(request)
        try:
            call.send(None)
        except StopIteration as done:
            self.version += bool(request.put)
            kept: KvReply = done.value
            return kept
        raise AssertionError("it waits, though nobody asked it to")

    def beat(self, rank: int, generation: int, active_generation: int) -> Beaten:
        token = token_of(rank)
        before = self.state.registrations[token].active_generation
        beat = Heartbeat(token, generation=generation, active_generation=active_generation)
        self.state, pulse = membership.heartbeat(self.state, token, 0.0, beat)
        pulse = epoch_change.explain_end(self.state, pulse)
        self.version += self.state.registrations[token].active_generation != before
        self._rendezvous.forget(epoch_change.settled_generation(self.state))
        return Beaten(pulse, self.version)

    def leave(self, rank: int, reason: str, exchanges: int = -1) -> None:
        self._becomes(membership.leave(self.state, token_of(rank), reason, exchanges))

    def judge(self, rank: int) -> None:
        """Declares the worker dead for good, whether or not it lives."""
        self._becomes(membership.evict(self.state, [token_of(rank)], "no heartbeat, as the coordinator sees it"))

    def _becomes(self, state: State) -> None:
        self.state = epoch_change.next_epoch(state)
        self.version += 1


def token_of(rank: int) -> str:
    return f"worker {rank}"


def home_of(rank: int) -> str:
    return f"home {rank}"
