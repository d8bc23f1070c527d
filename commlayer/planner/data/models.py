"""Built-in jobs by name: the tensors of published models, and the times of a step at a usual batch size.

A preset is a present-day job in bf16, with times computed from the operations and the GPU's data sheet. A published job is one
of a paper, in FP32 on one V100. Both are in data/models.toml; the classes here make the tensors.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from msgspec import structs

from commlayer.errors import InvalidInput
from commlayer.planner.data import NotNegative, load
from commlayer.planner.data.tables import gpus, job_speed, speed, stream_bytes_s
from commlayer.records import Job, ModelInfo, Record, TensorInfo, Timing, Work


class Layer(NamedTuple):
    """Tensors whose gradients become final together, and the multiply-adds of their forward pass."""

    tensors: tuple[TensorInfo, ...]
    macs: float = 0.0


Layers = Iterator[Layer]


def layer_info(name: str, macs: float, **shapes: tuple[int, ...]) -> Layer:
    return Layer(tuple(TensorInfo(f"{name}.{part}" if name else part, shape) for part, shape in shapes.items()), macs)


def weighted(name: str, shape: tuple[int, ...], times: int, *, bias: bool) -> Layer:
    """Describes a layer that uses each element of its weight in `times` multiplications per sample."""
    shapes = {"weight": shape} | ({"bias": shape[:1]} if bias else {})
    return layer_info(name, float(math.prod(shape) * times), **shapes)


def conv(name: str, inside: int, outside: int, kernel: int, side: int) -> Layer:
    """A convolution with a square output of `side` x `side`."""
    return weighted(name, (outside, inside, kernel, kernel), side**2, bias=False)


def linear(name: str, inside: int, outside: int, *, bias: bool = True, times: int = 1) -> Layer:
    return weighted(name, (outside, inside), times, bias=bias)


def projection(name: str, inside: int, outside: int) -> Layer:
    """A linear layer of GPT-2, whose weight has its inputs as rows."""
    return layer_info(name, float(inside * outside), weight=(inside, outside), bias=(outside,))


def norm(name: str, width: int) -> Layer:
    return layer_info(name, 0.0, weight=(width,), bias=(width,))


def _with_attention(layer: Layer, seen: int, width: int) -> Layer:
    """Adds to the layer the multiply-adds of the preceding attention scores and mixing."""
    return layer._replace(macs=layer.macs + 2.0 * seen * width)


class ResNet(Record, frozen=True, tag_field="family", tag="resnet"):
    blocks: tuple[int, ...]

    def layers(self, seen: int) -> Layers:
        yield conv("conv1", 3, 64, 7, 112)
        yield norm("bn1", 64)
        inside, side = 64, 56
        for stage, count in enumerate(self.blocks):
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


class Bert(Record, frozen=True, tag_field="family", tag="bert"):
    """BERT with its pre-training heads; the decoder shares the word embeddings' weight."""

    width: int
    blocks: int

    def layers(self, seen: int) -> Layers:
        words, width = 30522, self.width
        for part, rows in (("word", words), ("position", 512), ("token_type", 2)):
            yield layer_info(f"bert.embeddings.{part}_embeddings", 0.0, weight=(rows, width))
        yield norm("bert.embeddings.LayerNorm", width)
        for block in range(self.blocks):
            name = f"bert.encoder.layer.{block}"
            for part in ("query", "key", "value"):
                yield linear(f"{name}.attention.self.{part}", width, width)
            yield _with_attention(linear(f"{name}.attention.output.dense", width, width), seen, width)
            yield norm(f"{name}.attention.output.LayerNorm", width)
            yield linear(f"{name}.intermediate.dense", width, 4 * width)
            yield linear(f"{name}.output.dense", 4 * width, width)
            yield norm(f"{name}.output.LayerNorm", width)
        yield linear("bert.pooler.dense", width, width, times=0)
        yield Layer((TensorInfo("cls.predictions.bias", (words,)),), float(width * words))
        yield linear("cls.predictions.transform.dense", width, width)
        yield norm("cls.predictions.transform.LayerNorm", width)
        yield linear("cls.seq_relationship", width, 2, times=0)


class Gpt2(Record, frozen=True, tag_field="family", tag="gpt2"):
    width: int
    blocks: int

    def layers(self, seen: int) -> Layers:
        words, width = 50257, self.width
        yield layer_info("transformer.wte", 0.0, weight=(words, width))
        yield layer_info("transformer.wpe", 0.0, weight=(1024, width))
        for block in range(self.blocks):
            name = f"transformer.h.{block}"
            yield norm(f"{name}.ln_1", width)
            yield projection(f"{name}.attn.c_attn", width, 3 * width)
            yield _with_attention(projection(f"{name}.attn.c_proj", width, width), seen, width)
            yield norm(f"{name}.ln_2", width)
            yield projection(f"{name}.mlp.c_fc", width, 4 * width)
            yield projection(f"{name}.mlp.c_proj", 4 * width, width)
        yield norm("transformer.ln_f", width)
        yield Layer((), float(width * words))


