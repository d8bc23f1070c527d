"""The summation service as a state machine: contributions in, replies out.

It does no input or output, reads no clock and does not know codecs: each bucket's codec side is passed in as `Ops`.
Contributions to one (step, round) are added in member order, whatever their order of arrival, so sums are equal bit for bit in
every run. Early contributions wait encoded. Each contribution is applied at most once. The results of the last two steps are
kept for members that ask again.

Every message is checked before it changes anything. CorruptFrame means that its sender broke the protocol or its format. Any
other error is the server's own fault, and the sum under way is lost.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from commlayer.errors import CorruptFrame
from commlayer.records import Record
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, Message, peer_name

log = logging.getLogger("commlayer")


class Summation:
    """All buckets of one server. `push` may be called from any number of threads."""

    def __init__(self, server: int, generation: int, ops: dict[int, Any], senders: dict[int, tuple[int, ...]]) -> None:
        """`ops`: by bucket. `senders`: by bucket, the members that contribute to it, in the order in which they are added."""
        self._keep: WriteEntry | None = None
        self.peer = SERVER_BASE + server
        self.generation = generation
        self.fenced = 0
        """Messages of earlier views. None of them changed anything."""
        self.cells = {bucket: BucketSum(bucket, o, senders[bucket]) for bucket, o in ops.items()}

    # ---- journal

    def remember(self, keep: WriteEntry | None) -> None:
        """Writes all state with `keep` now, and then every change before the replies that depend on it. None: stops that."""
        self._keep = keep
        for cell in self.cells.values():
            with cell.lock:
                self._remember(cell)

    def _remember(self, cell: BucketSum) -> None:
        if self._keep is None:
            return
        cell.recompute_sum()
        last = max(cell.results, default=None)
        header, body = cell.results[last] if last is not None else (None, b"")
        step = cell.step if cell.open else cell.awaited
        memory = SumEntry(step, cell.round, cell.open, cell.again_header, header, bytes(body))
        self._keep(cell.bucket, encode_entry(memory), cell.ops.remember())

    def recall(self, bucket: int, words: bytes, state: bytes) -> None:
        """Restores what an earlier process journaled. If this raises CorruptFrame or ValueError, call `forget`."""
        cell, journaled = self.cells[bucket], decode_entry(words)
        body = memoryview(journaled.memory.body)
        if journaled.result is not None:
            if not journaled.result.flags & Flag.ABANDON:
                room = cell.out(journaled.result.step, journaled.result.round)
                room[: len(body)] = body
                body = room[: len(body)].toreadonly()
            cell.results = {(journaled.result.step, journaled.result.round): (journaled.result, body)}
        cell.ops.recall(state, body)
        if journaled.memory.open and journaled.memory.step is not None:
            cell.begin(journaled.memory.step, journaled.memory.round)
            if journaled.again_header is not None:
                cell.expected, cell.again_header = journaled.again_header.weight, journaled.again_header
        else:
            cell.idle(journaled.memory.step)
        cell.resumed = True

    def forget(self, bucket: int) -> None:
        """Drops the bucket's state and residual. The next contribution decides at which step it starts."""
        cell = self.cells[bucket]
        cell.forget_results()
        cell.ops.begin_anew()
        cell.idle(None)
        cell.resumed = True

    # ---- contributions

    def push(self, message: Message, now: float, release: Callable[[Message], None] = lambda _: None) -> list[Reply]:
        """Takes one contribution. CorruptFrame may name another member, if this contribution lets an invalid one be added.

        `release` is called with each message whose body is no longer needed.
        """
        h = message.header
        if self._ended(message):
            release(message)
            return []  # its sender pushes again in the new view
        cell = self._cell(message)
        with cell.lock:
            if cell.ended:
                release(message)
                return []
            self._fits(cell, message, now)
            result = cell.results.get((h.step, h.round))
            if result is not None:
                release(message)
                return [Reply(message.peer, *result)]
            self._admit(cell, message)
            if cell.again_header is not None and not h.flags & (Flag.AGAIN | Flag.ABANDON):
                release(message)
                return [Reply(message.peer, cell.again_header, b"")]  # it was sent before the AGAIN reached its sender
            contributors = cell.contributors()
            if message.peer in contributors:
                release(message)
                return []  # a repeat
            if not contributors:
                cell.since, cell.first = now, message.peer
            cell.early[message.peer] = message
            return self._advance(cell, release)

    def _ended(self, message: Message) -> bool:
        """Whether the message is of an earlier view, in which the bucket may have been another one."""
        if message.header.generation >= self.generation:
            return False
        if message.header.sender != message.peer:
            raise _breach(message, f"sender {peer_name(message.header.sender)} in the header")
        self.fenced += 1
        return True

    def _cell(self, message: Message) -> BucketSum:
        """Checks sender, generation and bucket, which every message must have right. Returns the bucket's sum."""
        h = message.header
        if h.sender != message.peer:
            raise _breach(message, f"sender {peer_name(h.sender)} in the header")
        if h.generation > self.generation:  # for example of a plan that another worker was to send to this server
            raise _breach(message, f"generation {h.generation}, here {self.generation}")
        cell = self.cells.get(h.bucket)
        if cell is None:
            raise CorruptFrame(f"bucket {h.bucket} is not of this server", peer=peer_name(message.peer), step=h.step)
        return cell

    def _fits(self, cell: BucketSum, message: Message, now: float) -> None:
        h, ops = message.header, cell.ops
        if message.peer not in cell.members:
            raise _breach(message, "is no member of this bucket's sum")
        if h.round >= ops.rounds or h.parts != 1 or h.part != 0:
            raise _breach(message, f"round {h.round}, part {h.part} of {h.parts}")
        if h.codec != ops.codec or not 0.0 <= h.weight < float("inf") or not 0.0 <= h.total < float("inf"):
            raise _breach(message, f"codec {h.codec} with weight {h.weight} of {h.total}")
        if bool(h.flags & Flag.MEAN) != ops.means and not h.flags & Flag.ABANDON:
            verb, kind = ("lacks", "a mean of buffers") if ops.means else ("has", "a sum of parts")
            raise _breach(message, f"{verb} flag MEAN, and this bucket's is {kind}")
        nbytes, allowed = cell.count_bytes(message.peer, len(message.body), now)
        if nbytes > allowed:
            raise _breach(message, f"sent {nbytes} bytes within a step, the plan allows {allowed}")
        bound = MOST_REASON_NBYTES if h.flags & Flag.ABANDON else ops.bound
        if len(message.body) > bound:
            raise _breach(message, f"{len(message.body)} bytes, at most {bound} for this bucket")

    def _admit(self, cell: BucketSum, message: Message) -> None:
        """Checks that a contribution belongs to the sum under way. Between steps it begins the next one."""
        h = message.header
        if cell.resumed:
            self._catch_up(cell, h)
        if not cell.open and h.round == 0 and cell.awaited in (None, h.step):
            cell.begin(h.step, 0)
        if cell.open and (h.step, h.round) == (cell.step, cell.round):
            return
        if cell.first is not None:
            state = f"{peer_name(cell.first)} is in round {cell.round} of step {cell.step}"
        else:
            begun = cell.open or cell.awaited is not None
            state = f"round {cell.round} of step {cell.step} is next" if begun else "no step has begun"
        # Members differ in their step when one has restored another checkpoint or has switched to another view.
        raise _breach(message, f"contribution out of order: round {h.round} of step {h.step}, while {state}", "E-STEPS-DIFFER")

    def _catch_up(self, cell: BucketSum, h: Header) -> None:
        """After a restart, the first contribution shows whether the journal holds every reply that was sent."""
        cell.resumed = False
        step = cell.step if cell.open else cell.awaited
        if step is None or (h.step, h.round) > (step, cell.round):
            if step is not None:
                log.warning("bucket %d: the journal ends before step %d, round %d: its residual restarts at zero", cell.bucket,
                            h.step, h.round)
                cell.ops.begin_anew()
                cell.forget_results()
            cell.begin(h.step, h.round)

    def _advance(self, cell: BucketSum, release: Callable[[Message], None]) -> list[Reply]:
        """Adds early contributions in member order. When all members have contributed, returns the result for all."""
        ops, r = cell.ops, cell.round
        lean = cell.recomputable if self._keep is None else None
        if lean and cell.next + len(cell.early) < len(cell.members):
            return []  # until all are here, the payloads take less memory than their sum
        sum_of: list[Message] = []
        if cell.accs[r] is None:
            cell.accs[r] = ops.zeros(r)
        while cell.next < len(cell.members) and cell.members[cell.next] in cell.early:
            message = cell.early.pop(cell.members[cell.next])
            h = message.header
            first = cell.next == 0
            if not first and h.undone != cell.undone:
                raise _breach(message, f"{_applied(h.undone)} of the previous step, {peer_name(cell.members[0])} "
                                       f"{_applied(cell.undone)}: all workers must step, skip and clear "
                                       "gradients at the same steps",
                              "E-STEPS-DIFFER")
            if first and r == 0:
                if h.undone:
                    cell.undo(h.undone)  # before `_add`, which overwrites that step's sum
                for held in cell.held:
                    release(held)
                cell.held.clear()
            if cell.expected and h.total != cell.expected and not h.flags & Flag.ABANDON:
                raise _breach(message, f"coded for a total weight of {h.total:g}, expected {cell.expected:g}")
            if h.flags & Flag.ABANDON:
                cell.abandoned = cell.abandoned or bytes(message.body)
            else:
                self._add(cell, message)
            cell.next += 1
            cell.order, cell.undone = h.order, h.undone
            if lean:
                sum_of.append(message)
            else:
                release(message)
        if cell.next < len(cell.members):
            return []
        mismatch = self._weights_differ(cell)
        if lean and not (cell.abandoned or mismatch):
            replies = self._emit(cell)
            cell.held = sum_of
            lean.give_back(cell.accs[0])
            return replies
        for message in sum_of:
            release(message)
        if cell.abandoned:
            return self._abandon(cell)
        return self._again(cell) if mismatch else self._emit(cell)

    def _add(self, cell: BucketSum, message: Message) -> None:
        h = message.header
        try:
            if cell.ops.means:
                cell.ops.weigh(message.body, h.weight, cell.summed == 0)
            else:
                cell.ops.add(cell.round, message.body, cell.accs[cell.round], cell.summed == 0)
        except (CorruptFrame, ValueError) as error:
            raise _breach(message, str(error)) from None
        cell.summed += 1
        cell.totals.add(h.total)
        cell.weight += h.weight
        cell.used |= h.used

    def _abandon(self, cell: BucketSum) -> list[Reply]:
        cell.ops.skip()
        replies = self._reply(cell, Flag.ABANDON, memoryview(cell.abandoned))
        cell.idle(cell.step + 1)
        self._remember(cell)
        return replies

    def _weights_differ(self, cell: BucketSum) -> bool:
        """Whether a member coded its part for another total weight. Its residual would then be applied with a wrong factor."""
        total = as_float32(cell.weight)
        return cell.round == 0 and cell.ops.in_means and total > 0 and cell.totals != {total}

    def _again(self, cell: BucketSum) -> list[Reply]:
        """Asks all members to code the step again with the correct total weight. No result has been sent yet."""
        header = self._header(cell, Flag.AGAIN)
        expected = as_float32(cell.weight)
        cell.begin(cell.step, 0)
        cell.taken.clear()  # the repeats are requested here, so they do not count against the members' limits
        cell.expected, cell.again_header = expected, header
        self._remember(cell)
        return [Reply(member, header, b"") for member in cell.members]

    def _emit(self, cell: BucketSum) -> list[Reply]:
        ops, step, r = cell.ops, cell.step, cell.round
        out = cell.out(step, r)
        replies = self._reply(cell, Flag.NONE, out[: ops.emit(r, cell.accs[r], out)].toreadonly())
        if r + 1 < ops.rounds:
            cell.begin(step, r + 1)
        else:
            cell.idle(step + 1)
        self._remember(cell)
        return replies

    def _reply(self, cell: BucketSum, flags: int, body: memoryview) -> list[Reply]:
        """Returns the result for each member, and keeps it for members that ask again."""
        header = self._header(cell, flags)
        cell.results[(cell.step, cell.round)] = header, body
        for old in [k for k in cell.results if k[0] <= cell.step - KEPT_STEPS]:
            del cell.results[old]
        return [Reply(member, header, body) for member in cell.members]

    def _header(self, cell: BucketSum, flags: int) -> Header:
        return Header(Kind.RESULT, self.generation, cell.step, cell.bucket, round=cell.round, codec=cell.ops.codec,
                      sender=self.peer, order=cell.order, flags=flags, weight=cell.weight, used=cell.used)

    def undo(self, message: Message) -> None:
        """Rolls back what the workers did not apply of the last step, where no PUSH will report it."""
        if self._ended(message):
            return
        cell = self._cell(message)
        with cell.lock:
            self._between(cell, message)
            cell.undo(message.header.undone)
            self._remember(cell)

    def end(self, step: int, undone: Mapping[int, int]) -> None:
        """Ends the view in the middle of that step: see BucketSum.end. Later messages of the view change nothing."""
        for cell in self.cells.values():
            with cell.lock:
                cell.end(step, undone.get(cell.bucket, 0))

    def busy(self) -> bool:
        """Whether a contribution waits for others."""
        return any(cell.contributors() for cell in self.cells.values())

    def stalled(self, before: float) -> list[Stall]:
        """Sums that have waited since `before` or longer, each with the missing members."""
        stalls = []
        for cell in self.cells.values():
            with cell.lock:
                contributors = cell.contributors()
                if contributors and cell.since <= before:
                    missing = tuple(m for m in cell.members if m not in contributors)
                    stalls.append(Stall(cell.bucket, cell.step, missing, tuple(sorted(contributors)), cell.since))
        return stalls

    def snapshot(self, message: Message) -> list[Reply]:
        """The codec state between two steps, after rolling back what was not applied of the last one."""
        if self._ended(message):
            return []
        cell, h = self._cell(message), message.header
        with cell.lock:
            self._between(cell, message)
            if h.undone:
                cell.undo(h.undone)
                self._remember(cell)
            state = cell.ops.snapshot()
        return [Reply(message.peer, h._replace(kind=Kind.STATE, undone=0, sender=self.peer), state)]

    def restore(self, message: Message) -> list[Reply]:
        """Restores saved state, completely or not at all. The next contribution is of the message's step. Drops results."""
        if self._ended(message):
            return []
        cell, h = self._cell(message), message.header
        with cell.lock:
            self._between(cell, message)
            try:
                cell.ops.restore(message.body)
            except (CorruptFrame, ValueError) as error:
                raise _breach(message, f"sent a state that does not fit: {error}") from None
            cell.forget_results()
            cell.idle(h.step)
            self._remember(cell)
        return [Reply(message.peer, h._replace(kind=Kind.STATE_OK, sender=self.peer), b"")]

    def repeated(self, message: Message) -> list[Reply]:
        """Replies again to a request that was done already, since the reply may have been lost. A sender that has moved on to
        the next sum has received its reply, so it gets none."""
        if self._ended(message):
            return []
        cell, h = self._cell(message), message.header
        with cell.lock:
            if cell.open or h.kind == Kind.UNDO:
                return []
            if h.kind == Kind.STATE:
                return [Reply(message.peer, h._replace(kind=Kind.STATE_OK, sender=self.peer), b"")]
            return [Reply(message.peer, h._replace(kind=Kind.STATE, undone=0, sender=self.peer), cell.ops.snapshot())]

    def _between(self, cell: BucketSum, message: Message) -> None:
        if cell.open:
            raise _breach(message, f"{Kind(message.header.kind).name} while step {cell.step} is being summed")


