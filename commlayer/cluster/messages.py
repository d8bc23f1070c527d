"""What travels on the control plane: frozen records as msgpack. Knows no sockets, no clock and no decision."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec

from commlayer.errors import CorruptFrame, coded, short_line
from commlayer.records import MALFORMED, Record, ServerInfo, View

PROTOCOL = 1
FINISHED = "finished"
SERVICE = "commlayer.Control"
MAX_PLAN_NBYTES = 64 << 20
"""A plan of a model with 100,000 tensors has about 20 MB."""
MAX_REPLY_NBYTES = MAX_PLAN_NBYTES + (4 << 20)
"""Most bytes of an answer, which may hold a plan."""
PART_NBYTES = 192 << 10
MAX_NBYTES = 256 << 10
"""Most bytes of a call: so much may come from somebody who has proved nothing. Plans go up in parts."""

R = TypeVar("R", bound=Record)
Kind = Literal["worker", "server"]
ANY = -1
"""As a rank: the coordinator chooses."""


class Join(Record, frozen=True):
    """One process asks to take part. Sent again until the view is complete; `token` says that it is the same process."""

    kind: Kind
    token: str
    name: str
    pid: int
    protocol: int
    version: str
    rank: int = ANY
    world: int = 0
    """0: as many as the coordinator was told."""
    node: int = 0
    """Of a server ANY: the node whose workers have its `name`, else one of its own."""
    job: str = ""
    """Digest of the worker's Job."""
    plan: bytes = b""
    """The plan's canonical bytes; those of worker 0 are everyone's. Left out on the wire: see Part."""
    plan_digest: str = ""
    """Not empty: what the sender holds to be the plan; all who say so must agree."""
    address: str = ""
    """A server's data address."""
    streams: str = ""
    """Where a server takes gRPC streams; empty: nowhere."""
    beside: bool = False
    """Of a server: it is in the coordinator's own process, and falls silent with it."""
    returns: bool = False
    """Of a server: it has a journal, so that one that was killed may take its seat again."""
    dials: bool = False
    """Of a worker: its machine only dials out, so whatever has its `name` and serves is another one."""
    regroups: bool = False
    """Of a worker: it can go on with those who are left when others die or leave, and with who joins later."""
    alike: dict[str, str] = msgspec.field(default_factory=dict)
    """Of a worker: what must be the same on all. Those who met have compared it; who joins later is compared here."""
    certificate: str = ""
    """The name in the certificate that the call came with, as the coordinator sees it: it writes this field itself,"""
    serial: str = ""
    """its number in hex, as the list of the revoked has it, which is kept with the seat,"""
    dials_only: bool = False
    """and this one: with that certificate nobody may serve."""
    gradients: int = ANY
    """Of a worker: as in View."""


class Seat(Record, frozen=True):
    """The answer to Join: `error`, or who the process is and, once all are in, the view; until then who is missing."""

    error: str = ""
    rank: int = ANY
    view: View | None = None
    plan: bytes = b""
    missing: str = ""
    time_s: float = 0.0
    """The coordinator's clock, in seconds since 1970."""
    plan_wanted: bool = False
    """There is no such seat (any more), and the plan of that digest is not here: send its parts, then ask again."""


class Part(Record, frozen=True):
    """Bytes of a plan from `begin` on. The answer is an empty Pulse."""

    plan_digest: str
    nbytes: int
    """Of the whole plan."""
    begin: int
    data: bytes


class Gone(Record, frozen=True):
    """A peer that takes no part any more, by its name in errors, and why."""

    peer: str
    reason: str
    exchanges: int = -1
    """As in Leave."""


class Overdue(Record, frozen=True):
    """Of a server: the earliest step whose sums wait there, and who has kept one of them waiting for `limit_s` or longer."""

    step: int
    missing: tuple[int, ...] = ()
    """Ranks of workers; nobody yet, where others have waited for less."""
    limit_s: float = 0.0


class Heartbeat(Record, frozen=True):
    """Sent by the process itself, or by its child, which knows what became of it."""

    token: str
    missed: tuple[str, ...] = ()
    """Peers whose end of a data connection their machine has ended without a word, and that have not come back."""
    parent: Literal["", "stopped", "ended"] = ""
    """What the child says of the process whose seat it is, when that does not beat."""
    generation: int = 0
    """Of the newest view that the process knows; 0: it asks for none."""
    ended: tuple[str, ...] = ()
    """Of a server: workers who have closed their data connections in order."""
    dropped: tuple[Gone, ...] = ()
    """Of a server: workers whose data connections it has ended, since what came by them broke the protocol."""
    in_force: int = 0
    """Generation of the view in force there, of a worker itself: it asks for nothing that was said ahead of that one."""
    overdue: Overdue | None = None
    """Of a server, while sums wait there."""


