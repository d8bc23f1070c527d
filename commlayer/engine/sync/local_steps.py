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

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from commlayer.callbacks import ignore
from commlayer.compressors.residual_slices import ResidualSlice, residual_on
from commlayer.engine.model.shard_parameters import original_parameter
from commlayer.engine.sync.norm_matching import Norms, largest_magnitude, norm_matching_factor, sum_of_squares
from commlayer.engine.worker.worker import Worker
from commlayer.observe.step_trace import Recorder
from commlayer.optim import OuterSGD
from commlayer.planner.buckets import tensor_ranges
from commlayer.records import Slice

PENDING = "local.residual."
"""Prefix of the names of pending residuals in a checkpoint; the tensor's number follows."""


class StepWeights:
    """Weight of a worker's change in the exchange of a fragment: the mean weight of its batches since that fragment's last
    exchange."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        """The weight of this worker's batches from now on."""
        self._sums = [(0.0, 0.0)]
        """For each fragment: number of steps since its last exchange, and the sum of this worker's weights in them."""

    def divide(self, fragments: int) -> None:
        """Sets the number of fragments. All of them contain the steps that no exchange has sent completely."""
        self._sums = [max(self._sums)] * fragments

    def count(self) -> None:
        self._sums = [(steps + 1.0, total + self.weight) for steps, total in self._sums]

    def take(self, fragment: int) -> float:
        """Returns this worker's weight for an exchange of the steps so far, and resets the sums of the fragment."""
        (steps, total), self._sums[fragment] = self._sums[fragment], (0.0, 0.0)
        return total / steps if steps else self.weight

    def snapshot(self) -> torch.Tensor:
        return torch.tensor(self._sums, dtype=torch.float64)

    def restore(self, kept: torch.Tensor | None) -> None:
        sums = [(0.0, 0.0)] if kept is None else [(steps, total) for steps, total in kept.tolist()]
        self._sums = sums if len(sums) == len(self._sums) else [max(sums)] * len(self._sums)


