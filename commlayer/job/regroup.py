"""Goes on with those who are left when workers die or leave, in the middle of a step. Knows a connection; no module.

The coordinator makes a view of those who are left (control/regrouping.py). Each hears of it where it waits for others, and they
tell each other in which step that is. Who has a step whole has gone on, and then everybody gets it whole: results are pushed,
and kept for whoever lacks them. Whoever waits for words gets it meanwhile, too: the others may wait for it behind that step, in
a script's own collective. Where all words name one step, each therefore says that it stays in it, or has it whole: that holds.
So all come to stand in one step, which none has whole. That step is abandoned: codecs take
back what they coded, servers what they summed. Then a worker is made for the new view, as for another plan (switch.py): it owes
what the one before owed, and gets the same gradients, which are still the script's.

Whoever dies meanwhile makes another view, and all begin again with that. Nothing is final before all members of a view have
said that they are ready for it, and no step is whole that they have not all taken part in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec import structs

from commlayer import records
from commlayer.config import Config
from commlayer.control.home import Desk
from commlayer.control.uplink import Uplink
from commlayer.errors import CommError, DeadlineExceeded
from commlayer.job.connection import Connection
from commlayer.job.ways import Forbids
from commlayer.records import Plan, View
from commlayer.runtime.step import Regroup
from commlayer.runtime.worker import Worker
from commlayer.transport import home_world, members
from commlayer.transport.groups import Groups
from commlayer.transport.protocol import peer_name
from commlayer.transport.view_change import ViewChange, wire_generation

log = logging.getLogger("commlayer")

LOOK_S = 0.5
"""How often who waits for another's word looks whether there is a newer view, without that one, or all of its step is here."""


class Word(NamedTuple):
    """What a member says where the view changes."""

    step: int
    weight: float
    """Of its gradients in that step."""


class _Newer(Exception):
    """There is a newer view than the one that is gone over to."""


def _never() -> bool:
    return False


