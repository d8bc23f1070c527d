"""Quality and speed of the planner: planning time, gap to brute force, Espresso's cases.

Plans are compared by seconds per step, in the planner's own simulation. planner_wan.py compares with real steps.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from msgspec import structs

from bench import Unmeasurable, planner_wan
from bench.reference.espresso_cases import CASES, cluster_of, profile, published
from bench.reference.espresso_cases import run as espresso
from bench.report import Result
from commlayer.planner import tables
from commlayer.planner.buckets import Sort
from commlayer.planner.choices import Space, search, uniform
from commlayer.planner.convergence import Recipe
from commlayer.planner.costs import Prices
from commlayer.planner.model import DENSE, Cluster, Link, Policy
from commlayer.planner.options import Catalog, options
from commlayer.planner.search import plan
from commlayer.planner.simulation import native_schedule
from commlayer.records import Job, Plan, TensorInfo, Timing

FLAT = Cluster(tuple(tables.node(f"n{i}", "v100", "10g") for i in range(8)))
TWO_LEVEL = Cluster(tuple(tables.node(f"n{i}", "v100", "25g", ranks=8) for i in range(8)))
HOMES = Cluster(tuple(tables.node(f"n{i}", "rtx3060", "home-100/20") for i in range(4)), False)
MOST_OPTIONS = 20


def unequal(nodes: int, low: float, high: float) -> Cluster:
    """Sites with random measured links, all different."""
    draw = random.Random(1)
    nodes_of_table = [tables.node(f"n{i}", "rtx3060", "fiber-100") for i in range(nodes)]
    links = [Link(draw.uniform(low, high), draw.uniform(low, high), 4e-3) for _ in range(nodes)]
    return Cluster(tuple(structs.replace(node, link=link) for node, link in zip(nodes_of_table, links, strict=True)), False)


def run(quick: bool) -> Result:
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = dict(_planning(quick, rows))
    gaps = [_gap(seed) for seed in range(30 if quick else 240)]
    rows.append({"what": "gap to brute force", "jobs": len(gaps), "pct_p50": statistics.median(gaps), "pct_max": max(gaps),
                 "not_best": sum(gap > 1e-6 for gap in gaps)})
    summary["gap_to_bruteforce_pct_p50"] = statistics.median(gaps)
    summary["gap_to_bruteforce_pct_max"] = max(gaps)
    over: dict[str, float] = {}
    for case in CASES[:2] if quick else CASES:
        name = f"{case.model} {case.testbed}"
        costs = profile(case.codec)
        machines = cluster_of(case.testbed)
        job = published(case.model)
        chosen = plan(job, machines, costs, Policy(objective="step", whole_tree=True))
        dense = plan(job, machines, costs, Policy(codecs=(DENSE,), objective="step"))
        steps = espresso(case)
        over[name] = 100 * (chosen.step_s / steps.espresso_s - 1)
        rows.append({
            "what": f"{name} {case.codec}", "step_ms": chosen.step_s * 1e3, "espresso_ms": steps.espresso_s * 1e3,
            "x_dense": dense.step_s / chosen.step_s,
            "espresso_over_dense_pct": steps.over_dense_pct,
            "published_over_dense_pct": case.over_dense_pct if case.over_dense_pct is not None else "-",
            "espresso_over_all_pct": steps.over_all_pct, "published_over_all_pct": case.over_all_pct,
        })
    summary["over_espresso_pct"] = over
    try:
        measured, figures = planner_wan.rows(quick)
    except Unmeasurable as error:
        rows.append({"what": f"real runs: {error}"})
    else:
        rows += measured
        summary |= figures
    return {"rows": rows, "summary": summary}


def _planning(quick: bool, rows: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """CPU seconds of planning on one thread, the minimum of several runs."""
    small, full = Policy(codecs=("topk(ratio=0.01)",), objective="step"), Policy(objective="step")
    free = Policy(exact=False)
    cases: dict[str, tuple[str, Callable[[], Plan]]] = {
        "plan_s_300_tensors": ("300 tensors, one codec, flat", lambda: plan(_job(300), FLAT, None, small)),
        "plan_s_300_full": ("300 tensors, all codecs, flat", lambda: plan(_job(300), FLAT, None, full)),
        "plan_s_1000_tensors": ("1000 tensors, all codecs, flat", lambda: plan(_job(1000), FLAT, None, full)),
        "plan_s_300_two_level": ("300 tensors, all codecs, 8 nodes of 8", lambda: plan(_job(300), TWO_LEVEL, None, full)),
        "plan_s_300_homes": ("300 tensors, all codecs, 4 homes", lambda: plan(_job(300), HOMES, None, full)),
        "plan_s_300_to_loss": ("the same by seconds to a loss, all ways", lambda: plan(_job(300), HOMES, None, free)),
        "plan_s_resnet50_32_unequal": ("ResNet-50, all codecs, 32 homes of 20 - 900 Mb/s",
                                       lambda: plan(published("resnet50"), unequal(32, 20e6, 900e6), None, full)),
        "plan_s_resnet50_32_to_loss": ("the same by seconds to a loss, all ways",
                                       lambda: plan(published("resnet50"), unequal(32, 20e6, 900e6), None, free)),
    }
    for key, (what, call) in cases.items():
        seconds, chosen = _least(call, 2 if quick else 5)
        rows.append({"what": what, "plan_s": seconds, "buckets": len(chosen.buckets), "step_ms": chosen.step_s * 1e3})
        yield key, seconds


def _least(call: Callable[[], Plan], times: int) -> tuple[float, Plan]:
    result = call()
    taken = []
    for _ in range(times):
        gc.collect()
        begin = time.process_time()
        result = call()
        taken.append(time.process_time() - begin)
    return min(taken), result


def _job(tensors: int) -> Job:
    """A job with tensors of a thousand to a million elements, as in convolutional networks; sizes are distinct."""
    rng = random.Random(tensors)
    infos = tuple(TensorInfo(f"t{i}", (int(10 ** rng.uniform(3, 6)),)) for i in range(tensors))
    whole_s = 0.15
    ready = tuple(whole_s * 2 / 3 * (tensors - i) / tensors for i in range(tensors))
    needed = tuple(whole_s / 3 * i / tensors for i in range(tensors))
    return Job(infos, 32, Timing(ready, needed, whole_s * 2 / 3, whole_s / 3, 0.002), "random")


def _gap(seed: int) -> float:
    """Percent above the best of all choices."""
    rng = random.Random(seed)
    machines, policy = rng.choice((FLAT, TWO_LEVEL, HOMES)), Policy(max_loss=rng.choice((0.1, 0.4, 1.0)))
    hosts = () if machines.reachable else (0,)
    prices = Prices(machines, tables.profile_from_tables(machines), hosts)
    catalog = Catalog(prices, options(prices, policy))
    _, losses = catalog.costs(Recipe())
    sizes = [int(10 ** rng.uniform(4, 7)) for _ in range(rng.randint(2, 4))]
    useful = []
    for size in sizes:
        kept = catalog.useful(Sort.GRADIENTS, size.bit_length(), Recipe())
        most = int(rng.uniform(4, MOST_OPTIONS))
        least = min(kept, key=lambda o: (losses[o], o))
        others = [o for o in kept if o != least]
        useful.append(tuple(sorted([least, *rng.sample(others, min(len(others), most - 1))])))
    work_s = rng.uniform(0.01, 0.2)
    ready = tuple(sorted(rng.uniform(0.3, 1.0) * work_s for _ in sizes))
    built = [catalog.load(mine, size, 0.0) for mine, size in zip(useful, sizes, strict=True)]
    each_node = np.array([[*ready, work_s]] * len(prices.network.nodes))
    steps = native_schedule(prices.network.problem([load for load, _ in built], each_node, tail_s=0.001))
    loss = [[losses[o] * size / sum(sizes) for o in mine] for mine, size in zip(useful, sizes, strict=True)]
    excess = [[0.0] * len(mine) for mine in useful]
    space = Space(steps, loss, excess, [held_s for _, held_s in built], [[b] for b in range(len(sizes))], policy.max_loss)
    return 100 * (search(space, uniform(space)).step_s / _brute(space) - 1)


def _brute(space: Space) -> float:
    """The best step time over all choices within the budget. One sweep tries all options of the last bucket."""
    *counts, last = (len(each) for each in space.loss)
    best_s = math.inf
    for head in itertools.product(*map(range, counts)):
        lost = sum(space.loss[b][o] for b, o in enumerate(head))
        swept = space.steps.sweep([*head, 0], [len(counts)], best_s)
        for option in range(last):
            if lost + space.loss[-1][option] <= space.max_loss + 1e-9:
                best_s = min(best_s, swept[option])
    return best_s
