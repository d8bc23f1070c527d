"""Runs buckets of staged paths. Knows lanes and groups; no autograd, no servers, and nothing of what a stage does.

Stage j of a path (its j-th exchange with what stands before it) runs on lane j and in groups of its own, buckets in plan
order: so every rank issues a group's collectives in one order, and while one bucket is in its second exchange the next is in
its first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from commlayer.compressors.codec import Codec
from commlayer.errors import CorruptFrame
from commlayer.observe import Recorder
from commlayer.planner.model import paths
from commlayer.records import Plan
from commlayer.runtime.flow import Flow
from commlayer.runtime.lanes import Lane
from commlayer.runtime.routes.path_program import Place, compile_path, stages_of
from commlayer.runtime.routes.staged_bucket import FOREVER_S, Error, StagedBucket
from commlayer.transport.channels import Channels
from commlayer.transport.groups import GROUP, Groups, Pending

TINY = 1e-30
"""Where no worker weighs anything: the step ends with an error that says so."""


class Staged:
    """All staged flows of a worker, and their lanes. Of none it does nothing."""

    def __init__(
        self, flows: Mapping[int, StagedBucket], groups: Groups | None, channels: Channels | None,
        latch: Callable[[BaseException], None], failed: Error, recorder: Recorder,
    ) -> None:
        self._flows, self._groups, self._channels, self._failed = flows, groups, channels, failed
        self.recorder = recorder
        stages = max((len(f.segments) for f in flows.values()), default=0)
        self._lanes = [Lane(f"stage-{j}", latch) for j in range(stages)]
        self._tails: tuple[torch.Tensor, Pending] | None = None
        self._in_means = any(f.flow.in_means for f in flows.values())
        self._weights: tuple[torch.Tensor, Pending] | None = None

    @classmethod
    def of(
        cls, flows: Sequence[Flow], codecs: Mapping[int, Codec], plan: Plan, groups: Groups | None,
        latch: Callable[[BaseException], None], failed: Error, recorder: Recorder,
    ) -> Staged:
        if groups is None or not flows:
            return cls({}, None, None, latch, failed, recorder)
        place = Place(groups.world // groups.ranks_per_node, groups.ranks_per_node, groups.node, groups.local)
        made = {}
        wanted = set()
        for flow in flows:
            bucket, codec = flow.bucket, codecs[flow.bucket.id]
            path, rounds = paths.parse(bucket.path), len(codec.rounds)
            made[bucket.id] = compile_path(path, flow.numel, place, owner=bucket.owner, rounds=rounds, bucket=bucket.id)
            # Not only the exchanges that this rank takes part in: all ranks make all groups.
            wanted |= set(enumerate(stages_of(path, rounds)))
        channels = Channels(wanted, groups.members, place.per_node, groups.timeout_s)
        return cls(
            {f.bucket.id: StagedBucket(f, made[f.bucket.id], codecs[f.bucket.id], channels, job=plan.job)
             for f in flows},
            groups, channels, latch, failed, recorder,
        )

    def weigh(self, weight: float) -> None:
        """A step begins: what codes parts of the mean must know the weight of all before it codes. Ahead of all else."""
        if self._groups is not None and self._in_means:
            total = torch.tensor([weight], device=self._groups.device)
            self._weights = total, self._groups.allreduce(total)

    def _to_means(self, flow: Flow) -> None:
        """Lane of stage 0: x, which was taken as a part of the sum, becomes one of the mean."""
        assert self._groups is not None
        assert self._weights is not None
        total, pending = self._weights
        pending.wait(FOREVER_S, self._failed)
        if (part := self._groups.world / max(float(total), TINY)) != 1.0:
            flow.x.mul_(part)

    def begin(self, flow: Flow, done: Callable[[], None]) -> None:
        """x of that flow is gathered. Called in plan order; `done` runs when the sum is in x."""
        flow.started = True
        self._put(self._flows[flow.bucket.id], 0, done)

    def share_tails(self) -> None:
        """All flows have begun: one small all-reduce tells everyone the weights and who used what, for all of them."""
        if self._groups is not None:
            tails = torch.cat([f.flow.tail for f in self._flows.values()])
            self._tails = tails, self._groups.allreduce(tails)

    def read_tails(self, deadline: float) -> None:
        if self._tails is None:
            return
        tails, pending = self._tails
        pending.wait(deadline, self._failed)
        at = 0
        for flow in (f.flow for f in self._flows.values()):
            flow.tail.copy_(tails[at : at + flow.tail.numel()])
            at += flow.tail.numel()
            flow.read_used()

    def _put(self, flow: StagedBucket, stage: int, done: Callable[[], None]) -> None:
        self._lanes[stage].put(lambda: self._run(flow, stage, done))

    def _run(self, flow: StagedBucket, stage: int, done: Callable[[], None]) -> None:
        if self._failed() is not None:
            return
        try:
            if stage == 0 and flow.flow.in_means:
                self._to_means(flow.flow)
            flow.advance(stage, self._failed, self.recorder)
        except CorruptFrame as error:
            raise CorruptFrame(error.what, peer=GROUP, bucket=flow.flow.bucket.id) from None
        if stage + 1 < len(flow.segments):
            self._put(flow, stage + 1, done)
        else:
            done()

    def reset(self) -> None:
        self._tails = None
        for flow in self._flows.values():
            flow.reset()

    def undo(self, flow: Flow, slices: int) -> None:
        """What of its last exchange was not applied."""
        if (staged := self._flows.get(flow.bucket.id)) is not None:
            staged.undo(slices)

    def drain(self, timeout_s: float) -> bool:
        return all(lane.drain(timeout_s) for lane in self._lanes)

    def close(self, timeout_s: float) -> None:
        for lane in self._lanes:
            lane.close(timeout_s)
        if self._channels is not None:
            self._channels.close()
