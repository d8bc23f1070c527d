"""Builds the plan that a job requests: a Plan, a plan file with its inputs file, one codec for all tensors, or the default."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import structs

from commlayer import loss_budget, plan_file, planner, records
from commlayer.balance import loss_model
from commlayer.cluster.collectives import Groups
from commlayer.cluster.messages import MAX_PLAN_NBYTES, REASON_CHARS
from commlayer.codec_spec import parse_spec, spec_error, split_two_way
from commlayer.compressors import Codec, build, codec_of, parse, wrap
from commlayer.compressors.feedback import Momentum
from commlayer.compressors.plan_codecs import is_download_codec, is_separable, is_summable
from commlayer.config import Config
from commlayer.engine.sync_modes import MODES, Forbids, RequestedModes, modes_of, requested_otherwise
from commlayer.errors import CommError, InvalidInput, short_line
from commlayer.planner import tables as machines
from commlayer.planner import tree as codec_fit
from commlayer.planner import tree as grammar
from commlayer.planner import tree as paths
from commlayer.planner.buckets import ELEMENT_NBYTES, LEAST_FRAGMENT_NBYTES, fragments_of, most_fragments
from commlayer.planner.convergence import Recipe, excess
from commlayer.planner.model import Basis
from commlayer.planner.tensors import untouched
from commlayer.records import MAX_FRAME_NBYTES, Bucket, Job, Plan, Spec

FINE = ("int4()", "int8()")
"""Codecs of the automatic plan between nodes, for uploads and downloads, until the planner has chosen a plan. The first codec
within the loss budget is used.

