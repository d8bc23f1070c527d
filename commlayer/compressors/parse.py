"""The spelling of codecs in plans: parse(str(codec)) == codec. Reads literals and known names only; evaluates nothing."""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

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

_parsing = threading.Lock()
"""CPython 3.11's parser fails in one thread (SystemError) if another enters it at a collection of garbage."""


def parse(text: str) -> Codec:
    """The codec that `text` spells, such as "error_feedback(topk(ratio=0.01, values='int8'))"."""
    try:
        with _parsing:
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if not isinstance(tree, ast.Call):
        raise ValueError(f"codec {text!r}: expected name(argument=value, ...), such as topk(ratio=0.01)")
    return _build(tree, text)


def _build(call: ast.Call, text: str) -> Codec:
    name = call.func.id if isinstance(call.func, ast.Name) else ast.unparse(call.func)
    factory = FACTORIES.get(name)
    if factory is None:
        raise ValueError(f"codec {text!r}: {name!r} is unknown, allowed are {', '.join(sorted(FACTORIES))}")
    allowed = list(inspect.signature(factory).parameters)
    given: dict[str, Any] = {}
    if len(call.args) > len(allowed):
        raise ValueError(f"codec {text!r}: {name} takes {len(allowed)} arguments ({', '.join(allowed)}), got {len(call.args)}")
    pairs = [*zip(allowed, call.args, strict=False), *((str(k.arg), k.value) for k in call.keywords)]
    for argument, node in pairs:
        if argument not in allowed:
            raise ValueError(f"codec {text!r}: {name} has no argument {argument!r}, allowed are {', '.join(allowed) or 'none'}")
        if argument in given:
            raise ValueError(f"codec {text!r}: {name} got {argument!r} twice")
        given[argument] = _value(node, text)
    missing = [p for p, v in inspect.signature(factory).parameters.items() if v.default is v.empty and p not in given]
    if missing:
        raise ValueError(f"codec {text!r}: {name} needs {', '.join(missing)}")
    return factory(**given)


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Call):
        return _build(node, text)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"codec {text!r}: {ast.unparse(node)!r} is neither a literal nor a codec") from None
