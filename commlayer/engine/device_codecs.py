"""Which buckets of a plan have their codec run on the device of the gradients. Knows no buckets."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from commlayer.compressors import device as devices
from commlayer.compressors import runs_on
from commlayer.compressors.codec import Codec
from commlayer.records import Plan

log = logging.getLogger("commlayer")


def device_buckets(plan: Plan, codecs: Mapping[int, Codec], device: torch.device) -> set[int]:
    """Those on the way to a server that the plan says so of (`coder`), if the codec can; the host codes the others.

    None where the model is on the host: there the plan's word means nothing.
    """
    if not devices.serves(device):
        return set()
    wanted = {b.id for b in plan.buckets if b.path == "service" and b.coder == "gpu"}
    found = {number for number in wanted if runs_on(codecs[number], device)}
    if rest := wanted - found:
        names = ", ".join(sorted({str(codecs[number]) for number in rest}))
        log.warning("the plan codes %d buckets on the GPU that the host codes here: %s", len(rest), names)
    return found
