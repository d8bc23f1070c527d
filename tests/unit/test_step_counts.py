"""Operation counts of a user's model, made without values and priced like those of a built-in model."""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import ROOT
from support.gpt import GPT
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from commlayer.autotune.measure import step_counts
from commlayer.autotune.measure.shape_tensors import without_values
from commlayer.cli.arguments import counted_job
from commlayer.errors import InvalidInput
from commlayer.planner.data.models import builtin
from commlayer.planner.data.tables import gpus, job_limit, job_speed
from commlayer.records import Job

Made = tuple[nn.Module, Callable[[], torch.Tensor]]


def counted(made: Callable[[], Made]) -> Job:
    return step_counts.counted_job(*without_values(made), lambda: pytest.fail("the step read values"))[0]


def drawn(model: nn.Module, *shape: int, dtype: torch.dtype | None = None) -> Made:
    """The model, with a loss in this precision."""
    def loss() -> torch.Tensor:
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            out: torch.Tensor = model(torch.randn(shape, device="cuda")).float().square().mean()
            return out

    return model, loss


def gpt2() -> Made:
    """As many scripts are written: the device decides the precision, batches are read from NumPy, the loss is logged."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float32
    model: Any = torch.compile(GPT().to(device))
    data = np.zeros(20_000, np.uint16)

    def loss() -> torch.Tensor:
        starts = torch.randint(len(data) - 1025, (8,))
        x = torch.stack([torch.from_numpy(data[i : i + 1025].astype(np.int64)) for i in starts]).pin_memory().to(device)
        with torch.autocast(device, dtype=dtype):
            out = functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        assert not out.isnan()
        print(f"{out.item():.3f}")
        return out

    return model, loss


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        shapes = ((inside, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.body = nn.Sequential(*(part for i, o, kernel, step in shapes for part in (
            nn.Conv2d(i, o, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))))[:-1]
        self.side = nn.Sequential(nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)) \
            if inside != 4 * width else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.side(x), inplace=True)


def resnet50() -> Made:
    blocks, inside = [], 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for block in range(count):
            blocks.append(Bottleneck(inside, 64 << stage, 2 if block == 0 and stage else 1))
            inside = 256 << stage
    model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
                          nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    return drawn(model.cuda(), 64, 3, 224, 224, dtype=torch.bfloat16)


@pytest.mark.parametrize(("made", "batch"), [(gpt2, 8), (resnet50, 64)])
def test_model_costs_the_same_as_the_built_in_one_on_every_gpu(made: Callable[[], Made], batch: int) -> None:
    mine, own = counted(made).timed, builtin(made.__name__, batch).timed
    assert mine.half
    assert mine.activation_nbytes == pytest.approx(own.activation_nbytes, rel=0.15)
    for device in gpus():
        seconds = [(each.forward_s + each.backward_s + each.update_s) / job_speed(device, each) for each in (mine, own)]
        assert seconds[0] == pytest.approx(seconds[1], rel=0.1), device


def test_counts_are_deterministic_and_gradients_follow_the_layers() -> None:
    one, two = counted(gpt2), counted(gpt2)
    assert one == two
    timing, number = one.timed, {tensor.name: i for i, tensor in enumerate(one.tensors)}
    order = [number[f"blocks.{block}.mlp.0.weight"] for block in range(12)]
    assert sorted(order, key=lambda i: -timing.ready_s[i]) == order
    assert sorted(order, key=lambda i: timing.needed_s[i]) == order
    assert timing.ready_s[number["wpe.weight"]] == pytest.approx(timing.backward_s, rel=0.01)
    assert timing.ready_s[number["ln_f.weight"]] < 0.4 * timing.backward_s, "the head comes first"


def test_billion_parameter_model_is_counted_without_its_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    job = counted(lambda: drawn(nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(27))), 4, 16384))
    assert job.numel > 7e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "less than 1 GiB for 29 GB"


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, packs: bool = False) -> None:
        super().__init__()
        self.rnn, self.head, self.packs = kind(8, 16, 2, batch_first=True, bidirectional=True), nn.Linear(32, 4), packs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: Any = x
        if self.packs:
            rows = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
        rows, _ = self.rnn(rows)
        out: torch.Tensor = self.head(nn.utils.rnn.pad_packed_sequence(rows, batch_first=True)[0] if self.packs else rows)
        return out


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packs", [False, True])
def test_recurrent_layers_count_all_steps(kind: type[nn.RNNBase], packs: bool) -> None:
    def work(steps: int) -> Any:
        return counted(lambda: drawn(Tagger(kind, packs=packs), 3, steps, 8)).timed.work

    short, long = work(10), work(1000)
    assert long.product_s == pytest.approx(100 * short.product_s)
    assert long.launch_s > 3000 * 4e-5, "each step of each layer and direction, three times"
    # Forward and twice in backward: both inputs of both layers in both directions, and the head; no gradient of the input.
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    per_step = 2 * (3 * (2 * gates * 16 * (8 + 16 + 32 + 16) + 32 * 4) - 2 * gates * 16 * 8)
    assert short.product_s == pytest.approx(3 * 10 * per_step / 8.74e12, rel=0.01)


class Adapted(nn.Module):
    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen, self.down = frozen.requires_grad_(False), nn.Linear(frozen.in_features, 4, bias=False)
        self.up = nn.Linear(4, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return out


def test_frozen_weights_have_no_gradients() -> None:
    whole = counted(lambda: drawn(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))), 64, 2048))
    adapted = counted(lambda: drawn(nn.Sequential(*(Adapted(nn.Linear(2048, 2048)) for _ in range(4))), 64, 2048))
    assert adapted.numel == 4 * 2 * 4 * 2048
    assert adapted.timed.frozen_nbytes == 4 * 4 * (2048 * 2048 + 2048)
    assert whole.timed.work is not None
    assert adapted.timed.work is not None
    assert adapted.timed.work.product_s == pytest.approx(whole.timed.work.product_s * 7 / 11, rel=0.02)


def logged() -> Made:
    model, seen = nn.Linear(8, 8), list[float]()

    def loss() -> torch.Tensor:
        out = model(torch.randn(4, 8)).square().mean()
        seen.append(out.item())
        return out

    return model, loss


def loaded() -> Made:
    model, rows = nn.Linear(8, 8), TensorDataset(torch.randn(100, 8), torch.randint(8, (100,)))
    batches = iter(DataLoader(rows, 4, shuffle=True))

    def loss() -> torch.Tensor:
        x, y = next(batches)
        return functional.cross_entropy(model(x.cuda()), y.to("cuda:0"))

    return model, loss


def masked() -> Made:
    model = nn.Linear(8, 8)

    def loss() -> torch.Tensor:
        x, y = torch.randn(4, 6, 8), torch.randint(8, (4, 6))
        kept = torch.rand(4, 6) < 0.5
        return functional.cross_entropy(model(x)[kept], y[kept])

    return model, loss


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        out: torch.Tensor = 2 * grad * ctx.saved_tensors[0]
        return out


def squared() -> Made:
    model = nn.Linear(8, 8)
    return model, lambda: Square.apply(model(torch.randn(4, 8))).mean()  # type: ignore[no-untyped-call]


def checkpointed() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return model, lambda: checkpoint(model, torch.randn(4, 8, requires_grad=True), use_reentrant=False).square().mean()


def translated() -> Made:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return model, lambda: model(torch.randn(2, 6, 16), torch.randn(2, 5, 16), tgt_mask=mask).square().mean()


class Various(nn.Module):
    """Layers that read values in their constructor, share parameters, or have buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 12)]
        self.first, self.second = nn.Linear(16, 16), nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        nn.init.trunc_normal_(self.first.weight)
        self.third = nn.Linear(16, 16, bias=False)
        self.third.weight = self.first.weight
        self.attention, self.norm = nn.MultiheadAttention(16, 2), nn.BatchNorm1d(16)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.ones(32, 32).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.third(self.second(self.first(x))))[:, None]
        y = self.attention(y, y, y)[0][:, 0].masked_fill(self.mask[: len(x), :16] == 0, 0.0)
        return torch.einsum("ij,kj->ik", y, y).softmax(-1).logsumexp(0)