class PendingResiduals:
    """Residuals of an earlier plan that averaged gradients. These residuals are added to this rank's next gradients."""

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
            added = self._added.pop(number)
            self._pending[number] = added + self._pending[number] if number in self._pending else added

    def applied(self) -> None:
        """Records that the optimizer has applied the gradients to which residuals were added."""
        self._added.clear()

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {f"{PENDING}{number}": residual.cpu().clone() for number, residual in self._pending.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._added.clear()
        self._pending = {number: tensors[name].clone().to(p.device) for number, p in enumerate(self._parameters)
                         if (name := f"{PENDING}{number}") in tensors}


class Fragment:
    """The part of the model that one exchange sends: ranges of elements of some tensors. `prepare` computes this rank's change
    since the start, and `apply` advances the start by the mean of all changes. The keys of maps are tensor numbers."""

    def __init__(
        self, number: int, ranges: Mapping[int, list[tuple[int, int]]], starts: Sequence[torch.Tensor],
        velocity: Sequence[torch.Tensor | None],
    ) -> None:
        """`ranges`: of the elements of each tensor. `velocity`: see OuterSGD.step."""
        self.number, self._ranges = number, ranges
        self._starts = {n: _range_views(starts[n], parts) for n, parts in ranges.items() if n < len(starts)}
        self._velocity = {n: _range_views(v, ranges[n]) for n in self._starts if (v := velocity[n]) is not None}
        self.changes: dict[int, torch.Tensor] = {}
        """The change of each parameter, and the values of each module buffer. Each has the shape of its tensor, but only the
        elements in `ranges` are valid. The means are written into the same memory."""
        self._ends: dict[int, list[torch.Tensor]] = {}
        """The values that each range had when the exchange began. Empty without overlap."""

    @property
    def parts(self) -> list[torch.Tensor]:
        """The changes of the parameters, later their means: one tensor for each range."""
        return [part for n in self._starts for part in _range_views(self.changes[n], self._ranges[n])]

    def prepare(self, tensors: Sequence[torch.Tensor], *, overlap: bool) -> None:
        """Computes the changes of `tensors` since the start. `overlap`: their values change before `apply`."""
        for n, parts in self._ranges.items():
            values = tensors[n].contiguous()
            ends, starts = _range_views(values, parts), self._starts.get(n)
            self.changes[n] = torch.empty_like(values, dtype=None if starts is None else starts[0].dtype)
            changes = _range_views(self.changes[n], parts)
            if starts is None:
                torch._foreach_copy_(changes, ends)
            else:
                for change, start, end in zip(changes, starts, ends, strict=True):
                    torch.sub(start, end, out=change)
            if overlap:
                self._ends[n] = [end.clone() for end in ends]

    def scale_to_norms(
        self, norms: Sequence[Sequence[float]], in_site: Callable[[float], float] = float, *, has_weight: bool,
    ) -> tuple[bool, float]:
        """Scales the means to the `norms` of the changes, if there are any. Without weight the means become zero. Returns
        whether they are finite, and the sum of their squares before scaling, 0 without norms. `in_site` returns the sum of a
        number over the ranks of the site, if the model is sharded over them."""
        parts = self.parts
        for mean in () if has_weight else parts:
            mean.zero_()
        # NaN if some mean on some rank is not finite
        square = in_site(sum_of_squares(parts) if norms else 0.0 * largest_magnitude(parts))
        if not (math.isfinite(square) and norms):
            return math.isfinite(square), 0.0
        scale = norm_matching_factor(norms, square)
        for mean in parts if scale != 1 else ():
            mean.mul_(scale)
        return True, square

    def apply(self, tensors: Sequence[torch.Tensor], outer: OuterSGD, *, finite: bool) -> None:
        """Advances the starts by the means, and writes them into `tensors`, plus what has changed there since `prepare`. If the
        means are not finite, all tensors return to their starts."""
        for n, parts in self._ranges.items():
            values = tensors[n].contiguous()
            means = _range_views(self.changes[n], parts)
            starts = self._starts.get(n, means)
            if finite and n in self._starts:
                for start, mean, velocity in zip(starts, means, self._velocity.get(n, [None] * len(parts)), strict=True):
                    outer.step(start, mean, velocity)
            for i, (mine, start) in enumerate(zip(_range_views(values, parts), starts, strict=True)):
                if self._ends and finite:
                    end = self._ends[n][i]
                    mine.copy_(torch.sub(mine, end, out=end).add_(start))
                else:
                    mine.copy_(start)
            if values is not tensors[n]:  # `tensors[n]` is not contiguous, so `values` is a copy
                tensors[n].copy_(values)


class OuterSteps:
    """Local steps of one model on one rank, and their exchanges. The schedule can change between two outer steps."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], every: int, outer: OuterSGD, weights: StepWeights, *, fragments: int = 1,
        overlap: bool = False, norms: Norms | None = None, sent: Callable[[], None] = ignore,
        merged: Callable[..., None] = ignore,
    ) -> None:
        """`sent` is called in each exchange when this rank has sent its changes. `merged(own, finite=...)` is called after each
        exchange, on all ranks; `own` is the value of Worker.not_finite. `norms` exchanges norms. None: the ranks do not
        exchange norms."""
        self._parameters, self.weights, self._merged, self._outer = parameters, weights, merged, outer
        self._sent = sent
        self.taken = 0
        """Number of this rank's steps since the last exchange began."""
        self.set_schedule(every, fragments=fragments, overlap=overlap, norms=norms)
        self._steps = 0, 0
        """Two numbers of steps: those whose changes are being exchanged, and those since the current outer step began."""
        self.starts = [_wide(p) for p in parameters]
        """Weights after the last merged exchange, which are the same on all ranks."""
        self.apart = False
        """True: weights might differ between ranks."""
        self._velocity = [torch.zeros_like(start) if outer.momentum else None for start in self.starts]
        """The outer optimizer's momentum for each parameter. The entries are None without momentum."""
        self._next = 0
        """Number of the fragment that is exchanged next."""
        self._running: Fragment | None = None
        self._joins = False
        """True: the next exchange is the first one of this rank, which has joined the job."""
        self.pending_residuals = PendingResiduals(parameters)
        self.recorder = Recorder()
        """Records the times of steps without an exchange. The worker's recorder records exchanges."""
        self._used: list[bool] = []
        """One flag for each fragment that the current outer step has exchanged so far. True: its mean was applied."""

    def set_schedule(self, every: int, *, fragments: int, overlap: bool, norms: Norms | None = None) -> None:
        """Sets the schedule: number of steps per outer step, fragments, overlap. No exchange may be running."""
        self.every, self._fragments, self._overlap = every, fragments, overlap
        self.taken = min(self.taken, every // fragments)
        self._norms = norms if self._outer.matched else None
        self.weights.divide(fragments)

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
    def matches_norms(self) -> bool:
        """True: the ranks exchange the norms of their changes."""
        return self._norms is not None

    @property
    def exchange_is_due(self) -> bool:
        return self.taken >= self.every // self._fragments

    @property
    def unshared_steps(self) -> int:
        """Number of recent steps whose weight changes some ranks do not have yet. These steps are lost if their rank dies. The
        number is the same on all ranks."""
        return sum(self._steps)

    @property
    def weights_always_differ(self) -> bool:
        """True: the ranks' weights are never all equal, so that only `starts` can be compared between ranks."""
        return self._overlap or self._fragments > 1

    @property
    def common(self) -> dict[int, torch.Tensor]:
        """Maps the id of each parameter to its start, if the ranks' weights are never all equal."""
        if not self.weights_always_differ:
            return {}
        return dict(zip(map(id, map(original_parameter, self._parameters)), self.starts, strict=True))

    @property
    def under_way(self) -> bool:
        """True: an outer step has begun and not ended."""
        return self._running is not None or self._next > 0

    def exchange(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> None:
        """Exchanges one fragment. Without overlap it merges the result of this exchange, with overlap that of the previous one.
        All ranks call it. The merged elements are then the same on all ranks, apart from steps that were made after the
        exchange began."""
        self._advance(worker, buffers, deadline_s, overlap=self._overlap)
        self.postpone()
        self.apart = self.weights_always_differ
        self.recorder.restart()

    def postpone(self) -> None:
        """Begins to count the steps until the next exchange. That exchange also sends what this one has not sent."""
        # A rank whose scaler skipped the due step exchanges later and can have counted further steps: these stay counted.
        self.taken = max(0, self.taken - self.every // self._fragments)

    def join(self, given: Mapping[str, torch.Tensor]) -> None:
        """Joins in an exchange that the other ranks have just begun, which ends this rank's first step. `given`: the
        `snapshot` of another rank."""
        self._restore_starts(given)
        self.taken, self._joins = self.every // self._fragments - 1, True
        self._steps = int(given["local.behind"][0]), 0

    def complete(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> bool:
        """Completes the running exchange and the rest of the outer step. Returns True if an outer step had begun."""
        was_under_way = self.under_way
        self._apply(worker, buffers, deadline_s)
        while self._next:
            self._advance(worker, buffers, deadline_s, overlap=False)
        return was_under_way

    def receive(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> bool:
        """Completes the running exchange, whose outer step may have fragments left. Returns True if an exchange was running."""
        was_running = self._running is not None
        self._apply(worker, buffers, deadline_s)
        return was_running

    def end_early(self, worker: Worker) -> None:
        """Ends the outer step without the fragments that are left. No exchange may be running, and none of this worker may
        follow."""
        if self._next:
            worker.end(self._used)
            self._used.clear()
            self._next, self._steps = 0, (0, self.unshared_steps)

    def drain(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> bool:
        """Completes the outer step, then exchanges all remaining steps, so that weights and buffers are the same on all ranks.
        Returns True if there were any remaining steps."""
        self.complete(worker, buffers, deadline_s)
        was_apart, self.apart, self.taken = self.apart, False, 0
        for _ in range(self._fragments if was_apart else 0):
            self._advance(worker, buffers, deadline_s, overlap=False)
        return was_apart

    def _advance(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float, *, overlap: bool) -> None:
        """Applies the running exchange and launches the next one. Without overlap, that one is applied at once."""
        self._apply(worker, buffers, deadline_s)
        self._launch(worker, buffers, deadline_s, overlap=overlap)
        if not overlap:
            self._apply(worker, buffers, deadline_s)

    def _launch(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float, *, overlap: bool) -> None:
        if self._next == 0:
            worker.units.scale = worker.units.rate = 1.0  # the unit is that of the weights
            self._steps = self._steps[0 if self._joins else 1], 0
        weight = self.weights.take(self._next)
        if self._joins:
            self._joins, weight = False, 0.0
            for start, p in zip(self.starts, self._parameters, strict=True):
                p.detach().copy_(start)
        worker.units.weight = weight
        tensors = self._tensors(buffers)
        fragment = Fragment(self._next, tensor_ranges(worker.fragments[self._next]), self.starts, self._velocity)
        fragment.prepare(tensors, overlap=overlap)
        self._running, self._next = fragment, (self._next + 1) % self._fragments
        worker.send(fragment.changes, fragment.number)
        if self._next == 0:
            worker.complete([None] * len(tensors))
        self._sent()
        if self._norms is not None:
            self._norms.start(weight, worker.sum_in_site(sum_of_squares(fragment.parts), deadline_s))

    def _apply(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> None:
        """Waits for the means of the running exchange, if there is one, and applies the outer optimizer."""
        if (fragment := self._running) is None:
            return
        tensors = self._tensors(buffers)
        worker.wait(deadline_s, fragment.number)
        norms = [] if self._norms is None else self._norms.read()
        if worker.withdrawn:
            norms = []  # the norms are those of changes that were not exchanged completely
        # The total weight is 0 if no worker has trained, or if all workers that remain have just joined.
        has_weight, square = worker.has_weight(fragment.number), 0.0
        finite = not has_weight or worker.write([fragment.changes.get(n) for n in range(len(tensors))], fragment.number)
        if finite:
            finite, square = fragment.scale_to_norms(norms, partial(worker.sum_in_site, deadline_s=deadline_s),
                                                     has_weight=has_weight)
        if finite and norms and self._norms is not None:
            self._norms.observe(norms, square)
        fragment.apply(tensors, self._outer, finite=finite)
        self._used.append(finite and has_weight)
        self._running = None
        if fragment.number == self._fragments - 1:
            worker.end(self._used)
            self._used.clear()
            self._steps = 0, self._steps[1]
        own, worker.not_finite = worker.not_finite, -1
        self._merged(own, finite=finite)

    def _tensors(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach() for tensor in (*self._parameters, *buffers)]

    def _restore_starts(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets the starts and the outer optimizer's momentum to those of another run, which may have had no momentum."""
        for number, (start, velocity) in enumerate(zip(self.starts, self._velocity, strict=True)):
            start.copy_(tensors[f"local.start.{number}"])
            if velocity is not None:
                velocity.copy_(tensors.get(f"local.velocity.{number}", torch.zeros(())))

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
        self._restore_starts(tensors)


def _wide(p: nn.Parameter) -> torch.Tensor:
    """Returns a contiguous copy of a parameter, in float32 if its dtype is narrower, so that small changes of many exchanges
    add up."""
    wide = torch.float32 if p.element_size() < 4 else p.dtype
    return p.detach().to(wide, copy=True, memory_format=torch.contiguous_format)


def _range_views(x: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Returns views of the given element ranges of a contiguous tensor."""
    flat = x.view(-1)
    return [flat[start:stop] for start, stop in ranges]
