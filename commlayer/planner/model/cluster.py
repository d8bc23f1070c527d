"""What a plan is made from: the machines, the measured costs, the wishes; and the tasks that a path costs. Values only."""

from __future__ import annotations

from typing import Literal, NamedTuple

from commlayer.planner.model.learning import LearningRow
from commlayer.records import Job, Plan, Record

NO_LIMIT = 1e9
"""Of loss: more than any way loses."""


class Line(Record, frozen=True):
    """Seconds as a line over a size: floor_s + size * slope_s, whatever the size counts (elements, bytes)."""

    floor_s: float
    slope_s: float = 0.0
    error: float = 0.0
    """Largest relative deviation of what it was fitted to."""

    def __call__(self, size: float) -> float:
        return self.floor_s + size * self.slope_s


class Link(Record, frozen=True):
    """One machine's connection, each way for itself. alpha_s: one way, from this machine to the core of the network."""

    up_bps: float
    down_bps: float
    alpha_s: float = 0.0


class Node(Record, frozen=True):
    """One machine: its ranks, what they compute on, and its links inside and out."""

    name: str
    ranks: int
    device: str
    """A GPU of the tables ("rtx3060"), or "cpu"."""
    link: Link
    intra_bps: float = 0.0
    """Between two ranks of the node, each way. 0: it has one rank."""
    intra_alpha_s: float = 0.0
    speed: float = 1.0
    """Of its computing against that of the profile."""
    server: bool = True
    """Whether it can host a summation server."""


class Cluster(Record, frozen=True):
    """The machines. Nodes without ranks (ranks = 0) can host servers only."""

    nodes: tuple[Node, ...]
    reachable: bool = True
    """Whether collectives may cross nodes. False over the internet: then only servers do."""

    @property
    def ranks(self) -> int:
        return sum(n.ranks for n in self.nodes)


class CodecCost(Record, frozen=True):
    """Seconds over elements of one codec on one device, and its bytes."""

    codec: str
    """As a plan spells it, without error feedback."""
    device: str
    """"gpu" or "cpu"; or one GPU's name as nodes have it, which goes before "gpu"."""
    encode: Line
    decode: Line
    """Also the price of adding one payload to a sum."""
    nbytes: Line
    """Bytes of a payload over elements: the one line that is no time."""
    task_loss: float | None = None
    """By what part the loss is higher after equally many steps (0.01: 1 %), as a tuner measured it on the user's own task, with
    gradients exchanged in each; None: what the profile's learning rows say."""
    rounds: int = 1
    """Exchanges per bucket: each pays the latency again. `nbytes` is of all together."""
    sums: bool = False
    """Whether its payloads can be added as they are, by an all-reduce."""
    alone: bool = True
    """Whether a payload by itself says what was sent, so that whoever has it may add it to a dense sum."""
    answers: bool = True
    """Whether a server may send its sums so where workers send otherwise."""
    reduced: Line = Line(0.0)
    """Bytes of what an all-reduce adds up in place of payloads, over elements; 0: as many as `nbytes`."""


class Profile(Record, frozen=True):
    """What was measured, or taken from tables."""

    codecs: tuple[CodecCost, ...]
    server: Line
    """A server's seconds per payload byte besides its codec's."""
    bucket_s: float = 0.0
    """What each bucket costs a worker besides: hooks, frames, threads."""
    copy: Line = Line(0.0)
    """Seconds over bytes between a GPU and its host."""
    inside: Line = Line(0.0)
    """Of collectives among a node's ranks: seconds a message, and a byte of each link's. Measured it goes before what nodes
    say; 0: nobody has."""
    across: Line = Line(0.0)
    """The same of collectives between nodes. None is faster than the links that it crosses."""
    learning: tuple[LearningRow, ...] = ()
    """What ways of training cost in steps and in loss, as measured; none: all steps count alike."""
    energy: tuple[float, ...] = ()
    """What parts of the gradients' energy the job's tensors have: what a bucket's codec costs counts by them and by elements,
    half each. None: by elements."""
    source: str = "tables"
    """"tables", "measured" or a name that a person gave."""


class Policy(Record, frozen=True):
    """What the planner may do."""

    codecs: tuple[str, ...] = ()
    """Allowed ones; empty: all of the profile's."""
    max_loss: float = NO_LIMIT
    """By what part the loss may be higher after equally many steps, at most: 0.01 is 1 %."""
    objective: Literal["loss", "step"] = "loss"
    """What is minimised: seconds to a loss, which are seconds of a step times how many times as many steps the plan needs as
    dense training; or seconds of a step, whatever it learns."""
    optimizer: str = ""
    """Its family: "sgd" (with momentum) or "adam" (AdamW, LANS and their like); empty, or anything else: the worse of both."""
    exact: bool = True
    """Only ways that are synchronous SGD up to coding. False: also local steps, coded updates and late results."""
    forward: bool = False
    """Whether results may come in during the next forward pass (overlap="forward"), which wants a plain module."""
    devices: tuple[str, ...] = ("gpu", "cpu")
    max_encodes: int = 4
    """Compressions of one gradient on its way."""
    max_local_steps: int = 0
    """Steps of local training to an exchange, at most; 0: one if `exact`, else as many as pay. Powers of two are searched."""
    staleness: bool | None = None
    """Whether results may be used one step late; None: where it is not `exact`, and measured rows say what that costs."""
    fragments: bool = True
    """Whether a round's exchange may go in parts, of which each is merged by itself: not where workers may leave."""
    priority: bool = True
    """Forward order on the wire; else by readiness."""
    whole_tree: bool = False
    """Also what workers cannot run yet, payloads of gradients on GPUs that an all-reduce adds up: to compare with, not to train
    by."""


class PlanInputs(Record, frozen=True):
    """What a plan was made from: it lies beside the plan, so that the plan can be explained and varied later."""

    job: Job
    cluster: Cluster
    profile: Profile | None = None
    policy: Policy | None = None


class Basis(NamedTuple):
    """A plan as it was made, before it was lowered, and what it was made from."""

    plan: Plan
    inputs: PlanInputs


class Task(Record, frozen=True, gc=False):
    """One piece of work of a bucket. It occupies its lanes together from its start, each as long as it needs it."""

    lanes: tuple[tuple[str, float], ...]
    """(lane, seconds). A transfer occupies the sender's up-link and the receiver's down-link."""
    after: tuple[int, ...] = ()
    """Tasks of the same bucket (by index) that end before it starts; none: it starts when the gradient is ready."""
    latency_s: float = 0.0
    """It ends so long after its longest lane is free again."""
    op: str = ""
    """What it is part of, for timelines."""
    nbytes: int = 0
