"""Lets members of a running job leave, die and join, on one rank.

A member that is gone: the coordinator removes it, and servers close all sums without it (summation.py). The other members wait
for nothing else, so no step is repeated. They learn of it from the first row that lacks it, after the same step, and then
continue with fewer ranks.

Workers that join: members propose them in their rows, and the rows decide on their first step (schedule.py). Each member
reports them to all servers before that step. Before members send anything of that step, they give the new workers the job's
state, together. With local steps that overlap their exchange, the transfer runs beside training.

Under local steps, a worker first follows the exchanges of the others: rows decide from which one on. The members give it the
state before that exchange, while they train. When the worker has it and has applied the later results (result_follower.py), it
joins as above, and receives only what it cannot know.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain

from msgspec import structs

from commlayer.cluster.calls.site_client import KvClient
from commlayer.cluster.processes import process_groups, site_process_group
from commlayer.cluster.processes.collectives import Groups
from commlayer.cluster.processes.rows import StepRows
from commlayer.compressors import shares_state
from commlayer.config import Config, continue_wait_s, reconnect_window_s
from commlayer.engine.buckets.bucket import WorkerBucket
from commlayer.engine.components import Pending
from commlayer.engine.epochs.plan_switch import Recut
from commlayer.engine.epochs.replica import Replica
from commlayer.engine.epochs.schedule import LEAD, MOST_AT_ONCE, EpochProposal, Joining, decide, keep_majority, propose
from commlayer.engine.epochs.state_relay import BATCH_NBYTES, WINDOW, NewestEpoch, StateRelay
from commlayer.engine.job.fixed_members import FixedMembers
from commlayer.engine.job.job import DistributedJob
from commlayer.errors import CommError, InvalidInput, PeerLost
from commlayer.records import Epoch, Member, group_by_site, plan_for_members
from commlayer.transport.protocol import SERVER_BASE, Handle, peer_name

PROPOSAL_NUMBERS = len(EpochProposal._fields)
FOLLOW_NBYTES = WINDOW * BATCH_NBYTES
"""Size of a model's parameters, in bytes, up to which a worker joins local steps without following them first: following takes
one or two exchanges, and all wait for a smaller state no longer than that."""

REQUESTS_S = 5.0
"""Seconds for which members wait, at most, until a worker that follows has requested the results from this exchange on. Servers
keep results only for a short time, so a later worker might have to join again."""


class ChangingMembers(FixedMembers):
    """The members of a job that can change. Only the training thread calls this object."""

    elastic = True

    def __init__(self, context: DistributedJob, config: Config, home: str, replica: Replica, joined: int = 0) -> None:
        """`replica` creates the state which a joining rank receives from this rank. `joined`: number of workers that have
        joined the job so far."""
        super().__init__()
        self._context, self._config, self._home, self._replica = context, config, home, replica
        self._newest = NewestEpoch(lambda: context.uplink.membership.newest, context.waits.notice_s, reconnect_window_s(config))
        self._known: dict[int, Member] = {}
        """All workers of which this rank knows that they are or were members, by number."""
        self._rows = context.rows.section("members", stays=True)
        self._row_step, self._row_members, self.row_exchanged_steps = 0, tuple[int, ...](), context.exchanged_steps
        """Of the row in flight: the step in which it is received, the members that send it, and the job's `exchanged_steps`
        when it was sent."""
        self._received: dict[int, list[float]] | None = None
        """The rows that have arrived, until `settle` uses them."""
        self.confirmed = context.exchanged_steps
        self.admitted = {m.rank for m in context.uplink.epoch.members}
        self._joined = joined
        self._joining: list[Joining] = []
        """The workers that rows have admitted, until their first step begins. It is the same step for all of them."""
        self._reported: list[Handle] = []
        """The reports of these workers to the servers."""
        self._entering: list[Member] = []
        """The workers that take part in the current step for the first time, until this step ends."""
        self._following: list[Joining] = []
        """The workers that begin to follow in their first step, until that step begins."""
        self._caught_up: frozenset[int] = frozenset()
        """The followers that, as far as this rank knows, have the weights under the current plan."""
        self._can_follow = can_follow(context.worker.buckets)
        self._transfer: threading.Thread | None = None
        self._receivers: tuple[str, ...] = ()
        """The thread of the last transfer of the state, and the names of the workers that receive it."""
        self._snapshot = frozenset[int](), frozenset[str]()
        """The workers that have received the last snapshot, and the names of its tensors."""
        self._admits = True
        """True: workers can begin in the exchange that begins now."""
        context.members = self
        context.components.add(self)
        context.components.add(Recut(context))

    @contextlib.contextmanager
    def without_joins(self) -> Iterator[None]:
        self._admits, before = False, self._admits
        try:
            yield
        finally:
            self._admits = before

    def departed(self, wait_s: float) -> list[str]:
        until, worker = time.monotonic() + wait_s, self._context.worker
        while not self._departed() and time.monotonic() < until and worker.error is None:
            time.sleep(0.05)
        return [peer_name(rank) for rank in self._departed()]

    def _departed(self) -> list[int]:
        return self._whole_sites({*self._context.ranks} - {m.rank for m in self._newest.epoch.members})

    def _whole_sites(self, gone: Set[int]) -> list[int]:
        """Returns the workers of all sites that have lost a worker."""
        return [rank for site in group_by_site(self._context.uplink.epoch.members) if gone & {*site} for rank in site]

    def patience(self) -> float:
        """Returns the extra seconds of each wait. The value does not depend on whether the coordinator replies now: it might
        reply again before the wait ends."""
        return continue_wait_s(self._config)

    def end_exchange(self, *, early: bool) -> None:
        self.end_step()

    def end_step(self) -> None:
        self.settle()
        context = self._context
        self._row_step, self.row_exchanged_steps = context.worker.step, context.exchanged_steps
        self._row_members = tuple(m.rank for m in context.uplink.epoch.members)
        self._rows.start(*map(float, chain.from_iterable(self._proposals())))

    def _proposals(self) -> list[EpochProposal]:
        """Returns proposals for the next sites, as far as this rank knows them: first sites that join, then sites that first
        follow results."""
        newest, is_transferring = self._newest.epoch, self._transfer is not None and self._transfer.is_alive()
        self._known |= {member.rank: member for member in newest.members}
        new = group_by_site(m for m in newest.members if m.rank not in self.admitted)
        if self._joining or self._following or is_transferring:
            new = []
        context = self._context
        can_follow = self._can_follow and context.local is not None and not context.site.shards
        follow = can_follow and 4 * context.worker.job.numel > FOLLOW_NBYTES
        fresh = [site for site in new if not self.followers & {*site}]
        caught_up = [site for site in new if {*site} <= self._caught_up]
        return [*propose(self._joined, caught_up if follow else [*caught_up, *fresh], newest.generation),
                *propose(0, fresh if follow else (), newest.generation)]

    @property
    def catching_up(self) -> bool:
        return any(m.rank in self.followers and m.rank not in self.admitted for m in self._newest.epoch.members)

    @property
    def joining_sizes(self) -> set[int]:
        return {one.workers for one in self._joining}

    def new_plan(self) -> None:
        self._following, self._caught_up = [], frozenset()
        self._can_follow = can_follow(self._context.worker.buckets)

    def settle(self) -> None:
        """Reads the row that was sent last: continues without members that have sent none, and admits workers that the row
        names. All ranks call it after the same step."""
        gone, rows = self._missing(), self._received
        if rows is None:
            return
        self._received = None
        if gone:
            self._change(gone, at=self.confirmed)
        self.confirmed = self.row_exchanged_steps
        join, follow = (keep_majority(proposals) for proposals in zip(*map(proposals_in, rows.values()), strict=True))
        self._decide([p for p in join if p.member not in self.admitted],
                     [p for p in follow if p.member not in self.admitted | self.followers])

    def _decide(self, join: Sequence[EpochProposal], follow: Sequence[EpochProposal]) -> None:
        """Admits the sites that the rows name."""
        self.next_plan = None
        if self._joining or self._following:
            return
        context = self._context
        uplink, epoch = context.uplink, context.uplink.epoch
        # Workers that have followed results receive another state than other workers.
        join = [p for p in join if p.member in self.followers] or join
        if join and context.site.shards and self._recut(join):
            return
        if joining := decide(self._joined, self._first(), join):
            self._joining = joining
            self.admitted.update(one.member for one in joining)
            self._reported = [uplink.report_joining(server.id, one.number, one.member, one.generation)
                              for server in epoch.servers for one in joining]
        elif following := decide(0, self._first(), follow):
            self._following = following
            self.followers.update(one.member for one in following)
            plan = plan_for_members(context.plan, epoch.members, (*epoch.members, *map(self._member, following)))
            invitation = self._replica.invitation(context, plan, following[0].first)
            self._start_transfer([m.rank for m in epoch.members], following, (invitation, b""), "state")

    def _recut(self, join: Sequence[EpochProposal]) -> bool:
        """Returns True if the plan has to be cut for the sizes of sites that join, before they are admitted."""
        context, plan = self._context, self._context.plan
        sizes = {p.workers for p in join} | {*map(len, context.groups.sites)}
        with contextlib.suppress(InvalidInput):  # the plan cannot be cut: the sites end with this error when they join
            cut = context.site.shards.cut(plan, context.worker.job, sizes)
            self.next_plan = cut if len(cut.buckets) > len(plan.buckets) else None
        return self.next_plan is not None

    def _first(self) -> int:
        """Returns the first step of the workers that the last rows admit. Under local steps, rows are some steps apart and all
        ranks read them between the same two steps, so the next outer step is late enough."""
        worker = self._context.worker
        return worker.step + worker.begun if worker.plan.steps_locally else self._row_step + LEAD

    def _member(self, one: Joining) -> Member:
        known = self._known | {member.rank: member for member in self._newest.epoch.members}
        return known.get(one.member, Member(one.member, one.site, "", site_world=one.workers))

    def _missing(self) -> list[int]:
        """Waits for the row in flight, if there is one. Returns the members that have not sent it, and the other members of
        their sites."""
        if self._rows.under_way:
            self._received = self._rows.read_by_sender()
        if (received := self._received) is None:
            return []
        return self._whole_sites({rank for rank in self._row_members if rank not in received})

    def continue_without_departed(self) -> None:
        # Only a row that has been sent is completed here. An unsent one belongs to the end of a step, and servers may have
        # switched to another plan.
        if self._rows.sent or self._received is not None:
            self.settle()
        if gone := self._departed():
            self._change(gone, at=self.confirmed)

    @property
    def admits_now(self) -> bool:
        worker = self._context.worker
        return bool(self._joining) and self._admits and not worker.begun and worker.step >= self._joining[0].first

    def begin_exchange(self) -> None:
        """Lets the workers that join take part from the exchange on that begins now, if it is their first one."""
        if self._following and self._admits and self._context.worker.step >= self._following[0].first:
            self._give_snapshot()
        joining, context, worker = self._joining, self._context, self._context.worker
        if not joining or not self._admits or worker.step < joining[0].first:
            return
        self._end_transfer()
        for handle in self._reported:
            context.uplink.await_report(handle)
        context.components.complete(Pending.STEP)  # which averages of the last step were not applied
        if worker.late:
            worker.drain()
        context.rows.send()
        self._joining, self._reported = [], []
        self._joined = worker.now.joined = context.rows.transport.joined = joining[-1].number
        self._await_epoch(joining)
        new = [*map(self._member, joining)]
        # New workers send the next row, so the server must have finished this one. Members that have not sent this row are not
        # members of the new workers' epoch, and the other workers drop them after this exchange.
        epoch, gone = context.uplink.epoch, self._missing()
        before, givers = epoch.members, [m for m in epoch.members if m.rank not in gone]
        epoch = structs.replace(epoch, generation=epoch.generation + len(gone) + len(new), members=(*givers, *new))
        state = self._replica.state_for_joiner(context, plan_for_members(context.plan, before, epoch.members), epoch)
        follow = {one.member for one in joining} <= self.followers
        receivers, given = self._snapshot
        if follow:
            state = self._replica.remaining_state(state, given if {one.member for one in joining} <= receivers else ())
        data = self._replica.encoded(state, apart=context.stepped_apart())
        if worker.plan.steps_locally:
            self._enter(new)
        else:
            self._entering = new
        self._start_transfer([m.rank for m in givers], joining, data, "rest" if follow else "state")
        if worker.plan.overlap != "round":
            self._end_transfer()

    def _give_snapshot(self) -> None:
        """Begins to give workers that follow the state before the exchange that begins now. All members have an equal one."""
        following, self._following = self._following, []
        context = self._context
        if self._transfer is not None:
            self._transfer.join(REQUESTS_S)
        context.components.complete(Pending.STEP)
        context.rows.send()
        state = self._replica.state_for_joiner(context, context.plan, context.uplink.epoch)
        self._snapshot = frozenset(one.member for one in following), frozenset(state)
        self._start_transfer([m.rank for m in context.uplink.epoch.members], following,
                             self._replica.encoded(state, apart=context.stepped_apart()), "snapshot")

    def _await_epoch(self, joining: Sequence[Joining]) -> None:
        """Waits until this rank knows an epoch in which these workers are members."""
        self._context.uplink.membership.await_epoch(max(one.generation for one in joining),
                                                    self._context.waits.notice_s + continue_wait_s(self._config))

    def _start_transfer(self, givers: Sequence[int], joining: Sequence[Joining], state: tuple[bytes, bytes], name: str) -> None:
        self._receivers = tuple(peer_name(one.member) for one in joining)
        transfer = functools.partial(self._transfer_state, givers, joining, state, name, self._transfer)
        self._transfer = threading.Thread(target=transfer, name="commlayer-state", daemon=True)
        self._transfer.start()

    def _end_transfer(self) -> None:
        """Waits for the running transfer. Each of its waits has a deadline."""
        if self._transfer is not None:
            with self._context.groups.waits("transfer of the state", lambda: self._receivers):
                self._transfer.join()
            self._context.worker.check()

    def _transfer_state(
        self, givers: Sequence[int], joining: Sequence[Joining], state: tuple[bytes, bytes], name: str,
        former: threading.Thread | None,
    ) -> None:
        """Gives the joining workers the job's state, with the other members, after the transfer `former`. If one of these
        workers leaves, the other workers start again."""
        context, worker = self._context, self._context.worker

        def act(epoch: Epoch) -> list[int]:
            present = {m.rank for m in epoch.members}
            remaining = [rank for rank in givers if rank in present]
            new = [one.member for one in joining if one.member in present]
            if new and context.id in remaining:
                StateRelay(self._newest, epoch, context.id, self._config.deadline_s, continue_wait_s(self._config),
                           self._replica.most_nbytes, name).give(*state, remaining, new)
            return new

        try:
            if former is not None:
                former.join()
            self._await_epoch(joining)
            new = self._newest.run(act)
            if name == "snapshot" and context.worker is worker:
                self._caught_up |= {*new}
        except Exception as error:
            if {one.member for one in joining} <= self.admitted:
                context.worker.latch(error)
            else:  # no member waits for workers that follow
                context.log_decision(f"could not give its state to {', '.join(peer_name(one.member) for one in joining)}: "
                                     f"{error}")

    @property
    def entering(self) -> bool:
        return bool(self._entering)

    def end_first_step(self) -> None:
        if self._entering:
            self.settle()
            new, self._entering = self._entering, []
            self._enter(new)

    def _enter(self, new: Sequence[Member]) -> None:
        names = ", ".join(self._context.uplink.display_name(peer_name(member.rank)) for member in new)
        self._switch([*self._context.uplink.epoch.members, *new], f"{names} joined", logging.INFO)

    def _change(self, gone: Sequence[int], at: int) -> None:
        """Continues without the members `gone`. These members contribute nothing to training steps after number `at`."""
        context = self._context
        names = ", ".join(context.uplink.display_name(peer_name(rank)) for rank in gone)
        if context.id in gone:
            raise PeerLost("the job continued without this worker: its heartbeats or those of another worker of its home had "
                           "stopped, or it had left",
                           peer=f"coordinator {context.uplink.address}", code="E-EPOCH-ENDED")
        self.steps_at_exit |= dict.fromkeys(gone, at)
        self._switch([m for m in context.uplink.epoch.members if m.rank not in gone],
                     f"{names} left, with {'its' if len(gone) == 1 else 'their'} residuals", logging.WARNING)

    def _switch(self, members: Sequence[Member], what: str, level: int) -> None:
        """Continues with these members. All ranks call it after the same step."""
        try:
            self._continue_with(members, what, level)
        except CommError:
            raise
        except Exception as error:  # some parts have the new members, others do not
            self._context.worker.latch(error)
            raise

    def _continue_with(self, members: Sequence[Member], what: str, level: int) -> None:
        context, former = self._context, self._context.uplink.epoch
        begin, changes = time.monotonic(), len({m.rank for m in former.members} ^ {m.rank for m in members})
        epoch = structs.replace(former, generation=former.generation + changes, members=tuple(members))
        context.groups = new_world(context.groups, context.rows, self._config, self._home, epoch, context.id)
        context.terms.basis = context.terms.price = None
        context.plan = context.worker.plan = plan_for_members(context.plan, former.members, members)
        context.uplink.switch_epoch(epoch)
        context.note_plan("members")
        context.components.new_members()
        context.log_decision(f"{what}; continuing with {len(members)} workers after {time.monotonic() - begin:.2g} s, as rank "
                             f"{context.rank}", event_level=level)


def can_follow(buckets: Iterable[WorkerBucket]) -> bool:
    """Returns True if a worker that has encoded nothing can decode the results of these buckets; all ranks return the same. The
    worker needs no module buffers."""
    return all(bucket.buffer or (bucket.served and len(bucket.codec.rounds) == 1 and not shares_state(bucket.codec))
               for bucket in buckets)


def proposals_in(row: Sequence[float]) -> tuple[list[EpochProposal], list[EpochProposal]]:
    """Returns the valid proposals in a row: those of sites that join, and those of sites that follow."""
    if not all(map(math.isfinite, row)):
        return [], []
    proposals = [EpochProposal(*map(int, row[at : at + PROPOSAL_NUMBERS])) for at in range(0, len(row), PROPOSAL_NUMBERS)]
    join, follow = ([p for p in each if p.workers > 0 and 0 <= p.member <= SERVER_BASE - p.workers]
                    for each in (proposals[:MOST_AT_ONCE], proposals[MOST_AT_ONCE:]))
    return join, follow


def new_world(former: Groups, rows: StepRows, config: Config, home: str, epoch: Epoch, own: int) -> Groups:
    """Creates torch.distributed's process groups for the members of the epoch `epoch`. The groups inside this site stay. `own`:
    this member's initial rank."""
    ids = [m.rank for m in epoch.members]
    former.close(nodes=False)
    kv = KvClient(config.join, config, home, epoch.generation)
    site_process_group.change_members(kv, ids, ids.index(own), epoch.generation)
    process_groups.reset_counts()
    sites = [[ids.index(rank) for rank in site] for site in group_by_site(epoch.members)]
    groups = Groups(sites, config.deadline_s, former.device, patience_s=continue_wait_s(config), former=former)
    rows.change(groups.members, ids)
    return groups
