"""Runs local steps (as in DiLoCo): every H steps, the workers average their weight changes since the last exchange.

An exchange uses the same codecs and residuals as gradients do. It sends start minus end instead of the gradient; start are the
common weights after the last exchange. The outer optimizer uses the average as the gradient at the start. All workers continue
from the resulting weights, bit for bit the same.

With overlap, workers continue training during the exchange. Let s be a worker's weights when an exchange began and w its
weights now. The exchange is merged before the next one: the outer optimizer updates start with the mean change, and w becomes
start + (w - s). So each change is sent once, starts are the same on all workers, and weights differ by the changes not sent
yet.

If the outer optimizer requests it (OuterSGD.matched), each mean is scaled to the norm of the ranks' changes.

A worker that joins begins with the starts of the other ranks. It contributes to the exchange that has just begun with weight 0,
and from then on as any other.

An outer step can be split into fragments: one group of buckets is exchanged every H / fragments steps. With overlap the group
is merged at the next fragment, otherwise at once. A tensor split over fragments is exchanged by element ranges in row-major
order.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from commlayer.compressors.residual_slices import ResidualSlice, residual_on
from commlayer.engine.sync.norm_matching import Norms, largest_of, scale_of, square_of
from commlayer.engine.worker.worker import Worker
from commlayer.observe.step_trace import Recorder
from commlayer.optim import OuterSGD
from commlayer.planner.buckets import ranges_of
from commlayer.records import Slice

log = logging.getLogger("commlayer")
PENDING = "local.residual."
"""Prefix of the names of pending residuals in a checkpoint; the tensor's number follows."""
SPOILT = "the weights of some worker are not finite: all workers return to the weights of the last exchange"


def _spoilt(_own: int, *, finite: bool) -> None:
    if not finite:
        log.warning("%s", SPOILT)


class StepWeights:
    """Weight of a worker's change in an exchange: the mean weight of the batches in its steps since the last exchange."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        """The weight of this worker's batches from now on."""
        self._steps, self._sum = 0.0, 0.0
        """Number of steps since the last exchange, and the sum of this worker's weights in them."""

    def count(self) -> None:
        self._steps += 1.0
        self._sum += self.weight

    def take(self) -> float:
        """Returns this worker's weight for an exchange of the steps so far, and resets the sums."""
        steps, total = self._steps, self._sum
        self._steps = self._sum = 0.0
        return total / steps if steps else self.weight

    def snapshot(self) -> torch.Tensor:
        return torch.tensor([self._steps, self._sum], dtype=torch.float64)

    def restore(self, kept: torch.Tensor | None) -> None:
        self._steps, self._sum = (0.0, 0.0) if kept is None else kept.tolist()