class Pulse(Record, frozen=True):
    """The answer to Heartbeat. `stranger`: this coordinator never seated the sender."""

    stranger: bool = False
    dead: str = ""
    """Not empty: the sender itself was declared dead, for this reason."""
    lost: tuple[Gone, ...] = ()
    left: tuple[Gone, ...] = ()
    over: bool = False
    """Every worker has left or is dead."""
    failed: bool = False
    """The job is over, and not all of its last workers have finished."""
    view: View | None = None
    """One that is newer than the asker's: from now on its members are the job's."""


class Leave(Record, frozen=True):
    token: str
    reason: str = FINISHED
    """Any other tells the others that the end was not an orderly one."""
    exchanges: int = -1
    """Of a worker: in how many it has done its part, so that whoever waits for it in a later one knows. -1: not told."""


class Attend(Record, frozen=True):
    """One home says that it is there, and again while it is: a machine whose ranks reach the others through here alone.

    A launcher asks for all of its machine's workers, before they start. `leave`: it goes, for this reason.
    """

    home: str
    """As a token in Join."""
    name: str
    pid: int
    protocol: int
    version: str
    workers: int
    """How many it brings."""
    place: int = ANY
    """Which of the homes it wishes to be: ranks are counted in their order."""
    leave: str = ""
    certificate: str = ""
    """As in Join."""
    meeting: str = ""
    """In which it got its ranks."""
    waited_s: float = 0.0
    """For how long it has asked for its ranks."""


class Attended(Record, frozen=True):
    """The answer: `error`, or who is missing, or, once all homes are there, the ranks of this one's workers."""

    error: str = ""
    missing: str = ""
    first: int = ANY
    """Rank of its first worker; the others follow."""
    world: int = 0
    node: int = ANY
    """Which of the homes it is."""
    nodes: int = 0
    meeting: str = ""
    """A random name, of one process of the coordinator."""
    joins: bool = False
    """The job runs, and takes this home in: its ranks are the last of `world`, as it stands."""
    min_workers: int = 0
    """As the coordinator was told."""


class Ask(Record, frozen=True):
    """To the store that homes meet in: writes, then reads what is there within `wait_s`. Said again it changes nothing."""

    home: str
    put: tuple[tuple[str, bytes], ...] = ()
    drop: tuple[str, ...] = ()
    add: tuple[str, int, str] | None = None
    """To the number of that key; a random name tells one that is said again."""
    want: tuple[tuple[str, int], ...] = ()
    """Keys, and the rank whose part it is to write each; ANY: nobody knows."""
    wait_s: float = 0.0
    without: bool = False
    """What those would have written who are gone is waited for no longer, and is no error."""
    view: int = 0
    """Not 0: what it writes is said in the view of that generation, and none of it counts once there is a newer one."""
    rank: int = ANY
    """Who of that home waits for ranks that should have come, and"""
    limit_s: float = 0.0
    """for how long that may be. 0: nobody is to be blamed."""


class Kept(Record, frozen=True):
    """The answer to Ask: what is there of what it wants; `error`: why some of that will never be."""

    found: tuple[bytes | None, ...] = ()
    error: str = ""
    sum: int = 0
    over: bool = False
    """What is not there will not come: its writers are gone."""
    lost: str = ""
    """Whom `error` is about, where that is one who is gone; else it is about who asks."""


class About(Record, frozen=True):
    """Asks who coordinates here, and how the way there is: `data` goes up, and `wanted` bytes come down. Takes no seat."""

    data: bytes = b""
    wanted: int = 0
    """At most ABOUT_NBYTES; once the job has begun none come, since they would be in its way."""


class Told(Record, frozen=True):
    """The answer to About."""

    version: str
    protocol: int
    wire: int
    """Version of the frames."""
    time_s: float
    """Its clock, in seconds since 1970."""
    workers: int
    """How many the job is for, 0 if nobody has said."""
    seated: int
    """How many of them are here."""
    servers: tuple[ServerInfo, ...] = ()
    """Those that are here."""
    begun: bool = False
    plan: str = ""
    """Its digest, once there is one."""
    data: bytes = b""
    free: int = 0
    """Once the job has begun: how many workers it takes in, in the place of others who are gone."""
    shut: str = ""
    """Why it takes nobody in then; "" if it does."""
    full: bool = False
    """It will as soon as somebody is gone."""


