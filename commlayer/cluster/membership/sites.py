"""Sites and their ranks: which sites take part in a job, as functions of (state, request, now).

A site is a machine that accepts no connections. A site's launcher registers the site before its workers start. The site gets
the ranks of its workers once all sites together have as many workers as the job; or, if the job can begin with fewer,
`last_call_s` seconds after the last arrival. Sites are ordered by arrival, except those that request an index. If a site leaves
between the assignment of ranks and the begin of the job, all ranks become invalid: the rendezvous fails for all sites. While
the job runs, new sites may join under new rank numbers, if the job admits workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from commlayer.cluster.calls.messages import ANY, STARTING, Join, JoinReply, find_incompatibility
from commlayer.errors import append_code
from commlayer.records import Record
from commlayer.transport.protocol import SERVER_BASE

SILENCE_S = 30.0
"""Minimum silence in seconds after which a site counts as gone. Its launcher may be short of CPU time while workers import."""
MAX_FORMER = 64
"""Maximum number of departed sites that are remembered, so they can be sent the reason."""


RESTARTED = append_code("E-RENDEZVOUS-ENDED",
                        "the coordinator was restarted without a journal (commlayer serve --journal), so all homes must be "
                        "started again")


class RegisteredSite(Record, frozen=True):
    request: Join
    seen_s: float
    first: int = ANY
    """Rank of the site's first worker; ANY until ranks are assigned."""
    node: int = ANY
    world: int = 0
    """For a site that joined a running job: number of workers of the job then, including the site's own. Otherwise 0."""

    @property
    def ranks(self) -> range:
        """Ranks of the site's workers; empty until they are assigned."""
        return range(0) if self.first == ANY else range(self.first, self.first + self.request.world)


class AdmissionState(Record, frozen=True):
    """Says whether a running job admits sites, and if not, why."""

    closed_reason: str = ""
    """Why the job admits no site; "" if it does."""
    size: int = 0
    """Number of workers that the job has now, with all workers of sites that are about to enter."""
    generation: int = 0
    """Generation of the job's epoch; 0 before it begins."""
    full: bool = False
    """True: the job has all its workers, so the coordinator admits a site only after another one has left."""
    retry_reason: str = ""
    """Why a site should ask again later, if the reason for admitting none is temporary; otherwise ""."""
    all_present: bool = False
    """True: no worker is known to be gone."""


class Sites(Record, frozen=True):
    """State of all sites. `max_workers`: the largest number of workers; 0 if not known, and then sites cannot register."""

    max_workers: int = 0
    present: Mapping[str, RegisteredSite] = msgspec.field(default_factory=dict)
    """Sites by token, in order of arrival."""
    arrived_s: float = 0.0
    """When the last site registered, before the job began."""
    meeting: str = ""
    workers: int = 0
    """Number of workers with which the job begins; 0 until ranks are assigned."""
    begun: bool = False
    numbers: int = 0
    """Number of ranks given to workers that joined after the job began. Ranks are not reused, so records of dead workers stay
    valid."""
    former: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Maps the token of a departed site to the reason. Contains sites of an ended rendezvous, and sites that left after the job
    began."""
    left: Mapping[int, str] = msgspec.field(default_factory=dict)
    """Why each site left after the job began, keyed by the ranks of the site's workers."""
    version: str = ""
    """Required version of commlayer. Empty until the first site registers, if the coordinator requires none."""
    invited: tuple[str, ...] = ()
    """Certificate names of the sites that should register, for the text of missing(); empty if they are not known."""
    min_workers: int = 0
    """Number of workers from which the job can begin; 0: `max_workers`."""
    last_call_s: float = 0.0
    """Seconds after the last arrival until the job begins with fewer than `max_workers`."""

    @property
    def ranks_assigned(self) -> bool:
        return self.workers > 0


def register(state: Sites, request: Join, now: float, admission: AdmissionState = AdmissionState(),
             grace_s: float = 0.0) -> tuple[Sites, JoinReply]:
    """Registers a site, refuses it, or repeats its reply. `admission`: whether the running job admits sites.

    `grace_s`: how long a site should ask again while no worker is known to be gone. One of the job's workers may belong to the
    site's own previous process, whose silence has not been detected yet.
    """
    if (why := state.former.get(request.token)) is not None:
        return state, JoinReply(error=why)
    if request.leave:
        why = f"has left: {request.leave}" if state.begun else f"left before the job began: {request.leave}"
        return remove(state, request.token, why), JoinReply()
    if request.meeting not in ("", state.meeting):
        return state, JoinReply(error=RESTARTED)
    if request.token in state.present:
        state = mark_seen(state, request.token, now)
    elif state.begun and (
            admission.retry_reason or (admission.closed_reason and admission.all_present and request.waited_s < grace_s)):
        return state, JoinReply(missing=admission.retry_reason or admission.closed_reason)
    elif state.begun and request.waited_s < grace_s and (namesakes := _tokens_of_same_host(state, request)):
        return state, JoinReply(missing=f"the job is running with {state.present[namesakes[0]].request.label}, which may be "
                                        "this home's previous process")
    elif problem := _problem(state, request, admission):
        return state, JoinReply(error=f"home {request.label}: {problem}")
    elif state.ranks_assigned and not state.begun:
        return state, JoinReply(missing=f"{workers_text(state.workers)} {'is' if state.workers == 1 else 'are'} starting; this "
                                        "home joins the running job")
    elif state.begun:
        number = state.workers + state.numbers
        site = RegisteredSite(request, now, number, number, admission.size + request.world)
        state = msgspec.structs.replace(state, present={**state.present, request.token: site},
                                        numbers=state.numbers + request.world)
    else:
        state = msgspec.structs.replace(state, present={**state.present, request.token: RegisteredSite(request, now)},
                                        arrived_s=now)
        state = assign(state, now)
    site = state.present[request.token]
    return state, JoinReply(missing=missing(state), rank=site.first, world=site.world or state.workers, node=site.node,
                            nodes=len(state.present), meeting=state.meeting, joins=site.world > 0)


