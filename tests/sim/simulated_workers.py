"""Simulated workers, which train, join and follow with the real ChangingMembers, rows and ResultFollower."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import torch

from commlayer.cluster.calls.messages import KvRequest
from commlayer.cluster.processes.rows import StepRows, section_values
from commlayer.cluster.servers.served_rows import ServedRows, rows_in
from commlayer.cluster.servers.summation_server import Joins
from commlayer.engine.epochs.changing_members import FOLLOW_NBYTES, ChangingMembers
from commlayer.engine.epochs.replica import GivenState
from commlayer.engine.epochs.schedule import Joining
from commlayer.engine.job.fixed_members import FixedMembers
from commlayer.engine.start.result_follower import ResultFollower
from commlayer.engine.step.update_norms import LENGTHS
from commlayer.engine.worker.site import LocalSite
from commlayer.errors import CommError
from commlayer.planner.buckets import divide_into_fragments
from commlayer.records import Bucket, Epoch, Job, Member, Plan, TensorInfo, group_by_site
from commlayer.transport.inflight import InFlightRequests
from commlayer.transport.protocol import SERVER_BASE, Flag, Handle, Header, Kind, Message
from tests.sim.simulated_network import CONFIG, STEPS, Frame, Home, Network, numbers
from tests.sim.simulated_servers import RecordingOps

JOB = Job((TensorInfo("w", (8,)),))
PART = struct.Struct("<iiiiixxxx")
"""Rank, step, bucket, round, number of the plan."""
Until = Generator[Callable[[], bool], None, None]
"""What a process does, up to its end. It yields a condition whenever it waits."""


class Part(NamedTuple):
    """One worker's contribution to one sum."""

    rank: int
    step: int
    bucket: int
    round: int
    plan: int


def after(weights: int, results: Iterable[tuple[float, bytes]], norms: Iterable[Sequence[float]]) -> int:
    """Returns what weights become by one exchange; any difference in what was applied gives other ones."""
    data = [repr([*map(list, norms)]).encode(), *(struct.pack("<d", weight) + body for weight, body in results)]
    return zlib.crc32(b"".join(data), weights)


class Link:
    """A worker's connections to the servers."""

    def __init__(self, world: Network, rank: int) -> None:
        self._world, self.rank = world, rank
        self.inflight = [InFlightRequests(SERVER_BASE + server) for server in range(world.servers)]

    def request(self, peer: int, header: Header, body: memoryview | bytes = b"") -> Handle:
        request = self.inflight[peer - SERVER_BASE].add(header, bytes(body))
        self._world.send_up(self.rank, peer - SERVER_BASE, Frame(request.header, bytes(body)))
        return request

    def repeat(self, server: int) -> None:
        for request in self.inflight[server].pending():
            self._world.send_up(self.rank, server, Frame(request.header, bytes(request.body)))

    def arrived(self, server: int, frame: Frame) -> None:
        if (request := self.inflight[server].answer(frame.header)) is not None:
            request.complete(Message(SERVER_BASE + server, frame.header, memoryview(frame.body)))


class Follower(ResultFollower):
    """Follows exchanges of simulated weights."""

    def is_ready(self) -> bool:
        """Returns whether all results and rows of the next exchange have arrived."""
        found, row = 0, self._row
        while self._rows is not None and self._rows.has(row):
            found += bool(section_values(rows_in(self._rows._answers[row].message()).values(), LENGTHS))
            row += 1
        return all(stream.has(self._step) for stream in self._streams.values()) and (
            self._rows is None or found >= len(self._fragments))

    def is_at(self, step: int) -> bool:
        """Applies what has arrived. Returns whether the weights are those before exchange `step`."""
        self.check()
        while self._step < step and self.is_ready():
            self.advance(self._step + 1)
        return self._step >= step

    def _apply(self, number: int, buckets: Sequence[Bucket]) -> None:
        norms = self._norms(0.0)
        taken = [self._streams[bucket.id].take(self._step, 0.0) for bucket in buckets]
        results = [(message.header.weight, bytes(message.body)) for message in taken]
        self._starts[0] = torch.tensor(after(self.weights, results, norms))

    @property
    def weights(self) -> int:
        return int(self._starts[0])


