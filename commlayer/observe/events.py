"""The event stream of a job: what happens while the job runs, as records that are one JSON object a line.

Every process appends its events to an EventLog. A file (EventFile), heartbeats to the coordinator, and readers such as
`commlayer top` take them from there. docs/reference/events.md is generated from the records below: the string below a field
is its description.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, TypeVar, get_args

import msgspec
from msgspec import structs

from commlayer.errors import short_line
from commlayer.records import complete

log = logging.getLogger("commlayer")

FORMAT = 1
"""Version of the stream's format. New kinds and new fields do not change the version, because readers ignore unknown kinds and
fields."""
COORDINATOR = -1
"""Rank of the coordinator in its events."""
MAX_TEXT_CHARS, MAX_NAMES = 1000, 16
"""Maximum number of characters of a text in an event, and of names in a list."""
MAX_LINE_NBYTES = 24 << 10
"""Maximum size of an event as a line. All texts together are shorter."""
MAX_INTEGER, MAX_NUMBER = 1 << 62, 1e100
"""Maximum size of integers and of other numbers, so that sums over ranks and steps never overflow."""

WaitKind = Literal["join", "step", "call", "heartbeat"]
LogLevel = Literal["info", "warning", "error"]
MemberState = Literal["joined", "left", "dead", "waiting"]
PlanReason = Literal["start", "automatic", "rollback", "quality", "requested", "members"]



class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Base class of all events, with the fields that all events have."""

    time: float = 0.0
    """Seconds since 1970."""
    rank: int = COORDINATOR
    """Rank that the sender had when it joined the job. The number does not change when other members leave. -1: the
    coordinator."""


class JobEvent(Event, tag="job", frozen=True, kw_only=True):
    """A process begins to train, or the coordinator starts a job. A coordinator's event of another run starts a new job."""

    run: str = ""
    """Identifies the run. The value is the same on all ranks of a job."""
    name: str = ""
    """Name of the training script."""
    host: str = ""
    """Name of the sender's machine, as other members see it."""
    world: int = 1
    """Number of workers."""
    version: str = ""
    """Version of commlayer."""
    settings: str = ""
    """Digest of the sender's settings, without secrets."""
    format: int = FORMAT
    """Version of the format of this stream."""


class StepEvent(Event, tag="step", frozen=True, kw_only=True):
    """Training steps of one rank. One event covers the steps since the rank's previous event, at most one event a second.
    Seconds are means per step; bytes and samples are sums."""

    step: int = 0
    """Number of training steps since the job began."""
    total: int = 0
    """Number of steps that the script will take, as passed to `attach(steps=)`; 0: unknown."""
    steps: int = 1
    """Number of steps that the event covers."""
    step_s: float = 0.0
    """Seconds per step. 0: unknown, as for the first step."""
    compute_s: float = 0.0
    """Seconds per step in which training did not wait for communication."""
    exposed_s: float = 0.0
    """Seconds per step in which training waited for communication."""
    hidden_s: float = 0.0
    """Seconds per step of communication that ran while training computed."""
    sent_bytes: int = 0
    """Payload bytes sent to servers and other nodes."""
    received_bytes: int = 0
    """Payload bytes received from servers and other nodes."""
    up_bytes: int = 0
    """All bytes that the sender's process has sent, with states, probes, calls and headers, as its home counts them."""
    down_bytes: int = 0
    """All bytes that it has received."""
    dense_bytes: int = 0
    """Bytes of these steps' gradients as float32: what synchronous training without compression would send."""
    loss: float | None = None
    """The last loss that the script passed to `session.log_loss`; null if there was none, or if it was not finite."""
    share: float = 0.0
    """This rank's fraction of the batch of all ranks."""
    samples: float = 0.0
    """Samples of these steps, as passed to `session.weight`; 0: unknown."""


class WaitEvent(Event, tag="wait", frozen=True, kw_only=True):
    """The sender waits for members. Repeated while the wait lasts, and sent once more when it is over."""

    what: WaitKind = "step"
    """What is missing: processes that have not joined, contributions to a step, a call between two steps (as for a
    checkpoint), or heartbeats."""
    names: tuple[str, ...] = ()
    """The members that are waited for, such as `worker 1`; empty if they are not known."""
    waited_s: float = 0.0
    """Seconds since the wait began; 0 if the event ends a wait of unknown length."""
    limit_s: float = 0.0
    """Seconds after which the wait fails; 0: no limit known to the sender."""
    over: bool = False
    """True: the wait has ended."""


