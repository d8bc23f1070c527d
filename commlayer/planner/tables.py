"""Default costs of machines and codecs without measurements: named GPUs and links. Measurements replace them.

GPUs: peaks, memory and bandwidth are from the vendors' data sheets. FP32 training speed relative to a V100 is the geometric
mean of the ratios of FP32 peak and bandwidth: convolutions and products follow the first, everything between them the second.
For cards that multiply in TF32 this is too low; the A100's speed is from ResNet-50's published images/s (NVIDIA's
DeepLearningExamples). In bf16 the speed is the ratio of peaks.

Codecs: model/codec_sizes.py has the bytes per element. A CPU codec runs at one core's streaming speed, a GPU codec at the
GPU's bandwidth.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import structs

from commlayer.codec_spec import parse_spec
from commlayer.errors import InvalidInput, RecordError
from commlayer.planner.codec_sizes import touch
from commlayer.planner.convergence import LearningRow, row_problem
from commlayer.planner.model import Cluster, CodecCost, Line, Link, Node, Profile
from commlayer.records import Job, Record, TensorInfo, Timing, decode, encode


class Gpu(NamedTuple):
    fp32_tflops: float
    memory_gbytes_s: float
    half_tflops: float
    """Peak of products in bf16 (fp16 without bf16 support), with FP32 sums and without sparsity; 0: no faster than FP32."""
    memory_gbytes: float
    """The smaller size, if the card is sold with two."""
    bf16: bool = True
    published_speed: float = 0.0
    """Training speed relative to a V100, if both are published for the same model and program."""

    @property
    def speed(self) -> float:
        """Training speed relative to a V100."""
        if self.published_speed:
            return self.published_speed
        v100 = GPUS["v100"]
        return math.sqrt(self.fp32_tflops / v100.fp32_tflops * self.memory_gbytes_s / v100.memory_gbytes_s)

    @property
    def peak_tflops(self) -> float:
        return self.half_tflops or self.fp32_tflops

    @property
    def precision(self) -> str:
        return "FP32" if not self.half_tflops else "bf16" if self.bf16 else "fp16"


GPUS: Mapping[str, Gpu] = {
    "gtx1070": Gpu(6.5, 256, 0, 8),
    "gtx1080ti": Gpu(11.3, 484, 0, 11),
    "m40": Gpu(6.8, 288, 0, 12),
    "p100": Gpu(10.6, 732, 0, 16),
    "v100": Gpu(15.7, 900, 125, 16, bf16=False),
    "t4": Gpu(8.1, 320, 65, 16, bf16=False),
    "rtx2060": Gpu(6.5, 336, 25.8, 6, bf16=False),
    "rtx2080ti": Gpu(13.4, 616, 56.9, 11, bf16=False),
    "rtx3060": Gpu(12.7, 360, 25.4, 12),
    "rtx3070": Gpu(20.3, 448, 40.6, 8),
    "rtx3080": Gpu(29.8, 760, 59.5, 10),
    "rtx3090": Gpu(35.6, 936, 71.0, 24),
    "rtx4060": Gpu(15.1, 272, 30.2, 8),
    "rtx4070": Gpu(29.1, 504, 58.3, 12),
    "rtx4080": Gpu(48.7, 717, 97.5, 16),
    "rtx4090": Gpu(82.6, 1008, 165.2, 24),
    "l4": Gpu(30.3, 300, 121, 24),
    "a100": Gpu(19.5, 1555, 312, 40, published_speed=938 / 356),
    "h100": Gpu(66.9, 3350, 989, 80),
}
CPU_SPEED = 0.02
"""A CPU's training speed relative to a V100: about 0.3 of 15.7 TFLOP/s."""
CPU_TFLOPS = 0.3

CPU_STREAM_BYTES_S = 9e9
"""In-place r += g on one core."""
GPU_SHARE = 0.7
"""Part of a GPU's bandwidth that elementwise kernels reach."""
CPU_FLOOR_S, GPU_FLOOR_S = 10e-6, 30e-6
"""Per call; a GPU codec is about three launches of 10 us."""

BUCKET_S = 100e-6
SERVER_BYTE_S = 0.2e-9
"""Reading and framing, in addition to the codec's add."""
PCIE_COPY = Line(10e-6, 1 / 12e9)

