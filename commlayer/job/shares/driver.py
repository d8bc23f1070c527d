"""Balances a job while it trains: measured times -> shares -> sampler. Knows sessions and samplers; what to decide it asks.

All ranks hear the same measured times, feed them to the same pure Balancer and come to the same decision, so there is no
coordinator to wait for and nothing to distribute. What a step measured is sent when the step is over and read when the next one
is: its exchange hides behind a whole step. A decision is for a step that no loader has drawn yet.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch.distributed as dist
from msgspec import structs
from torch import nn

from commlayer.balance import Balancer, Communication, Cubic, Decision, Joined, Line, Measurement, Outcome, Policy, Sampler
from commlayer.balance.events import Event, said
from commlayer.balance.handout import check_plan
from commlayer.balance.profiling import LIMIT_S, Profile
from commlayer.balance.solution import FREE
from commlayer.errors import CommError
from commlayer.measure.batch_trials import LossOf
from commlayer.session import Session
from commlayer.transport.rank_rows import Rows, spacing

if TYPE_CHECKING:  # they load solvers, which jobs that neither profile nor compare do without
    from commlayer.balance.opening import Opening
    from commlayer.balance.published import Published

log = logging.getLogger("commlayer")

TOGETHER = Policy(exclude_gain=1.0)
"""A rank without share still takes part in the step, and the others wait for it: leaving one out gains nothing."""


Mode = Literal["makespan", "lbb"]
"""What decides: the default, or LBB as published, to compare with."""


class WorkerTime(NamedTuple):
    """What a rank says after a step. Numbers only: the exchange carries nothing else."""

    computed: float
    """Samples of the step that was measured; 0 where none was."""
    compute_s: float
    before_s: float
    """Of another step with as many samples, the latest since the row before; 0 without one. Two outliers make a jump, so
    that one row is enough to see it where several steps share one."""
    lookahead: float
    """How many batches its loader draws ahead, and so at most how many steps."""
    cost_s: float
    """Seconds of its training thread that an exchange takes, with the step at which it is read."""
    step_s: float
    comm_s: float
    overlap: float
    """Rank 0's price of communication under the plan in force, and the part of computing that hides it; 0 without one."""
    shares: float
    """A check sum of what it believes the shares to be."""


