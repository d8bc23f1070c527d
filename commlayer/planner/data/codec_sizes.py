"""Default costs of codecs that were not measured: bytes that kernels read and write, and bytes sent, per element.

Codecs are bound by memory bandwidth: an element costs the bytes that its kernels read and write (data/codecs.toml).
Convergence costs are in data/learning.json.
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec import structs

from commlayer.codec_spec import LEVEL_BITS, VALUE_BITS, CodecSpec
from commlayer.errors import InvalidInput
from commlayer.planner.data import NotNegative, Positive, load
from commlayer.records import Record


class BytesPerElement(Record, frozen=True):
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
STREAMED_NBYTES = 12
"""Bytes per element that encoding touches at least: it reads gradient and residual and writes the residual."""


class Plain(Record, frozen=True, tag_field="kind", tag="plain"):
    """The costs of a family in which all codecs cost the same; see BytesPerElement."""

    encode: NotNegative
    decode: NotNegative
    sent: Positive
    sums: bool = False

    def bytes_per_element(self, name: CodecSpec) -> BytesPerElement:
        return BytesPerElement(self.encode, self.decode, self.sent, sums=self.sums)


class Quantized(Record, frozen=True, tag_field="kind", tag="quantized"):
    """A family that sends a code for each element, and a scale for each block. `bits`: of a code; 0: by the codec's levels."""

    speed: Positive
    scale_nbytes: Positive
    bits: NotNegative = 0.0

    def bytes_per_element(self, name: CodecSpec) -> BytesPerElement:
        code = (self.bits or LEVEL_BITS[name.get("levels")]) / 8
        return BytesPerElement((STREAMED_NBYTES + code) / self.speed, 8 + code, code + self.scale_nbytes / name.get("block"))


class Selected(Record, frozen=True, tag_field="kind", tag="selected"):
    """A family that sends some entries. `positions`: a position is sent for each entry or each run, or the seed gives all."""

    speed: Positive
    positions: Literal["entry", "run", "seed"]

    def bytes_per_element(self, name: CodecSpec) -> BytesPerElement:
        ratio, seeded = float(name.get("ratio")), self.positions == "seed"
        entry_nbytes = VALUE_BITS[name.get("values")] / 8
        if not seeded:
            entry_nbytes += _position_nbytes(ratio) / (name.get("run") if self.positions == "run" else 1)
        return BytesPerElement(STREAMED_NBYTES / self.speed, 4 + 64 * ratio, ratio * entry_nbytes, sums=seeded,
                               alone=not seeded, answers=not seeded)


def bytes_per_element(name: CodecSpec) -> BytesPerElement:
    """Costs of a codec by its family's formula. InvalidInput if the family has none."""
    core, families = name.core, load("codecs", dict[str, Plain | Quantized | Selected])
    if core.family not in families:
        raise InvalidInput("E-PLAN-CODEC-COST", f"codec {core.family}() has no default cost (known: {', '.join(families)}); "
                           "measure it with `commlayer profile`")
    base = families[core.family].bytes_per_element(core)
    layers = tuple(name.bare.layers())
    more = MEMORY_NBYTES * sum(layer.family == "momentum" for layer in layers)
    return structs.replace(base, encode=base.encode + more, answers=base.answers and len(layers) == 1)


def _position_nbytes(ratio: float) -> float:
    """Bytes for the position of one selected entry: the entropy of a sparse bitmap, times the format's overhead."""
    if ratio == 1:
        return 0.0
    bits = -math.log2(ratio) - (1 - ratio) / ratio * math.log2(1 - ratio)
    return POSITION_ROOM * bits / 8
