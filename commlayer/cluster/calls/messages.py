"""Messages between processes and the coordinator: frozen records, encoded as msgpack."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec

from commlayer.errors import CorruptFrame, append_code, short_line
from commlayer.observe.events import MAX_LINE_NBYTES
from commlayer.records import MALFORMED, Epoch, Record, ServerInfo, complete

PROTOCOL = 8
FINISHED = "finished"
SERVICE = "commlayer.Control"
MAX_PLAN_NBYTES = 64 << 20
"""Largest size of a plan. A plan of a model with 100,000 tensors has about 20 MB."""
MAX_REPLY_NBYTES = MAX_PLAN_NBYTES + (4 << 20)
"""Largest size of a reply. A reply may contain a plan."""
PART_NBYTES = 192 << 10
MAX_KEYS = 1024
"""Maximum number of keys in one call to the store of the sites, in addition to one for each worker of the job."""
MAX_NBYTES = 256 << 10
"""Largest size of a call. An unauthenticated client may send this much, so plans are uploaded in chunks."""

MAX_EVENTS, MAX_EVENTS_NBYTES = 64, 32 << 10
"""Maximum number of events in a heartbeat, and the size from which a sender leaves further events for the next one."""
MAX_REPLY_EVENTS_NBYTES = 1 << 20
"""Maximum size of the events in one reply."""

R = TypeVar("R", bound=Record)
V = TypeVar("V")
Line = Annotated[bytes, msgspec.Meta(max_length=MAX_LINE_NBYTES)]
Kind = Literal["worker", "server", "site"]
STARTING = ": starting"
"""End of the text of `JoinReply.missing` if the job waits for no further site, but begins after its last call."""
ANY = -1
"""Value of a rank, node or index that means: the coordinator chooses it."""
StoreKey = tuple[str, int]
"""Key of a value in the store of the sites: a name, and the rank whose site writes it. ANY: the site that writes it first."""


class Join(Record, frozen=True):
    """Registers a worker or server with the job, or a site. The request is repeated until all have joined; a site repeats it as
    long as it is present.

    A site is a machine that accepts no connections, whose ranks reach other sites through the coordinator. A site's launcher
    registers the site before its workers start, in order to get their ranks.
    """

    kind: Kind
    token: str
    """Random token that identifies the registration."""
    name: str
    pid: int
    protocol: int
    version: str
    rank: int = ANY
    """For a site: requested index among the sites. Ranks are assigned in the order of these indices."""
    world: int = 0
    """Number of workers that the sender expects; 0: the number that the coordinator was started with. For a site: number of its
    own workers."""
    node: int = 0
    """Index of the sender's machine. ANY, for a server: the node of workers with the same `name`, else a new node."""
    job: str = ""
    """Digest of a worker's Job record (its model's parameters), which must be equal on all workers."""
    plan: bytes = b""
    """Canonical bytes of the plan; all workers use the plan of worker 0. Empty on the wire, since plans are uploaded as
    PlanPart messages."""
    plan_digest: str = ""
    """Digest of the sender's plan, "" if it has none. All workers that have a plan must have the same."""
    address: str = ""
    """For a server: address of its data port."""
    streams: str = ""
    """For a server: address where it accepts gRPC streams; "" if it does not."""
    colocated: bool = False
    """True for a server that runs in the coordinator's process, and fails with that process."""
    restartable: bool = False
    """True: the server has a journal, so it can be restarted and register again."""
    outbound_only: bool = False
    """True for a worker whose machine accepts no connections. A server with the same `name` therefore runs on another
    machine."""
    elastic: bool = False
    """True for a worker that can continue after other workers die, leave or join."""
    site_world: int = 1
    """For a worker: number of workers of its site; see Member.site_world."""
    must_match: dict[str, str] = msgspec.field(default_factory=dict)
    """For a worker: settings by name that must be equal on all workers. The first workers compare these settings themselves;
    the coordinator compares those of a worker that joins later."""
    certificate: str = ""
    """Name in the caller's certificate, "" without TLS. The coordinator fills in this field and the next two."""
    serial: str = ""
    """Serial number of the caller's certificate in hex, as in the revocation list; "" without TLS. Stored with the
    registration."""
    dials_only: bool = False
    """True: the caller's certificate is not valid for servers."""
    gradients: int = ANY
    """For a worker: number of leading tensors that are gradients; the others are model buffers. ANY: all are gradients."""
    tensors: int = ANY
    """For a worker: number of tensors of its Job record, and of their elements. ANY: unknown."""
    elements: int = ANY
    leave: str = ""
    """For a site that leaves: the reason; otherwise ""."""
    meeting: str = ""
    """For a site: name of the coordinator's rendezvous that assigned the site's ranks; "" before."""
    waited_s: float = 0.0
    """For a site: seconds since it first requested ranks."""

    @property
    def node_name(self) -> str:
        """The name in the caller's certificate, or without TLS its machine's name."""
        return self.certificate or self.name

    @property
    def label(self) -> str:
        """The process, for errors and logs."""
        return f"{self.node_name} (pid {self.pid})"