class LinkEvent(Event, tag="link", frozen=True, kw_only=True):
    """Rates of the link of the sender's node, in bytes per second; 0: unknown."""

    up_bytes_per_s: float = 0.0
    """Upload rate in recent steps."""
    down_bytes_per_s: float = 0.0
    """Download rate in recent steps."""
    planned_up_bytes_per_s: float = 0.0
    """Upload rate for which the plan was made."""
    planned_down_bytes_per_s: float = 0.0
    """Download rate for which the plan was made."""
    rtt_s: float = 0.0
    """Smallest round-trip time of a heartbeat to the coordinator."""


class PlanEvent(Event, tag="plan", frozen=True, kw_only=True):
    """A plan takes effect on the sender. All ranks have the same plan after the same step."""

    digest: str = ""
    """Digest of the plan, as in plan files and logs."""
    summary: str = ""
    """Number of buckets, main codec, sync mode and prediction in a few words."""
    codec: str = ""
    """Codec of most elements."""
    local_steps: int = 1
    """Steps per exchange; 1: every step is synchronized."""
    step_s: float = 0.0
    """Predicted seconds per step; 0: no prediction."""
    convergence_factor: float = 0.0
    """Predicted number of steps to a loss, relative to uncompressed synchronous training; 0: no prediction."""
    reason: PlanReason = "start"
    """Why: the job starts, the controller found it, it takes back a slower plan, the quality guard changed codecs, the script
    requested it, or members have changed."""


class MemberEvent(Event, tag="member", frozen=True, kw_only=True):
    """The state of a member changes."""

    member: str = ""
    """Kind and number of the member, such as `worker 2` or `server 0`."""
    name: str = ""
    """Name of the member's machine."""
    state: MemberState = "joined"
    """The new state. `waiting`: registered for a job that has not begun. `left`: in order, or with an error as `reason`."""
    reason: str = ""
    """Why the member left or is dead; empty if it finished."""
    continues: bool = False
    """True: the worker left or died, and the job continues without it."""


class QualityEvent(Event, tag="quality", frozen=True, kw_only=True):
    """The quality guard has compared sent with exact gradients, or changed codecs."""

    cosine: float = 0.0
    """Cosine between the averaged and the exact gradient; 0 if this event reports no comparison."""
    residual: float = 0.0
    """Norm of the residual, relative to that of the gradient."""
    before: float = 0.0
    """Level of the coarsest codec before a change: its ratio, or its bytes as a fraction of dense bytes. 0: no change."""
    after: float = 0.0
    """Level after the change."""
    reason: str = ""
    """Why codecs were changed."""


class NoiseScaleEvent(Event, tag="noise_scale", frozen=True, kw_only=True):
    """The gradient noise scale, each time that it is estimated again."""

    batches: float = 0.0
    """The noise scale in batches of one worker. If it is far above the number of workers, more workers save steps."""


class AloneEvent(Event, tag="alone", frozen=True, kw_only=True):
    """How fast the job reaches a loss, compared with its fastest machine alone: when it is first known, and when it changes."""

    over_alone: float = 0.0
    """Seconds to a loss of the fastest machine alone, over those of this job: with measured step times and the cautious
    convergence factor. Below 1: one machine alone is faster."""
    forecast: float = 0.0
    """The same with the plan's predicted step time; 0: no prediction."""
    auto_times: float = 0.0
    """By how many times `sync="auto"` would be faster, as predicted; 0: unknown, or the script allows all sync modes."""


class WhatIfEvent(Event, tag="what_if", frozen=True, kw_only=True):
    """Possible changes that would make the job faster, as the planner predicts from measured times and links. Speeds are to a
    loss, relative to the job as it is; 0: unknown."""

    home_times: float = 0.0
    """The speed with one more home that is like the last one."""
    uplink_times: float = 0.0
    """The speed if the slowest uplinks were twice as fast."""
    names: tuple[str, ...] = ()
    """The members with these uplinks, such as `worker 1`."""


class PowerEvent(Event, tag="power", frozen=True, kw_only=True):
    """Power of the GPUs of the sender's machine, once a minute, as `nvidia-smi` reports it."""

    watts: float = 0.0
    """Watts of all GPUs of the machine; 0: unknown."""


