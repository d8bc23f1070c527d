"""Built-in jobs by name: the tensors of published models, and the times of a step at a usual batch size.

`PRESETS` are present-day jobs in bf16, with times computed from the operations and the GPU's data sheet. `PUBLISHED` are jobs
of published papers, in FP32 on one V100.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from msgspec import structs

from commlayer.errors import InvalidInput
from commlayer.planner.tables import GPUS, job_speed, speed, stream_bytes_s
from commlayer.records import Job, ModelInfo, TensorInfo, Timing, Work


class Layer(NamedTuple):
    """Tensors whose gradients become final together, and the multiply-adds of their forward pass."""

    tensors: tuple[TensorInfo, ...]
    macs: float = 0.0


Layers = Iterator[Layer]


def layer_of(name: str, macs: float, **shapes: tuple[int, ...]) -> Layer:
    return Layer(tuple(TensorInfo(f"{name}.{part}", shape) for part, shape in shapes.items()), macs)


def conv(name: str, inside: int, outside: int, kernel: int, side: int, *, bias: bool = False) -> Layer:
    """A convolution with a square output of `side` x `side`."""
    shape = (outside, inside, kernel, kernel)
    macs = float(outside * inside * kernel**2 * side**2)
    return layer_of(name, macs, weight=shape, bias=(outside,)) if bias else layer_of(name, macs, weight=shape)


def linear(name: str, inside: int, outside: int, *, bias: bool = True, times: int = 1) -> Layer:
    macs = float(inside * outside * times)
    shape = (outside, inside)
    return layer_of(name, macs, weight=shape, bias=(outside,)) if bias else layer_of(name, macs, weight=shape)


def norm(name: str, width: int) -> Layer:
    return layer_of(name, 0.0, weight=(width,), bias=(width,))


def _resnet(blocks: tuple[int, ...]) -> Layers:
    yield conv("conv1", 3, 64, 7, 112)
    yield norm("bn1", 64)
    inside, side = 64, 56
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            halved = block == 0 and stage > 0
            yield conv(f"{name}.conv1", inside, width, 1, side)
            yield norm(f"{name}.bn1", width)
            side //= 2 if halved else 1
            yield conv(f"{name}.conv2", width, width, 3, side)
            yield norm(f"{name}.bn2", width)
            yield conv(f"{name}.conv3", width, 4 * width, 1, side)
            yield norm(f"{name}.bn3", 4 * width)
            if block == 0:
                yield conv(f"{name}.downsample.0", inside, 4 * width, 1, side)
                yield norm(f"{name}.downsample.1", 4 * width)
            inside = 4 * width
    yield linear("fc", inside, 1000)


def _vgg16() -> Layers:
    place, inside = 0, 3
    for side, widths in ((224, (64,) * 2), (112, (128,) * 2), (56, (256,) * 3), (28, (512,) * 3), (14, (512,) * 3)):
        for width in widths:
            yield conv(f"features.{place}", inside, width, 3, side, bias=True)
            place, inside = place + 2, width
        place += 1
    for place, (wide_in, wide_out) in zip((0, 3, 6), ((512 * 49, 4096), (4096, 4096), (4096, 1000)), strict=True):
        yield linear(f"classifier.{place}", wide_in, wide_out)


def _vit_b16() -> Layers:
    width, tokens = 768, 197
    yield Layer((TensorInfo("class_token", (1, 1, width)),))
    yield conv("conv_proj", 3, width, 16, 14, bias=True)
    yield Layer((TensorInfo("encoder.pos_embedding", (1, tokens, width)),))
    for block in range(12):
        name = f"encoder.layers.encoder_layer_{block}"
        yield norm(f"{name}.ln_1", width)
        work = float(tokens * width * 3 * width + 2 * tokens**2 * width)
        yield layer_of(f"{name}.self_attention", work, in_proj_weight=(3 * width, width), in_proj_bias=(3 * width,))
        yield linear(f"{name}.self_attention.out_proj", width, width, times=tokens)
        yield norm(f"{name}.ln_2", width)
        yield linear(f"{name}.mlp.0", width, 4 * width, times=tokens)
        yield linear(f"{name}.mlp.3", 4 * width, width, times=tokens)
    yield norm("encoder.ln", width)
    yield linear("heads.head", width, 1000)


def _bert(width: int, blocks: int, seen: int) -> Layers:
    """BERT with its pre-training heads; the decoder shares the word embeddings' weight. `seen`: tokens per sequence."""
    words = 30522
    for part, rows in (("word", words), ("position", 512), ("token_type", 2)):
        yield layer_of(f"bert.embeddings.{part}_embeddings", 0.0, weight=(rows, width))
    yield norm("bert.embeddings.LayerNorm", width)
    for block in range(blocks):
        name = f"bert.encoder.layer.{block}"
        for part in ("query", "key", "value"):
            yield linear(f"{name}.attention.self.{part}", width, width)
        yield _attended(linear(f"{name}.attention.output.dense", width, width), seen, width)
        yield norm(f"{name}.attention.output.LayerNorm", width)
        yield linear(f"{name}.intermediate.dense", width, 4 * width)
        yield linear(f"{name}.output.dense", 4 * width, width)
        yield norm(f"{name}.output.LayerNorm", width)
    yield linear("bert.pooler.dense", width, width, times=0)
    yield Layer((TensorInfo("cls.predictions.bias", (words,)),), float(width * words))
    yield linear("cls.predictions.transform.dense", width, width)
    yield norm("cls.predictions.transform.LayerNorm", width)
    yield linear("cls.seq_relationship", width, 2, times=0)