class Regrouping:
    """One rank's side. `offer` comes from the heartbeats' thread; everything else runs on the one that waits for a step."""

    def __init__(self, made: Connection, config: Config, home: str) -> None:
        self._made, self._config, self._home = made, config, home
        assert made.uplink is not None
        self._newest: View = made.uplink.view
        self._told = (0, 0)
        """Of which view, how often this rank has said where it stands."""
        self._said: set[str] = set()
        """Under which names it has: nothing of that changes."""
        self._whole = self._bound = -1
        """The step that somebody has whole, so that this rank will; and the one that it has said not to have, for good."""
        self._agreed: tuple[View, list[Word]] | None = None
        made.uplink.heed(self.offer)

    def offer(self, view: View) -> None:
        self._newest = view
        if self._made.worker is not None:
            self._made.worker.now.wake()

    def pending(self, wait_s: float) -> bool:
        until, worker = time.monotonic() + wait_s, self._made.worker
        assert worker is not None
        while self._newest.generation == self._view.generation and time.monotonic() < until and worker.error is None:
            time.sleep(0.05)
        return self._newest.generation != self._view.generation

    def unfit(self, plan: Plan) -> str:
        return unfit(plan)

    def heed(self, worker: Worker, here: Callable[[], bool]) -> None:
        if worker is self._made.worker and worker.step != self._whole and self._missed(worker.step):
            served = all(bucket.served for bucket in worker.plan.buckets)  # collectives are not kept for whoever lacks them
            self._agree(worker, here if served else _never)

    def between(self, plan: Plan | None = None) -> None:
        old = self._made.worker
        assert old is not None
        if self.pending(0.0):
            old.undone()
            self.go(plan)

    def go(self, plan: Plan | None = None) -> None:
        made = self._made
        old = made.worker
        assert old is not None
        try:
            while True:
                try:
                    if self._agreed is None:
                        self._agree(old)
                        raise CommError("others have the step whole that was abandoned here", step=old.step)
                    self._go_over(old, plan or old.plan)
                    return
                except (_Newer, Regroup):
                    continue
        except Exception as error:
            old.now.error = error
            raise

    # ---- which step

    @property
    def _view(self) -> View:
        assert self._made.uplink is not None
        return self._made.uplink.view

    def _gone(self) -> list[int]:
        left = {m.rank for m in self._newest.members}
        return [m.rank for m in self._view.members if m.rank not in left]

    def _missed(self, step: int) -> bool:
        """Whether somebody of the view in force has gone without its part of that step."""
        link = self._made.uplink
        assert link is not None
        return any(link.finished(member) <= step for member in self._gone())

    def _agree(self, worker: Worker, here: Callable[[], bool] = _never) -> None:
        """Regroup if no member has the step whole that all stand in. Returns if some have, so that this rank will, and where
        all of it is `here`."""
        # Under local steps those who are slow come later.
        until = time.monotonic() + self._config.deadline_s * worker.plan.local_steps
        assert self._made.uplink is not None
        while True:
            view = self._newest
            count = self._told[1] if self._told[0] == view.generation else 0
            whole = here if self._bound != worker.step else _never
            try:
                words = self._tell(view, f"step{count}", Word(worker.step, worker.weight), until, worker.step, whole)
                same = all(word.step == worker.step for word in words)
                if not words or same:
                    # Whoever has left with its step whole finds its old word in the next one, and goes on to another round.
                    if words and not whole():
                        self._bound = worker.step
                    now = Word(worker.step + (self._bound != worker.step), worker.weight)
                    sure = self._tell(view, f"sure{count}", now, until, worker.step, _never if words else whole)
            except _Newer:
                continue
            if not words:
                self._whole = worker.step
                return
            self._told = view.generation, count + 1
            most = max(max(word.step for word in words), *(self._made.uplink.finished(member) for member in self._gone()))
            if worker.step < most or (same and any(word.step > worker.step for word in sure)):
                self._whole = worker.step
                return
            if same:
                self._agreed = view, words
                raise Regroup

    def _tell(self, view: View, what: str, word: Word, until: float, step: int,
              here: Callable[[], bool] = _never) -> list[Word]:
        """Everybody's word, in the order of the view's members; none where all of the step is `here` before they have spoken.
        _Newer if there is another view before."""
        desk, mine = home_world.desk(), self._made.id
        key = f"regroup{view.generation}/{what}"
        want = [(f"{key}/{m.rank}", m.rank) for m in view.members]
        own = f"{key}/{mine}"
        while True:
            # Who hears of a newer view looks once more: what the dead have said before is there for all, or for none.
            newer = self._newest is not view
            put = [(own, msgspec.msgpack.encode(word))] if own not in self._said else []
            try:
                found = desk.ask(min(until, time.monotonic() + LOOK_S), put=put, want=want, wait=not newer).found
            except CommError:
                if self._newest is view and not self._hears_of(view):
                    raise
                raise _Newer from None
            self._said.add(own)
            if None not in found:
                return [Word(*msgspec.msgpack.decode(row, type=tuple[int, float])) for row in found if row is not None]
            if here():
                return []
            if newer:
                raise _Newer
            if time.monotonic() >= until:
                late = [peer_name(rank) for (_, rank), row in zip(want, found, strict=True) if row is None]
                raise DeadlineExceeded("has not come to the step in which others were lost, before the deadline",
                                       peer=", ".join(late), step=step)

    def _hears_of(self, view: View) -> bool:
        """Whether a newer one than this comes: the coordinator makes it as it judges somebody dead."""
        until = time.monotonic() + self._made.waits.notice_s
        while self._newest is view and time.monotonic() < until:
            time.sleep(0.05)
        return self._newest is not view

    # ---- to the new view

    def _go_over(self, old: Worker, under: Plan) -> None:
        made, agreed = self._made, self._agreed
        assert made.uplink is not None
        assert agreed is not None
        (view, words), self._agreed = agreed, None
        if not old.intact:
            raise CommError("a codec is still at work in the step that others left, so what it owes cannot be put right",
                            step=old.step)
        begin, ids = time.monotonic(), [m.rank for m in view.members]
        place, former = ids.index(made.id), self._view
        plan = plan_of(under, [former_place for former_place, m in enumerate(former.members) if m.rank in ids])
        generation = wire_generation(view)
        change = ViewChange(view, old.step, old.unheard(), records.encode(plan))
        for number, server in enumerate(view.servers):
            if number % len(ids) == place:
                self._send(made.uplink, server.id, change, generation)
        self._tell(view, "ready", words[place], begin + self._config.deadline_s, old.step)
        # From here on nobody is asked, so nothing can break off.
        self._new_world(view, ids, place)
        made.plan, made.terms.basis, made.terms.price = plan, None, None
        new = made.worker_for(plan, old.job, old.device, generation)
        made.hand_on(old, new)
        new.units.regroup(sum(word.weight for word in words))
        made.uplink.adopt(view)
        made.follow(new)
        old.close()
        if made.uplink.resumed is not None:
            made.uplink.resumed.end(generation)
        self._whole = self._bound = -1  # the same step is done again, and may break off again
        for act in made.after_regroup:
            act()
        self._say(old.step, former, view, time.monotonic() - begin)

    def _send(self, uplink: Uplink, server: int, change: ViewChange, generation: int) -> None:
        """A server takes none but the coordinator's newest view, of which it may have heard before this rank."""
        try:
            uplink.send_view(server, change, generation)
        except CommError:
            if not self._hears_of(change.view):
                raise
            raise _Newer from None

    def _new_world(self, view: View, ids: list[int], place: int) -> None:
        made = self._made
        assert made.groups is not None
        device, former = made.groups.device, made.groups
        former.close()
        home_world.begin_again(Desk(self._config.join, self._config, self._home), ids, place, view.generation)
        members.begin_anew()
        made.groups = Groups(1, self._config.deadline_s, device)
        made.rank, made.world = made.groups.rank, made.groups.world
        if made.rows is not None:
            made.rows.regroup(made.groups.members)

    def _say(self, step: int, former: View, view: View, took_s: float) -> None:
        made, left = self._made, {m.rank for m in view.members}
        assert made.uplink is not None
        gone = [peer_name(m.rank) for m in former.members if m.rank not in left]
        what = (f"step {step}: {', '.join(gone)} {'is' if len(gone) == 1 else 'are'} gone: {len(view.members)} go on, from the "
                f"same gradients, {took_s:.1f} s after all had come to this step; what {'it' if len(gone) == 1 else 'they'} "
                f"still owed is lost; this is rank {made.rank} of {made.world} now")
        made.decisions.append(what)
        log.warning("%s", what)