class CostEvent(Event, tag="cost", frozen=True, kw_only=True):
    """What the job has cost so far, as `commlayer serve` counts it. Only the coordinator's are valid."""

    month: str = ""
    """The month of the bytes, such as `2026-11`."""
    sent_bytes: int = 0
    """Bytes that all machines have sent in this month, in all runs of this server, as homes count them."""
    received_bytes: int = 0
    """Bytes that they have received."""
    busiest: str = ""
    """Name of the machine that has sent and received most."""
    busiest_bytes: int = 0
    """Bytes that it has sent and received."""
    kwh: float = 0.0
    """Energy of this run; 0: the power of some machine is unknown."""
    kwh_price: float = 0.0
    """Price of a kWh, as given to `commlayer serve`; 0: unknown."""


class CheckpointEvent(Event, tag="checkpoint", frozen=True, kw_only=True):
    """All ranks have written or read a checkpoint."""

    action: Literal["saved", "loaded"] = "saved"
    """What was done."""
    step: int = 0
    """Number of training steps in the checkpoint."""
    directory: str = ""
    """The folder that the script named."""


class LogEvent(Event, tag="log", frozen=True, kw_only=True):
    """A message that the sender also logs."""

    level: LogLevel = "info"
    """Severity of the message."""
    code: str = ""
    """Error code, such as `E-DEADLINE`; empty for messages without a code."""
    text: str = ""
    """The message."""
    traceback: str = ""
    """Where an error in commlayer arose: the places in the code, innermost first; empty for other messages."""


AnyEvent = (JobEvent | StepEvent | WaitEvent | LinkEvent | PlanEvent | MemberEvent | QualityEvent | NoiseScaleEvent
            | AloneEvent | WhatIfEvent | PowerEvent | CostEvent | CheckpointEvent | LogEvent)
KINDS: tuple[type[Event], ...] = get_args(AnyEvent)
TAGS = frozenset(str(kind.__struct_config__.tag) for kind in KINDS)

E = TypeVar("E", bound=Event)
_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(complete(AnyEvent))


class _Tag(msgspec.Struct):
    event: str


_TAG_DECODER = msgspec.json.Decoder(complete(_Tag))


def encode(event: Event) -> bytes:
    """Returns the event as one line of JSON, without the line break."""
    return _ENCODER.encode(event)


def decode(line: bytes) -> AnyEvent | None:
    """Reads an event. Returns None for a kind that this version does not know. Raises msgspec.MsgspecError or
    UnicodeDecodeError for malformed lines."""
    try:
        return _DECODER.decode(line)
    except msgspec.ValidationError:
        if _TAG_DECODER.decode(line).event in TAGS:
            raise
        return None


def clean(event: E) -> E:
    """Returns the event with control characters escaped, long text shortened, and numbers replaced that are not finite (JSON
    has none) or very large. Logs clean the events that they append. Readers clean the events from files and other machines.

    >>> clean(LogEvent(text="no room\\nworker 0: forged")).text
    'no room\\\\nworker 0: forged'
    >>> clean(StepEvent(loss=math.nan, step_s=math.inf)) == StepEvent()
    True
    """
    changes: dict[str, Any] = {}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if isinstance(value, str):
            good: Any = short_line(value, MAX_TEXT_CHARS) if len(value) > MAX_TEXT_CHARS or not value.isprintable() else value
        elif isinstance(value, int):
            good = value if abs(value) < MAX_INTEGER else 0
        elif isinstance(value, float):
            good = value if abs(value) < MAX_NUMBER else None if name == "loss" else 0.0  # false for nan
        elif isinstance(value, tuple):
            good = tuple(short_line(each, MAX_TEXT_CHARS // MAX_NAMES) for each in value[:MAX_NAMES])
        else:
            continue
        if good is not value and good != value:
            changes[name] = good
    return structs.replace(event, **changes) if changes else event


Key = tuple[Any, ...]


def replacement_key(event: Event) -> Key | None:
    """Returns what an event describes. The next event with the same key replaces it in a view of the job. Returns None if
    events of this kind replace no other event."""
    match event:
        case LogEvent():
            return None
        case MemberEvent():
            return ("member", event.member)
        case WaitEvent():
            return ("wait", event.rank, event.what)
    return (event.__struct_config__.tag, event.rank)
