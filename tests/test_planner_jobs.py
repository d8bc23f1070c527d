"""Built-in jobs against published sizes, and times that hang together."""

from __future__ import annotations

import pytest

from commlayer.planner.tables.jobs import WORK, builtin
from commlayer.planner.tables.machines import speed
from commlayer.planner.tables.model_layers import MODELS, layers

PUBLISHED = {
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
    tensors, numel, macs = PUBLISHED[name]
    job = builtin(name)
    assert (len(job.tensors), job.numel) == (tensors, numel)
    assert len({t.name for t in job.tensors}) == tensors
    if macs:
        assert sum(layer.macs for layer in layers(name)) == pytest.approx(macs, rel=0.01)
    if name in ESPRESSO_MIB:
        assert round(4 * numel / 2**20) == ESPRESSO_MIB[name]


@pytest.mark.parametrize(("name", "heads", "numel"), [
    ("bert-base", "cls.", 109_482_240), ("bert-large", "cls.", 335_141_888), ("vit-b16", "heads.", 85_798_656),
])
def test_models_without_their_heads(name: str, heads: str, numel: int) -> None:
    assert sum(t.numel for t in builtin(name).tensors if not t.name.startswith(heads)) == numel


@pytest.mark.parametrize("name", WORK)
def test_times_hang_together(name: str) -> None:
    job = builtin(name)
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
    vgg = builtin("vgg16").timing
    twice, slower = builtin("vgg16", 64).timing, builtin("vgg16", device="rtx3060").timing
    assert vgg is not None
    assert twice is not None
    assert slower is not None
    assert vgg.backward_s == pytest.approx(85.3e-3)
    assert twice.backward_s == pytest.approx(2 * vgg.backward_s)
    assert twice.update_s == vgg.update_s
    assert slower.backward_s == pytest.approx(vgg.backward_s / speed("rtx3060"))
    resnet = builtin("resnet50").timing
    assert resnet is not None
    assert 32 / (resnet.backward_s + resnet.forward_s) == pytest.approx(356, rel=0.01)


@pytest.mark.parametrize(("name", "batch", "message"), [
    ("resnet5", None, "model 'resnet5' is not built in, nearest are resnet50"),
    ("zzz", None, "model 'zzz' is not built in, there are resnet50, resnet101"),
    ("lstm", 0, "batch of lstm: got 0, allowed: at least 1"),
])
def test_unknown_jobs(name: str, batch: int | None, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        builtin(name, batch)
    assert message in str(caught.value)


def test_jobs_are_made_alike_each_time() -> None:
    assert builtin("gpt2") == builtin("gpt2")