def _gpt2(seen: int, width: int = 768, blocks: int = 12) -> Layers:
    words = 50257
    yield layer_of("transformer.wte", 0.0, weight=(words, width))
    yield layer_of("transformer.wpe", 0.0, weight=(1024, width))
    for block in range(blocks):
        name = f"transformer.h.{block}"
        yield norm(f"{name}.ln_1", width)
        for part, inside, outside in (("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1), ("ln_2", 0, 0),
                                      ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)):
            if not inside:
                yield norm(f"{name}.{part}", width)
                continue
            layer = layer_of(f"{name}.{part}", float(inside * outside * width**2), weight=(inside * width, outside * width),
                           bias=(outside * width,))
            yield _attended(layer, seen, width) if part == "attn.c_proj" else layer
    yield norm("transformer.ln_f", width)
    yield Layer((), float(width * words))


class Decoder(NamedTuple):
    """A decoder of the Llama family: grouped-query attention, gated MLP, norms without bias."""

    width: int
    blocks: int
    keys: int
    """Total width of the keys, equal to that of the values."""
    inner: int
    words: int
    tied: bool = True
    """True: the output shares the embedding's weight."""
    bias: bool = False
    """True: queries, keys and values have biases (Qwen)."""

    @property
    def kept_nbytes(self) -> float:
        return KEPT * self.blocks * self.width + 6 * self.words

    @property
    def numel(self) -> int:
        return sum(info.numel for layer in self.layers(1) for info in layer.tensors)

    def linears(self) -> Iterator[tuple[str, int, int]]:
        """The matrices of one block: name, inputs, outputs."""
        for part, inside, outside in (("q", self.width, self.width), ("k", self.width, self.keys),
                                      ("v", self.width, self.keys), ("o", self.width, self.width)):
            yield f"self_attn.{part}_proj", inside, outside
        for part, inside, outside in (("gate", self.width, self.inner), ("up", self.width, self.inner),
                                      ("down", self.inner, self.width)):
            yield f"mlp.{part}_proj", inside, outside

    def layers(self, seen: int) -> Layers:
        yield layer_of("model.embed_tokens", 0.0, weight=(self.words, self.width))
        for block in range(self.blocks):
            name = f"model.layers.{block}"
            yield layer_of(f"{name}.input_layernorm", 0.0, weight=(self.width,))
            for part, inside, outside in self.linears():
                if part == "mlp.gate_proj":
                    yield layer_of(f"{name}.post_attention_layernorm", 0.0, weight=(self.width,))
                layer = linear(f"{name}.{part}", inside, outside, bias=self.bias and part[10] in "qkv")
                yield _attended(layer, seen, self.width) if part == "self_attn.o_proj" else layer
        yield layer_of("model.norm", 0.0, weight=(self.width,))
        yield Layer((), float(self.width * self.words)) if self.tied else linear("lm_head", self.width, self.words, bias=False)

    def adapters(self, seen: int, rank: int) -> Layers:
        """LoRA on every matrix of the blocks. The multiply-adds of a frozen matrix count for its adapters."""
        for block in range(self.blocks):
            for part, inside, outside in self.linears():
                name = f"base_model.model.model.layers.{block}.{part}"
                layer = layer_of(name, float(inside * outside + rank * (inside + outside)),
                                 **{"lora_A.default.weight": (rank, inside), "lora_B.default.weight": (outside, rank)})
                yield _attended(layer, seen, self.width) if part == "self_attn.o_proj" else layer
        yield Layer((), float(self.width * self.words))


