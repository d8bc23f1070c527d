"""The kernels on a CUDA device: names, arguments and results of commlayer._core. Knows no payload headers, no codecs."""

from commlayer.compressors.device.dense import (
    add_bf16,
    add_f16,
    add_f32,
    all_finite,
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    int8_decode,
    int8_encode,
    within,
)
from commlayer.compressors.device.launch import launcher, serves
from commlayer.compressors.device.quantise import (
    draw_strata,
    linear_decode,
    linear_encode,
    onebit_decode,
    onebit_encode,
    take,
)
from commlayer.compressors.device.sparse import (
    bitmap_decode,
    bitmap_encode,
    ef_decode,
    ef_encode,
    sample_abs,
    scatter_add,
    scatter_add_int8,
    select,
)

__all__ = [
    "add_bf16",
    "add_f16",
    "add_f32",
    "all_finite",
    "bf16_to_f32",
    "bitmap_decode",
    "bitmap_encode",
    "draw_strata",
    "ef_decode",
    "ef_encode",
    "f16_to_f32",
    "f32_to_bf16",
    "f32_to_f16",
    "int8_decode",
    "int8_encode",
    "launcher",
    "linear_decode",
    "linear_encode",
    "onebit_decode",
    "onebit_encode",
    "sample_abs",
    "scatter_add",
    "scatter_add_int8",
    "select",
    "serves",
    "take",
    "within",
]
