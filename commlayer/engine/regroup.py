"""Continues with the remaining workers, and with new ones, when members leave, die or join in the middle of a step.

The coordinator makes a view (epoch) of the remaining members (cluster/epoch_change.py). Each rank learns of it where it waits
for others. Members then exchange messages to find the step that all of them repeat.

If one member has completed a step, all of them will: servers push results, and keep them for members that lack them. A member
may receive that result while it waits for messages. It then has to continue, because the others may wait for it after that
step, in a collective of the script. So when all messages name one step, each member confirms for good whether it stays in the
step or has completed it.

In the end all members are in one step that none has completed. That step is abandoned: codecs take back what they coded,
servers what they summed. A new Worker is made for the new view, as for another plan (switch.py). It inherits the residuals, and
codes the same gradients again, which the script still holds.

A joining worker only reports that it is ready. It receives its state (replica.py) before all switch to the view, so its first
backward pass is in that very step. Sums may arrive before messages do, step after step. So the first member of the view holds
back its part of one step (step_loop.py, local_steps.py): all members meet in that step.

Joining is paused (`lets_in`) while local steps are exchanged early, as for a save or a change of plans; then a joining worker
waits for the next scheduled exchange (newcomer.py). If members are lost meanwhile, the others must repeat work in which it has
no part. They send it away, and then switch to the view without it.

If another member dies during all this, the coordinator makes another view, and all start over with it. Nothing is final before
all members of a view have reported that they are ready for it. No step completes without all of them. agreement.py decides
which step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from commlayer import records
from commlayer.cluster import process_groups, site_process_group
from commlayer.cluster.collectives import Groups
from commlayer.cluster.epoch_change import EpochChange, wire_generation
from commlayer.cluster.site_client import KvClient
from commlayer.cluster.uplink import Uplink
from commlayer.config import Config, judged_s, reconnect_window_s
from commlayer.engine import agreement
from commlayer.engine.agreement import AWAY, Found, Says, Standing, Word, new_in
from commlayer.engine.connection import Connection
from commlayer.engine.state_relay import Relay
from commlayer.engine.step import Regroup
from commlayer.engine.view_words import Newer, ViewWords, never
from commlayer.engine.ways import Forbids
from commlayer.engine.worker import Worker
from commlayer.errors import CommError
from commlayer.records import Plan, View, plan_of
from commlayer.transport.protocol import peer_name


class Regrouping:
    """One rank's part. `offer` runs on the heartbeat thread; everything else on the thread that waits for a step."""

    def __init__(self, made: Connection, config: Config, home: str) -> None:
        self._made, self._config, self._home = made, config, home
        assert made.uplink is not None
        self._words = ViewWords(made.uplink.view, made.waits.notice_s, reconnect_window_s(config))
        self._stands = Standing()
        self._agreed: tuple[View, list[Word]] | None = None
        made.uplink.subscribe_epochs(self.offer)

    def offer(self, view: View) -> None:
        self._words.newest = view
        if self._made.worker is not None:
            self._made.worker.now.wake()

    def pending(self, wait_s: float) -> bool:
        until, worker = time.monotonic() + wait_s, self._made.worker
        assert worker is not None
        while not self._gone() and time.monotonic() < until and worker.error is None:
            time.sleep(0.05)
        return bool(self._gone())

    def patience(self) -> float:
        """The same whether or not the coordinator answers right now: it may answer again before then."""
        return judged_s(self._config)

    def gone(self) -> list[str]:
        return [peer_name(rank) for rank in self._gone()]

    def unfit(self, plan: Plan) -> str:
        return unfit(plan)

    def heed(self, worker: Worker, here: Callable[[], bool]) -> None:
        if worker is not self._made.worker:
            return
        if agreement.calls(self._stands, worker.step, self._view, self._newest, self._finished(), lets_in=self._made.lets_in):
            # results of collectives are not kept for members that lack them
            served = all(bucket.served for bucket in worker.plan.buckets)
            self._agree(worker, here if served else never)

    def invites(self) -> bool:
        return self._made.lets_in and bool(self._new()) and self._newest.members[0].rank == self._made.id

    def between(self, plan: Plan | None = None) -> None:
        old = self._made.worker
        assert old is not None
        if self.pending(0.0):
            old.undone()
            with self._made.closed_door():
                self.go(plan)
                for act in self._made.after_between:
                    act()

    def go(self, plan: Plan | None = None) -> None:
        connection = self._made
        old = connection.worker
        assert old is not None
        try:
            while True:
                try:
                    if self._agreed is None:
                        self._agree(old)
                        raise CommError("others have the step whole that was abandoned here", step=old.step)
                    self._go_over(old, plan or old.plan)
                    return
                except (Newer, Regroup):
                    continue
        except Exception as error:
            old.now.error = error
            raise

    # ---- which step

    @property
    def _view(self) -> View:
        assert self._made.uplink is not None
        return self._made.uplink.view

    @property
    def _newest(self) -> View:
        return self._words.newest

    def _gone(self) -> list[int]:
        return agreement.gone_from(self._view, self._newest)

    def _new(self) -> list[int]:
        return new_in(self._newest, self._view)

    def _finished(self) -> Iterator[int]:
        """For each lost member, the number of exchanges that it completed; -1 if it did not leave in order."""
        link = self._made.uplink
        assert link is not None
        return (link.finished(member) for member in self._gone())

    def _agree(self, worker: Worker, here: Callable[[], bool] = never) -> None:
        """Finds the step to repeat. Raises Regroup if no member has completed the step in which all are.

        Returns if some member has completed it, so that this rank will, and when this rank has all results `here`."""
        # Under local steps, slow members arrive later.
        local = worker.plan.local_steps
        until = time.monotonic() + self._config.deadline_s * local + self.patience()
        mine = Word(worker.step, worker.weight)
        while True:
            view = self._newest
            stay = agreement.staying(self._view, view)
            try:
                words = self._hear(view, agreement.first(self._stands, view, mine), until, stay, here, local)
                self._stands, vote = agreement.second(self._stands, view, mine, words, here=here())
                confirmed = self._hear(view, vote, until, stay, here, local) if vote is not None else []
            except Newer:
                continue
            self._stands, outcome = agreement.found(self._stands, view, worker.step, words, confirmed, self._finished())
            if outcome is Found.WHOLE:
                return
            if outcome is Found.TOGETHER and not self._made.lets_in and new_in(view, self._view):
                self._send_away(view)
            elif outcome is Found.TOGETHER:
                self._agreed = view, words
                raise Regroup

    def _send_away(self, view: View) -> None:
        """Sends joining workers away and waits for the view without them. They leave, or are declared dead once silent."""
        with contextlib.suppress(Newer):
            for name in ("ready", "left"):  # they never send the second, so this waits for the newer view
                self._tell(view, name, AWAY, time.monotonic() + self._patience_s)

    @property
    def _patience_s(self) -> float:
        """Includes time for a verdict: if one member fails here, the others can still continue."""
        return self._config.deadline_s + judged_s(self._config)

    def _hear(self, view: View, says: Says, until: float, among: Sequence[int], here: Callable[[], bool], local_steps: int
              ) -> list[Word]:
        """`local_steps`: the others may need as long to get here as for an outer step."""
        limit_s = self._config.deadline_s * local_steps
        return self._words.tell(view, says.what, self._made.id, says.word, until, among=among,
                                here=here if says.ends else never, limit_s=limit_s)

    def _tell(self, view: View, what: str, word: Word, until: float) -> list[Word]:
        return self._words.tell(view, what, self._made.id, word, until, limit_s=self._config.deadline_s)

    # ---- to the new view

    def _go_over(self, old: Worker, under: Plan) -> None:
        made, agreed = self._made, self._agreed
        assert made.uplink is not None
        assert agreed is not None
        (view, words), self._agreed = agreed, None
        if not old.intact:
            raise CommError("a codec is still at work in the step that others left, so what it owes cannot be put right",
                            step=old.step)
        begin, ids, former = time.monotonic(), [m.rank for m in view.members], self._view
        place, new, old_places = (
            ids.index(made.id), new_in(view, former), {m.rank: place for place, m in enumerate(former.members)})
        plan = plan_of(under, [old_places[rank] for rank in ids if rank in old_places], len(new))
        generation = wire_generation(view)
        change = EpochChange(view, old.step, old.unheard(), records.encode(plan))
        for server in agreement.told_by(made.id, former, view):
            self._send(made.uplink, server.id, change, generation)
        mine = words[place]
        words = self._tell(view, "ready", mine, begin + self._patience_s)
        if new:
            relay = Relay(self._words, view, made.id, mine, self._config.deadline_s, judged_s(self._config))
            if relay.giver == made.id:
                relay.give(made.given(plan))
            else:
                relay.watch()
        # From here on no other process is involved, so nothing can fail.
        made.parted |= {rank: made.carried for rank in old_places if rank not in ids}
        new_world(made, self._config, self._home, view)
        made.plan, made.terms.basis, made.terms.price = plan, None, None
        new_worker = made.worker_for(plan, old.job, old.device, generation)
        made.hand_on(old, new_worker)
        new_worker.units.regroup(sum(word.weight for word in words))
        made.uplink.switch_view(view)
        made.follow(new_worker)
        old.close()
        old.forget_states()
        if made.uplink.reconnecting is not None:
            made.uplink.reconnecting.end(generation)
        self._stands = self._stands.gone_over()
        for act in made.after_regroup:
            act()
        self._say(former, view, time.monotonic() - begin)

    def _send(self, uplink: Uplink, server: int, change: EpochChange, generation: int) -> None:
        """Servers accept only the coordinator's newest view, which they may receive before this rank does."""
        try:
            uplink.send_view(server, change, generation)
        except CommError:
            if not self._words.hears_of(change.view):
                raise
            raise Newer from None

    def _say(self, former: View, view: View, took_s: float) -> None:
        made, current = self._made, {m.rank for m in view.members}
        assert made.uplink is not None
        gone = [made.uplink.display_name(peer_name(m.rank)) for m in former.members if m.rank not in current]
        joined = [made.uplink.display_name(peer_name(rank)) for rank in new_in(view, former)]
        parts = [f"{', '.join(who)} {'is' if len(who) == 1 else 'are'} {what}"
                 for who, what in ((gone, "gone"), (joined, "taken in")) if who]
        parts = parts or ["who was to be taken in is gone"]
        lost = f"; what {'it' if len(gone) == 1 else 'they'} still owed is lost" if gone else ""
        made.say(f"{' and '.join(parts)}: {len(view.members)} go on, from the same gradients, {took_s:.1f} s after all "
                 f"had come to this step{lost}; this is rank {made.rank} of {made.world} now")


