"""Load balancing of a running job: LoadBalancer measures compute times, decides on shares of the batch and sets them in the
sampler.

Ranks exchange times in the reports of the job's controller (autotune/controller.py). shares/policy.py makes the decisions.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from msgspec import structs
from torch import nn

from commlayer.autotune.controller import ShareMover
from commlayer.autotune.measure.batch_trial import LossOf
from commlayer.autotune.shares import policy, worker_profiles
from commlayer.autotune.shares.policy import RankStart, SharesState, WorkerTime, latest
from commlayer.autotune.shares.worker_profiles import BalancedSession
from commlayer.autotune.start import reporting
from commlayer.balance import Decision, LinearTime, Outcome, Sampler, SharePolicy
from commlayer.balance.balancer import Event, describe
from commlayer.balance.profile import LIMIT_S, WorkerProfile
from commlayer.balance.sampler import loader_lookahead
from commlayer.balance.schedule import CHANGE_DELAY_STEPS
from commlayer.engine.job.job import DistributedJob
from commlayer.errors import CommError, InvalidInput

if TYPE_CHECKING:
    from commlayer.balance.profile import InitialShares


class LoadBalancer:
    """Moves shares of the batch to the ranks that compute them fastest, while training runs.

    >>> controller = commlayer.LoadBalancer(session, sampler)         # doctest: +SKIP
    >>> for x, y in controller.follow(loader):                      # instead of sampler.follow(loader, session)
    ...     (loss_of(model(x), y) * sampler.fraction).backward()
    ...     if sampler.last: optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self, session: BalancedSession, sampler: Sampler, *, policy: SharePolicy | None = None,
        line: LinearTime | None = None, lookahead: int | None = None,
        measure: Callable[[int, int], float] | None = None,
    ) -> None:
        """All ranks create one with the same arguments. Only `line` may differ: the speed of this rank, known before training.

        `lookahead`: batches that a loader draws in advance; derived from a DataLoader. `measure(step, samples)`: this rank's
        compute seconds, instead of the session's own measurement.
        """
        if session is not None and isinstance(job := session.inspect.context, DistributedJob) and job.site.shards:
            raise InvalidInput("E-SHARES-ARGUMENT",
                               "LoadBalancer: the model is sharded, and FSDP averages over the ranks of a site without "
                               "weights, so their shares cannot differ: leave it out")
        self.session, self.sampler = session, sampler
        self._policy = structs.replace(policy or SharePolicy(), minimum=max(policy.minimum if policy else 1, sampler.least))
        self._line, self._measure = line, measure
        self._lookahead = lookahead
        self._opening: InitialShares | None = None
        self._state: SharesState | None = None
        """State of the balancing; None until the first step is over, and after a change of members until the samplers have
        adapted."""
        self._members: tuple[int, ...] | None = None
        self._workers: tuple[int, ...] = ()
        """The samplers' number of each rank's worker. They differ after workers have left."""
        self._from_step = 0
        """First step after which balancing begins."""
        self._samples: dict[int, int] = {}
        """Maps a session's step to its number of samples, until the step's time is known."""
        self._times: list[tuple[int, float]] = []
        """Samples and compute seconds of each step since the last report."""
        self._step = -1
        """Number of the sampler's last step; -1 before the first."""
        self._inbox: deque[tuple[list[WorkerTime], float]] = deque()
        """Received reports: the times of all ranks, with the longest step time of any rank."""
        self._ahead = 0
        """Number of batches that the loader draws in advance."""
        self.events: list[Event] = []
        """Decisions, their outcomes and other observations, in order. Equal on all ranks."""
        if session is not None:  # None in training with a single process
            session.inspect.context.terms.balanced = True

    @property
    def shares(self) -> dict[int, int]:
        """The newest shares by rank. They may be announced for a later step."""
        return self.sampler.announced[1]

    def profile(
        self, model: nn.Module, loss_of: LossOf, batches: Any, *, limit_s: float = LIMIT_S,
    ) -> list[WorkerProfile]:
        """Measures batches in powers of two up to the memory limit, on all ranks at once. Sets the first shares and caps.

        Collective; call this before the first step of `follow`. `loss_of(model, batch)` returns a batch's loss for the given
        model (DDP's inner one). `batches`: the loader, or a function that returns a batch of N samples. Measuring ends after
        `limit_s` seconds and one more batch. Model, optimizer, gradients and random state are restored. Returns the profile of
        each rank.

        >>> controller.profile(model, lambda model, batch: loss(model(batch[0]), batch[1]), loader)   # doctest: +SKIP
        """
        if self._state is not None:
            raise InvalidInput("E-SHARES-ARGUMENT",
                               "profile: shares follow measured times already, allowed: a call before the first step")
        measure = None if self._measure is None else partial(self._measure, self.sampler.step)
        profiles, self._opening = worker_profiles.profile_together(
            self.session, self.sampler, self._policy, model, loss_of, batches, limit_s=limit_s,
            measure=measure)
        self._line = self._opening.lines[self.sampler.rank]
        for note in self._opening.notes:
            self._record_event(note)
        self._record_event(self._opening.decision)
        return profiles

    def follow(self, loader: Iterable[Any], *, weigh: Callable[[Any], float] | None = None) -> Iterator[Any]:
        """Yields batches like `sampler.follow`, and balances the load meanwhile. Collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield from self.sampler.follow(loader, self.session, weigh=weigh)
            return
        self._decide(self.sampler.step)  # before the loader draws, so that all batches are drawn with all decisions known
        self._ahead = loader_lookahead(loader) if self._lookahead is None else self._lookahead
        self._times.clear()
        self._samples.clear()
        first, number, begins = True, 0, True
        with contextlib.closing(self.sampler.follow(loader, self.session, weigh=weigh)) as batches:
            for batch in batches:
                if begins:  # local steps are counted at the end of a step's first backward pass
                    number = self._steps
                last, step = self.sampler.last, self.sampler.step  # reading its state in the loop body advances the sampler
                if last and not first:  # evaluation and starting workers may precede an epoch's first step
                    self._samples[number] = self.sampler.computed
                first, begins = first and not last, last
                yield batch
                if last:
                    self._after_skipped_step(step)

    @property
    def _steps(self) -> int:
        """Number of the session's steps so far."""
        return int(self.session.metrics()["steps"])

    @property
    def _job(self) -> DistributedJob:
        job = self.session.inspect.context
        if not isinstance(job, DistributedJob):
            raise InvalidInput("E-SHARES-ARGUMENT", "LoadBalancer: the session has no other ranks, but torch.distributed "
                                                    "has: call attach() after the process group has been created")
        return job

    def _after_skipped_step(self, step: int) -> None:
        # This rank's scaler has skipped a local step. All ranks must receive reports and membership in the same step.
        self.session.inspect.catch_up()
        self._follow_members(step)
        if self._state is None and step >= self._from_step:
            self._state = self._begin(step)
        if self._state is None:
            self.session.inspect.laps()
            return
        for lap in self.session.inspect.laps():
            if lap.step in self._samples:
                self._times.append((self._samples.pop(lap.step), lap.seconds))
        if self._measure is not None:
            self._times = [(self.sampler.computed, self._measure(step, self.sampler.computed))]
        self._step = step
        # Also covers queues between sampler and loop that were not declared.
        self._ahead = max(self._ahead, self.sampler.drawn - step - 1)
        self._decide(step + 1)
        self._state, parts = policy.apply_due_decisions(self._state, step + 1)
        for part in parts:
            reporting(self._job).shares_moved(part)

    def _follow_members(self, step: int) -> None:
        """Begins again after members have changed, in the step from which on the samplers share the batch among them."""
        former, self._members = self._members, self.session.inspect.members
        if former != self._members and (former is not None or self._job.joined is not None):
            self._state, self._from_step = None, step + 1 + CHANGE_DELAY_STEPS
            self._inbox.clear()

    def _own_times(self) -> WorkerTime:
        """Returns this rank's times for the next report."""
        if self._state is None:
            return WorkerTime()
        times, self._times = self._times, []
        price = self.session.inspect.context.terms.price or (0.0, 0.0)
        return WorkerTime(self._step, *latest(times), self._ahead, *price, policy.checksum(self._state))

    def _receive(self, rows: list[WorkerTime], step_s: float) -> None:
        """Stores the times of all ranks, which are processed after the step. `step_s`: the longest step time of any rank."""
        if rows[0].step >= 0:  # reports from before the balancing have no times
            self._inbox.append((rows, step_s))

    def _decide(self, to_come: int) -> None:
        """Decides on shares from the received times. `to_come`: number of the next step to train."""
        while self._inbox and self._state is not None:
            with self._name_lost_peer():
                self._state, decision, events = policy.decide(self._state, *self._inbox.popleft(), to_come)
            if decision is not None:
                shares = {self._workers[rank]: share for rank, share in decision.by_worker.items()}
                self.sampler.announce(decision.from_step, shares)
            for event in events:
                self._record_event(event)

    def _record_event(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Decision | Outcome):
            self.session.inspect.context.log_decision(describe(event), logging.INFO)

    @contextlib.contextmanager
    def _name_lost_peer(self) -> Iterator[None]:
        """Context manager that adds the lost peer, which the session knows, to an error of the exchange."""
        try:
            yield
        except CommError as error:
            raise self._job.explain(error) from None

    def _begin(self, step: int) -> SharesState:
        """Exchanges the initial data of all ranks and returns the first state. `step`: number of the step that has ended."""
        sampler, context = self.sampler, self._job
        exchange = context.rows.section("samplers")
        from_step, shares = sampler.announced
        self._workers = sampler.workers or tuple(range(context.world))
        shares = {rank: shares.get(worker, 0) for rank, worker in enumerate(self._workers)} if sampler.workers else shares
        own = self._workers.index(sampler.rank) if sampler.rank in self._workers else sampler.rank
        line = self._line or LinearTime(1.0)
        with self._name_lost_peer():
            exchange.start(*RankStart(own, sampler.batch, sampler.cap, sampler.least, step, max(shares, default=0),
                                      self._line is not None, line.slope_s, line.intercept_s))
            rows = [RankStart(*row) for row in exchange.read()]
        state = policy.begin(rows, shares, from_step, policy=self._policy, opening=self._opening)
        reporting(context).shares = ShareMover(self._own_times, self._receive)
        return state
