"""The summation service as a state machine: receives contributions, returns replies.

The state machine does no input or output, reads no clock and does not know codecs: each bucket's codec operations are passed in
as CodecOps. Contributions to one (step, round) are added in member order, whatever their order of arrival, so sums are equal
bit for bit in every run. Early contributions stay compressed until they are added. Each contribution is applied at most once.
The results of the last two steps are kept for members that request them again.

Every message is checked before it changes anything. CorruptFrame means that its sender broke the protocol or its format. Any
other error is the server's own fault, and the sum in progress is lost.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from operator import itemgetter
from typing import Any

import msgspec

from commlayer.cluster.servers.bucket_sum import (
    KEPT_STEPS,
    MOST_FOLLOWED,
    MOST_REASON_NBYTES,
    BucketSum,
    Reply,
    Stall,
    SumEntry,
    WriteEntry,
    as_float32,
    corrupt_frame,
    divided_afterwards,
)
from commlayer.cluster.servers.gather import GATHER
from commlayer.errors import CorruptFrame, InvalidInput, RecordError
from commlayer.records import complete
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, Message, peer_name

log = logging.getLogger("commlayer")
OTHER_PLAN = "the job has switched to another plan"
LOST_RESULT = "this server no longer has the result"


class Summation:
    """The sums of all buckets of one server. `push` may be called from any number of threads."""

    def __init__(self, server: int, generation: int, ops: dict[int, Any], senders: dict[int, tuple[int, ...]]) -> None:
        """`server`: the server's number. `ops`: codec operations by bucket. `senders`: maps a bucket to its members.
        Their contributions are added in the order of their numbers."""
        self._keep: WriteEntry | None = None
        self.peer = SERVER_BASE + server
        self.generation = generation
        self.fenced = 0
        """Number of messages of earlier plans that were received and ignored."""
        self.joined: list[int] = []
        """Workers that have joined the job since it began, in that order."""
        self.gone: set[int] = set()
        """Workers that have left the job. Messages that arrive from these members later are neither added nor answered."""
        self._follows_ended = False
        """True: the job has switched to another plan, so workers no longer receive results of this plan."""
        self.cells = {bucket: BucketSum(bucket, o, senders[bucket]) for bucket, o in ops.items()}

    def journal_state(self, keep: WriteEntry | None) -> None:
        """Calls `keep` with all state now, and from then on with every change, before replies that depend on the change are
        sent. None stops journaling. Call it inside `pause`."""
        self._keep = keep
        for cell in self.cells.values():
            self._remember(cell)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager in which no sum changes, so that another journal can take the place of the former one."""
        with contextlib.ExitStack() as stack:
            for cell in self.cells.values():
                stack.enter_context(cell.lock)
            yield

    def _remember(self, cell: BucketSum) -> None:
        if self._keep is None:
            return
        cell.recompute_sum()
        last = max(cell.results, default=None)
        header, body = cell.results[last] if last is not None else (None, b"")
        step = cell.sum.step if cell.sum.open else cell.awaited
        entry = SumEntry(step, cell.sum.round, cell.sum.open, cell.joined, cell.assumed, header, bytes(body))
        self._keep(cell.bucket, msgspec.msgpack.encode(entry), cell.ops.journal_state())

    def restore_from_journal(self, bucket: int, words: bytes, state: bytes) -> None:
        """Restores what an earlier process journaled. Raises RecordError if members of the job are unknown. If this raises
        another ValueError or MsgspecError, call `forget`."""
        cell, entry = self.cells[bucket], msgspec.msgpack.decode(words, type=complete(SumEntry))
        if entry.joined > len(self.joined):
            raise RecordError("E-JOURNAL", f"journal: {entry.joined} workers have joined, but the list of them has only "
                                           f"{len(self.joined)}: it is damaged; restart the job from its last checkpoint")
        body = memoryview(entry.body)
        if entry.result is not None:
            if not entry.result.flags & Flag.ABANDON:
                room = cell.result_buffer(entry.result.step, entry.result.round)
                room[: len(body)] = body
                body = room[: len(body)].toreadonly()
            cell.results = {(entry.result.step, entry.result.round): (entry.result, body)}
        cell.ops.restore_from_journal(state, body)
        cell.begin(entry.step or 0, entry.round)
        cell.admit_joined(entry.joined)
        if not entry.open or entry.step is None:
            cell.idle(entry.step)
        cell.assumed = entry.assumed
        cell.sum.resumed = True

    def forget(self, bucket: int) -> None:
        """Drops the bucket's state and residual. The next contribution decides at which step the bucket starts."""
        cell = self.cells[bucket]
        cell.forget_results()
        cell.ops.begin_anew()
        cell.idle(None)
        cell.sum.resumed = True

    def push(self, message: Message, now: float, release: Callable[[Message], None] = lambda _: None) -> list[Reply]:
        """Handles one contribution and returns the replies to send. Early contributions are checked when they are added, so
        CorruptFrame may name the sender of an earlier one.

        `release` is called with each contribution that has been added. Other messages are not released for reuse: their sizes
        are unchecked, and a pool of buffers would keep one of each size.
        """
        h = message.header
        if self._ended(message):
            return []
        cell = self._cell(message)
        with cell.lock:
            if message.peer in self.gone:
                return []
            self._fits(cell, message)
            result = cell.results.get((h.step, h.round))
            if result is not None:
                return [Reply(message.peer, *result)]
            self._admit(cell, message)
            current = cell.sum
            if message.peer in current.early or message.peer in current.handled:
                return []  # a repeated message
            if not current.early and not current.handled:
                current.since, current.first = now, message.peer
            current.early[message.peer] = message
            return self._advance(cell, release)

    def answer_reconnected(self, message: Message) -> list[Reply]:
        """Answers a member that has reconnected, and does not know whether its contribution has arrived: with the result, or by
        asking for the contribution. Without an answer the result comes later."""
        h = message.header
        if self._ended(message):
            return []
        cell = self._cell(message)
        with cell.lock:
            if message.peer in self.gone:
                return []
            if (result := cell.results.get((h.step, h.round))) is not None:
                return [Reply(message.peer, *result)]
            if (h.step, h.round) == (cell.sum.step, cell.sum.round) and message.peer in (*cell.sum.early, *cell.sum.handled):
                return []
        return [Reply(message.peer, Header(Kind.AGAIN, h.generation, h.step, h.bucket, round=h.round, sender=self.peer), b"")]

    def follow(self, message: Message) -> list[Reply]:
        """Answers a worker that requests a result without a contribution: at once, or when the sum is complete."""
        h = message.header
        if self._ended(message):
            return [self._abandon_reply(h, OTHER_PLAN)]
        cell = self._cell(message)
        if cell.ops.rounds > 1:
            raise corrupt_frame(message, "requests a result of several rounds")
        with cell.lock:
            if (result := cell.results.get((h.step, 0))) is not None:
                return [_follower_reply(message.peer, *result)]
            if self._follows_ended:
                return [self._abandon_reply(h, OTHER_PLAN)]
            if h.step < cell.first_pending_step:
                return [self._abandon_reply(h, LOST_RESULT, Flag.LOST)]
            known = (h.step, message.peer) in cell.followers
            if not known and sum(worker == message.peer for _, worker in cell.followers) >= MOST_FOLLOWED:
                raise corrupt_frame(message, f"requests more than {MOST_FOLLOWED} future results of this bucket")
            if message.peer not in self.gone:
                cell.followers[h.step, message.peer] = h
        return []

    def _abandon_reply(self, request: Header, why: str, flags: int = 0) -> Reply:
        header = request._replace(kind=Kind.FOLLOWED, sender=self.peer, flags=Flag.ABANDON | flags)
        return Reply(request.sender, header, why.encode())

    def end_follows(self) -> list[Reply]:
        """Answers the requests for results of this plan, which has ended."""
        self._follows_ended, replies = True, list[Reply]()
        for cell in self.cells.values():
            with cell.lock:
                replies += self._end_follows(cell, OTHER_PLAN)
        return replies

    def _end_follows(self, cell: BucketSum, why: str) -> list[Reply]:
        requests = [*cell.followers.values()]
        cell.followers.clear()
        return [self._abandon_reply(request, why) for request in requests]

    def remove(self, gone: Collection[int], release: Callable[[Message], None] = lambda _: None) -> list[Reply | CorruptFrame]:
        """Ends all waits for members that have left the job. Returns the results of sums that are complete without them, and
        the breaches of members whose contributions could only be checked now.

        Contributions of removed members to sums in progress still count, and results are final. Repeating a removal has no
        effect.
        """
        self.gone |= set(gone)
        found: list[Reply | CorruptFrame] = []
        for cell in self.cells.values():
            with cell.lock:
                cell.remove(gone)
                if cell.sum.open and cell.contributors() and (cell.members or cell.joining):
                    try:
                        found += self._advance(cell, release)
                    except CorruptFrame as error:
                        found.append(error)
        return found

    def add(self, number: int, member: int, owned: Collection[int] | None = None) -> None:
        """Adds a worker to the members: it contributes from the first step on whose contributions name `number` in
        Header.joined. `number` counts the workers that have joined. `owned`: the buckets to which the worker contributes; None:
        all. Repeating an addition has no effect."""
        if number <= len(self.joined):
            if self.joined[number - 1] != member:
                raise InvalidInput("E-EPOCH", f"worker {member} joins as number {number}, but worker {self.joined[number - 1]} "
                                              "has that number")
            return
        if number > len(self.joined) + 1:
            raise InvalidInput("E-EPOCH", f"worker {member} joins as number {number}, but only {len(self.joined)} have joined")
        self.joined.append(member)
        for bucket, cell in () if member in self.gone else self.cells.items():
            if owned is None or bucket in owned:
                with cell.lock:
                    cell.joining[member] = number

    def _ended(self, message: Message) -> bool:
        """Returns whether the message is of an earlier plan, in which the bucket number may have meant a different bucket."""
        if message.header.generation >= self.generation:
            return False
        if message.header.sender != message.peer:
            raise corrupt_frame(message, f"the header names {peer_name(message.header.sender)} as the sender")
        self.fenced += 1
        return True

    def _cell(self, message: Message) -> BucketSum:
        """Checks the message's sender, generation and bucket, and returns the bucket's sum. Raises CorruptFrame if one of them
        is wrong."""
        h = message.header
        if h.sender != message.peer:
            raise corrupt_frame(message, f"the header names {peer_name(h.sender)} as the sender")
        if h.generation > self.generation:  # for example if another worker has not sent the new plan yet
            raise corrupt_frame(message, f"got generation {h.generation}, but the server is in generation {self.generation}")
        cell = self.cells.get(h.bucket)
        if cell is None:
            raise CorruptFrame(f"bucket {h.bucket} is not summed by this server", peer=peer_name(message.peer), step=h.step)
        return cell

    def _fits(self, cell: BucketSum, message: Message) -> None:
        h, ops = message.header, cell.ops
        if h.joined > len(self.joined):
            raise corrupt_frame(message,
                                f"counts {h.joined} workers that have joined, but this server knows of {len(self.joined)}")
        if message.peer not in cell.members_with(h.joined):
            raise corrupt_frame(message, "its sender is not a member of this bucket's sum")
        if h.round >= ops.rounds or h.parts != 1 or h.part != 0:
            raise corrupt_frame(message, f"got round {h.round}, part {h.part} of {h.parts}; this bucket has rounds 0 to "
                                f"{ops.rounds - 1} and no parts")
        if h.codec != ops.codec or not 0.0 <= h.weight < float("inf") or not 0.0 <= h.total < float("inf"):
            raise corrupt_frame(message,
                                f"got codec {h.codec}, weight {h.weight} and total weight {h.total}; the codec must be "
                                f"{ops.codec}, and weights finite and not negative")
        if bool(h.flags & Flag.MEAN) != ops.means and not h.flags & Flag.ABANDON:
            verb, kind = ("lacks", "a mean of buffers") if ops.means else ("has", "a sum of gradients")
            raise corrupt_frame(message, f"{verb} flag MEAN, but this bucket is {kind}")
        if h.flags & Flag.ABANDON and ops.codec == GATHER:
            raise corrupt_frame(message, "aborts an exchange of rows, but only steps can be aborted")
        bound = MOST_REASON_NBYTES if h.flags & Flag.ABANDON else ops.bound
        if len(message.body) > bound:
            raise corrupt_frame(message, f"sent {len(message.body)} bytes, but a payload of this bucket has at most {bound}")

    def _admit(self, cell: BucketSum, message: Message) -> None:
        """Checks that a contribution belongs to the sum in progress. Between steps, starts the next step's sum."""
        h = message.header
        if cell.sum.resumed:
            self._catch_up(cell, h)
        begins = not cell.sum.open and h.round == 0 and cell.awaited in (None, h.step)
        if begins or (cell.sum.open and (h.step, h.round) == (cell.sum.step, cell.sum.round)):
            if begins:
                cell.begin(h.step, 0)
            return
        if cell.sum.first is not None:
            state = f"{peer_name(cell.sum.first)} is in round {cell.sum.round} of step {cell.sum.step}"
        else:
            begun = cell.sum.open or cell.awaited is not None
            state = f"round {cell.sum.round} of step {cell.sum.step} is expected" if begun else "no step has begun"
        # Members differ in their step when one has restored another checkpoint.
        raise corrupt_frame(message, f"contribution is out of order: it is for round {h.round} of step {h.step}, "
                            f"but {state}", "E-STEPS-DIFFER")

    def _catch_up(self, cell: BucketSum, h: Header) -> None:
        """Handles the first contribution after a restart, which shows whether the journal contains every reply that was
        sent."""
        cell.sum.resumed = False
        step = cell.sum.step if cell.sum.open else cell.awaited
        if step is None or (h.step, h.round) > (step, cell.sum.round):
            if step is not None:
                log.warning("bucket %d: the journal ends before step %d, round %d, so its residual is lost and "
                            "restarts at zero", cell.bucket,
                            h.step, h.round)
                cell.ops.begin_anew()
                cell.forget_results()
            cell.begin(h.step, h.round)

    def _joins_settled(self, cell: BucketSum) -> bool:
        """Returns whether it is certain which of the workers that joined contribute to the sum in progress. The number of them
        in more than half of the members' contributions decides. If no number has this majority and all members have
        contributed, the highest number decides."""
        current, members = cell.sum, cell.members
        if not current.settled and cell.joined < len(self.joined):
            counts = {peer: message.header.joined for peer, message in current.early.items()}
            votes = Counter(counts[member] for member in members if member in counts)
            joined, most = max(votes.items(), key=itemgetter(1), default=(0, 0))
            if votes.total() == len(members) >= 2 * most:
                joined = max(counts.values())
            elif 2 * most <= len(members):
                return False
            cell.admit_joined(max(joined, cell.joined))  # it never falls
        current.settled = True
        return True

    def _advance(self, cell: BucketSum, release: Callable[[Message], None]) -> list[Reply]:
        """Adds early contributions in member order. When all members have contributed, returns the result for all members."""
        if not self._joins_settled(cell):
            return []
        ops, current = cell.ops, cell.sum
        r = current.round
        lean = cell.recomputable and self._keep is None
        if lean and not cell.complete:
            return []  # the compressed payloads take less memory than their sum until all have arrived
        sum_of: list[Message] = []
        if cell.accs[r] is None:
            cell.accs[r] = ops.new_accumulator(r)
        while (message := cell.take_next_contribution()) is not None:
            h = message.header
            first = not current.handled
            if h.joined != cell.joined:
                raise corrupt_frame(message,
                                    f"counts {h.joined} workers that have joined, but other members of this step count "
                                    f"{cell.joined}", "E-STEPS-DIFFER")
            if not first and h.undone != current.undone:
                raise corrupt_frame(message, f"{_applied(h.undone)} of the previous step, but {peer_name(current.handled[0])} "
                                    f"{_applied(current.undone)}: all workers must call step(), skip steps and clear "
                                    "gradients at the same steps",
                                    "E-STEPS-DIFFER")
            if first and r == 0:
                if h.undone:
                    cell.undo(h.undone)  # before `_add`, which overwrites that step's sum
                for held in cell.held:
                    release(held)
                cell.held.clear()
                if ops.place(cell.accs[0], cell.result_buffer(current.step, 0)):
                    cell.results.pop((current.step - KEPT_STEPS, 0), None)  # its memory is reused
            if h.flags & Flag.ABANDON:
                current.abandoned = current.abandoned or bytes(message.body)
            else:
                self._add(cell, message)
            current.handled.append(message.peer)
            current.order, current.undone = h.order, h.undone
            if lean:
                sum_of.append(message)
            else:
                release(message)
        if not cell.complete:
            return []
        if lean and current.abandoned is None:
            replies = self._emit(cell)
            cell.held = sum_of
            ops.give_back(cell.accs[0])
            return replies
        for message in sum_of:
            release(message)
        return self._emit(cell) if current.abandoned is None else self._abandon(cell)

    def _add(self, cell: BucketSum, message: Message) -> None:
        h = message.header
        self._check_total(cell, message)
        try:
            if cell.ops.means:
                cell.ops.add_weighted(message.body, h.weight, cell.sum.summed == 0)
            else:
                cell.ops.add(cell.sum.round, message.body, cell.accs[cell.sum.round], cell.sum.summed == 0)
        except (CorruptFrame, ValueError) as error:
            raise corrupt_frame(message, str(error)) from None
        cell.sum.summed += 1
        cell.sum.assumed = h.total
        cell.sum.weight += h.weight
        cell.sum.used |= h.used

    def _abandon(self, cell: BucketSum) -> list[Reply]:
        cell.ops.skip()
        replies = self._reply(cell, Flag.ABANDON, memoryview(cell.sum.abandoned or b""))
        cell.idle(cell.sum.step + 1)
        self._remember(cell)
        return replies

    def _check_total(self, cell: BucketSum, message: Message) -> None:
        """Checks the total weight by which the sender has divided its contribution. All members of a bucket must assume the
        same one, since the sum is corrected as a whole."""
        total, current = message.header.total, cell.sum
        expected = current.assumed if current.summed else cell.assumed
        if cell.ops.in_means and (not total or expected not in (None, total)):
            allowed = f"{expected:g}, the last result's" if expected else "above 0"
            raise corrupt_frame(message, f"divided its contribution by a total weight of {total:g}, but it must be {allowed}")

    def _emit(self, cell: BucketSum) -> list[Reply]:
        ops, step, r = cell.ops, cell.sum.step, cell.sum.round
        out = cell.result_buffer(step, r)
        if ops.in_means and r + 1 == ops.rounds:
            weight = as_float32(cell.sum.weight)
            cell.share = divided_afterwards(cell.sum.assumed, weight, corrected=ops.assumes_total).share
            ops.scale(cell.accs[r], cell.share)
            if ops.assumes_total and weight:
                cell.assumed = weight
        ops.senders = tuple(cell.sum.handled)
        replies = self._reply(cell, Flag.NONE, out[: ops.emit(r, cell.accs[r], out)].toreadonly())
        if r + 1 < ops.rounds:
            cell.begin(step, r + 1)
        else:
            cell.idle(step + 1)
        if ops.leavers:
            cell.remove(ops.leavers)
        self._remember(cell)
        return replies

    def _reply(self, cell: BucketSum, flags: int, body: memoryview) -> list[Reply]:
        """Returns the result for each member and each worker that has requested it, and keeps it for members that request it
        again."""
        header = self._header(cell, flags)
        cell.results[(cell.sum.step, cell.sum.round)] = header, body
        for old in [k for k in cell.results if k[0] <= cell.sum.step - KEPT_STEPS]:
            del cell.results[old]
        # A request for an earlier step is older than the server's last restart, and its result is not in the journal.
        due = [cell.followers.pop(key) for key in [*cell.followers] if key[0] <= cell.sum.step]
        return [*(Reply(member, header, body) for member in cell.members),
                *(_follower_reply(request.sender, header, body) if request.step == cell.sum.step
                  else self._abandon_reply(request, LOST_RESULT, Flag.LOST) for request in due)]

    def _header(self, cell: BucketSum, flags: int) -> Header:
        return Header(Kind.RESULT, self.generation, cell.sum.step, cell.bucket, round=cell.sum.round, codec=cell.ops.codec,
                      sender=self.peer, order=cell.sum.order, flags=flags, weight=cell.sum.weight, used=cell.sum.used)

    def undo(self, message: Message) -> None:
        """Rolls back the part of the last step that the workers did not apply, if no PUSH will report that part."""
        if self._ended(message):
            return
        cell = self._cell(message)
        with cell.lock:
            self._require_closed_sum(cell, message)
            if cell.undo(message.header.undone):
                self._remember(cell)

    def busy(self) -> bool:
        """Returns whether a contribution waits for others."""
        return any(cell.contributors() for cell in self.cells.values())

    def stalled(self, before: float) -> list[Stall]:
        """Returns the sums that have waited since time `before` or longer, each with the missing members."""
        stalls = []
        for cell in self.cells.values():
            with cell.lock:
                contributors = cell.contributors()
                if contributors and cell.sum.since <= before:
                    missing = tuple(m for m in cell.members if m not in contributors)
                    stalls.append(Stall(cell.bucket, cell.sum.step, missing, tuple(sorted(contributors)), cell.sum.since))
        return stalls

    def snapshot(self, message: Message) -> list[Reply]:
        """Returns the codec state between two steps, after rolling back the part of the last step that was not applied."""
        if self._ended(message):
            return []
        cell, h = self._cell(message), message.header
        with cell.lock:
            self._require_closed_sum(cell, message)
            if cell.undo(h.undone):
                self._remember(cell)
            state = cell.ops.snapshot()
        return [Reply(message.peer, h._replace(kind=Kind.STATE, undone=0, sender=self.peer), state)]

    def restore(self, message: Message) -> list[Reply]:
        """Restores saved state, completely or not at all, and drops results. The next contribution must be of the message's
        step."""
        if self._ended(message):
            return []
        cell, h = self._cell(message), message.header
        with cell.lock:
            self._require_closed_sum(cell, message)
            try:
                cell.ops.restore(message.body)
            except (CorruptFrame, ValueError) as error:
                raise corrupt_frame(message, f"sent a state that does not fit this bucket: {error}") from None
            cell.forget_results()
            cell.idle(h.step)
            self._remember(cell)
            ended = self._end_follows(cell, "the job has restored a checkpoint")
        return [Reply(message.peer, h._replace(kind=Kind.STATE_OK, sender=self.peer), b""), *ended]

    def reply_to_repeat(self, message: Message) -> list[Reply]:
        """Replies to a repeated request, since the first reply may have been lost. Sends no reply if the sender has started the
        next sum, because it must have received the first one."""
        if self._ended(message):
            return []
        cell, h = self._cell(message), message.header
        with cell.lock:
            if cell.sum.open or h.kind == Kind.UNDO:
                return []
            if h.kind == Kind.STATE:
                return [Reply(message.peer, h._replace(kind=Kind.STATE_OK, sender=self.peer), b"")]
            return [Reply(message.peer, h._replace(kind=Kind.STATE, undone=0, sender=self.peer), cell.ops.snapshot())]

    def _require_closed_sum(self, cell: BucketSum, message: Message) -> None:
        if cell.sum.open:
            raise corrupt_frame(message,
                                f"sent {Kind(message.header.kind).name} while step {cell.sum.step} is being summed; it is "
                                "allowed only between steps")


def _follower_reply(worker: int, header: Header, body: memoryview) -> Reply:
    """Returns a result for a worker that follows. The reply has a copy of the body, because the follower may receive the reply
    late, and the memory is reused for a later result."""
    return Reply(worker, header._replace(kind=Kind.FOLLOWED), bytes(body))


def _applied(undone: int) -> str:
    return "did not apply some averages" if undone else "applied all averages"
