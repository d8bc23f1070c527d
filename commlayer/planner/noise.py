"""The gradient noise scale that is published or measured for tasks like a model's own, by the model's structure."""

from __future__ import annotations

import math
from typing import NamedTuple

from commlayer.records import Job, ModelInfo

CHARACTERS = 1000
"""A vocabulary of fewer words consists of characters, which carry less information than words."""
SMALL_IMAGE = 64
"""Pixels per side up to which images are like those of CIFAR-10."""
IMAGENET_NOISE, CIFAR_NOISE = 8192, 900
"""Gradient noise scale in images. ImageNet: training with batches of 8192 takes as many epochs as with small ones (Goyal et
al., 1706.02677). CIFAR-10: the critical batch size, averaged over the training (McCandlish et al., 1812.06162)."""


class NoiseLaw(NamedTuple):
    """A gradient noise scale, and what it is known from."""

    scale: float
    unit: str
    """What `scale` counts: tokens or images."""
    source: str


def law_of(model: ModelInfo | None, numel: int) -> NoiseLaw | None:
    """The law for a model that is trained from scratch, with `numel` trained parameters. None: no law is known, as for adapters
    of a model that knows its task already.

    >>> law_of(ModelInfo(8, 1024, 50257), 124_439_808), law_of(ModelInfo(32, image_side=32, classes=10), 10**6).scale
    (NoiseLaw(scale=713026, unit='tokens', source='published for language models of this size'), 900)
    """
    if model is None or model.frozen > numel:
        return None
    if model.vocabulary:
        if model.vocabulary < CHARACTERS:
            return NoiseLaw(character_noise(numel), "tokens", "measured with models of characters (docs/benchmarks.md)")
        return NoiseLaw(round(language_noise(expected_loss(numel))), "tokens", "published for language models of this size")
    if model.image_side and model.classes:
        small = model.image_side <= SMALL_IMAGE
        return NoiseLaw(CIFAR_NOISE if small else IMAGENET_NOISE, "images",
                        f"published for {'CIFAR-10' if small else 'ImageNet'}")
    return None


def language_noise(loss: float) -> float:
    """Gradient noise scale of language models at this loss, in tokens (Kaplan et al., 2001.08361).

    >>> round(language_noise(3.3), -4)
    710000.0
    """
    return 2.1e8 * math.exp(-math.log(loss) / 0.21)


def expected_loss(numel: float) -> float:
    """A language model's loss in the middle of its training: 3.3 for GPT-2's 124 M parameters, and lower for larger models by
    the published exponent (Kaplan et al., 2001.08361).

    >>> [round(expected_loss(numel), 1) for numel in (124_439_808, 355e6, 1.2e9, 8e9)]
    [3.3, 3.0, 2.8, 2.4]
    """
    return float(3.3 * (124_439_808 / numel) ** 0.076)


def character_noise(numel: float) -> float:
    """Gradient noise scale in characters, between the medians of our long trainings with 0.36 M and 2.3 M parameters, 5,900 and
    9,700 (python -m bench longrun)."""
    return float(7700 * (numel / 1e6) ** 0.27)


def noise_of(job: Job) -> float:
    """The gradient noise scale (McCandlish et al., 1812.06162) in batches of one worker: the job's own, else that of tasks like
    its model's; 0: unknown."""
    timing = job.timing
    if timing is None or timing.noise_scale:
        return timing.noise_scale / (job.batch or 1) if timing else 0.0
    law = law_of(timing.model, job.numel)
    if law is None or timing.model is None:
        return 0.0
    return law.scale / max(1, timing.model.tokens) / (job.batch or timing.model.samples or 1)