def _applied(undone: int) -> str:
    return "did not apply some averages" if undone else "applied all"


def as_float32(weight: float) -> float:
    """Rounded as in a header, so that both ends compare the same number."""
    return struct.unpack("<f", struct.pack("<f", weight))[0]  # type: ignore[no-any-return]


def _breach(message: Message, what: str, code: str = "") -> CorruptFrame:
    return CorruptFrame(what, peer=peer_name(message.peer), step=message.header.step, bucket=message.header.bucket, code=code)


KEPT_STEPS = 2
EVERY_SLICE = (1 << 64) - 1
REPEATS = 16
"""A member may repeat its part of a step this often, for example after a reconnect or when parts are coded again."""
REPEAT_EVERY_S = 1.0
"""One more repeat is allowed per this time, since a step may wait long for one member while others reconnect repeatedly."""
OVERHEAD_NBYTES = 512
"""Cost of a message in addition to its body."""
MOST_REASON_NBYTES = 256
"""Longest reason for aborting a step."""
WriteEntry = Callable[[int, bytes, bytes], None]
"""Writes the metadata and state of a bucket's sum; both are durable when it returns."""


class Reply(NamedTuple):
    peer: int
    header: Header
    body: memoryview | bytes


class Stall(NamedTuple):
    """A sum that waits: for which members, since when, and which members have contributed."""

    bucket: int
    step: int
    missing: tuple[int, ...]
    waiting: tuple[int, ...]
    since: float


