"""Codecs for the summation service: each bucket's codec, accumulators and server state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from commlayer.codec_spec import parse_spec
from commlayer.compressors import make_codec, restore, seed, snapshot
from commlayer.compressors.codec import Codec
from commlayer.compressors.dense import averages_buffers
from commlayer.compressors.feedback import encodes_updates, find_residual, flagged_ranges
from commlayer.compressors.kernels import give_back
from commlayer.compressors.payload import HEADER_NBYTES
from commlayer.compressors.residual_slices import ResidualSlice, residual_on, split_by_tensor
from commlayer.compressors.state import SERVER, number, restore_server, server_snapshot
from commlayer.errors import InvalidInput
from commlayer.records import Bucket, Plan, Slice

UNDONE = "_undone"
MEMORY_SLACK_NBYTES = 1024
"""Bytes added to the maximum size of a snapshot, for the names of tensors that only some snapshots contain."""
SLACK_NBYTES = 16 << 20
"""Bytes that a receiver allows in addition to payloads and state, for headers, plans and probes."""


class CodecOps:
    """Codec operations and server state of one bucket."""

    leavers: tuple[int, ...] = ()
    """Members that contribute to no later sum of this bucket."""

    def __init__(self, codec: Codec, bucket: Bucket, job: str, *, weights: bool = False, buffers: bool = False) -> None:
        """`weights`: the sums are of weight updates, not gradients. `buffers`: the bucket contains model buffers, which are
        averaged."""
        self._codec, self._spec, self._bucket, self._job = codec, bucket.spec, bucket, job
        self._state = codec.init_server(self._spec)
        seed(self._state, job, bucket.id, SERVER)
        self.unit = (encodes_updates(codec), weights)
        """Unit of the sums: whether gradients are multiplied by the learning rate before they are compressed, and whether
        weight updates are summed instead of gradients. Residuals can be inherited only between equal units."""
        self.rounds, self.codec, self.bound = len(codec.rounds), codec.id, codec.bound(self._spec)
        self.max_state_nbytes = parse_spec(bucket.codec).max_state_nbytes(bucket.numel)
        self.in_means = codec.has_residual or codec.has_server_residual
        """True: members divide their contributions by an assumed total weight, which the sum corrects."""
        self.assumes_total = codec.has_residual
        """True: the total of the last result is assumed, and members correct their residuals when it has changed."""
        self.means = buffers and averages_buffers(codec)
        self.senders: tuple[int, ...] = ()
        """Members whose contributions are in the sum that is emitted."""
        self._undone = 0
        self._alone: Any = None
        """An accumulator for decompressing a single payload. The value is None until the accumulator is needed."""
        self._mean: _Mean | None = None

    def new_accumulator(self, r: int) -> Any:
        return self._codec.new_accumulator(self._spec, r)

    def place(self, acc: Any, out: memoryview) -> bool:
        """Builds a new sum in the payload `out`, if the codec sends the sum unchanged: `emit` then copies nothing. Returns
        whether it does."""
        if self._codec.in_place:
            acc["sum"] = np.frombuffer(out, np.float32, self._spec.numel, HEADER_NBYTES)
        return self._codec.in_place

    def add(self, r: int, payload: memoryview, acc: Any, first: bool) -> None:
        self._codec.add(r, payload, acc, first=first)

    def add_weighted(self, payload: memoryview, weight: float, first: bool) -> None:
        """Decompresses the payload and adds it with this weight to the mean that `emit` returns. `first`: starts a new mean."""
        alone = self._decode_alone(payload)
        if first or self._mean is None:
            self._mean = _Mean(np.zeros(self._spec.numel), 0.0, False)
        mean = self._mean
        mean.total[:] += alone["sum"].astype(np.float64) * weight
        self._mean = mean._replace(weight=mean.weight + weight, flagged=mean.flagged or bool(alone["flagged"][0]))

    def emit(self, r: int, acc: Any, out: memoryview) -> int:
        self._undone = 0
        if self._mean is not None:
            mean, self._mean = self._mean, None
            acc["flagged"][0] = mean.flagged
            with np.errstate(over="ignore", invalid="ignore"):
                acc["sum"][:] = mean.total / (mean.weight or 1.0)
        return self._codec.emit(r, acc, self._state, out)

    def scale(self, acc: Any, factor: float) -> None:
        if factor != 1.0:
            acc["sum"] *= np.float32(factor)

    def undo(self, mask: int) -> bool:
        """Rolls back slices of the last result. `mask` has one bit per slice. Rolling a slice back again has no effect.
        Returns whether any slice was rolled back."""
        if fresh := mask & ~self._undone & (1 << len(self._bucket.slices)) - 1:
            self._undone |= fresh
            self._codec.undo_server(self._state, flagged_ranges(self._bucket.slices, fresh))
        return fresh > 0

    def skip(self) -> None:
        """Records that the step was aborted: nothing was emitted, so nothing can be rolled back."""
        self._mean = None
        self._undone = (1 << len(self._bucket.slices)) - 1

    def keeps_payloads(self, members: int) -> bool:
        """Returns whether the server should keep the payloads of this many members instead of their sum. True if the payloads
        take at most half the memory of the sum, and the sum can be computed again from the payloads."""
        return self._codec.needs_undo and self.rounds == 1 and not self.means and members * self.bound <= 2 * self._spec.numel

    def give_back(self, acc: Any) -> None:
        if "sum" in acc:
            give_back(acc["sum"])

    def _decode_alone(self, payload: memoryview) -> Any:
        if self._alone is None:
            self._alone = self._codec.new_accumulator(self._spec, 0)
        self._codec.add(0, payload, self._alone, first=True)
        return self._alone

    @property
    def slices(self) -> Sequence[Slice]:
        return self._bucket.slices

    def residuals(self) -> list[ResidualSlice]:
        """Returns the server's residuals, one slice per tensor."""
        values = find_residual(self._state)
        return [] if values is None else list(split_by_tensor(self._bucket.slices, 0, values))

    def inherit_residuals(self, inherited: Sequence[ResidualSlice]) -> None:
        """Adds inherited residuals of this bucket's elements. Call it only before the first step."""
        mine, theirs = find_residual(self._state), residual_on(inherited, self._bucket.slices)
        if mine is not None and theirs is not None:
            mine += theirs

    def snapshot(self) -> bytes:
        return safetensors.numpy.save(snapshot(self._state))

    def restore(self, data: bytes | memoryview) -> None:
        restore(self._state, _loaded(data))

    @property
    def most_journal_nbytes(self) -> int:
        """Upper bound, in bytes, of the snapshot that journal_state() returns."""
        return len(self.journal_state()) + 4 * self._spec.numel + MEMORY_SLACK_NBYTES

    def journal_state(self) -> bytes:
        """Returns a snapshot of the state, including what is needed to roll back the last result."""
        return safetensors.numpy.save(server_snapshot(self._state) | {UNDONE: number(self._undone - (1 << 63))})

    def restore_from_journal(self, data: bytes, sent: memoryview) -> None:
        """Restores what journal_state() returned. `sent`: the payload of the last result."""
        tensors = _loaded(data)
        undone = tensors.pop(UNDONE, None)
        if undone is None:
            raise InvalidInput("E-SERVER-STATE", "journaled codec state has no field for rollbacks, so a different version "
                                                 "may have written it")
        restore_server(self._state, tensors, sent)
        self._undone = int(undone.item()) + (1 << 63)

    def begin_anew(self) -> None:
        """Resets the codec's server state to the state before the first step; residuals are lost."""
        self._state = self._codec.init_server(self._spec)
        seed(self._state, self._job, self._bucket.id, SERVER)
        self._undone, self._mean = 0, None


