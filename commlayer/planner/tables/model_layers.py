"""Layers of well-known models: their tensors' shapes in registration order, and their work.

Work is counted in multiply-adds of one forward pass per sample (per token, if the model reads tokens). Names are those of
torchvision, of the usual transformer library and of UGATIT's published code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from commlayer.records import TensorInfo


class Layer(NamedTuple):
    """Tensors whose gradients become final together, and the work of computing them."""

    tensors: tuple[TensorInfo, ...]
    macs: float = 0.0


Layers = Iterator[Layer]


def _layer(name: str, macs: float, **shapes: tuple[int, ...]) -> Layer:
    return Layer(tuple(TensorInfo(f"{name}.{part}", shape) for part, shape in shapes.items()), macs)


def _conv(name: str, inside: int, outside: int, kernel: int, side: int, *, bias: bool = False) -> Layer:
    """`side`: of the square output."""
    shape = (outside, inside, kernel, kernel)
    macs = float(outside * inside * kernel**2 * side**2)
    return _layer(name, macs, weight=shape, bias=(outside,)) if bias else _layer(name, macs, weight=shape)


def _linear(name: str, inside: int, outside: int, *, bias: bool = True, times: int = 1) -> Layer:
    macs = float(inside * outside * times)
    shape = (outside, inside)
    return _layer(name, macs, weight=shape, bias=(outside,)) if bias else _layer(name, macs, weight=shape)


def _norm(name: str, width: int) -> Layer:
    return _layer(name, 0.0, weight=(width,), bias=(width,))


def _resnet(blocks: tuple[int, ...]) -> Layers:
    yield _conv("conv1", 3, 64, 7, 112)
    yield _norm("bn1", 64)
    inside, side = 64, 56
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            halved = block == 0 and stage > 0
            yield _conv(f"{name}.conv1", inside, width, 1, side)
            yield _norm(f"{name}.bn1", width)
            side //= 2 if halved else 1
            yield _conv(f"{name}.conv2", width, width, 3, side)
            yield _norm(f"{name}.bn2", width)
            yield _conv(f"{name}.conv3", width, 4 * width, 1, side)
            yield _norm(f"{name}.bn3", 4 * width)
            if block == 0:
                yield _conv(f"{name}.downsample.0", inside, 4 * width, 1, side)
                yield _norm(f"{name}.downsample.1", 4 * width)
            inside = 4 * width
    yield _linear("fc", inside, 1000)


def _vgg16() -> Layers:
    place, inside = 0, 3
    for side, widths in ((224, (64,) * 2), (112, (128,) * 2), (56, (256,) * 3), (28, (512,) * 3), (14, (512,) * 3)):
        for width in widths:
            yield _conv(f"features.{place}", inside, width, 3, side, bias=True)
            place, inside = place + 2, width
        place += 1
    for place, (wide_in, wide_out) in zip((0, 3, 6), ((512 * 49, 4096), (4096, 4096), (4096, 1000)), strict=True):
        yield _linear(f"classifier.{place}", wide_in, wide_out)


def _vit_b16() -> Layers:
    width, tokens = 768, 197
    yield Layer((TensorInfo("class_token", (1, 1, width)),))
    yield _conv("conv_proj", 3, width, 16, 14, bias=True)
    yield Layer((TensorInfo("encoder.pos_embedding", (1, tokens, width)),))
    for block in range(12):
        name = f"encoder.layers.encoder_layer_{block}"
        yield _norm(f"{name}.ln_1", width)
        work = float(tokens * width * 3 * width + 2 * tokens**2 * width)
        yield _layer(f"{name}.self_attention", work, in_proj_weight=(3 * width, width), in_proj_bias=(3 * width,))
        yield _linear(f"{name}.self_attention.out_proj", width, width, times=tokens)
        yield _norm(f"{name}.ln_2", width)
        yield _linear(f"{name}.mlp.0", width, 4 * width, times=tokens)
        yield _linear(f"{name}.mlp.3", 4 * width, width, times=tokens)
    yield _norm("encoder.ln", width)
    yield _linear("heads.head", width, 1000)


def _bert(width: int, blocks: int, seen: int) -> Layers:
    """BERT with its pre-training heads; the decoder shares the word embeddings' weight. `seen`: tokens per sequence."""
    words = 30522
    for part, rows in (("word", words), ("position", 512), ("token_type", 2)):
        yield _layer(f"bert.embeddings.{part}_embeddings", 0.0, weight=(rows, width))
    yield _norm("bert.embeddings.LayerNorm", width)
    for block in range(blocks):
        name = f"bert.encoder.layer.{block}"
        for part in ("query", "key", "value"):
            yield _linear(f"{name}.attention.self.{part}", width, width)
        yield _attended(_linear(f"{name}.attention.output.dense", width, width), seen, width)
        yield _norm(f"{name}.attention.output.LayerNorm", width)
        yield _linear(f"{name}.intermediate.dense", width, 4 * width)
        yield _linear(f"{name}.output.dense", 4 * width, width)
        yield _norm(f"{name}.output.LayerNorm", width)
    yield _linear("bert.pooler.dense", width, width, times=0)
    yield Layer((TensorInfo("cls.predictions.bias", (words,)),), float(width * words))
    yield _linear("cls.predictions.transform.dense", width, width)
    yield _norm("cls.predictions.transform.LayerNorm", width)
    yield _linear("cls.seq_relationship", width, 2, times=0)