class JoinReply(Record, frozen=True):
    """Reply to Join. It contains an error; or which processes are missing; or, once all have joined, the rank and the epoch
    (for a site: the ranks of its workers)."""

    error: str = ""
    rank: int = ANY
    """For a site: rank of its first worker. The site's other workers have the ranks after that."""
    epoch: Epoch | None = None
    plan: bytes = b""
    missing: str = ""
    plan_wanted: bool = False
    """True: the process is not registered, because the coordinator lacks the plan with the request's digest. Upload the plan in
    chunks, then join again."""
    world: int = 0
    """For a site: number of the job's workers, once ranks are assigned."""
    node: int = ANY
    """For a site: its index, from 0 to `nodes` - 1."""
    nodes: int = 0
    meeting: str = ""
    """For a site: random name of the coordinator's rendezvous. Each process of the coordinator has a new name."""
    joins: bool = False
    """True for a site that the running job admits. The site's ranks are the last ones of `world`."""
    min_workers: int = 0
    """For a site: the coordinator's setting `min_workers`. The job continues while at least this many workers are left."""
    begun: bool = False
    """For a site: whether the job has begun. A site that leaves before ends the start of all others."""

    @property
    def complete(self) -> bool:
        return self.epoch is not None or self.world > 0


class PlanPart(Record, frozen=True):
    """A chunk of a plan, starting at byte `begin`. The reply is an empty HeartbeatReply."""

    plan_digest: str
    nbytes: int
    """Size of the complete plan."""
    begin: int
    data: bytes
    certificate: str = ""
    """Name in the caller's certificate, filled in by the coordinator."""


class PeerExit(Record, frozen=True):
    """A peer that has left or died, by its name in errors, and the reason."""

    peer: str
    reason: str
    exchanges: int = -1
    """Number of exchanges that the worker had completed when it left; -1: unknown."""


class Overdue(Record, frozen=True):
    """A server's report of waiting sums: the earliest step with a waiting sum, and the workers whose contributions are missing
    in that step for `limit_s` or longer."""

    step: int
    missing: tuple[int, ...] = ()
    """Ranks of the missing workers; empty if no sum has waited for `limit_s` yet."""
    limit_s: float = 0.0