class Given(msgspec.Struct):
    """A state that members give: the real record, and the weights, which a worker that has followed receives earlier."""

    told: GivenState
    weights: int | None = None

    def __iter__(self) -> Iterator[str]:
        """The names of the tensors."""
        return iter(())

    @property
    def values(self) -> object:
        """What is equal on all members: a member may not know the names of workers that have left again."""
        members = () if self.told.epoch is None else self.told.epoch.members
        return group_by_site(members), msgspec.structs.replace(self.told, epoch=None), self.weights


class Replica:
    """Creates the state that joining workers receive."""

    most_nbytes = 1 << 20

    def state_for_joiner(self, context: Worker, plan: Plan, epoch: Epoch) -> Any:
        members = context.members
        exits = {m.rank: members.confirmed for m in context.epoch.members if m not in epoch.members}
        return Given(GivenState(
            step=context.step, exchanged_steps=context.exchanged_steps, matched=context.world.matched, epoch=epoch,
            joined=context.now.joined, generation=context.plan_number, row=context.rows.transport.number, exits=exits,
            confirmed=members.row_exchanged_steps,
            admitted=(*sorted(members.admitted),), followers=(*sorted(members.followers),),
            totals=dict(sorted(context.totals.items()))), context.weights)

    def invitation(self, context: Worker, plan: Plan, step: int) -> bytes:
        return msgspec.msgpack.encode(Given(GivenState(follow=True, step=step, row=context.rows.transport.number,
                                                       generation=context.plan_number, matched=context.world.matched)))

    def remaining_state(self, state: Given, given: Collection[str]) -> Any:
        return Given(state.told)

    def encoded(self, state: Given, *, apart: bool) -> tuple[bytes, bytes]:
        return msgspec.msgpack.encode(state), b""


class Transfer:
    """The transfer of a state on one member, as in ChangingMembers."""

    def __init__(self, giver: Worker, givers: Sequence[int], joining: Sequence[Joining], data: bytes, name: str,
                 former: Transfer | None) -> None:
        self.giver, self.givers, self.joining, self.data, self.name = giver, givers, joining, data, name
        self.former = former
        self.over = False

    def is_alive(self) -> bool:
        return not self.over

    def join(self, limit_s: float | None = None) -> None:
        """The giver waits as soon as the call that makes it wait has returned."""
        if limit_s is None:
            self.giver.awaited = self

    def give(self) -> Until:
        giver, plan = self.giver, self.giver.plan_number
        yield lambda: self.former is None or self.former.over
        while True:
            epoch = giver.newest
            givers, new = ([rank for rank in ranks if rank in numbers(epoch)]
                           for ranks in (self.givers, [one.member for one in self.joining]))
            if not new or giver.id not in givers:
                break
            if (yield from self._complete(epoch, givers, new)):
                if self.name == "snapshot" and giver.plan_number == plan:
                    giver.members._caught_up |= {*new}  # type: ignore[attr-defined]
                break
            giver.world.counts[f"{self.name}s begun again"] += 1
        self.over = True

    def _complete(self, epoch: Epoch, givers: list[int], new: list[int]) -> Generator[Callable[[], bool], None, bool]:
        """Gives the state once. Returns False if one of those who take part has left."""
        giver, first = self.giver, numbers(epoch)[0]
        if giver.id == first:
            value = msgspec.msgpack.encode((givers, new, self.data))
            giver.world.put(giver.id, {(f"{self.name}/{member}", first): value for member in new})
        announced = yield from giver.announced(self.name, new[0], first, {*givers, *new})
        return announced is not None and (yield from giver.met(self.name, announced))


