"""Builds a codec from its spelling in a plan: parse(str(codec)) == codec. codec_name.py parses the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from commlayer.codec_name import CodecName, named
from commlayer.compressors.blockwise import int4, int8, onebit, qsgd
from commlayer.compressors.codec import Codec
from commlayer.compressors.dense import bf16, fp16, identity
from commlayer.compressors.feedback import error_feedback, momentum
from commlayer.compressors.powersgd import powersgd
from commlayer.compressors.randomk import randomk
from commlayer.compressors.topk import block_threshold, topk

FACTORIES: Mapping[str, Callable[..., Codec]] = {
    "identity": identity,
    "fp16": fp16,
    "bf16": bf16,
    "int8": int8,
    "topk": topk,
    "int4": int4,
    "qsgd": qsgd,
    "onebit": onebit,
    "block_threshold": block_threshold,
    "randomk": randomk,
    "powersgd": powersgd,
    "error_feedback": error_feedback,
    "momentum": momentum,
}


def parse(text: str) -> Codec:
    """The codec that `text` spells, such as "error_feedback(topk(ratio=0.01, values='int8'))"."""
    return build(named(text))


def build(name: CodecName) -> Codec:
    """InvalidInput for nestings that cannot work: the factories of the codecs check them."""
    arguments = {argument: build(value) if isinstance(value, CodecName) else value for argument, value in name.arguments}
    return FACTORIES[name.family](**arguments)
