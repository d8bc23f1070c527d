"""The reference for commlayer._core, with its names, arguments and results; slow and simple.

Kernels of the default codecs are those of compressors/kernels/fallback.py, which shares no code with the native core; the
others are in plain torch here. The bits are the same, except that a NaN may become another NaN.
"""

from oracle.codec_kernels.draws import draw_strata, draw_word, philox, take
from oracle.codec_kernels.lowrank import outer
from oracle.codec_kernels.quantisers import (
    linear_decode,
    linear_encode,
    nibbles_decode,
    nibbles_encode,
    onebit_decode,
    onebit_encode,
)
from oracle.codec_kernels.runs import gather_runs, scatter_runs, score_runs, select_runs

from commlayer.compressors.kernels.fallback import (
    add_bf16,
    add_f16,
    add_f32,
    all_finite,
    bf16_to_f32,
    bitmap_decode,
    bitmap_encode,
    blocks_decode,
    blocks_encode,
    blocks_nbytes,
    count_above,
    ef_decode,
    ef_encode,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    int8_decode,
    int8_encode,
    kth_abs,
    sample_abs,
    scale_f32,
    scatter_add,
    scatter_add_int8,
    select,
    sum_squares,
    trim,
)

__all__ = [
    "add_bf16", "add_f16", "add_f32", "all_finite", "bf16_to_f32", "bitmap_decode", "bitmap_encode", "blocks_decode",
    "blocks_encode", "blocks_nbytes", "count_above", "draw_strata", "draw_word", "ef_decode", "ef_encode", "f16_to_f32",
    "f32_to_bf16", "f32_to_f16", "gather_runs", "int8_decode", "int8_encode", "kth_abs", "linear_decode", "linear_encode",
    "nibbles_decode", "nibbles_encode", "onebit_decode", "onebit_encode", "outer", "philox", "sample_abs", "scale_f32",
    "scatter_add", "scatter_add_int8", "scatter_runs", "score_runs", "select", "select_runs", "sum_squares", "take", "trim",
]
