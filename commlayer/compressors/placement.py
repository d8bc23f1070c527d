"""Decides whether a codec runs on a device: only some codecs have kernels for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from commlayer.compressors.allotted import Allotted
from commlayer.compressors.blockwise import Int4, Int8, OneBit, Qsgd
from commlayer.compressors.codec import Codec
from commlayer.compressors.dense import Bf16, Fp16, Identity
from commlayer.compressors.feedback import ErrorFeedback
from commlayer.compressors.randomk import RandomK
from commlayer.compressors.topk import TopK
from commlayer.errors import without_code

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

log = logging.getLogger("commlayer")

WITH_KERNELS = (Identity, Fp16, Bf16, Int8, Int4, Qsgd, OneBit, TopK, RandomK)


def runs_on(codec: Codec, device: torch.device) -> bool:
    """Whether a worker can run `codec` on the device: the codec has kernels, and this machine can launch them."""
    inner = codec.inner if isinstance(codec, ErrorFeedback) else codec
    inner = inner.inner if isinstance(inner, Allotted) else inner
    if not isinstance(inner, WITH_KERNELS):
        return False
    from commlayer.gpu.launch import launcher  # loads torch

    try:
        launcher(device)
    except ValueError as error:
        if str(error) not in _said:
            _said.add(str(error))
            log.warning("%s; coding on the host", without_code(error))
        return False
    return True


_said: set[str] = set()
