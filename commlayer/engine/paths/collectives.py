"""Defines the path for buckets that are summed by a sequence of collectives, with encoding and decoding between them.

Stage j of a path consists of its j-th exchange and the local operations before this exchange. Stage j runs on lane j and in its
own process groups, with the buckets in plan order. Every rank therefore calls a group's collectives in the same order. The
second exchange of one bucket overlaps the first exchange of the next bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from commlayer.cluster.processes.bounded_calls import ANY_PEER, PendingCollective
from commlayer.cluster.processes.channels import Channels
from commlayer.cluster.processes.collectives import Groups
from commlayer.compressors.codec import Codec
from commlayer.engine.buckets.bucket import TINY, CollectiveBucket, WorkerBucket
from commlayer.engine.buckets.current_step import Step
from commlayer.engine.paths.bucket_program import BucketProgram
from commlayer.engine.paths.compiled_path import ProgramPlace, compile_path
from commlayer.engine.paths.lanes import NEVER, Lane
from commlayer.engine.paths.path import Path
from commlayer.engine.paths.staging import Staging
from commlayer.errors import CorruptFrame
from commlayer.planner import tree
from commlayer.records import Plan


class CollectivesPath(Path[CollectiveBucket]):
    """Exchanges buckets by sequences of collectives."""

    ordered = True

    def __init__(
        self, buckets: Sequence[CollectiveBucket], step: Step, staging: Staging, codecs: Mapping[int, Codec], plan: Plan,
        groups: Groups,
    ) -> None:
        super().__init__(buckets, step, staging)
        self._groups = groups
        self._channels, self._programs = _compile_paths(buckets, codecs, plan, groups)
        longest = max(len(program.segments) for program in self._programs.values())
        self._lanes = [Lane(f"stage-{j}", step.latch) for j in range(longest)]
        self._begun = 0
        self._in_means = any(bucket.in_means for bucket in buckets)
        self._weights: tuple[int, torch.Tensor, PendingCollective] | None = None
        """Units.members, the sum of all workers' weights, and the collective that computes this sum; for codecs that encode
        parts of the mean."""
        self._tails: tuple[torch.Tensor, PendingCollective] | None = None
        """The weights and used slices of all buckets, and the all-reduce that sums them. The value is None before the
        collective begins and after its result was read."""

    def begin(self, bucket: CollectiveBucket) -> None:
        self._fill(bucket)
        if not self._begun and self._in_means:
            total = torch.tensor([self._step.units.weight], device=self._groups.device)
            self._weights = self._step.units.members, total, self._groups.allreduce(total)
        bucket.exchange.started = True
        bucket.marks.append(self._staging.mark())
        self._put(self._programs[bucket.id], 0)
        self._begun += 1
        if self._begun == len(self.buckets):
            tails = torch.cat([bucket.memory.tail for bucket in self.buckets])
            self._tails = tails, self._groups.allreduce(tails)

    def _put(self, program: BucketProgram, stage: int) -> None:
        self._lanes[stage].put(lambda: self._run(program, stage))

    def _run(self, program: BucketProgram, stage: int) -> None:
        """Runs one stage of a bucket, on the lane of this stage."""
        if self._step.error is not None:
            return
        bucket = program.bucket
        last = stage + 1 == len(program.segments)
        try:
            with self._staging.lane(bucket):
                if stage == 0 and bucket.in_means and self._weights is not None:
                    self._to_means(bucket, *self._weights)
                program.advance(stage, self._step)
                if last:
                    self._staging.settle()
        except CorruptFrame as error:
            raise error.located(peer=ANY_PEER, bucket=bucket.id) from None
        if last:
            self._arrived(bucket)
        else:
            self._put(program, stage + 1)

    def _to_means(self, bucket: CollectiveBucket, members: int, total: torch.Tensor, pending: PendingCollective) -> None:
        """Scales a bucket's send buffer from a part of the sum to a part of the mean, when the total weight has arrived."""
        pending.wait(NEVER, self._step.failed)
        if (part := members / max(float(total), TINY)) != 1.0:
            bucket.x.mul_(part)

    def finish(self, deadline: float) -> None:
        super().finish(deadline)
        if self._step.error is not None or self._tails is None:
            return
        (tails, pending), self._tails = self._tails, None
        pending.wait(deadline, self._step.failed)
        # All exchanges have ended, so this read does not wait, even on a GPU.
        weight, at = float(tails[-1]), 0
        for bucket in self.buckets:
            tail = bucket.memory.tail
            tail.copy_(tails[at : at + tail.numel()])
            at += tail.numel()
            bucket.read_tail(weight)

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool:
        """Returns True if the result of `bucket` can be written. That is possible for all buckets together, when their weights
        have arrived."""
        if self._tails is not None and deadline is not None:
            self.finish(deadline)
        return self._tails is None and super().take(bucket, deadline)

    def reset(self) -> None:
        super().reset()
        self._begun, self._weights, self._tails = 0, None, None
        for program in self._programs.values():
            program.reset()

    def drain(self, timeout_s: float) -> bool:
        return all(lane.drain(timeout_s) for lane in self._lanes)

    def close(self, timeout_s: float) -> None:
        for lane in self._lanes:
            lane.close(timeout_s)
        self._channels.close()


def _compile_paths(
    buckets: Sequence[CollectiveBucket], codecs: Mapping[int, Codec], plan: Plan, groups: Groups,
) -> tuple[Channels, dict[int, BucketProgram]]:
    """Compiles every bucket's path for this rank. Returns the process groups for all paths, and the buckets by id."""
    place = ProgramPlace(groups.world // groups.ranks_per_node, groups.ranks_per_node, groups.node, groups.local)
    segments = {b.id: compile_path(tree.parse(b.planned.path), b.numel, place, owner=b.planned.owner,
                                   rounds=len(codecs[b.id].rounds), bucket=b.id) for b in buckets}
    # Exchanges without this rank are included, because all ranks must create all groups.
    wanted = {(j, segment.scope) for each in segments.values() for j, segment in enumerate(each) if segment.scope}
    channels = Channels(wanted, groups.members, place.per_node, groups.timeout_s)
    return channels, {b.id: BucketProgram(b, segments[b.id], codecs[b.id], channels, job=plan.job) for b in buckets}
