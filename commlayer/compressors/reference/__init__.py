"""The kernels in plain torch: slow, obviously right, the twins of commlayer._core. Knows no payload headers and no codecs.

Same names, arguments and results as the native ones (native/include/commlayer.h, commlayer/_core.pyi), bit for bit but for
which NaN a NaN becomes.
"""

from commlayer.compressors.reference.blocks import blocks_decode, blocks_encode, blocks_nbytes
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
from commlayer.compressors.reference.draws import draw_strata, draw_word, take
from commlayer.compressors.reference.integers import int_add, int_decode, int_encode, int_legal, int_maxima, int_pack, outer
from commlayer.compressors.reference.nibbles import nibbles_decode, nibbles_encode
from commlayer.compressors.reference.order import count_above, kth_abs, trim
from commlayer.compressors.reference.philox import philox
from commlayer.compressors.reference.quantisers import (
    linear_decode,
    linear_encode,
    natural_decode,
    natural_encode,
    onebit_decode,
    onebit_encode,
    ternary_decode,
    ternary_encode,
)
from commlayer.compressors.reference.runs import gather_runs, scatter_runs, score_runs, select_runs
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
    "blocks_decode",
    "blocks_encode",
    "blocks_nbytes",
    "count_above",
    "crc32c",
    "draw_strata",
    "draw_word",
    "ef_bound",
    "ef_decode",
    "ef_encode",
    "f16_to_f32",
    "f32_to_bf16",
    "f32_to_f16",
    "gather_runs",
    "int8_decode",
    "int8_encode",
    "int_add",
    "int_decode",
    "int_encode",
    "int_legal",
    "int_maxima",
    "int_pack",
    "kth_abs",
    "linear_decode",
    "linear_encode",
    "natural_decode",
    "natural_encode",
    "nibbles_decode",
    "nibbles_encode",
    "onebit_decode",
    "onebit_encode",
    "outer",
    "philox",
    "sample_abs",
    "scatter_add",
    "scatter_add_int8",
    "scatter_runs",
    "score_runs",
    "select",
    "select_runs",
    "take",
    "ternary_decode",
    "ternary_encode",
    "trim",
]
