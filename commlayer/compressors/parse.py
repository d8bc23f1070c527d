"""From the spelling of a codec in a plan to the codec: parse(str(codec)) == codec. What text says is codec_name's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from commlayer.codec_name import CodecName, named
from commlayer.compressors.block_threshold import block_threshold
from commlayer.compressors.chain import chain
from commlayer.compressors.codec import Codec
from commlayer.compressors.dense import bf16, fp16, identity
from commlayer.compressors.dgc import dgc
from commlayer.compressors.ef21 import ef21
from commlayer.compressors.feedback import error_feedback
from commlayer.compressors.int4 import int4
from commlayer.compressors.int8 import int8
from commlayer.compressors.momentum import momentum, momentum_correction
from commlayer.compressors.natural import natural
from commlayer.compressors.onebit import onebit
from commlayer.compressors.partition import partition
from commlayer.compressors.powersgd import powersgd
from commlayer.compressors.qsgd import qsgd
from commlayer.compressors.randomk import randomk
from commlayer.compressors.shared_int import shared_int
from commlayer.compressors.terngrad import terngrad
from commlayer.compressors.topk import topk
from commlayer.compressors.warmup import warmup

FACTORIES: Mapping[str, Callable[..., Codec]] = {
    "identity": identity,
    "fp16": fp16,
    "bf16": bf16,
    "int8": int8,
    "topk": topk,
    "int4": int4,
    "qsgd": qsgd,
    "natural": natural,
    "terngrad": terngrad,
    "onebit": onebit,
    "block_threshold": block_threshold,
    "randomk": randomk,
    "powersgd": powersgd,
    "shared_int": shared_int,
    "partition": partition,
    "chain": chain,
    "error_feedback": error_feedback,
    "ef21": ef21,
    "momentum": momentum,
    "momentum_correction": momentum_correction,
    "dgc": dgc,
    "warmup": warmup,
}


def parse(text: str) -> Codec:
    """The codec that `text` spells, such as "error_feedback(topk(ratio=0.01, values='int8'))"."""
    return build(named(text))


def build(name: CodecName) -> Codec:
    """ValueError for nestings that cannot work: that is asked of the codecs themselves."""
    given = {argument: build(value) if isinstance(value, CodecName) else value for argument, value in name.arguments}
    return FACTORIES[name.family](**given)
