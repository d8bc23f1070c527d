"""Default costs of codecs that were not measured: bytes that kernels read and write, and bytes sent, per element.

Codecs are bound by memory bandwidth: an element costs the bytes that its kernels read and write. The project's bench measured
each codec's speed as a fraction of the memory's streaming speed. Convergence costs are in `learning.json`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from msgspec import structs

from commlayer.codec_spec import LEVEL_BITS, VALUE_BITS, CodecSpec
from commlayer.errors import InvalidInput
from commlayer.records import Record


class Touch(Record, frozen=True):
    """Bytes per element: read and written to encode, read and written to add one payload to a sum, and sent. The flags are the
    codec's properties of the same names."""

    encode: float
    decode: float
    sent: float
    sums: bool = False
    alone: bool = True
    answers: bool = True


MEMORY_NBYTES = 12
"""Bytes per element that momentum reads and writes to update its velocity."""
POSITION_ROOM = 1.15
"""Size of encoded positions of selected entries, relative to their entropy."""
SELECT, SELECT_RUNS = 12 / 0.68, 12 / 0.34
"""Bytes per element that encoding touches, for selection by entry and by run. Gradient and residual are read and the residual
is written. Scoring runs takes as long as topk."""


def touch(name: CodecSpec) -> Touch:
    """Costs of a codec by its family's formula. InvalidInput if the family has none."""
    core = name.core
    if core.family not in _FAMILIES:
        raise InvalidInput("E-PLAN-CODEC-COST", f"codec {core.family}() has no default cost (known: {', '.join(_FAMILIES)}); "
                           "measure it with `commlayer profile`")
    base = _FAMILIES[core.family](core)
    layers = tuple(name.bare.layers())
    more = MEMORY_NBYTES * sum(layer.family == "momentum" for layer in layers)
    return structs.replace(base, encode=base.encode + more, answers=base.answers and len(layers) == 1)


def _quantiser(speed: float, bits: float, scale_nbytes: int) -> Callable[[CodecSpec], Touch]:
    return lambda name: _quantised(name, speed, bits, scale_nbytes)


def _quantised(name: CodecSpec, speed: float, bits: float, scale_nbytes: int) -> Touch:
    """`speed`: encoding speed as a fraction of the memory's streaming speed."""
    code = bits / 8
    return Touch((12 + code) / speed, 8 + code, code + scale_nbytes / name.get("block"))


def _qsgd(name: CodecSpec) -> Touch:
    return _quantised(name, 0.35, LEVEL_BITS[name.get("levels")], 2)


def _topk(name: CodecSpec) -> Touch:
    ratio = float(name.get("ratio"))
    return _picked(SELECT, ratio, VALUE_BITS[name.get("values")] / 8 + _position_nbytes(ratio))


def _block_threshold(name: CodecSpec) -> Touch:
    ratio = float(name.get("ratio"))
    return _picked(SELECT_RUNS, ratio, VALUE_BITS[name.get("values")] / 8 + _position_nbytes(ratio) / name.get("run"))


def _picked(encode: float, ratio: float, entry_nbytes: float) -> Touch:
    return Touch(encode, 4 + 64 * ratio, ratio * entry_nbytes)


def _randomk(name: CodecSpec) -> Touch:
    ratio = float(name.get("ratio"))
    return Touch(12, 4 + 64 * ratio, ratio * VALUE_BITS[name.get("values")] / 8,
                 sums=True, alone=False, answers=False)


def _position_nbytes(ratio: float) -> float:
    """Bytes for the position of one selected entry: the entropy of a sparse bitmap, times the format's overhead."""
    if ratio == 1:
        return 0.0
    bits = -math.log2(ratio) - (1 - ratio) / ratio * math.log2(1 - ratio)
    return POSITION_ROOM * bits / 8


_FAMILIES: Mapping[str, Callable[[CodecSpec], Touch]] = {
    "identity": lambda _: Touch(0, 12, 4, sums=True),
    "fp16": lambda _: Touch(6, 10, 2),
    "bf16": lambda _: Touch(6, 10, 2),
    "int8": _quantiser(0.72, 8, 4),
    "int4": _quantiser(0.72, 4, 2),
    "onebit": _quantiser(0.746, 1, 2),
    "qsgd": _qsgd,
    "topk": _topk,
    "randomk": _randomk,
    "block_threshold": _block_threshold,
}