class BucketSum:
    """One bucket: the sum under way or the last finished step, and the results that are kept."""

    def __init__(self, bucket: int, ops: JournaledOps, members: tuple[int, ...]) -> None:
        self.bucket, self.ops, self.members = bucket, ops, members
        self.lock = threading.Lock()
        self.accs: list[Any] = [None] * ops.rounds
        # One buffer per kept step and round; a result stays valid until its step leaves the window.
        self.outs: dict[tuple[int, int], memoryview] = {}
        self.results: dict[tuple[int, int], tuple[Header, memoryview]] = {}
        self.recomputable: RecomputableOps | None = None
        """Set to `ops` if payloads are kept between steps instead of their sum, to save memory."""
        if isinstance(ops, RecomputableOps) and ops.worth_giving_back(len(members)):
            self.recomputable = ops
        self.held: list[Message] = []
        """The payloads of the last result, in the order in which they were added, if the sum's memory was given back."""
        self.ended = False
        """The view has ended: nothing more is added."""
        self.idle(None)

    def idle(self, step: int | None) -> None:
        """Enters the state between sums. `step` is the next one; None: the first contribution names it."""
        self.begin(step or 0, 0)
        self.open, self.awaited = False, step
        self.taken: dict[int, int] = {}
        """Bytes from each member since then."""
        self.taking_since = 0.0
        """When the first of these bytes came."""

    def begin(self, step: int, r: int) -> None:
        self.open = True
        self.first: int | None = None  # the member that contributed first
        self.step, self.round, self.next = step, r, 0
        self.early: dict[int, Message] = {}
        self.weight, self.used, self.order, self.undone, self.since = 0.0, 0, 0, 0, 0.0
        self.totals: set[float] = set()
        self.expected = 0.0
        """Total weight of all members, after they were asked to code the step again."""
        self.again_header: Header | None = None
        """The AGAIN header that gave them this weight."""
        self.abandoned = b""
        """Which member aborted the step, and why."""
        self.summed = 0
        self.resumed = False
        """The state comes from the journal, and no contribution has come since."""

    def end(self, step: int, undone: int) -> None:
        """The view ends in that step, which all workers roll back. `undone`: what they did not apply of the step before."""
        self.ended = True
        rounds = range(self.ops.rounds)
        if (step, rounds[-1]) in self.results:
            self.undo(EVERY_SLICE)
        elif undone and (step - 1, rounds[-1]) in self.results and not any((step, r) in self.results for r in rounds):
            self.undo(undone)  # idempotent: a PUSH may have reported it already

    def undo(self, slices: int) -> None:
        """Rolls back what the workers did not apply of the last result."""
        self.recompute_sum()
        self.ops.undo(slices)

    def recompute_sum(self) -> None:
        """Restores the last result's sum, equal bit for bit, from its payloads."""
        for number, message in enumerate(self.held):
            self.ops.add(0, message.body, self.accs[0], number == 0)
        self.held.clear()

    def count_bytes(self, member: int, nbytes: int, now: float) -> tuple[int, int]:
        """Counts the bytes of a new message. Returns how many the member has sent within the step, and how many it may."""
        if not self.taken:
            self.taking_since = now
        repeats = REPEATS + int((now - self.taking_since) / REPEAT_EVERY_S)
        total = self.taken[member] = self.taken.get(member, 0) + nbytes + OVERHEAD_NBYTES
        return total, (1 + repeats) * self.ops.rounds * (self.ops.bound + OVERHEAD_NBYTES)

    def forget_results(self) -> None:
        self.results.clear()
        self.held.clear()

    def contributors(self) -> set[int]:
        return {*self.members[: self.next], *self.early} if self.open else set()

    def out(self, step: int, r: int) -> memoryview:
        slot = (step % KEPT_STEPS, r)
        if slot not in self.outs:
            self.outs[slot] = memoryview(bytearray(self.ops.bound))
        return self.outs[slot]