HOME_ALPHA_S, FIBER_ALPHA_S, RACK_ALPHA_S = 10e-3, 4e-3, 25e-6
INTRA: Mapping[str, tuple[float, float]] = {
    "nvlink": (1.2e12, 10e-6),
    "nvlink-a100": (2.4e12, 10e-6),
    "nvlink-h100": (3.6e12, 10e-6),
    "pcie3": (96e9, 15e-6),
    "pcie4": (192e9, 15e-6),
    "shm": (40e9, 20e-6),
}
"""bit/s in each direction between two ranks of a node, and seconds per message. "shm": through the host's memory."""

DEFAULT_CODECS = (
    "identity()", "fp16()", "int8()", "int4()", "topk(ratio=0.1)", "topk(ratio=0.01)", "topk(ratio=0.001)",
)


def gpu(name: str) -> Gpu:
    sheet = GPUS.get(name.lower())
    if sheet is None:
        near = difflib.get_close_matches(name.lower(), GPUS, 3, 0.5)
        raise InvalidInput("E-GPU-NAME",
                           f"GPU {name!r} is in no table, {'nearest are' if near else 'known are'} {', '.join(near or GPUS)}; "
                           "or measure it with `commlayer profile`")
    return sheet


def speed(device: str, *, half: bool = False) -> float:
    """Speed of a node's device relative to a V100: in FP32, or each in its fastest precision."""
    if half:
        return peak_tflops(device) / GPUS["v100"].peak_tflops
    return CPU_SPEED if device == "cpu" else gpu(device).speed


def peak_tflops(device: str) -> float:
    return CPU_TFLOPS if device == "cpu" else gpu(device).peak_tflops


def at_precision(nodes: Sequence[Node], *, half: bool) -> tuple[Node, ...]:
    """Switches node speeds to that precision, if they are the table's FP32 speeds."""
    if not half:
        return tuple(nodes)
    known = ("cpu", *GPUS)
    return tuple(structs.replace(node, speed=speed(node.device, half=True))
                 if node.device in known and node.speed == speed(node.device) else node for node in nodes)


def device_named(text: str) -> str:
    """The tables' name for a GPU, given its driver's name; empty if unknown.

    >>> device_named("NVIDIA GeForce RTX 3060"), device_named("Tesla V100-SXM2-16GB"), device_named("NVIDIA H200")
    ('rtx3060', 'v100', '')
    """
    words = re.findall(r"[a-z0-9]+", text.lower())
    runs = ("".join(words[i : i + n]) for n in (3, 2, 1) for i in range(len(words)))
    return next((run for run in runs if run in GPUS), "")


def link(name: str) -> Link:
    """A link by name: "home-100/20" (down/up, Mb/s), "fiber-1000" (Mb/s in each direction), "25g", "100m" (in one room)."""
    if match := re.fullmatch(r"home-(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)", name):
        result = Link(float(match[2]) * 1e6, float(match[1]) * 1e6, HOME_ALPHA_S)
    elif match := re.fullmatch(r"fiber-(\d+(?:\.\d+)?)", name):
        result = Link(float(match[1]) * 1e6, float(match[1]) * 1e6, FIBER_ALPHA_S)
    elif match := re.fullmatch(r"(\d+(?:\.\d+)?)([gm])", name):
        bps = float(match[1]) * (1e9 if match[2] == "g" else 1e6)
        result = Link(bps, bps, RACK_ALPHA_S)
    else:
        raise InvalidInput("E-LINK-NAME", f'link {name!r}: allowed are "home-DOWN/UP" and "fiber-BOTH" in Mb/s, "10g", "100m"')
    if not min(result.up_bps, result.down_bps) > 0:
        raise InvalidInput("E-LINK-NAME", f"link {name!r}: a link of 0 carries nothing, allowed: above 0")
    return result


def node(name: str, device: str, net: str, *, ranks: int = 1, intra: str = "pcie3", server: bool = True) -> Node:
    if intra not in INTRA:
        raise InvalidInput("E-LINK-NAME", f"intra {intra!r}: allowed are {', '.join(INTRA)}")
    intra_bps, intra_alpha_s = INTRA[intra] if ranks > 1 else (0.0, 0.0)
    return Node(name, ranks, device, link(net), intra_bps, intra_alpha_s, speed(device), server)


