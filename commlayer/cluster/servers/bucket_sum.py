"""Sums one bucket in one exchange, and defines the server's replies."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from commlayer.errors import CorruptFrame
from commlayer.records import Record
from commlayer.transport.protocol import Header, Message, peer_name

if TYPE_CHECKING:
    from commlayer.cluster.servers.server_codecs import CodecOps


def as_float32(weight: float) -> float:
    """Rounds the weight as a frame header does, so both ends compare the same number."""
    return struct.unpack("<f", struct.pack("<f", weight))[0]  # type: ignore[no-any-return]


MOST_SHARE = 1.5
"""Largest factor on the payloads of one exchange. Without this limit residuals diverge if the total weight alternates, for
example between 1 and 10 (decision 0004)."""


class Division(NamedTuple):
    """Correction of a sum whose payloads were divided by an assumed total weight before encoding, not by the true one."""

    share: float
    """The factor by which the server multiplies the sum of the payloads."""
    ratio: float
    """Assumed divided by true total weight: the factor that gradients lack. Workers keep the difference as a residual."""


def divided_afterwards(assumed: float, weight: float, *, corrected: bool = True) -> Division:
    """`assumed` and `weight` are total weights, rounded to float32. `corrected`: True if workers have residuals, which keep
    what the limit of the share leaves out."""
    ratio = assumed / weight if weight else 1.0
    return Division(min(ratio, MOST_SHARE) if corrected else ratio, ratio)


def corrupt_frame(message: Message, what: str, code: str = "") -> CorruptFrame:
    return CorruptFrame(what, peer=peer_name(message.peer), step=message.header.step, bucket=message.header.bucket, code=code)


KEPT_STEPS = 2
MOST_FOLLOWED = 8
"""Maximum number of future results of a bucket that one worker may request."""
MOST_REASON_NBYTES = 256
"""Maximum size of the text that says why a step is aborted."""
WriteEntry = Callable[[int, bytes, bytes], None]
"""Writes a bucket's entry to the journal: bucket, metadata, codec state. The entry survives a crash after this returns."""


class Reply(NamedTuple):
    peer: int
    header: Header
    body: memoryview | bytes


class Stall(NamedTuple):
    """A sum that waits for contributions: the `missing` members, the members that have contributed (`waiting`), and since
    when."""

    bucket: int
    step: int
    missing: tuple[int, ...]
    waiting: tuple[int, ...]
    since: float


class RoundSum:
    """A round of a step in progress, with the contributions that have arrived. Between two steps, the round that comes next."""

    def __init__(self, step: int, r: int, *, begun: bool = True) -> None:
        self.step, self.round, self.open = step, r, begun
        self.handled: list[int] = []
        """Members whose contributions were handled, in that order."""
        self.summed = 0
        """Number of payloads that were added."""
        self.first: int | None = None
        """The member that contributed first."""
        self.early: dict[int, Message] = {}
        """Contributions that have arrived and are not handled yet, by member."""
        self.settled = r > 0
        """Whether it is certain which workers that have joined contribute: in all rounds of a step the same ones."""
        self.weight, self.used, self.order, self.undone, self.since = 0.0, 0, 0, 0, 0.0
        self.assumed = 0.0
        """Total weight that the members assumed when they encoded their contributions; 0 if the codec needs none."""
        self.abandoned: bytes | None = None
        """Text that says which member aborted the step and why; empty if a member has only withdrawn its contribution. None:
        neither."""
        self.resumed = False
        """True: the state comes from the journal, and no contribution has arrived since."""