ABOUT_NBYTES = 192 << 10


def attend(workers: int, place: int = ANY, *, name: str = "") -> Attend:
    """The request of this process for a home of so many workers."""
    return Attend(secrets.token_hex(8), name or socket.gethostname(), os.getpid(), PROTOCOL, version(), workers, place)


def worker(
    job: str, rank: int, world: int, *, node: int = 0, plan: bytes = b"", plan_digest: str = "", dials: bool = False,
    regroups: bool = False, gradients: int = ANY, alike: Mapping[str, str] = {},
) -> Join:
    """The request of this process as a worker. Only worker 0, or one that may become it, sends the plan itself."""
    sent = plan if rank in (0, ANY) else b""
    return Join("worker", secrets.token_hex(8), socket.gethostname(), os.getpid(), PROTOCOL, version(), rank, world, node, job,
                sent, plan_digest or digest_of(plan), dials=dials, regroups=regroups, gradients=gradients, alike=dict(alike))


def server(address: str, node: int = ANY, number: int = ANY, *, beside: bool = False, streams: str = "") -> Join:
    """The request of this process as a summation server that workers reach at `address`; `number`: which one of the plan.

    `beside`: the coordinator is in this process, too. `streams`: where it takes gRPC streams.
    """
    return Join("server", secrets.token_hex(8), socket.gethostname(), os.getpid(), PROTOCOL, version(), number, node=node,
                address=address, beside=beside, streams=streams)


def digest_of(plan: bytes) -> str:
    """records.digest of the plan, from its canonical bytes; empty for no plan."""
    return hashlib.sha256(plan).hexdigest()[:16] if plan else ""


@functools.cache
def version() -> str:
    """The installed package's version, or "source" for a bare checkout."""
    import importlib.metadata  # here, since a coordinator does without

    try:
        return importlib.metadata.version("commlayer")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def incompatible(asked: Join | Attend, version: str) -> str:
    """Why a process of such software cannot take part, or an empty string. `version`: of who is here; empty for nobody."""
    if asked.protocol != PROTOCOL:
        return coded("E-VERSION", f"speaks control protocol {asked.protocol}, the coordinator {PROTOCOL}: install the same "
                     "commlayer everywhere")
    if version and asked.version != version:
        return coded("E-VERSION", f"runs commlayer {asked.version}, the job {version}: install the same version everywhere")
    return ""


def names(reason: str, peer: str) -> bool:
    """Whether an end for that reason is one because of that peer: errors begin with whom they are about, and reasons hold them.

    >>> names("PeerLost: server 1: connection lost", "server 1"), names("it met server 1", "server 1")
    (True, False)
    >>> names("PeerLost: worker 1 (ben): is gone", "worker 1"), names("PeerLost: worker 11: is gone", "worker 1")
    (True, False)
    """
    return named_at(reason, peer) >= 0


def named_at(reason: str, peer: str) -> int:
    """Where the reason names that peer as its cause; -1 if it does not."""
    found = re.search(rf"\b{re.escape(peer)}( \([^()]*\))?: ", reason)
    return found.start() if found else -1


def dropped_by(server: str, why: str) -> str:
    """Why a worker is gone, where a server has dropped it. It is no end because of that server.

    >>> names("worker 1: " + dropped_by("server 0", "sent noise"), "server 0")
    False
    """
    return f"was dropped (by {server}): {why}"


def pack(record: Record) -> bytes:
    return msgspec.msgpack.encode(record)


def unpack(data: bytes, kind: type[R], peer: str) -> R:
    """The record in `data`; CorruptFrame naming the peer if it is none."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except MALFORMED as error:
        if other := _other_version(data):
            raise CorruptFrame(other, peer=peer, code="E-VERSION") from None
        raise CorruptFrame(f"sent a {kind.__name__} that breaks the format: {short_line(error, 200)}; "
                           f"where versions differ, install the same everywhere (here {version()})", peer=peer) from None


class _Said(msgspec.Struct):
    """What can be read of a request of any version."""

    version: str


def _other_version(data: bytes) -> str:
    try:
        said = msgspec.msgpack.decode(data, type=_Said).version
    except (*MALFORMED, RecursionError):  # what it does not know it passes over, as deep as that goes
        return ""
    remedy = "install the same version everywhere"
    return "" if said == version() else f"runs commlayer {short_line(said, 64)}, here {version()}: {remedy}"
