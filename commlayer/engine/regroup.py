"""Continues a job with the remaining workers, and with new ones, when members leave, die or join in the middle of a step.

The coordinator defines a new epoch with the remaining members (cluster/epoch_change.py; the code calls an epoch a view). Each
rank receives it while it waits for others. Members then exchange messages to find the step that all of them repeat.

If one member has completed a step, all of them will: servers push results, and keep them for members that lack them. A member
might receive such a result while it waits for messages. It must then continue, because the others might wait for it after that
step, in a collective of the script. So when all messages name one step, each member sends a binding confirmation: it stays in
the step, or has completed it.

In the end all members are in one step that none has completed. That step is abandoned: codecs roll back what they encoded,
servers what they summed. A new Worker is created for the new epoch, as for another plan (switch.py). It inherits the residuals,
and encodes the same gradients again, which are still in the script's `.grad`.

A joining worker only reports that it is ready. It receives its state (replica.py) before all members switch to the epoch, so
its first backward pass is in the repeated step. To hold all members in one step, the first member of the epoch withholds its
part of a step (step_loop.py, local_steps.py).

Joining is paused (`closed_door`) while local steps are exchanged early, as for a save or a change of plans; then a joining
worker waits for the next scheduled exchange (replica.py). If members are lost meanwhile, the others must repeat an exchange to
which the joining worker has not contributed. They turn it away, and then switch to the epoch without it.

If another member dies during all this, the coordinator defines another epoch, and all members restart with it. An epoch takes
effect only when all of its members have reported that they are ready for it. No step completes without all of them.
agreement.py decides which step they repeat.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from commlayer import records
from commlayer.cluster import process_groups, site_process_group
from commlayer.cluster.collectives import Groups, RowChannel
from commlayer.cluster.epoch_change import EpochChange, wire_generation
from commlayer.cluster.messages import ANY, StoreKey, unpack
from commlayer.cluster.site_client import KvClient
from commlayer.cluster.site_process_group import PART_NBYTES, PARTS_IN_FLIGHT
from commlayer.cluster.uplink import Uplink
from commlayer.config import Config, judged_s, reconnect_window_s
from commlayer.engine import agreement
from commlayer.engine.agreement import AWAY, AgreementOutcome, Claims, Vote, VoterState, new_in
from commlayer.engine.connection import DistributedJob, MemberChanges
from commlayer.engine.hooks import weakly
from commlayer.engine.step import EpochChanged
from commlayer.engine.sync_modes import Forbids
from commlayer.engine.worker import Worker
from commlayer.errors import CommError, DeadlineExceeded, PeerLost, check_nbytes
from commlayer.records import Plan, View, plan_of
from commlayer.transport.protocol import peer_name

T = TypeVar("T")

# ---- messages between workers when the members of a job change, through the store of their rendezvous

LOOK_S = 0.5
"""Seconds between two checks by a waiting member whether there is a newer epoch, or all results of its step have arrived."""


class NewerEpoch(Exception):
    """Error: the coordinator has defined a newer epoch than the one to which this rank is switching."""


def never() -> bool:
    return False


class EpochMessages:
    """Sends and receives one rank's messages to other members during an epoch change, through the store of the rendezvous. The
    heartbeat thread sets `newest`.

    A message stays in the store, so late readers receive it, too. A wait ends as soon as there is a newer epoch. After that, no
    message of this epoch is accepted. So either all members of both epochs have read all messages that they wait for, or none
    has.
    """

    def __init__(self, view: View, notice_s: float, away_s: float = 0.0) -> None:
        """`notice_s`: seconds to wait for a new epoch from the coordinator. `away_s`: seconds for which requests to an
        unresponsive coordinator are repeated."""
        self.newest, self._notice_s, self._away_s = view, notice_s, away_s
        self._said: set[StoreKey] = set()
        """Keys of the messages that this rank has sent. Their content does not change."""

    def tell(self, view: View, what: str, mine: int, word: Vote, until: float, *, among: Sequence[int] = (),
             complete: Callable[[], bool] = never, limit_s: float = 0.0) -> list[Vote]:
        """Sends a message, and returns the messages of the members `among` (empty: all members of the epoch), in the epoch's
        order.

        Returns an empty list if `complete` first reports that all results of the step have arrived. Raises NewerEpoch if a
        newer epoch starts first. `limit_s`: how long the others might wait for this rank; the coordinator receives this limit.
        The wait ends at `until`, which includes time for the coordinator to decide who is lost.
        """
        ranks = [m.rank for m in view.members if not among or m.rank in among]
        own = agreement.key_of(view, what, mine)
        put = [(own, msgspec.msgpack.encode(word))] if own not in self._said else []
        rows = self.read(view, [agreement.key_of(view, what, rank) for rank in ranks], until, step=word.step, put=put,
                         complete=complete, waits=(mine, limit_s))
        self._said.add(own)
        return [Vote(*unpack(row, tuple[int, float], peer_name(rank), "a vote"))
                for row, rank in zip(rows, ranks, strict=bool(rows))]

    def read(self, view: View, want: Sequence[StoreKey], until: float, *, step: int,
             put: Sequence[tuple[StoreKey, bytes]] = (), complete: Callable[[], bool] = never,
             waits: tuple[int, float] = (ANY, 0.0)) -> list[bytes]:
        """Waits for values in the store and returns them. `want`: their keys. `put`: keys and values to write first. `waits`:
        the waiting rank, and how long others might wait for it."""
        give_up, begin = math.inf, time.monotonic()
        while True:
            try:
                newer = self.newest is not view
                rows = site_process_group.kv_client().request(min(until, time.monotonic() + LOOK_S), put=put, want=want,
                                                              wait=not newer, view=view.generation, rank=waits[0],
                                                              limit_s=waits[1], since=begin).values
            except CommError as error:
                now = time.monotonic()
                give_up = min(give_up, now + self._away_s)
                # The request is sent even if there is a newer epoch, because only a reply shows whether other members have
                # found all messages of this one.
                if _unanswered(error) and now < min(until, give_up):
                    continue
                if self.newest is view and not self.hears_of(view):
                    raise
                raise NewerEpoch from None
            put, give_up = (), math.inf
            if None not in rows:
                return [row for row in rows if row is not None]
            if complete():
                return []
            if newer:
                raise NewerEpoch
            if time.monotonic() >= until:
                late = [peer_name(rank) for (_, rank), row in zip(want, rows, strict=True) if row is None]
                raise DeadlineExceeded("has not reached the step in which the members change before the deadline",
                                       peer=", ".join(late), step=step)

    def put(self, view: View, rows: Sequence[tuple[StoreKey, bytes]], until: float, *, drop: Sequence[StoreKey] = ()) -> None:
        """Writes values into the store, and deletes those with the keys `drop`."""
        try:
            site_process_group.kv_client().request(until, put=rows, drop=drop, view=view.generation)
        except CommError:
            if not self.hears_of(view):
                raise
            raise NewerEpoch from None

    def hears_of(self, view: View) -> bool:
        """Returns True if a newer epoch than `view` arrives soon. The coordinator defines one when it declares a member dead.
        """
        until = time.monotonic() + self._notice_s
        while self.newest is view and time.monotonic() < until:
            time.sleep(0.05)
        return self.newest is not view


def _unanswered(error: CommError) -> bool:
    """Returns True if an error means that the coordinator did not reply. It might be restarting; its store then still contains
    all messages."""
    return isinstance(error, (PeerLost, DeadlineExceeded)) and error.peer.startswith("coordinator ")


# ---- sends a training worker's state to joining workers, in parts, through the store of the rendezvous
#
# Homes have no other connection to each other, and the store is small, so a window of parts is sent at a time. After each
# window all members send a report, even if they neither send nor receive the state. So no member waits longer than one window's
# deadline for a slow home. If a member dies meanwhile, all receive a newer epoch.

WINDOW = 64
"""Number of parts of the state that are in the store at a time; 10 MB in total."""


class StateRelay:
    """Sends the state for joining workers through the store, for one epoch. Each member calls `give`, `take` or `watch` once.
    """

    def __init__(self, words: EpochMessages, view: View, mine: int, word: Vote, limit_s: float, judged_s: float,
                 most_nbytes: int) -> None:
        """`limit_s`: longest wait for other members, in seconds. `judged_s`: further seconds in which the coordinator decides
        whether missing members are lost. `most_nbytes`: largest state that this rank receives or waits for."""
        self._most_nbytes = most_nbytes
        self._words, self._view, self._mine, self._word = words, view, mine, word
        self._limit_s, self._deadline_s = limit_s, limit_s + judged_s
        self.giver = view.members[0].rank
        """Rank of the member that sends the state: the oldest one, since joining workers come last in an epoch."""

    def give(self, data: bytes) -> None:
        windows = self._windows(len(data))
        self._words.put(self._view, [(self._size, msgspec.msgpack.encode(len(data)))], self._until())
        for window in range(windows):
            parts = self._parts(window, len(data))
            keys = [self._key(part) for part in parts]
            try:
                for part, key in zip(parts, keys, strict=True):
                    self._words.put(self._view, [(key, data[part * PART_NBYTES : (part + 1) * PART_NBYTES])], self._until())
                self._meet(window)
            finally:
                self._words.put(self._view, [], self._until(), drop=keys)
        self._meet(windows)

    def take(self, enter: Callable[[bytes], T]) -> T:
        """Receives the complete state and calls `enter` with it, before the other members are told of its arrival. Returns the
        result of `enter`."""
        nbytes = self._nbytes()
        windows, data = self._windows(nbytes), bytearray()
        for window in range(windows):
            parts = self._parts(window, nbytes)
            for first in range(0, len(parts), PARTS_IN_FLIGHT):
                want = [self._key(part) for part in parts[first : first + PARTS_IN_FLIGHT]]
                for row in self._read(want):
                    data += row
                self._check(len(data), nbytes)
            self._meet(window)
        entered = enter(bytes(data))
        self._meet(windows)
        return entered

    def watch(self) -> None:
        for window in range(self._windows(self._nbytes()) + 1):
            self._meet(window)

    # ----

    def _nbytes(self) -> int:
        (row,) = self._read([self._size])
        return self._check(unpack(row, int, peer_name(self.giver), "a size"), self._most_nbytes)

    def _check(self, nbytes: int, most_nbytes: int) -> int:
        return check_nbytes(nbytes, most_nbytes, "the state for a joining worker", peer_name(self.giver))

    def _read(self, want: Sequence[StoreKey]) -> list[bytes]:
        return self._words.read(self._view, want, self._until(), step=self._word.step, waits=(self._mine, self._limit_s))

    @property
    def _size(self) -> StoreKey:
        return agreement.key_of(self._view, "state", self.giver)

    def _key(self, part: int) -> StoreKey:
        return agreement.key_of(self._view, f"part{part}", self.giver)

    def _windows(self, nbytes: int) -> int:
        return -(-nbytes // (WINDOW * PART_NBYTES))

    def _parts(self, window: int, nbytes: int) -> range:
        return range(window * WINDOW, min((window + 1) * WINDOW, -(-nbytes // PART_NBYTES)))

    def _meet(self, window: int) -> None:
        self._words.tell(self._view, f"window{window}", self._mine, self._word, self._until(), limit_s=self._limit_s)

    def _until(self) -> float:
        return time.monotonic() + self._deadline_s


class StateGiver(Protocol):
    """Interface of the object that creates the state for joining ranks; `replica.py` implements it."""

    @property
    def most_nbytes(self) -> int: ...

    def given(self, context: DistributedJob, plan: Plan) -> bytes: ...


class MembershipChange(MemberChanges):
    """Carries out changes of members on one rank. The heartbeat thread calls `offer`; the thread that waits for a step calls
    everything else."""

    elastic = True

    def __init__(self, context: DistributedJob, config: Config, home: str, replica: StateGiver) -> None:
        """`replica` creates the state which a joining rank receives from this rank."""
        super().__init__()
        self._context, self._config, self._home, self._replica = context, config, home, replica
        self._words = EpochMessages(context.uplink.view, context.waits.notice_s, reconnect_window_s(config))
        self._stands = VoterState()
        self._agreed: tuple[View, list[Vote]] | None = None
        self._admits = True
        """True: new members can join during the current operation."""
        context.uplink.subscribe_epochs(weakly(self.offer))

    @contextlib.contextmanager
    def closed_door(self) -> Iterator[None]:
        self._admits, before = False, self._admits
        try:
            yield
        finally:
            self._admits = before

    def offer(self, view: View) -> None:
        self._words.newest = view
        self._context.worker.now.wake()

    def pending(self, wait_s: float) -> bool:
        until, worker = time.monotonic() + wait_s, self._context.worker
        while not self._gone() and time.monotonic() < until and worker.error is None:
            time.sleep(0.05)
        return bool(self._gone())

    def patience(self) -> float:
        """Returns the extra seconds of each wait. The value does not depend on whether the coordinator replies now: it might
        reply again before the wait ends."""
        return judged_s(self._config)

    def gone(self) -> list[str]:
        return [peer_name(rank) for rank in self._gone()]

    def unfit(self, plan: Plan) -> str:
        return unfit(plan)

    def check_interrupts(self, worker: Worker, complete: Callable[[], bool]) -> None:
        if agreement.calls(self._stands, worker.step, self._view, self._newest, self._finished(), lets_in=self._admits):
            # results of collectives are not kept for members that lack them
            served = all(bucket.served for bucket in worker.plan.buckets)
            self._agree(worker, complete if served else never)

    def invites(self) -> bool:
        return self._admits and bool(self._new()) and self._newest.members[0].rank == self._context.id

    def between(self, plan: Plan | None = None) -> None:
        if self.pending(0.0):
            self._context.worker.roll_back()
            with self.closed_door():
                self.go(plan)
                for listener in self._context.listeners:
                    listener.after_between()

    def go(self, plan: Plan | None = None) -> None:
        old = self._context.worker
        try:
            while True:
                try:
                    agreed, self._agreed = self._agreed, None
                    if agreed is None:
                        self._agree(old)
                        raise CommError("other members have completed the step that this rank abandoned", step=old.step)
                    self._go_over(old, plan or old.plan, agreed)
                    return
                except (NewerEpoch, EpochChanged):
                    continue
        except Exception as error:
            old.now.error = error
            raise

    # ---- agreement on the step to repeat

    @property
    def _view(self) -> View:
        return self._context.uplink.view

    @property
    def _newest(self) -> View:
        return self._words.newest

    def _gone(self) -> list[int]:
        return agreement.gone_from(self._view, self._newest)

    def _new(self) -> list[int]:
        return new_in(self._newest, self._view)

    def _finished(self) -> Iterator[int]:
        """Yields, for each member that has left or died, the number of exchanges that it completed; -1 if it did not announce
        its leave."""
        return (self._context.uplink.finished(member) for member in self._gone())

    def _agree(self, worker: Worker, complete: Callable[[], bool] = never) -> None:
        """Finds the step that all members repeat. Raises EpochChanged if no member has completed the step in which all members
        are.

        Returns without an error if some member has completed this step, because this rank then will, too; or if `complete`
        reports that this rank has all results.
        """
        # Under local steps, slow members arrive later.
        local = worker.plan.local_steps
        until = time.monotonic() + self._config.deadline_s * local + self.patience()
        mine = Vote(worker.step, worker.units.weight)
        while True:
            view = self._newest
            stay = agreement.staying(self._view, view)
            try:
                words = self._hear(view, agreement.first(self._stands, view, mine), until, stay, complete, local)
                self._stands, vote = agreement.second(self._stands, view, mine, words, complete=complete())
                confirmed = self._hear(view, vote, until, stay, complete, local) if vote is not None else []
            except NewerEpoch:
                continue
            self._stands, outcome = agreement.outcome(self._stands, view, worker.step, words, confirmed, self._finished())
            if outcome is AgreementOutcome.WHOLE:
                return
            if outcome is AgreementOutcome.TOGETHER and not self._admits and new_in(view, self._view):
                self._send_away(view)
            elif outcome is AgreementOutcome.TOGETHER:
                self._agreed = view, words
                raise EpochChanged

    def _send_away(self, view: View) -> None:
        """Turns joining workers away and waits for the epoch without them. They leave, or are declared dead when they send no
        heartbeats."""
        with contextlib.suppress(NewerEpoch):
            for name in ("ready", "left"):  # a joining worker never sends the second one, so this waits for the newer epoch
                self._tell(view, name, AWAY, time.monotonic() + self._patience_s)

    @property
    def _patience_s(self) -> float:
        """Returns the longest wait for other members, in seconds. It includes time for the coordinator to decide who is lost:
        if one member fails during the wait, the others can still continue."""
        return self._config.deadline_s + judged_s(self._config)

    def _hear(self, view: View, says: Claims, until: float, among: Sequence[int], complete: Callable[[], bool], local_steps: int
              ) -> list[Vote]:
        """Sends a vote and returns the votes of the members `among`. `local_steps`: steps per exchange; the other members might
        need as long as an outer step before they vote."""
        limit_s = self._config.deadline_s * local_steps
        return self._words.tell(view, says.what, self._context.id, says.word, until, among=among,
                                complete=complete if says.ends else never, limit_s=limit_s)

    def _tell(self, view: View, what: str, word: Vote, until: float) -> list[Vote]:
        return self._words.tell(view, what, self._context.id, word, until, limit_s=self._config.deadline_s)

    # ---- to the new epoch

    def _go_over(self, old: Worker, under: Plan, agreed: tuple[View, list[Vote]]) -> None:
        job_context, (view, words) = self._context, agreed
        if old.intact is False:
            raise CommError("a codec was still encoding in the step that other members abandoned, so its residual is "
                            "unknown and this rank cannot continue",
                            step=old.step)
        begin, ids, former = time.monotonic(), [m.rank for m in view.members], self._view
        place, new, old_places = (
            ids.index(job_context.id), new_in(view, former), {m.rank: place for place, m in enumerate(former.members)})
        plan = plan_of(under, [old_places[rank] for rank in ids if rank in old_places], len(new))
        generation = wire_generation(view)
        change = EpochChange(view, old.step, old.pending_rollbacks(), records.encode(plan))
        for server in agreement.told_by(job_context.id, former, view):
            self._send(job_context.uplink, server.id, change, generation)
        mine = words[place]
        words = self._tell(view, "ready", mine, begin + self._patience_s)
        if new:
            relay = StateRelay(self._words, view, job_context.id, mine, self._config.deadline_s, judged_s(self._config),
                               self._replica.most_nbytes)
            if relay.giver == job_context.id:
                relay.give(self._replica.given(job_context, plan))
            else:
                relay.watch()
        # From here on no other process is involved, so nothing can fail.
        self.parted |= {rank: job_context.carried for rank in old_places if rank not in ids}
        job_context.groups = new_world(job_context.groups, job_context.rows, self._config, self._home, view, job_context.id)
        job_context.terms.basis = job_context.terms.price = None
        new_worker = job_context.worker_for(plan, old.job, old.device, generation)
        job_context.hand_on(old, new_worker)
        new_worker.units.regroup(sum(word.weight for word in words))
        job_context.uplink.switch_view(view)
        job_context.follow(new_worker)
        old.close()
        old.forget_states()
        job_context.uplink.transport.end(generation)
        job_context.note_plan("members")
        self._stands = self._stands.gone_over()
        for listener in job_context.listeners:
            listener.after_regroup()
        self._say(former, view, time.monotonic() - begin)

    def _send(self, uplink: Uplink, server: int, change: EpochChange, generation: int) -> None:
        """Sends the epoch change to a server. Servers accept only the coordinator's newest epoch, which they might receive
        before this rank does."""
        try:
            uplink.send_view(server, change, generation)
        except CommError:
            if not self._words.hears_of(change.view):
                raise
            raise NewerEpoch from None

    def _say(self, former: View, view: View, took_s: float) -> None:
        job_context, current = self._context, {m.rank for m in view.members}
        gone = [job_context.uplink.display_name(peer_name(m.rank)) for m in former.members if m.rank not in current]
        joined = [job_context.uplink.display_name(peer_name(rank)) for rank in new_in(view, former)]
        parts = [f"{', '.join(gone)} left, with {'its' if len(gone) == 1 else 'their'} residuals"] if gone else []
        parts += [f"{', '.join(joined)} joined"] if joined else []
        parts = parts or ["the worker that was joining left"]
        job_context.say(f"{'; '.join(parts)}; continuing with {len(view.members)} workers after {took_s:.2g} s, as rank "
                        f"{job_context.rank}", event_level=logging.WARNING if gone else logging.INFO)


def new_world(former: Groups, rows: RowChannel, config: Config, home: str, view: View, own: int) -> Groups:
    """Creates torch.distributed's process groups for the members of the epoch `view`. `own`: this member's initial rank."""
    ids = [m.rank for m in view.members]
    former.close()
    site_process_group.change_members(KvClient(config.join, config, home), ids, ids.index(own), view.generation)
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
