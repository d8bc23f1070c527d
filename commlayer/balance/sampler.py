"""Batches of uneven and changing size from one index stream per epoch, with each sample used once.

A Sampler is the batch_sampler of a torch DataLoader. Every worker of the job creates one with the same arguments except `rank`:

    sampler = commlayer.balance.Sampler(dataset, batch=512)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
    for batch in sampler.follow(loader, session):
        (loss_of(batch) * sampler.fraction).backward()      # fraction is 1 unless there is a cap
        if sampler.last:
            optimizer.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from msgspec import structs

from commlayer.balance.assignment import DrawnBatch, StepAssignment, TrainingSession, drawn_batches, micro_batch_sizes
from commlayer.balance.consumed_log import ConsumedLog, EpochProgress, Permutation, SequentialOrder
from commlayer.balance.sampler_state import JoinState, SamplerState, canonical_json, joining_epoch, renumbering
from commlayer.balance.schedule import (
    CHANGE_DELAY_STEPS,
    KEEP_STEPS,
    Announcement,
    SamplerMembership,
    SharesSchedule,
    check_sizes,
    checked_shares,
    even_shares,
    scaled,
)
from commlayer.config import read_launch
from commlayer.errors import InvalidInput, RecordError
from commlayer.records import decode


class Sampler:
    """Yields this worker's batches of sample indices. The samples of a step do not depend on how far each worker has drawn in
    advance."""

    def __init__(
        self, data: Sized | int, batch: int, *, shares: Sequence[int] | Mapping[int, int] | None = None,
        rank: int | None = None, world: int | None = None, seed: int = 0, shuffle: bool = True, least: int = 1, cap: int = 0,
        drop_last: bool = False,
    ) -> None:
        """`batch` samples per step over all workers, split by `shares` (None: evenly over `world`).

        `least`: smallest batch that the model can take, 2 with BatchNorm. `cap`: most samples that this worker computes at once
        (0: no limit); a larger share is split into micro-batches. Rank and world default to torchrun's.
        """
        self.length = data if isinstance(data, int) else len(data)
        self.batch, self.seed, self._shuffle = batch, seed, shuffle
        launch = read_launch() if rank is None or (world is None and shares is None) else None
        self._all_workers = world is None and shares is None
        """True: the sampler serves all workers of the job, since neither `world` nor `shares` was given."""
        self.rank: int = rank if rank is not None else launch.rank if launch else 0
        self._world = world if world is not None else launch.world if launch else 0
        if self.rank < 0 or self.rank >= self._world > 0:
            allowed = f"are 0 to {self._world - 1}" if self._world else "is 0 or more"
            raise InvalidInput("E-SAMPLER-ARGUMENT", f"rank {self.rank}: allowed {allowed}")
        workers = self._world or 1
        self.least, self.cap = least, cap
        check_sizes(batch, workers if shares is None else 0, least=least, cap=cap)
        if self.length < batch:
            raise InvalidInput("E-SAMPLER-ARGUMENT",
                               f"the dataset has {self.length} samples, allowed: at least the batch, which is {batch}")
        self._first_shares = checked_shares(even_shares(batch, workers) if shares is None else shares, batch, least)
        self._schedule = SharesSchedule(self._first_shares)
        self.epoch = 0
        self._queue: deque[DrawnBatch] = deque()
        self._assignment = StepAssignment()
        self._membership = SamplerMembership()
        self._loaded = False
        """True: a state was loaded, and `follow` has not run since."""
        self._lead = 0
        """Number of batches that the loader may draw in advance, according to its settings."""
        self._trained = EpochProgress(ConsumedLog(self.length), self._schedule, 0, batch, drop=drop_last)
        self._begin(self._trained.consumed, 0)

    @property
    def step(self) -> int:
        """The next step to train, counted over all epochs."""
        return self._trained.step

    @property
    def drawn(self) -> int:
        """The first step that this worker has not drawn yet. Shares may be announced for this step and later ones."""
        return self._ahead.step

    @property
    def fraction(self) -> float:
        """Factor for the loss of the current batch: the batch's fraction of this worker's weight in the step."""
        return self._assignment.fraction

    @property
    def last(self) -> bool:
        """True: this worker has no further batch in the step, so its optimizer steps after the current batch."""
        return self._assignment.last

    @property
    def samples(self) -> int:
        """Number of this worker's samples in the current step; 0 if the worker takes part with weight zero."""
        return self._assignment.samples

    @property
    def computed(self) -> int:
        """Number of samples that this worker computes in the current step, including those of weight zero."""
        return self._assignment.computed

    @property
    def announced(self) -> tuple[int, dict[int, int]]:
        """First step of the newest shares (-1: they are from the constructor), and these shares by worker."""
        return self._schedule.newest_step, dict(self._schedule.newest)

    @property
    def workers(self) -> tuple[int, ...]:
        """Numbers of the present workers, in the order of their ranks, as in `announced`; empty until they are known."""
        return tuple(self._membership.left)

    def share(self, step: int) -> int:
        """Returns the number of this worker's samples in a full step."""
        return self._schedule.shares(step).get(self.rank, 0)

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch; if that epoch has already begun (after a resume), continues it."""
        if epoch < 0:
            raise InvalidInput("E-SAMPLER-ARGUMENT", f"epoch {epoch}: allowed is 0 or more")
        if epoch != self.epoch or self._trained.is_finished():
            self.epoch = epoch
            self._begin(ConsumedLog(self.length), self.step)

    def announce(self, step: int, shares: Sequence[int] | Mapping[int, int], *, lost: Mapping[int, int] | None = None) -> None:
        """Sets the shares from `step` on. Every worker must call this before any worker draws that step.

        `lost`: maps a vanished worker to the first step that was averaged without that worker. Its samples from that step on
        are assigned again.
        """
        named = checked_shares(shares, self.batch, self.least)
        if step < self.drawn:
            raise InvalidInput("E-SAMPLER-ARGUMENT",
                               f"announce: step {step} has been drawn already, allowed: step {self.drawn} or later")
        for worker, first in (lost or {}).items():
            if not step - KEEP_STEPS <= first <= step:
                raise InvalidInput("E-SAMPLER-ARGUMENT",
                                   f"announce: worker {worker} is lost from step {first}, allowed: {step - KEEP_STEPS} to "
                                   f"{step}")
        self._schedule.add(Announcement(step, named, dict(lost or {})))

    def follow(self, loader: Iterable[Any], session: TrainingSession | None = None, *,
               weigh: Callable[[Any], float] | None = None) -> Generator[Any, None, None]:
        """Yields the loader's batches until the end of the epoch. Reports each step's weight to the session, and marks trained
        steps in the consumed log.

        `weigh`: a batch's weight, such as its number of tokens. Default: its number of samples.
        """
        if self._trained.is_finished():
            self.set_epoch(self.epoch + 1)
        self._lead = loader_lookahead(loader)
        self._check_lead(session)
        given = self._received_state(session)
        if given is not None and self.epoch < joining_epoch(given):
            self._begin(ConsumedLog(0), self.step)  # the other workers have finished this epoch
            return
        if given is not None and session is not None:
            self._join(given)
            del session.inspect.joined_state[self._name]
        elif session is not None:
            self._match_session_steps(session)
        if given is None or not given.mid_step:
            self._update_membership(self.step, session)
        if session is not None:
            session.inspect.followers[self._name] = self._join_state
        try:
            while not self._finished(session):  # repeats only if a worker is lost after everything was drawn
                step = self.step
                yield from self._pass(loader, session, weigh)
                if self.step == step:  # the iterator is exhausted
                    raise InvalidInput("E-SAMPLER-FOLLOW",
                                       f"follow: the loader ended early at step {step}, allowed: one that can be gone through "
                                       "again and gives the whole epoch, such as a DataLoader; `break` ends a loop early")
        finally:
            self._assignment.step = None
            self._commit_if_applied()
            self._ahead = self._trained  # the next pass draws again the steps that were drawn but not trained

    def _pass(self, loader: Iterable[Any], session: TrainingSession | None,
              weigh: Callable[[Any], float] | None) -> Iterator[Any]:
        self._queue.clear()
        parts: list[tuple[Any, DrawnBatch]] = []
        for batch in loader:
            if not self._queue:
                raise InvalidInput("E-SAMPLER-FOLLOW",
                                   "follow: the loader takes no batches from this sampler; make it with batch_sampler=sampler")
            parts.append((batch, self._queue.popleft()))
            if parts[-1][1].last:
                step = self._assignment.step = self.step
                if session is not None:
                    self._membership.session_steps[step] = session.step
                yield from self._assignment.run(parts, session, weigh)
                if session is not None and session.inspect.may_leave:
                    # All workers must learn of departures after the same step. At the end of the epoch all steps are exchanged,
                    # so that a worker that leaves in the next epoch takes no samples of this epoch with it.
                    session.inspect.catch_up(wholly=self._trained.is_last_step())
                self._commit()
                self._update_membership(step, session)
                self._assignment.step = None
                parts = []

    def _match_session_steps(self, session: TrainingSession) -> None:
        """After a state was loaded, matches the session's steps that are not exchanged yet with the sampler's steps. A save
        may fall between two exchanges; the steps since the first one exist only in the weights of the worker that took them."""
        if self._loaded and session.inspect.may_leave:
            behind = range(session.inspect.exchanged_steps, session.step)
            given = zip(reversed(behind), sorted(self._trained.consumed.open, reverse=True), strict=False)
            self._membership.session_steps |= {step: at for at, step in given}
        self._loaded = False

    def _finished(self, session: TrainingSession | None) -> bool:
        """Returns whether the epoch is over. If a loop was interrupted after its last step, first exchanges the local steps
        that are still pending."""
        if (session is not None and self._trained.is_exhausted() and session.inspect.may_leave
                and session.inspect.exchanged_steps < session.step):
            session.flush()
            self._update_membership(self.step - 1, session)
        return self._trained.is_finished()

    def _update_membership(self, step: int, session: TrainingSession | None) -> None:
        """Processes departures and joins after `step`. If a worker leaves, the other workers take over its share and those of
        its samples that were not exchanged. A worker that joined takes part with weight zero first; all joined workers get a
        share from the same step on."""
        if session is not None:
            self._update_members(step, session)
            confirmed, may_leave = session.inspect.confirmed, session.inspect.may_leave
            steps = self._membership.session_steps
            self._membership.session_steps = {given: at for given, at in steps.items() if may_leave and at >= confirmed}

    def _update_members(self, step: int, session: TrainingSession) -> None:
        members, own = session.inspect.members, session.inspect.own
        if not self._membership.numbers:
            if len(members) != self._world:
                if self._all_workers and session.inspect.may_leave:
                    raise InvalidInput("E-SAMPLER-FOLLOW",
                                       f"follow: this sampler was made for {self._world} workers, the job has {len(members)}: "
                                       "create a new sampler after attach() and load the old sampler's state_dict() into it")
                return  # the shares are not for the session's workers
            self._check_lead(session)  # under DDP the members are known only now
            self._membership.set_members(members)
            if self._all_workers and session.inspect.may_leave:
                self.rank = members.index(own)
        change = self._membership_change(step, session, self._membership)
        if change is not None:
            self.rank = self._membership.numbers.index(own)
            self._schedule.add(change, amends=True)

    def _membership_change(self, step: int, session: TrainingSession, membership: SamplerMembership) -> Announcement | None:
        """Returns the announcement of shares for membership changes after `step`. Returns None if there is no change. Updates
        `membership`."""

        def lost_from(member: int) -> int:
            steps_at_exit = session.inspect.steps_at_exit(member)
            later = (step for step, at in self._membership.session_steps.items() if at >= steps_at_exit)
            return min(later, default=self.step)

        shares = self._schedule.shares(step + 1 + CHANGE_DELAY_STEPS)
        return membership.update(step, session.inspect.members, shares, self.batch, self.least, lost_from)

    def epoch_of(self, session: TrainingSession) -> int:
        """Returns the current or next epoch. At a site that has joined a running job, returns the other workers' epoch.

        Use it as `for epoch in range(sampler.epoch_of(session), epochs)`. `follow` yields no batches for epochs that the other
        workers have finished.
        """
        given = self._received_state(session)
        return self.epoch + self._trained.is_finished() if given is None else joining_epoch(given)

    @property
    def _name(self) -> str:
        """Key under which workers exchange the state of the same sampler."""
        return f"sampler of {self.length} samples, batch {self.batch}, seed {self.seed}"

    def _join_state(self) -> str:
        """Returns the state that a joining worker needs, as JSON."""
        membership = self._membership
        return canonical_json(JoinState(self._state(), list(membership.numbers), sorted(membership.departed),
                                        self._membership.session_steps, self._assignment.pending))

    def _received_state(self, session: TrainingSession | None) -> JoinState | None:
        """Returns the state that workers of the running job sent to this worker when it joined; None after that state was
        used."""
        if session is None or (given := session.inspect.joined_state.get(self._name)) is None:
            return None
        state = decode(given.encode(), JoinState, "state of the others' sampler")
        self._check_state(state.state)
        return state

    def _join(self, given: JoinState) -> None:
        """Continues at the other workers' position. This worker has no share until the other workers have used the batches that
        they drew before it joined."""
        if not given.numbers:
            raise InvalidInput("E-SAMPLER-FOLLOW",
                               "follow: got a sampler with `world` or `shares` in a site that joined a running job; "
                               "allowed there: a Sampler without both")
        if given.mid_step and self.epoch > given.state.epoch:
            raise InvalidInput("E-SAMPLER-FOLLOW",
                               f"follow: got epoch {self.epoch}, the running job is in epoch {given.state.epoch}; "
                               "begin with sampler.epoch_of(session)")
        self._membership = SamplerMembership(given.numbers, given.departed)
        self._schedule, self._world, self.rank = SharesSchedule.of(given.state.schedule), given.state.world, -1
        log = ConsumedLog.of(given.state.consumed)
        self._begin(log if self.epoch == given.state.epoch else ConsumedLog(self.length), given.state.step)
        self._membership.session_steps = dict(given.session_steps)

    def _check_lead(self, session: TrainingSession | None) -> None:
        if session is not None and session.inspect.may_leave and self._lead > CHANGE_DELAY_STEPS:
            raise InvalidInput("E-SAMPLER-FOLLOW",
                               f"follow: the loader draws up to {self._lead} batches in advance (num_workers * "
                               f"prefetch_factor), allowed with min_workers: {CHANGE_DELAY_STEPS}; lower prefetch_factor")

    def __iter__(self) -> Iterator[list[int]]:
        """Yields batches of indices, from the first step that is not trained to the end of the epoch."""
        self._queue.clear()
        ahead = self._ahead = self._trained.copy()
        while not ahead.is_exhausted():
            step = ahead.step
            given = ahead.advance(self._keep_from)
            own, nothing = self._indices.at(given.get(self.rank, [])), self._indices.at([(0, self.least)])
            for part, indices in drawn_batches(step, own, nothing, least=self.least, cap=self.cap):
                self._queue.append(part)
                yield indices

    def __len__(self) -> int:
        """Returns the number of batches left in this epoch with the current shares."""
        full, rest = self._trained.steps_left()
        short = scaled(self._schedule.shares(self.step), rest).get(self.rank, 0)

        def batches(samples: int) -> int:
            return len(micro_batch_sizes(max(1, samples), self.cap))

        return full * batches(self.share(self.step)) + (batches(short) if rest else 0)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of training as plain values, equal on every worker after the same step."""
        self._commit_if_applied()
        state, membership, session = self._state(), copy.copy(self._membership), self._assignment.session
        # A departure in the current step is processed only after it. The state is for the workers that remain.
        step = self.step if self._assignment.step is None else self._assignment.step
        change = self._membership_change(step, session, membership) if session is not None and membership.numbers else None
        if change is not None:
            state = structs.replace(state, schedule=[*state.schedule, change])
        if membership.changed:
            state = structs.replace(state, world=-1, left=membership.left)
        return {"sampler": canonical_json(state)}

    def _state(self) -> SamplerState:
        return SamplerState(self.length, self.batch, self.seed, self.epoch, self.step, self._trained.consumed.state,
                            self._schedule.announcements_since(self.step), self._world)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of this or any other worker of the job.

        With another number of workers, the shares are those of the constructor, since the saved ones name the old workers.
        All workers must then load the state.
        """
        kept = decode(str(state.get("sampler", "")).encode(), SamplerState, "state of a sampler")
        self._check_state(kept)
        self.epoch, log = kept.epoch, ConsumedLog.of(kept.consumed)
        if self._other_workers(kept):
            place = renumbering(kept.left)
            log.renumber(place)
            announcements = [structs.replace(a, lost={place(worker): first for worker, first in a.lost.items()})
                             for a in kept.schedule]
            self._schedule = SharesSchedule.restarted(announcements, kept.step, self._first_shares)
        else:
            self._schedule = SharesSchedule.of(kept.schedule)
            self._world = self._world or kept.world
        self._begin(log, kept.step)
        self._loaded = True

    def _check_state(self, kept: SamplerState) -> None:
        """Raises RecordError if the state is not of a sampler like this one. The state may come from another worker."""
        for name in ("length", "batch", "seed"):
            if getattr(kept, name) != getattr(self, name):
                raise RecordError("E-SAMPLER-STATE",
                                  f"state of a sampler: its {name} is {getattr(kept, name)}, this one's {getattr(self, name)}")
        shares = [a.shares.values() for a in kept.schedule]
        if not shares or kept.epoch < 0 or kept.consumed.length != self.length or any(
                min(of, default=0) < 0 or sum(of) > self.batch for of in shares):
            raise RecordError("E-SAMPLER-STATE", "state of a sampler: its shares, epoch or consumed log do not fit "
                                                 f"{self.length} samples in batches of {self.batch}")

    def _other_workers(self, kept: SamplerState) -> bool:
        """Returns whether the job's number of workers has changed since the save. False if a number is unknown."""
        if self._world and kept.world:
            return self._world != kept.world
        return 0 < self._world <= max((worker for a in kept.schedule for worker in a.shares), default=-1)

    def _begin(self, log: ConsumedLog, step: int) -> None:
        self._indices = Permutation(self.length, self.seed, self.epoch) if self._shuffle else SequentialOrder()
        self._trained = self._trained.restarted(log, self._schedule, step)
        self._ahead = self._trained
        self._membership.session_steps.clear()
        self._assignment.finish()

    @property
    def _keep_from(self) -> int:
        """First step whose assignments may still change. Assignments of earlier steps are final, whichever worker leaves."""
        return min([self.step - KEEP_STEPS, *self._membership.session_steps, *self._schedule.lost_since(self.step)])

    def _commit_if_applied(self) -> None:
        if self._assignment.applied():
            self._commit()

    def _commit(self) -> None:
        """Marks the step that was drawn as trained."""
        if self._assignment.pending:
            self._assignment.finish()
            self._trained.advance(self._keep_from)
            self._schedule.forget(self.step)


def loader_lookahead(loader: Any) -> int:
    """Returns how many batches the loader draws in advance, from a torch DataLoader's settings."""
    return (getattr(loader, "num_workers", 0) or 0) * (getattr(loader, "prefetch_factor", 0) or 0)
