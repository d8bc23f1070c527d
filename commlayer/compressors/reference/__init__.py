"""The kernels in plain torch: slow, obviously right, the twins of commlayer._core. Knows no payload headers and no codecs.

Same names, arguments and results as the native ones (native/include/commlayer.h, commlayer/_core.pyi), bit for bit but for
which NaN a NaN becomes.
"""

from commlayer.compressors.reference.dense import (
    MOST_SCALE,
    add_bf16,
    add_f16,
    add_f32,
    all_finite,
    bf16_to_f32,
    crc32c,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    int8_decode,
    int8_encode,
)
from commlayer.compressors.reference.integers import int_add, int_decode, int_encode, int_legal, int_maxima, int_pack, outer
from commlayer.compressors.reference.sparse import (
    bitmap_decode,
    bitmap_encode,
    ef_bound,
    ef_decode,
    ef_encode,
    sample_abs,
    scatter_add,
    scatter_add_int8,
    select,
)

__all__ = [
    "MOST_SCALE",
    "add_bf16",
    "add_f16",
    "add_f32",
    "all_finite",
    "bf16_to_f32",
    "bitmap_decode",
    "bitmap_encode",
    "crc32c",
    "ef_bound",
    "ef_decode",
    "ef_encode",
    "f16_to_f32",
    "f32_to_bf16",
    "f32_to_f16",
    "int8_decode",
    "int8_encode",
    "int_add",
    "int_decode",
    "int_encode",
    "int_legal",
    "int_maxima",
    "int_pack",
    "outer",
    "sample_abs",
    "scatter_add",
    "scatter_add_int8",
    "select",
]
