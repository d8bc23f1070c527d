"""Messages of the control plane: frozen records, encoded as msgpack."""

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

PROTOCOL = 2
FINISHED = "finished"
SERVICE = "commlayer.Control"
MAX_PLAN_NBYTES = 64 << 20
"""A plan of a model with 100,000 tensors has about 20 MB."""
MAX_REPLY_NBYTES = MAX_PLAN_NBYTES + (4 << 20)
"""Largest reply; a reply may hold a plan."""
PART_NBYTES = 192 << 10
MAX_NBYTES = 256 << 10
"""Largest call. An unauthenticated caller may send this much, so plans are uploaded in parts."""

R = TypeVar("R", bound=Record)
Kind = Literal["worker", "server"]
ANY = -1
"""As a rank: the coordinator chooses."""


class Join(Record, frozen=True):
    """Asks for registration. Repeated until the view is complete; `token` identifies the process across repeats."""

    kind: Kind
    token: str
    name: str
    pid: int
    protocol: int
    version: str
    rank: int = ANY
    world: int = 0
    """0: the number that the coordinator was started with."""
    node: int = 0
    """Of a server ANY: the node of the workers with the same `name`, else a node of its own."""
    job: str = ""
    """Digest of the worker's Job."""
    plan: bytes = b""
    """The plan's canonical bytes. The plan of worker 0 is used by all. Not sent in this message: see PlanPart."""
    plan_digest: str = ""
    """If not empty: digest of the plan that the sender holds. All senders must agree."""
    address: str = ""
    """A server's data address."""
    streams: str = ""
    """Where a server accepts gRPC streams; empty if it does not."""
    colocated: bool = False
    """Of a server: it runs in the coordinator's process and fails with it."""
    restartable: bool = False
    """Of a server: it has a journal, so it can be restarted and register again."""
    outbound_only: bool = False
    """Of a worker: its machine accepts no connections, so a server with the same `name` runs on another machine."""
    elastic: bool = False
    """Of a worker: it can continue after other workers die, leave or join."""
    must_match: dict[str, str] = msgspec.field(default_factory=dict)
    """Of a worker: settings that must be equal on all workers. The first workers compare them themselves; the coordinator
    compares those of a worker that joins later."""
    certificate: str = ""
    """Name in the caller's certificate. The coordinator fills in this field and the next two."""
    serial: str = ""
    """Serial number of that certificate in hex, as in the revocation list. Kept with the registration."""
    dials_only: bool = False
    """Whether that certificate may not be used by a server."""
    gradients: int = ANY
    """Of a worker: as in View."""


class JoinReply(Record, frozen=True):
    """Reply to Join: `error`; or, once all have joined, rank and view; until then, which processes are missing."""

    error: str = ""
    rank: int = ANY
    view: View | None = None
    plan: bytes = b""
    missing: str = ""
    time_s: float = 0.0
    """The coordinator's clock, in seconds since 1970."""
    plan_wanted: bool = False
    """The process is not registered and the coordinator lacks the plan of that digest: upload it in parts, then join again."""


class PlanPart(Record, frozen=True):
    """A chunk of a plan, starting at byte `begin`. The reply is an empty HeartbeatReply."""

    plan_digest: str
    nbytes: int
    """Of the whole plan."""
    begin: int
    data: bytes


class PeerExit(Record, frozen=True):
    """A peer that has left or died, by its name in errors, and the reason."""

    peer: str
    reason: str
    exchanges: int = -1
    """As in Leave."""


class Overdue(Record, frozen=True):
    """A server's report of waiting sums: the earliest such step, and the workers missing there for `limit_s` or longer."""

    step: int
    missing: tuple[int, ...] = ()
    """Ranks of workers; empty if no sum has waited for `limit_s` yet."""
    limit_s: float = 0.0


class Heartbeat(Record, frozen=True):
    """Sent by the process itself, or by its heartbeat child process, which also reports the state of its parent."""

    token: str
    missed: tuple[str, ...] = ()
    """Peers whose machine closed the data connection without an orderly end, and that have not reconnected."""
    parent: Literal["", "stopped", "ended"] = ""
    """Set by the child process when its parent does not send heartbeats."""
    generation: int = 0
    """Of the newest view that the process knows; 0: the process wants no views."""
    ended: tuple[str, ...] = ()
    """Of a server: workers that have closed their data connections in order."""
    dropped: tuple[PeerExit, ...] = ()
    """Of a server: workers that it disconnected because they broke the protocol."""
    active_generation: int = 0
    """Generation of the view that a worker has switched to. It needs nothing that was reported before that view."""
    overdue: Overdue | None = None
    """Of a server, while sums wait there."""


class HeartbeatReply(Record, frozen=True):
    """Reply to Heartbeat. `unknown_token`: the sender is not registered with this coordinator."""

    unknown_token: bool = False
    dead: str = ""
    """If not empty: the sender itself was declared dead, for this reason."""
    failed: tuple[PeerExit, ...] = ()
    departed: tuple[PeerExit, ...] = ()
    job_done: bool = False
    """Every worker has left or is dead."""
    job_failed: bool = False
    """The job is over, and not all of its last workers finished."""
    view: View | None = None
    """A view that is newer than the sender's. From now on its members are the job's."""


