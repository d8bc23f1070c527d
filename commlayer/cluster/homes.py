"""Which homes take part, and which ranks they get: decisions as functions of (state, request, now). Knows no clock, no socket.

A home is a machine that can only dial out. Its launcher says so here ahead of its workers, and gets their ranks when so many
have come as the job has workers. Homes stand in the order that they came in, but for those that wish for a place. If one goes
before the job has begun, all who met hear of it and end: they were told ranks that no longer stand. Behind that one may come in
the place of another that is gone, under numbers of its own, if the job's door is open.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from commlayer.cluster.messages import ANY, Attend, Attended, incompatible
from commlayer.errors import coded
from commlayer.records import Record
from commlayer.transport.protocol import SERVER_BASE

SILENCE_S = 30.0
"""After which a home counts as gone, at least: its launcher may wait for a processor that imports keep busy."""
FORMER = 64
"""So many homes of meetings that broke off are kept in mind, to be told why."""


RESTARTED = coded("E-MEETING-ENDED", "the coordinator was restarted; homes outlast that with commlayer serve --journal alone: "
                  "start all homes again")


class Home(Record, frozen=True):
    asked: Attend
    seen_s: float
    first: int = ANY
    """Number of its first worker: its rank, where it was there when the job began."""
    node: int = ANY
    world: int = 0
    """Not 0: it joined a running job, which then had so many workers with its own."""

    @property
    def who(self) -> str:
        return f"{self.asked.certificate or self.asked.name} (pid {self.asked.pid})"


class Door(Record, frozen=True):
    """Of a running job."""

    shut: str = ""
    """Why it takes nobody in; "" if it does."""
    there: int = 0
    """How many workers it has now."""
    generation: int = 0
    """Of its view."""
    full: bool = False
    """It is shut for as long as nobody is gone."""
    wait: str = ""
    """Why a home that comes should ask again: what keeps it out passes by itself."""
    all_here: bool = False
    """No worker is gone, as far as is known yet."""


class Outlived(Record, frozen=True):
    """What homes of one certificate may keep while something of one that has left is there, as if that were here still."""

    workers: int
    view: int
    """Generation of the newest view when the last of them left: nothing of it is of a later one."""


class Homes(Record, frozen=True):
    """`workers`: of the whole job; 0 where nobody has said, and then homes cannot meet."""

    workers: int = 0
    here: Mapping[str, Home] = msgspec.field(default_factory=dict)
    """By token, in the order that they came in."""
    meeting: str = ""
    met: bool = False
    begun: bool = False
    numbers: int = 0
    """So many have been given to workers who joined later. None is given twice: what is said of the dead stays true."""
    former: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Homes of a meeting that broke off, and why it did; and those that have left since the job began."""
    left: Mapping[int, str] = msgspec.field(default_factory=dict)
    """Ranks of homes that have left since the job began, and why nothing comes of them any more."""
    outlived: Mapping[str, Outlived] = msgspec.field(default_factory=dict)
    """By certificate."""
    version: str = ""
    """Of the coordinator's software; empty: of whoever comes first."""


def attend(state: Homes, asked: Attend, now: float, door: Door | None = None, grace_s: float = 0.0) -> tuple[Homes, Attended]:
    """Takes the home in, refuses it, or answers one that is here. `door`: of the job that runs; None: it takes nobody in.

    `grace_s`: for so long a home asks again while all workers seem to be here. One of them may be an earlier process of that
    home, whose silence is noticed after some heartbeats.
    """
    if (why := state.former.get(asked.home)) is not None:
        return state, Attended(error=why)
    if asked.leave:
        why = f"has left: {asked.leave}" if state.begun else f"left before the job began: {asked.leave}"
        return gone(state, asked.home, why, door.generation if door else 1), Attended()
    if asked.meeting not in ("", state.meeting):
        return state, Attended(error=RESTARTED)
    if asked.home in state.here:
        state = heard(state, asked.home, now)
    elif state.begun and door is not None and (door.wait or (door.shut and door.all_here and asked.waited_s < grace_s)):
        return state, Attended(missing=door.wait or door.shut)
    elif problem := _problem(state, asked, door):
        return state, Attended(error=f"home {asked.certificate or asked.name} (pid {asked.pid}): {problem}")
    elif state.begun:
        assert door is not None
        number = state.workers + state.numbers
        home = Home(asked, now, number, number, door.there + asked.workers)
        state = msgspec.structs.replace(state, here={**state.here, asked.home: home}, numbers=state.numbers + asked.workers)
    else:
        state = _met(msgspec.structs.replace(state, here={**state.here, asked.home: Home(asked, now)}))
    home = state.here[asked.home]
    world = home.world or (state.workers if state.met else 0)
    return state, Attended(missing=missing(state), first=home.first, world=world, node=home.node, nodes=len(state.here),
                           meeting=state.meeting, joins=home.world > 0)


