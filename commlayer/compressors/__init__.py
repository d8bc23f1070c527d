"""Codecs: how a bucket becomes bytes and comes back. Knows tensors and payloads; nothing of ranks, networks or plans."""

from commlayer.compressors.checkpoint import restore, snapshot
from commlayer.compressors.codec import Codec, Round
from commlayer.compressors.dense import bf16, fp16, identity
from commlayer.compressors.feedback import error_feedback, wrap
from commlayer.compressors.int8 import int8
from commlayer.compressors.keys import seed
from commlayer.compressors.parse import parse
from commlayer.compressors.placement import place, runs_on
from commlayer.compressors.topk import topk

__all__ = [
    "Codec",
    "Round",
    "bf16",
    "error_feedback",
    "fp16",
    "identity",
    "int8",
    "parse",
    "place",
    "restore",
    "runs_on",
    "seed",
    "snapshot",
    "topk",
    "wrap",
]
