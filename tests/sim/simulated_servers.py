"""Simulated servers: what a server process does around its sums, without sockets and threads."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from commlayer.cluster.servers.gather import ROW_BUCKET, GatherOps
from commlayer.cluster.servers.server_codecs import contributing_ranks
from commlayer.cluster.servers.summation import Summation
from commlayer.cluster.servers.summation_server import Joins
from commlayer.errors import CorruptFrame
from commlayer.records import Epoch, Plan, group_by_site
from commlayer.transport.protocol import Kind, Message
from tests.sim.simulated_network import Frame, Network, numbers


class RecordingOps:
    """Codec operations that record contributions. The result is the list of contributions."""

    codec, bound, means, in_means, assumes_total, senders, leavers = 7, 4096, False, True, True, (), ()

    def __init__(self, world: Network) -> None:
        self.rounds, self._world = world.rounds, world

    def new_accumulator(self, r: int) -> list[bytes]:
        return []

    def place(self, acc: list[bytes], out: memoryview) -> bool:
        return False

    def add(self, r: int, payload: memoryview, acc: list[bytes], first: bool) -> None:
        if first:
            acc.clear()
        acc.append(bytes(payload))

    def scale(self, acc: list[bytes], factor: float) -> None: ...

    def emit(self, r: int, acc: list[bytes], out: memoryview) -> int:
        data = b"".join(acc)
        out[: len(data)] = data
        return len(data)

    def undo(self, slices: int) -> bool:
        return False

    def skip(self) -> None: ...

    def begin_anew(self) -> None:
        self._world.problems.append("a residual was lost")

    def keeps_payloads(self, members: int) -> bool:
        return False

    def journal_state(self) -> bytes:
        return b""

    def restore_from_journal(self, data: bytes, sent: memoryview) -> None: ...


class Journal(NamedTuple):
    """What a server has journaled."""

    joined: tuple[int, ...]
    plan: int
    entries: dict[int, tuple[bytes, bytes]]


class Server:
    """One server process: what DataServer and SumServer do around a Summation."""

    def __init__(self, world: Network, number: int) -> None:
        self.world, self.number = world, number
        self.journal = Journal((), 1, {})
        self.start()

    def start(self) -> None:
        """Starts the process, from the journal of the one before. It registers with the coordinator first."""
        self.newest, self.joined = self.registered(), [*self.journal.joined]
        known = *group_by_site(self.world.first.members), *group_by_site(self.newest.members)
        self.sites = {rank: site for site in known for rank in site}
        core = self._summation(self.journal.plan)
        for bucket, entry in self.journal.entries.items():
            core.restore_from_journal(bucket, *entry)
        self._write_down(core, starts=True)
        self.core = core

    def registered(self) -> Epoch:
        return self.world.newest

    @property
    def all_members(self) -> list[int]:
        return [*numbers(self.world.first), *self.joined]

    @property
    def gone(self) -> set[int]:
        return {*self.all_members} - {*numbers(self.newest)}

    def _summation(self, number: int) -> Summation:
        plan = self.world.plan_of(number)
        ops: dict[int, Any] = {b.id: RecordingOps(self.world) for b in plan.buckets if b.server == self.number}
        if self.number == 0:
            ops[ROW_BUCKET] = GatherOps(len(self.all_members))
        first = self.world.first
        core = Summation(self.number, number, ops,
                         contributing_ranks(plan, group_by_site(first.members)) | {ROW_BUCKET: (*numbers(first),)})
        for place, member in enumerate(self.joined, 1):
            core.add(place, member, self.owned(plan, member))
        core.remove(self.gone)
        return core

    def owned(self, plan: Plan, member: int) -> set[int]:
        site = self.sites.get(member, (member,))
        return {ROW_BUCKET, *(b.id for b in plan.buckets if b.owner_in(site) == member)}

    def _write_down(self, core: Summation, *, starts: bool = False) -> None:
        """Replaces the journal by a new one."""
        if not self.world.journal:
            return
        entries: dict[int, tuple[bytes, bytes]] = {}
        replaced = False

        def keep(bucket: int, words: bytes, state: bytes) -> None:
            if replaced:
                self.world.kill_sometimes()
            entries[bucket] = words, bytes(state)
            if replaced:
                self.world.kill_sometimes()

        core.journal_state(keep)
        if not starts:
            self.world.kill_sometimes()
        self.journal, replaced = Journal(tuple(self.joined), core.generation, entries), True
        if not starts:
            self.world.kill_sometimes()

    def take(self, peer: int, frame: Frame) -> None:
        header = frame.header
        if peer not in (*numbers(self.newest), *self.gone):
            self.hear()  # it does not accept the connection before
        if peer not in numbers(self.newest):
            return  # its connection has ended
        message = Message(peer, header, memoryview(frame.body))
        if header.kind != Kind.PLAN:
            for reply in self.core.push(message, 0.0) if header.kind == Kind.PUSH else self.core.follow(message):
                self._reply(reply)
            return
        if frame.reports:
            self._admit(msgspec.msgpack.decode(frame.body, type=Joins))
        else:
            self._switch(header.generation)
        self.world.send_down(self.number, peer, Frame(header._replace(kind=Kind.PLAN_OK), b""))

    def _admit(self, joins: Joins) -> None:
        if self.newest.generation < joins.generation:
            self.hear()  # waits for the coordinator
        if joins.number <= len(self.joined) and self.joined[joins.number - 1] == joins.member:
            return
        if joins.number != len(self.joined) + 1 or joins.member in self.all_members or (
                self.newest.generation == joins.generation and joins.member not in numbers(self.newest)):
            raise CorruptFrame(f"reports {joins}, but {self.joined} have joined", peer=f"server {self.number}")
        self.joined.append(joins.member)
        if self.number == 0:
            self.core.cells[ROW_BUCKET].ops.allow(len(self.all_members))  # type: ignore[attr-defined]
        self.core.add(joins.number, joins.member, self.owned(self.world.plan_of(self.core.generation), joins.member))
        self._remove()
        if self.world.journal:
            self.world.kill_sometimes()
            self.journal = self.journal._replace(joined=tuple(self.joined))
            self.world.kill_sometimes()

    def _switch(self, plan: int) -> None:
        if plan == self.core.generation:
            return
        if plan != self.core.generation + 1 or self.core.busy():
            raise CorruptFrame(f"got plan {plan} in plan {self.core.generation}, or during a sum", peer=f"server {self.number}")
        core, former = self._summation(plan), self.core
        self._write_down(core)
        self.core = core
        for reply in former.end_follows():
            self._reply(reply)

    def hear(self) -> None:
        """Receives the coordinator's newest epoch."""
        self.newest = self.world.newest
        self.sites |= {rank: site for site in group_by_site(self.newest.members) for rank in site if rank not in self.sites}
        self._remove()

    def _remove(self) -> None:
        for found in self.core.remove(self.gone):
            if isinstance(found, CorruptFrame):
                raise found
            self._reply(found)

    def _reply(self, reply: Any) -> None:
        self.world.emitted(reply)
        self.world.send_down(self.number, reply.peer, Frame(reply.header, bytes(reply.body)))