def heard(state: Homes, home: str, now: float) -> Homes:
    return msgspec.structs.replace(state, here={**state.here, home: msgspec.structs.replace(state.here[home], seen_s=now)})


def still(state: Homes, now: float) -> Homes:
    """With all who are here heard just then: of a coordinator that goes on, which knows nobody's silence."""
    here = {token: msgspec.structs.replace(home, seen_s=now) for token, home in state.here.items()}
    return msgspec.structs.replace(state, here=here)


def gone(state: Homes, home: str, why: str, view: int = 1) -> Homes:
    """One takes no part any more. Behind the job's beginning that is the end of its own ranks alone. `view`: the newest."""
    if home not in state.here:
        return state
    if state.begun:
        one = state.here[home]
        said = f"its home {one.who} {why}"
        ranks = range(one.first, one.first + one.asked.workers) if state.met else ()
        here = {token: h for token, h in state.here.items() if token != home}
        outlived = dict(state.outlived)
        if of := one.asked.certificate:
            outlived[of] = Outlived(parts(state, of), max(1, view))
        return msgspec.structs.replace(state, here=here, left={**state.left, **dict.fromkeys(ranks, said)},
                                       former=_kept({**state.former, home: said}), outlived=outlived)
    if not state.met:
        return msgspec.structs.replace(state, here={token: h for token, h in state.here.items() if token != home})
    said = coded("E-MEETING-ENDED", f"home {state.here[home].who} {why}; start all homes again")
    former = {**state.former, **dict.fromkeys(state.here, said)}
    return msgspec.structs.replace(state, here={}, met=False, former=_kept(former))


def predecessor(state: Homes, asked: Attend, now: float, silence_s: float, seen_s: Mapping[int, float]) -> str:
    """Token of the home that `asked` was before its machine or its process was started again; "" for none.

    It has the same certificate and host name, and has been silent for `silence_s`. `seen_s`: when each worker was heard last,
    by rank.
    """
    if not asked.certificate or asked.leave or asked.home in state.here or asked.home in state.former:
        return ""
    same = [token for token, home in state.here.items()
            if (home.asked.certificate, home.asked.name) == (asked.certificate, asked.name)]
    seen = {token: max([state.here[token].seen_s, *(seen_s[rank] for rank in _ranks(state.here[token]) if rank in seen_s)])
            for token in same}
    token = min(seen, key=lambda one: seen[one], default="")
    return token if token and now - seen[token] >= silence_s else ""


def parts(state: Homes, certificate: str) -> int:
    """For how many workers homes of that certificate may leave something: those who are here, or were here together with one
    of which something is there still. Who comes again takes the place of one that has left, and counts once."""
    here = sum(h.asked.workers for h in state.here.values() if h.asked.certificate == certificate)
    return max(here, state.outlived[certificate].workers if certificate in state.outlived else 0)


def forget(state: Homes, view: int) -> Homes:
    """What was left ahead of the view of that generation is there no more."""
    stay = {of: outlived for of, outlived in state.outlived.items() if outlived.view >= view}
    return state if len(stay) == len(state.outlived) else msgspec.structs.replace(state, outlived=stay)


def tick(state: Homes, now: float, silence_s: float, ended: Collection[int] = (), view: int = 1) -> Homes:
    """Judges silence. Behind the job's beginning its workers' heartbeats do, and better, until all of them have `ended`: then
    it may have left while no coordinator was there to hear it. `view`: the newest."""
    for token, home in state.here.items():
        if now - home.seen_s < max(silence_s, SILENCE_S):
            continue
        if not state.begun:
            state = gone(state, token, f"was silent for {now - home.seen_s:.0f} s before the job began")
        elif _ranks(home) <= {*ended}:
            state = gone(state, token, f"was silent for {now - home.seen_s:.0f} s behind its workers' end", view)
    return state


