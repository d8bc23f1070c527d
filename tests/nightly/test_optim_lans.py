"""LANS against the paper's equations in plain Python, its states, its invalid input; CLAN over a summation server."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from support.processes import ROOT, clean_environment
from torch import nn

from bench.virtual_training import VirtualWorkers
from commlayer.compressors import parse, wrap
from commlayer.demo.problem import batches, digits, mlp
from commlayer.engine.model.model_tensors import describe_model
from commlayer.optim import CLAN, LANS
from commlayer.planner import default_plan

Vector = list[float]


SHAPES = ((3, 4), (5,), (1,), ())
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def norm(vector: Vector) -> float:
    return math.sqrt(math.fsum(x * x for x in vector))


class Paper:
    """Algorithm 2 of Zheng et al. 2020 for one block, an equation a line."""

    def __init__(self, x: Vector) -> None:
        self.x, self.m, self.v, self.t = x, [0.0] * len(x), [0.0] * len(x), 0

    def step(self, g: Vector, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
             phi: tuple[float, float], normalize: bool) -> None:
        (b1, b2), self.t = betas, self.t + 1
        if normalize and norm(g):
            length = norm(g)
            g = [gi / length for gi in g]
        self.m = [b1 * mi + (1 - b1) * gi for mi, gi in zip(self.m, g, strict=True)]
        self.v = [b2 * vi + (1 - b2) * gi * gi for vi, gi in zip(self.v, g, strict=True)]
        m_hat = [mi / (1 - b1**self.t) for mi in self.m]
        v_hat = [vi / (1 - b2**self.t) for vi in self.v]
        r = [mi / (math.sqrt(vi) + eps) + weight_decay * xi for mi, vi, xi in zip(m_hat, v_hat, self.x, strict=True)]
        c = [gi / (math.sqrt(vi) + eps) + weight_decay * xi for gi, vi, xi in zip(g, v_hat, self.x, strict=True)]
        length = min(max(norm(self.x), phi[0]), phi[1])
        of_r = length / norm(r) if length and norm(r) else 1.0
        of_c = length / norm(c) if length and norm(c) else 1.0
        self.x = [xi - lr * (b1 * of_r * ri + (1 - b1) * of_c * ci) for xi, ri, ci in zip(self.x, r, c, strict=True)]


def tensors(seed: int, dtype: torch.dtype, device: str = "cpu", scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(device, dtype) for shape in SHAPES]


def flat(tensor: torch.Tensor) -> Vector:
    return [float(x) for x in tensor.detach().double().flatten()]


def train(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], steps: range) -> None:
    for step in steps:
        for p, g in zip(parameters, tensors(100 + step, torch.float64, scale=10.0 ** (step % 3 - 1)), strict=True):
            p.grad = g.to(p)
        optimizer.step()


TABLE: list[dict[str, Any]] = [
    {},
    {"lr": 0.3, "betas": (0.5, 0.7)},
    {"betas": (0.0, 0.0), "eps": 0.1},
    {"weight_decay": 0.0, "eps": 0.0},
    {"lr": 0.1, "weight_decay": 2.0},
    {"lr": 0.1, "normalize": False},
    {"lr": 0.1, "normalize": False, "betas": (0.9, 0.99), "weight_decay": 0.5},
    {"lr": 0.1, "phi": (0.5, 1.0)},
    {"lr": 0.1, "phi": (3.0, math.inf)},
]
DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "phi": (0.0, math.inf),
                            "normalize": True}
"""As published: arXiv 2006.13484, and the code that its authors released."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", TABLE, ids=str)
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_every_step_follows_the_paper(given: dict[str, Any], dtype: torch.dtype, near: float, device: str) -> None:
    parameters = [nn.Parameter(x) for x in tensors(0, dtype, device)]
    optimizer = LANS(parameters, **given)
    papers = [Paper(flat(p)) for p in parameters]
    for step in range(12):
        train(optimizer, parameters, range(step, step + 1))
        for p, paper in zip(parameters, papers, strict=True):
            assert p.grad is not None
            paper.step(flat(p.grad), **{**DEFAULTS, **given})
            assert flat(p) == pytest.approx(paper.x, rel=near, abs=near)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_updated_in_float32(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(x) for x in tensors(0, dtype)]
    optimizer = LANS(parameters, lr=0.1)
    for step in range(5):
        before = [Paper(flat(p)) for p in parameters]
        for paper, p in zip(before, parameters, strict=True):
            if step:
                state = optimizer.state[p]
                paper.m, paper.v, paper.t = flat(state["m"]), flat(state["v"]), state["step"]
        train(optimizer, parameters, range(step, step + 1))
        for p, paper in zip(parameters, before, strict=True):
            assert p.grad is not None
            paper.step(flat(p.grad), **{**DEFAULTS, "lr": 0.1})
            assert flat(p) == pytest.approx(paper.x, rel=torch.finfo(dtype).eps)
            assert optimizer.state[p]["v"].dtype == torch.float32


def test_zero_weights_are_updated_and_missing_gradients_are_skipped() -> None:
    zero, still, unused = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = LANS([zero, still, unused], lr=0.1, weight_decay=0.0)
    zero.grad, still.grad = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4)
    optimizer.step()
    assert zero[0] < 0
    assert zero[1:].eq(0).all()
    assert still.eq(1).all()
    assert unused.eq(1).all()
    assert unused not in optimizer.state