def profile_from_tables(cluster: Cluster, codecs: Sequence[str] = DEFAULT_CODECS) -> Profile:
    """Costs of `codecs` on every device of the cluster; an unknown codec or device is an error."""
    gpus = sorted({n.device for n in cluster.nodes if n.device != "cpu"})
    costs = [_cost(name, "cpu", CPU_STREAM_BYTES_S, CPU_FLOOR_S) for name in codecs]
    for device in gpus:
        bytes_s = gpu(device).memory_gbytes_s * 1e9 * GPU_SHARE
        costs += [_cost(name, device, bytes_s, GPU_FLOOR_S) for name in codecs]
    copy = PCIE_COPY if gpus else Line(0.0)
    return Profile(tuple(costs), Line(0.0, SERVER_BYTE_S), BUCKET_S, copy, learning=learning_rows())


def learning_rows(own: str = "") -> tuple[LearningRow, ...]:
    """Convergence factors: from the user's table in file `own`, else the shipped table. Empty if none is shipped; then all
    steps count equally."""
    if own:
        return rows_in(Path(own))
    return rows() if SHIPPED.is_file() else ()


def _cost(name: str, device: str, bytes_s: float, floor_s: float) -> CodecCost:
    touched = touch(parse_spec(name))
    return CodecCost(
        name, device, Line(floor_s, touched.encode / bytes_s), Line(floor_s / 2, touched.decode / bytes_s),
        Line(PAYLOAD_HEADER_NBYTES, touched.sent), sums=touched.sums,
        alone=touched.alone, answers=touched.answers,
    )


PAYLOAD_HEADER_NBYTES = 16


class Layer(NamedTuple):
    """Tensors whose gradients become final together, and the work of computing them."""

    tensors: tuple[TensorInfo, ...]
    macs: float = 0.0


Layers = Iterator[Layer]


def layer_of(name: str, macs: float, **shapes: tuple[int, ...]) -> Layer:
    return Layer(tuple(TensorInfo(f"{name}.{part}", shape) for part, shape in shapes.items()), macs)


def conv(name: str, inside: int, outside: int, kernel: int, side: int, *, bias: bool = False) -> Layer:
    """`side`: of the square output."""
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


def _gpt2(seen: int) -> Layers:
    width, words = 768, 50257
    yield layer_of("transformer.wte", 0.0, weight=(words, width))
    yield layer_of("transformer.wpe", 0.0, weight=(1024, width))
    for block in range(12):
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


def _attended(layer: Layer, seen: int, width: int) -> Layer:
    """The layer with the preceding work of attention scores and mixing."""
    return layer._replace(macs=layer.macs + 2.0 * seen * width)