@pytest.mark.parametrize("made", [logged, loaded, masked, squared, checkpointed, translated, lambda: drawn(Various(), 8, 16)])
def test_common_scripts_are_counted_without_values(made: Callable[[], Made]) -> None:
    timing = counted(made).timed
    assert timing.work is not None
    assert timing.work.product_s > 0
    assert job_limit("rtx3060", timing) == "launch_s", "a small step is as long as its kernels take to start"


def test_embedding_is_limited_by_memory_bandwidth() -> None:
    def made() -> Made:
        model = nn.Sequential(nn.Embedding(3_000_000, 64), nn.Linear(64, 1))
        return model, lambda: model(torch.randint(3_000_000, (64, 10))).square().mean()

    timing = counted(made).timed
    assert job_limit("l40s", timing) == "stream_s"
    assert timing.update_s > timing.forward_s


SCRIPT = """
import torch
from torch import nn

WIDTH = {width}


def make():
    model = nn.Linear(WIDTH, 8)

    def loss():
        out = model(torch.randn(4, WIDTH))
        return (out * 2 if (out > 0).any() else out).square().mean()

    return model, loss
"""


def test_step_that_reads_values_is_counted_during_execution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "reads.py").write_text(SCRIPT.format(width=16))
    job = counted_job(f"{tmp_path}/reads.py", None)
    assert capsys.readouterr().err.count("\n") == 1
    assert job.timed.work is not None
    assert job.timed.device == ""
    plain = counted(lambda: drawn(nn.Linear(16, 8), 4, 16))
    assert plain.timed.work is not None
    assert job.timed.work.product_s == pytest.approx(plain.timed.work.product_s)
    monkeypatch.setattr(step_counts, "room_nbytes", lambda: 1000.0)
    with pytest.raises(InvalidInput, match="reads.py: a step: .*commlayer profile.*E-USER-CODE"):
        counted_job(f"{tmp_path}/reads.py", None)


def test_counting_leaves_torch_unchanged() -> None:
    before = torch.cuda.is_available(), torch.compile, torch.autocast.__init__, torch.backends.mkldnn.enabled
    state = random.getstate()
    counted(logged)
    assert (torch.cuda.is_available(), torch.compile, torch.autocast.__init__, torch.backends.mkldnn.enabled) == before
    assert random.getstate() == state
    compiler = sys.modules.get("torch._dynamo")
    assert compiler is None or hasattr(compiler, "__file__"), "no stand-in stays"
    assert torch.ones(2, device="cpu").sum().item() == 2.0


@pytest.mark.parametrize("example", [path.name for path in (ROOT / "examples").glob("*.py") if "def make(" in path.read_text()])
def test_examples_can_be_counted(example: str) -> None:
    timing = counted_job(f"{ROOT}/examples/{example}", None).timed
    assert 0 < max(timing.ready_s) <= timing.backward_s < 1.0