class Leave(Record, frozen=True):
    token: str
    reason: str = FINISHED
    """Any other reason marks an end with an error."""
    exchanges: int = -1
    """Of a worker: how many exchanges it has contributed to, for peers that wait for it in a later one. -1: unknown."""


class RegisterSite(Record, frozen=True):
    """Registers a site: a machine that only dials out, whose ranks reach the others through the coordinator. Repeated while
    the site is present.

    A launcher sends this for all workers of its machine, before they start. `leave`: the site leaves, for this reason.
    """

    home: str
    """As a token in Join."""
    name: str
    pid: int
    protocol: int
    version: str
    workers: int
    place: int = ANY
    """Requested index among the sites. Ranks are assigned in the order of these indices."""
    leave: str = ""
    certificate: str = ""
    """As in Join."""
    meeting: str = ""
    """Name of the rendezvous that assigned its ranks."""
    waited_s: float = 0.0
    """Seconds since the site first asked for its ranks."""


class SiteReply(Record, frozen=True):
    """Reply to RegisterSite: `error`; or what is missing; or, once all sites are present, the ranks of this site's workers."""

    error: str = ""
    missing: str = ""
    first: int = ANY
    """Rank of its first worker; the other workers have the ranks after it."""
    world: int = 0
    node: int = ANY
    """Index of this site among the sites."""
    nodes: int = 0
    meeting: str = ""
    """Random name, new in each process of the coordinator."""
    joins: bool = False
    """The job is already running and admits this site: its ranks are the last ones of `world`."""
    min_workers: int = 0
    """The coordinator's setting."""


class KvRequest(Record, frozen=True):
    """Call to the key-value store of the sites: writes, then waits up to `wait_s` for keys. Idempotent."""

    home: str
    put: tuple[tuple[str, bytes], ...] = ()
    drop: tuple[str, ...] = ()
    add: tuple[str, int, str] | None = None
    """Key, amount, and a random name that makes a repeat recognizable."""
    want: tuple[tuple[str, int], ...] = ()
    """Keys to read, each with the rank that writes it; ANY: unknown."""
    wait_s: float = 0.0
    without: bool = False
    """Do not wait for keys whose writers are gone, and report no error for them."""
    view: int = 0
    """If not 0: the writes belong to the view of that generation and are ignored once there is a newer one."""
    rank: int = ANY
    """Of that site: the rank that waits for keys of other ranks."""
    limit_s: float = 0.0
    """Seconds after which the ranks that it waits for count as hung. 0: none is blamed."""


class KvReply(Record, frozen=True):
    """Reply to KvRequest: the values found. `error`: why some of them will never be written."""

    values: tuple[bytes | None, ...] = ()
    error: str = ""
    sum: int = 0
    over: bool = False
    """The missing values will not come: their writers are gone."""
    lost: str = ""
    """The lost peer that `error` is about; empty if `error` is about the caller."""


class StatusRequest(Record, frozen=True):
    """Queries the coordinator and measures the link: `data` is uploaded, `wanted` bytes are downloaded. Registers nothing."""

    data: bytes = b""
    wanted: int = 0
    """At most ABOUT_NBYTES. A job that has begun sends none, so that queries do not take its bandwidth."""


class StatusReply(Record, frozen=True):
    """Reply to StatusRequest."""

    version: str
    protocol: int
    wire: int
    """Version of the data frames."""
    time_s: float
    """The coordinator's clock, in seconds since 1970."""
    workers: int
    """Workers of the job; 0 if not known yet."""
    seated: int
    """Workers that are registered and present."""
    servers: tuple[ServerInfo, ...] = ()
    """Servers that are present."""
    begun: bool = False
    plan: str = ""
    """Digest of the plan, once there is one."""
    data: bytes = b""
    free_seats: int = 0
    """Of a running job: how many workers it would admit to replace those that are gone."""
    closed_reason: str = ""
    """Of a running job: why it admits no workers; "" if it does."""
    full: bool = False
    """The job has all its workers; it admits another one when one of them is gone."""


MAX_STATUS_NBYTES = 192 << 10


def site_request(workers: int, place: int = ANY, *, name: str = "") -> RegisterSite:
    """The request of this process to register a site of that many workers."""
    return RegisterSite(secrets.token_hex(8), name or socket.gethostname(), os.getpid(), PROTOCOL, version(), workers, place)


def worker_request(
    job: str, rank: int, world: int, *, node: int = 0, plan: bytes = b"", plan_digest: str = "", outbound_only: bool = False,
    elastic: bool = False, gradients: int = ANY, must_match: Mapping[str, str] = {},
) -> Join:
    """The request of this process to join as a worker. Only rank 0, or a worker that may become rank 0, sends the plan."""
    sent = plan if rank in (0, ANY) else b""
    return Join("worker", secrets.token_hex(8), socket.gethostname(), os.getpid(), PROTOCOL, version(), rank, world, node, job,
                sent, plan_digest or digest_of(plan), outbound_only=outbound_only, elastic=elastic, gradients=gradients,
                must_match=dict(must_match))


