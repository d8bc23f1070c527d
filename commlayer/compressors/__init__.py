"""Codecs: how a bucket becomes bytes and comes back. Knows tensors and payloads; nothing of ranks, networks or plans."""

from commlayer.compressors.block_threshold import block_threshold
from commlayer.compressors.checkpoint import restore, snapshot
from commlayer.compressors.codec import Codec, Round
from commlayer.compressors.dense import bf16, fp16, identity
from commlayer.compressors.feedback import error_feedback, wrap
from commlayer.compressors.int4 import int4
from commlayer.compressors.int8 import int8
from commlayer.compressors.keys import seed
from commlayer.compressors.natural import natural
from commlayer.compressors.onebit import onebit
from commlayer.compressors.parse import parse
from commlayer.compressors.qsgd import qsgd
from commlayer.compressors.randomk import randomk
from commlayer.compressors.terngrad import terngrad
from commlayer.compressors.topk import topk
from commlayer.compressors.twoway import codec_of, two_way

__all__ = [
    "Codec",
    "Round",
    "bf16",
    "block_threshold",
    "codec_of",
    "error_feedback",
    "fp16",
    "identity",
    "int4",
    "int8",
    "natural",
    "onebit",
    "parse",
    "qsgd",
    "randomk",
    "restore",
    "seed",
    "snapshot",
    "terngrad",
    "topk",
    "two_way",
    "wrap",
]
