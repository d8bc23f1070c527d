"""One rank of a training measurement: `python -m bench.worker --mode ddp_fp32 --model mlp`.

Prints one line of JSON with its step times. Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment, like
any torchrun script.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.ranks import as_rank
from commlayer.autotune.controller import TuningController
from commlayer.autotune.job_actions import PROBE_S, JobActions
from commlayer.autotune.plan_limits import PlanLimits
from commlayer.autotune.planning.candidate import Candidate
from commlayer.autotune.report import Reports
from commlayer.autotune.state import MEASURED_STEPS, WARM_STEPS, SearchRequest
from commlayer.engine.job.job import DistributedJob
from commlayer.errors import InvalidState

DEADLINE = timedelta(seconds=120)
PRICED = WARM_STEPS + MEASURED_STEPS + 2
"""After this step the active plan has been priced, and no probes follow."""

MODELS = {
    "mlp_small": (256, 256, 10),  # 0.3 MB: for trying things out
    "mlp": (1024, 1024, 1024, 10),  # 8.4 MB
    "mlp_big": (2048, 4096, 4096, 10),  # 101 MB
}


class ModelSetup(NamedTuple):
    """A model set up by a mode: the module to call forward on, and how to close it. After close() no rank needs another."""

    module: nn.Module
    close: Callable[[], None]
    decisions: Callable[[], list[str]] = list
    """Decisions that commlayer logged during training, one line each."""
    prices: Callable[[], list[dict[str, float]]] = list
    """Measured and predicted step times of the current plan."""


def host_config(**fields: Any) -> dict[str, Any]:
    """Settings for one rank per host that listens on the host's address. The lab's network is closed, so without encryption."""
    address = os.environ.get("HOST_ADDRESS", "127.0.0.1")
    # Each run finds its plan by itself.
    return {"ranks_per_node": 1, "bind": address, "insecure": address != "127.0.0.1", "cache": ""} | fields


def ddp_fp32(model: nn.Module, _optimizer: torch.optim.Optimizer, _argument: str) -> ModelSetup:
    dist.init_process_group("gloo", timeout=DEADLINE)
    return ModelSetup(DistributedDataParallel(model), dist.barrier)


def ddp_fp16(model: nn.Module, _optimizer: torch.optim.Optimizer, _argument: str) -> ModelSetup:
    dist.init_process_group("gloo", timeout=DEADLINE)
    module = DistributedDataParallel(model)
    module.register_comm_hook(None, fp16_compress_hook)
    return ModelSetup(module, dist.barrier)


def commlayer_service(model: nn.Module, optimizer: torch.optim.Optimizer, argument: str) -> ModelSetup:
    """Summation servers on all hosts. `argument` is the codec for every gradient, "" for the automatic plan, or "auto" for that
    plan under sync="auto"."""
    dist.init_process_group("gloo", timeout=DEADLINE)
    sync, codec = ("auto", None) if argument == "auto" else (None, argument or None)
    session = commlayer.attach(model, optimizer, compression=codec, sync=sync, config=host_config(servers="each"))
    return ModelSetup(model, session.close, session.inspect.decisions)


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


def commlayer_priced(model: nn.Module, optimizer: torch.optim.Optimizer, argument: str) -> ModelSetup:
    """As mode `commlayer`; the plan is also priced from the first steps, as by "auto", but never replaced."""
    trained = commlayer_service(model, optimizer, argument)
    session: commlayer.Session = trained.close.__self__  # type: ignore[attr-defined]
    connection = session.inspect.context
    assert isinstance(connection, DistributedJob)
    actions = PricingActions(connection)
    auto = TuningController(connection, actions, Reports(connection.rows.section("measurements")))
    connection.terms.auto = True
    auto.start()
    steps = itertools.count(1)

    def after_step(*_: object) -> None:
        auto.end_step()
        auto.settle(60.0)  # planning must not take CPU time from the measured steps
        if next(steps) == PRICED:
            auto.paused = True

    optimizer.register_step_post_hook(after_step)
    return trained._replace(prices=lambda: actions.prices)


# A mode is called with the model, its optimizer and the ARGUMENT of "--mode NAME:ARGUMENT".
MODES: dict[str, Callable[[nn.Module, torch.optim.Optimizer, str], ModelSetup]] = {
    "ddp_fp32": ddp_fp32,
    "ddp_fp16": ddp_fp16,
    "commlayer": commlayer_service,
    "priced": commlayer_priced,
}


def command(mode: str, model: str = "mlp", *, batch: int = 32, warmup: int = 3, steps: int = 10) -> list[str]:
    """The command line of one rank of bench.worker."""
    numbers = {"--batch": batch, "--warmup": warmup, "--steps": steps}
    flags = [word for flag, number in numbers.items() for word in (flag, str(number))]
    return [sys.executable, "-m", "bench.worker", "--mode", mode, "--model", model, *flags]


def build(name: str) -> nn.Module:
    """Builds a model by name; seeded, so every rank gets the same weights."""
    torch.manual_seed(7)
    widths = MODELS[name]
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Steps(NamedTuple):
    """Seconds and loss of every step."""

    step_s: list[float]
    loss: list[float]


def train(trained: ModelSetup, optimizer: torch.optim.Optimizer, width: int, batch: int, rank: int, steps: int) -> Steps:
    """Trains on this rank's seeded data. Generating the data is not timed."""
    generator = torch.Generator().manual_seed(1000 + rank)
    loss_of = nn.CrossEntropyLoss()
    step_s, losses = [], []
    for _ in range(steps):
        x = torch.randn(batch, width, generator=generator)
        y = torch.randint(0, 10, (batch,), generator=generator)
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(trained.module(x), y)
        loss.backward()
        optimizer.step()
        step_s.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return Steps(step_s, losses)


def digest(model: nn.Module) -> str:
    """Hash of the parameters: ranks that trained the same model have equal digests."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()[:16]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.worker")
    parser.add_argument("--mode", required=True, metavar="NAME[:ARGUMENT]", help=", ".join(MODES))
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--warmup", type=int, default=3, help="steps left out of the times")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args(argv)
    mode, _, argument = args.mode.partition(":")
    if mode not in MODES:
        parser.error(f"--mode {args.mode}: got {mode!r}, allowed are {', '.join(MODES)}")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    torch.set_num_threads(1)
    model = build(args.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trained = MODES[mode](model, optimizer, argument)
    result = train(trained, optimizer, MODELS[args.model][0], args.batch, rank, args.warmup + args.steps)
    answer = {
        "rank": rank,
        "world": world,
        "mode": args.mode,
        "model": args.model,
        "nbytes": sum(parameter.numel() * 4 for parameter in model.parameters()),
        "warmup_s": result.step_s[: args.warmup],
        "step_s": result.step_s[args.warmup :],
        "loss": result.loss[args.warmup :],
        "digest": digest(model),
        "decisions": trained.decisions(),
        "prices": trained.prices(),
    }
    print(json.dumps(answer), flush=True)
    trained.close()


if __name__ == "__main__":
    as_rank(main)
