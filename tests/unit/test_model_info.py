"""What is recognized in a user's model, and that it is priced like a built-in one."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs
from support.gpt import GPT
from torch import nn

from commlayer.autotune.measure.model_info import ModelWatch
from commlayer.autotune.measure.step_times import timed_job
from commlayer.cli.plan import report
from commlayer.engine.model.model_tensors import describe_model
from commlayer.planner.baselines import Gains, gains, noise_range, one_machine, planned_rows
from commlayer.planner.data.models import builtin, timing
from commlayer.planner.data.noise import find_noise, noise_law
from commlayer.planner.inputs import checked_inputs, cluster_of_homes
from commlayer.planner.memory import estimate_memory, with_micro_batches
from commlayer.planner.model import Policy
from commlayer.planner.search.plan_search import plan
from commlayer.records import Job, ModelInfo, TensorInfo, Timing


class Classifier(nn.Module):
    """Convolutions and a linear head, with the side and the classes of its images."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 7, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x).flatten(1))
        return out


def shown(model: nn.Module, *shape: int, integer: bool = False) -> ModelInfo:
    watch = ModelWatch(model)
    device = next(model.parameters()).device
    model(torch.zeros(shape, dtype=torch.long if integer else torch.float32, device=device)).sum().backward()
    return watch.info()


def gain(job: Job) -> Gains:
    machines, policy = cluster_of_homes("3xrtx3060@100/20Mb", "1Gb"), Policy(exact=False, optimizer="adam", fragments=False)
    machines = structs.replace(machines, nodes=tuple(structs.replace(node, speed=0.2) for node in machines.nodes))
    question = checked_inputs(job, machines, None, policy)
    best = plan(*question)
    return gains(*([*planned_rows(best, each), *one_machine(each)] for each in noise_range(question)))


def test_gpt2_from_a_file_is_priced_like_the_built_in_one() -> None:
    with torch.device("meta"):
        model = GPT()
    info, own = shown(model, 8, 1024, integer=True), builtin("gpt2")
    assert info == ModelInfo(8, 1024, 50257) == own.timed.model
    tensors = describe_model(model).tensors
    share = [sum(t.numel for t in tensors[:n]) / sum(t.numel for t in tensors) for n in range(len(tensors))]
    forward_s, backward_s = own.timed.forward_s, own.timed.backward_s
    job = Job(tensors, 8, Timing(tuple(backward_s * (1 - part) for part in share), tuple(forward_s * part for part in share),
                                 backward_s, forward_s, own.timed.update_s, half=True, model=info))
    assert find_noise(job) == pytest.approx(find_noise(own), rel=1e-3)
    assert 80 < find_noise(own) < 95
    mine, theirs = gain(job), gain(own)
    assert mine.noise_scale_known
    assert mine.plan == pytest.approx(theirs.plan, rel=0.1)
    assert find_noise(structs.replace(job,
                                      batch=16)) == pytest.approx(find_noise(own) / 2), "larger batches of the same samples"
    assert find_noise(structs.replace(job, batch=None)) == pytest.approx(find_noise(own)), "of the batch that was seen"


@pytest.mark.parametrize(("side", "classes", "scale"), [(224, 1000, 8192), (32, 10, 900)])
def test_image_classifier_is_recognized_by_its_input(side: int, classes: int, scale: float) -> None:
    info = shown(Classifier(classes), 4, 3, side, side)
    assert info == ModelInfo(4, image_side=side, classes=classes)
    law = noise_law(info, 10**6)
    assert law is not None
    assert law.scale == scale
    if side == 224:
        assert find_noise(builtin("resnet50")) == scale / 32, "as the built-in ones"


def test_small_character_model_gets_the_noise_scale_measured_for_such_models() -> None:
    model = GPT(96, 64, 96, 2)
    info, numel = shown(model, 8, 64, integer=True), sum(p.numel() for p in model.parameters())
    law = noise_law(info, numel)
    assert law is not None
    assert law.scale / 512 < 20, "tens of batches of 8 x 64 characters, not hundreds"


