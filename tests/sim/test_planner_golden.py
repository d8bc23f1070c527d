"""Plans for a table of jobs, machines and policies take at most 3 % longer to a loss than the stored figures.

The figures are in tests/golden/planner.json: seconds to a loss per step of dense training, or seconds of a step with
objective="step". A plan is priced by the simulator and the learning rows alone, whatever it predicts itself.
`python tests/sim/test_planner_golden.py` prints the figures of the present planner beside them, `--write` stores them.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from commlayer.planner.costs import plan_excess
from commlayer.planner.data.models import builtin, published_job
from commlayer.planner.inputs import checked_inputs, cluster_from_line, cluster_of_homes
from commlayer.planner.model import Cluster, Link, Node, Policy
from commlayer.planner.plan_lint import lint
from commlayer.planner.search.plan_search import plan
from commlayer.planner.simulation import simulate
from commlayer.records import Job, Plan, TensorInfo, Timing

FIGURES = Path(__file__).parents[1] / "golden" / "planner.json"
WORSE = 1.03


def sites(count: int, low_mbps: float, high_mbps: float, seed: int = 1, device: str = "rtx3060") -> Cluster:
    """Sites with random links, all different."""
    draw = random.Random(seed)
    links = [Link(draw.uniform(low_mbps, high_mbps) * 1e6, draw.uniform(low_mbps, high_mbps) * 1e6, 4e-3) for _ in range(count)]
    speed = cluster_from_line(f"{device}@1Gb").nodes[0].speed if device != "cpu" else 1.0
    return Cluster(tuple(Node(f"n{i}", 1, device, link, speed=speed) for i, link in enumerate(links)), False)


def layered(tensors: int, seed: int, *, filled: float = 0.0, step_s: float = 0.15) -> Job:
    """A job of random tensors; with `filled`, the first one is an embedding of which this part is nonzero."""
    draw = random.Random(seed)
    infos = [TensorInfo(f"t{i}", (int(10 ** draw.uniform(3, 6)),)) for i in range(tensors)]
    if filled:
        infos[0] = TensorInfo("t0", (20000, 128))
    ready = tuple(step_s * 2 / 3 * (tensors - i) / tensors for i in range(tensors))
    needed = tuple(step_s / 3 * i / tensors for i in range(tensors))
    part = (filled, *(1.0,) * (tensors - 1)) if filled else ()
    return Job(tuple(infos), 32, Timing(ready, needed, step_s * 2 / 3, step_s / 3, 0.002, filled=part), "random")


def drawn(seed: int) -> tuple[Job, Cluster, Policy]:
    draw = random.Random(seed)
    job = layered(draw.randint(4, 60), seed, step_s=10 ** draw.uniform(-2, 0))
    low = 10 ** draw.uniform(0.5, 3)
    machines = sites(draw.randint(2, 10), low, low * draw.choice((1.5, 8)), seed, draw.choice(("cpu", "rtx3060", "t4")))
    machines = structs.replace(machines, reachable=draw.random() < 0.4)
    return job, machines, Policy(
        exact=draw.random() < 0.5, optimizer=draw.choice(("", "sgd", "adam")), forward=draw.random() < 0.3,
        max_loss=draw.choice((0.002, 0.02, 1e9, 1e9)))


class Case(NamedTuple):
    job: Job
    cluster: Cluster
    policy: Policy = Policy()


EXACT, FREE, STEP = Policy(optimizer="adam"), Policy(exact=False, optimizer="adam"), Policy(objective="step")
HOMES = "4xrtx3060@100/20Mb"
MIXED = "2xrtx4090@1Gb,rtx3060@100/20Mb,2xt4@500Mb,rtx2080ti@50/10Mb"


@cache
def cases() -> dict[str, Case]:
    line, homes = cluster_from_line, cluster_of_homes
    resnet, bert, gpt2 = builtin("resnet50"), builtin("bert-base"), builtin("gpt2")
    table = {
        "resnet50 8xv100@10g": Case(published_job("resnet50"), line("8xv100@10g")),
        "resnet50 8xv100@10g step": Case(published_job("resnet50"), line("8xv100@10g"), STEP),
        "vgg16 8x8*v100@25g step": Case(published_job("vgg16"), line("8x8*v100@25g"), STEP),
        "vgg16 8x8*v100@25g": Case(published_job("vgg16"), line("8x8*v100@25g"), FREE),
        "bert-base 2x8*a100@10g": Case(bert, line("2x8*a100@10g"), EXACT),
        "bert-large 4x8*v100@100g": Case(builtin("bert-large"), line("4x8*v100@100g"), EXACT),
        "gpt2 4xrtx3090@1g": Case(gpt2, line("4xrtx3090@1g"), EXACT),
        "gpt2 4xrtx3090@1g forward": Case(gpt2, line("4xrtx3090@1g"), structs.replace(EXACT, forward=True)),
        "gpt2 4xrtx3090@1g free": Case(gpt2, line("4xrtx3090@1g"), FREE),
        "gpt2 4xrtx3090@1g budget": Case(gpt2, line("4xrtx3090@1g"), structs.replace(EXACT, max_loss=0.01)),
        "lstm 8xt4@10g step": Case(published_job("lstm"), line("8xt4@10g"), STEP),
        "vit-b16 16xrtx3060@1g": Case(builtin("vit-b16"), line("16xrtx3060@1g"), EXACT),
        "resnet50 2xrtx3060@100m": Case(resnet, line("2xrtx3060@100m"), EXACT),
        "resnet50 homes exact": Case(resnet, line(HOMES), EXACT),
        "resnet50 homes": Case(resnet, line(HOMES), FREE),
        "resnet50 homes sgd": Case(resnet, line(HOMES), Policy(exact=False, optimizer="sgd")),
        "resnet50 homes step": Case(resnet, line(HOMES), STEP),
        "resnet50 homes budget": Case(resnet, line(HOMES), structs.replace(FREE, max_loss=0.02)),
        "resnet50 homes two codecs": Case(resnet, line(HOMES), structs.replace(STEP, max_loss=0.02, codecs=(
            "topk(ratio=0.1)", "topk(ratio=0.01)"))),
        "resnet50 homes fp16": Case(resnet, line(HOMES), structs.replace(FREE, codecs=("fp16()",))),
        "gpt2 homes behind NAT": Case(gpt2, homes(HOMES, "1Gb"), FREE),
        "gpt2 homes behind NAT exact": Case(gpt2, homes(HOMES, "200Mb"), EXACT),
        "bert-base mixed exact": Case(bert, line(MIXED), EXACT),
        "bert-base mixed": Case(bert, line(MIXED), FREE),
        "resnet50 4*rtx3090 homes": Case(resnet, line("3x4*rtx3090@300/50Mb"), FREE),
        "resnet50 10-900 x4": Case(resnet, sites(4, 10, 900), FREE),
        "resnet50 10-900 x8 exact": Case(resnet, sites(8, 10, 900), EXACT),
        "gpt2 10-900 x8": Case(gpt2, sites(8, 10, 900, 3), FREE),
        "resnet50 20-900 x32": Case(published_job("resnet50"), sites(32, 20, 900), Policy(exact=False)),
        "resnet50 20-900 x32 step": Case(published_job("resnet50"), sites(32, 20, 900), STEP),
        "small 3xrtx3060@100m": Case(layered(6, 1, step_s=0.02), line("3xrtx3060@100m"), EXACT),
        "small homes": Case(layered(6, 1, step_s=0.02), line("3xrtx3060@100/20Mb"), FREE),
        "small homes forward": Case(layered(24, 2), sites(4, 10, 30, 2, "cpu"), structs.replace(
            FREE, forward=True, staleness=False)),
        "small exact forward": Case(layered(24, 2), sites(4, 10, 30, 2, "cpu"), structs.replace(EXACT, forward=True)),
        "small stale": Case(layered(24, 2), line("4xrtx3060@50Mb"), structs.replace(STEP, staleness=True)),
        "small whole steps": Case(layered(24, 2), line("4xrtx3060@50Mb"), structs.replace(FREE, fragments=False)),
        "embedding homes": Case(layered(12, 3, filled=0.01), line("4xrtx3060@50Mb"), FREE),
        "embedding exact": Case(layered(12, 3, filled=0.01), line("4xrtx3060@50Mb"), EXACT),
        "300 tensors": Case(layered(300, 4), line("8xv100@10g"), STEP),
        "300 tensors homes": Case(layered(300, 4), line(HOMES), FREE),
    }
    return table | {f"drawn {seed}": Case(*drawn(seed)) for seed in range(8)}


NIGHTLY = {
    "vgg16 8x8*v100@25g", "bert-large 4x8*v100@100g", "vit-b16 16xrtx3060@1g", "300 tensors homes", "bert-base mixed exact",
    "bert-base mixed", "gpt2 10-900 x8", "resnet50 20-900 x32", "resnet50 20-900 x32 step", "resnet50 4*rtx3090 homes",
    "small homes forward", "drawn 0", "drawn 3",
}
"""Cases that take long."""


def seconds(best: Plan, case: Case) -> float:
    question = checked_inputs(case.job, case.cluster, None, case.policy)
    step_s = simulate(best, *question, spans=False).step_s / best.local_steps
    by_loss = question.policy.objective == "loss"
    return step_s * (1 + by_loss * plan_excess(best, question).high)


def checked(case: Case) -> tuple[Plan, float]:
    best = plan(case.job, case.cluster, None, case.policy)
    question = checked_inputs(case.job, case.cluster, None, case.policy)
    problems = [line for line in lint(best, case.job, case.cluster, question.profile) if "sent uncompressed" not in line]
    assert problems == []
    lost = plan_excess(best, question).loss_high
    assert lost <= question.policy.max_loss + 1e-9
    return best, seconds(best, case)


@pytest.mark.commit(24)
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else []) for name in cases()])
def test_no_plan_is_slower_to_a_loss_than_the_stored_one(name: str) -> None:
    best, found_s = checked(cases()[name])
    assert found_s <= WORSE * json.loads(FIGURES.read_text())[name], best.local_steps


def main(write: bool) -> Iterator[str]:
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    figures, total_s = {}, 0.0
    for name, case in cases().items():
        begin = time.process_time()
        best, figures[name] = checked(case)
        took_s = time.process_time() - begin
        total_s += took_s
        ratio = figures[name] / known.get(name, figures[name])
        mode = f"H={best.local_steps} {best.codes} {best.overlap} F={best.fragments}"
        yield f"{name:28} {1e3 * figures[name]:10.2f} ms {ratio:6.3f} {took_s:6.2f} s  {len(best.buckets):4} buckets {mode}"
    yield f"total {total_s:.1f} s"
    if write:
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    for row in main("--write" in sys.argv):
        print(row, flush=True)