def _lstm() -> Layers:
    """A word model of two layers; the decoder shares the encoder's weight."""
    width, words = 1500, 33278
    yield layer_of("encoder", 0.0, weight=(words, width))
    for i in range(2):
        yield Layer(tuple(
            TensorInfo(f"rnn.{kind}_l{i}", (4 * width, width) if kind.startswith("weight") else (4 * width,))
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")), 8.0 * width**2)
    yield Layer((TensorInfo("decoder.bias", (words,)),), float(width * words))


MODELS: Mapping[str, Callable[[int], Layers]] = {
    "resnet50": lambda _: _resnet((3, 4, 6, 3)),
    "resnet101": lambda _: _resnet((3, 4, 23, 3)),
    "vgg16": lambda _: _vgg16(),
    "vit-b16": lambda _: _vit_b16(),
    "bert-base": lambda seen: _bert(768, 12, seen),
    "bert-large": lambda seen: _bert(1024, 24, seen),
    "gpt2": _gpt2,
    "lstm": lambda _: _lstm(),
}


def layers(name: str, seen: int) -> tuple[Layer, ...]:
    """`seen`: tokens per sequence, if the model attends to all of them."""
    return tuple(MODELS[name](seen))


FLOP_S = 3 * 2 * 4.09e9 * 356
"""Rate of FP32 training on a V100: forward and twice as much backward, two operations per multiply-add."""
SGD_NBYTES, ADAM_NBYTES = 20, 28
"""Bytes per element that an optimizer step reads and writes: gradient, parameter twice, and its states twice."""


class Published(NamedTuple):
    """A job of the papers, in FP32 on one V100."""

    batch: int
    tokens: int = 0
    """Tokens per sample; 0: samples are images."""
    backward_s: float | None = None
    """Published seconds of this batch; None: computed from the operations."""


PUBLISHED: Mapping[str, Published] = {
    "resnet50": Published(32),
    "resnet101": Published(32),
    "vgg16": Published(32, backward_s=85.3e-3),
    "vit-b16": Published(32),
    "bert-base": Published(8, 128, 66.3e-3),
    "bert-large": Published(8, 128),
    "gpt2": Published(20, 80),
    "lstm": Published(80, 20, 71.5e-3),
}


class Preset(NamedTuple):
    """A present-day job."""

    batch: int
    kept_nbytes: float
    """Memory kept for the backward pass, per sample, or per token if the model reads tokens."""
    tokens: int = 0
    """Tokens per sample; 0: samples are images."""
    utilisation: float = 0.4
    """Part of the peak that training reaches. For convolutions: ResNet-50 reaches 0.23 on a V100 and 0.19 on an A100 in
    NVIDIA's published images/s with mixed precision."""


CONVOLUTIONS = 0.2
KEPT = 34
"""Bytes that a transformer block keeps per token and element of its width, in bf16 with fused attention. A language model
keeps 6 more bytes per word of its vocabulary."""

PRESETS: Mapping[str, Preset] = {
    "resnet50": Preset(32, 2 * 2 * 11.1e6, utilisation=CONVOLUTIONS),
    "resnet101": Preset(32, 2 * 2 * 16.2e6, utilisation=CONVOLUTIONS),
    "vit-b16": Preset(32, KEPT * 12 * 768 * 197),
    "bert-base": Preset(16, KEPT * 12 * 768 + 6 * 30522, tokens=512),
    "bert-large": Preset(16, KEPT * 24 * 1024 + 6 * 30522, tokens=512),
    "gpt2": Preset(8, KEPT * 12 * 768 + 6 * 50257, tokens=1024),
}
"""BERT reads at most 512 tokens, so its batch has twice as many sequences. resnet: two bf16 values for each output of a
convolution."""


def builtin(name: str, batch: int | None = None, device: str = "v100") -> Job:
    """A job by name, with `batch` samples per worker, on this device. In bf16 if it is in `PRESETS`, else as published."""
    if name not in PRESETS:
        return published(name, batch, device)
    _check(name, batch)
    preset = PRESETS[name]
    parts, batch, reads = layers(name, preset.tokens), batch or preset.batch, preset.tokens or 1
    flops = 2 * sum(layer.macs for layer in parts) * reads * batch
    forward_s = flops / (preset.utilisation * GPUS["v100"].peak_tflops * 1e12) / speed(device, half=True)
    job = build(name, parts, batch, forward_s, 2 * forward_s, ADAM_NBYTES, speed(device, half=True))
    assert job.timing is not None
    kept_nbytes = preset.kept_nbytes * reads * batch
    return structs.replace(job, timing=structs.replace(job.timing, half=True, activation_nbytes=kept_nbytes))


def published(name: str, batch: int | None = None, device: str = "v100") -> Job:
    """The job in FP32, with the batch and sequence length of the papers that measured it."""
    _check(name, batch)
    job = PUBLISHED[name]
    parts, batch = layers(name, job.tokens), batch or job.batch
    flops = 2 * 2 * sum(layer.macs for layer in parts) * (job.tokens or 1) * job.batch
    backward_s = (job.backward_s or flops / FLOP_S) * batch / job.batch / speed(device)
    return build(name, parts, batch, backward_s / 2, backward_s, SGD_NBYTES, speed(device))


def _check(name: str, batch: int | None) -> None:
    if name not in PUBLISHED:
        near = difflib.get_close_matches(name, PUBLISHED, 3, 0.4)
        listed = ", ".join(near or PUBLISHED)
        raise InvalidInput("E-MODEL-NAME", f"model {name!r} is not built in, {'nearest are' if near else 'there are'} {listed}")
    if batch is not None and batch < 1:
        raise InvalidInput("E-ARGUMENT", f"batch of {name}: got {batch}, allowed: at least 1")


def build(
    name: str, parts: tuple[Layer, ...], batch: int, forward_s: float, backward_s: float, update_nbytes: int,
    device_speed: float,
) -> Job:
    tensors = tuple(t for layer in parts for t in layer.tensors)
    memory_bytes_s = GPUS["v100"].memory_gbytes_s * 1e9 * GPU_SHARE * device_speed
    update_s = sum(t.numel for t in tensors) * update_nbytes / memory_bytes_s
    return Job(tensors, batch, timing(parts, backward_s, forward_s, update_s), name)


def on_reference(job: Job) -> Job:
    """The job with its times scaled to the tables' reference GPU."""
    if job.timing is None or not job.timing.device:
        return job
    try:
        factor = speed(job.timing.device)
    except ValueError as error:
        raise InvalidInput("E-PLAN-INPUT", f"job {job.name!r}: timing.device: {error}") from None
    return structs.replace(job, timing=job.timing.scaled(factor))


def timing(parts: tuple[Layer, ...], backward_s: float, forward_s: float, update_s: float) -> Timing:
    """Times by layer in proportion to its multiply-adds. A layer without tensors also takes its time."""
    total_macs = sum(layer.macs for layer in parts)
    before = [0.0, *accumulate(layer.macs / total_macs for layer in parts)]
    ready: list[float] = []
    needed: list[float] = []
    for layer, share in zip(parts, before, strict=False):
        ready += [backward_s * (1 - share)] * len(layer.tensors)
        needed += [forward_s * share] * len(layer.tensors)
    return Timing(tuple(max(0.0, s) for s in ready), tuple(needed), backward_s, forward_s, update_s)


VERSION = 1
SHIPPED = Path(__file__).with_name("learning.json")


class Provenance(Record, frozen=True):
    date: str
    command: str
    runs: int
    """Number of trainings, including dense ones."""
    tasks: tuple[str, ...]
    torch: str
    code: str
    """Hash of the sources that affect what a training learns."""
    errors: dict[str, float] = msgspec.field(default_factory=dict)
    """By optimizer family: the median relative error of factors on held-out tasks. Empty: not determined."""


class LearningTable(Record, frozen=True):
    provenance: Provenance
    rows: tuple[LearningRow, ...]
    version: int = VERSION


class _Version(Record, frozen=True, forbid_unknown_fields=False):
    version: int


def read(path: Path) -> LearningTable:
    """Reads a table; a one-line error for an invalid one."""
    what, data = f"learning table {path}", path.read_bytes()
    remedy = "python -m bench.learning_table" if path == SHIPPED else f"python -m bench.own_learning TASK {path}"
    try:
        version = decode(data, _Version, what).version
        if version != VERSION:
            raise RecordError("E-LEARNING-TABLE", f"{what}: version {version}, this commlayer reads version {VERSION}")
        table = decode(data, LearningTable, what)
    except RecordError as error:
        raise RecordError("E-LEARNING-TABLE", f"{error.what}; make it anew with {remedy}") from None
    for row in table.rows:
        if wrong := row_problem(row):
            raise RecordError("E-LEARNING-TABLE", f"{what}: {wrong}")
    return table


def written(table: LearningTable) -> bytes:
    """The table's file: a line per row, so that changes are readable in a diff."""
    head, lines = encode(table.provenance).decode(), ",\n".join(encode(row).decode() for row in table.rows)
    return f'{{"version": {table.version}, "provenance": {head}, "rows": [\n{lines}\n]}}\n'.encode()


def rows_in(path: Path) -> tuple[LearningRow, ...]:
    """Rows of a table that `python -m bench.own_learning` wrote: always the same object."""
    return table_in(path).rows


@functools.cache
def table_in(path: Path) -> LearningTable:
    """The table with its provenance."""
    try:
        table = read(path)
    except OSError as error:
        problem = f"{error.strerror}; `python -m bench.own_learning TASK {path}` writes one"
        raise InvalidInput("E-LEARNING-TABLE", f"learning table {path}: {problem}") from None
    if not table.rows:
        raise InvalidInput("E-LEARNING-TABLE",
                           f"learning table {path}: has no rows; `python -m bench.own_learning TASK {path}` measures some")
    return table


@functools.cache
def shipped() -> LearningTable:
    return read(SHIPPED)


def rows() -> tuple[LearningRow, ...]:
    """Rows of the shipped table: always the same object."""
    return shipped().rows