class BucketSum:
    """The state of one bucket on the server: the sum in progress or the last finished step, and the results that are kept."""

    def __init__(self, bucket: int, ops: CodecOps, members: tuple[int, ...]) -> None:
        self.bucket, self.ops, self.members = bucket, ops, members
        self.joining: dict[int, int] = {}
        """Maps each worker that has joined to its number among them. Such a worker contributes to the steps whose contributions
        name that number, or a higher one, in Header.joined."""
        self.joined = 0
        """Number of workers that have joined the job up to the last step that has begun; see Header.joined."""
        self.lock = threading.Lock()
        self.accs: list[Any] = [None] * ops.rounds
        # One result buffer per kept step and round. A result stays valid until KEPT_STEPS later steps have begun.
        self.outs: dict[tuple[int, int], memoryview] = {}
        self.results: dict[tuple[int, int], tuple[Header, memoryview]] = {}
        self.recomputable = ops.keeps_payloads(len(members))
        """True: between steps the server keeps payloads instead of their sum, to save memory."""
        self.held: list[Message] = []
        """Payloads of the last result, in the order in which they were added, if the sum's memory was freed; otherwise
        empty."""
        self.followers: dict[tuple[int, int], Header] = {}
        """Requests of workers that receive results without a contribution, by step and worker."""
        self.share = 1.0
        """The factor on the payloads of the last result; see Division."""
        self.assumed: float | None = None
        """Total weight that the next contributions must assume: the last result's. None: the first contribution decides."""
        self.idle(None)

    def idle(self, step: int | None) -> None:
        """Drops the contributions in progress and waits for the next step. `step`: number of that step; None: the first
        contribution decides."""
        self.awaited, self.sum = step, RoundSum(step or 0, 0, begun=False)

    def begin(self, step: int, r: int) -> None:
        self.sum = RoundSum(step, r)

    @property
    def first_pending_step(self) -> int:
        """The first step whose result is still to come; 0 if the next contribution decides."""
        return self.sum.step if self.sum.open else self.awaited or 0

    def admit_joined(self, joined: int) -> None:
        """Lets workers that have joined take part, from the sum in progress on. `joined`: number of the last one."""
        self.members, self.joined = self.members_with(joined), joined
        self.joining = {member: number for member, number in self.joining.items() if number > joined}

    def members_with(self, joined: int) -> tuple[int, ...]:
        """Returns the members after `joined` workers have joined, in the order in which they are added."""
        new = [member for member, number in self.joining.items() if number <= joined]
        return tuple(sorted({*self.members, *new})) if new else self.members

    def remove(self, gone: Collection[int]) -> None:
        """Ends the wait for members that have left the job. Contributions of these members to the sum in progress still
        count."""
        self.members = tuple(member for member in self.members if member not in gone)
        self.joining = {member: number for member, number in self.joining.items() if member not in gone}
        self.followers = {key: request for key, request in self.followers.items() if request.sender not in gone}

    def take_next_contribution(self) -> Message | None:
        """Takes the contribution that is added next, in member order. Returns None if the contribution has not arrived."""
        early, handled = self.sum.early, self.sum.handled
        if not early:
            return None
        first = min(early)
        for member in self.members:
            if member < first and member not in handled:
                return None
        return early.pop(first)

    @property
    def complete(self) -> bool:
        """Returns True if all members have contributed to the sum in progress."""
        current = self.sum
        return current.open and len(current.handled) + len(current.early) >= len(self.members) \
            and self.contributors() >= set(self.members)

    def undo(self, mask: int) -> bool:
        """Rolls back those slices of the last result that the workers did not apply. Returns whether anything has changed: a
        journal has the rest already."""
        if not mask:
            return False
        self.recompute_sum()
        return bool(self.ops.undo(mask))

    def recompute_sum(self) -> None:
        """Computes the last result's sum again from its payloads, equal bit for bit."""
        for number, message in enumerate(self.held):
            self.ops.add(0, message.body, self.accs[0], number == 0)
        if self.held:
            self.ops.scale(self.accs[0], self.share)
        self.held.clear()

    def forget_results(self) -> None:
        self.assumed = None
        self.results.clear()
        self.held.clear()

    def contributors(self) -> set[int]:
        return {*self.sum.handled, *self.sum.early} if self.sum.open else set()

    def result_buffer(self, step: int, r: int) -> memoryview:
        slot = (step % KEPT_STEPS, r)
        if len(self.outs.get(slot, b"")) < self.ops.bound:
            self.outs[slot] = memoryview(bytearray(self.ops.bound))
        return self.outs[slot]


ENTRY_HEADER_NBYTES = 1024
"""Upper bound of the size, in bytes, of a journal entry's metadata without the result's payload."""


class SumEntry(Record, frozen=True):
    """Journaled state of one bucket's sum. The state is written before the server sends anything that depends on it: a result
    or a state. Members repeat everything after that, since they have no reply to it yet."""

    step: int | None
    round: int
    open: bool
    joined: int = 0
    """See BucketSum.joined."""
    assumed: float | None = None
    """See BucketSum.assumed."""
    result: Header | None = None
    """Header of the last result; `body` is its payload."""
    body: bytes = b""