# ---- Journal entries of a bucket's sum: encoding and decoding.
#
# An entry is written before the server sends something that depends on it: a result, a request to code again, or a state.
# Members repeat everything after that, since they have no reply to it yet.

ENTRY_HEADER_NBYTES = 1024
"""Upper bound of an entry's metadata without the result."""


class SumEntry(Record, frozen=True):
    """State of one bucket's sum: the next step and round, and the last result. Headers are tuples."""

    step: int | None
    round: int
    open: bool
    again_header: tuple[int | float, ...] | None = None
    """The header that asked members to code again, if there was one."""
    result: tuple[int | float, ...] | None = None
    body: bytes = b""


class DecodedEntry(NamedTuple):
    """The same with decoded headers."""

    memory: SumEntry
    again_header: Header | None
    result: Header | None


def encode_entry(memory: SumEntry) -> bytes:
    return msgspec.msgpack.encode(memory)


def decode_entry(words: bytes) -> DecodedEntry:
    """CorruptFrame if the entry is malformed."""
    try:
        memory = msgspec.msgpack.decode(words, type=SumEntry)
        return DecodedEntry(memory, *(None if row is None else _header(row) for row in (memory.again_header, memory.result)))
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise CorruptFrame(f"an entry of the journal is malformed: {error}") from None


