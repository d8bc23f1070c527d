"""Codecs: they turn a gradient bucket into payload bytes and back, with error feedback and momentum around them."""

from commlayer.compressors.blockwise import int4, int8, onebit, qsgd
from commlayer.compressors.checkpoint import restore, snapshot
from commlayer.compressors.codec import Codec, Round, place
from commlayer.compressors.dense import bf16, fp16, identity
from commlayer.compressors.feedback import error_feedback, momentum, wrap
from commlayer.compressors.parse import build, parse
from commlayer.compressors.placement import runs_on
from commlayer.compressors.powersgd import powersgd
from commlayer.compressors.random_keys import seed
from commlayer.compressors.randomk import randomk
from commlayer.compressors.topk import block_threshold, topk
from commlayer.compressors.twoway import codec_of, two_way

__all__ = [
    "Codec",
    "Round",
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
    "snapshot",
    "topk",
    "two_way",
    "wrap",
]
