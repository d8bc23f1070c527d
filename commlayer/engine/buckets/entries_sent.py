"""Sets how many entries a worker's sparse codecs send in each step, from the step number and the entries sent before.

The numbers are set for the buckets that this worker encodes for servers, on the encode lane, before the first bucket of a step
is encoded. compressors/global_budget.py divides the entries between buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from commlayer.codec_spec import CodecSpec, parse_spec
from commlayer.compressors.codec import CodecWrapper, State
from commlayer.compressors.global_budget import BudgetedTopK, ratio_at, share_budget
from commlayer.engine.buckets.bucket import EncodedBucket, WorkerBucket


class _BudgetedCodec(NamedTuple):
    codec: BudgetedTopK
    state: State


class EntriesSent:
    """Sets the number of entries that one worker's buckets send under one plan."""

    def __init__(self, buckets: Sequence[EncodedBucket]) -> None:
        self.forget()
        self._alone: list[_BudgetedCodec] = []
        self._pools: dict[tuple[CodecSpec, bool], list[_BudgetedCodec]] = {}
        """Groups of codecs whose buckets share one total number of entries. The keys (codec without its ratio, True if it sends
        weight updates) separate codecs whose magnitudes cannot be compared, or whose entries differ in bytes."""
        for bucket in buckets:
            if (one := _budgeted(bucket.codec, bucket.ledger.state)) is None:
                continue
            if one.codec.shared:
                self._pools.setdefault((parse_spec(str(one.codec)).without_ratio(), bucket.encodes_updates), []).append(one)
            else:
                self._alone.append(one)

    def forget(self) -> None:
        self._step = -1

    def begin(self, step: int) -> None:
        if step == self._step:
            return
        self._step = step
        for one in self._alone:
            one.codec.set_entries(one.state, one.codec.demand(one.state, _ratio(one, step)).plain)
        for pool in self._pools.values():
            shares = share_budget([one.codec.demand(one.state, _ratio(one, step)) for one in pool])
            for one, entries in zip(pool, shares, strict=True):
                one.codec.set_entries(one.state, entries)


def allot_entries(buckets: Sequence[WorkerBucket]) -> None:
    """Creates one EntriesSent for all buckets whose codec sends a limited number of entries, and stores it in these buckets."""
    budgeted = [bucket for bucket in buckets
                if isinstance(bucket, EncodedBucket) and _budgeted(bucket.codec, bucket.ledger.state) is not None]
    entries = EntriesSent(budgeted)
    for bucket in budgeted:
        bucket.coder.entries = entries


def inherit(before: Sequence[WorkerBucket], after: Sequence[WorkerBucket]) -> None:
    """After a change of plan, gives the elements of buckets that share one number of entries as many entries as these elements
    had before."""
    dense = [(s, one.state["entries"] / bucket.numel) for bucket in before if (one := _divided(bucket)) for s in bucket.slices]
    for bucket in after:
        if one := _divided(bucket):
            overlaps = [(min(s.stop, old.stop) - max(s.start, old.start), part)
                        for s in bucket.slices for old, part in dense if old.tensor == s.tensor]
            covered = sum(numel for numel, _ in overlaps if numel > 0)
            if covered:
                entries = sum(numel * part for numel, part in overlaps if numel > 0) * bucket.numel / covered
                one.codec.set_entries(one.state, max(1, round(entries)))


def _divided(bucket: WorkerBucket) -> _BudgetedCodec | None:
    one = _budgeted(bucket.codec, bucket.ledger.state) if isinstance(bucket, EncodedBucket) else None
    return one if one is not None and one.codec.shared else None


def _ratio(one: _BudgetedCodec, step: int) -> float:
    return ratio_at(one.codec.inner.ratio, one.codec.warmup_steps, step)


def _budgeted(codec: Any, state: State) -> _BudgetedCodec | None:
    """Returns the codec inside `codec` whose number of entries can be set, with its state. Returns None if `codec` contains no
    such codec."""
    while not isinstance(codec, BudgetedTopK):
        if not isinstance(codec, CodecWrapper) or "inner" not in state:
            return None
        codec, state = codec.inner, state["inner"]
    return _BudgetedCodec(codec, state)
