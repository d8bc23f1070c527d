"""Deep gradient compression (Lin et al. 2018), put together from its parts. Knows only their names."""

from __future__ import annotations

from commlayer.codec_name import checked
from commlayer.compressors.codec import Codec
from commlayer.compressors.momentum import momentum_correction
from commlayer.compressors.topk import topk
from commlayer.compressors.warmup import warmup as warmed


def dgc(ratio: float = 0.001, momentum: float = 0.9, clip: float | None = None, warmup: int = 0) -> Codec:
    """Top-k with momentum correction and masking, local clipping, and `warmup` steps in which the ratio comes down from 25 %.

    A plan spells it as what it is: momentum_correction(warmup(topk(...))).
    """
    checked("dgc", ratio=ratio, momentum=momentum, clip=clip, warmup=warmup)
    inner: Codec = topk(ratio)
    if warmup:
        inner = warmed(inner, warmup)
    return momentum_correction(inner, momentum, clip=clip)
