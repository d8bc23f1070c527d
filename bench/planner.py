"""Quality and speed of the planner: planning time, gap to brute force, predicted against measured steps, and steps of the
automatic plan on loopback over DDP's.

Predicted: rank 0 prices the current plan from measurements of all ranks in the first steps, as "auto" does. Measured: the
median of the later steps, in real runs over the lab's links. `from_step` is the first step that counts. A row is void if the
lab fell below 95 % of its rates. `python -m bench.planner MODE MODEL STEPS [CODEC]` is one rank of such a run.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from msgspec import structs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.lab import Lab, LabUnavailable, check, sound
from bench.ranks import DEADLINE, as_rank, host_config, launch_hosts, program, slowest_s
from bench.report import Result
from bench.tasks_models import mlp
from bench.timing import least_s
from commlayer.autotune.controller import TuningController
from commlayer.autotune.job_actions import PROBE_S, JobActions
from commlayer.autotune.plan_limits import PlanLimits
from commlayer.autotune.planning.candidate import Candidate
from commlayer.autotune.report import Reports
from commlayer.autotune.state import MEASURED_STEPS, WARM_STEPS, SearchRequest
from commlayer.engine.job.job import DistributedJob
from commlayer.errors import InvalidState
from commlayer.planner.buckets import Contents
from commlayer.planner.convergence import Recipe
from commlayer.planner.costs import Prices
from commlayer.planner.data import models, tables
from commlayer.planner.model import Cluster, Link, Policy
from commlayer.planner.search.choices import ChoiceSpace, search, uniform
from commlayer.planner.search.options import Catalog, options
from commlayer.planner.search.plan_search import plan
from commlayer.planner.simulation import PlannedFragment, Simulation
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
    for row in _on_loopback(quick):
        rows.append(row)
        summary[f"{row['mode']}_over_ddp_from_step_{row['from_step']}_worst"] = row["x_ddp_worst"]
    try:
        measured = list(_measured(quick))
    except LabUnavailable as reason:
        return {"rows": [*rows, {"what": f"real runs: {reason}"}], "summary": summary}
    if errors := [abs(row["error_pct"]) for row in measured if not row["void"]]:
        summary |= {"predicted_vs_measured_pct_p50": statistics.median(errors), "predicted_vs_measured_pct_worst": max(errors)}
    return {"rows": rows + measured, "summary": summary}


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
                                       lambda: plan(models.published_job("resnet50"), unequal(32, 20e6, 900e6), None, full)),
        "plan_s_resnet50_32_to_loss": ("the same by seconds to a loss, all ways",
                                       lambda: plan(models.published_job("resnet50"), unequal(32, 20e6, 900e6), None, free)),
    }
    for key, (what, call) in cases.items():
        chosen = call()
        gc.collect()
        plan_s = least_s(call, 2 if quick else 5, time.process_time)
        rows.append({"what": what, "plan_s": plan_s, "buckets": len(chosen.buckets), "step_ms": chosen.step_s * 1e3})
        yield key, plan_s


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
        kept = catalog.useful(Contents.GRADIENTS, size.bit_length(), Recipe())
        most = int(rng.uniform(4, MOST_OPTIONS))
        least = min(kept, key=lambda o: (losses[o], o))
        others = [o for o in kept if o != least]
        useful.append(tuple(sorted([least, *rng.sample(others, min(len(others), most - 1))])))
    work_s = rng.uniform(0.01, 0.2)
    ready = tuple(sorted(rng.uniform(0.3, 1.0) * work_s for _ in sizes))
    loads, held_s = catalog.loads(useful, sizes, [0.0] * len(sizes))
    each_node = np.array([[*ready, work_s]] * len(prices.network.nodes))
    problem = prices.network.problem(loads, each_node, tail_s=0.001)
    steps = Simulation([PlannedFragment([*range(len(sizes))], problem)])
    loss = [[losses[o] * size / sum(sizes) for o in mine] for mine, size in zip(useful, sizes, strict=True)]
    excess = [[0.0] * len(mine) for mine in useful]
    space = ChoiceSpace(steps, loss, excess, held_s, [[b] for b in range(len(sizes))], policy.max_loss)
    return 100 * (search(space, uniform(space)).step_s / _brute(space) - 1)


def _brute(space: ChoiceSpace) -> float:
    """The best step time over all choices within the budget. One sweep tries all options of the last bucket."""
    *counts, last = (len(each) for each in space.loss)
    best_s = math.inf
    for head in itertools.product(*map(range, counts)):
        lost = sum(space.loss[b][o] for b, o in enumerate(head))
        swept = space.steps.sweep([*head, 0], [len(counts)], best_s, math.nan, 0, [*range(last)], [1.0] * last)
        for option in range(last):
            if lost + space.loss[-1][option] <= space.max_loss + 1e-9:
                best_s = min(best_s, swept[option])
    return best_s


FIRST, LATER = 10, 50
"""Steps of a run on loopback: those before the controller has measured, and those in which plans are found and tried."""


def _on_loopback(quick: bool) -> Iterator[dict[str, Any]]:
    """Seconds of the automatic plan's steps over those of DDP, each with its slowest rank's. The modes run in turns."""
    modes = {"default": "attached", "auto": "auto"}
    ratios: dict[tuple[str, int], list[float]] = {(mode, start): [] for mode in modes for start in (0, FIRST)}
    for _ in range(2 if quick else 10):
        ddp, *ours = (slowest_s(launch_hosts(None, HOSTS, program("bench.planner", mode, "mlp", FIRST + LATER)))
                      for mode in ("ddp", *modes.values()))
        for mode, times in zip(modes, ours, strict=True):
            for start, stop in ((0, FIRST), (FIRST, FIRST + LATER)):
                ratios[mode, start].append(sum(times[start:stop]) / sum(ddp[start:stop]))
    for (mode, start), each in ratios.items():
        yield {"what": f"{mode} over DDP fp32, loopback", "mode": mode, "from_step": start + 1, "runs": len(each),
               "x_ddp": statistics.median(each), "x_ddp_worst": max(each)}


HOSTS, ONE_WAY_S = 4, 0.015
PRICED_STEPS = 10
"""First steps, from which the plan is priced. Step times are of later steps."""


class Net(NamedTuple):
    """Link rates of every host, in bit/s, and the number of steps to measure there."""

    name: str
    up_bps: float
    down_bps: float
    steps: int


NETS = (Net("1g", 1e9, 1e9, 20), Net("100m", 1e8, 1e8, 12), Net("100/20m", 2e7, 1e8, 8), Net("10m", 1e7, 1e7, 6))
MODELS = {"mlp": (1024, 1024, 1024, 10), "mlp_small": (256, 256, 10)}
"""Widths of layers: 8.4 MB and 0.3 MB."""
BATCH = 32
CODECS = ("topk(ratio=0.01)", "int8()", "fp16()")


def _measured(quick: bool) -> Iterator[dict[str, Any]]:
    for net in NETS[1:2] if quick else NETS:
        with Lab(hosts=HOSTS, up_bps=net.up_bps, down_bps=net.down_bps, delay_s=ONE_WAY_S) as lab:
            passed = check(lab).passed
            for model, codec in itertools.product([*MODELS][: 1 if quick else None], CODECS[:2] if quick else CODECS):
                before = lab.counters()
                row = _priced(lab, net, model, codec)
                yield row | {"void": not (passed and sound(before, lab.counters()))}


def _priced(lab: Lab, net: Net, model: str, codec: str) -> dict[str, Any]:
    argv = program("bench.planner", "priced", model, PRICED_STEPS + net.steps, codec)
    replies = launch_hosts(lab, HOSTS, argv, deadline_s=400)
    measured_s, price = statistics.median(slowest_s(replies)[PRICED_STEPS:]), replies[0]["prices"][0]
    return {
        "link": net.name, "model": model, "what": codec, "from_step": PRICED_STEPS + 1, "step_ms": measured_s * 1e3,
        "predicted_ms": price["priced_s"] * 1e3, "error_pct": 100 * (price["priced_s"] / measured_s - 1),
        "found_ms": price["found_s"] * 1e3,
    }


class PricingActions(JobActions):
    """Actions of a controller that prices the active plan: its searches find no plan to switch to."""

    def __init__(self, job: DistributedJob, probe_s: float = PROBE_S) -> None:
        super().__init__(job, probe_s)
        self.prices: list[dict[str, float]] = []
        """Seconds per step after each search: measured and predicted under the active plan, and predicted under the best plan
        found."""

    def opening(self) -> None:
        """The given plan is the first one."""

    def search(self, request: SearchRequest, allowed: PlanLimits) -> Candidate:
        found = super().search(request, allowed)
        self.prices.append({"measured_s": request.step_s, "priced_s": found.uncontended_s, "found_s": found.plan.step_s})
        raise InvalidState("E-ARGUMENT", "the active plan stays")


PRICED = WARM_STEPS + MEASURED_STEPS + 2
"""After this step the active plan has been priced, and no probes follow."""


def price(session: commlayer.Session, optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """Prices the active plan from the first steps, as "auto" does, but never replaces it. Returns the prices to come."""
    job = session.inspect.context
    assert isinstance(job, DistributedJob)
    actions, steps = PricingActions(job), itertools.count(1)
    auto = TuningController(job, actions, Reports(job.rows.section("measurements")))
    job.terms.auto = True
    auto.start()

    def after_step(*_: object) -> None:
        auto.end_step()
        auto.settle(60.0)  # planning must not take CPU time from the measured steps
        if next(steps) == PRICED:
            auto.paused = True

    optimizer.register_step_post_hook(after_step)
    return actions.prices


def rank(mode: str, name: str, steps: str, codec: str = "") -> dict[str, Any]:
    """One rank. Modes: ddp; attached, with a codec or the default plan; auto; priced, as attached with prices of the plan."""
    dist.init_process_group("gloo", timeout=DEADLINE)
    widths = MODELS[name]
    model: nn.Module = mlp(*widths)
    optimizer, prices = torch.optim.SGD(model.parameters(), lr=0.01), list[dict[str, float]]()
    close: Callable[[], None] = dist.barrier
    if mode == "ddp":
        model = DistributedDataParallel(model)
    else:
        session = commlayer.attach(model, optimizer, compression=codec or None, sync="auto" if mode == "auto" else None,
                                   config=host_config(servers="each"))
        close, prices = session.close, price(session, optimizer) if mode == "priced" else prices
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    step_s = []
    for _ in range(int(steps)):
        x, y = torch.randn(BATCH, widths[0], generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        step_s.append(time.perf_counter() - begin)
    close()
    return {"step_s": step_s, "prices": prices}


if __name__ == "__main__":
    as_rank(rank)
