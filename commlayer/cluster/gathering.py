"""What homes ask a coordinator ahead of and beside the job: their ranks, and each other's bytes. Decides nothing itself."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from commlayer.cluster import homes, meeting_store
from commlayer.cluster.audit import Audit
from commlayer.cluster.meeting_journal import Known, MeetingJournal
from commlayer.cluster.meeting_store import MeetingStore, Writer
from commlayer.cluster.messages import Ask, Attend, Attended, Kept, version
from commlayer.cluster.unmet import Meetings, Unmet
from commlayer.transport.protocol import peer_name

log = logging.getLogger("commlayer")

MAX_WAIT_S = 2.0
"""How long an answer may take: a call that waits holds no thread, but a place among those under way."""
Clock = Callable[[], float]


class Gathering:
    """`lost`: workers of the running job that died or broke off, and why, by rank. Who has finished may still ask."""

    def __init__(self, workers: int, silence_s: float, lost: Callable[[], Mapping[int, str]], audit: Audit,
                 min_workers: int = 0, clock: Clock = time.monotonic,
                 door: Callable[[], homes.Door | None] = lambda: None, journal: MeetingJournal | None = None,
                 noticed_s: float = 0.0) -> None:
        """`door`: of the job that runs. `journal`: goes on with what that holds, and keeps it up once the job has begun.
        `noticed_s`: a process that has not been heard for so long is silent."""
        self._state, self._store = homes.Homes(workers, meeting=secrets.token_hex(8), version=version()), MeetingStore()
        self._silence_s, self._lost, self._audit, self._clock = silence_s, lost, audit, clock
        self._min_workers, self._door, self._noticed_s = min_workers, door, noticed_s
        self._lock = threading.Lock()
        self._settled, self._meetings = 1, Meetings()
        self._journal = journal
        for record in journal.read() if journal is not None else ():
            if isinstance(record, Known):
                self._state = homes.still(record.homes, clock())
            else:
                self._store.again(record)

    def supersede(self, asked: Attend, seen_s: Mapping[int, float], still_s: float = 0.0) -> tuple[frozenset[int], str]:
        """The ranks whose seats are free because their home has been started again as `asked`, and the reason. `still_s`: for
        how long up to now this process was stopped, and could hear no home."""
        view = (self._door() or homes.Door()).generation
        with self._lock:
            before, now = self._state, self._clock() - still_s
            token = homes.predecessor(before, asked, now, self._noticed_s if before.begun else self._silence_s, seen_s)
            if not token:
                return frozenset(), ""
            why = f"was started again (pid {asked.pid})"
            self._state = homes.gone(before, token, why, max(1, view))
            self._note(before)
            self._write_down(before)
        home = before.here[token]
        ranks = range(home.first, home.first + home.asked.workers) if before.met else ()
        return frozenset(ranks), f"its home {home.who} {why}"

    def attend(self, asked: Attend) -> Attended:
        door = self._door()
        with self._lock:
            before = self._state
            self._state, reply = homes.attend(before, asked, self._clock(), door, 2 * self._noticed_s)
            self._note(before)
            self._write_down(before)
        reply = msgspec.structs.replace(reply, min_workers=self._min_workers)
        if reply.error and asked.home not in before.former:
            self._audit.denied(f"{asked.certificate or asked.name} (pid {asked.pid})", reply.error)
        return reply

    async def ask(self, asked: Ask) -> Kept:
        if why := self._heard(asked.home) or self._cast_out(asked.home):
            return Kept(error=why)
        store, newest = self._store, 1
        if asked.put or asked.add:
            newest = max(1, (self._door() or homes.Door()).generation)
        by = self._writer(asked.home, newest)
        # Whoever has heard of a newer view finds all that will ever be said in this one: so all find the same.
        put = asked.put if not asked.view or asked.view >= newest else ()
        store.put(put, by)
        self._meetings.came(name for name, _ in put)
        store.drop(asked.drop)
        total = 0 if asked.add is None else store.add(*asked.add, by)
        until = time.monotonic() + min(asked.wait_s, MAX_WAIT_S)
        names = [name for name, _ in asked.want]
        while None in (found := store.found(names)):
            lost = {**self._state.left, **self._lost()}
            never = [rank for (_, rank), value in zip(asked.want, found, strict=True) if value is None and rank in lost]
            left_s = until - time.monotonic()
            there = list(zip(asked.want, found, strict=True))
            blames = self._min_workers and asked.limit_s > 0.0  # else nobody is done without, and nobody need count
            if blames and self._is_of(asked.home, asked.rank):
                self._meetings.waits(asked.rank, [want for want, value in there if value is None], asked.limit_s, self._clock())
            over = asked.without and all(value is not None or rank in lost for (_, rank), value in there)
            if asked.without and not over:
                never = []  # who is there may come yet
            if over or never:
                if self._is_of(asked.home, asked.rank):
                    self._meetings.ends(asked.rank, names)
                return Kept(found, "", total, over=True) if over else \
                    Kept(found, lost[never[0]], total, lost=peer_name(never[0]))
            if left_s <= 0:
                return Kept(found, self._heard(asked.home), total)
            await store.change(left_s)
        return Kept(found, "", total)

    def begin(self) -> None:
        """The job has. Ahead of that all that is lost in a crash is that homes have met. On the loop's thread, as `ask`."""
        with self._lock:
            self._state = msgspec.structs.replace(self._state, begun=True)
        if self._journal is not None and self._state.met:
            self._journal.begin(self._whole)
            self._store.note = self._journal.note

    def forget(self, view: int) -> None:
        """All have gone over to the view of that generation: what was left ahead of it. On the loop's thread, as `ask`."""
        if view > self._settled:
            self._settled = view
            self._store.forget(view)
            with self._lock:
                self._state = homes.forget(self._state, view)

    def unmet(self) -> list[Unmet]:
        """Who waits for whom, where they say for how long that may be."""
        return self._meetings.unmet(self._clock())

    def shut(self) -> str:
        """Why the running job takes no home in; "" if it does."""
        door = self._door() or homes.Door()
        with self._lock:
            return homes.shut(self._state, door)

    def staying(self, dead: Collection[int]) -> bool:
        """Whether a home is there that may still ask: each says so until its scripts have ended, or falls silent. Where the
        others go on without the `dead`, those may not, though their scripts may hang for ever."""
        with self._lock:
            return homes.staying(self._state, self._clock(), self._silence_s, dead if self._min_workers else ())

    def tick(self, ended: Collection[int] = (), still_s: float = 0.0) -> None:
        """`ended`: ranks of workers that take no part in the job any more. `still_s`: as of `supersede`."""
        if self._journal is not None:
            self._journal.wait()
        view = (self._door() or homes.Door()).generation
        with self._lock:
            before, now = self._state, self._clock()
            self._state = homes.tick(homes.still(before, now) if still_s else before, now, self._silence_s, ended, view)
            self._note(before)
            self._write_down(before)

    def _whole(self) -> Iterator[Known | meeting_store.Change]:
        yield Known(homes.still(self._state, 0.0))
        yield from self._store.changes()

    def _write_down(self, before: homes.Homes) -> None:
        """What has changed of who the homes are. Once the job has begun nothing does but that one comes or leaves."""
        if self._journal is not None and self._state.begun and self._state.here.keys() != before.here.keys():
            self._journal.note(Known(homes.still(self._state, 0.0)))

    def _heard(self, home: str) -> str:
        """Notes that it lives; why it is not of this meeting, else."""
        with self._lock:
            if home in self._state.here:
                self._state = homes.heard(self._state, home, self._clock())
                return ""
            return self._state.former.get(home, homes.RESTARTED)

    def _is_of(self, home: str, rank: int) -> bool:
        """Nobody waits in another's name."""
        with self._lock:
            one = self._state.here.get(home)
        return one is not None and self._state.met and one.first <= rank < one.first + one.asked.workers

    def _writer(self, home: str, view: int) -> Writer:
        """Whoever leaves something from that home: its certificate, which it may have more homes with, else the home alone."""
        with self._lock:
            state = self._state
        mine, workers = state.here.get(home), max(1, state.workers)
        if mine is None:  # it has left since it was heard, and so has its meeting
            return Writer(f"home {home}", meeting_store.LEAST_EACH_NBYTES)
        certificate = mine.asked.certificate
        each = max(meeting_store.MAX_KEPT_NBYTES // workers, meeting_store.LEAST_EACH_NBYTES)
        most = each * min(workers, homes.parts(state, certificate) if certificate else mine.asked.workers)
        return Writer(certificate or f"home {mine.who}", most, each * workers, view)

    def _cast_out(self, home: str) -> str:
        """Why it may say no more: the others go on as if it had not come as far. What it says late would be there for those who
        ask late, and only for them."""
        if not self._min_workers or (one := self._state.here.get(home)) is None:
            return ""
        lost, ranks = self._lost(), range(one.first, one.first + one.asked.workers)
        return next((f"worker {rank}: {lost[rank]}" for rank in ranks if rank in lost), "")

    def _note(self, before: homes.Homes) -> None:
        """What has changed since."""
        state = self._state
        for token, home in state.here.items():
            if token not in before.here:
                said = f"joins the {home.world - home.asked.workers} workers that there are" if home.world else \
                    homes.missing(state) or f"all {state.workers} workers are"
                log.info("home %s is here: %s", home.who, said)
                self._audit.note("attended", where=home.who, workers=home.asked.workers)
        left = [state.former.get(token, f"home {home.who} has left") for token, home in before.here.items()
                if token not in state.here]
        for why in dict.fromkeys(left):
            log.log(logging.INFO if state.begun else logging.WARNING, "%s", why.removeprefix("its "))
        if state.former is not before.former and not state.begun:
            self._store = MeetingStore()  # of those who met; whoever waits in it hears why within MAX_WAIT_S