def test_unknown_models_get_a_range() -> None:
    for model, shape, integer in (
        (GPT(50, 16, 24, 1, outputs=2), (2, 16), True),  # a classifier of texts
        (nn.Linear(8, 2), (2, 8), False),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3)), (2, 3, 32, 32), False),  # images to images
    ):
        info = shown(model, *shape, integer=integer)
        assert info.samples == 2
        assert noise_law(info, 10**8) is None
    base = builtin("gpt2")
    verdict = gain(structs.replace(base, timing=structs.replace(base.timed, model=info)))
    assert not verdict.noise_scale_known
    assert verdict.plan < verdict.high < 3


def test_activation_checkpointing_does_not_hide_the_head() -> None:
    assert shown(GPT(50, 16, 24, 2, saves=True), 2, 16, integer=True).vocabulary == 50


def test_adapters_are_recognized_by_frozen_weights() -> None:
    model = GPT(50, 16, 24, 1)
    for p in model.parameters():
        p.requires_grad = False
    model.blocks[0].c_proj = nn.Sequential(model.blocks[0].c_proj, nn.Linear(24, 24, bias=False))
    job = timed_job(model, lambda: model(torch.zeros(2, 16, dtype=torch.long)).sum(), batch=2)
    assert job.timed.model is not None
    frozen = sum(p.numel() for p in model.parameters()) - 24 * 24
    assert (job.timed.model.frozen, job.timed.frozen_nbytes) == (frozen, 4.0 * frozen)
    assert job.timed.model.vocabulary == 50
    assert find_noise(job) == 0, "published values are for training from scratch"
    assert estimate_memory(job, "rtx3060", "adam").kept["frozen weights"] == pytest.approx(4e-9 * frozen)


def test_micro_batches_fit_the_smallest_gpu_and_keep_the_step_time() -> None:
    whole, devices = builtin("gpt2", 512), ["rtx4090", "rtx3060"]
    job = with_micro_batches(whole, devices, "adam")
    size = -(-512 // job.timed.micro_batches)
    assert estimate_memory(job, "rtx3060", "adam").fits
    one_more = structs.replace(whole, timing=structs.replace(
        whole.timed, activation_nbytes=whole.timed.activation_nbytes * (size + 2) / 512))
    assert not estimate_memory(one_more, "rtx3060", "adam").fits, "the micro-batches are as large as fits"
    total = job.timed.forward_s + job.timed.backward_s
    assert total == pytest.approx(whole.timed.forward_s + whole.timed.backward_s)
    assert max(job.timed.ready_s) == pytest.approx(job.timed.backward_s)
    assert find_noise(job) == find_noise(whole), "the optimizer sees the whole batch"
    assert with_micro_batches(whole, ["h200"], "adam").timed.micro_batches < job.timed.micro_batches
    assert with_micro_batches(builtin("gpt2"), devices, "adam") == builtin("gpt2"), "8 samples fit as they are"
    assert not estimate_memory(with_micro_batches(builtin("llama3.1-8b"), devices, "adam"), "rtx4090", "adam").fits
    unknown = structs.replace(whole, tensors=(TensorInfo("t", (8,)),), timing=timing((), 1.0, 1.0, 0.0))
    assert with_micro_batches(unknown, devices, "adam") == unknown


@pytest.mark.parametrize(("homes", "remedy"), [
    ("2x4*rtx4090@1Gb", "shard it over the 4 GPUs"), ("2xrtx4090@1Gb", "LoRA"), ("2x2*rtx4090@1Gb", "LoRA")])
def test_model_too_large_for_one_gpu_is_to_be_sharded_if_it_fits_then(homes: str, remedy: str) -> None:
    job = with_micro_batches(builtin("llama3.2-3b"), ["rtx4090"], "adam")
    result = report.memory_problem(job, cluster_of_homes(homes, "1Gb"), "adam")
    assert result is not None
    assert remedy in result.remedy
    whole, shards = estimate_memory(job, "rtx4090", "adam"), estimate_memory(job, "rtx4090", "adam", 4)
    assert (whole.fits, shards.fits) == (False, True)
    assert shards.required - shards.activations == pytest.approx((whole.required - whole.activations) / 4)
