"""Selects the buckets whose codec runs on the device of the gradients."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from commlayer.compressors import runs_on
from commlayer.compressors.codec import Codec
from commlayer.gpu import launch
from commlayer.records import Plan

log = logging.getLogger("commlayer")


def device_buckets(plan: Plan, codecs: Mapping[int, Codec], device: torch.device) -> set[int]:
    """Server buckets for which the plan asks for it (`coder`) and whose codec supports it. The host codes the others.

    Empty if the model is on the host, where `coder` has no effect.
    """
    if not launch.serves(device):
        return set()
    wanted = {b.id for b in plan.buckets if b.path == "service" and b.coder == "gpu"}
    supported = {number for number in wanted if runs_on(codecs[number], device)}
    if unsupported := wanted - supported:
        names = ", ".join(sorted({str(codecs[number]) for number in unsupported}))
        log.warning("the plan codes %d buckets on the GPU that the host codes here: %s", len(unsupported), names)
    return supported