The links are not measured yet, and early steps are the most sensitive to errors: there a coarse codec costs more progress than
its faster steps gain.
"""
SPARSE, LEAST_RATIO = "topk(ratio={ratio}, values='int8')", 0.1
"""SPARSE: codec of the first steps if the loss model has no measurement of the codecs in FINE. LEAST_RATIO: smallest ratio of
SPARSE."""
FREE = "fp16()"
"""Codec of the first steps if the loss budget allows none of the others."""

UPDATES_CODEC = FINE[0]
"""Codec of the automatic plan for weight changes of local steps. The planner then does not search for a better one, because a
search measures gradients."""

Tell = Callable[[str], None]


def requested_plan(compression: Any, plan: Any) -> Plan | Path | str:
    """Reads the arguments `compression` and `plan` of attach(). Returns a Plan, the path of a plan file, a codec as text, or
    "auto"."""
    if compression is not None and plan is not None:
        raise InvalidInput("E-PLAN-NAME", f"compression={compression!r} and plan={plan!r} exclude each other, because a plan "
                                          "names the codec of every bucket; leave one of them out")
    if compression is not None:
        if wrong := spec_error(str(compression)):
            raise InvalidInput("E-CODEC-NAME", f"compression: {wrong}")
        return str(compression)
    if plan is None or isinstance(plan, Plan):
        return plan or "auto"
    if isinstance(plan, str) and not spec_error(plan):
        raise InvalidInput("E-PLAN-NAME", f"plan: got the codec {plan!r}; pass it as compression={plan!r}")
    if not isinstance(plan, str | Path):
        raise InvalidInput("E-PLAN-NAME", f"plan: got {plan!r}, allowed: a Plan or the path of a plan file")
    return Path(plan)


def settle(plan: Plan | Path | str, job: Job, config: Config, world: int, per_node: int, *,
           requested: RequestedModes = RequestedModes(), optimizer: str = "", elastic: bool = False) -> Plan:
    """Returns the plan for `world` ranks that the argument `plan` requests; see `requested_plan`. The settings `ratio_over` and
    `warmup` override the plan's own values. `optimizer`: name of the optimizer's family, on which loss budgets depend.
    `elastic`: workers can leave and join, which excludes fragments, and needs a server even for one worker."""
    base = _made(plan, job, config, world, per_node, requested=requested, optimizer=optimizer, elastic=elastic)
    if config.ratio_over != "bucket":
        base = structs.replace(base, ratio_over=config.ratio_over)
    return structs.replace(base, warmup=config.warmup) if config.warmup else base


def _made(plan: Plan | Path | str, job: Job, config: Config, world: int, per_node: int, *, requested: RequestedModes,
          optimizer: str, elastic: bool) -> Plan:
    if isinstance(plan, Plan):
        return plan
    nodes = world // per_node
    if isinstance(plan, Path):
        return plan_file.plan_in(plan)
    if plan == "auto":
        # One machine needs no server and gains nothing from compression.
        coded = UPDATES_CODEC if requested.updates else _first_codec(config, Recipe(optimizer, workers=world))
        path_name, codec = ("allreduce", "identity()") if nodes == 1 and not elastic else ("service", coded)
    else:
        path_name, codec = "service", plan
    servers = nodes if config.servers == "each" else 1
    up, down = ("" if part is None else str(wrap(build(part))) for part in split_two_way(codec))
    fragments = requested.fragments or (1 if elastic else usual_fragments(requested, job.numel * ELEMENT_NBYTES))
    made = planner.default_plan(
        job, codec=up, down=down, path=path_name, servers=servers if path_name == "service" else 0,
        ranks_per_node=per_node, fuse_nbytes=config.fuse_nbytes, cut_nbytes=config.cut_nbytes,
        forward=requested.overlap == "forward", fragments=fragments,
    )
    return structs.replace(made, fragments=most_fragments(fragments, requested.every or 1, len(made.buckets)))


def usual_fragments(requested: RequestedModes, nbytes: int) -> int:
    """Default number of fragments for overlapped local steps of a model of `nbytes`: at most 8, and one is exchanged every two
    steps or more. More would gain little, because the cost of late merges falls with their number to the power of 1.5.

    >>> [usual_fragments(RequestedModes(every, "round"), 1 << 20) for every in (1, 2, 4, 6, 7, 8, 500)]
    [1, 1, 2, 3, 1, 4, 5]
    """
    every = requested.every or 1
    most = min(8, every // 2, nbytes // LEAST_FRAGMENT_NBYTES)
    return most_fragments(most, every, every) if requested.overlap == "round" else 1


def basis(plan: Any, tell: Tell) -> Basis | None:
    """Reads the inputs file of a plan file: the measurements from which the plan was made. If that fails, reports it through
    `tell` and returns None: training does not need them."""
    try:
        return plan_file.basis_of(plan)
    except ValueError as error:
        tell(f"the plan has no predictions, because its inputs cannot be read: {error}")
        return None


def with_server_nodes(plan: Plan, made_from: Basis | None, nodes: int, tell: Tell) -> Plan:
    """Returns the plan with its servers on the nodes that the plan names, if servers can be started on these nodes. Otherwise
    reports the reason through `tell`."""
    for line in untouched(plan):
        tell(line)
    planned = sum(1 for node in made_from.inputs.cluster.nodes if node.ranks) if made_from else nodes
    if planned != nodes:
        tell(f"the plan was made for {planned} nodes, but this job has {nodes}: its predictions do not apply")
    hosts = plan_file.server_nodes_of(plan, made_from, nodes)
    if len(hosts) != len(plan.hosts):
        alone = [structs.replace(plan, servers=1, hosts=(host,)) for host in plan.hosts]
        absent = [str(one.hosts[0]) for one in alone if not plan_file.server_nodes_of(one, made_from, nodes)]
        why = f"no rank trains on node {' and '.join(absent)}" if absent else \
            f"it names {len(plan.hosts)} nodes for {plan.servers} servers"
        tell(f"servers run on the nodes that the setting `servers` selects, not on those of the plan: {why}; to run servers "
             "on other machines, start `commlayer serve` there and set join to its address")
    return plan if hosts == plan.hosts else structs.replace(plan, hosts=hosts)


def _first_codec(config: Config, recipe: Recipe) -> str:
    """Returns the codec of the automatic plan for the first steps. Reads the loss model, which exists only on rank 0."""
    rows = machines.learning_rows(config.learning)  # reads the file before the job starts, so that an error in it shows early
    if config.loss:
        model = loss_model.read(Path(config.loss))
        return loss_budget.first_codec(model, config.max_loss or loss_budget.BUDGET, FINE, SPARSE, LEAST_RATIO)
    if not config.max_loss:
        return FINE[0]
    return next((codec for codec in FINE if excess(rows, codec, recipe).loss_high <= config.max_loss), FREE)


# ---- shares rank 0's plan with every rank, and checks that a plan fits the job, before the first step or a change of plan

REFUSED = b"!"
"""Prefix of an error text that rank 0 sends instead of a plan. (The bytes of a plan start with a brace.)"""


def agreed_plan(settle: Callable[[], Plan], groups: Groups | None) -> Plan:
    """Returns on every rank the plan that settle() returns on rank 0, or raises rank 0's error on every rank."""
    return plan_in(from_rank_0(lambda: bytes_of(settle()), groups))


def bytes_of(plan: Plan) -> bytes:
    return records.encode(planner.lower(plan))