def server_request(address: str, node: int = ANY, number: int = ANY, *, colocated: bool = False, streams: str = "") -> Join:
    """The request of this process to join as a summation server at `address`. `number`: its number in the plan.

    `colocated`: this process also runs the coordinator. `streams`: where it accepts gRPC streams.
    """
    return Join("server", secrets.token_hex(8), socket.gethostname(), os.getpid(), PROTOCOL, version(), number, node=node,
                address=address, colocated=colocated, streams=streams)


def digest_of(plan: bytes) -> str:
    """As records.digest, from the plan's canonical bytes; "" for no plan."""
    return hashlib.sha256(plan).hexdigest()[:16] if plan else ""


@functools.cache
def version() -> str:
    """The installed package's version, or "source" for a bare checkout."""
    import importlib.metadata  # imported late, because a coordinator does not need it

    try:
        return importlib.metadata.version("commlayer")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def incompatible(registration: Join | RegisterSite, version: str) -> str:
    """Why a process with this software cannot take part; "" if it can. `version`: the job's; empty if not known."""
    if registration.protocol != PROTOCOL:
        return coded("E-VERSION", f"speaks control protocol {registration.protocol}, the coordinator {PROTOCOL}: install the "
                     "same "
                     "commlayer everywhere")
    if version and registration.version != version:
        return coded("E-VERSION",
                     f"runs commlayer {registration.version}, the job {version}: install the same version everywhere")
    return ""


def names(reason: str, peer: str) -> bool:
    """Whether `reason` names `peer` as its cause. Errors begin with the peer that they are about.

    >>> names("PeerLost: server 1: connection lost", "server 1"), names("it met server 1", "server 1")
    (True, False)
    >>> names("PeerLost: worker 1 (ben): is gone", "worker 1"), names("PeerLost: worker 11: is gone", "worker 1")
    (True, False)
    """
    return named_at(reason, peer) >= 0


def named_at(reason: str, peer: str) -> int:
    """Where `reason` names `peer` as its cause; -1 if it does not."""
    match = re.search(rf"\b{re.escape(peer)}( \([^()]*\))?: ", reason)
    return match.start() if match else -1


def dropped_by(server_request: str, why: str) -> str:
    """Why a worker is gone that a server has dropped. The text does not name the server as the cause.

    >>> names("worker 1: " + dropped_by("server 0", "sent noise"), "server 0")
    False
    """
    return f"was dropped (by {server_request}): {why}"


def pack(record: Record) -> bytes:
    return msgspec.msgpack.encode(record)


def unpack(data: bytes, kind: type[R], peer: str) -> R:
    """Decodes a record; CorruptFrame names the peer if the data is malformed."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except MALFORMED as error:
        if other := _other_version(data):
            raise CorruptFrame(other, peer=peer, code="E-VERSION") from None
        raise CorruptFrame(f"sent a {kind.__name__} that breaks the format: {short_line(error, 200)}; "
                           f"where versions differ, install the same everywhere (here {version()})", peer=peer) from None


class _Said(msgspec.Struct):
    """The field that can be read from a request of any version."""

    version: str


def _other_version(data: bytes) -> str:
    try:
        theirs = msgspec.msgpack.decode(data, type=_Said).version
    except (*MALFORMED, RecursionError):  # fields that it does not know are skipped by recursion
        return ""
    remedy = "install the same version everywhere"
    return "" if theirs == version() else f"runs commlayer {short_line(theirs, 64)}, here {version()}: {remedy}"


# ---- Text of requests appears in errors, in logs and in the replies to all heartbeats, so it is sanitized once, when a call
# arrives.

REASON_CHARS = 1000
MOST_CHARS = {"token": 64, "home": 64, "name": 255, "version": 64, "address": 300, "streams": 300, "reason": REASON_CHARS,
              "leave": REASON_CHARS}
"""Most characters by field name, in any request."""


def sanitize(request: R) -> R:
    """The request with sanitized text. Text that commlayer itself writes does not change.

    >>> from commlayer.cluster.messages import Leave
    >>> fit(Leave("token", "no room\\nworker 0: forged")).reason
    'no room\\\\nworker 0: forged'
    """
    changed: dict[str, object] = {}
    for field, most in MOST_CHARS.items():
        text = getattr(request, field, "")
        if text != (line := short_line(text, most)):
            changed[field] = line
    if isinstance(request, Join) and request.must_match:
        changed["must_match"] = {short_line(name, REASON_CHARS): short_line(value, REASON_CHARS)
                            for name, value in request.must_match.items()}
    if isinstance(request, Heartbeat) and request.dropped:
        changed["dropped"] = tuple(msgspec.structs.replace(gone, reason=short_line(gone.reason, REASON_CHARS))
                                   for gone in request.dropped)
    return msgspec.structs.replace(request, **changed) if changed else request