class PendingResiduals:
    """Residuals of an earlier plan that averaged gradients. They are added to this rank's next gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._pending: dict[int, torch.Tensor] = {}
        """Maps a tensor number to this rank's residual, which will be added to the tensor's next gradient."""
        self._added: dict[int, torch.Tensor] = {}
        """Maps a tensor number to the residual that was added to a gradient which no optimizer step has applied yet."""

    def inherit(self, residuals: Sequence[ResidualSlice]) -> None:
        """Receives the residuals of a plan that averaged gradients, which replace those that are pending."""
        self._pending.clear()
        for number, p in enumerate(self._parameters):
            elements = [Slice(number, 0, p.numel())]
            if (residual := residual_on(residuals, elements)) is not None:
                self._pending[number] = torch.from_numpy(residual).view(p.shape).to(p.device)

    @property
    def slices(self) -> list[ResidualSlice]:
        """Residuals that are still pending, because so far their gradients were missing, sparse, not finite or cleared."""
        return [ResidualSlice(number, 0, residual.reshape(-1)) for number, residual in self._pending.items()]

    def add_to_gradients(self, scale: float = 1.0) -> None:
        """Adds the pending residuals, times `scale`, to gradients that are about to be applied."""
        grads = {n: grad for n in self._pending if (grad := self._parameters[n].grad) is not None and not grad.is_sparse}
        if all(bool(grad.isfinite().all()) for grad in grads.values()):  # otherwise the optimizer step will be skipped
            for number, grad in grads.items():
                self._added[number] = residual = self._pending.pop(number)
                grad.detach().add_(residual.to(grad.dtype), alpha=scale)

    def remove_from_gradients(self, numbers: Iterable[int] | None = None) -> None:
        """Makes residuals pending again, because the gradients to which they were added were cleared before an optimizer step.
        `numbers`: the parameters concerned; None: all."""
        for number in list(self._added) if numbers is None else [n for n in numbers if n in self._added]:
            self._pending[number] = self._added.pop(number)

    def applied(self) -> None:
        """Records that the optimizer has applied the gradients to which residuals were added."""
        self._added.clear()

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {f"{PENDING}{number}": residual.cpu().clone() for number, residual in self._pending.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._pending = {number: tensors[name].clone().to(p.device) for number, p in enumerate(self._parameters)
                         if (name := f"{PENDING}{number}") in tensors}


class _Schedule(NamedTuple):
    every: int
    fragments: int
    overlap: bool


class _Sent(NamedTuple):
    """A running exchange of one fragment. The keys of its maps are tensor numbers."""

    fragment: int
    ranges: dict[int, list[tuple[int, int]]]
    """Ranges of elements of each tensor that are exchanged."""
    changes: dict[int, torch.Tensor]
    """Maps a parameter's number to its weight change, and a buffer's number to its values. Each has the shape of its tensor,
    but only the elements in `ranges` are valid. The means are written into the same memory."""
    ends: dict[int, list[torch.Tensor]]
    """Maps a tensor number to the values that each of its ranges had when the exchange began. Empty without overlap."""

    def weights(self, count: int) -> list[torch.Tensor]:
        """Returns the changes of the tensors numbered below `count`, one tensor for each range."""
        return [part for n, change in self.changes.items() if n < count for part in _parts(change, self.ranges[n])]


class OuterSteps:
    """Local steps of one model on one rank, and their exchanges. The schedule can change between two outer steps."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], every: int, outer: OuterSGD, weights: StepWeights, *, fragments: int = 1,
        overlap: bool = False, norms: Norms | None = None, merged: Callable[..., None] = _spoilt,
    ) -> None:
        """`merged(own, finite=...)` is called after each exchange, on all ranks; `own` is the value of Worker.not_finite.
        `norms` exchanges norms; None: norms are not exchanged."""
        self._parameters, self.weights, self._merged, self._outer = parameters, weights, merged, outer
        self.set_schedule(every, fragments=fragments, overlap=overlap, norms=norms)
        self.taken = 0
        """Number of this rank's steps since the last exchange began."""
        self._steps = 0, 0
        """Two numbers of steps: those whose changes are being exchanged, and those since the current outer step began."""
        self.starts = [_wide(p) for p in parameters]
        """Weights after the last merged exchange, which are the same on all ranks."""
        self.apart = False
        """True: weights might differ between ranks."""
        self._velocity = [torch.zeros_like(start) if outer.momentum else None for start in self.starts]
        """The outer optimizer's momentum for each parameter; None entries without momentum."""
        self._fragment = 0
        self._sent: _Sent | None = None
        self._joins = False
        """True: the next exchange is the first one of this rank, which has joined the job."""
        self._weight: float | None = None
        """This rank's weight in the current outer step; None before its first exchange."""
        self.pending_residuals = PendingResiduals(parameters)
        self.recorder = Recorder()
        """Records the times of steps without an exchange. The worker's recorder records exchanges."""
        self._rooms: dict[int, torch.Tensor] = {}
        """Maps the number of a split tensor to the memory for its change in the current outer step."""
        self._finite: list[bool] = []
        """One flag for each fragment of the current outer step so far. True: the mean was finite."""

    def set_schedule(self, every: int, *, fragments: int, overlap: bool, norms: Norms | None = None) -> None:
        """Sets the schedule: number of steps per outer step, fragments, overlap. No exchange may be running."""
        self._schedule, self._norms = _Schedule(every, fragments, overlap), norms if self._outer.matched else None

    @property
    def every(self) -> int:
        return self._schedule.every

    def count(self) -> None:
        """Counts a step, before its optimizer step. Records residuals that were added to the previous step's gradients as
        applied."""
        self.pending_residuals.applied()
        self.recorder.mark("backward")
        self.recorder.next()
        self.begin()
        self.taken += 1
        self._steps = self._steps[0], self._steps[1] + 1
        self.weights.count()

    def begin(self) -> None:
        """Called before an optimizer step of this rank: from now on its weights might differ from those of other ranks."""
        if not self.apart:
            for start, p in zip(self.starts, self._parameters, strict=True):
                if not torch.equal(start.to(p.dtype), p):  # after the script has replaced the weights
                    start.copy_(p.detach())
        self.apart = True

    @property
    def due(self) -> bool:
        return self.taken >= self.every // self._schedule.fragments

    @property
    def behind(self) -> int:
        """Number of recent steps whose weight changes some ranks do not have yet. They are lost if their rank dies. The number
        is the same on all ranks."""
        return sum(self._steps)

    @property
    def shifted(self) -> bool:
        """True: the ranks' weights are never all equal, so that only `starts` can be compared between ranks."""
        return self._schedule.overlap or self._schedule.fragments > 1

    @property
    def common(self) -> dict[int, torch.Tensor]:
        """Maps the id of each parameter to its start, if the ranks' weights are never all equal."""
        return dict(zip(map(id, self._parameters), self.starts, strict=True)) if self.shifted else {}

    @property
    def under_way(self) -> bool:
        """True: an outer step has begun and not ended."""
        return self._sent is not None or self._fragment > 0

    def exchange(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> None:
        """Exchanges one fragment. Without overlap it merges the result of this exchange, with overlap that of the previous one.
        All ranks call it. The merged elements are then the same on all ranks, apart from steps that were made after the
        exchange began."""
        if self._sent is not None:
            self._merge(worker, buffers, self._sent, deadline_s)
        sent = self._begin(worker, buffers)
        if not self._schedule.overlap:
            self._merge(worker, buffers, sent, deadline_s)
        # A rank whose scaler skipped the due step exchanges later and can have counted further steps: these stay counted.
        self.taken = max(0, self.taken - self.every // self._schedule.fragments)
        self.apart = self.shifted
        self.recorder.restart()

    def join(self, given: Mapping[str, torch.Tensor]) -> None:
        """Joins in an exchange that the other ranks have just begun, which ends this rank's first step. `given`: the
        `snapshot` of another rank."""
        for number, start in enumerate(self.starts):
            start.copy_(given[f"local.start.{number}"])
            self._set_velocity(number, given.get(f"local.velocity.{number}"))
        self.taken, self._joins = self.every // self._schedule.fragments - 1, True
        self._steps = int(given["local.behind"][0]), 0

    def settle(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> None:
        """Completes the running exchange and the rest of the outer step."""
        if self._sent is not None:
            self._merge(worker, buffers, self._sent, deadline_s)
        while self._fragment:
            self._at_once(worker, buffers, deadline_s)

    def drain(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> bool:
        """Completes the outer step, then exchanges all remaining steps, so that weights and buffers are the same on all ranks.
        Returns True if there were any remaining steps."""
        self.settle(worker, buffers, deadline_s)
        was_apart, self.apart, self.taken = self.apart, False, 0
        for _ in range(self._schedule.fragments if was_apart else 0):
            self._at_once(worker, buffers, deadline_s)
        return was_apart

    def _at_once(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> None:
        self._merge(worker, buffers, self._begin(worker, buffers), deadline_s)

    def _begin(self, worker: Worker, buffers: Sequence[torch.Tensor]) -> _Sent:
        if self._fragment == 0:
            worker.units.scale = worker.units.rate = 1.0  # the unit is that of the weights
            self._weight = self.weights.take()
            self._steps = self._steps[0 if self._joins else 1], 0
        elif self._weight is None:
            self._weight = self.weights.take()
        worker.units.weight = self._weight
        if self._joins:
            self._joins, self._weight, worker.units.weight = False, None, 0.0
            for start, p in zip(self.starts, self._parameters, strict=True):
                p.detach().copy_(start)
        tensors = [p.detach() for p in (*self._parameters, *buffers)]
        ranges = ranges_of(worker.fragments[self._fragment])
        changes, ends = {}, {}
        for n, parts in ranges.items():
            values = tensors[n].contiguous()
            changes[n] = change = values if self._own(n) else self._room(
                n, self.starts[n] if n < len(self.starts) else values, parts)
            ends_now = _parts(values, parts)
            if n < len(self.starts):
                for part, start, end in zip(_parts(change, parts), _parts(self.starts[n], parts), ends_now, strict=True):
                    torch.sub(start, end, out=part)
            else:
                change.copy_(values)
            if self._schedule.overlap:
                ends[n] = [part.clone() for part in ends_now]
        self._sent = sent = _Sent(self._fragment, ranges, changes, ends)
        self._fragment = (self._fragment + 1) % self._schedule.fragments
        with self._whole(sent):
            self._send(worker, sent, len(tensors))
        return sent

    @contextlib.contextmanager
    def _whole(self, sent: _Sent) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if not self._schedule.overlap:
                self._put_back(sent)
            raise

    def _own(self, number: int) -> bool:
        """Returns True if a parameter's own memory contains its weight change, and then the mean, until the merge."""
        if self._schedule.overlap or number >= len(self.starts):
            return False
        p = self._parameters[number]
        return p.is_contiguous() and p.dtype == self.starts[number].dtype

    def _put_back(self, sent: _Sent) -> None:
        """Restores the weights from before a failed exchange, up to rounding."""
        self._sent = None
        for n, parts in sent.ranges.items():
            if self._own(n):
                for change, start in zip(_parts(sent.changes[n], parts), _parts(self.starts[n], parts), strict=True):
                    torch.sub(start, change, out=change)

    def _room(self, number: int, like: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor:
        """Returns the memory for the change of a tensor. All fragments of a split tensor share it: buckets keep references to
        it."""
        if ranges == [(0, like.numel())]:
            return torch.empty_like(like)
        if number not in self._rooms:
            self._rooms[number] = torch.empty_like(like)
        return self._rooms[number]

    def _send(self, worker: Worker, sent: _Sent, tensors: int) -> None:
        worker.send(sent.changes, sent.fragment)
        if sent.fragment == self._schedule.fragments - 1:
            worker.complete([None] * tensors)
        if self._norms is not None:
            self._norms.start(worker.units.weight, square_of(sent.weights(len(self.starts))))

    def _merge(self, worker: Worker, buffers: Sequence[torch.Tensor], sent: _Sent, deadline_s: float) -> None:
        """Waits for the means of an exchange and applies the outer optimizer."""
        tensors = [p.detach() for p in (*self._parameters, *buffers)]
        with self._whole(sent):
            worker.wait(deadline_s, sent.fragment)
            norms = [] if self._norms is None else self._norms.read()
        try:
            if worker.has_weight(sent.fragment):
                worker.write([sent.changes.get(n) for n in range(len(tensors))], sent.fragment)
            else:  # only workers that have just joined are left
                for mean in sent.weights(len(self.starts)):
                    mean.zero_()
        except BaseException:
            for n in filter(self._own, sent.ranges):
                tensors[n].copy_(self.starts[n])  # the change may be overwritten already
            raise
        means = sent.weights(len(self.starts))
        finite = math.isfinite(largest_of(means))
        if finite:
            if norms and self._norms is not None:
                square = square_of(means)
                scale = scale_of(norms, square)
                for mean in means if scale != 1 else ():
                    mean.mul_(scale)
                self._norms.observe(norms, square)
            self._advance(sent)
        for n, parts in sent.ranges.items():
            values = tensors[n].contiguous()
            merged = _parts(self.starts[n] if n < len(self.starts) else sent.changes[n], parts)
            for i, (mine, common) in enumerate(zip(_parts(values, parts), merged, strict=True)):
                mine.copy_(common + (mine - sent.ends[n][i]) if sent.ends and finite else common)
            if values is not tensors[n]:  # `tensors[n]` is not contiguous, so `values` is a copy
                tensors[n].copy_(values)
        self._finite.append(finite)
        self._sent = None
        if sent.fragment == self._schedule.fragments - 1:
            worker.end(finite=all(self._finite))
            for fragment, is_finite in enumerate(self._finite):
                if is_finite:
                    worker.mark_applied(range(len(self.starts)), fragment)
            self._finite.clear()
            self._rooms.clear()
            self._steps = 0, self._steps[1]
        own, worker.not_finite = worker.not_finite, -1
        self._merged(own, finite=finite)

    def _advance(self, sent: _Sent) -> None:
        for n, parts in sent.ranges.items():
            if n < len(self.starts):
                velocity = self._velocity[n]
                momenta = [None] * len(parts) if velocity is None else _parts(velocity, parts)
                for start, mean, of_start in zip(_parts(self.starts[n], parts), _parts(sent.changes[n], parts), momenta,
                                                 strict=True):
                    self._outer.step(start, mean, of_start)

    def _set_velocity(self, number: int, left: torch.Tensor | None) -> None:
        """Sets the outer optimizer's momentum of a tensor to `left`, the momentum of another run; None: zeros."""
        if (velocity := self._velocity[number]) is not None:
            velocity.zero_() if left is None else velocity.copy_(left)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Returns the state for a checkpoint. Call it while no exchange is running. The state includes the starts, because
        between two exchanges no model file contains them."""
        tensors = {"local.taken": torch.tensor(self.taken), "local.weights": self.weights.snapshot(),
                   "local.apart": torch.tensor(self.apart), "local.behind": torch.tensor(self._steps)}
        tensors |= self.pending_residuals.snapshot()
        for number, start in enumerate(self.starts):
            tensors[f"local.start.{number}"] = start.detach().cpu().clone()
            if (velocity := self._velocity[number]) is not None:
                tensors[f"local.velocity.{number}"] = velocity.detach().cpu().clone()
        return tensors

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.taken = int(tensors["local.taken"])
        self.apart = bool(tensors.get("local.apart", self.taken > 0))
        self._steps = 0, self.taken
        self.weights.restore(tensors.get("local.weights"))
        self.pending_residuals.restore(tensors)
        for number, start in enumerate(self.starts):
            start.copy_(tensors[f"local.start.{number}"])
            self._set_velocity(number, tensors.get(f"local.velocity.{number}"))


def _wide(p: nn.Parameter) -> torch.Tensor:
    """Returns a contiguous copy of a parameter, in float32 if its dtype is narrower, so that small changes of many exchanges
    add up."""
    wide = torch.float32 if p.element_size() < 4 else p.dtype
    return p.detach().to(wide, copy=True, memory_format=torch.contiguous_format)


def _parts(x: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Returns views of the given element ranges of a contiguous tensor."""
    flat = x.view(-1)
    return [flat[start:stop] for start, stop in ranges]