def plan_of(plan: Plan, places: list[int]) -> Plan:
    """For those who stood in these places among its workers. What was predicted was of all."""
    buckets = tuple(structs.replace(b, by_node=tuple(b.by_node[place] for place in places)) if b.by_node else b
                    for b in plan.buckets)
    return structs.replace(plan, buckets=buckets, step_s=0.0, free_s=0.0, steps=0.0, steps_high=0.0)


def unfit(plan: Plan) -> str:
    """Why workers cannot leave under that plan; "" if they can. An exchange is done again from what was put in, so nothing of
    it may be applied before it is whole."""
    what = "results that are a step late" if any(b.stale for b in plan.buckets) else \
        f"{plan.fragments} fragments" if plan.fragments > 1 else "overlap='forward'" if plan.overlap == "forward" else \
        f"{plan.ranks_per_node} ranks to a node" if plan.ranks_per_node > 1 else ""
    return what and (f"has {what}, and workers may leave this job (min_workers), for which an exchange must be whole before "
                     "anything of it is applied: make it without, or let all stay")


def forbidding(others: Forbids) -> Forbids:
    """The same for who chooses ways."""
    why = "workers may leave this job (min_workers), and what comes in bucket by bucket cannot be done again"
    return lambda way: why if way == "forward" else others(way)