DECODERS: Mapping[str, Decoder] = {
    "qwen2.5-0.5b": Decoder(896, 24, 128, 4864, 151936, bias=True),
    "llama3.2-1b": Decoder(2048, 16, 512, 8192, 128256),
    "llama3.2-3b": Decoder(3072, 28, 1024, 8192, 128256),
    "llama3.1-8b": Decoder(4096, 32, 1024, 14336, 128256, tied=False),
}


def _whisper_small() -> Layers:
    """Whisper small with 30 s of sound for the encoder and 448 tokens for the decoder."""
    width, frames, tokens, words = 768, 1500, 448, 51865
    yield layer_of("encoder.conv1", 80.0 * 3 * width * 2 * frames, weight=(width, 80, 3), bias=(width,))
    yield layer_of("encoder.conv2", 3.0 * width**2 * frames, weight=(width, width, 3), bias=(width,))
    for part, seen in (("encoder", frames), ("decoder", tokens)):
        if part == "decoder":
            yield layer_of("decoder.embed_tokens", 0.0, weight=(words, width))
            yield layer_of("decoder.embed_positions", 0.0, weight=(tokens, width))
        for block in range(12):
            for attention, others in (("self_attn", seen), *((("encoder_attn", frames),) if part == "decoder" else ())):
                name = f"{part}.layers.{block}.{attention}"
                yield norm(f"{name}_layer_norm", width)
                for each in ("q_proj", "k_proj", "v_proj"):
                    yield linear(f"{name}.{each}", width, width, bias=each != "k_proj",
                                 times=seen if each == "q_proj" else others)
                out = linear(f"{name}.out_proj", width, width, times=seen)
                yield out._replace(macs=out.macs + 2.0 * seen * others * width)
            name = f"{part}.layers.{block}"
            yield norm(f"{name}.final_layer_norm", width)
            yield linear(f"{name}.fc1", width, 4 * width, times=seen)
            yield linear(f"{name}.fc2", 4 * width, width, times=seen)
        yield norm(f"{part}.layer_norm", width)
    yield Layer((), float(width * words * tokens))


SDXL_MACS, SDXL_NUMEL = 3.0e12, 2_567_000_000
"""Multiply-adds for an image of 1024 x 1024 and parameters of SDXL's U-Net."""


def _sdxl_adapters(rank: int = 16) -> Layers:
    """LoRA on the attention of SDXL's U-Net."""
    stages = (("down_blocks.1", 640, 2, 2), ("down_blocks.2", 1280, 2, 10), ("mid_block", 1280, 1, 10),
              ("up_blocks.0", 1280, 3, 10), ("up_blocks.1", 640, 3, 2))
    blocks = [(f"{stage}.attentions.{i}.transformer_blocks.{block}", width)
              for stage, width, count, depth in stages for i in range(count) for block in range(depth)]
    for name, width in blocks:
        for attention, context in (("attn1", width), ("attn2", 2048)):
            for part, inside in (("to_q", width), ("to_k", context), ("to_v", context), ("to_out.0", width)):
                yield layer_of(f"{name}.{attention}.{part}", SDXL_MACS / len(blocks) / 8,
                               **{"lora_A.default.weight": (rank, inside), "lora_B.default.weight": (width, rank)})