class Changing(ChangingMembers):
    """The members of a job, as one simulated member knows them. Threads and process groups are left out."""

    def _start_transfer(self, givers: Sequence[int], joining: Sequence[Joining], state: tuple[bytes, bytes], name: str) -> None:
        context: Any = self._context
        self._await_epoch(joining)
        given = msgspec.msgpack.decode(state[0], type=Given)
        context.world.agree(f"{name} for {[one.member for one in joining]}", given.values)
        context.world.counts[name] += context.id == givers[0]
        former: Any = self._transfer
        transfer = Transfer(context, givers, joining, state[0], name, former)
        self._transfer = transfer  # type: ignore[assignment]
        context.run(transfer.give())

    def _await_epoch(self, joining: Sequence[Joining]) -> None:
        context: Any = self._context
        if context.newest.generation < max(one.generation for one in joining):
            context.hear()

    def _continue_with(self, members: Sequence[Member], what: str, level: int) -> None:
        context: Any = self._context
        changes = len({m.rank for m in context.epoch.members} ^ {m.rank for m in members})
        context.switch_epoch(msgspec.structs.replace(
            context.epoch, generation=context.epoch.generation + changes, members=tuple(members)))
        context.rows.change(SimpleNamespace(ranks=range(len(members))), context.ranks)