def _header(row: tuple[int | float, ...]) -> Header:
    header = Header(*row)  # type: ignore[arg-type]
    return header._replace(flags=int(header.flags))


class Ops(Protocol):
    """A bucket's codec operations and its server state."""

    @property
    def rounds(self) -> int: ...

    @property
    def codec(self) -> int: ...

    @property
    def bound(self) -> int: ...

    @property
    def in_means(self) -> bool:
        """Whether payloads must be coded for the total weight of all workers: see `Header.total`."""
        ...

    @property
    def means(self) -> bool:
        """Whether payloads are averaged with `weigh`, instead of summed with `add`."""
        ...

    def zeros(self, r: int) -> Any: ...

    def add(self, r: int, payload: memoryview, acc: Any, first: bool) -> None: ...

    def weigh(self, payload: memoryview, weight: float, first: bool) -> None:
        """Used instead of `add` if `means`: adds the payload with this weight to the mean that `emit` returns."""
        ...

    def emit(self, r: int, acc: Any, out: memoryview) -> int: ...

    def undo(self, slices: int) -> None: ...

    def skip(self) -> None: ...

    def snapshot(self) -> bytes: ...

    def restore(self, data: bytes | memoryview) -> None: ...


@runtime_checkable
class RecomputableOps(Protocol):
    """Ops whose sums can be computed again from the payloads."""

    def worth_giving_back(self, members: int) -> bool:
        """Whether the payloads of that many members take at most half the memory of their sum. `undo` needs one of the two
        until the next step."""
        ...

    def give_back(self, acc: Any) -> None:
        """Frees the memory of a sum, which is computed again if needed."""
        ...


class JournaledOps(Ops, Protocol):
    """Ops whose state can be journaled."""

    @property
    def memory_nbytes(self) -> int: ...

    def remember(self) -> bytes: ...

    def recall(self, data: bytes, sent: memoryview) -> None: ...

    def begin_anew(self) -> None: ...