class Heartbeat(Record, frozen=True):
    """A heartbeat. It is sent by the registered process, or by the process's heartbeat sidecar, which also reports the state of
    its parent."""

    token: str
    missed: tuple[str, ...] = ()
    """Peers whose machine closed the data connection without an orderly end, and that have not reconnected."""
    parent: Literal["", "stopped", "ended"] = ""
    """State of the registered process, set by its sidecar if that process is stopped or has ended; "" if it runs."""
    generation: int = 0
    """Generation of the newest epoch that the sender knows; 0: the sender needs no epochs in the reply."""
    ended: tuple[str, ...] = ()
    """For a server: workers that have closed their data connections in order."""
    heard: tuple[str, ...] = ()
    """For a server: workers from which data has arrived since its last heartbeat."""
    dropped: tuple[PeerExit, ...] = ()
    """For a server: workers that it disconnected because they broke the protocol."""
    known_generation: int = 0
    """Generation of an epoch whose members the worker has switched to. Replies omit peers that left before that epoch."""
    active_generation: int = 0
    """Generation of the epoch whose process groups the worker uses; 0: it does not take part yet. Workers that left before they
    took part do not count in it, so it is the same for all workers after the same step, and at most the coordinator's."""
    overdue: Overdue | None = None
    """For a server: its report of waiting sums; None if no sum waits."""
    events: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MAX_EVENTS)] = ()
    """The sender's newest events (observe/events.py), as lines of JSON. Events of a heartbeat without a reply are repeated."""
    first_event: int = 0
    """Number of the first of these events in the sender's log, by which repeated events are recognized."""
    time_s: float = 0.0
    """The sender's clock, in seconds since 1970; 0 without events."""


class HeartbeatReply(Record, frozen=True):
    """Reply to Heartbeat, and to calls whose reply needs no fields. `unknown_token`: the sender is not registered with this
    coordinator."""

    unknown_token: bool = False
    dead: str = ""
    """Why the coordinator has declared the sender itself dead; "" if it has not."""
    silent: bool = False
    """True: because heartbeats of the sender, or of its site, stopped. The sender may have done nothing wrong."""
    failed: tuple[PeerExit, ...] = ()
    departed: tuple[PeerExit, ...] = ()
    job_done: bool = False
    """True: every worker has left or died."""
    job_failed: bool = False
    """True: the job is over, but not all of its last workers finished."""
    epoch: Epoch | None = None
    """The newest epoch if the sender does not have this epoch yet; otherwise None. From now on the members of the job are those
    of this epoch."""
    revision: int = 0
    """Number of changes of members and epochs until now, from an arbitrary number on: see WatchRequest."""


class WatchRequest(Record, frozen=True):
    """Asks for a HeartbeatReply as soon as members or the epoch change. Until then the call waits, at most until its deadline.
    A watch request is no sign of life. Each process has one waiting call; its next call ends the previous one."""

    token: str
    generation: int
    """Generation of the newest epoch that the sender knows."""
    revision: int
    """Revision of the last reply that the sender has. If there is a newer one, the call does not wait."""


class Leave(Record, frozen=True):
    token: str
    reason: str = FINISHED
    """FINISHED for an orderly leave. Any other text is the error with which the process ends."""
    exchanges: int = -1
    """Number of exchanges to which a worker has contributed; -1: unknown. Peers that wait for the worker in a later exchange
    are sent this number."""


class KvRequest(Record, frozen=True):
    """A call to the key-value store of the sites: writes, then waits up to `wait_s` for keys. A repeated call has no further
    effect. Only the site that owns a key may replace or drop the key's value."""

    home: str
    put: tuple[tuple[StoreKey, bytes], ...] = ()
    drop: tuple[StoreKey, ...] = ()
    add: tuple[StoreKey, int, str] | None = None
    """A number to increase: its key, the amount, and a random token by which the coordinator recognizes a repeated call. All
    sites may add to the same number."""
    want: tuple[StoreKey, ...] = ()
    """Keys to read. The caller waits for the rank that a key names."""
    wait_s: float = 0.0
    without: bool = False
    """True: the call does not wait for keys whose writers are gone, and reports no error for such keys. False: the call fails
    if a writer is lost before all writers have written, even if the lost writer has written."""
    generation: int = 1
    """Generation of the epoch to which the writes belong. The values are dropped after all workers have switched to later
    epochs."""
    rank: int = ANY
    """Rank, at the calling site, that waits for keys of other ranks."""
    limit_s: float = 0.0
    """Seconds after which a rank that the caller waits for counts as hung; 0: never."""
    waited_s: float = 0.0
    """Seconds for which the caller has waited for these keys."""