class Controller:
    """Moves shares of the batch to where they are computed fastest, while training runs.

    >>> controller = commlayer.Controller(session, sampler)         # doctest: +SKIP
    >>> for x, y in controller.follow(loader):                      # in place of sampler.follow(loader, session)
    ...     (loss_of(model(x), y) * sampler.fraction).backward()
    ...     if sampler.last: optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self, session: Session, sampler: Sampler, *, policy: Policy = TOGETHER, communication: Communication = FREE,
        line: Line | None = None, every: int | None = None, lookahead: int | None = None,
        measure: Callable[[int, int], float] | None = None, mode: Mode = "makespan",
    ) -> None:
        """All ranks make one with the same arguments, except for `line`: what is known of this rank's speed before training.

        `every`: steps from one exchange to the next, None for as few as cost at most 1 % of the time. `lookahead`: batches
        that a loader draws ahead; a DataLoader is asked. `measure(step, samples)`: this rank's compute seconds, in place of
        the session's own measuring.
        """
        if every is not None and every < 1:
            raise ValueError(f"every: got {every}, allowed: 1 or more steps, None for as few as cost at most 1 %")
        if mode not in get_args(Mode):
            raise ValueError(f"mode: got {mode!r}, allowed: {', '.join(get_args(Mode))}")
        check_plan(session)
        self.session, self.sampler = session, sampler
        self._policy = structs.replace(policy, minimum=max(policy.minimum, sampler.least))
        self._communication, self._line, self._measure = communication, line, measure
        self._lookahead, self._fixed, self._mode = lookahead, every, mode
        self._every = every or 1
        self._rows: Rows | None = None
        self._balancer: Balancer | Published | None = None
        self._opening: Opening | None = None
        self._row_step = self._next = 0
        self._ahead = 0
        self._batches: dict[int, int] = {}
        """The session's step -> samples that were computed in it, until its time is known."""
        self._times: list[tuple[int, float]] = []
        self._costs_s: deque[float] = deque(maxlen=5)
        self._to_come: deque[Decision] = deque()
        """Announced, and for a step that has not begun."""
        self._row_at = self._step_s = 0.0
        self.events: list[Event] = []
        """Decisions, what came of each, and what was noticed: records, the same on all ranks."""

    @property
    def shares(self) -> dict[int, int]:
        """The newest, which may be for a step that is still to come."""
        return self.sampler.announced[1]

    def profile(
        self, model: nn.Module, loss_of: LossOf, batches: Any, *, limit_s: float = LIMIT_S,
    ) -> list[Profile]:
        """Measures batches in powers of two until memory ends, on all ranks at once, and sets the first shares and the caps.

        Before the first step that is followed; all ranks call it together. `loss_of(model, batch)`: a batch's loss, of the
        model that is handed in (DDP's inner one); `batches`: the loader, or a function that gives a batch of so many samples.
        It ends after `limit_s` and one more batch. Model, optimizer, gradients and random numbers are as before. Returns what
        each rank found.

        >>> controller.profile(model, lambda model, batch: loss(model(batch[0]), batch[1]), loader)   # doctest: +SKIP
        """
        if self._balancer is not None:
            raise ValueError("profile: training follows measured times already, allowed: before its first step")
        from commlayer.balance.published import Published
        from commlayer.job.shares import worker_profiles

        own, step = self._measure, self.sampler.step
        found, self._opening = worker_profiles.together(
            self.session, self.sampler, self._policy, self._communication, model, loss_of, batches, limit_s=limit_s,
            measure=None if own is None else lambda samples: own(step, samples),
            shares_of=Published.begin if self._mode == "lbb" else None,
        )
        self._line = self._opening.lines[self.sampler.rank]
        for note in self._opening.notes:
            self._say(note)
        self._say(self._opening.decision)
        return found

    def follow(self, loader: Iterable[Any], *, weigh: Callable[[Any], float] | None = None) -> Iterator[Any]:
        """As `sampler.follow`, balanced. All ranks call it together."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield from self.sampler.follow(loader, self.session, weigh=weigh)
            return
        self._read(self.sampler.step)  # before the loader draws: what follows is drawn with all decisions known
        self._ahead = _lookahead(loader) if self._lookahead is None else self._lookahead
        self._times.clear()
        self._batches.clear()
        first, self._row_at = True, 0.0
        with contextlib.closing(self.sampler.follow(loader, self.session, weigh=weigh)) as batches:
            for batch in batches:
                last, step = self.sampler.last, self.sampler.step  # asked for its state in the body, the sampler goes on
                if last and not first:  # before an epoch's first step there may be evaluation, and workers that start
                    self._batches[int(self.session.stats().get("steps", 0))] = self.sampler.computed
                first = first and not last
                yield batch
                if last:
                    self._step_over(step)

    # ---- after each step

    def _step_over(self, step: int) -> None:
        if self._balancer is None:  # not before: with DDP the first backward pass makes the connection
            self._balancer = self._begin(step)
        begin = time.perf_counter()
        for lap in self.session.laps():
            if lap.step in self._batches:
                self._times.append((self._batches.pop(lap.step), lap.seconds))
        # With shallow queues between sampler and loop that nobody told us of.
        self._ahead = max(self._ahead, self.sampler.drawn - step - 1)
        read = self._read(step + 1)
        while self._to_come and self._to_come[0].from_step <= step + 1:
            decision = self._to_come.popleft()
            part = abs(decision.gain_s) / decision.before_s if decision.before_s < math.inf else 1.0
            for hear in self.session.connection.on_shares:
                hear(part)
        if step >= self._next:
            self._send(step, begin)
            read = True
        if read:
            self._costs_s.append(time.perf_counter() - begin)

    def _send(self, step: int, now: float) -> None:
        assert self._rows is not None
        assert self._balancer is not None
        if self._measure is not None:
            self._times = [(self.sampler.computed, self._measure(step, self.sampler.computed))]
        computed, compute_s, before_s = latest(self._times)
        self._times = []
        if self._row_at:
            self._step_s = (now - self._row_at) / (step - self._row_step)
        self._row_at, self._row_step, self._next = now, step, step + self._every
        cost_s = min(self._costs_s, default=0.0)  # what else the machine does only adds
        price = self.session.connection.price or (0.0, 0.0)
        row = WorkerTime(computed, compute_s, before_s, self._ahead, cost_s, self._step_s, *price,
                         _checksum(self._balancer.latest))
        with self._explained():
            self._rows.start(*row)

    def _read(self, to_come: int) -> bool:
        """Hears what all measured; new shares are for steps behind all that is drawn. `to_come`: the next step to train."""
        if self._rows is None or self._balancer is None or not self._rows.under_way:
            return False
        with self._explained():
            rows = [WorkerTime(*row) for row in self._rows.read()]
        odd = [str(rank) for rank, row in enumerate(rows) if row.shares != rows[0].shares]
        if odd:
            raise CommError(f"decided on other shares than rank 0 at step {self._row_step}: the ranks differ in the arguments "
                            "of their Controller, or in their machines' arithmetic", peer=f"worker {', '.join(odd)}")
        balancer = self._balancer
        lead = to_come + int(max(row.lookahead for row in rows)) - self._row_step
        balancer.policy = structs.replace(self._policy, lead=lead)
        if isinstance(balancer, Balancer) and self._communication is FREE and rows[0].comm_s:
            comm_s = rows[0].comm_s
            balancer.communication = Communication(lambda _: comm_s, rows[0].overlap)
        decision = balancer.decide(self._row_step, [
            Measurement(rank, int(row.computed), seconds) for rank, row in enumerate(rows) if row.computed
            for seconds in ((row.before_s, row.compute_s) if row.before_s else (row.compute_s,))
        ])
        if decision is not None:
            self.sampler.announce(decision.from_step, decision.by_worker)
            self._to_come.append(decision)
        self._tell(max(row.step_s for row in rows))
        if self._fixed is None:
            self._every = spacing(max(row.cost_s for row in rows), max(row.step_s for row in rows))
        return True

    def _tell(self, whole_s: float) -> None:
        assert self._balancer is not None
        while self._balancer.events:
            event = self._balancer.events.popleft()
            self._say(structs.replace(event, whole_s=whole_s) if isinstance(event, Outcome) else event)

    def _say(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Decision | Outcome):
            line = f"step {event.step}: {said(event)}"
            self.session.connection.decisions.append(line)
            if self.sampler.rank == 0:
                log.info("%s", line)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """A broken exchange does not say who broke it: the session knows."""
        try:
            yield
        except CommError as error:
            raise self.session.connection.explain(error) from None

    # ---- at the start

    def _begin(self, step: int) -> Balancer | Published:
        """All ranks tell each other what they start from. `step`: the one that is over."""
        sampler = self.sampler
        made = self.session.connection
        assert made.groups is not None
        self._rows = Rows(made.groups.members, made.groups.timeout_s)
        made.beside.append(self._rows.close)
        newest_step, shares = sampler.announced
        line = self._line or Line(1.0)
        self._rows.start(sampler.rank, sampler.batch, sampler.cap, sampler.least, step, max(shares, default=0),
                         self._line is not None, line.slope_s, line.intercept_s)
        with self._explained():
            rows = self._rows.read()
        for rank, (number, batch, _, _, stands, most, *_) in enumerate(rows):
            if number != rank:
                raise ValueError(f"the sampler of rank {rank} is for rank {number:.0f}, allowed: its own")
            if (batch, stands) != (rows[0][1], rows[0][4]):
                raise ValueError(f"the sampler of rank {rank} stands at step {stands:.0f} with batch {batch:.0f}, rank 0's at "
                                 f"step {rows[0][4]:.0f} with batch {rows[0][1]:.0f}, allowed: the same on all")
            if most >= len(rows):
                raise ValueError(f"the sampler of rank {rank} has a share for worker {most:.0f}, allowed: 0 to {len(rows) - 1}")
        self._policy = structs.replace(self._policy, minimum=max(self._policy.minimum, *(int(row[3]) for row in rows)))
        joined = [Joined(rank, int(cap) or None, Line(slope, intercept) if known else None)
                  for rank, (_, _, cap, _, _, _, known, slope, intercept) in enumerate(rows)]
        self._next = step
        first = self._opening.decision if self._opening and self._opening.decision.from_step == newest_step else None
        balancer = Balancer(joined, sampler.batch, self._policy, self._communication, shares=first or shares,
                            from_step=max(0, newest_step))
        if self._mode == "makespan":
            return balancer
        from commlayer.balance.published import Published

        if self._opening is not None:
            curves = list(self._opening.cubics)
        else:
            lines = [one.line or Line(1.0) for one in joined]
            curves = [Cubic(0.0, 0.0, line.slope_s, line.intercept_s) for line in lines]
        return Published(curves, sampler.batch, [one.cap for one in joined], balancer.latest, self._policy)


def latest(times: Sequence[tuple[int, float]]) -> tuple[int, float, float]:
    """(samples, seconds) of the last step, and the seconds of one before it with as many samples: 0 where there is none."""
    if not times:
        return 0, 0.0, 0.0
    samples = times[-1][0]
    same = [seconds for one, seconds in times if one == samples]
    return samples, same[-1], same[-2] if len(same) > 1 else 0.0


def _lookahead(loader: Iterable[Any]) -> int:
    """Batches that a DataLoader's workers have asked for beyond the one that is out."""
    workers = int(getattr(loader, "num_workers", 0))
    return workers * int(getattr(loader, "prefetch_factor", None) or 2)


def _checksum(decision: Decision) -> float:
    return float(zlib.crc32(repr((decision.from_step, decision.by_worker)).encode()))