class _Mean(NamedTuple):
    """A weighted mean in progress. A product of two float32 numbers is exact in float64, so the mean of equal values is exact
    for any weights."""

    total: Any
    weight: float
    flagged: bool


def _loaded(data: bytes | memoryview) -> dict[str, Any]:
    try:
        return safetensors.numpy.load(bytes(data))
    except safetensors.SafetensorError as error:
        raise InvalidInput("E-SERVER-STATE", f"codec state is not in the safetensors format: {error}") from None


def make_codec_ops(
    plan: Plan, server: int, before: Iterable[CodecOps] = (), *, gradients: int = -1,
) -> dict[int, CodecOps]:
    """Creates the CodecOps of server number `server` for a plan, keyed by bucket. They inherit the residuals that `before` has
    for the same elements.

    `gradients`: how many of the job's tensors, in order, are gradients; the others are buffers. -1: there are no buffers.
    """
    mine = (b for b in plan.buckets if b.served and b.server == server)
    ops = {b.id: CodecOps(make_codec(b, plan=plan), b, plan.job, weights=plan.steps_locally,
                          buffers=b.path == "service" and 0 <= gradients <= b.slices[0].tensor) for b in mine}
    # Residuals in other units would need a learning rate or an optimizer's state, which only workers have.
    olds: dict[tuple[Any, int], list[ResidualSlice]] = {}
    for old in before:
        for one in old.residuals():
            olds.setdefault((old.unit, one.tensor), []).append(one)
    for new in ops.values():
        parts = [part for s in new.slices for part in olds.get((new.unit, s.tensor), ())
                 if s.start < part.stop and part.start < s.stop]
        new.inherit_residuals([*parts])
    return ops


def expected_nbytes(plan: Plan, server: int) -> int:
    """Returns the maximum size of the bodies that a worker and server `server` may send each other at once. This covers
    payloads of two steps for each bucket, since either end may be a step ahead, and one saved state."""
    mine = [b for b in plan.buckets if b.served and b.server == server]
    payloads = sum(make_codec(b, plan=plan).bound(b.spec) for b in mine)
    states = (parse_spec(text).max_state_nbytes(b.numel) for b in mine for text in (b.codec, b.down, *b.by_node) if text)
    state_nbytes = max(states, default=0)
    return 2 * payloads + state_nbytes + SLACK_NBYTES


def contributing_ranks(plan: Plan, sites: Iterable[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Maps a bucket to the ranks that contribute to it: the bucket's owner in each of the sites, in the order of summation."""
    return {b.id: tuple(b.owner_in(site) for site in sites) for b in plan.buckets if b.served}
