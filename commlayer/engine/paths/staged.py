"""Route for buckets whose path is a sequence of collectives, with encodes and decodes between them.

Stage j of a path is its j-th exchange and the local ops before it. It runs on lane j and in its own groups, buckets in plan
order. So every rank issues a group's collectives in one order, and one bucket's second exchange overlaps the next one's first.
staged_bucket.py runs a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from commlayer.cluster.collectives import Channels, Groups
from commlayer.cluster.process_groups import ANY_PEER, PendingCollective
from commlayer.compressors.codec import Codec
from commlayer.engine.bucket import WorkerBucket
from commlayer.engine.lanes import Lane
from commlayer.engine.paths.path_program import Place, compile_path, stages_of
from commlayer.engine.paths.route import Route, fill, take_back
from commlayer.engine.paths.staged_bucket import FOREVER_S, StagedBucket
from commlayer.engine.staging import Staging
from commlayer.engine.step import Step
from commlayer.errors import CorruptFrame, DeadlineExceeded
from commlayer.planner.model import paths
from commlayer.records import Plan

TINY = 1e-30
"""If all workers have weight 0; the step then ends with an error about it."""


class Staged(Route):
    """Without groups a worker is alone, and its gradients are the sum."""

    ordered = True

    def __init__(
        self, buckets: Sequence[WorkerBucket], step: Step, staging: Staging, codecs: Mapping[int, Codec], plan: Plan,
        groups: Groups | None,
    ) -> None:
        self._buckets, self._step, self._staging, self._groups = buckets, step, staging, groups
        self._stages: dict[int, StagedBucket] = {}
        self._channels: Channels | None = None
        if groups is not None:
            self._channels, self._stages = _compiled(buckets, codecs, plan, groups)
        longest = max((len(staged.segments) for staged in self._stages.values()), default=0)
        self._lanes = [Lane(f"stage-{j}", step.latch) for j in range(longest)]
        self._arrivals = step.arrivals()
        self._begun = 0
        self._in_means = any(bucket.in_means for bucket in buckets)
        self._tails: tuple[torch.Tensor, PendingCollective] | None = None
        self._weights: tuple[torch.Tensor, PendingCollective] | None = None

    def open(self) -> None:
        """Exchanges the total weight first: codecs that code parts of the mean need it before they code."""
        if self._groups is not None and self._in_means:
            total = torch.tensor([self._step.units.weight], device=self._groups.device)
            self._weights = total, self._groups.allreduce(total)

    def begin(self, bucket: WorkerBucket) -> None:
        take_back(self, bucket, self._staging)
        fill(bucket, self._step, self._staging)
        if self._groups is None:
            self._finished(bucket)
            return
        bucket.started = True
        bucket.marks.append(self._staging.mark())
        self._put(self._stages[bucket.id], 0)
        self._begun += 1
        if self._begun == len(self._buckets):
            self._share_tails(self._groups)

    def _share_tails(self, groups: Groups) -> None:
        """One small all-reduce distributes weights and used slices of all buckets."""
        tails = torch.cat([bucket.tail for bucket in self._buckets])
        self._tails = tails, groups.allreduce(tails)

    def _put(self, staged: StagedBucket, stage: int) -> None:
        self._lanes[stage].put(lambda: self._run(staged, stage))

    def _run(self, staged: StagedBucket, stage: int) -> None:
        """Runs on the lane of that stage."""
        if self._step.error is not None:
            return
        bucket = staged.bucket
        try:
            with self._staging.lane(bucket):
                if stage == 0 and bucket.in_means:
                    self._to_means(bucket)
                staged.advance(stage, self._step)
                if stage + 1 == len(staged.segments):
                    self._staging.settle()
        except CorruptFrame as error:
            raise error.located(peer=ANY_PEER, bucket=bucket.id) from None
        if stage + 1 < len(staged.segments):
            self._put(staged, stage + 1)
        else:
            self._finished(bucket)

    def _to_means(self, bucket: WorkerBucket) -> None:
        """Runs on the lane of stage 0: x, so far a part of the sum, becomes a part of the mean."""
        assert self._groups is not None
        assert self._weights is not None
        total, pending = self._weights
        pending.wait(FOREVER_S, self._step.failed)
        if (part := self._groups.world / max(float(total), TINY)) != 1.0:
            bucket.x.mul_(part)

    def _finished(self, bucket: WorkerBucket) -> None:
        bucket.done = True
        self._arrivals.arrived()

    def finish(self, deadline: float) -> None:
        if not self._arrivals.wait(deadline):
            late = next(bucket for bucket in self._buckets if not bucket.done)
            raise DeadlineExceeded("not exchanged before the deadline", peer=ANY_PEER, step=self._step.number, bucket=late.id)
        if self._step.error is not None or self._tails is None:
            return
        tails, pending = self._tails
        pending.wait(deadline, self._step.failed)
        # All exchanges have ended, so also on a GPU this does not wait.
        weight, at = None if self._buckets[-1].read_here else float(tails[-1]), 0
        for bucket in self._buckets:
            bucket.tail.copy_(tails[at : at + bucket.tail.numel()])
            at += bucket.tail.numel()
            bucket.told = weight
            bucket.read_used()

    def undo(self, bucket: WorkerBucket) -> bool:
        back = bucket.take_back()
        if back and bucket.id in self._stages:
            self._stages[bucket.id].undo(back)
        return back != 0

    def reset(self) -> None:
        self._begun, self._tails = 0, None
        self._arrivals.expect(len(self._buckets))
        for bucket in self._buckets:
            bucket.rewind()
        for staged in self._stages.values():
            staged.reset()

    def drain(self, timeout_s: float) -> bool:
        return all(lane.drain(timeout_s) for lane in self._lanes)

    def close(self, timeout_s: float) -> None:
        for lane in self._lanes:
            lane.close(timeout_s)
        if self._channels is not None:
            self._channels.close()


def _compiled(
    buckets: Sequence[WorkerBucket], codecs: Mapping[int, Codec], plan: Plan, groups: Groups,
) -> tuple[Channels, dict[int, StagedBucket]]:
    """Every bucket's path as compiled for this rank, and the groups for all of them."""
    place = Place(groups.world // groups.ranks_per_node, groups.ranks_per_node, groups.node, groups.local)
    segments = {}
    wanted = set()
    for bucket in buckets:
        path, rounds = paths.parse(bucket.planned.path), len(codecs[bucket.id].rounds)
        segments[bucket.id] = compile_path(path, bucket.numel, place, owner=bucket.owner, rounds=rounds, bucket=bucket.id)
        # Includes exchanges without this rank: all ranks must make all groups.
        wanted |= set(enumerate(stages_of(path, rounds)))
    channels = Channels(wanted, groups.members, place.per_node, groups.timeout_s)
    return channels, {b.id: StagedBucket(b, segments[b.id], codecs[b.id], channels, job=plan.job) for b in buckets}