class Decoder(Record, frozen=True, tag_field="family", tag="decoder"):
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
        yield layer_info("model.embed_tokens", 0.0, weight=(self.words, self.width))
        for block in range(self.blocks):
            name = f"model.layers.{block}"
            yield layer_info(f"{name}.input_layernorm", 0.0, weight=(self.width,))
            for part, inside, outside in self.linears():
                if part == "mlp.gate_proj":
                    yield layer_info(f"{name}.post_attention_layernorm", 0.0, weight=(self.width,))
                layer = linear(f"{name}.{part}", inside, outside, bias=self.bias and part[10] in "qkv")
                yield _with_attention(layer, seen, self.width) if part == "self_attn.o_proj" else layer
        yield layer_info("model.norm", 0.0, weight=(self.width,))
        yield Layer((), float(self.width * self.words)) if self.tied else linear("lm_head", self.width, self.words, bias=False)


class Adapters(Record, frozen=True, tag_field="family", tag="lora"):
    """LoRA on every matrix of a decoder's blocks. The multiply-adds of a frozen matrix count for its adapters."""

    decoder: Decoder
    rank: int

    def layers(self, seen: int) -> Layers:
        width, rank = self.decoder.width, self.rank
        for block in range(self.decoder.blocks):
            for part, inside, outside in self.decoder.linears():
                name = f"base_model.model.model.layers.{block}.{part}"
                layer = layer_info(name, float(inside * outside + rank * (inside + outside)),
                                   **{"lora_A.default.weight": (rank, inside), "lora_B.default.weight": (outside, rank)})
                yield _with_attention(layer, seen, width) if part == "self_attn.o_proj" else layer
        yield Layer((), float(width * self.decoder.words))


SDXL_MACS = 3.0e12
"""Multiply-adds for an image of 1024 x 1024 of SDXL's U-Net."""


class SdxlAdapters(Record, frozen=True, tag_field="family", tag="sdxl"):
    """LoRA on the attention of SDXL's U-Net."""

    rank: int

    def layers(self, seen: int) -> Layers:
        stages = (("down_blocks.1", 640, 2, 2), ("down_blocks.2", 1280, 2, 10), ("mid_block", 1280, 1, 10),
                  ("up_blocks.0", 1280, 3, 10), ("up_blocks.1", 640, 3, 2))
        blocks = [(f"{stage}.attentions.{i}.transformer_blocks.{block}", width)
                  for stage, width, count, depth in stages for i in range(count) for block in range(depth)]
        for name, width in blocks:
            for attention, context in (("attn1", width), ("attn2", 2048)):
                for part, inside in (("to_q", width), ("to_k", context), ("to_v", context), ("to_out.0", width)):
                    adapter = {"lora_A.default.weight": (self.rank, inside), "lora_B.default.weight": (width, self.rank)}
                    yield layer_info(f"{name}.{attention}.{part}", SDXL_MACS / len(blocks) / 8, **adapter)


class LayerRow(Record, frozen=True):
    """A row of data/layers.toml, which says what the fields mean."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    times: int = 0
    more_macs: int = 0


class LayerGroup(Record, frozen=True):
    layers: tuple[LayerRow, ...]
    blocks: int = 1


class Listed(Record, frozen=True, tag_field="family", tag="listed"):
    """A model of one size, whose layers are in data/layers.toml."""

    name: str

    def layers(self, seen: int) -> Layers:
        for group in load("layers", dict[str, tuple[LayerGroup, ...]])[self.name]:
            for block in range(group.blocks):
                for row in group.layers:
                    layer = layer_info(row.name.format(block), 0.0, **row.shapes)
                    used = layer.tensors[0].numel * row.times if row.times else 0
                    yield layer._replace(macs=float(used + row.more_macs))


Architecture = ResNet | Bert | Gpt2 | Decoder | Adapters | SdxlAdapters | Listed


class Published(Record, frozen=True):
    """Batch and times of a published paper's job, in FP32 on one V100."""

    batch: int
    model: ModelInfo
    backward_s: NotNegative = 0.0
    """Published seconds of the backward pass; 0: computed from the operations."""


class Preset(Record, frozen=True):
    """Batch and efficiency of a present-day job in bf16."""

    batch: int
    kept_nbytes: NotNegative
    """Bytes of activations kept for the backward pass, per sample, or per token if the model reads tokens."""
    model: ModelInfo = ModelInfo()
    convolutions: bool = False
    """True: most operations are convolutions, not matrix products."""
    noise_scale: NotNegative = 0.0
    """Gradient noise scale in samples; 0: that of other tasks like this one, if one is known (`noise.noise_law`)."""

    @property
    def utilisation(self) -> float:
        """Fraction of the GPU's peak that training reaches."""
        return CONVOLUTIONS if self.convolutions else PRODUCTS


class BuiltIn(Record, frozen=True):
    """A model, and at least one job that trains it."""

    architecture: Architecture
    preset: Preset | None = None
    published: Published | None = None