def _attended(layer: Layer, seen: int, width: int) -> Layer:
    """Adds to the layer the multiply-adds of the preceding attention scores and mixing."""
    return layer._replace(macs=layer.macs + 2.0 * seen * width)


def _lstm() -> Layers:
    """A word-level LSTM of two layers; the decoder shares the encoder's weight."""
    width, words = 1500, 33278
    yield layer_of("encoder", 0.0, weight=(words, width))
    for i in range(2):
        yield Layer(tuple(
            TensorInfo(f"rnn.{kind}_l{i}", (4 * width, width) if kind.startswith("weight") else (4 * width,))
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")), 8.0 * width**2)
    yield Layer((TensorInfo("decoder.bias", (words,)),), float(width * words))


LORA_RANKS = (8, 16, 64)
MODELS: Mapping[str, Callable[[int], Layers]] = {
    "resnet50": lambda _: _resnet((3, 4, 6, 3)),
    "resnet101": lambda _: _resnet((3, 4, 23, 3)),
    "vgg16": lambda _: _vgg16(),
    "vit-b16": lambda _: _vit_b16(),
    "bert-base": lambda seen: _bert(768, 12, seen),
    "bert-large": lambda seen: _bert(1024, 24, seen),
    "gpt2": _gpt2,
    "gpt2-medium": lambda seen: _gpt2(seen, 1024, 24),
    **{name: decoder.layers for name, decoder in DECODERS.items()},
    **{f"{name}-lora{rank}": functools.partial(decoder.adapters, rank=rank)
       for name, decoder in DECODERS.items() for rank in LORA_RANKS},
    "whisper-small": lambda _: _whisper_small(),
    "sdxl-lora16": lambda _: _sdxl_adapters(),
    "lstm": lambda _: _lstm(),
}


def layers(name: str, seen: int) -> tuple[Layer, ...]:
    """The layers of a built-in model. `seen`: tokens per sequence, for models that attend to all tokens."""
    return tuple(MODELS[name](seen))


FLOP_S = 3 * 2 * 4.09e9 * 356
"""FLOP/s of FP32 training on a V100: ResNet-50's published 356 images/s, with two operations per multiply-add and a backward
pass of twice the forward's work."""
SGD_NBYTES, ADAM_NBYTES = 20, 28
"""Bytes per element that an optimizer step reads and writes: gradient, parameter twice, and its states twice."""


IMAGES = ModelInfo(image_side=224, classes=1000)


def language(tokens: int, vocabulary: int, frozen: int = 0) -> ModelInfo:
    """A model that predicts words. `tokens`: per sample; `frozen`: parameters that are not trained."""
    return ModelInfo(tokens=tokens, vocabulary=vocabulary, frozen=frozen)


class Published(NamedTuple):
    """Batch and times of a published paper's job, in FP32 on one V100."""

    batch: int
    model: ModelInfo
    backward_s: float | None = None
    """Published seconds of the backward pass; None: computed from the operations."""


PUBLISHED: Mapping[str, Published] = {
    "resnet50": Published(32, IMAGES),
    "resnet101": Published(32, IMAGES),
    "vgg16": Published(32, IMAGES, backward_s=85.3e-3),
    "vit-b16": Published(32, IMAGES),
    "bert-base": Published(8, language(128, 30522), 66.3e-3),
    "bert-large": Published(8, language(128, 30522)),
    "gpt2": Published(20, language(80, 50257)),
    "lstm": Published(80, language(20, 33278), 71.5e-3),
}


PRODUCTS, CONVOLUTIONS = 0.4, 0.2
"""Fraction of a GPU's half-precision peak that training reaches in models of matrix products, and of convolutions: ResNet-50
reaches 0.23 on a V100 and 0.19 on an A100 in NVIDIA's published images/s with mixed precision."""


class Preset(NamedTuple):
    """Batch and efficiency of a present-day job in bf16."""

    batch: int
    kept_nbytes: float
    """Bytes of activations kept for the backward pass, per sample, or per token if the model reads tokens."""
    model: ModelInfo
    utilisation: float = PRODUCTS
    """Fraction of the GPU's peak that training reaches."""
    noise_scale: float = 0.0
    """Gradient noise scale in samples; 0: that of other tasks like this one, if one is known (`noise.law_of`)."""


STREAMED = 6.5
"""Number of times that a step reads or writes each byte of its kept activations outside of matrix products and convolutions, as
counted in GPT-2 (6.3) and ResNet-50 (6.6)."""
KEPT = 34
"""Bytes that a transformer block keeps per token and element of its width, in bf16 with fused attention. A language model
keeps 6 more bytes per word of its vocabulary."""
BERT_NOISE = 32_768 * 128 / 512
"""Gradient noise scale of BERT's pre-training in samples of 512 tokens: batches of 32,768 sequences, most of them of 128
tokens, take as many epochs as batches of 512 (You et al., 1904.00962)."""
PRESETS: Mapping[str, Preset] = {
    "resnet50": Preset(32, 2 * 2 * 11.1e6, IMAGES, utilisation=CONVOLUTIONS),
    "resnet101": Preset(32, 2 * 2 * 16.2e6, IMAGES, utilisation=CONVOLUTIONS),
    "vit-b16": Preset(32, KEPT * 12 * 768 * 197, IMAGES),
    "bert-base": Preset(16, KEPT * 12 * 768 + 6 * 30522, language(512, 30522), noise_scale=BERT_NOISE),
    "bert-large": Preset(16, KEPT * 24 * 1024 + 6 * 30522, language(512, 30522), noise_scale=BERT_NOISE),
    "gpt2": Preset(8, KEPT * 12 * 768 + 6 * 50257, language(1024, 50257)),
    "gpt2-medium": Preset(8, KEPT * 24 * 1024 + 6 * 50257, language(1024, 50257)),
    **{name: Preset(batch, DECODERS[name].kept_nbytes, language(2048, DECODERS[name].words))
       for name, batch in (("qwen2.5-0.5b", 2), ("llama3.2-1b", 2), ("llama3.2-3b", 1), ("llama3.1-8b", 1))},
    "whisper-small": Preset(8, KEPT * 12 * 768 * (1500 + 2 * 448) + 6 * 51865 * 448, ModelInfo()),
    "sdxl-lora16": Preset(1, 0.0, ModelInfo(frozen=SDXL_NUMEL)),
    **{f"{name}-lora{rank}": Preset(2, decoder.kept_nbytes, language(1024, decoder.words, decoder.numel))
       for name, decoder in DECODERS.items() for rank in LORA_RANKS},
}
"""BERT reads at most 512 tokens, so its batch has twice as many sequences. ResNet keeps two bf16 values for each output of a
convolution. Frozen parameters are kept in bf16."""


def builtin(name: str, batch: int | None = None, device: str = "v100") -> Job:
    """A built-in job with `batch` samples per worker, on this device: in bf16 if the name is in `PRESETS`, else as
    published."""
    if name not in PRESETS:
        return published(name, batch, device)
    _check(name, batch)
    preset = PRESETS[name]
    model, batch = preset.model, batch or preset.batch
    parts, reads = layers(name, model.tokens), model.tokens or 1
    flops = 2 * sum(layer.macs for layer in parts) * reads * batch
    forward_s = flops / (preset.utilisation * GPUS["v100"].peak_tflops * 1e12)
    # The gradients of weights are half of the backward pass; frozen weights need none.
    backward_s = forward_s if model.frozen else 2 * forward_s
    job = build(name, parts, batch, forward_s, backward_s, ADAM_NBYTES)
    kept_nbytes = preset.kept_nbytes * reads * batch
    work = Work(forward_s + backward_s, STREAMED * kept_nbytes / stream_bytes_s("v100"), 0.0)
    timed = structs.replace(
        job.timed, half=True, activation_nbytes=kept_nbytes, noise_scale=preset.noise_scale, frozen_nbytes=2.0 * model.frozen,
        model=structs.replace(model, samples=batch), work=work)
    return structs.replace(job, timing=timed.scaled(1 / job_speed(device, timed)))


def published(name: str, batch: int | None = None, device: str = "v100") -> Job:
    """A job in FP32, with the batch and sequence length of the papers that measured it."""
    _check(name, batch)
    job = PUBLISHED[name]
    parts, batch = layers(name, job.model.tokens), batch or job.batch
    flops = 2 * 2 * sum(layer.macs for layer in parts) * (job.model.tokens or 1) * job.batch
    backward_s = (job.backward_s or flops / FLOP_S) * batch / job.batch
    timed = build(name, parts, batch, backward_s / 2, backward_s, SGD_NBYTES)
    return structs.replace(timed, timing=structs.replace(
        timed.timed.scaled(1 / speed(device)), model=structs.replace(job.model, samples=batch)))


def _check(name: str, batch: int | None) -> None:
    if name not in MODELS:
        near = difflib.get_close_matches(name.lower(), MODELS, 3, 0.4)
        listed = ", ".join(near or MODELS)
        raise InvalidInput("E-MODEL-NAME", f"model {name!r} is not built in; "
                                           f"{'similar names' if near else 'built-in models'}: {listed}")
    if batch is not None and batch < 1:
        raise InvalidInput("E-ARGUMENT", f"batch of {name}: got {batch}, allowed: at least 1")


def build(
    name: str, parts: tuple[Layer, ...], batch: int, forward_s: float, backward_s: float, update_nbytes: int,
) -> Job:
    """A job with these times on a V100."""
    tensors = tuple(t for layer in parts for t in layer.tensors)
    update = update_s(sum(t.numel for t in tensors), update_nbytes)
    return Job(tensors, batch, timing(parts, backward_s, forward_s, update), name)


def update_s(numel: int, nbytes: int = ADAM_NBYTES) -> float:
    """Seconds of the optimizer's step on a V100."""
    return numel * nbytes / stream_bytes_s("v100")


def product_s(flops: float, *, convolution: bool, half: bool) -> float:
    """Seconds that a V100 takes for operations in matrix products or convolutions of a user's model, as for a built-in one."""
    if not half:
        return flops / FLOP_S
    return flops / ((CONVOLUTIONS if convolution else PRODUCTS) * GPUS["v100"].peak_tflops * 1e12)


def on_reference(job: Job) -> Job:
    """The job with its times scaled to the tables' reference GPU, a V100."""
    if job.timing is None or not job.timing.device:
        return job
    try:
        factor = speed(job.timing.device)
    except ValueError as error:
        raise InvalidInput("E-PLAN-INPUT", f"job {job.name!r}: timing.device: {error}") from None
    return structs.replace(job, timing=job.timing.scaled(factor))


def timing(parts: tuple[Layer, ...], backward_s: float, forward_s: float, update_s: float) -> Timing:
    """Divides the times among layers in proportion to their multiply-adds. Layers without tensors also take their share."""
    total_macs = sum(layer.macs for layer in parts)
    before = [0.0, *accumulate(layer.macs / total_macs for layer in parts)]
    ready: list[float] = []
    needed: list[float] = []
    for layer, share in zip(parts, before, strict=False):
        ready += [backward_s * (1 - share)] * len(layer.tensors)
        needed += [forward_s * share] * len(layer.tensors)
    return Timing(tuple(max(0.0, s) for s in ready), tuple(needed), backward_s, forward_s, update_s)
