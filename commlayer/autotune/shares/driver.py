"""Controller: balances a job while it trains, from measured times to shares to the sampler.

Measurements of a step are sent at its end and read at the next one's, so that the exchange overlaps a whole step. The
decisions are in autotune/shares/policy.py.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch.distributed as dist
from msgspec import structs
from torch import nn

from commlayer.autotune.measure.step_times import LossOf
from commlayer.autotune.shares import policy
from commlayer.autotune.shares.policy import Action, Announce, RankStart, ShareEvent, SharesState, WorkerTime, WorkMoves, latest
from commlayer.balance import Communication, Decision, Line, Outcome, Policy, Sampler
from commlayer.balance.balancer import Event, describe
from commlayer.balance.profile import LIMIT_S, WorkerProfile
from commlayer.balance.share_solver import FREE
from commlayer.cluster.collectives import RowChannel, Rows
from commlayer.errors import CommError, InvalidInput
from commlayer.session import Session

if TYPE_CHECKING:
    from commlayer.balance.profile import InitialShares


Mode = Literal["makespan", "lbb"]
"""Which algorithm decides: the default, or LBB as published for comparison."""


class Controller:
    """Moves shares of the batch to the ranks that compute them fastest, while training runs.

    >>> controller = commlayer.Controller(session, sampler)         # doctest: +SKIP
    >>> for x, y in controller.follow(loader):                      # instead of sampler.follow(loader, session)
    ...     (loss_of(model(x), y) * sampler.fraction).backward()
    ...     if sampler.last: optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self, session: Session, sampler: Sampler, *, policy: Policy | None = None, communication: Communication = FREE,
        line: Line | None = None, every: int | None = None, lookahead: int | None = None,
        measure: Callable[[int, int], float] | None = None, mode: Mode = "makespan",
    ) -> None:
        """All ranks create one with the same arguments, except for `line`: this rank's known speed before training.

        `every`: steps between exchanges; None for the fewest steps whose exchanges cost at most 1 % of the time. `lookahead`:
        batches that a loader draws in advance; derived from a DataLoader. `measure(step, samples)`: this rank's compute
        seconds, instead of the session's own measurement.
        """
        if every is not None and every < 1:
            raise InvalidInput("E-SHARES-ARGUMENT",
                               f"every: got {every}, allowed: 1 or more steps, None for as few as cost at most 1 %")
        if mode not in get_args(Mode):
            raise InvalidInput("E-SHARES-ARGUMENT", f"mode: got {mode!r}, allowed: {', '.join(get_args(Mode))}")
        _check_plan(session)
        self.session, self.sampler = session, sampler
        self._policy = structs.replace(policy or Policy(), minimum=max(policy.minimum if policy else 1, sampler.least))
        self._communication, self._line, self._measure = communication, line, measure
        self._lookahead, self._every, self._mode = lookahead, every, mode
        self._rows: Rows | None = None
        self._opening: InitialShares | None = None
        self._state: SharesState | None = None
        """None until the first step is over."""
        self._own = OwnTimes()
        self._ahead = 0
        """Number of batches that the loader draws in advance."""
        self.events: list[Event] = []
        """Decisions, their outcomes, and other observations; the same on all ranks."""
        if session is not None:  # None in training with a single process
            session.inspect.connection.terms.balanced = True

    @property
    def shares(self) -> dict[int, int]:
        """The newest shares, possibly for a later step."""
        return self.sampler.announced[1]

    def profile(
        self, model: nn.Module, loss_of: LossOf, batches: Any, *, limit_s: float = LIMIT_S,
    ) -> list[WorkerProfile]:
        """Measures batches in powers of two up to the memory limit, on all ranks at once, and sets the first shares and caps.

        Collective; allowed before the first step that is followed. `loss_of(model, batch)` returns a batch's loss for the given
        model (DDP's inner one). `batches` is the loader, or a function of the number of samples. Ends after `limit_s` and one
        more batch. Model, optimizer, gradients and random state are restored. Returns the profile of each rank.

        >>> controller.profile(model, lambda model, batch: loss(model(batch[0]), batch[1]), loader)   # doctest: +SKIP
        """
        if self._state is not None:
            raise InvalidInput("E-SHARES-ARGUMENT",
                               "profile: training follows measured times already, allowed: before its first step")
        from commlayer.autotune.shares import worker_profiles
        from commlayer.balance.lbb import LbbBalancer

        own, step = self._measure, self.sampler.step
        profiles, self._opening = worker_profiles.together(
            self.session, self.sampler, self._policy, self._communication, model, loss_of, batches, limit_s=limit_s,
            measure=None if own is None else lambda samples: own(step, samples),
            shares_of=LbbBalancer.begin if self._mode == "lbb" else None,
        )
        self._line = self._opening.lines[self.sampler.rank]
        for note in self._opening.notes:
            self._say(note)
        self._say(self._opening.decision)
        return profiles

    def follow(self, loader: Iterable[Any], *, weigh: Callable[[Any], float] | None = None) -> Iterator[Any]:
        """Like `sampler.follow`, with balancing. Collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield from self.sampler.follow(loader, self.session, weigh=weigh)
            return
        self._read(self.sampler.step)  # before the loader draws, so that all batches are drawn with all decisions known
        self._ahead = _lookahead(loader) if self._lookahead is None else self._lookahead
        self._own.afresh()
        first = True
        with contextlib.closing(self.sampler.follow(loader, self.session, weigh=weigh)) as batches:
            for batch in batches:
                _check_plan(self.session)  # each step, because plans change
                last, step = self.sampler.last, self.sampler.step  # reading its state in the loop body advances the sampler
                if last and not first:  # evaluation and starting workers may precede an epoch's first step
                    self._own.begins(int(self.session.stats()["exchanges"]), self.sampler.computed)
                first = first and not last
                yield batch
                if last:
                    self._step_over(step)

    # ---- after each step

    def _step_over(self, step: int) -> None:
        if self._state is None:  # not earlier: with DDP the first backward pass creates the connection
            self._state = self._begin(step)
        begin_s = time.perf_counter()
        for lap in self.session.inspect.laps():
            self._own.took(lap.step, lap.seconds)
        # Also covers queues between sampler and loop that were not declared.
        self._ahead = max(self._ahead, self.sampler.drawn - step - 1)
        exchanged = self._read(step + 1)
        self._state, moves = policy.step_begins(self._state, step + 1)
        self._carry_out(moves)
        if policy.due(self._state, step):
            self._state = self._send(self._state, step, begin_s)
            exchanged = True
        if exchanged:
            self._own.costs(time.perf_counter() - begin_s)

    def _send(self, state: SharesState, step: int, now_s: float) -> SharesState:
        assert self._rows is not None
        if self._measure is not None:
            self._own.given(self.sampler.computed, self._measure(step, self.sampler.computed))
        price = self.session.inspect.connection.terms.price or (0.0, 0.0)
        row = self._own.row(step, now_s, lookahead=self._ahead, price=price, shares=policy.checksum(state))
        with self._explained():
            self._rows.start(*row)
        return policy.told(state, step)

    def _read(self, to_come: int) -> bool:
        """Reads the rows of all ranks, if a row was sent. `to_come` is the next step to train."""
        if self._rows is None or self._state is None or not self._rows.under_way:
            return False
        with self._explained():
            rows = [WorkerTime(*row) for row in self._rows.read()]
        self._state, actions = policy.decide(self._state, rows, to_come)
        self._carry_out(actions)
        return True

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Announce(decision):
                    self.sampler.announce(decision.from_step, decision.by_worker)
                case WorkMoves(part):
                    for hear in self.session.inspect.connection.on_shares:
                        hear(part)
                case ShareEvent(event):
                    self._say(event)

    def _say(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Decision | Outcome):
            self.session.inspect.connection.say(describe(event), logging.INFO)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds the lost peer to an error of the row exchange, which the session knows."""
        try:
            yield
        except CommError as error:
            raise self.session.inspect.connection.explain(error) from None

    # ---- at the start

    def _begin(self, step: int) -> SharesState:
        """All ranks exchange their initial data. `step` is the one that has ended."""
        sampler, connection = self.sampler, self.session.inspect.connection
        connection.terms.balanced = True  # with DDP this is a newer connection than the constructor's
        assert connection.groups is not None
        if connection.members is not None:
            raise InvalidInput("E-SHARES-ARGUMENT",
                               "Controller: workers may leave this job (min_workers), and shares follow measured times of all; "
                               "allowed: sampler.follow(loader, session), or a job in which all stay")
        # A channel of its own: the script's collectives are in no fixed order with these exchanges.
        channel = RowChannel(connection.groups.members, connection.groups.timeout_s)
        connection.on_close.append(channel.close)
        self._rows = channel.rows()
        from_step, shares = sampler.announced
        line = self._line or Line(1.0)
        with self._explained():
            self._rows.start(*RankStart(sampler.rank, sampler.batch, sampler.cap, sampler.least, step, max(shares, default=0),
                                        self._line is not None, line.slope_s, line.intercept_s))
            rows = [RankStart(*row) for row in self._rows.read()]
        return policy.begin(rows, shares, from_step, policy=self._policy, communication=self._communication,
                            every=self._every, opening=self._opening, lbb=self._mode == "lbb")