def staying(state: Homes, now: float, silence_s: float, dead: Collection[int] = ()) -> bool:
    """Whether any home is there still: its scripts may go on behind the job's end, and ask each other. One all of whose workers
    are `dead` has nobody left to ask."""
    return any(now - home.seen_s < silence_s and not _ranks(home) <= {*dead} for home in state.here.values())


def missing(state: Homes) -> str:
    """How many have not come yet; empty when all have."""
    if state.met:
        return ""
    here = ", ".join(f"{h.asked.certificate or h.asked.name}" + (f" with {h.asked.workers}" if h.asked.workers > 1 else "")
                     for h in state.here.values())
    return f"{_count(state)} of {state.workers} workers are here ({here})"


def _ranks(home: Home) -> set[int]:
    return {*range(home.first, home.first + home.asked.workers)}


def _kept(former: Mapping[str, str]) -> dict[str, str]:
    return dict(list(former.items())[-FORMER:])


def _problem(state: Homes, asked: Attend, door: Door | None) -> str:
    if problem := incompatible(asked, state.version or next((h.asked.version for h in state.here.values()), "")):
        return problem
    if not state.workers:
        return coded("E-WORKERS", "the coordinator does not know how many workers to wait for: start it with commlayer serve "
                     "--workers N")
    if state.begun and door is None:
        return coded("E-JOB-CLOSED", f"the job has begun with {state.workers} workers; a running job takes no new members")
    if state.begun and door is not None:
        return _late(state, asked, door)
    left = state.workers - _count(state)
    if not 1 <= asked.workers <= left:
        names = ", ".join(h.who for h in state.here.values())
        return coded("E-WORKERS", f"brings {asked.workers} workers, and {left} of the job's {state.workers} are missing (here: "
                     f"{names or 'nobody'}): start the coordinator with a larger --workers, or this home with fewer")
    if asked.place != ANY and not 0 <= asked.place < state.workers:
        return coded("E-RANK", f"wishes to be home {asked.place}, allowed: 0 to {state.workers - 1}")
    other = next((h for h in state.here.values() if asked.place not in (ANY,) and h.asked.place == asked.place), None)
    if other is None:
        return ""
    return coded("E-RANK", f"wishes to be home {asked.place}, which {other.who} is: give each --node-rank of its own")


def _late(state: Homes, asked: Attend, door: Door) -> str:
    """The same for who comes when the job runs."""
    if why := shut(state, door):
        return why if why == RESTARTED else coded("E-JOB-FULL" if door.full else "E-JOB-CLOSED", why)
    if asked.workers > state.workers - door.there:
        return coded("E-WORKERS", f"brings {asked.workers} workers, and {state.workers - door.there} of the job's "
                     f"{state.workers} are missing: start this home with fewer")
    if state.workers + state.numbers + asked.workers > SERVER_BASE:
        return coded("E-JOB-FULL", "the job has had too many workers")
    return ""


def shut(state: Homes, door: Door) -> str:
    """Why a running job takes no home in; "" if it does."""
    return door.shut or ("" if state.met else RESTARTED)


def _count(state: Homes) -> int:
    return sum(h.asked.workers for h in state.here.values())


def _met(state: Homes) -> Homes:
    """With everybody's ranks if all are here."""
    if _count(state) < state.workers:
        return state
    placed, first = dict[str, Home](), 0
    for node, token in enumerate(_in_order(state.here)):
        home = state.here[token]
        placed[token] = msgspec.structs.replace(home, first=first, node=node)
        first += home.asked.workers
    return msgspec.structs.replace(state, here=placed, met=True)


def _in_order(here: Mapping[str, Home]) -> list[str]:
    """Who wishes for a place has it, if there are as many homes; the others fill the rest as they came."""
    wished = dict(sorted((h.asked.place, token) for token, h in here.items() if h.asked.place != ANY))
    others = [token for token, h in here.items() if h.asked.place == ANY]
    order = []
    for place in range(len(here)):
        if place in wished:
            order.append(wished.pop(place))
        elif others:
            order.append(others.pop(0))
    return [*order, *wished.values(), *others]
