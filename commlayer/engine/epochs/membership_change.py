"""Continues a job with the remaining workers, and with new ones, when members leave, die or join in the middle of a step.

The coordinator defines a new epoch with the remaining members (epoch_change.py). Each rank receives it while it waits for
others. Members then exchange votes to find the step that all of them repeat.

If one member has completed a step, all of them will: servers push results, and keep them for members that lack them. A member
might receive such a result while it waits for votes. It must then continue, because the others might wait for it after that
step, in a collective of the script. So when all votes name one step, each member sends a second, binding vote: it stays in the
step, or has completed it.

In the end all members are in one step that none has completed. That step is abandoned: codecs roll back what they encoded,
servers what they summed. A new Worker is created for the new epoch, as for another plan (plan_switch.py). It inherits the
residuals, and encodes the same gradients again, which are still in the script's `.grad`.

A joining worker only reports that it is ready. It receives its state (replica.py) before all members switch to the epoch, so
its first backward pass is in the repeated step. To hold all members in one step, the first member of the epoch withholds its
part of a step (step_loop.py, local_steps.py).

Joining is paused (`no_joins`) while local steps are exchanged early, as for a save or a change of plans; then a joining
worker waits for the next scheduled exchange (replica.py). If members are lost meanwhile, the others must repeat an exchange to
which the joining worker has not contributed. They turn it away, and then switch to the epoch without it.

If another member dies during all this, the coordinator defines another epoch, and all members restart with it. An epoch takes
effect only when all of its members have reported that they are ready for it. No step completes without all of them.
agreement.py decides which step they repeat.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from commlayer import records
from commlayer.cluster.calls.site_client import KvClient
from commlayer.cluster.membership.epoch_change import EpochChange, wire_generation
from commlayer.cluster.processes import process_groups, site_process_group
from commlayer.cluster.processes.collectives import Groups
from commlayer.cluster.processes.rows import StepRows
from commlayer.cluster.servers.worker_client import WorkerClient
from commlayer.config import Config, judged_s, reconnect_window_s
from commlayer.engine.components import EpochChanged
from commlayer.engine.epochs import agreement
from commlayer.engine.epochs.agreement import AWAY, AgreementOutcome, Claims, Vote, VoterState, new_in
from commlayer.engine.epochs.epoch_messages import EpochMessages, NewerEpoch, never
from commlayer.engine.epochs.state_relay import StateGiver, StateRelay
from commlayer.engine.hooks.callbacks import weakly
from commlayer.engine.job.fixed_members import FixedMembers
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.sync.sync_modes import Forbids
from commlayer.engine.worker.worker import Worker
from commlayer.errors import CommError
from commlayer.records import Epoch, Plan, plan_of
from commlayer.transport.protocol import peer_name


class MembershipChange(FixedMembers):
    """Carries out changes of members on one rank. The heartbeat thread calls `offer`; the thread that waits for a step calls
    everything else."""

    elastic = True

    def __init__(self, context: DistributedJob, config: Config, home: str, replica: StateGiver) -> None:
        """`replica` creates the state which a joining rank receives from this rank."""
        super().__init__()
        self._context, self._config, self._home, self._replica = context, config, home, replica
        self._messages = EpochMessages(context.uplink.epoch, context.waits.notice_s, reconnect_window_s(config))
        self._voter = VoterState()
        self._agreed: tuple[Epoch, list[Vote]] | None = None
        self._admits = True
        """True: new members can join during the current operation."""
        context.members = self
        context.components.add(self)
        context.uplink.subscribe_epochs(weakly(self.offer))

    @contextlib.contextmanager
    def no_joins(self) -> Iterator[None]:
        self._admits, before = False, self._admits
        try:
            yield
        finally:
            self._admits = before

    def offer(self, epoch: Epoch) -> None:
        self._messages.newest = epoch
        self._context.worker.now.wake()

    def departed(self, wait_s: float) -> list[str]:
        until, worker = time.monotonic() + wait_s, self._context.worker
        while not self._departed() and time.monotonic() < until and worker.error is None:
            time.sleep(0.05)
        return [peer_name(rank) for rank in self._departed()]

    def patience(self) -> float:
        """Returns the extra seconds of each wait. The value does not depend on whether the coordinator replies now: it might
        reply again before the wait ends."""
        return judged_s(self._config)

    def check_interrupts(self, complete: Callable[[], bool]) -> None:
        """Raises EpochChanged if the remaining members, and new ones, must repeat the step."""
        worker = self._context.worker
        if agreement.calls(self._voter, worker.step, self._epoch, self._newest, self._finished(), lets_in=self._admits):
            # results of collectives are not kept for members that lack them
            served = all(bucket.served for bucket in worker.plan.buckets)
            if self._must_repeat(worker, complete if served else never):
                raise EpochChanged

    def invites(self) -> bool:
        return self._admits and bool(self._new()) and self._newest.members[0].rank == self._context.id

    def between(self, plan: Plan | None = None) -> None:
        if self.departed(0.0):
            self._context.worker.roll_back()
            with self.no_joins():
                self.enter_epoch(plan)
                self._context.components.align()

    def enter_epoch(self, plan: Plan | None = None) -> None:
        old = self._context.worker

        def enter(_newest: Epoch) -> None:
            if self._agreed is None and not self._must_repeat(old):
                raise CommError("other members have completed the step that this rank abandoned", step=old.step)
            agreed, self._agreed = self._agreed, None
            assert agreed is not None
            self._enter(old, plan or old.plan, *agreed)

        try:
            self._messages.in_newest_epoch(enter)
        except Exception as error:
            old.now.error = error
            raise

    @property
    def _epoch(self) -> Epoch:
        return self._context.uplink.epoch

    @property
    def _newest(self) -> Epoch:
        return self._messages.newest

    def _departed(self) -> list[int]:
        return agreement.departed_from(self._epoch, self._newest)

    def _new(self) -> list[int]:
        return new_in(self._newest, self._epoch)

    def _finished(self) -> Iterator[int]:
        """Yields, for each member that has left or died, the number of exchanges that it completed; -1 if it did not announce
        its leave."""
        return (self._context.uplink.finished(member) for member in self._departed())

    def _must_repeat(self, worker: Worker, complete: Callable[[], bool] = never) -> bool:
        """Votes until all members are in one step. Returns True if no member has completed this step, so that all members
        repeat it in the epoch `_agreed`.

        Returns False if some member has completed this step, because this rank then will, too; or if `complete` reports that
        this rank has all results.
        """
        # Under local steps, slow members arrive later.
        until = time.monotonic() + self._config.deadline_s * worker.plan.local_steps + self.patience()
        outcome = AgreementOutcome.APART
        while outcome is AgreementOutcome.APART:
            outcome = self._messages.in_newest_epoch(partial(self._vote, worker, until, complete))
        return outcome is AgreementOutcome.TOGETHER

    def _vote(self, worker: Worker, until: float, complete: Callable[[], bool], epoch: Epoch) -> AgreementOutcome:
        """Runs one round of votes."""
        mine, voters = Vote(worker.step), agreement.staying(self._epoch, epoch)
        # Other members might need as long as an outer step before they vote.
        limit_s = self._config.deadline_s * worker.plan.local_steps

        def exchange(claims: Claims) -> list[Vote]:
            return self._messages.exchange_votes(epoch, claims.what, self._context.id, claims.vote, until, among=voters,
                                                 complete=complete if claims.ends else never, limit_s=limit_s)

        votes = exchange(agreement.first(self._voter, epoch, mine))
        self._voter, second = agreement.second(self._voter, epoch, mine, votes, complete=complete())
        confirmed = exchange(second) if second is not None else []
        self._voter, outcome = agreement.outcome(self._voter, epoch, worker.step, votes, confirmed, self._finished())
        if outcome is AgreementOutcome.TOGETHER:
            if not self._admits and new_in(epoch, self._epoch):
                self._send_away(epoch)
            self._agreed = epoch, votes
        return outcome

    def _send_away(self, epoch: Epoch) -> None:
        """Turns joining workers away and waits for the epoch without them. They leave, or are declared dead when they send no
        heartbeats."""
        for name in ("ready", "left"):  # a joining worker never sends the second one, so this ends with a newer epoch
            self._exchange_votes(epoch, name, AWAY, time.monotonic() + self._patience_s)

    @property
    def _patience_s(self) -> float:
        """Returns the longest wait for other members, in seconds. It includes time for the coordinator to decide who is lost:
        if one member fails during the wait, the others can still continue."""
        return self._config.deadline_s + judged_s(self._config)

    def _exchange_votes(self, epoch: Epoch, what: str, vote: Vote, until: float) -> list[Vote]:
        return self._messages.exchange_votes(epoch, what, self._context.id, vote, until, limit_s=self._config.deadline_s)

    def _enter(self, old: Worker, under: Plan, epoch: Epoch, votes: Sequence[Vote]) -> None:
        context = self._context
        if old.intact is False:
            raise CommError("a codec was still encoding in the step that other members abandoned, so its residual is "
                            "unknown and this rank cannot continue",
                            step=old.step)
        begin, ids, former = time.monotonic(), [m.rank for m in epoch.members], self._epoch
        place, new, old_places = (
            ids.index(context.id), new_in(epoch, former), {m.rank: place for place, m in enumerate(former.members)})
        plan = plan_of(under, [old_places[rank] for rank in ids if rank in old_places], len(new))
        generation = wire_generation(epoch)
        change = EpochChange(epoch, old.step, old.pending_rollbacks(), records.encode(plan))
        for server in agreement.servers_to_notify(context.id, former, epoch):
            self._send(context.uplink, server.id, change, generation)
        mine = votes[place]
        self._exchange_votes(epoch, "ready", mine, begin + self._patience_s)
        if new:
            relay = StateRelay(self._messages, epoch, context.id, mine, self._config.deadline_s, judged_s(self._config),
                               self._replica.most_nbytes)
            if relay.giver == context.id:
                relay.give(self._replica.given(context, plan))
            else:
                relay.watch()
        # From here on no other process is involved, so nothing can fail.
        self.steps_at_exit |= {rank: context.carried for rank in old_places if rank not in ids}
        context.groups = new_world(context.groups, context.rows, self._config, self._home, epoch, context.id)
        context.terms.basis = context.terms.price = None
        new_worker = context.worker_for(plan, old.job, old.device, generation)
        context.hand_on(old, new_worker)
        context.uplink.switch_epoch(epoch)
        context.follow(new_worker)
        old.close()
        old.forget_states()
        context.uplink.transport.end(generation)
        context.note_plan("members")
        self._voter = self._voter.entered()
        context.components.new_members()
        self._say(former, epoch, time.monotonic() - begin)

    def _send(self, uplink: WorkerClient, server: int, change: EpochChange, generation: int) -> None:
        """Sends the epoch change to a server. Servers accept only the coordinator's newest epoch, which they might receive
        before this rank does."""
        try:
            uplink.send_epoch(server, change, generation)
        except CommError:
            if not self._messages.is_outdated(change.epoch):
                raise
            raise NewerEpoch from None

    def _say(self, former: Epoch, epoch: Epoch, took_s: float) -> None:
        context, current = self._context, {m.rank for m in epoch.members}
        gone = [context.uplink.display_name(peer_name(m.rank)) for m in former.members if m.rank not in current]
        joined = [context.uplink.display_name(peer_name(rank)) for rank in new_in(epoch, former)]
        parts = [f"{', '.join(gone)} left, with {'its' if len(gone) == 1 else 'their'} residuals"] if gone else []
        parts += [f"{', '.join(joined)} joined"] if joined else []
        parts = parts or ["the worker that was joining left"]
        context.say(f"{'; '.join(parts)}; continuing with {len(epoch.members)} workers after {took_s:.2g} s, as rank "
                        f"{context.rank}", event_level=logging.WARNING if gone else logging.INFO)


def new_world(former: Groups, rows: StepRows, config: Config, home: str, epoch: Epoch, own: int) -> Groups:
    """Creates torch.distributed's process groups for the members of the epoch `epoch`. `own`: this member's initial rank."""
    ids = [m.rank for m in epoch.members]
    former.close()
    site_process_group.change_members(KvClient(config.join, config, home), ids, ids.index(own), epoch.generation)
    process_groups.reset_counts()
    groups = Groups(1, config.deadline_s, former.device)
    rows.regroup(groups.members)
    return groups


def unfit(plan: Plan) -> str:
    """Returns why workers cannot leave under this plan; "" if they can.

    A repeated exchange starts from its inputs, so no part of it can be applied before it is complete.
    """
    what = "averages that are applied one step late" if any(b.stale for b in plan.buckets) else \
        f"{plan.fragments} fragments" if plan.fragments > 1 else "sync='forward'" if plan.overlap == "forward" else \
        f"{plan.ranks_per_node} ranks per node" if plan.ranks_per_node > 1 else ""
    return what and (f"has {what}, but workers of this job can leave (min_workers), so an exchange must be complete before "
                     "any part of it is applied: make the plan without this feature, or set min_workers=0")


def forbidding(others: Forbids) -> Forbids:
    """Returns a function from a sync mode to the reason why a job whose workers can leave cannot use the mode; "" if it can.
    `others`: the job's other reasons."""
    why = "workers of this job can leave (min_workers), and results that are applied bucket by bucket cannot be repeated"
    return lambda mode: why if mode == "forward" else others(mode)