def new_world(made: Connection, config: Config, home: str, view: View) -> None:
    """Makes the process group of torch.distributed for the members of that view."""
    ids = [m.rank for m in view.members]
    former = made.groups
    assert former is not None
    former.close()
    site_process_group.change_members(KvClient(config.join, config, home), ids, ids.index(made.id), view.generation)
    process_groups.reset_counts()
    made.groups = Groups(1, config.deadline_s, former.device)
    made.rank, made.world = made.groups.rank, made.groups.world
    if made.rows is not None:
        made.rows.regroup(made.groups.members)


def unfit(plan: Plan) -> str:
    """Why workers cannot leave under that plan; "" if they can.

    An exchange is repeated from its inputs, so no part of it may be applied before it is complete."""
    what = "results that are a step late" if any(b.stale for b in plan.buckets) else \
        f"{plan.fragments} fragments" if plan.fragments > 1 else "overlap='forward'" if plan.overlap == "forward" else \
        f"{plan.ranks_per_node} ranks to a node" if plan.ranks_per_node > 1 else ""
    return what and (f"has {what}, and workers may leave this job (min_workers), for which an exchange must be whole before "
                     "anything of it is applied: make it without, or let all stay")


def forbidding(others: Forbids) -> Forbids:
    """The same check, for the choice of a sync mode."""
    why = "workers may leave this job (min_workers), and what comes in bucket by bucket cannot be done again"
    return lambda way: why if way == "forward" else others(way)