class KvReply(Record, frozen=True):
    """Reply to KvRequest: the values found. `error`: why some missing values will never be written. `sum`: the increased
    number."""

    values: tuple[bytes | None, ...] = ()
    error: str = ""
    sum: int = 0
    over: bool = False
    """True: the missing values will never be written, because their writers are gone."""
    lost: str = ""
    """Name of the lost peer that `error` is about; "" if `error` is about the caller."""


class StatusRequest(Record, frozen=True):
    """Queries the coordinator and measures the link: `data` is uploaded, `wanted` bytes are downloaded. Does not register the
    sender."""

    data: bytes = b""
    wanted: int = 0
    """Bytes of `data` wanted in the reply, at most MAX_STATUS_NBYTES. After a job has begun the reply contains none, so queries
    use no bandwidth of the job."""
    caller: str = ""
    """Address from which the call came; the coordinator sets it."""


class StatusReply(Record, frozen=True):
    """Reply to StatusRequest: versions, job and servers as the coordinator knows them."""

    version: str
    protocol: int
    wire: int
    """Version of the data frames."""
    time_s: float
    """The coordinator's clock, in seconds since 1970."""
    workers: int
    """Largest number of workers of the job; 0 if not known yet."""
    seated: int
    """Number of workers that are registered and have not left or died."""
    servers: tuple[ServerInfo, ...] = ()
    """Servers that are registered and have not left or died."""
    begun: bool = False
    plan: str = ""
    """Digest of the job's plan; "" if there is no plan yet."""
    data: bytes = b""
    free_seats: int = 0
    """For a running job: number of further workers that it would admit."""
    closed_reason: str = ""
    """For a running job: why it admits no workers; "" if it does."""
    full: bool = False
    """True: the job has all its workers, so the coordinator admits another worker only after one has left."""
    min_workers: int = 0
    """Number of workers from which the job can begin; 0: `workers`."""
    caller: str = ""
    """Address at which the coordinator sees the caller."""
    port: int = 0
    """Port on which the coordinator listens."""


MAX_STATUS_NBYTES = 192 << 10


class EventsRequest(Record, frozen=True):
    """Asks for the events of the job, from line number `cursor` of the coordinator's log `log` on. A cursor of another log
    counts as 0."""

    log: str = ""
    cursor: int = 0


class EventsReply(Record, frozen=True):
    """Reply to EventsRequest: lines of JSON (observe/events.py), and the cursor with which to ask for the next ones."""

    log: str
    cursor: int
    lines: tuple[bytes, ...] = ()
    time_s: float = 0.0
    """The coordinator's clock, to which the times of all events refer."""


def site_request(workers: int, place: int = ANY, *, name: str = "") -> Join:
    """Creates this process's request to register a site with this many workers. `place`: requested index among the sites."""
    return Join("site", secrets.token_hex(8), name or socket.gethostname(), os.getpid(), PROTOCOL, version(), place, workers)


def worker_request(
    job: str, rank: int, world: int, *, node: int = 0, plan: bytes = b"", plan_digest: str = "", outbound_only: bool = False,
    elastic: bool = False, site_world: int = 1, gradients: int = ANY, tensors: int = ANY, elements: int = ANY,
    must_match: Mapping[str, str] = {},
) -> Join:
    """Creates this process's request to join as a worker. The plan is included only for rank 0, or if the rank is not fixed."""
    sent = plan if rank in (0, ANY) else b""
    return Join("worker", secrets.token_hex(8), socket.gethostname(), os.getpid(), PROTOCOL, version(), rank, world, node, job,
                sent, plan_digest or hash_plan_bytes(plan), outbound_only=outbound_only, elastic=elastic, site_world=site_world,
                gradients=gradients, tensors=tensors, elements=elements, must_match=dict(must_match))


