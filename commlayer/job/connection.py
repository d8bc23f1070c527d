"""One rank's connection to its job: groups, coordinator and servers, the worker and its plan. Decides nothing.

Made by job/start.py, moved to another plan by job/switch.py, closed by its session or at exit.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from commlayer.compressors import codec_of
from commlayer.control.embedded import Embedded
from commlayer.control.leaving import end as end_part
from commlayer.control.server_codecs import expected_nbytes
from commlayer.control.uplink import Uplink
from commlayer.errors import CommError
from commlayer.job.fault import FaultVerdict
from commlayer.job.stepped import Stepped
from commlayer.job.ways import Asked, Forbids
from commlayer.observe import StalePlan
from commlayer.planner.model.cluster import Basis
from commlayer.records import Job, Plan
from commlayer.runtime.local_steps import LocalSteps
from commlayer.runtime.worker import Worker
from commlayer.transport.groups import Groups

log = logging.getLogger("commlayer")


class Waits(NamedTuple):
    """How long this rank waits for others around an error or an end."""

    notice_s: float = 0.0
    """For the coordinator's word who left or died."""
    verdict_s: float = 0.0
    """The same, behind a collective, which names nobody: the silence after which a worker counts as dead comes first."""
    stay_s: float = 0.0
    """Before the servers that this rank hosts end under the others."""


