"""Local steps: every H-th step the workers' changes since the last exchange are averaged. Knows a worker; no hooks.

An exchange takes the way of a step's gradients, codec and residual and all, with start minus end in their place. What comes
back is the outer optimizer's gradient at the start, and all workers go on from where that leads, on the same bits.

Overlapped, they go on at once. With s a worker's weights when an exchange began and w its weights now, the exchange is merged
ahead of the next one: start becomes what the outer optimizer makes of start and the mean change, as ever, and w becomes
start + (w - s). So each change is sent once, starts are the same on all workers, and weights differ by what has not been sent.

Where the outer optimizer asks for it (Outer.matched), the mean of a turn is made as long as what ranks have changed in it.

Where others wait to take part from now on, one worker keeps its part of an exchange back until all wait for it. So nobody has
that exchange whole, and they come in there.

In fragments, a part of the buckets goes in each turn of a round, every H / fragments steps. It is merged in the next turn if
exchanges overlap with steps, in its own otherwise. Of a tensor that is cut, turns have ranges of elements in row-major order.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from commlayer.compressors.debts import Debt, pay
from commlayer.engine.matched_length import Lengths, largest_of, scale_of, square_of
from commlayer.engine.step import Regroup
from commlayer.engine.worker import Worker
from commlayer.errors import InvalidState
from commlayer.observe import Recorder
from commlayer.optim import Outer
from commlayer.planner.model.fragments import ranges_of
from commlayer.records import Slice

log = logging.getLogger("commlayer")

SPOILT = "some worker's weights are not finite: all go back to those of the last exchange"


def _spoilt(_own: int, *, finite: bool) -> None:
    if not finite:
        log.warning("%s", SPOILT)


def _stay() -> Worker:
    """All do."""
    raise InvalidState("E-MEMBERS-FIXED", "members of the job cannot change")


class StepWeights:
    """What a worker's changes count for in an exchange: the mean of what the batches of its steps weighed since the last."""

    def __init__(self, weight: float, total: float | None) -> None:
        self._now = weight, total
        self._sum = [0.0, 0.0, 0.0, 0.0]
        """Steps, their weights, those that say what all weigh, and that."""

    def weigh(self, weight: float, total: float | None) -> None:
        """From now on, for a batch of that weight; see Worker.weigh."""
        self._now = weight, total

    def count(self) -> None:
        """A step has been taken."""
        weight, total = self._now
        for i, term in enumerate((1.0, weight, float(total is not None), total or 0.0)):
            self._sum[i] += term

    @property
    def now(self) -> tuple[float, float | None]:
        """Weight and total of a batch."""
        return self._now

    def regroup(self) -> None:
        """Others take part from now on: what all weigh, as the steps so far say, is no longer so."""
        self._now = self._now[0], None
        self._sum[2] = 0.0

    def take(self) -> tuple[float, float | None]:
        """Weight and total of an exchange of the steps so far."""
        (steps, weights, told, totals), self._sum = self._sum, [0.0, 0.0, 0.0, 0.0]
        if not steps:
            return self._now
        return weights / steps, totals / steps if told == steps else None

    def snapshot(self) -> torch.Tensor:
        return torch.tensor(self._sum, dtype=torch.float64)

    def restore(self, kept: torch.Tensor | None) -> None:
        self._sum = [0.0, 0.0, 0.0, 0.0] if kept is None else kept.tolist()


class _Sent(NamedTuple):
    """What is under way, by numbers of tensors."""

    turn: int
    ranges: dict[int, list[tuple[int, int]]]
    """The elements that go in it."""
    changes: dict[int, torch.Tensor]
    """Of weights; of buffers, what they are. In the shapes of the tensors, though only those elements count. The means come
    back into these."""
    ends: dict[int, list[torch.Tensor]]
    """By range, what the tensors were when it began, where steps go on meanwhile."""
    held: bool = False
    """Kept back so far."""

    def weights(self, count: int) -> list[torch.Tensor]:
        """By range, the changes of the first `count` tensors."""
        return [part for n, change in self.changes.items() if n < count for part in _parts(change, self.ranges[n])]


