"""Benchmark of load balancing: the paper's four GPUs and other clusters, ours against LBB and equal shares.

Emulated workers are linear time models with noise (bench/balance_cluster.py), so runs are reproducible; only solve times are
measured. All modes see the same noise. The oracle knows the true times of each step. Communication counts only in the rows that
name it. The last rows come from real processes over a shaped link, whose passes are paced to the modelled time.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commlayer
from bench.balance_cluster import Disturbance, Equal, Mode, Ours, PlayedCluster, PlayedStep, moves, slow_after
from bench.balance_cluster import run as run_mode
from bench.lab import Lab, LabUnavailable, check, sound
from bench.lbb import Cubic, Lbb, fit_cubic
from bench.paced.pace import BACKWARD_S, FORWARD_S, Pace
from bench.ranks import DEADLINE, as_rank, host_config, launch_hosts, program, slowest_s
from bench.report import Result
from bench.tasks_models import layers_of, mlp
from bench.timing import least_s
from commlayer.balance import Communication, LinearTime, Sampler, shares, solve
from commlayer.balance.profile import profile

PAPER_MS = ((0.5931, 5.90), (0.5808, 7.15), (0.6023, 8.29), (2.6714, 50.98))
"""(ms per sample, launch overhead in ms) of the paper's M40, GTX 1070, GTX 1070 and GTX 750."""
PAPER = tuple(LinearTime(slope / 1e3, launch / 1e3) for slope, launch in PAPER_MS)
BATCH = 512
NOISE = 0.01
ADDED_S = 0.05
TURN = 40
"""Number of steps for which one worker has the extra 50 ms before the next worker gets it. The first disturbance starts at step
25, as in the paper's figure 7."""
LBB_COMM_S = 0.1
"""Communication time of an iteration in the logs of the paper's authors: blocking, not overlapped."""
BACKWARD = 2 / 3
"""Fraction of the compute time that communication can overlap with: backward takes about twice as long as forward."""


def each_in_turn(workers: int) -> tuple[Disturbance, ...]:
    return tuple(Disturbance(w, 25 + TURN * w, 25 + TURN * (w + 1), added_s=ADDED_S) for w in range(workers))


def two_speeds(ratio: float) -> tuple[LinearTime, ...]:
    """Two fast workers and two that are `ratio` times slower."""
    fast, slow = LinearTime(0.5e-3, 5e-3), LinearTime(0.5e-3 * ratio, 5e-3 * ratio)
    return fast, fast, slow, slow


HEAT = (Disturbance(0, 30, 200, factor=2.0, ramp=60), Disturbance(1, 60, 200, factor=1.5, ramp=20))
SCENARIOS: dict[str, tuple[PlayedCluster, int]] = {
    "paper, static": (PlayedCluster(PAPER, BATCH, noise=NOISE), 100),
    "paper, +50 ms in turn": (PlayedCluster(PAPER, BATCH, disturbances=each_in_turn(4), noise=NOISE), 25 + 4 * TURN + 20),
    "paper, thermal ramps": (PlayedCluster(PAPER, BATCH, disturbances=HEAT, noise=NOISE), 220),
    **{f"{ratio}:1 mix, x2 on one": (
        PlayedCluster(two_speeds(ratio), BATCH, disturbances=(Disturbance(0, 30, 70, factor=2.0),), noise=NOISE), 100
    ) for ratio in (3, 10, 30)},
}


def profile_models(cluster: PlayedCluster) -> list[Cubic]:
    """LBB's profile models, fitted to batch sizes in powers of two up to the total, with the cluster's noise."""
    fitted = []
    for worker in range(len(cluster.lines)):
        draw = random.Random(worker)
        line = cluster.lines[worker]
        points = profile(lambda batch, line=line, draw=draw: line.time_s(batch) * (1 + NOISE * draw.gauss(0, 1)), cluster.total)  # type: ignore[misc]
        fitted.append(fit_cubic(points.points))
    return fitted


MODES: Mapping[str, Callable[[PlayedCluster], Mode]] = {
    "equal (SSGD)": Equal,
    "LBB as published": lambda c: Lbb(profile_models(c), c.total),
    "ours": Ours,
}


def run(quick: bool) -> Result:
    parts = emulation(quick), real_processes(50 if quick else 100)
    rows = [row for part in parts for row in part["rows"]]
    return {"rows": rows, "summary": {key: value for part in parts for key, value in part["summary"].items()}}


