"""U-GAT-IT, a model of Espresso's experiments: two generators and four discriminators at 256 x 256."""

from __future__ import annotations

from commlayer.planner.data.models import SGD_NBYTES, Layers, build, conv, layer_info, linear, weighted
from commlayer.records import Job

BATCH, PASSES = 2, 4
"""Each image passes each generator as itself, translated, and back."""
FLOP_S = 2 * 2 * 15.47e9 * 32 / 85.3e-3
"""Rate on a V100 of models that are nearly all 3x3 convolutions without stride, from VGG-16's published backward time."""


def ugatit() -> Job:
    parts = tuple(_ugatit())
    backward_s = 2 * 2 * sum(layer.macs for layer in parts) * PASSES * BATCH / FLOP_S
    return build("ugatit", parts, BATCH, backward_s / 2, backward_s, SGD_NBYTES)


def _ugatit() -> Layers:
    """Two generators and four discriminators of the full model at 256 x 256."""
    for name in ("genA2B", "genB2A"):
        yield from _ugatit_generator(name)
    for name, depth in (("disGA", 7), ("disGB", 7), ("disLA", 5), ("disLB", 5)):
        yield from _ugatit_discriminator(name, depth)


def _ugatit_generator(name: str) -> Layers:
    for place, (inside, outside, kernel, side) in zip((1, 5, 9), ((3, 64, 7, 256), (64, 128, 3, 128), (128, 256, 3, 64)),
                                                      strict=True):
        yield conv(f"{name}.DownBlock.{place}", inside, outside, kernel, side)
    for block in range(4):
        for layer in (1, 5):
            yield conv(f"{name}.DownBlock.{12 + block}.conv_block.{layer}", 256, 256, 3, 64)
    yield linear(f"{name}.gap_fc", 256, 1, bias=False)
    yield linear(f"{name}.gmp_fc", 256, 1, bias=False)
    yield weighted(f"{name}.conv1x1", (256, 512, 1, 1), 64**2, bias=True)
    yield linear(f"{name}.FC.0", 64 * 64 * 256, 256, bias=False)
    yield linear(f"{name}.FC.2", 256, 256, bias=False)
    yield linear(f"{name}.gamma", 256, 256, bias=False)
    yield linear(f"{name}.beta", 256, 256, bias=False)
    for block in range(1, 5):
        for half in (1, 2):
            yield conv(f"{name}.UpBlock1_{block}.conv{half}", 256, 256, 3, 64)
            yield layer_info(f"{name}.UpBlock1_{block}.norm{half}", 0.0, rho=(1, 256, 1, 1))
    for place, inside, side in ((2, 256, 128), (7, 128, 256)):
        yield conv(f"{name}.UpBlock2.{place}", inside, inside // 2, 3, side)
        norm = (1, inside // 2, 1, 1)
        yield layer_info(f"{name}.UpBlock2.{place + 1}", 0.0, rho=norm, gamma=norm, beta=norm)
    yield conv(f"{name}.UpBlock2.11", 64, 3, 7, 256)


def _ugatit_discriminator(name: str, depth: int) -> Layers:
    inside, outside, side = 3, 64, 256
    for place in range(depth - 1):
        side = side // 2 if place < depth - 2 else side - 1
        yield weighted(f"{name}.model.{1 + 3 * place}", (outside, inside, 4, 4), side**2, bias=True)
        inside, outside = outside, 2 * outside
    yield linear(f"{name}.gap_fc", inside, 1, bias=False)
    yield linear(f"{name}.gmp_fc", inside, 1, bias=False)
    yield weighted(f"{name}.conv1x1", (inside, 2 * inside, 1, 1), side**2, bias=True)
    yield conv(f"{name}.conv", inside, 1, 4, side - 1)