def mark_seen(state: Sites, site: str, now: float) -> Sites:
    return msgspec.structs.replace(state, present={**state.present,
                                                   site: msgspec.structs.replace(state.present[site], seen_s=now)})


def reset_silence(state: Sites, now: float) -> Sites:
    """Counts all sites as just heard from, after the coordinator was stopped or restarted and could not receive their calls."""
    present = {token: msgspec.structs.replace(site, seen_s=now) for token, site in state.present.items()}
    return msgspec.structs.replace(state, present=present)


def remove(state: Sites, site: str, why: str) -> Sites:
    """Removes a site. Before the job begins, removal after the assignment of ranks ends the rendezvous. After the job has
    begun, removal affects only the site's own ranks."""
    if site not in state.present:
        return state
    one, remaining = state.present[site], {token: h for token, h in state.present.items() if token != site}
    if state.begun:
        reason = f"its home {one.request.label} {why}"
        return msgspec.structs.replace(state, present=remaining, left={**state.left, **dict.fromkeys(one.ranks, reason)},
                                       former=_newest_former({**state.former, site: reason}))
    if not state.ranks_assigned:
        return msgspec.structs.replace(state, present=remaining)
    remedy = "the others join again by themselves" if state.min_workers else "start all homes again"
    reason = append_code("E-RENDEZVOUS-ENDED", f"home {one.request.label} {why}; {remedy}")
    former = {**state.former, **dict.fromkeys(state.present, reason)}
    return msgspec.structs.replace(state, present={}, workers=0, former=_newest_former(former))


def predecessor(state: Sites, request: Join, now: float, silence_s: float, seen_s: Mapping[int, float]) -> str:
    """Returns the token of the registered site that has been restarted and now sends `request`; "" if there is none. The
    registered site has the request's certificate and host name, and has been silent for `silence_s`. `seen_s`: maps a rank to
    the time of its last heartbeat."""
    if not request.certificate or request.leave or request.token in state.present or request.token in state.former:
        return ""
    same = _tokens_of_same_host(state, request)
    newest_s = {token: max([state.present[token].seen_s,
                            *(seen_s[rank] for rank in state.present[token].ranks if rank in seen_s)])
                for token in same}
    token = min(newest_s, key=lambda one: newest_s[one], default="")
    return token if token and now - newest_s[token] >= silence_s else ""


def _tokens_of_same_host(state: Sites, request: Join) -> list[str]:
    """Returns the tokens of the registered sites with the request's certificate and host name."""
    return [token for token, site in state.present.items() if request.certificate
            and (site.request.certificate, site.request.name) == (request.certificate, request.name)]


def tick(state: Sites, now: float, silence_s: float, ended: Collection[int] = ()) -> Sites:
    """Removes silent sites, and assigns ranks if the job can begin. After the job has begun, only sites whose workers have all
    `ended` are removed, since the heartbeats of workers detect failures better. Such a site may have left while no coordinator
    was running."""
    for token, site in state.present.items():
        if now - site.seen_s < max(silence_s, SILENCE_S):
            continue
        if not state.begun:
            state = remove(state, token, f"was silent for {now - site.seen_s:.0f} s before the job began")
        elif site.ranks and {*site.ranks} <= {*ended}:
            state = remove(state, token, f"was silent for {now - site.seen_s:.0f} s after its workers ended")
    return assign(state, now)


def staying(state: Sites, now: float, silence_s: float, dead: Collection[int] = ()) -> bool:
    """Returns whether a site is still present: its scripts may continue after the job's end and use the key-value store. Sites
    whose workers are all `dead` do not count."""
    return any(now - site.seen_s < silence_s and not (site.ranks and {*site.ranks} <= {*dead})
               for site in state.present.values())