def _gpt2(seen: int) -> Layers:
    width, words = 768, 50257
    yield _layer("transformer.wte", 0.0, weight=(words, width))
    yield _layer("transformer.wpe", 0.0, weight=(1024, width))
    for block in range(12):
        name = f"transformer.h.{block}"
        yield _norm(f"{name}.ln_1", width)
        for part, inside, outside in (("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1), ("ln_2", 0, 0),
                                      ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)):
            if not inside:
                yield _norm(f"{name}.{part}", width)
                continue
            layer = _layer(f"{name}.{part}", float(inside * outside * width**2), weight=(inside * width, outside * width),
                           bias=(outside * width,))
            yield _attended(layer, seen, width) if part == "attn.c_proj" else layer
    yield _norm("transformer.ln_f", width)
    yield Layer((), float(width * words))


def _attended(layer: Layer, seen: int, width: int) -> Layer:
    """The layer with the preceding work of attention scores and mixing."""
    return layer._replace(macs=layer.macs + 2.0 * seen * width)


def _lstm() -> Layers:
    """A word model of two layers; the decoder shares the encoder's weight."""
    width, words = 1500, 33278
    yield _layer("encoder", 0.0, weight=(words, width))
    for i in range(2):
        yield Layer(tuple(
            TensorInfo(f"rnn.{kind}_l{i}", (4 * width, width) if kind.startswith("weight") else (4 * width,))
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")), 8.0 * width**2)
    yield Layer((TensorInfo("decoder.bias", (words,)),), float(width * words))


def _ugatit() -> Layers:
    """Two generators and four discriminators of the full model at 256 x 256."""
    for name in ("genA2B", "genB2A"):
        yield from _ugatit_generator(name)
    for name, depth in (("disGA", 7), ("disGB", 7), ("disLA", 5), ("disLB", 5)):
        yield from _ugatit_discriminator(name, depth)


def _ugatit_generator(name: str) -> Layers:
    for place, (inside, outside, kernel, side) in zip((1, 5, 9), ((3, 64, 7, 256), (64, 128, 3, 128), (128, 256, 3, 64)),
                                                      strict=True):
        yield _conv(f"{name}.DownBlock.{place}", inside, outside, kernel, side)
    for block in range(4):
        for conv in (1, 5):
            yield _conv(f"{name}.DownBlock.{12 + block}.conv_block.{conv}", 256, 256, 3, 64)
    yield _linear(f"{name}.gap_fc", 256, 1, bias=False)
    yield _linear(f"{name}.gmp_fc", 256, 1, bias=False)
    yield _conv(f"{name}.conv1x1", 512, 256, 1, 64, bias=True)
    yield _linear(f"{name}.FC.0", 64 * 64 * 256, 256, bias=False)
    yield _linear(f"{name}.FC.2", 256, 256, bias=False)
    yield _linear(f"{name}.gamma", 256, 256, bias=False)
    yield _linear(f"{name}.beta", 256, 256, bias=False)
    for block in range(1, 5):
        for half in (1, 2):
            yield _conv(f"{name}.UpBlock1_{block}.conv{half}", 256, 256, 3, 64)
            yield _layer(f"{name}.UpBlock1_{block}.norm{half}", 0.0, rho=(1, 256, 1, 1))
    for place, inside, side in ((2, 256, 128), (7, 128, 256)):
        yield _conv(f"{name}.UpBlock2.{place}", inside, inside // 2, 3, side)
        norm = (1, inside // 2, 1, 1)
        yield _layer(f"{name}.UpBlock2.{place + 1}", 0.0, rho=norm, gamma=norm, beta=norm)
    yield _conv(f"{name}.UpBlock2.11", 64, 3, 7, 256)


def _ugatit_discriminator(name: str, depth: int) -> Layers:
    inside, outside, side = 3, 64, 256
    for place in range(depth - 1):
        side = side // 2 if place < depth - 2 else side - 1
        yield _conv(f"{name}.model.{1 + 3 * place}", inside, outside, 4, side, bias=True)
        inside, outside = outside, 2 * outside
    yield _linear(f"{name}.gap_fc", inside, 1, bias=False)
    yield _linear(f"{name}.gmp_fc", inside, 1, bias=False)
    yield _conv(f"{name}.conv1x1", 2 * inside, inside, 1, side, bias=True)
    yield _conv(f"{name}.conv", inside, 1, 4, side - 1)


MODELS: Mapping[str, Callable[[int], Layers]] = {
    "resnet50": lambda _: _resnet((3, 4, 6, 3)),
    "resnet101": lambda _: _resnet((3, 4, 23, 3)),
    "vgg16": lambda _: _vgg16(),
    "vit-b16": lambda _: _vit_b16(),
    "bert-base": lambda seen: _bert(768, 12, seen),
    "bert-large": lambda seen: _bert(1024, 24, seen),
    "gpt2": _gpt2,
    "lstm": lambda _: _lstm(),
    "ugatit": lambda _: _ugatit(),
}


def layers(name: str, seen: int) -> tuple[Layer, ...]:
    """`seen`: tokens per sequence, if the model attends to all of them."""
    return tuple(MODELS[name](seen))
