"""The gradient noise scale that is published or measured for tasks like a model's own, by the model's structure."""

from __future__ import annotations

import math
from typing import NamedTuple

from commlayer.planner.data import Positive, load
from commlayer.records import Job, ModelInfo, Record


class ImageScale(Record, frozen=True):
    scale: Positive
    source: str


class Images(Record, frozen=True):
    small_side: int
    small: ImageScale
    large: ImageScale


class Language(Record, frozen=True):
    """A law of data/noise.toml."""

    scale: Positive
    exponent: Positive
    typical_loss: Positive
    typical_numel: int
    loss_exponent: Positive
    source: str

    def expected_loss(self, numel: float) -> float:
        """A model's loss in the middle of its training."""
        return float(self.typical_loss * (self.typical_numel / numel) ** self.loss_exponent)

    def noise_scale(self, loss: float) -> float:
        """In tokens."""
        return self.scale * math.exp(-math.log(loss) / self.exponent)


class Characters(Record, frozen=True):
    most_vocabulary: int
    scale: Positive
    exponent: Positive
    source: str

    def noise_scale(self, numel: float) -> float:
        """In characters."""
        return float(self.scale * (numel / 1e6) ** self.exponent)


class Table(Record, frozen=True):
    images: Images
    language: Language
    characters: Characters


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
    (NoiseLaw(scale=713026, unit='tokens', source='published for language models of this size'), 900.0)
    """
    if model is None or model.frozen > numel:
        return None
    table = load("noise", Table)
    if model.vocabulary > table.characters.most_vocabulary:
        law = table.language
        return NoiseLaw(round(law.noise_scale(law.expected_loss(numel))), "tokens", law.source)
    if model.vocabulary:
        return NoiseLaw(table.characters.noise_scale(numel), "tokens", table.characters.source)
    if model.image_side and model.classes:
        images = table.images
        kind = images.small if model.image_side <= images.small_side else images.large
        return NoiseLaw(kind.scale, "images", kind.source)
    return None


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