def _check_plan(session: Session | None) -> None:
    """Refuses plans with local steps or overlapped updates. The measured time runs from one averaging to the end of the next
    backward pass; such plans have no averaging in most steps, or it overlaps the next step."""
    plan = None if session is None else session.inspect.plan
    if plan is None or (plan.local_steps == 1 and plan.overlap != "round"):
        return
    how, remedy = f"averages weights every {plan.local_steps} steps (local_steps), allowed: 1", "with max_local_steps=1"
    if plan.local_steps == 1:
        how, remedy = "has overlap='round', allowed: updates that are waited for", "without overlap"
    raise InvalidInput("E-SHARES-ARGUMENT",
                       f"Controller: the plan {how}, since shares follow what each step takes; make the plan {remedy}, or "
                       "leave shares as they are: sampler.follow(loader, session)")


def _lookahead(loader: Iterable[Any]) -> int:
    """Batches that a DataLoader's workers have requested beyond the present one."""
    workers = int(getattr(loader, "num_workers", 0))
    return workers * int(getattr(loader, "prefetch_factor", None) or 2)


# ---- one rank's measurements for load balancing between two exchanges
#
# The caller passes all times.

COSTS_KEPT = 5


class OwnTimes:
    """Compute times and samples of its steps, and the cost of exchanges."""

    def __init__(self) -> None:
        self._samples: dict[int, int] = {}
        """Samples by session step, until the step's time is known."""
        self._times: list[tuple[int, float]] = []
        self._costs_s: deque[float] = deque(maxlen=COSTS_KEPT)
        self._told_s, self._told_step = 0.0, 0
        self._step_s = 0.0

    def afresh(self) -> None:
        """Clears measurements when a pass over the data begins."""
        self._times.clear()
        self._samples.clear()
        self._told_s = 0.0

    def begins(self, session_step: int, samples: int) -> None:
        """Records the number of samples in a session step."""
        self._samples[session_step] = samples

    def took(self, session_step: int, seconds: float) -> None:
        """Adds a time measured by the session; ignored if the step's samples are unknown."""
        if session_step in self._samples:
            self._times.append((self._samples.pop(session_step), seconds))

    def given(self, samples: int, seconds: float) -> None:
        """Sets a time measured by the caller for the last step, instead of the session's times."""
        self._times = [(samples, seconds)]

    def costs(self, seconds: float) -> None:
        """Adds the time that an exchange held up the training thread."""
        self._costs_s.append(seconds)

    def row(self, step: int, now_s: float, *, lookahead: int, price: tuple[float, float], shares: float) -> WorkerTime:
        """The row after `step`; starts a new measurement."""
        computed, compute_s, before_s = latest(self._times)
        self._times = []
        if self._told_s:
            self._step_s = (now_s - self._told_s) / (step - self._told_step)
        self._told_s, self._told_step = now_s, step
        cost_s = min(self._costs_s, default=0.0)  # other load on the machine can only increase the cost
        return WorkerTime(computed, compute_s, before_s, lookahead, cost_s, self._step_s, *price, shares)