def missing(state: Sites) -> str:
    """Returns how many workers have not joined yet, and whose they are if known, as text; "" when all have."""
    if state.ranks_assigned:
        return ""
    here = count(state)
    requests = [site.request for site in state.present.values()]
    names = [r.node_name for r in requests]
    shown = ", ".join(name + (f" with {r.world}" if r.world > 1 else "") for name, r in zip(names, requests, strict=True))
    if state.min_workers:
        text = f"{here} of at least {workers_text(state.min_workers)} {'is' if here == 1 else 'are'} here ({shown or 'none'})"
        return text + (STARTING if here >= state.min_workers else f"; waiting for {state.min_workers - here} more")
    absent, left = [name for name in state.invited if name not in names], state.max_workers - here
    each_one = len(absent) == left and len(names) == here
    what, who = ("homes", ", ".join(absent)) if each_one else ("workers", f"{left} more")
    return f"{here} of {state.max_workers} {what} have joined{f' ({shown})' if shown else ''}; waiting for {who}"


def workers_text(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _newest_former(former: Mapping[str, str]) -> dict[str, str]:
    return dict(list(former.items())[-MAX_FORMER:])


def _problem(state: Sites, request: Join, admission: AdmissionState) -> str:
    if problem := find_incompatibility(request, state.version or next((h.request.version for h in state.present.values()), "")):
        return problem
    if not state.max_workers:
        return append_code("E-WORKERS",
                           "the coordinator does not know how many workers to wait for: start it with commlayer serve "
                           "--workers N or --min-workers N")
    if state.begun:
        return _late(state, request, admission)
    free_seats = state.max_workers - count(state)
    if not 1 <= request.world <= free_seats:
        names = ", ".join(h.request.label for h in state.present.values())
        return append_code("E-WORKERS",
                           f"has {request.world} workers, but only {free_seats} of the job's {state.max_workers} are missing "
                           f"(present: {names or 'none'}): start the coordinator with a larger --workers, or this home with "
                           f"fewer")
    if request.rank != ANY and not 0 <= request.rank < state.max_workers:
        return append_code("E-RANK", f"requests --node-rank {request.rank}, allowed: 0 to {state.max_workers - 1}")
    other = next((h for h in state.present.values() if request.rank not in (ANY,) and h.request.rank == request.rank), None)
    if other is None:
        return ""
    return append_code("E-RANK",
                       f"requests --node-rank {request.rank}, which {other.request.label} already has: use a different "
                       "--node-rank for each home")


def _late(state: Sites, request: Join, admission: AdmissionState) -> str:
    """Returns why a site that joins a running job is refused; "" if it is not."""
    if why := closed_reason(state, admission):
        return why if why == RESTARTED else append_code("E-JOB-FULL" if admission.full else "E-JOB-CLOSED", why)
    if problem := too_many(request.world, state.max_workers, admission):
        return problem
    if state.workers + state.numbers + request.world > SERVER_BASE:
        return append_code("E-JOB-FULL",
                           "the job has used up all rank numbers, since too many workers have joined and left: start "
                           "a new job")
    return ""


def too_many(workers: int, limit: int, admission: AdmissionState) -> str:
    """Returns why a running job of at most `limit` workers cannot admit a site with `workers` workers; "" if it can."""
    left = limit - admission.size
    return "" if workers <= left else append_code("E-WORKERS",
                                                  f"has {workers} workers, but only {left} of the job's {limit} are "
                                                  "missing: start this home with fewer")


def closed_reason(state: Sites, admission: AdmissionState) -> str:
    """Returns why a running job admits no site; "" if it does."""
    return admission.closed_reason or ("" if state.ranks_assigned else RESTARTED)


def count(state: Sites) -> int:
    """Returns the number of workers of the present sites."""
    return sum(h.request.world for h in state.present.values())


def assign(state: Sites, now: float) -> Sites:
    """Assigns ranks to all sites, if the job can begin now."""
    here = count(state)
    if state.ranks_assigned or not here or here < (state.min_workers or state.max_workers):
        return state
    if here < state.max_workers and now < state.arrived_s + state.last_call_s:
        return state
    placed, first = dict[str, RegisteredSite](), 0
    for node, token in enumerate(_in_order(state.present)):
        site = state.present[token]
        placed[token] = msgspec.structs.replace(site, first=first, node=node)
        first += site.request.world
    return msgspec.structs.replace(state, present=placed, workers=here)


def _in_order(present: Mapping[str, RegisteredSite]) -> list[str]:
    """Returns the tokens of sites in order. Sites that request an index get it if there are enough sites; the others fill the
    gaps in order of arrival."""
    order = [token for token, h in present.items() if h.request.rank == ANY]
    for index, token in sorted((h.request.rank, token) for token, h in present.items() if h.request.rank != ANY):
        order.insert(index, token)
    return order


class PendingWait(NamedTuple):
    """A key in the key-value store that `rank` has not written yet, although other ranks wait for that key."""

    rank: int
    waited_s: Mapping[int, float]
    """Maps each waiting rank to the seconds for which it has waited."""
    limit_s: float
    """The longest time limit that any of the waiting ranks has set for its wait, in seconds."""
