"""Builds the plan that a job requests: a Plan, a plan file with its inputs beside it, one codec, or the default."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from commlayer import loss_budget, plan_file, planner
from commlayer.balance import loss_model
from commlayer.codec_spec import spec_error, split_two_way
from commlayer.compressors import build, wrap
from commlayer.config import Config
from commlayer.errors import InvalidInput
from commlayer.planner.model.cluster import Basis
from commlayer.planner.model.learning import Recipe, excess
from commlayer.planner.model.matrix_shapes import untouched
from commlayer.planner.tables import machines
from commlayer.records import Job, Plan

FINE = ("int4()", "int8()")
"""Codecs for plan="auto" between nodes, in both directions, until a planner chooses: the first one within the budget.

The links are not measured yet, and early steps are the most sensitive to errors: a coarse codec loses more there than a minute
of quick steps gains.
"""
SPARSE, LEAST_RATIO = "topk(ratio={ratio}, values='int8')", 0.1
"""For a loss model that knows neither of FINE; LEAST_RATIO is the smallest ratio."""
FREE = "fp16()"
"""If a budget allows none of them."""

UPDATES_CODEC = FINE[0]
"""Codec of plan="auto" for changes of weights. No plan is searched then, because a search measures gradients."""

Tell = Callable[[str], None]


def settle(plan: Any, job: Job, config: Config, world: int, per_node: int, *, updates: bool = False,
           optimizer: str = "", forward: bool = False, fragments: int = 1) -> Plan:
    """A plan for that many ranks. The settings `ratio_over` and `warmup` override the plan's own.

    `updates`: changes of weights are coded. `optimizer`: its family, on which budgets depend. `forward`: results arrive during
    the next forward pass. `fragments`: of an outer step."""
    base = _made(plan, job, config, world, per_node, updates=updates, optimizer=optimizer, forward=forward, fragments=fragments)
    if config.ratio_over != "bucket":
        base = structs.replace(base, ratio_over=config.ratio_over)
    return structs.replace(base, warmup=config.warmup) if config.warmup else base


def _made(plan: Any, job: Job, config: Config, world: int, per_node: int, *, updates: bool, optimizer: str,
          forward: bool, fragments: int) -> Plan:
    if isinstance(plan, Plan):
        return plan
    nodes = world // per_node
    if is_file(plan):
        return plan_file.plan_in(Path(plan))
    if plan == "auto":
        # One machine needs no server and gains nothing from compression.
        coded = UPDATES_CODEC if updates else _first_codec(config, Recipe(optimizer, workers=world))
        path_name, codec = ("allreduce", "identity()") if nodes == 1 else ("service", coded)
    else:
        codec = str(plan)
        path_name = "service"
    servers = nodes if config.servers == "each" else 1
    up, down = ("" if part is None else str(wrap(build(part))) for part in split_two_way(codec))
    return planner.default_plan(
        job, codec=up, down=down, path=path_name, servers=servers if path_name == "service" else 0,
        ranks_per_node=per_node, fuse_nbytes=config.fuse_nbytes, cut_nbytes=config.cut_nbytes, forward=forward,
        fragments=fragments,
    )


def is_file(plan: Any) -> bool:
    """Whether `plan` names a plan file rather than a codec. ValueError if it is neither."""
    if not isinstance(plan, str | Path) or str(plan) == "auto":
        return False
    if os.path.isfile(plan):
        return True
    if isinstance(plan, str) and not (wrong := spec_error(plan)):
        return False
    if isinstance(plan, str) and plan.rstrip().endswith(")"):
        raise InvalidInput("E-PLAN-NAME", f"plan {plan!r}: {wrong}")
    raise InvalidInput("E-PLAN-NAME",
                       f"plan {str(plan)!r}: no such file (allowed: 'auto', a plan file, a codec such as \"fp16()\", a Plan)")


def basis(plan: Any, tell: Tell) -> Basis | None:
    """The inputs of the plan; None, with a line for the log, if they cannot be read. Training does not need them."""
    try:
        return plan_file.basis_of(plan)
    except ValueError as error:
        tell(f"nothing is predicted: {error}")
        return None


def with_server_nodes(plan: Plan, made_from: Basis | None, nodes: int, tell: Tell) -> Plan:
    """Keeps the plan's servers on its nodes, if they can be started there."""
    for line in untouched(plan):
        tell(line)
    planned = sum(1 for node in made_from.inputs.cluster.nodes if node.ranks) if made_from else nodes
    if planned != nodes:
        tell(f"the plan was made for {planned} nodes, here are {nodes}: what it predicts does not hold")
    hosts = plan_file.server_nodes_of(plan, made_from, nodes)
    if len(hosts) != len(plan.hosts):
        alone = [structs.replace(plan, servers=1, hosts=(host,)) for host in plan.hosts]
        absent = [str(one.hosts[0]) for one in alone if not plan_file.server_nodes_of(one, made_from, nodes)]
        why = f"no rank trains on node {' and '.join(absent)}" if absent else \
            f"it names {len(plan.hosts)} nodes for {plan.servers} servers"
        tell(f"servers are not on the nodes that the plan has them on, but where the setting `servers` says: {why}; "
             "`commlayer serve` starts them elsewhere, and join names them")
    return plan if hosts == plan.hosts else structs.replace(plan, hosts=hosts)


def _first_codec(config: Config, recipe: Recipe) -> str:
    """The first codec of plan="auto". A loss model is read on rank 0 only."""
    rows = machines.learning_rows(config.learning)  # reads the file before anything starts, so that an error in it shows early
    if config.loss:
        model = loss_model.read(Path(config.loss))
        return loss_budget.first_codec(model, config.max_loss or loss_budget.BUDGET, FINE, SPARSE, LEAST_RATIO)
    if not config.max_loss:
        return FINE[0]
    return next((codec for codec in FINE if excess(rows, codec, recipe).loss_high <= config.max_loss), FREE)