def plan_in(data: bytes) -> Plan:
    return records.decode(data, Plan, "plan of rank 0")


class OfferedPlan:
    """Result of the function make() on rank 0, before it is sent to the other ranks. If make() fails, its error text is sent
    instead. Ranks can exchange the size of the result together with other data."""

    def __init__(self, make: Callable[[], bytes], rank: int) -> None:
        self.data = b""
        """Bytes to send; empty on ranks other than 0."""
        self._error: Exception | None = None
        if rank == 0:
            try:
                self.data = make()
            except (ValueError, CommError) as error:
                self.data, self._error = REFUSED + str(error).encode(), error

    def taken(self, data: bytes) -> bytes:
        """Returns the data that rank 0 has sent, or raises rank 0's error. Called on every rank."""
        if self._error is not None:
            raise self._error
        if data.startswith(REFUSED):
            why = data.removeprefix(REFUSED)[: 4 * REASON_CHARS].decode(errors="replace")
            raise InvalidInput("E-PLAN-REFUSED", f"rank 0: {short_line(why, REASON_CHARS)}")
        return data


def from_rank_0(make: Callable[[], bytes], groups: Groups | None, wait_s: float = 0.0) -> bytes:
    """Returns on every rank the bytes that make() returns on rank 0, or raises rank 0's error on every rank.

    `wait_s`: seconds to wait for small results that can take longer than a collective of a step; 0: use a collective.
    """
    if groups is None:
        return make()
    offer = OfferedPlan(make, groups.rank)
    return offer.taken(groups.members.tell(offer.data, wait_s, "start")[0] if wait_s else
                       groups.share_bytes(offer.data, MAX_PLAN_NBYTES, "a plan"))


def check_plan(
    plan: Plan, job: Job, nodes: int, per_node: int, device: torch.device, forbids: Forbids, *, reachable: bool = True,
) -> None:
    """Raises ValueError with the first reason why this plan cannot run in this job. `forbids` returns why the job cannot use a
    sync mode, or ""."""
    problems = planner.verify(plan, job) or unsuited(
        plan, nodes, per_node, cuda=device.type == "cuda", reachable=reachable) or \
        [f"{what}: {why}" for mode, what in modes_of(plan) if (why := forbids(mode))]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InvalidInput("E-PLAN-REFUSED", f"plan: {problems[0]}{more}")


# ---- constraints on a job's plans, and the inputs from which the current plan was made

def _allow(_mode: str) -> str:
    return ""


@dataclasses.dataclass
class PlanTerms:
    requested: RequestedModes = dataclasses.field(default_factory=RequestedModes)
    """The sync mode that the user requested in attach(); it applies to every plan."""
    forbids: Forbids = _allow
    """Function that returns why a plan cannot use a sync mode in this job, or ""; see sync_modes.py."""
    useless: Forbids = _allow
    """Function that returns why a sync mode would bring no benefit in this job, or "". Set by module_driver.py."""
    auto: bool = False
    """True: commlayer chooses the plan. False: the user does."""
    optimizer: str = ""
    """Name of the family of the script's optimizer, such as "adam"; empty if unknown."""
    loss: str = ""
    """Path of the loss model, which predicts the loss of each codec."""
    learning: str = ""
    """Path of the table of convergence factors; empty: the built-in table."""
    max_loss: float = 0.0
    """Allowed increase of the loss by compression, relative to uncompressed training; 0: no limit."""
    suggested: bool = False
    """True: the log has already suggested local steps. Used only on rank 0."""
    said_slower: bool = False
    """True: the log has already said that one machine alone would be faster."""
    balanced: bool = False
    """True: the balancer changes the ranks' shares of the batch, based on measurements of steps with averaged gradients."""
    floor: float = 0.0
    """Precision level (see the function `level`) of the coarsest codec that the quality guard allows."""
    basis: Basis | None = None
    """The current plan and the inputs from which it was made, if known. Used only on rank 0."""
    price: tuple[float, float] | None = None
    """Two numbers about the current plan: seconds of communication per step, and the fraction of them that overlaps with
    computation. None if unknown. Used only on rank 0."""

    def forbidden_modes(self) -> dict[str, str]:
        """Maps each sync mode to the reason why a planner cannot choose it; to "" if it can. Reasons can differ between ranks,
        so ranks exchange them."""
        return {mode: requested_otherwise(self.requested, mode) or self.forbids(mode) or self.useless(mode) for mode in MODES}

    def allowed_modes(self) -> set[str]:
        """Returns the sync modes that a planner can choose on this rank."""
        return {mode for mode, why in self.forbidden_modes().items() if not why}