def server_request(address: str, node: int = ANY, number: int = ANY, *, colocated: bool = False, streams: str = "") -> Join:
    """Creates this process's request to join as a summation server at `address`. `number`: its number in the plan.

    `colocated`: this process also runs the coordinator. `streams`: address where it accepts gRPC streams.
    """
    return Join("server", secrets.token_hex(8), socket.gethostname(), os.getpid(), PROTOCOL, version(), number, node=node,
                address=address, colocated=colocated, streams=streams)


def hash_plan_bytes(plan: bytes) -> str:
    """Returns the digest of a plan from its canonical bytes, equal to records.digest of the plan; "" for no plan."""
    return hashlib.sha256(plan).hexdigest()[:16] if plan else ""


@functools.cache
def version() -> str:
    """Returns the installed package's version, or "source" for a checkout that is not installed."""
    import importlib.metadata  # imported late, because a coordinator does not need it

    try:
        return importlib.metadata.version("commlayer")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def find_incompatibility(registration: Join, version: str) -> str:
    """Returns the reason why a process with this software version cannot join; "" if it can. `version`: the job's; "" if not
    known."""
    if registration.protocol != PROTOCOL:
        return append_code("E-VERSION", f"uses control protocol {registration.protocol}, but the coordinator uses {PROTOCOL}: "
                           "install the same commlayer version everywhere")
    if version and registration.version != version:
        return append_code("E-VERSION",
                           f"runs commlayer {registration.version}, but the job runs {version}: install the same version "
                           f"everywhere")
    return ""


def blames_peer(reason: str, peer: str) -> bool:
    """Returns whether `reason` names `peer` as its cause. Errors begin with the peer that they are about.

    >>> blames_peer("PeerLost: server 1: connection lost", "server 1"), blames_peer("it met server 1", "server 1")
    (True, False)
    >>> blames_peer("PeerLost: worker 1 (ben): is gone", "worker 1"), blames_peer("PeerLost: worker 11: is gone", "worker 1")
    (True, False)
    """
    return blame_position(reason, peer) >= 0


def blame_position(reason: str, peer: str) -> int:
    """Returns the position where `reason` names `peer` as its cause; -1 if it does not."""
    match = re.search(rf"\b{re.escape(peer)}( \([^()]*\))?: ", reason)
    return match.start() if match else -1


def dropped_by(server_request: str, why: str) -> str:
    """Returns the reason for a worker that a server has disconnected. The text does not name the server as the cause.

    >>> blames_peer("worker 1: " + dropped_by("server 0", "sent noise"), "server 0")
    False
    """
    return f"was dropped (by {server_request}): {why}"


def pack(record: Record) -> bytes:
    return msgspec.msgpack.encode(record)


def unpack(data: bytes | memoryview, kind: type[V], peer: str, what: str = "") -> V:
    """Decodes what a peer sent. Raises CorruptFrame, which names the peer, if the data is malformed. `what`: what is sent, for
    that error; "": a message with the name of the record `kind`."""
    try:
        return msgspec.msgpack.decode(data, type=complete(kind))
    except MALFORMED as error:
        if other := _other_version(data):
            raise CorruptFrame(other, peer=peer, code="E-VERSION") from None
        raise CorruptFrame(f"sent {what or f'a {kind.__name__} message'} that is malformed: {short_line(error, 200)}; if "
                           f"versions differ, install the same version everywhere (here {version()})", peer=peer) from None


class _AnyVersion(msgspec.Struct):
    """The only field that can be read from a request of any version."""

    version: str


def _other_version(data: bytes | memoryview) -> str:
    try:
        theirs = msgspec.msgpack.decode(data, type=complete(_AnyVersion)).version
    except MALFORMED:
        return ""
    remedy = "install the same version everywhere"
    return "" if theirs == version() else (f"runs commlayer {short_line(theirs, 64)}, but this process runs {version()}: "
                                           f"{remedy}")