def test_groups_have_their_own_settings_and_schedules_apply() -> None:
    a, b = (nn.Parameter(x) for x in tensors(1, torch.float64)[:2])
    optimizer = LANS([{"params": [a]}, {"params": [b], "weight_decay": 0.0, "lr": 0.2, "phi": (0.0, 1.0)}], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    papers = Paper(flat(a)), Paper(flat(b))
    for step in range(6):
        a.grad, b.grad = tensors(step, torch.float64)[:2]
        optimizer.step()
        schedule.step()
        papers[0].step(flat(a.grad), **{**DEFAULTS, "lr": 0.1 / (1 + step)})
        papers[1].step(flat(b.grad), **{**DEFAULTS, "lr": 0.2 / (1 + step), "weight_decay": 0.0, "phi": (0.0, 1.0)})
        for p, paper in zip((a, b), papers, strict=True):
            assert flat(p) == pytest.approx(paper.x, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_resumes_exactly(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(x) for x in tensors(0, dtype)]
    optimizer = LANS(parameters, lr=0.1, betas=(0.5, 0.9))
    train(optimizer, parameters, range(4))
    saved, others = copy.deepcopy(optimizer.state_dict()), [nn.Parameter(p.detach().clone()) for p in parameters]
    train(optimizer, parameters, range(4, 8))
    resumed = LANS(others)
    resumed.load_state_dict(saved)
    train(resumed, others, range(4, 8))
    assert all(torch.equal(p, q) for p, q in zip(parameters, others, strict=True))


def test_closure_is_evaluated_with_gradients() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = LANS([weight], lr=0.1, weight_decay=0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 25.0
    assert weight.norm().item() < 5.0


@pytest.mark.parametrize(("given", "named"), [
    ({"lr": -1.0}, "LANS: lr is -1.0,"),
    ({"lr": math.nan}, "LANS: lr is nan,"),
    ({"lr": torch.ones(2)}, "LANS: lr is a tensor of 2 elements,"),
    ({"eps": math.inf}, "LANS: eps is inf,"),
    ({"weight_decay": -0.1}, "LANS: weight_decay is -0.1,"),
    ({"betas": (0.9, 1.0)}, "LANS: betas are (0.9, 1.0),"),
    ({"betas": 0.9}, "LANS: betas are 0.9,"),
    ({"phi": (2.0, 1.0)}, "LANS: phi is (2.0, 1.0),"),
    ({"phi": (0.0, 0.0)}, "LANS: phi is (0.0, 0.0),"),
])
def test_invalid_settings_are_one_line(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(named)} [^\n]+ \[E-OPTIM-ARGUMENT\]$"):
        LANS([nn.Parameter(torch.ones(2))], **given)


def test_invalid_tensors_are_one_line_and_leave_the_optimizer_unchanged() -> None:
    optimizer = LANS([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="LANS: .*complex64, .*float32, .*E-OPTIM-PARAMETER"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]})
    with pytest.raises(ValueError, match=r"LANS: eps is -1\.0.*E-OPTIM-ARGUMENT"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "eps": -1.0})
    assert len(optimizer.param_groups) == 1
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"LANS: .*sparse=False.*E-OPTIM-PARAMETER"):
        LANS(table.parameters()).step()


@cache
def reached(codec: str, optimizer: type[LANS], lr: float, steps: int = 120) -> tuple[float, float]:
    """Test loss on the digits, and bytes of a step: three workers and a server."""
    world, data, model = 3, digits(0), mlp(48, 0)
    plan = default_plan(describe_model(model), codec=str(wrap(parse(codec))), path="service", servers=1, ranks_per_node=1,
                        fuse_nbytes=1 << 13, cut_nbytes=1 << 14)
    workers, parameters = VirtualWorkers(describe_model(model), plan, world), list(model.parameters())
    shares = [batches(data.train, 32, rank=rank, world=world, seed=0) for rank in range(world)]
    rule, total = optimizer(parameters, lr=lr), 0
    schedule = torch.optim.lr_scheduler.LambdaLR(rule, lambda step: 1 - step / steps)
    for _ in range(steps):
        losses = [nn.functional.cross_entropy(model(x), y) for x, y in map(next, shares)]
        mean, nbytes = workers.average([torch.autograd.grad(loss, parameters) for loss in losses])
        total += nbytes
        for p, g in zip(parameters, mean, strict=True):
            p.grad = g
        rule.step()
        schedule.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(data.test[0]), data.test[1]).item(), total / steps


@pytest.mark.parametrize("codec", ["onebit()", "topk(ratio=0.1)"])
def test_clan_learns_like_lans_with_a_twentieth_of_the_bytes(codec: str) -> None:
    (dense, full), (coded, nbytes) = reached("identity()", LANS, 0.04), reached(codec, CLAN, 0.04)
    assert full > 20 * nbytes
    assert max(dense, coded) < 0.3, "of 2.3 at the start"


def test_example_learns_and_sends_one_bit_in_each_direction() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    nodes = clean_environment() | {"COMMLAYER_RANKS_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, "examples/clan.py"], cwd=ROOT, env=nodes, text=True, stdin=subprocess.DEVNULL,
                          capture_output=True, timeout=110)
    assert done.returncode == 0, done.stderr
    loss, up, down, dense = map(float, re.findall(r"[\d.]+", done.stdout))
    assert loss < 0.5
    assert max(up, down) < dense / 20