class LocalSteps:
    """Of one model. How rounds go may change between two of them."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], every: int, outer: Outer, weights: StepWeights, *, fragments: int = 1,
        overlap: bool = False, regroup: Callable[[], Worker] = _stay, lengths: Lengths | None = None,
        hold: Callable[[], bool] = lambda: False, merged: Callable[..., None] = _spoilt,
    ) -> None:
        """`merged(own, finite=...)` is called behind each exchange, on all ranks; `own` as Worker.not_finite.

        `regroup`: behind Regroup, gives the worker that goes on with those who are left. `lengths`: None if this rank is
        alone. `hold`: whether others wait, and it is this rank's to keep its part of an exchange back."""
        self._parameters, self.weights, self._regroup, self._hold = parameters, weights, regroup, hold
        self._merged = merged
        self._matched = outer.matched
        self.go(every, fragments=fragments, overlap=overlap, lengths=lengths)
        self.taken = 0
        """Steps since the last exchange began."""
        self._steps = 0, 0
        """How many are in the round under way, and how many have been taken since it began."""
        self.starts = [_wide(p) for p in parameters]
        """What all ranks have alike: behind each exchange the weights themselves, if no step is under way then."""
        self.apart = False
        """Whether weights may differ from rank to rank."""
        self._outer = outer
        self._velocity = [torch.zeros_like(start) if outer.momentum else None for start in self.starts]
        """What the outer optimizer's last steps left."""
        self._turn = 0
        self._sent: _Sent | None = None
        self._idle = 0
        """To so many exchanges this rank brings nothing."""
        self._owed: dict[int, torch.Tensor] = {}
        """By tensor, what this rank owes in gradients."""
        self._paid: dict[int, torch.Tensor] = {}
        """The same of what is in gradients that no optimizer step has applied yet."""
        self.recorder = Recorder()
        """Of steps, without exchanges: a worker records these, from one to the next."""
        self._rooms: dict[int, torch.Tensor] = {}
        """In this round, for the changes of tensors that are cut."""
        self._sound: list[bool] = []
        """By turn of this round so far, whether what came back was finite."""

    def go(self, every: int, *, fragments: int, overlap: bool, lengths: Lengths | None = None) -> None:
        """From now on. Nothing is under way."""
        self.every, self._fragments, self._overlap = every, fragments, overlap
        self._lengths = lengths if self._matched else None

    @property
    def tells(self) -> bool:
        """Whether ranks tell each other how long their changes are. The same on all of them."""
        return self._lengths is not None

    def owe(self, debts: Sequence[Debt]) -> None:
        """What a plan that averaged gradients has left unpaid goes into the next step's, whatever the optimizer makes of it."""
        for number, p in enumerate(self._parameters):
            whole = [Slice(number, 0, p.numel())]
            if (owed := pay(debts, whole)) is not None:
                self._owed[number] = owed.view(p.shape).to(p.device)

    @property
    def unpaid(self) -> list[Debt]:
        """What of it is still to be applied: gradients of its parameters were missing, sparse or not finite so far, or were
        cleared."""
        return [Debt(number, 0, owed.reshape(-1)) for number, owed in self._owed.items()]

    def pay(self, scale: float = 1.0) -> None:
        """Gradients, of a loss times `scale`, are about to be applied: what is owed goes along."""
        grads = {n: grad for n in self._owed if (grad := self._parameters[n].grad) is not None and not grad.is_sparse}
        if all(bool(grad.isfinite().all()) for grad in grads.values()):  # else the step is one to skip
            for number, grad in grads.items():
                self._paid[number] = owed = self._owed.pop(number)
                grad.detach().add_(owed.to(grad.dtype), alpha=scale)

    def take_back(self) -> None:
        """Gradients were cleared before an optimizer step applied them: what was paid into them is owed again."""
        self._owed |= self._paid
        self._paid.clear()

    def count(self) -> None:
        """A step begins, its optimizer step still to come. Whatever was paid into the gradients of the last one is applied."""
        self._paid.clear()
        self.recorder.mark("backward")
        self.recorder.next()
        self.begin()
        self.taken += 1
        self._steps = self._steps[0], self._steps[1] + 1
        self.weights.count()

    def begin(self) -> None:
        """An optimizer step of this rank's own is to come."""
        if not self.apart:
            for start, p in zip(self.starts, self._parameters, strict=True):
                if not torch.equal(start.to(p.dtype), p):  # the script has put other weights in place
                    start.copy_(p.detach())
        self.apart = True

    @property
    def due(self) -> bool:
        return self.taken >= self.every // self._fragments

    @property
    def behind(self) -> int:
        """So many of the last steps are not in what all ranks have, and are lost with a rank that dies. The same on all."""
        return sum(self._steps)

    @property
    def unsent(self) -> int:
        """So many of the last steps are in no exchange that has begun or will be brought in by `settle`."""
        return self._steps[1] if self.apart else 0

    @property
    def shifted(self) -> bool:
        """Whether ranks' weights are alike at no time: then only `starts` can be compared."""
        return self._overlap or self._fragments > 1

    @property
    def under_way(self) -> bool:
        """Whether a round has begun and is not over."""
        return self._sent is not None or self._turn > 0

    # ---- what all ranks call together, each behind an optimizer step

    def exchange(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> None:
        """A turn. What it merges is the same on all ranks afterwards, up to steps that an exchange has not seen."""
        if self._idle and self._overlap:
            self._begin(worker, buffers)  # as the others did behind their last round
        if self._sent is not None:
            worker = self._merge(worker, buffers, self._sent, deadline_s)
        self._begin(worker, buffers)
        if self._sent is not None and not self._overlap:
            self._merge(worker, buffers, self._sent, deadline_s)
        # A rank whose optimizer step is still to come (the scaler skipped the last) is ahead by the steps that it took since.
        self.taken = max(0, self.taken - self.every // self._fragments)
        self.apart = self.shifted
        self.recorder.restart()

    def join(self, given: Mapping[str, torch.Tensor]) -> None:
        """The others are in an exchange, which is over with this rank's first step: that is none of its own, and it goes on
        from where the exchange leads. `given`: what `snapshot` gives on one of them."""
        for number, start in enumerate(self.starts):
            start.copy_(given[f"local.start.{number}"])
            self._go_on(number, given.get(f"local.velocity.{number}"))
        self.taken, self._idle = self.every - 1, 1 + self._overlap
        sent, since = given["local.behind"].tolist()
        self._steps = sent, since - 1  # its first step is the last of these

    def align(self, agree: Callable[[Sequence[torch.Tensor]], object]) -> None:
        """Between two exchanges: `agree` may change starts, and weights go with them, wherever steps have led since."""
        before = [start.clone() for start in self.starts]
        agree(self.starts)
        for start, old, p in zip(self.starts, before, self._parameters, strict=True):
            p.detach().copy_(start + (p.detach() - old))

    def settle(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> Worker:
        """Brings in what is under way, and what else belongs to the round. The worker that goes on."""
        if self._sent is not None:
            worker = self._merge(worker, buffers, self._sent, deadline_s)
        while self._turn:
            worker = self._at_once(worker, buffers, deadline_s)
        return worker

    def drain(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> bool:
        """Then exchanges all that is left: weights and buffers are the same on all ranks. Whether there was anything."""
        worker = self.settle(worker, buffers, deadline_s)
        found, self.apart, self.taken = self.apart, False, 0
        for _ in range(self._fragments if found else 0):
            worker = self._at_once(worker, buffers, deadline_s)
        return found

    def _at_once(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> Worker:
        self._begin(worker, buffers)
        assert self._sent is not None
        return self._merge(worker, buffers, self._sent, deadline_s)

    def _begin(self, worker: Worker, buffers: Sequence[torch.Tensor]) -> None:
        if self._turn == 0:
            worker.scale = worker.rate = 1.0  # the unit is that of the weights
            worker.weigh(*self.weights.take())
            if self._idle != 1 + self._overlap:  # else the others had begun it when this rank came
                self._steps = self._steps[1], 0
        if self._idle:
            worker.weigh(0.0, None)
            for start, p in zip(self.starts, self._parameters, strict=True):
                p.detach().copy_(start)
            self._idle -= 1
        tensors = [p.detach() for p in (*self._parameters, *buffers)]
        ranges = ranges_of(worker.turns[self._turn])
        changes, ends = {}, {}
        for n, of_turn in ranges.items():
            whole = tensors[n].contiguous()
            changes[n] = change = whole if self._own(n) else self._room(
                n, self.starts[n] if n < len(self.starts) else whole, of_turn)
            now = _parts(whole, of_turn)
            if n < len(self.starts):
                for part, start, end in zip(_parts(change, of_turn), _parts(self.starts[n], of_turn), now, strict=True):
                    torch.sub(start, end, out=part)
            else:
                change.copy_(whole)
            if self._overlap:
                ends[n] = [part.clone() for part in now]
        self._sent = sent = _Sent(self._turn, ranges, changes, ends, held=self._hold())
        self._turn = (self._turn + 1) % self._fragments
        with self._whole(sent):
            if not sent.held:
                self._send(worker, sent, len(tensors))
            self._tell(worker, sent)  # held or not: all tell in one order

    @contextlib.contextmanager
    def _whole(self, sent: _Sent) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if not self._overlap:
                self._put_back(sent)
            raise

    def _own(self, number: int) -> bool:
        """Whether that parameter's own memory holds its change, and then the mean, until both are merged."""
        if self._overlap or number >= len(self.starts):
            return False
        p = self._parameters[number]
        return p.is_contiguous() and p.dtype == self.starts[number].dtype

    def _put_back(self, sent: _Sent) -> None:
        """The exchange has failed: weights are again what they were when it began, up to a rounding."""
        self._sent = None
        for n, of_turn in sent.ranges.items():
            if self._own(n):
                for change, start in zip(_parts(sent.changes[n], of_turn), _parts(self.starts[n], of_turn), strict=True):
                    torch.sub(start, change, out=change)

    def _room(self, number: int, like: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor:
        """For a turn's change of that tensor. All turns of a cut one share it, for buckets keep what they have read."""
        if ranges == [(0, like.numel())]:
            return torch.empty_like(like)
        if number not in self._rooms:
            self._rooms[number] = torch.empty_like(like)
        return self._rooms[number]

    def _send(self, worker: Worker, sent: _Sent, tensors: int) -> None:
        worker.send(sent.changes, sent.turn)
        if sent.turn == self._fragments - 1:
            worker.complete([None] * tensors)

    def _tell(self, worker: Worker, sent: _Sent) -> None:
        """How long this rank's change is, while it is on its way."""
        if self._lengths is not None:
            self._lengths.start(worker.weight, square_of(sent.weights(len(self.starts))))

    def _merge(self, worker: Worker, buffers: Sequence[torch.Tensor], sent: _Sent, deadline_s: float) -> Worker:
        """The worker that goes on: another one where members have gone."""
        tensors = [p.detach() for p in (*self._parameters, *buffers)]
        with self._whole(sent):
            worker = self._here(worker, sent, len(tensors), deadline_s)
            told = [] if self._lengths is None else self._lengths.read()
        try:
            worker.write([sent.changes.get(n) for n in range(len(tensors))], sent.turn)
        except BaseException:
            for n in filter(self._own, sent.ranges):
                tensors[n].copy_(self.starts[n])  # the change may be gone already
            raise
        means = sent.weights(len(self.starts))
        finite = math.isfinite(largest_of(means))
        if finite:
            scale = scale_of(told, square_of(means)) if told else 1.0
            for mean in means if scale != 1 else ():
                mean.mul_(scale)
            self._advance(sent)
        for n, of_turn in sent.ranges.items():
            whole = tensors[n].contiguous()
            merged = _parts(self.starts[n] if n < len(self.starts) else sent.changes[n], of_turn)
            for i, (mine, common) in enumerate(zip(_parts(whole, of_turn), merged, strict=True)):
                mine.copy_(common + (mine - sent.ends[n][i]) if sent.ends and finite else common)
            if whole is not tensors[n]:  # a copy, since it lies in memory otherwise
                tensors[n].copy_(whole)
        self._sound.append(finite)
        self._sent = None
        if sent.turn == self._fragments - 1:
            worker.end(finite=all(self._sound))
            for turn, sound in enumerate(self._sound):
                if sound:
                    worker.applied(range(len(self.starts)), turn)
            self._sound.clear()
            self._rooms.clear()
            self._steps = 0, self._steps[1]
        own, worker.not_finite = worker.not_finite, -1
        self._merged(own, finite=finite)
        return worker

    def _here(self, worker: Worker, sent: _Sent, tensors: int, deadline_s: float) -> Worker:
        """Waits for the means. The worker that goes on."""
        again = False
        while True:
            try:
                if sent.held or again:
                    worker.heed()
                    self._send(worker, sent, tensors)
                if again:
                    self._tell(worker, sent)
                worker.wait(deadline_s, sent.turn)
                return worker
            except Regroup:
                worker, again = self._regroup(), True
                worker.scale = worker.rate = 1.0

    def _advance(self, sent: _Sent) -> None:
        """The outer optimizer's step."""
        for n, of_turn in sent.ranges.items():
            if n < len(self.starts):
                velocity = self._velocity[n]
                left = [None] * len(of_turn) if velocity is None else _parts(velocity, of_turn)
                for start, mean, of_start in zip(_parts(self.starts[n], of_turn), _parts(sent.changes[n], of_turn), left,
                                                 strict=True):
                    self._outer.step(start, mean, of_start)

    def _go_on(self, number: int, left: torch.Tensor | None) -> None:
        """With what the outer optimizer of another run left for this tensor."""
        if (velocity := self._velocity[number]) is not None:
            velocity.zero_() if left is None else velocity.copy_(left)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """For a checkpoint, with nothing under way. Starts are in it: between two exchanges no model's file holds them."""
        kept = {"local.taken": torch.tensor(self.taken), "local.weights": self.weights.snapshot(),
                "local.apart": torch.tensor(self.apart), "local.behind": torch.tensor(self._steps)}
        kept |= {f"local.owed.{number}": owed.cpu().clone() for number, owed in self._owed.items()}
        for number, start in enumerate(self.starts):
            kept[f"local.start.{number}"] = start.detach().cpu().clone()
            if (velocity := self._velocity[number]) is not None:
                kept[f"local.velocity.{number}"] = velocity.detach().cpu().clone()
        return kept

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The reverse."""
        self.taken = int(tensors["local.taken"])
        self.apart = bool(tensors.get("local.apart", self.taken > 0))
        self._steps = 0, self.taken
        self.weights.restore(tensors.get("local.weights"))
        self._owed = {number: tensors[name].clone().to(p.device) for number, p in enumerate(self._parameters)
                      if (name := f"local.owed.{number}") in tensors}
        for number, start in enumerate(self.starts):
            start.copy_(tensors[f"local.start.{number}"])
            self._go_on(number, tensors.get(f"local.velocity.{number}"))


def _wide(p: nn.Parameter) -> torch.Tensor:
    """A copy, in float32 where the parameter is narrower, so that small changes of many exchanges add up. Contiguous."""
    wide = torch.float32 if p.element_size() < 4 else p.dtype
    return p.detach().to(wide, copy=True, memory_format=torch.contiguous_format)


def _parts(x: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Those elements of a contiguous tensor."""
    flat = x.view(-1)
    return [flat[start:stop] for start, stop in ranges]
