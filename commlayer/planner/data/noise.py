"""The gradient noise scale that is published or measured for tasks like a model's own, by the model's structure."""

from __future__ import annotations

from commlayer.planner.data import Positive, load
from commlayer.records import Job, ModelInfo, Record


class NoiseLaw(Record, frozen=True):
    """A gradient noise scale, and what it is known from."""

    scale: Positive
    unit: str
    """The unit of `scale`: tokens or images."""
    source: str


class SizeLaw(Record, frozen=True):
    """A gradient noise scale that grows with the model: `scale` tokens for `numel` parameters, and for other models in
    proportion to (number of parameters)^`exponent`."""

    scale: Positive
    numel: Positive
    exponent: Positive
    source: str

    def __call__(self, numel: float) -> float:
        return float(self.scale * (numel / self.numel) ** self.exponent)


class NoiseTable(Record, frozen=True):
    small_side: int
    small_images: NoiseLaw
    large_images: NoiseLaw
    most_characters: int
    characters: SizeLaw
    words: SizeLaw


def noise_law(model: ModelInfo | None, numel: int) -> NoiseLaw | None:
    """The law for a model that is trained from scratch, with `numel` trained parameters. Returns None if no law is known, as
    for adapters of a model that is trained for its task already.

    >>> noise_law(ModelInfo(8, 1024, 50257), 124_439_808), noise_law(ModelInfo(32, image_side=32, classes=10), 10**6).scale
    (NoiseLaw(scale=713026, unit='tokens', source='published for language models of this size'), 900.0)
    """
    if model is None or model.frozen > numel:
        return None
    table = load("noise", NoiseTable)
    if model.vocabulary > table.most_characters:
        return NoiseLaw(round(table.words(numel)), "tokens", table.words.source)
    if model.vocabulary:
        return NoiseLaw(table.characters(numel), "tokens", table.characters.source)
    if model.image_side and model.classes:
        return table.small_images if model.image_side <= table.small_side else table.large_images
    return None


def find_noise(job: Job) -> float:
    """The gradient noise scale (McCandlish et al., 1812.06162) in batches of one worker: the value of the job if known,
    otherwise that of tasks like its model's; 0: unknown."""
    timing = job.timing
    if timing is None or timing.noise_scale:
        return timing.noise_scale / (job.batch or 1) if timing else 0.0
    law = noise_law(timing.model, job.numel)
    if law is None or timing.model is None:
        return 0.0
    return law.scale / max(1, timing.model.tokens) / (job.batch or timing.model.samples or 1)
