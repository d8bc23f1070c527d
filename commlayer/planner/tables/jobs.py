"""Built-in jobs: well-known models with the times at which their gradients become ready.

`builtin` is a present-day job: bf16, and language models read sequences of full length. Its time is its operations over a
stated part of the GPU's peak.

`published` is a job that papers measured, on which Espresso's figures rest. The compute time of a step is published where
`backward_s` is set (traces of 8 x V100 machines, reference 1.6). Elsewhere it follows from the multiply-adds, at the rate of
ResNet-50's published 356 images/s (NVIDIA's DeepLearningExamples, FP32, V100-32GB).

Layers share the time by their multiply-adds; backward takes twice as long as forward. Times scale with device and batch. That
is accurate enough for planning; a measured profile replaces it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from msgspec import structs

from commlayer.errors import InvalidInput
from commlayer.planner.tables.machines import GPU_SHARE, GPUS, speed
from commlayer.planner.tables.model_layers import Layer, layers
from commlayer.records import Job, Timing

FLOP_S = 3 * 2 * 4.09e9 * 356
"""Rate of FP32 training on a V100: forward and twice as much backward, two operations per multiply-add."""
WINOGRAD_FLOP_S = 2 * 2 * 15.47e9 * 32 / 85.3e-3
"""The same for models that are nearly all 3x3 convolutions without stride, like VGG-16, whose backward time is published."""
SGD_NBYTES, ADAM_NBYTES = 20, 28
"""Bytes per element that an optimizer step reads and writes: gradient, parameter twice, and its states twice."""


class Work(NamedTuple):
    """Work per sample, and the papers' batch."""

    batch: int
    reads: int = 1
    """Tokens per sample if macs are per token; passes through the model per step if there are several."""
    backward_s: float | None = None
    """Published seconds of this batch on one V100."""
    flop_s: float = FLOP_S
    """Rate that applies if `backward_s` is not published."""

    @property
    def tokens(self) -> int:
        """Tokens per sample; 0: samples are images."""
        return self.reads if self.reads > IMAGE_PASSES else 0


IMAGE_PASSES = 4
PUBLISHED: Mapping[str, Work] = {
    "resnet50": Work(32),
    "resnet101": Work(32),
    "vgg16": Work(32, backward_s=85.3e-3),
    "vit-b16": Work(32),
    "bert-base": Work(8, reads=128, backward_s=66.3e-3),
    "bert-large": Work(8, reads=128),
    "gpt2": Work(20, reads=80),
    "lstm": Work(80, reads=20, backward_s=71.5e-3),
    "ugatit": Work(2, reads=4, flop_s=WINOGRAD_FLOP_S),
}
"""ugatit: each image passes each generator as itself, translated, and back."""


class Preset(NamedTuple):
    """A present-day job."""

    batch: int
    kept_nbytes: float
    """Memory kept for the backward pass, per sample, or per token if the model reads tokens."""
    tokens: int = 0
    """Tokens per sample; 0: samples are images."""
    utilisation: float = 0.4
    """Part of the peak that training reaches. For convolutions: ResNet-50 reaches 0.23 on a V100 and 0.19 on an A100 in
    NVIDIA's published images/s with mixed precision."""


CONVOLUTIONS = 0.2
KEPT = 34
"""Bytes that a transformer block keeps per token and element of its width, in bf16 with fused attention. A language model
keeps 6 more bytes per word of its vocabulary."""

PRESETS: Mapping[str, Preset] = {
    "resnet50": Preset(32, 2 * 2 * 11.1e6, utilisation=CONVOLUTIONS),
    "resnet101": Preset(32, 2 * 2 * 16.2e6, utilisation=CONVOLUTIONS),
    "vit-b16": Preset(32, KEPT * 12 * 768 * 197),
    "bert-base": Preset(16, KEPT * 12 * 768 + 6 * 30522, tokens=512),
    "bert-large": Preset(16, KEPT * 24 * 1024 + 6 * 30522, tokens=512),
    "gpt2": Preset(8, KEPT * 12 * 768 + 6 * 50257, tokens=1024),
}
"""BERT reads at most 512 tokens, so its batch has twice as many sequences. resnet: two bf16 values for each output of a
convolution."""