class LoraJob(Record, frozen=True):
    """Jobs that train adapters of the decoders."""

    ranks: tuple[int, ...]
    batch: int
    tokens: int


class ModelTable(Record, frozen=True):
    lora: LoraJob
    models: dict[str, BuiltIn]


@functools.cache
def built_in() -> Mapping[str, BuiltIn]:
    """Built-in models by name: those of data/models.toml, and LoRA adapters of its decoders."""
    table = load("models", ModelTable)
    result, lora = dict(table.models), table.lora
    for name, model in table.models.items():
        if isinstance(model.architecture, Decoder) and model.preset is not None:
            decoder, whole = model.architecture, model.preset.model
            info = structs.replace(whole, tokens=lora.tokens, frozen=decoder.numel)
            preset = structs.replace(model.preset, batch=lora.batch, model=info)
            result |= {f"{name}-lora{rank}": BuiltIn(Adapters(decoder, rank), preset) for rank in lora.ranks}
    return result


def find_preset(name: str) -> Preset | None:
    return built_in()[name].preset if name in built_in() else None


def layers(name: str, seen: int) -> tuple[Layer, ...]:
    """The layers of a built-in model. `seen`: tokens per sequence, for models that attend to all tokens."""
    return tuple(built_in()[name].architecture.layers(seen))


FLOP_S = 3 * 2 * 4.09e9 * 356
"""FLOP/s of FP32 training on a V100: ResNet-50's published 356 images/s, with two operations per multiply-add and a backward
pass of twice the forward's work."""
SGD_NBYTES, ADAM_NBYTES = 20, 28
"""Bytes per element that an optimizer step reads and writes: gradient, parameter twice, and its states twice."""


PRODUCTS, CONVOLUTIONS = 0.4, 0.2
"""Fraction of a GPU's half-precision peak that training reaches in models of matrix products, and of convolutions: ResNet-50
reaches 0.23 on a V100 and 0.19 on an A100 in NVIDIA's published images/s with mixed precision."""


STREAMED = 6.5
"""Number of times that a step reads or writes each byte of its kept activations outside of matrix products and convolutions, as
counted in GPT-2 (6.3) and ResNet-50 (6.6)."""


def builtin(name: str, batch: int | None = None, device: str = "v100") -> Job:
    """A built-in job with `batch` samples per worker, on this device: in bf16 if the model has a preset, else as
    published."""
    preset = _checked(name, batch).preset
    if preset is None:
        return published_job(name, batch, device)
    model, batch = preset.model, batch or preset.batch
    parts, reads = layers(name, model.tokens), model.tokens or 1
    flops = 2 * sum(layer.macs for layer in parts) * reads * batch
    forward_s = product_s(flops, convolution=preset.convolutions, half=True)
    # The gradients of weights are half of the backward pass; frozen weights need none.
    backward_s = forward_s if model.frozen else 2 * forward_s
    job = build(name, parts, batch, forward_s, backward_s, ADAM_NBYTES)
    kept_nbytes = preset.kept_nbytes * reads * batch
    work = Work(forward_s + backward_s, STREAMED * kept_nbytes / stream_bytes_s("v100"), 0.0)
    timed = structs.replace(
        job.timed, half=True, activation_nbytes=kept_nbytes, noise_scale=preset.noise_scale, frozen_nbytes=2.0 * model.frozen,
        model=structs.replace(model, samples=batch), work=work)
    return structs.replace(job, timing=timed.scaled(1 / job_speed(device, timed)))


def published_job(name: str, batch: int | None = None, device: str = "v100") -> Job:
    """A job in FP32, with the batch and sequence length of the papers that measured it."""
    job = _checked(name, batch).published
    if job is None:
        raise InvalidInput("E-MODEL-NAME", f"model {name!r} has no published times")
    parts, batch = layers(name, job.model.tokens), batch or job.batch
    flops = 2 * 2 * sum(layer.macs for layer in parts) * (job.model.tokens or 1) * job.batch
    backward_s = (job.backward_s or product_s(flops, convolution=False, half=False)) * batch / job.batch
    timed = build(name, parts, batch, backward_s / 2, backward_s, SGD_NBYTES)
    return structs.replace(timed, timing=structs.replace(
        timed.timed.scaled(1 / speed(device)), model=structs.replace(job.model, samples=batch)))


def _checked(name: str, batch: int | None) -> BuiltIn:
    if name not in built_in():
        near = difflib.get_close_matches(name.lower(), built_in(), 3, 0.4)
        listed = ", ".join(near or built_in())
        raise InvalidInput("E-MODEL-NAME", f"model {name!r} is not built in; "
                                           f"{'similar names' if near else 'built-in models'}: {listed}")
    if batch is not None and batch < 1:
        raise InvalidInput("E-ARGUMENT", f"batch of {name}: got {batch}, allowed: at least 1")
    return built_in()[name]


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
    """Seconds that a V100 takes for operations in matrix products or convolutions."""
    if not half:
        return flops / FLOP_S
    return flops / ((CONVOLUTIONS if convolution else PRODUCTS) * gpus()["v100"].peak_tflops * 1e12)


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