class Worker:
    """One worker, with what ChangingMembers needs of its job (`context`), of the buckets (`worker`) and of its connections
    (`uplink`). Until it has the job's state it waits for that."""

    error, late, address, waits = None, False, "", SimpleNamespace(notice_s=0.0)
    groups = SimpleNamespace(waits=lambda *_: contextlib.nullcontext())

    def __init__(self, world: Network, rank: int, home: Home) -> None:
        self.world, self.id, self.home = world, rank, home
        self.worker = self.uplink = self.membership = self
        self.newest, self.first, self.step = world.newest, STEPS, 0
        self.alive, self.hung, self.done, self.started = True, False, False, False
        self.transport = Link(world, rank)
        self.components = SimpleNamespace(add=lambda each: None, remove=lambda each: None, complete=lambda pending: None)
        self.members: Any = FixedMembers()
        self.local, self.site = world.local or None, LocalSite()
        self.job = SimpleNamespace(numel=FOLLOW_NBYTES if world.follows else 0)
        self.buckets = [SimpleNamespace(buffer=False, served=False)] * (world.rounds - 1)
        self.now = SimpleNamespace(joined=0)
        self.awaited: Transfer | None = None
        self.follower: Follower | None = None
        self.committed: dict[int, dict[int, bytes]] = {}
        self.results: dict[int, tuple[float, bytes]] = {}
        self.sent, self.group, self.fresh = list[Bucket](), 0, True
        """Buckets of the fragment in flight, and the number of the next fragment."""
        self._tasks: list[tuple[Until, Callable[[], bool]]] = []

    def start(self, told: GivenState, weights: int) -> None:
        """Begins to train with this state."""
        assert told.epoch is not None
        self.started, self.step, self.first, self.weights = True, told.step, told.step, weights
        self.epoch, self.plan_number, self.totals = told.epoch, told.generation, dict(told.totals)
        served = ServedRows(self.transport, self.id, 0.0)  # type: ignore[arg-type]
        self.rows = StepRows(served, SimpleNamespace(ranks=range(len(self.ranks))), may_leave=True)  # type: ignore[arg-type]
        served.begin(self.plan_number)
        self.rows.change(SimpleNamespace(ranks=range(len(self.ranks))), self.ranks)  # type: ignore[arg-type]
        self.now.joined = served.joined = told.joined
        served.number = told.row
        self.norms = self.rows.section(LENGTHS, stays=True)
        context: Any = self
        self.members = members = Changing(context, CONFIG, "", Replica(), told.joined)  # type: ignore[arg-type]
        members.admitted |= {*told.admitted}
        members.followers |= {*told.followers}
        members.confirmed = members.row_exchanged_steps = told.confirmed
        self.run(self._train())

    def run(self, work: Until) -> None:
        self._tasks.append((work, lambda: True))

    def go(self) -> None:
        """Continues what does not wait, up to the next wait."""
        going = True
        while going:
            going = False
            for task in [*self._tasks]:
                if self.alive and not self.hung and task in self._tasks and (following := self._next(*task)) is not task[1]:
                    self._tasks.remove(task)
                    self._tasks += [] if following is None else [(task[0], following)]
                    going = True

    def _next(self, work: Generator[Callable[[], bool], None, Any], until: Callable[[], bool]) -> Callable[[], bool] | None:
        """Returns the next condition for which `work` waits, which may be the same one; None if it has ended."""
        try:
            return next(work) if until() else until
        except CommError as error:
            if self.started and self.id not in numbers(self.world.newest):
                self.alive = False  # it has heard that the job continues without it
                return until
            return work.throw(error)
        except StopIteration:
            return None

    # What ChangingMembers calls.

    @property
    def ranks(self) -> list[int]:
        return numbers(self.epoch)

    @property
    def plan(self) -> Plan:
        return self.world.plan_of(self.plan_number)

    @plan.setter
    def plan(self, plan: Plan) -> None: ...

    @property
    def exchanged_steps(self) -> int:
        return self.step

    @property
    def begun(self) -> bool:
        return bool(self.sent or self.group)

    def switch_epoch(self, epoch: Epoch) -> None:
        self.epoch = epoch
        if halves := [rank for rank in self.ranks if not {*self.world.members[rank].home.ranks} <= {*self.ranks}]:
            self.world.problems.append(f"worker {self.id} continues with {halves}, but not with all of their homes")

    def report_joining(self, server: int, number: int, member: int, generation: int) -> Handle:
        header = Header(Kind.PLAN, self.plan_number, number, sender=self.id, flags=Flag.ABANDON)
        return self._request(server, header, msgspec.msgpack.encode(Joins(number, member, generation)))

    def await_report(self, handle: Handle) -> None: ...

    def check(self) -> None: ...

    def log_decision(self, *what: object) -> None: ...

    def display_name(self, peer: str) -> str:
        return peer

    def stepped_apart(self) -> bool:
        return False

    def latch(self, error: Exception) -> None:
        self.world.problems.append(f"worker {self.id}: {error!r}")

    # Joining.

    def join(self) -> Until:
        """Receives the state, like _Receiver in joining.py."""
        given = yield from self._take("state", self._invited)
        if given.told.follow:
            snapshot = yield from self._take("snapshot", self._shown)
            given = yield from self._take("rest", lambda given: self._at(given.told.step))
            assert self.follower is not None
            assert snapshot.weights is not None
            given.weights = self.follower.weights
            self.follower.stop()
            self.world.counts["joins after following"] += 1
        self.world.counts["joins"] += 1
        self.start(given.told, given.weights)

    def _invited(self, given: Given) -> bool:
        if given.told.follow and self.follower is None:
            self.plan_number, nothing = given.told.generation, cast(Any, None)
            self.follower = Follower(cast(Any, self), JOB, self.plan, given.told, nothing, torch.device("cpu"), 0.0)
        return True

    def _shown(self, given: Given) -> bool:
        assert self.follower is not None
        self.follower.begin(given.told.step, given.told.row, [torch.tensor(given.weights)], [])
        return True

    def _at(self, step: int) -> bool:
        assert self.follower is not None
        return self.follower.is_at(step)

    def _take(self, name: str, enter: Callable[[Given], bool]) -> Generator[Callable[[], bool], None, Any]:
        """Takes part in a transfer. `enter` is repeated until it returns True."""
        while True:
            present = numbers(self.newest)
            if self.id not in present or present[0] == self.id:
                return (yield from self._ends())
            try:
                announced = yield from self.announced(name, self.id, present[0], {self.id})
                if announced is not None:
                    given = msgspec.msgpack.decode(announced[2], type=Given)
                    yield lambda given=given: enter(given)
                    if (yield from self.met(name, announced)):
                        return given
            except CommError:
                self.world.counts["follower ends"] += 1
                return (yield from self._ends())

    def _ends(self) -> Generator[Callable[[], bool], None, Any]:
        self.world.remove(self, "leaves")
        self.alive = False
        yield lambda: False

    def announced(self, name: str, new: int, first: int, partners: set[int]) -> Generator[Callable[[], bool], None, Any]:
        """Waits for the first member's announcement of a transfer: returns givers, receivers and data. None: one of those who
        take part has left."""
        found: list[Any] = []

        def known() -> bool:
            if self.follower is not None:
                self.follower.check()
            reply = self.world.call(KvRequest(self.home.token, want=((f"{name}/{new}", first),)))
            if reply.values and reply.values[0] is not None:
                givers, joining, data = msgspec.msgpack.decode(reply.values[0])
                among = {*givers, *joining}
                if first in givers and new in joining and among <= {*numbers(self.newest)} and partners <= among:
                    found[:] = givers, joining, data
                    return True
            return not partners | {first} <= {*numbers(self.newest)}

        yield known
        return found or None

    def met(self, name: str, announced: Any) -> Generator[Callable[[], bool], None, Any]:
        """Waits until all who take part in a transfer have completed it. Returns False if one of them has left before."""
        givers, joining, _ = announced
        what, among, result = f"{name}/{joining[0]}.{len(givers)}.{len(joining)}", [*givers, *joining], list[bool]()

        def over() -> bool:
            if self.follower is not None:
                self.follower.check()
            result[:] = [met] if (met := self.world.meet(what, self, among)) is not None else []
            return bool(result)

        yield over
        return result[0]

    # Training.

    def _train(self) -> Until:
        overlap = self.world.overlap
        while True:
            if overlap:
                yield from self._merge()
            if self.group == 0:
                if self.step == STEPS:
                    self.done = True
                    return
                yield from self._begin()
            yield self.world.some_time  # computes
            self._send()
            if not overlap or (not self.local and (self.fresh or self.members.entering)):
                yield from self._merge()
            self.fresh = False
            yield self._is_read
            self.members.end_exchange(early=False)
            self.rows.send()
            self.world.agree(f"members in row {self.rows.transport.number} of plan {self.plan_number}", self.ranks)

    def _begin(self) -> Until:
        if self.step in self.world.switches and not self.fresh:
            yield from self._switch_plan()
        self.world.agree(f"weights before step {self.step}", self.weights)
        with self.members.without_joins() if self.step in self.world.early else contextlib.nullcontext():
            yield self._may_begin
            self.awaited = None
            self.members.begin_exchange()
        transfer = self.awaited
        if transfer is not None:
            yield lambda: transfer.over

    def _may_begin(self) -> bool:
        """Returns whether `begin_exchange` would not wait."""
        members = self.members
        joins = members._joining and members._admits and self.step >= members._joining[0].first
        given = members._transfer is None or not members._transfer.is_alive()
        if joins:
            return given and self.is_known() and self._is_read()
        return not members._following or given or self.world.some_time()

    def is_known(self) -> bool:
        """Returns whether all servers know of the joining workers."""
        return all(handle.done() for handle in self.members._reported)

    def _is_read(self) -> bool:
        """Returns whether no row of proposals is in flight."""
        section = self.members._rows
        return not section.sent or section.arrived

    @property
    def contribution(self) -> float:
        """The weight in sums: a worker that joins local steps has trained nothing yet."""
        return 0.0 if self.local and self.step == self.first and self.now.joined else float(len(self.home.ranks))

    def _send(self) -> None:
        plan = self.plan
        self.sent = [plan.buckets[place] for place in divide_into_fragments(plan.buckets, plan.fragments)[self.group]]
        self.group = (self.group + 1) % plan.fragments
        for bucket in self.sent:
            parts = self.home.parts.setdefault((self.plan_number, self.step, bucket.id), {})
            parts[self.id] = b""
            if len(parts) == len(self.home.ranks):
                self.world.members[bucket.owner_in(self.home.ranks)].push(bucket, 0)
        if self.world.matched:
            self.norms.start(self.contribution, float(self.id * 1000 + self.step * 100 + self.group))
            self.rows.send()

    def push(self, bucket: Bucket, r: int) -> None:
        """Sends the home's contribution."""
        if not self.alive or self.hung:
            return
        header = Header(Kind.PUSH, self.plan_number, self.step, bucket.id, round=r, codec=RecordingOps.codec, sender=self.id,
                        weight=self.contribution, used=1, total=self.totals[bucket.id], joined=self.now.joined)
        body = b"".join(PART.pack(rank, self.step, bucket.id, r, self.plan_number) for rank in self.home.ranks)
        self._request(bucket.server, header, body).on_done(lambda answer: self._result(bucket, answer.message()))

    def _request(self, server: int, header: Header, body: bytes) -> Handle:
        return self.transport.request(SERVER_BASE + server, header, body)

    def _result(self, bucket: Bucket, message: Message) -> None:
        if message.header.round + 1 < self.world.rounds:
            self.push(bucket, message.header.round + 1)
            return
        for rank in self.home.ranks:
            mate = self.world.members[rank]
            mate.results[bucket.id] = message.header.weight, bytes(message.body)
            mate.totals[bucket.id] = message.header.weight or mate.totals[bucket.id]
            self.world.ready.append(mate)

    def _merge(self) -> Until:
        """Waits for the results of the fragment in flight, and applies them."""
        if not self.sent:
            return
        yield lambda: all(b.id in self.results for b in self.sent) and (not self.world.matched or self.norms.arrived)
        norms = self.norms.read() if self.world.matched else []
        self.weights = after(self.weights, [self.results[b.id] for b in self.sent], norms)
        if self.group == 0:
            self.committed[self.step] = {bucket: body for bucket, (_, body) in self.results.items()}
            self.results = {}
            self.step += 1
        self.sent = []
        if self.members.entering:
            yield self._is_read
            self.members.end_first_step()

    # Another plan.

    def _switch_plan(self) -> Until:
        plan = self.plan_number + 1
        yield self._is_read
        yield from self._together(f"plan {plan} is agreed", lambda: [])
        yield from self._together(f"plan {plan} is sent", lambda: self._send_plan(plan))
        self.plan_number, self.totals = plan, self.world.totals_of(plan)
        self.rows.begin(plan)
        self.members.new_plan()
        self.world.counts["plans"] += self.id == self.ranks[0]

    def _send_plan(self, plan: int) -> list[Handle]:
        return [self._request(server, Header(Kind.PLAN, plan, sender=self.id), b"") for server in range(self.world.servers)
                if server % len(self.ranks) == self.ranks.index(self.id)]

    def _together(self, what: str, act: Callable[[], list[Handle]]) -> Until:
        """Acts together with all members. If members are lost, the others repeat it."""
        while True:
            handles = act()
            yield lambda handles=handles: all(handle.done() for handle in handles)
            yield lambda: self.world.meet(what, self, self.ranks) is not None
            if self.world.meet(what, self, self.ranks):
                return
            yield self._is_read
            self.members.continue_without_departed()

    # What arrives.

    def take(self, server: int, frame: Frame) -> None:
        if self.alive and not self.hung:
            self.transport.arrived(server, frame)
            self.go()

    def hear(self) -> None:
        """Receives the coordinator's newest epoch."""
        self.newest = self.world.newest