# ---- checks whether a plan can run here: codecs that exist and fit their paths, and the nodes and device that it needs.
# planner.verify checks the plan itself.

def unsuited(plan: Plan, nodes: int, per_node: int, *, cuda: bool = False, reachable: bool = True) -> list[str]:
    """Returns all reasons why a plan cannot run on these nodes, one per line, the same on every rank. `cuda`: the model is on
    GPUs. `reachable`: True if nodes can connect to one another, so that collectives can span them."""
    try:
        fragments_of(plan.buckets, plan.fragments)
    except ValueError as error:
        return [str(error)]
    if plan.ranks_per_node != per_node and any(b.path != "allreduce" for b in plan.buckets):
        return [f"the plan was made for {plan.ranks_per_node} ranks per node, but this job has {per_node}: make it again, "
                "or set ranks_per_node"]
    apart = nodes > 1 and not reachable
    return [f"bucket {b.id}: {line}" for b in plan.buckets
            for line in (*_crossings(b, apart=apart), *_bucket(plan, b, nodes, cuda))]


def _crossings(bucket: Bucket, *, apart: bool) -> Iterator[str]:
    if apart and not bucket.served and any(op.name not in paths.CODING and op.where != "node"
                                           for op in paths.parse(bucket.path)):
        yield (f"path {bucket.path!r} has a collective between nodes that can reach only a server (commlayer join): use "
               "the path 'service'")


def _bucket(plan: Plan, bucket: Bucket, nodes: int, cuda: bool) -> Iterator[str]:
    if bucket.by_node and len(bucket.by_node) != nodes:
        yield f"the bucket has codecs for {len(bucket.by_node)} nodes, but this job has {nodes}"
        return
    try:
        codecs = [codec_of(bucket, node, plan) for node in (None, *range(nodes if bucket.by_node else 0))]
        for codec in codecs:
            if (nbytes := codec.bound(bucket.spec)) > MAX_FRAME_NBYTES and bucket.path == "service":
                yield (f"payloads of {codec} can have {nbytes} bytes for {bucket.numel} elements, but a frame is limited to "
                       f"{MAX_FRAME_NBYTES}: split the bucket, or use a codec that sends less")
                return
    except ValueError as error:
        yield str(error).removeprefix(f"bucket {bucket.id}: ")
        return
    if bucket.stale and bucket.path != "service":
        yield f"path {bucket.path!r} does not support results that are one step late: use the path 'service'"
    path = paths.parse(bucket.path)
    if grammar.served(path) and bucket.path != "service":
        yield f"path {bucket.path!r} must be written as 'service', because it uses a server (planner.lower converts it)"
        return
    up = [promise_of(wrap(parse(text))) for text in (bucket.codec, *bucket.by_node)]
    down = promise_of(wrap(parse(bucket.down))) if bucket.down else None
    lines = codec_fit.misfits(path, up, down=down, by_node=bool(bucket.by_node), gpus=cuda)
    yield from (f"codec {bucket.codec}, path {bucket.path!r}: {line}" for line in lines)


def promise_of(codec: Codec) -> codec_fit.Promise:
    return codec_fit.Promise(is_summable(codec), is_separable(codec), is_download_codec(codec))


# ---- measures how exact a plan's codecs are, and replaces codecs below a floor
#
# A codec's level is its ratio if it has one, otherwise the fraction of dense bytes that it sends: 1 for identity, 1/2 for
# fp16, about 1/4 for int8, 1/32 for onebit.

DENSE = "identity()"
STEPS = ((0.3, "int8()"), (0.6, "fp16()"), (1.0, DENSE))
"""Pairs (floor, codec) in ascending order of the floor. To raise a bucket's precision level to a floor, the codec of the first
pair with at least this floor is used, if a sparse codec is not possible or would send as much."""
TYPICAL = Spec((1 << 16,))
"""Shape for which the precision level of codecs is measured without a bucket."""
SMALL = 1 << 12
"""Number of elements up to which a codec's headers dominate its measured precision level."""
EQUAL = 0.99
"""Tolerance for comparing precision levels, because ratios are written with three digits."""


def level(codec: Codec, spec: Spec = TYPICAL) -> float:
    """Returns the precision level of a codec: its ratio, or else the fraction of float32 bytes that it sends.

    >>> level(parse("error_feedback(topk(ratio=0.01))")), level(parse("fp16()"))
    (0.01, 0.5)
    """
    if (ratio := parse_spec(str(codec)).ratio) is not None:
        return ratio
    if hasattr(codec, "bits"):
        return float(codec.bits / 32)  # a sum of such codes takes more bits
    spec = spec if spec.numel > SMALL else TYPICAL
    return round(min(1.0, codec.bound(spec) / (4 * spec.numel)), 3)


