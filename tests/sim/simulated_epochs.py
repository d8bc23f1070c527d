"""Simulates epochs: members, servers and a coordinator as state machines in a simulated network.

Homes of one, two or four workers exchange the buckets of each step, or of each outer step in fragments, with the real Summation
on each server. What members decide is the real ChangingMembers, rows are the real ones, and so is a worker that follows. By
seed, workers die, hang and leave, homes join, plans change, connections break, frames arrive late, twice or never, and servers
and the coordinator are killed and resume from journals. Each process receives the coordinator's newest epoch at another time.
"""

from __future__ import annotations

from collections.abc import Callable

from commlayer.engine.epochs.replica import GivenState
from commlayer.errors import CorruptFrame
from tests.sim.simulated_network import MOST_WORKERS, STEPS, Killed, Network, numbers
from tests.sim.simulated_servers import Server
from tests.sim.simulated_workers import PART, Part, Worker

MOST_EVENTS, MOST_IDLE = 60_000, 800
"""MOST_IDLE: number of events in a row in which no frame is under way; after that no member will ever continue."""


class World(Network):
    """One schedule."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._idle = 0
        self.silent: list[Worker] = []
        """Workers that hang before they have joined, and that the coordinator takes for present."""
        self.server = [Server(self, number) for number in range(self.servers)]
        for home in self.homes:
            for rank in home.ranks:
                member = self.members[rank] = Worker(self, rank, home)
                member.start(GivenState(epoch=self.first, generation=1, totals=self.totals_of(1)), 0)

    def run(self) -> list[str]:
        for member in self.members.values():
            member.go()
        while not self.problems and (left := self._unfinished()):
            self.counts["events"] += 1
            if self._idle > MOST_IDLE / 2 and self.silent:
                self._notice()
            elif self.counts["events"] > MOST_EVENTS or self._idle > MOST_IDLE:
                self.problems.append(f"no member gets any further: {left}")
            else:
                self._event()
        self._check()
        return self.problems

    def _able(self) -> list[Worker]:
        present = numbers(self.newest)
        return [m for m in self.members.values() if m.alive and not m.hung and m.id in present]

    def _unfinished(self) -> list[int]:
        """Returns the members that must still finish. A worker cannot join if no member is left that has the job's state."""
        return [m.id for m in self._able() if m.started and not m.done]

    def _event(self) -> None:
        chance = self.chance
        self.restart_sometimes()
        if chance.random() < self.deaths * (4 if any(m.follower and not m.started for m in self.members.values()) else 1):
            self._fault()
        if chance.random() < 0.006 and len(self.members) < MOST_WORKERS:
            self._admit()
        if chance.random() < (0.1 if self._idle else self.news):
            self._news()
        for one in [*self.ready, *chance.choices(list(self.members.values()), k=2)]:
            one.go()
        self.ready.clear()
        ways = [("up", key) for key, way in self.up.items() if way] + [("down", key) for key, way in self.down.items() if way]
        self._idle = 0 if ways else self._idle + 1
        if not ways:
            return
        way, key = chance.choice(ways)
        if chance.random() < self.breaks:
            self._break(key if way == "up" else key[::-1])
            return
        frames = self.up[key] if way == "up" else self.down[key]
        some = chance.choice(frames)
        if some.reports and chance.random() < self.slow:
            return
        place = next(i for i, frame in enumerate(frames) if frame.stream == some.stream)
        frame = frames[place] if chance.random() < 0.05 else frames.pop(place)
        if way == "up":
            self._at_server(key[1], lambda server: server.take(key[0], frame))
        else:
            self.members[key[1]].take(key[0], frame)

    def _at_server(self, number: int, act: Callable[[Server], None]) -> None:
        try:
            act(self.server[number])
        except Killed:
            self.counts["servers killed"] += 1
            self.server[number].start()
            for rank in self.members:
                self.up.pop((rank, number), None)  # no other process receives them
                self._break((rank, number))
        except CorruptFrame as error:
            self.problems.append(f"a breach: {error}")

    def _break(self, key: tuple[int, int]) -> None:
        """A connection breaks. Frames in flight are lost or not; the member sends all that is not answered again."""
        self.counts["connections broken"] += 1
        rank, server = key
        for frames in (self.up.get(key), self.down.get((server, rank))):
            if frames and self.chance.random() < 0.8:
                frames.clear()
        if (member := self.members[rank]).alive:
            member.transport.repeat(server)

    def _admit(self) -> None:
        """A home registers with the coordinator."""
        home = self.home(self.chance.choices((1, 2, 4), (4, 2, 1))[0])
        self.changed()
        for rank in home.ranks:
            member = self.members[rank] = Worker(self, rank, home)
            member.run(member.join())

    def _fault(self) -> None:
        able = self._able()
        if len({m.home.token for m in able if m.started}) < 2:
            able = [m for m in able if not m.started]
        if not able:
            return
        joining = [m for m in able if not m.started]
        member = self.chance.choice(joining if joining and self.some_time() else able)
        kind = self.chance.choice(("dies", "hangs", "is dropped by mistake", "leaves"))
        self.counts[kind] += 1
        self.counts["followers lost"] += member.follower is not None and not member.started
        if kind in ("dies", "leaves"):
            member.alive = False
        elif kind == "hangs":
            member.hung = True
        if self.chance.random() < 0.5:
            for (rank, _), frames in self.up.items():
                if rank == member.id:
                    frames.clear()
        self.counts["homes lost"] += len(member.home.ranks) > 1
        if kind == "hangs" and not member.started:
            self.counts["hangs before it joins"] += 1
            self.silent.append(member)
        else:
            self.remove(member, kind)

    def _notice(self) -> None:
        """Removes the workers that hang before they have joined, when nobody continues without them."""
        known = {rank for one in self._able() if one.started for rank in one.members.admitted}
        hung = [member for member in self.silent if member.id in numbers(self.newest)]
        if hung and not any(member.id in known for member in hung):
            self.problems.append(f"the members wait for workers {[member.id for member in hung]}, which only follow")
        for member in hung:
            self.remove(member, "hangs")
        self.silent.clear()
        self._idle = 0

    def _news(self) -> None:
        """A process receives the coordinator's newest epoch."""
        late = [one for one in (*self.server, *self._able()) if one.newest is not self.newest]
        if late:
            one = self.chance.choice(late)
            if isinstance(one, Server):
                self._at_server(one.number, Server.hear)
            else:
                one.hear()

    # What must hold.

    def _check(self) -> None:
        ended = [m for m in self._able() if m.done]
        busy = {rank for (rank, _), way in self.up.items() if way} | {rank for (_, rank), way in self.down.items() if way}
        for member in self._able():
            member.go()
            if member.alive and member.follower and not member.started and member.id not in busy and (
                    any(one.plan_number > member.plan_number for one in ended)):
                self.problems.append(f"worker {member.id} follows a plan that has ended")
        for member in self.members.values():
            for step, results in member.committed.items():
                for bucket, body in results.items():
                    self._check_sum(ended, step, bucket, body)
                self.agree(f"results of step {step}", results)
        for member in ended:
            if sorted(member.committed) != list(range(member.first, STEPS)):
                self.problems.append(f"worker {member.id} committed {sorted(member.committed)}")
            self.agree("weights at the end", member.weights)
            for former, step in member.members.steps_at_exit.items():
                self.agree(f"samples of worker {former}", step)
        self.counts["steps"] += sum(len(m.committed) for m in ended)

    def _check_sum(self, ended: list[Worker], step: int, bucket: int, body: bytes) -> None:
        parts = [Part(*PART.unpack_from(body, i)) for i in range(0, len(body), PART.size)]
        ranks = [part.rank for part in parts]
        if any((p.step, p.bucket) != (step, bucket) for p in parts):
            self.problems.append(f"step {step}, bucket {bucket}: a part of another sum")
        if len(ranks) != len(set(ranks)):
            self.problems.append(f"step {step}, bucket {bucket}: doubled parts of {ranks}")
        if ranks != sorted(ranks):
            self.problems.append(f"step {step}, bucket {bucket}: added in the order {ranks}")
        if lost := {m.id for m in ended if m.first <= step} - set(ranks):
            self.problems.append(f"step {step}, bucket {bucket}: lost parts of {sorted(lost)}")
