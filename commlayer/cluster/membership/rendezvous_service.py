"""The coordinator's service for sites: their registration, and the key-value store that their ranks share.

sites.py makes the decisions, kv_store.py stores the values; the RendezvousService class adds the lock and the clock.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from commlayer.cluster.calls.messages import ANY, MAX_KEYS, Join, JoinReply, KvReply, KvRequest, StoreKey, version
from commlayer.cluster.membership import sites
from commlayer.cluster.membership.coordinator_journal import CoordinatorJournal
from commlayer.cluster.membership.kv_store import KvStore
from commlayer.cluster.membership.sites import AdmissionState, PendingWait, RegisteredSite
from commlayer.config import Config, notice_s
from commlayer.errors import MAX_PEER_TEXT_CHARS, CorruptFrame, append_code, short_line
from commlayer.transport.handshake import RefusalLog
from commlayer.transport.protocol import peer_name

log = logging.getLogger("commlayer")

MAX_WAIT_S = 2.0
"""Longest time that one call waits for keys, in seconds. A waiting call needs no thread, but counts against the limit of
concurrent calls."""
WAIT_EXPIRES_S = 10.0
"""Seconds without a call after which a rank no longer counts as waiting. A waiting rank calls every MAX_WAIT_S. It may repeat a
lost call as late as after site_client.BYTES_S, and does not count as waiting until then."""
MAX_WAITS = 128
"""Maximum number of calls of a site that wait for keys at the same time, per worker of the site: several chunks in flight in
each of several process groups."""
Clock = Callable[[], float]


class _Wait(NamedTuple):
    """A rank's wait for a key. The wait began at `begin_s` and was last reported at `seen_s`."""

    begin_s: float
    seen_s: float
    limit_s: float


