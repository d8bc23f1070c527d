"""Agreement of the ranks of a site on each exchange of a sharded model, since each has results of its own shards only."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from commlayer.cluster.processes.channels import Channel
from commlayer.cluster.processes.collectives import Groups
from commlayer.compressors.residual_slices import Residuals, ResidualSlice, residual_on
from commlayer.errors import CommError, InvalidInput
from commlayer.planner.shards import Shards
from commlayer.records import Job, Slice
from commlayer.transport.protocol import peer_name

MARGIN_S = 5.0
"""Seconds after the deadline of an exchange in which a rank that has missed it reports that to its site."""


class SiteOutcome(NamedTuple):
    """The outcome of an exchange, on one rank or in its site. A site has the largest value of its ranks."""

    failed: float = 0.0
    """1 + the number of the last rank in the site on which the exchange failed; 0: on none."""
    aborted: float = 0.0
    """1: a worker has aborted the step."""
    spoilt: float = 0.0
    """1: some average is not finite."""
    has_weight: float = 0.0
    """1: some worker has contributed with a weight above 0."""
    weight: float = 0.0
    minus_weight: float = 0.0
    """The weight of this rank's gradients, and the same number times -1."""


class LocalSite:
    """The ranks of this rank's site. The ranks of a site agree on outcomes only if the model is sharded over them."""

    def __init__(self, shards: Shards = Shards(), channel: Channel | None = None, first: int = 0) -> None:
        """`channel`: collectives of the site's ranks on CPU tensors. None: the model is not sharded. `first`: number of the
        site's first worker in the job."""
        self.shards, self._channel, self._first = shards, channel, first

    @staticmethod
    def of(shards: Shards, groups: Groups, own: int) -> LocalSite:
        """Returns the site of worker number `own`. All ranks call it together."""
        return LocalSite(shards, groups.site_channel() if shards else None, own - groups.local)

    def largest(
        self, values: Sequence[float], deadline: float, failed: Callable[[], BaseException | None] = lambda: None,
    ) -> list[float]:
        """Returns the largest of each value on the ranks of the site; all of them call it together."""
        if self._channel is None:
            return [*values]
        numbers = torch.tensor([*map(float, values)], dtype=torch.float64)
        self.add(numbers, deadline, failed, largest=True)
        shared: list[float] = numbers.tolist()
        return shared

    def sum(self, value: float, deadline: float, failed: Callable[[], BaseException | None]) -> float:
        """Returns the sum of the values of the site's ranks; all of them call it together."""
        number = torch.tensor([value], dtype=torch.float64)
        self.add(number, deadline, failed)
        return float(number)

    def add(
        self, x: torch.Tensor, deadline: float, failed: Callable[[], BaseException | None] = lambda: None, *,
        largest: bool = False,
    ) -> None:
        """Adds the tensors of the site's ranks in place, or computes the `largest` elements; all of them call it together. The
        timeout is later than `deadline`, because a group with a pending collective does not close."""
        if self._channel is not None:
            self._channel.allow(max(0.0, deadline - time.monotonic()) + MARGIN_S)
            self._channel.allreduce(x, largest=largest).wait(deadline, failed)

    def own_part(self, residuals: Residuals, job: Job, deadline_s: float) -> Residuals:
        """Returns this rank's part of the residuals of the whole site, in elements of its shards. Residuals of whole tensors
        stay where they are. All ranks of the site call it together."""
        return Residuals(*([*self._own_part(parts, job, deadline_s)] for parts in residuals)) if self.shards else residuals

    def _own_part(self, parts: Sequence[ResidualSlice], job: Job, deadline_s: float) -> Iterator[ResidualSlice]:
        yield from (part for part in parts if part.tensor not in self.shards.tensors)
        for tensor in sorted(self.shards.tensors):
            info = job.tensors[tensor]
            residual = residual_on(parts, [Slice(tensor, 0, info.numel)])
            x = torch.zeros(info.numel) if residual is None else torch.from_numpy(residual)
            self.add(x, time.monotonic() + deadline_s)
            start, end = self.shards.elements(info.shape, self.shards.local)
            if bool(x[start:end].any()):
                yield ResidualSlice(tensor, 0, x[start:end].numpy())

    def agree(
        self, own: SiteOutcome, asked: Sequence[int], used: Collection[int], deadline: float,
        failed: Callable[[], BaseException | None],
    ) -> tuple[SiteOutcome, set[int]]:
        """Returns the outcome in the whole site, and which of the tensors `asked` some worker has used. `used`: those in this
        rank's results. Raises an error if the exchange has failed on some rank."""
        numbers = [own.failed and 1 + self.shards.local, *own[1:], *(tensor in used for tensor in asked)]
        shared = self.largest(numbers, deadline + MARGIN_S, failed)
        outcome = SiteOutcome(*shared[: len(own)])
        if outcome.failed:
            raise CommError("has failed to exchange its shards: see the error on that rank",
                            peer=peer_name(self._first + int(outcome.failed) - 1), code="E-OTHER-RANK")
        if outcome.weight != -outcome.minus_weight:
            raise InvalidInput("E-WEIGHT", f"got weights {-outcome.minus_weight:g} and {outcome.weight:g} in one site: FSDP "
                                           "averages over the ranks of a site without weights, so give them equal ones")
        return outcome, {tensor for tensor, flag in zip(asked, shared[len(own) :], strict=True) if flag}