def builtin(name: str, batch: int | None = None, device: str = "v100") -> Job:
    """A job by name, with `batch` samples per worker, on this device. In bf16 if it is in `PRESETS`, else as published."""
    if name not in PRESETS:
        return published(name, batch, device)
    _check(name, batch)
    preset = PRESETS[name]
    parts, batch, reads = layers(name, preset.tokens), batch or preset.batch, preset.tokens or 1
    flops = 2 * sum(layer.macs for layer in parts) * reads * batch
    forward_s = flops / (preset.utilisation * GPUS["v100"].peak_tflops * 1e12) / speed(device, half=True)
    job = _job(name, parts, batch, forward_s, 2 * forward_s, ADAM_NBYTES, speed(device, half=True))
    assert job.timing is not None
    kept_nbytes = preset.kept_nbytes * reads * batch
    return structs.replace(job, timing=structs.replace(job.timing, half=True, activation_nbytes=kept_nbytes))


def published(name: str, batch: int | None = None, device: str = "v100") -> Job:
    """The job in FP32, with the batch and sequence length of the papers that measured it."""
    _check(name, batch)
    work = PUBLISHED[name]
    parts = layers(name, work.reads)
    batch = batch or work.batch
    flops = 2 * 2 * sum(layer.macs for layer in parts) * work.reads * work.batch
    backward_s = (work.backward_s or flops / work.flop_s) * batch / work.batch / speed(device)
    return _job(name, parts, batch, backward_s / 2, backward_s, SGD_NBYTES, speed(device))


def _check(name: str, batch: int | None) -> None:
    if name not in PUBLISHED:
        near = difflib.get_close_matches(name, PUBLISHED, 3, 0.4)
        listed = ", ".join(near or PUBLISHED)
        raise InvalidInput("E-MODEL-NAME", f"model {name!r} is not built in, {'nearest are' if near else 'there are'} {listed}")
    if batch is not None and batch < 1:
        raise InvalidInput("E-ARGUMENT", f"batch of {name}: got {batch}, allowed: at least 1")


def _job(
    name: str, parts: tuple[Layer, ...], batch: int, forward_s: float, backward_s: float, update_nbytes: int,
    device_speed: float,
) -> Job:
    tensors = tuple(t for layer in parts for t in layer.tensors)
    memory_bytes_s = GPUS["v100"].memory_gbytes_s * 1e9 * GPU_SHARE * device_speed
    update_s = sum(t.numel for t in tensors) * update_nbytes / memory_bytes_s
    return Job(tensors, batch, timing(parts, backward_s, forward_s, update_s), name)


def on_reference(job: Job) -> Job:
    """The job with its times scaled to the tables' reference GPU."""
    if job.timing is None or not job.timing.device:
        return job
    try:
        factor = speed(job.timing.device)
    except ValueError as error:
        raise InvalidInput("E-PLAN-INPUT", f"job {job.name!r}: timing.device: {error}") from None
    return structs.replace(job, timing=job.timing.scaled(factor))


def timing(parts: tuple[Layer, ...], backward_s: float, forward_s: float, update_s: float) -> Timing:
    """Times by layer in proportion to its multiply-adds. A layer without tensors also takes its time."""
    whole = sum(layer.macs for layer in parts)
    before = [0.0, *accumulate(layer.macs / whole for layer in parts)]
    ready: list[float] = []
    needed: list[float] = []
    for layer, share in zip(parts, before, strict=False):
        ready += [backward_s * (1 - share)] * len(layer.tensors)
        needed += [forward_s * share] * len(layer.tensors)
    return Timing(tuple(max(0.0, s) for s in ready), tuple(needed), backward_s, forward_s, update_s)