def at_least(floor: float, texts: list[str]) -> list[str]:
    """Returns the codecs in `texts` whose precision level is at least `floor`, and a topk codec with the floor as its ratio."""
    fine_enough = [text for text in texts if level(parse(text)) >= floor * EQUAL]
    finest = STEPS[0][0]
    return [*fine_enough, f"topk(ratio={floor:.3g})"] if 0 < floor < finest else fine_enough


def lossy(bucket: Bucket) -> bool:
    """Returns True if any of the bucket's codecs loses information."""
    return bucket.path != "allreduce" and any(level(codec, bucket.spec) < 1 for codec in _codecs(bucket))


def lowest(plan: Plan) -> float:
    """Returns the precision level of the coarsest codec in the plan; 1 if all buckets are sent without loss."""
    return min((level(codec, b.spec) for b in plan.buckets if lossy(b) for codec in _codecs(b)), default=1.0)


def carries_gradients(codec: Any) -> bool:
    """Returns True if the codec sends gradients, and not a momentum (velocity)."""
    if isinstance(codec, Momentum):
        return False
    return all(carries_gradients(part) for part in structs.astuple(codec) if isinstance(part, msgspec.Struct))


def exchanges_gradients(bucket: Bucket) -> bool:
    """Returns True if every node's codec of this bucket sends gradients. The result is the same on all ranks, whatever codec
    their own node has."""
    return all(carries_gradients(codec) for codec in _codecs(bucket))


def lift(plan: Plan, floor: float, nodes: int, *, cuda: bool = False) -> Plan:
    """Returns the plan with all codecs at precision level `floor` or above. A bucket is sent uncompressed if none of the finer
    codecs supports its path."""
    buckets = tuple(_lifted(plan, b, floor, nodes, cuda) if lossy(b) else b for b in plan.buckets)
    return structs.replace(plan, buckets=buckets)


def nbytes(plan: Plan) -> float:
    """Returns an upper bound for the bytes that a worker sends and receives in a step, for comparing two plans of the same job.
    """
    return sum(codec_of(b).bound(b.spec) + (wrap(parse(b.down or b.codec)).bound(b.spec)) if lossy(b) else 8 * b.numel
               for b in plan.buckets)


def _codecs(bucket: Bucket) -> list[Codec]:
    return [parse(text) for text in (bucket.codec, bucket.down, *bucket.by_node) if text]


def _lifted(plan: Plan, bucket: Bucket, floor: float, nodes: int, cuda: bool) -> Bucket:
    if all(level(codec, bucket.spec) >= floor * EQUAL for codec in _codecs(bucket)):
        return bucket
    for candidate in _candidates(bucket, floor):
        alone = structs.replace(plan, buckets=(candidate,), fragments=1)
        if not unsuited(alone, nodes, plan.ranks_per_node, cuda=cuda):
            return candidate
    return bucket


def _candidates(bucket: Bucket, floor: float) -> Iterator[Bucket]:
    """Yields finer versions of a bucket in the order in which to try them: first the same codec with a higher ratio, then other
    codecs from coarse to exact."""
    floor = min(floor, 1.0)
    if floor <= STEPS[0][0]:
        texts = (bucket.codec, bucket.down, *bucket.by_node)
        lifted = [str(_with_ratio(parse(text), floor)) if text else "" for text in texts]
        up, down, *by_node = lifted
        if all(not text or level(parse(text), bucket.spec) >= floor * EQUAL for text in lifted):
            yield structs.replace(bucket, codec=up, down=down, by_node=tuple(by_node), why=None)
    plain = structs.replace(bucket, down="", by_node=(), why=None)
    if not bucket.by_node and level(parse(bucket.codec), bucket.spec) >= floor * EQUAL:
        yield plain  # only the codec of results was too coarse
    for text in (text for limit, text in STEPS if floor <= limit):
        yield structs.replace(plain, codec=text)


def _with_ratio(codec: Any, floor: float) -> Any:
    """Returns the codec with every ratio inside it raised to at least `floor`."""
    changed = {}
    for name in codec.__struct_fields__:
        value = getattr(codec, name)
        if name == "ratio":
            changed[name] = max(value, float(f"{floor:.3g}"))
        elif isinstance(value, msgspec.Struct):
            changed[name] = _with_ratio(value, floor)
    return structs.replace(codec, **changed) if changed else codec