def emulation(quick: bool) -> Result:
    """Runs all modes in virtual time."""
    rows: list[dict[str, Any]] = []
    done: dict[tuple[str, str], list[PlayedStep]] = {}
    for scenario, (cluster, steps) in SCENARIOS.items():
        for name, build in MODES.items():
            done[scenario, name] = run_mode(build(cluster), cluster, steps)
            rows.append(_row(scenario, name, done[scenario, name], cluster.total))
    comm_rows, vs_lbb = _with_communication()
    many_row, many = _thousand(10 if quick else 40)
    ours = [steps for (_, name), steps in done.items() if name == "ours"]
    recovery = [_recovery(seed) for seed in range(2 if quick else 8)]
    static = done["paper, static", "ours"]
    return {
        "rows": rows + comm_rows + [many_row],
        "summary": {
            "paper_fixture_makespan_ms": solve(PAPER, BATCH).makespan_s * 1e3,
            "paper_fixture_shares": "/".join(map(str, shares(PAPER, BATCH))),
            "vs_ssgd": _mean_s(done["paper, static", "equal (SSGD)"]) / _mean_s(static),
            "vs_lbb_disturbed": _mean_s(done["paper, +50 ms in turn", "LBB as published"])
            / _mean_s(done["paper, +50 ms in turn", "ours"]),
            **vs_lbb,
            "recover_iterations_additive50": max(max(one[:3]) for one in recovery),
            "recover_iterations_additive50_small": max(one[3] for one in recovery),
            "share_sum_violations": sum(_wrong_sums(steps, BATCH) for steps in ours) + _wrong_sums(many, MANY_TOTAL),
            "oracle_gap_pct": max(_gap_pct(steps) for steps in ours),
            "solve_us_4": 1e6 * least_s(lambda: shares(PAPER, BATCH), 200),
            "solve_us_1000": 1e6 * least_s(lambda: shares(_many_lines(), MANY_TOTAL), 10),
            "solve_us_1000_caps": 1e6 * least_s(lambda: solve(_many_lines(), MANY_TOTAL, MANY_CAPS), 10),
        },
    }


def _mean_s(steps: list[PlayedStep]) -> float:
    return sum(step.iteration_s for step in steps) / len(steps)


def _gap_pct(steps: list[PlayedStep]) -> float:
    return 100 * (sum(step.iteration_s for step in steps) / sum(step.oracle_s for step in steps) - 1)


def _wrong_sums(steps: list[PlayedStep], total: int) -> int:
    return sum(sum(step.shares) != total for step in steps)


def _row(scenario: str, name: str, steps: list[PlayedStep], total: int) -> dict[str, Any]:
    return {
        "scenario": scenario, "mode": name, "iteration_ms": _mean_s(steps) * 1e3, "samples_per_s": total / _mean_s(steps),
        "oracle_gap_pct": _gap_pct(steps), "slow_iterations": sum(step.slow for step in steps), "moves": moves(steps),
        "sum_wrong": _wrong_sums(steps, total),
        "final": "/".join(map(str, steps[-1].shares)) if len(steps[-1].shares) < 9 else "",
    }  # fmt: skip


def _with_communication() -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The authors' 100 ms of blocking all-reduce, the same all-reduce overlapped, and overlapped with a tenth of the bytes."""
    cluster = PlayedCluster(PAPER, BATCH, noise=NOISE)
    systems = {
        "LBB as published, blocking 100 ms": (MODES["LBB as published"], Communication(LBB_COMM_S)),
        "ours, overlapped": (MODES["ours"], Communication(LBB_COMM_S, BACKWARD)),
        "ours, overlapped, a tenth of the bytes": (MODES["ours"], Communication(LBB_COMM_S / 10, BACKWARD)),
    }
    rows, means = [], []
    for name, (build, communication) in systems.items():
        steps = run_mode(build(cluster), cluster, 100, communication)
        rows.append(_row("paper, static, communication emulated", name, steps, BATCH))
        means.append(_mean_s(steps))
    return rows, {"vs_lbb_emulated_overlap": means[0] / means[1], "vs_lbb_emulated_compressed": means[0] / means[2]}


def _recovery(seed: int) -> list[int]:
    """Number of slow iterations after 50 ms were added, for each of the workers."""
    cluster = PlayedCluster(PAPER, BATCH, disturbances=each_in_turn(4), noise=NOISE, seed=seed)
    steps = run_mode(Ours(cluster), cluster, 25 + 4 * TURN)
    return [slow_after(steps, 25 + TURN * w, 25 + TURN * (w + 1)) for w in range(4)]


MANY_TOTAL = 64_000
MANY_CAPS = [40 if worker % 2 else None for worker in range(1000)]
"""Memory limits in samples for every second worker, below the mean share of 64."""


@lru_cache
def _many_lines() -> list[LinearTime]:
    draw = random.Random(1)
    return [LinearTime(draw.uniform(0.3e-3, 9e-3), draw.uniform(1e-3, 50e-3)) for _ in range(1000)]


def _thousand(steps: int) -> tuple[dict[str, Any], list[PlayedStep]]:
    """A thousand workers, of which fifty slow down in the third step."""
    slower = tuple(Disturbance(worker, 3, 1000, factor=2.0) for worker in range(0, 1000, 20))
    cluster = PlayedCluster(tuple(_many_lines()), MANY_TOTAL, disturbances=slower, noise=NOISE)
    played = run_mode(Ours(cluster), cluster, steps)
    return _row("1,000 workers, x2 on fifty", "ours", played, MANY_TOTAL), played


