"""Codecs: how a bucket becomes bytes and comes back. Knows tensors and payloads; nothing of ranks, networks or plans."""

from commlayer.compressors.chain import chain
from commlayer.compressors.checkpoint import restore, snapshot
from commlayer.compressors.codec import Codec, Round
from commlayer.compressors.dense import bf16, fp16, identity
from commlayer.compressors.dgc import dgc
from commlayer.compressors.ef21 import ef21
from commlayer.compressors.feedback import error_feedback, wrap
from commlayer.compressors.int8 import int8
from commlayer.compressors.keys import seed
from commlayer.compressors.momentum import momentum, momentum_correction
from commlayer.compressors.parse import parse
from commlayer.compressors.partition import partition
from commlayer.compressors.powersgd import powersgd
from commlayer.compressors.shared_int import shared_int
from commlayer.compressors.topk import topk
from commlayer.compressors.warmup import warmup

__all__ = [
    "Codec",
    "Round",
    "bf16",
    "chain",
    "dgc",
    "ef21",
    "error_feedback",
    "fp16",
    "identity",
    "int8",
    "momentum",
    "momentum_correction",
    "parse",
    "partition",
    "powersgd",
    "restore",
    "seed",
    "shared_int",
    "snapshot",
    "topk",
    "warmup",
    "wrap",
]