class RendezvousService:
    """Registration of sites and their key-value store. `lost`: returns workers of the running job that died or failed, with the
    reason; not finished workers, which may still call."""

    def __init__(self, max_workers: int, config: Config, lost: Callable[[], Mapping[int, str]], refusals: RefusalLog,
                 admission: Callable[[], AdmissionState] = AdmissionState, journal: CoordinatorJournal | None = None,
                 invited: Sequence[str] = (), *, clock: Clock = time.monotonic) -> None:
        """`max_workers`: largest number of workers. `admission`: returns whether the running job admits sites. `journal`: its
        contents are restored, and changes are recorded after the job begins. `invited`: names of the sites that should
        register."""
        self._state = sites.Sites(max_workers, meeting=secrets.token_hex(8), version=version(), invited=tuple(invited),
                                  min_workers=config.min_workers, last_call_s=config.last_call_s)
        self._store = KvStore()
        self._lost, self._refusals, self._admission, self._clock = lost, refusals, admission, clock
        self._min_workers = config.min_workers
        self._gone_s, self._silent_s = config.dead_after_s, notice_s(config)
        """Seconds without a call after which a site counts as gone; and after which a worker, or a site that may have been
        restarted, counts as silent."""
        self._lock = threading.Lock()
        self._settled = 1
        self._waits: dict[int, dict[StoreKey, _Wait]] = defaultdict(dict)
        """Waits by waiting rank and key."""
        self._waiting = Counter[str]()
        """Number of calls that wait for keys, by site."""
        self._journal = journal
        if journal is not None and journal.sites is not None:
            self._state = sites.reset_silence(journal.sites, clock())
            self._store = KvStore(_workers(self._state), journal.rows.items())

    @property
    def left(self) -> Mapping[int, str]:
        """Why sites have left the running job, by the ranks of their workers."""
        return self._state.left

    def replace_restarted_site(self, request: Join, seen_s: Mapping[int, float], still_s: float = 0.0) -> None:
        """If `request` comes from a restarted site, removes the site's previous registration. `seen_s`: maps a rank to the time
        of its last heartbeat. `still_s`: how long this process was stopped until now, so it could not receive heartbeats."""
        with self._lock:
            before, now = self._state, self._clock() - still_s
            if token := sites.predecessor(before, request, now, self._silent_s if before.begun else self._gone_s, seen_s):
                self._set(sites.remove(before, token, f"was started again (pid {request.pid})"))

    def register(self, request: Join) -> JoinReply:
        """Registers a site, refuses it, or removes it."""
        admission = AdmissionState() if request.token in self._state.present else self._admission()
        with self._lock:
            before = self._state
            state, reply = sites.register(before, request, self._clock(), admission, 2 * self._silent_s)
            self._set(state)
        reply = msgspec.structs.replace(reply, min_workers=self._min_workers, begun=state.begun)
        if reply.error and request.token not in before.former:
            self._refusals.denied(reply.error)
        return reply

    async def handle(self, request: KvRequest) -> KvReply:
        if (site := self._record_contact(request.home)) is None:
            return KvReply(error=self.departure(request.home))
        if why := self._excluded_reason(site) or self._write_problem(site, request):
            return KvReply(error=why)
        store = self._store
        if (workers := _workers(self._state)) != store.workers:
            store.allow(workers)
        store.put(request.home, () if self.find_lost_writers(request, ()) else request.put, request.generation)
        store.drop(request.drop)
        total = 0 if request.add is None else store.add(request.home, *request.add, request.generation)
        until = time.monotonic() + min(request.wait_s, MAX_WAIT_S)
        begin_s = self._clock() - max(0.0, request.waited_s)
        while None in (values := store.values(request.want)):
            absent = [want for want, value in zip(request.want, values, strict=True) if value is None]
            self._record_waits(site, request, absent, begin_s)
            never = self.find_lost_writers(request, absent)
            over = request.without and len(never) == len(absent)
            if over or (never and not request.without):  # `without`: writers that are present may still write
                self._record_waits(site, request, (), begin_s)
                rank, error = never[0]
                return KvReply(values, "" if over else error, total, over=over, lost="" if over else peer_name(rank))
            if (left_s := until - time.monotonic()) <= 0:
                present = self._record_contact(request.home) is not None
                return KvReply(values, "" if present else self.departure(request.home), total)
            if self._waiting[request.home] >= MAX_WAITS * site.request.world:
                raise CorruptFrame("makes another call that waits for keys, but a home may have "
                                   f"{self._waiting[request.home]}: use fewer process groups that span homes at the same time",
                                   code="E-QUOTA")
            self._waiting[request.home] += 1
            try:
                await store.wait_written(absent, left_s)
            finally:
                self._waiting.subtract((request.home,))
                self._waiting += Counter()  # drops zeros
        self._record_waits(site, request, (), begin_s)
        return KvReply(values, "", total)

    def find_lost_writers(self, request: KvRequest, absent: Sequence[StoreKey]) -> list[tuple[int, str]]:
        """Returns lost writers of the `absent` keys, each with the reason. If the call needs all writers, returns the lost
        writers of all wanted keys, and the call writes nothing. Its callers then all read all values, or none does: all of them
        have written before the first loss, or not."""
        lost = {**self._state.left, **self._lost()}
        return [(rank, lost[rank]) for _, rank in (absent if request.without else request.want) if rank in lost]

    def _write_problem(self, site: RegisteredSite, request: KvRequest) -> str:
        """Returns why the site may not write or drop the request's keys; "" if it may. A key that names a rank belongs to that
        rank's site, from before its first write on. Any other key belongs to the site that wrote it first."""
        state = self._state
        if (count := len(request.put) + len(request.drop) + len(request.want)) > MAX_KEYS + state.workers:
            raise CorruptFrame(f"{count} keys in one call, allowed {MAX_KEYS + state.workers}")
        for (name, rank), adds in [*((key, False) for key, _ in request.put), *((key, False) for key in request.drop),
                                   *([(request.add[0], True)] if request.add is not None else [])]:
            owner = self._store.owner((name, rank), adds=adds)
            if not site.ranks:
                why = "this home has no ranks yet"
            elif rank != ANY and rank not in site.ranks:
                why = f"it belongs to worker {rank}"
            elif rank == ANY and owner not in ("", request.home):
                other = state.present.get(owner)
                why = f"home {other.request.label if other else '(which has left)'} wrote it first"
            else:
                continue
            what = "add to" if adds else "change"
            problem = append_code("E-OWNER",
                                  f"home {site.request.label} may not {what} {short_line(name, 80)!r} at the coordinator: "
                                  f"{why}; use another key for each writer")
            self._refusals.denied(problem)
            return problem
        return ""

    def _record_waits(self, site: RegisteredSite, request: KvRequest, absent: Iterable[StoreKey], begin_s: float) -> None:
        """Records that the caller's rank waits for the `absent` keys, and for no other key of this request. No site may report
        waits for another site's ranks."""
        # Without min_workers no worker is dropped for being slow.
        if not self._min_workers or request.limit_s <= 0.0 or request.rank not in site.ranks:
            return
        now = self._clock()
        with self._lock:
            waits = self._waits[request.rank]
            for key in request.want:
                waits.pop(key, None)
            for key in absent:
                if len(waits) < MAX_WAITS * (1 + self._state.workers):
                    waits[key] = _Wait(begin_s, now, request.limit_s)

    def begin(self) -> None:
        """Marks the job as begun and starts journaling. A crash before that loses only the rendezvous. Call it in the event
        loop's thread."""
        with self._lock:
            self._state = msgspec.structs.replace(self._state, begun=True)
        if self._journal is not None and self._state.ranks_assigned:
            self._journal.begin(sites.reset_silence(self._state, 0.0), self._store.rows)
            self._store.save = self._journal.write_row

    def forget(self, epoch: int) -> None:
        """Drops values of epochs before `epoch`: see epoch_change.settled_generation. Call it in the event loop's thread."""
        if epoch > self._settled:
            self._settled = epoch
            self._store.forget(epoch)

    def pending_waits(self) -> list[PendingWait]:
        """Returns the pending waits of ranks for other ranks' keys. Includes only waits for which the waiting rank gave a
        limit."""
        now, waiting = self._clock(), defaultdict[StoreKey, dict[int, _Wait]](dict)
        with self._lock:
            for rank, waits in self._waits.items():
                self._waits[rank] = {key: wait for key, wait in waits.items() if now - wait.seen_s < WAIT_EXPIRES_S}
                for key, wait in self._waits[rank].items():
                    waiting[key][rank] = wait
        return [PendingWait(of, {rank: now - wait.begin_s for rank, wait in waits.items()},
                            max(wait.limit_s for wait in waits.values())) for (_, of), waits in waiting.items()]

    def homes(self) -> dict[str, str]:
        """Returns the names of the registered sites by token, until the job begins."""
        with self._lock:
            sites = {} if self._state.begun else self._state.present
            return {token: site.request.node_name for token, site in sites.items()}

    def closed_reason(self) -> str:
        """Returns why the running job admits no site; "" if it does."""
        return sites.closed_reason(self._state, self._admission())

    def staying(self, dead: Collection[int]) -> bool:
        """Returns whether a site is present that may still call, since sites stay registered until their scripts end. If the
        job can continue without lost workers, sites whose workers are all `dead` do not count, because their scripts may hang
        forever."""
        with self._lock:
            return sites.staying(self._state, self._clock(), self._gone_s, dead if self._min_workers else ())

    def tick(self, ended: Collection[int] = (), still_s: float = 0.0) -> None:
        """Removes silent sites. `ended`: ranks that have left the job. `still_s`: seconds for which this process was stopped
        until now."""
        if self._journal is not None:
            self._journal.wait()
        with self._lock:
            state, now = self._state, self._clock()
            self._set(sites.tick(sites.reset_silence(state, now) if still_s else state, now, self._gone_s, ended))

    def _record_contact(self, token: str) -> RegisteredSite | None:
        """Records that a site has called, and returns the site. Returns None if the process is not part of this rendezvous."""
        with self._lock:
            if token in self._state.present:
                self._state = sites.mark_seen(self._state, token, self._clock())
            return self._state.present.get(token)

    def departure(self, token: str) -> str:
        """Returns why the site is not part of this rendezvous."""
        return self._state.former.get(token, sites.RESTARTED)

    def _excluded_reason(self, site: RegisteredSite) -> str:
        """Returns why the site may not write; "" if it may. A site whose rank was evicted may not, because the other ranks have
        continued without that rank. Only some of them would read a value that the site writes now."""
        lost = self._lost() if self._min_workers else {}
        return next((append_code("E-PEER-LOST", f"worker {rank}: {lost[rank]}") for rank in site.ranks if rank in lost), "")

    def _set(self, state: sites.Sites) -> None:
        """Replaces the state of the sites by `state`. Logs sites that have joined or left, and writes them to the journal once
        the job has begun. Call it with the lock held."""
        before, self._state = self._state, state
        for token, site in state.present.items():
            if token not in before.present:
                news = f"joins {sites.workers_text(site.world - site.request.world)}" if site.world else \
                    sites.missing(state) or f"all {state.workers} workers have joined"
                log.info("%s registered: %s", site.request.label, news)
        if before.workers < state.workers < state.max_workers:
            log.info("starting with %s; homes can join until there are %d", sites.workers_text(state.workers),
                     state.max_workers)
        reasons = [state.former.get(token, f"{site.request.label} has left") for token, site in before.present.items()
                   if token not in state.present]
        for why in dict.fromkeys(reasons):
            log.log(logging.INFO if state.begun else logging.WARNING, "%s",
                    short_line(why.removeprefix("its home "), MAX_PEER_TEXT_CHARS))
        if state.former is not before.former and not state.begun:
            # A new rendezvous; calls that wait in the old store return within MAX_WAIT_S.
            self._store = KvStore(_workers(state))
        if self._journal is not None and state.begun and state.present.keys() != before.present.keys():
            self._journal.write_sites(sites.reset_silence(state, 0.0))


def _workers(state: sites.Sites) -> dict[str, int]:
    """Returns the number of workers of each site, by token."""
    return {token: site.request.world for token, site in state.present.items()}