LINK_BPS, ONE_WAY_S = 200e6, 0.00025
"""With this link an all-reduce of the model takes the 100 ms that the paper's authors measured."""
WARM = 20
"""Warm-up steps that are not counted, because shares settle in them."""
REAL_MODES = {
    "LBB as published, blocking all-reduce": "lbb",
    "ours, overlapped, fp16": "fp16()",
    "ours, overlapped, topk 1 % int8": "topk(ratio=0.01,values='int8')",
}


def real_processes(steps: int) -> Result:
    """LBB and ours in real processes."""
    rows: list[dict[str, Any]] = []
    times: dict[str, float] = {}
    try:
        with Lab(hosts=len(PAPER), up_bps=LINK_BPS, down_bps=LINK_BPS, delay_s=ONE_WAY_S) as lab:
            passed = check(lab).passed
            for name, mode in REAL_MODES.items():
                before = lab.counters()
                replies = launch_hosts(lab, len(PAPER), program("bench.balance", mode, steps), deadline_s=200)
                times[mode] = median(slowest_s(replies)[WARM:])
                final = "/".join(str(reply["shares"][-1]) for reply in replies)
                rows.append({"scenario": f"real processes, {LINK_BPS / 1e6:.0f} Mb/s", "mode": name,
                             "iteration_ms": times[mode] * 1e3, "final": final,
                             "void": not (passed and sound(before, lab.counters()))})
    except LabUnavailable as reason:
        return {"rows": [{"scenario": "real processes, shaped link", "mode": str(reason), "void": True}], "summary": {}}
    lbb, fp16, topk = times.values()
    return {"rows": rows, "summary": {"vs_lbb_paper": lbb / topk, "vs_lbb_paper_fp16": lbb / fp16,
                                      "lbb_exposed_ms": 1e3 * (lbb - solve(PAPER, BATCH).makespan_s)}}


WIDTHS = (64, 352, 352, 352, 10)
"""1.1 MB of float32: LBB's all-reduce per parameter among four ranks takes about 100 ms at 200 Mb/s, as in the paper."""
SAMPLES = 4
"""Number of samples that are really computed per share: enough to get gradients."""


def passes(model: nn.Module, pace: Pace, compute_s: float) -> None:
    """A forward and a backward pass, which together take `compute_s`."""
    pace.forward(compute_s / (FORWARD_S + BACKWARD_S))
    loss = model(torch.ones(SAMPLES, WIDTHS[0])).square().mean()
    pace.backward()
    loss.backward()


def lbb_training(model: nn.Module, pace: Pace, line: LinearTime, steps: int) -> Iterator[int]:
    """LBB as its authors run it: a blocking all-reduce for each parameter after backward. Yields this rank's share after each
    step."""
    rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.01)
    mode = Lbb(profile_models(PlayedCluster(PAPER, BATCH)), BATCH)
    for step in range(steps):
        shares = mode.shares(step)
        begin = time.perf_counter()
        optimizer.zero_grad()
        passes(model, pace, line.time_s(shares[rank]))
        computed_s = time.perf_counter() - begin
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad.mul_(shares[rank] / BATCH))
        optimizer.step()
        yield shares[rank]
        times = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(times, torch.tensor([computed_s], dtype=torch.float64))
        mode.observe(step, [float(one) for one in times])


def balancer_training(model: nn.Module, pace: Pace, line: LinearTime, steps: int, codec: str) -> Iterator[int]:
    """Our balancer: starts with equal shares, without a profile. Yields this rank's share after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = host_config(servers="each", fuse_nbytes=1 << 17, cut_nbytes=1 << 18)  # small: as many buckets as a large model has
    session = commlayer.attach(model, optimizer, compression=codec, config=config)
    sampler = Sampler(steps * BATCH, BATCH, world=dist.get_world_size(), rank=dist.get_rank())
    controller = commlayer.LoadBalancer(session, sampler)
    loader = DataLoader(TensorDataset(torch.arange(sampler.length)), batch_sampler=sampler)
    for (batch,) in controller.follow(loader):
        passes(model, pace, line.time_s(len(batch)))
        optimizer.step()
        optimizer.zero_grad()
        yield len(batch)
    session.close()


def rank(mode: str, count: str) -> dict[str, Any]:
    """One rank."""
    dist.init_process_group("gloo", timeout=DEADLINE)
    model, line, steps = mlp(*WIDTHS), PAPER[dist.get_rank()], int(count)
    pace = Pace(model, layers_of(model))
    running = lbb_training(model, pace, line, steps) if mode == "lbb" else balancer_training(model, pace, line, steps, mode)
    shares, marks = zip(*((share, time.perf_counter()) for share in running), strict=True)
    return {"step_s": [0.0] + [after - before for before, after in itertools.pairwise(marks)], "shares": shares}


if __name__ == "__main__":
    as_rank(rank)
