"""The plan that a job was asked to run: a Plan, a file and what lies beside it, one codec, or the default. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from commlayer import loss_budget, plan_file, planner
from commlayer.balance import tuner_loss
from commlayer.codec_name import misspelled, up_and_down
from commlayer.compressors import build, wrap
from commlayer.config import Config
from commlayer.errors import InvalidInput
from commlayer.planner.model.cluster import Basis
from commlayer.planner.model.learning import Recipe, excess
from commlayer.planner.model.matrix_shapes import untouched
from commlayer.planner.tables import machines
from commlayer.records import Job, Plan

FINE = ("int4()", "int8()")
"""What "auto" runs between nodes, both ways, until a planner chooses: the first that keeps the budget. Nobody knows the links
then, and the first steps bear least: what a coarse codec loses in them is more than what a minute of quick ones gains."""
SPARSE, LEAST_RATIO = "topk(ratio={ratio}, values='int8')", 0.1
"""Where a loss model knows neither of these, and no smaller a ratio."""
FREE = "fp16()"
"""Where a budget leaves none."""

UPDATES_CODEC = FINE[0]
"""What "auto" codes changes of weights with. No plan is searched for then: what a search measures are gradients."""

Tell = Callable[[str], None]


def settle(plan: Any, job: Job, config: Config, world: int, per_node: int, *, updates: bool = False,
           optimizer: str = "", forward: bool = False, fragments: int = 1) -> Plan:
    """A plan for so many ranks. What settings say of its ratios counts; where they say nothing, what the plan says itself.

    `updates`: what is coded is the change of weights. `optimizer`: its family, as budgets depend on it. `forward`: results come
    in during the next forward pass. `fragments`: of a round.
    """
    made = _made(plan, job, config, world, per_node, updates=updates, optimizer=optimizer, forward=forward, fragments=fragments)
    if config.ratio_over != "bucket":
        made = structs.replace(made, ratio_over=config.ratio_over)
    return structs.replace(made, warmup=config.warmup) if config.warmup else made


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
    up, down = ("" if way is None else str(wrap(build(way))) for way in up_and_down(codec))
    return planner.default_plan(
        job, codec=up, down=down, path=path_name, servers=servers if path_name == "service" else 0,
        ranks_per_node=per_node, fuse_nbytes=config.fuse_nbytes, cut_nbytes=config.cut_nbytes, forward=forward,
        fragments=fragments,
    )


def is_file(plan: Any) -> bool:
    """Whether `plan` names a plan file, and not a codec by its spelling. ValueError for what is neither."""
    if not isinstance(plan, str | Path) or str(plan) == "auto":
        return False
    if os.path.isfile(plan):
        return True
    if isinstance(plan, str) and not (wrong := misspelled(plan)):
        return False
    if isinstance(plan, str) and plan.rstrip().endswith(")"):
        raise InvalidInput("E-PLAN-NAME", f"plan {plan!r}: {wrong}")
    raise InvalidInput("E-PLAN-NAME",
                       f"plan {str(plan)!r}: no such file (allowed: 'auto', a plan file, a codec such as \"fp16()\", a Plan)")


def basis(plan: Any, tell: Tell) -> Basis | None:
    """What the plan was made from. Training does without."""
    try:
        return plan_file.basis_of(plan)
    except ValueError as error:
        tell(f"nothing is predicted: {error}")
        return None


def with_server_nodes(plan: Plan, made_from: Basis | None, nodes: int, tell: Tell) -> Plan:
    """Its servers where it has them, as far as they can be started there."""
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
    """What "auto" begins with. A loss model is read on rank 0 alone."""
    rows = machines.learning_rows(config.learning)  # what is wrong with that file is said before anything starts
    if config.loss:
        model = tuner_loss.read(Path(config.loss))
        return loss_budget.first_codec(model, config.max_loss or loss_budget.BUDGET, FINE, SPARSE, LEAST_RATIO)
    if not config.max_loss:
        return FINE[0]
    return next((codec for codec in FINE if excess(rows, codec, recipe).loss_high <= config.max_loss), FREE)
