"""Built-in jobs against published sizes, and times that hang together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from commlayer.planner.tables.jobs import PRESETS, PUBLISHED, builtin, published
from commlayer.planner.tables.machines import at_precision, speed
from commlayer.planner.tables.model_layers import MODELS, layers
from commlayer.planner.verbs.text_formats import nodes_of
from commlayer.records import Job

SIZES = {
    "resnet50": (161, 25_557_032, 4.09e9),
    "resnet101": (314, 44_549_160, 7.80e9),
    "vgg16": (32, 138_357_544, 15.47e9),
    "vit-b16": (152, 86_567_656, 17.56e9),
    "bert-base": (206, 110_106_428, None),
    "bert-large": (398, 336_226_108, None),
    "gpt2": (148, 124_439_808, None),
    "lstm": (10, 85_974_278, None),
    "ugatit": (148, 670_761_088, None),
}
ESPRESSO_MIB = {"vgg16": 528, "resnet101": 170, "ugatit": 2559, "bert-base": 420, "gpt2": 475, "lstm": 328}


@pytest.mark.parametrize("name", MODELS)
def test_shapes_add_up_to_the_published_model(name: str) -> None:
    tensors, numel, macs = SIZES[name]
    job = builtin(name)
    assert (len(job.tensors), job.numel) == (tensors, numel)
    assert len({t.name for t in job.tensors}) == tensors
    if macs:
        assert sum(layer.macs for layer in layers(name, 128)) == pytest.approx(macs, rel=0.01)
    if name in ESPRESSO_MIB:
        assert round(4 * numel / 2**20) == ESPRESSO_MIB[name]


@pytest.mark.parametrize(("name", "heads", "numel"), [
    ("bert-base", "cls.", 109_482_240), ("bert-large", "cls.", 335_141_888), ("vit-b16", "heads.", 85_798_656),
])
def test_models_without_their_heads(name: str, heads: str, numel: int) -> None:
    assert sum(t.numel for t in builtin(name).tensors if not t.name.startswith(heads)) == numel


@pytest.mark.parametrize("made", [builtin, published])
@pytest.mark.parametrize("name", PUBLISHED)
def test_times_hang_together(name: str, made: Callable[[str], Job]) -> None:
    job = made(name)
    assert job.timing is not None
    ready, needed = job.timing.ready_s, job.timing.needed_s
    assert len(ready) == len(needed) == len(job.tensors)
    assert list(ready) == sorted(ready, reverse=True), "the last layer's gradient is ready first"
    assert list(needed) == sorted(needed)
    assert ready[0] == pytest.approx(job.timing.backward_s)
    assert needed[0] == 0
    assert min(ready) >= 0
    assert max(needed) <= job.timing.forward_s * (1 + 1e-12)
    assert 0 < job.timing.update_s < job.timing.backward_s


def test_published_times_and_scaling() -> None:
    vgg = published("vgg16").timing
    twice, slower = published("vgg16", 64).timing, published("vgg16", device="rtx3060").timing
    assert vgg is not None
    assert twice is not None
    assert slower is not None
    assert vgg.backward_s == pytest.approx(85.3e-3)
    assert twice.backward_s == pytest.approx(2 * vgg.backward_s)
    assert twice.update_s == vgg.update_s
    assert slower.backward_s == pytest.approx(vgg.backward_s / speed("rtx3060"))
    resnet = published("resnet50").timing
    assert resnet is not None
    assert 32 / (resnet.backward_s + resnet.forward_s) == pytest.approx(356, rel=0.01)


@pytest.mark.parametrize(("name", "device", "samples_per_s"), [
    ("resnet50", "v100", 1156), ("resnet50", "a100", 2470),  # NVIDIA's DeepLearningExamples, mixed precision
])
def test_presets_are_near_published_rates_in_mixed_precision(name: str, device: str, samples_per_s: float) -> None:
    timing = builtin(name, 256, device).timing
    assert timing is not None
    assert 256 / (timing.forward_s + timing.backward_s) == pytest.approx(samples_per_s, rel=0.15)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_computed_in_bf16_from_operations_and_keep_activations_by_the_batch(name: str) -> None:
    one, two = builtin(name, 1).timing, builtin(name, 2).timing
    assert one is not None
    assert two is not None
    assert one.half
    assert two.backward_s == pytest.approx(2 * one.backward_s)
    assert two.activation_nbytes == pytest.approx(2 * one.activation_nbytes)
    if tokens := PRESETS[name].tokens:
        assert PRESETS[name].batch * tokens == 8 * 1024
        flops = 3 * one.forward_s * PRESETS[name].utilisation * 125e12
        # Attention and a head that shares the embeddings' weight come on top of 6 operations a parameter and token.
        assert 6 * tokens * builtin(name).numel * 0.8 < flops < 6 * tokens * builtin(name).numel * 1.4


def test_speeds_of_a_preset_are_those_of_its_precision() -> None:
    nodes = nodes_of("rtx3060@1Gb,h100@1Gb,gtx1070@1Gb")
    own = structs.replace(nodes[0], speed=0.5)
    slow, fast, plain, kept = at_precision([*nodes, own], half=True)
    assert slow.speed == pytest.approx(25.4 / 125)
    assert fast.speed / slow.speed == pytest.approx(989 / 25.4)
    assert plain.speed == pytest.approx(6.5 / 125), "without units for halves it computes in FP32"
    assert kept.speed == 0.5, "what a cluster file says stands"
    assert at_precision(nodes, half=False) == nodes


@pytest.mark.parametrize(("name", "batch", "message"), [
    ("resnet5", None, "'resnet5'.* resnet50,.*E-MODEL-NAME"),
    ("zzz", None, "'zzz'.* resnet50, .* ugatit.*E-MODEL-NAME"),
    ("lstm", 0, r"batch of lstm: got 0\b.*E-ARGUMENT"),
])
def test_unknown_jobs(name: str, batch: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        builtin(name, batch)


def test_jobs_are_made_alike_each_time() -> None:
    assert builtin("gpt2") == builtin("gpt2") != published("gpt2")