class Connection:
    """What a session holds on to. `worker` is None where there is nobody to average with.

    =====================================  ====================================================================
    attribute                              changed by
    =====================================  ====================================================================
    rank, world, groups, uplink, embedded  connect(), once
    waits, loss, max_loss                  connect(), once
    asked, forbids, optimizer              connect(), once
    useless                                whoever steps: module_driver.py
    plan, worker                           connect(), switch()
    basis                                  connect(), switch(); autoplan/, for the plan that it has chosen
    auto                                   connect(); a session, whose user asks for a plan
    local                                  exchange_schedule.py
    weighed                                step_loop.py
    floor, harder                          accuracy/
    price                                  autoplan/
    decisions, events                      added to by whoever decides
    on_close, on_shares                    added to by whoever has something to end, or wants to hear
    catch_up, before_switch, after_switch  added to by whoever must act around a change of plans
    stepped                                whoever steps: module_driver.py
    bring_in                               added to by whoever lets exchanges run behind steps
    =====================================  ====================================================================
    """

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        self.groups: Groups | None = None
        self.uplink: Uplink | None = None
        self.embedded: list[Embedded] = []
        self.plan: Plan | None = None
        self.worker: Worker | None = None
        self.waits = Waits()
        self.asked = Asked()
        """What attach() was told of how steps are exchanged; it holds for every plan."""
        self.optimizer = ""
        """The family of the script's, as far as anybody knows."""
        self.forbids: Forbids = lambda _: ""
        """Why a plan cannot go a way here: see allowed_ways.py."""
        self.useless: Forbids = lambda _: ""
        """Why it would gain nothing, for whoever chooses."""
        self.local: LocalSteps | None = None
        """Under a plan of local steps."""

        self.weighed = False
        """Whether the script has ever said what this rank's batch weighs, as samplers and controllers do."""

        self.auto = False
        """Whether the plan was left to commlayer."""
        self.basis: Basis | None = None
        """On rank 0: what the plan in force was made from, where that is known."""
        self.price: tuple[float, float] | None = None
        """On rank 0: seconds of communication under the plan in force, and the part of computing that hides it."""
        self.loss, self.max_loss, self.floor = "", 0.0, 0.0
        """The loss model's file, the budget (0: none was named), and the level (runtime/codec_floor.py) below which the guard
        allows no codec."""
        self.harder = 1.0
        """How many times the excess of steps that is usual under a codec this model needs, as the guard has seen."""

        self.decisions: list[str] = []
        """What was decided in this run, at which step, and why."""
        self.events: list[StalePlan] = []
        """The same as records, as far as there are any."""

        self.on_close: list[Callable[[], None]] = []
        """What else is to be closed with it."""
        self.on_shares: list[Callable[[float], None]] = []
        """Who wants to hear, on all ranks after the same step, that work moves: by what part a step's computing changes."""
        self.catch_up: list[Callable[[], object]] = []
        """Called ahead of all that ranks do together between two steps: does what others may have done already."""
        self.before_switch: list[Callable[[], None]] = []
        self.after_switch: list[Callable[[], None]] = []
        """Called on all ranks between the same two steps, when it is known that all can go over, and when they have."""
        self.stepped: Stepped | None = None
        """What the optimizer makes of gradients, where one was given."""
        self.bring_in: list[Callable[[], object]] = []
        """Called on all ranks between the same two steps, ahead of a save, a load and an orderly end: brings in what is under
        way."""

        self._verdict = FaultVerdict()
        self._owner = os.getpid()
        self._closed = False

    @property
    def steps(self) -> int:
        """Steps that this rank has averaged since the start, the same on all ranks between two steps. The one such count.

        (`worker.step` is the number that the next step has on the wire: it goes on behind a restored checkpoint, and a step
        that was abandoned has one, too. Under local steps each exchange counts as one.)
        """
        return 0 if self.worker is None else self.worker.counters.steps

    def stats(self) -> dict[str, float]:
        if self.worker is None:
            return {}
        return self.worker.counters.as_dict() | ({} if self.uplink is None else self.uplink.stats())

    def worker_for(self, plan: Plan, job: Job, device: torch.device, generation: int = 1) -> Worker:
        """A worker that runs this plan here; it takes no part in anything until `follow`."""
        assert self.uplink is not None
        codecs = {b.id: codec_of(b, self.rank // plan.ranks_per_node, plan) for b in plan.buckets}
        return Worker(
            job, plan, codecs, device, rank=self.rank, members=self.world, generation=generation, groups=self.groups,
            transport=self.uplink.transport, recycle=self.uplink.recycle, explain=self.explain,
        )

    def follow(self, worker: Worker) -> None:
        """From now on what the coordinator says of the others goes to this worker, and is kept for `explain`."""
        assert self.uplink is not None
        self.worker = worker
        self.uplink.limit_kept(max((expected_nbytes(worker.plan, n) for n in range(worker.plan.servers)), default=0))

        def fail(error: CommError) -> None:
            self._verdict.fall(error)
            worker.latch(error)

        def left(peer: str, exchanges: int) -> None:
            if (missed := worker.ended.hear(peer, exchanges)) is not None:
                fail(missed)

        self.uplink.follow(fail, worker.stalled, left, worker.generation)

    def explain(self, error: BaseException) -> BaseException:
        """Who is to blame for it, as the coordinator knows soon."""
        return self._verdict.explain(error, self.uplink, notice_s=self.waits.notice_s, verdict_s=self.waits.verdict_s)

    def say(self, what: str) -> None:
        """A decision of before the first step."""
        self.decisions.append(f"step 0: {what}")
        log.warning("%s", what)

    # ---- the end

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, reason: str = "") -> None:
        if self._closed or os.getpid() != self._owner:
            return  # a forked copy of the trainer has no part in the job
        self._closed = True
        atexit.unregister(self.at_exit)
        if not reason and self.worker is not None and self.worker.error is None:
            try:
                for act in self.bring_in:
                    act()
            except Exception as failed:  # of an optimizer, too: whatever it is, the others must hear of the end
                log.warning("an exchange that was under way at the end is not in the weights: %s", failed)
            self.worker.rest()
        error: BaseException | None = self._verdict.error
        broken = ""
        if self.worker is not None:
            error = self.worker.error or error
            self.worker.close()
        if error is not None:
            broken = f"it had an error: {error}".splitlines()[0]
        exchanges = -1 if self.worker is None else self.worker.step
        end_part(self.uplink, self.embedded, reason or broken, exchanges, stay_s=self.waits.stay_s,
                 notice_s=self.waits.notice_s)
        for end in self.on_close:
            end()
        if self.groups is not None:
            self.groups.close()

    def at_exit(self) -> None:
        """The end of a script that did not close: the exception that ended it is the reason that others hear."""
        error = getattr(sys, "last_value", None)
        self.close("" if error is None else f"{type(error).__name__}: {error}".splitlines()[0])
