"""Builds the plan that a job requests: a Plan, a plan file with its inputs file, one codec for all tensors, or the default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from commlayer import loss_budget, plan_file, planner
from commlayer.balance import loss_model
from commlayer.codec_spec import spec_error, split_two_way
from commlayer.compressors import build, wrap
from commlayer.config import Config
from commlayer.engine.sync.sync_modes import RequestedModes
from commlayer.errors import InvalidInput
from commlayer.planner.buckets import ELEMENT_NBYTES, LEAST_FRAGMENT_NBYTES, most_fragments
from commlayer.planner.convergence import Recipe, excess
from commlayer.planner.data import tables as machines
from commlayer.planner.model import Basis
from commlayer.planner.tensors import uncompressed_notices
from commlayer.records import Job, Plan

FINE = ("int4()", "int8()")
"""Codecs of the automatic plan between nodes, for uploads and downloads, until the links are measured. The first codec within
the loss budget is used.

The links are not known yet, and early steps are the most sensitive to errors: there a coarse codec costs more progress than
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


def resolve_plan(plan: Plan | Path | str, job: Job, config: Config, world: int, per_node: int, *,
                 requested: RequestedModes = RequestedModes(), optimizer: str = "", elastic: bool = False) -> Plan:
    """Returns the plan for `world` ranks that the argument `plan` requests; see `requested_plan`. The settings `ratio_over` and
    `warmup` override the plan's own values. `optimizer`: name of the optimizer's family, on which loss budgets depend.
    `elastic`: workers can leave and join, which needs a server even for one worker."""
    if isinstance(plan, Plan | Path):
        made = plan if isinstance(plan, Plan) else plan_file.plan_in(plan)
    else:
        nodes, path_name, codec = world // per_node, "service", plan
        if plan == "auto":
            # A single machine needs no server and gains nothing from compression.
            coded = UPDATES_CODEC if requested.updates else _first_codec(config, Recipe(optimizer, workers=world))
            path_name, codec = ("allreduce", "identity()") if nodes == 1 and not elastic else ("service", coded)
        servers = nodes if config.servers == "each" else 1
        up, down = ("" if part is None else str(wrap(build(part))) for part in split_two_way(codec))
        fragments = requested.fragments or default_fragment_count(requested, job.numel * ELEMENT_NBYTES)
        made = planner.default_plan(
            job, codec=up, down=down, path=path_name, servers=servers if path_name == "service" else 0,
            ranks_per_node=per_node, fuse_nbytes=config.fuse_nbytes, cut_nbytes=config.cut_nbytes,
            forward=requested.overlap == "forward", fragments=fragments,
        )
        made = structs.replace(made, fragments=most_fragments(fragments, requested.every or 1, len(made.buckets)))
    if config.ratio_over != "bucket":
        made = structs.replace(made, ratio_over=config.ratio_over)
    return structs.replace(made, warmup=config.warmup) if config.warmup else made


def default_fragment_count(requested: RequestedModes, nbytes: int) -> int:
    """Default number of fragments for overlapped local steps of a model of `nbytes`: at most 8, and one is exchanged every two
    steps or more. More would gain little, because the cost of late merges falls with their number to the power of 1.5.

    >>> [default_fragment_count(RequestedModes(every, "round"), 1 << 20) for every in (1, 2, 4, 6, 7, 8, 500)]
    [1, 1, 2, 3, 1, 4, 5]
    """
    every = requested.every or 1
    most = min(8, every // 2, nbytes // LEAST_FRAGMENT_NBYTES)
    return most_fragments(most, every, every) if requested.overlap == "round" else 1


def basis(plan: Any, tell: Tell) -> Basis | None:
    """Reads the inputs file of a plan file: the measurements from which the plan was made. If reading fails, reports the error
    with `tell` and returns None: training does not need the inputs."""
    try:
        return plan_file.read_plan_basis(plan)
    except ValueError as error:
        tell(f"the plan has no predictions, because its inputs cannot be read: {error}")
        return None


def with_server_nodes(plan: Plan, made_from: Basis | None, nodes: int, tell: Tell) -> Plan:
    """Returns the plan with its servers on the nodes that the plan names, if servers can be started on these nodes. Otherwise
    reports the reason with `tell`."""
    for line in uncompressed_notices(plan):
        tell(line)
    planned = sum(1 for node in made_from.inputs.cluster.nodes if node.ranks) if made_from else nodes
    if planned != nodes:
        tell(f"the plan was made for {planned} nodes, but this job has {nodes}: its predictions do not apply")
    hosts = plan_file.training_server_hosts(plan, made_from, nodes)
    if len(hosts) != len(plan.hosts):
        alone = [structs.replace(plan, servers=1, hosts=(host,)) for host in plan.hosts]
        absent = [str(one.hosts[0]) for one in alone if not plan_file.training_server_hosts(one, made_from, nodes)]
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
