"""Gradient codecs, which compress a bucket to payload bytes and decompress it, optionally with error feedback and momentum."""

from commlayer.compressors.blockwise import int4, int8, onebit, qsgd
from commlayer.compressors.codec import Codec, Reduction, place
from commlayer.compressors.dense import bf16, fp16, identity
from commlayer.compressors.feedback import error_feedback, momentum, wrap
from commlayer.compressors.plan_codecs import build, codec_of, parse, runs_on, two_way
from commlayer.compressors.powersgd import powersgd
from commlayer.compressors.randomk import randomk
from commlayer.compressors.state import restore, seed, shared_snapshot, snapshot
from commlayer.compressors.topk import block_threshold, topk

__all__ = [
    "Codec",
    "Reduction",
    "bf16",
    "block_threshold",
    "build",
    "codec_of",
    "error_feedback",
    "fp16",
    "identity",
    "int4",
    "int8",
    "momentum",
    "onebit",
    "parse",
    "place",
    "powersgd",
    "qsgd",
    "randomk",
    "restore",
    "runs_on",
    "seed",
    "shared_snapshot",
    "snapshot",
    "topk",
    "two_way",
    "wrap",
]
