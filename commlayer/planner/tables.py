"""Default costs of machines, links and codecs, used until measured.

GPUs: peaks, memory and bandwidth are from the vendors' data sheets. FP32 training speed relative to a V100 is the geometric
mean of the ratios of FP32 peak and bandwidth: convolutions and matrix products depend on the first, elementwise operations on
the second. For cards that multiply in TF32 this is too low; the A100's speed is from ResNet-50's published images/s (NVIDIA's
DeepLearningExamples). In bf16 the speed is the ratio of peaks.

Codecs: `codec_sizes` has the bytes per element. A CPU codec runs at one core's streaming speed, a GPU codec at the GPU's
bandwidth.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import structs

from commlayer.codec_spec import parse_spec
from commlayer.errors import InvalidInput, RecordError
from commlayer.planner.codec_sizes import touch
from commlayer.planner.convergence import LearningRow, row_problem
from commlayer.planner.model import Cluster, CodecCost, Line, Link, Node, Profile
from commlayer.records import Record, Timing, Work, decode, encode


class Gpu(NamedTuple):
    fp32_tflops: float
    memory_gbytes_s: float
    half_tflops: float
    """Peak TFLOP/s of matrix products in bf16 (fp16 without bf16 support), with FP32 sums and without sparsity; 0: no faster
    than FP32."""
    memory_gbytes: float
    """Memory in GB; the smaller size if the card is sold with two."""
    watts: float
    """The data sheet's power of the whole card."""
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
    "gtx1070": Gpu(6.5, 256, 0, 8, 150),
    "gtx1080ti": Gpu(11.3, 484, 0, 11, 250),
    "m40": Gpu(6.8, 288, 0, 12, 250),
    "p100": Gpu(10.6, 732, 0, 16, 300),
    "v100": Gpu(15.7, 900, 125, 16, 300, bf16=False),
    "t4": Gpu(8.1, 320, 65, 16, 70, bf16=False),
    "rtx2060": Gpu(6.5, 336, 25.8, 6, 160, bf16=False),
    "rtx2070": Gpu(7.5, 448, 29.9, 8, 175, bf16=False),
    "rtx2080": Gpu(10.1, 448, 40.3, 8, 215, bf16=False),
    "rtx2080ti": Gpu(13.4, 616, 56.9, 11, 250, bf16=False),
    "rtx3050": Gpu(9.1, 224, 18.2, 8, 130),
    "rtx3060": Gpu(12.7, 360, 25.4, 12, 170),
    "rtx3060ti": Gpu(16.2, 448, 32.4, 8, 200),
    "rtx3070": Gpu(20.3, 448, 40.6, 8, 220),
    "rtx3080": Gpu(29.8, 760, 59.5, 10, 320),
    "rtx3090": Gpu(35.6, 936, 71.0, 24, 350),
    "rtx4060": Gpu(15.1, 272, 30.2, 8, 115),
    "rtx4060ti": Gpu(22.1, 288, 44.1, 8, 160),
    "rtx4070": Gpu(29.1, 504, 58.3, 12, 200),
    "rtx4070ti": Gpu(40.1, 504, 80.2, 12, 285),
    "rtx4080": Gpu(48.7, 717, 97.5, 16, 320),
    "rtx4090": Gpu(82.6, 1008, 165.2, 24, 450),
    "rtx5060": Gpu(19.2, 448, 38.4, 8, 145),
    "rtx5060ti": Gpu(23.7, 448, 47.4, 8, 180),
    "rtx5070": Gpu(30.9, 672, 61.7, 12, 250),
    "rtx5070ti": Gpu(43.9, 896, 87.9, 16, 300),
    "rtx5080": Gpu(56.3, 960, 112.6, 16, 360),
    "rtx5090": Gpu(104.8, 1792, 209.5, 32, 575),
    "rtx3060laptop": Gpu(10.9, 336, 21.9, 6, 100),
    "rtx3080laptop": Gpu(19.0, 448, 38.0, 8, 100),
    "rtx4060laptop": Gpu(11.6, 256, 23.2, 8, 100),
    "rtx4090laptop": Gpu(33.0, 576, 66.0, 16, 100),
    "l4": Gpu(30.3, 300, 121, 24, 72),
    "l40s": Gpu(91.6, 864, 362, 48, 350),
    "a10": Gpu(31.2, 600, 125, 24, 150),
    "a6000": Gpu(38.7, 768, 155, 48, 300),
    "a100": Gpu(19.5, 1555, 312, 40, 400, published_speed=938 / 356),
    "h100": Gpu(66.9, 3350, 989, 80, 700),
    "h200": Gpu(66.9, 4800, 989, 141, 700),
    "mi300x": Gpu(163.4, 5300, 1307, 192, 750),
}
"""Laptop cards run at 60 to 150 W, as their manufacturer chooses; these figures are for about 100 W."""
CPU_SPEED = 0.02
"""A CPU's training speed relative to a V100: about 0.3 of 15.7 TFLOP/s."""
CPU_TFLOPS = 0.3

CPU_STREAM_BYTES_S = 9e9
"""Bytes per second of an in-place r += g on one core."""
GPU_SHARE = 0.7
"""Fraction of a GPU's memory bandwidth that elementwise kernels reach."""
LAUNCH_S = 10e-6
"""Seconds in which the host starts a GPU's kernel."""
CPU_FLOOR_S, GPU_FLOOR_S = 10e-6, 3 * LAUNCH_S
"""Seconds per codec call on a CPU and on a GPU; a GPU codec is about three kernels."""

BUCKET_S = 100e-6
SERVER_BYTE_S = 0.2e-9
"""Seconds per byte that a server needs for reading and framing, in addition to the codec's decoding."""
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
"""Bandwidth in bit/s in each direction between two ranks of a node, and seconds per message. "shm": through host memory."""

DEFAULT_CODECS = (
    "identity()", "fp16()", "int8()", "int4()", "topk(ratio=0.1)", "topk(ratio=0.01)", "topk(ratio=0.001)",
)


def gpu(name: str) -> Gpu:
    sheet = GPUS.get(name.lower())
    if sheet is None:
        near = sorted(difflib.get_close_matches(name.lower(), GPUS, 6, 0.5),
                      key=lambda each: sorted(each) != sorted(name.lower()))[:3]  # swapped digits are the likeliest mistake
        raise InvalidInput("E-GPU-NAME",
                           f"GPU {name!r} is unknown; {'similar names' if near else 'known GPUs'}: {', '.join(near or GPUS)}; "
                           "or measure it with `commlayer profile`")
    return sheet


def speed(device: str, *, half: bool = False) -> float:
    """A device's training speed relative to a V100: both in FP32, or with `half` each in its fastest precision."""
    if half:
        return peak_tflops(device) / GPUS["v100"].peak_tflops
    return CPU_SPEED if device == "cpu" else gpu(device).speed


def job_speed(device: str, timing: Timing | None) -> float:
    """The speed relative to a V100 at which a device computes this step: by its precision, and by what limits it on both."""
    if timing is None or timing.work is None:
        return speed(device, half=timing is not None and timing.half)
    return float(max(structs.astuple(timing.work))) / max(_limits_s(device, timing.work, half=timing.half).values())


def job_limit(device: str, timing: Timing) -> str:
    """The field of `Work` that limits this step on a device; empty if it is unknown."""
    limits_s = {"": 0.0} if timing.work is None else _limits_s(device, timing.work, half=timing.half)
    return max(limits_s, key=lambda each: limits_s[each])


def _limits_s(device: str, work: Work, *, half: bool) -> dict[str, float]:
    memory = stream_bytes_s(device) / stream_bytes_s("v100")
    return {"product_s": work.product_s / speed(device, half=half), "stream_s": work.stream_s / memory,
            "launch_s": work.launch_s}


def stream_bytes_s(device: str) -> float:
    """Bytes per second that elementwise operations read and write."""
    return CPU_STREAM_BYTES_S if device == "cpu" else gpu(device).memory_gbytes_s * 1e9 * GPU_SHARE


def peak_tflops(device: str) -> float:
    return CPU_TFLOPS if device == "cpu" else gpu(device).peak_tflops


def at_job_speed(nodes: Sequence[Node], timing: Timing | None) -> tuple[Node, ...]:
    """Switches node speeds to those for this step, unless a node's speed differs from the table's FP32 speed."""
    known = ("cpu", *GPUS)
    return tuple(structs.replace(node, speed=job_speed(node.device, timing))
                 if node.device in known and node.speed == speed(node.device) else node for node in nodes)


def device_named(text: str) -> str:
    """The tables' name for a GPU, given its driver's name; empty if unknown.

    >>> device_named("NVIDIA GeForce RTX 3060"), device_named("Tesla V100-SXM2-16GB"), device_named("NVIDIA B200")
    ('rtx3060', 'v100', '')
    """
    words = re.findall(r"[a-z0-9]+", text.lower())
    runs = ("".join(words[i : i + n]) for n in (3, 2, 1) for i in range(len(words)))
    return next((run for run in runs if run in GPUS), "")


VENDORS = re.compile(r"nvidia|geforce|tesla|amd|instinct|[^a-z0-9]")


def gpu_named(text: str) -> str:
    """The tables' name for a GPU or "cpu", as a user writes it; an unknown name as it is, in lower case.

    >>> gpu_named("RTX 3060 Ti"), gpu_named("NVIDIA GeForce rtx-4090"), gpu_named("3060"), gpu_named("CPU")
    ('rtx3060ti', 'rtx4090', 'rtx3060', 'cpu')
    """
    name = VENDORS.sub("", text.lower())
    return next((known for known in (name, f"rtx{name}", f"gtx{name}") if known in ("cpu", *GPUS)), text.lower())


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
        raise InvalidInput("E-LINK-NAME", f"link {name!r}: rates must be above 0")
    return result


def node(name: str, device: str, net: str | Link, *, ranks: int = 1, intra: str = "pcie3", server: bool = True) -> Node:
    if intra not in INTRA:
        raise InvalidInput("E-LINK-NAME", f"intra {intra!r}: allowed are {', '.join(INTRA)}")
    intra_bps, intra_alpha_s = INTRA[intra] if ranks > 1 else (0.0, 0.0)
    net = link(net) if isinstance(net, str) else net
    return Node(name, ranks, device, net, intra_bps, intra_alpha_s, speed(device), server)


def profile_from_tables(cluster: Cluster, codecs: Sequence[str] = DEFAULT_CODECS) -> Profile:
    """A profile with the tables' costs of `codecs` on every device of the cluster. An unknown codec or device is an error."""
    gpus = sorted({n.device for n in cluster.nodes if n.device != "cpu"})
    costs = [_cost(name, "cpu", CPU_STREAM_BYTES_S, CPU_FLOOR_S) for name in codecs]
    for device in gpus:
        costs += [_cost(name, device, stream_bytes_s(device), GPU_FLOOR_S) for name in codecs]
    copy = PCIE_COPY if gpus else Line(0.0)
    return Profile(tuple(costs), Line(0.0, SERVER_BYTE_S), BUCKET_S, copy, learning=learning_rows())


def learning_rows(own: str = "") -> tuple[LearningRow, ...]:
    """Measured convergence costs: from the user's table in file `own`, else the shipped table. Empty if no table is shipped;
    convergence is then ignored."""
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
    """Hash of the source files that affect training results."""
    numel: int = 0
    """Number of parameters of the largest measured model. 0: the table is for the user's own model."""
    errors: dict[str, float] = msgspec.field(default_factory=dict)
    """Maps the optimizer family to the median relative error of convergence factors on held-out tasks. Empty: not
    determined."""


class LearningTable(Record, frozen=True):
    provenance: Provenance
    rows: tuple[LearningRow, ...]
    version: int = VERSION


class _Version(Record, frozen=True, forbid_unknown_fields=False):
    version: int


def read(path: Path) -> LearningTable:
    """Reads a table of measured convergence costs; raises a one-line error for an invalid file."""
    what, data = f"learning table {path}", path.read_bytes()
    remedy = "python -m bench.learning.table" if path == SHIPPED else f"python -m bench.own_learning TASK {path}"
    try:
        version = decode(data, _Version, what).version
        if version != VERSION:
            raise RecordError("E-LEARNING-TABLE", f"{what}: version {version}, allowed: {VERSION}")
        table = decode(data, LearningTable, what)
    except RecordError as error:
        raise RecordError("E-LEARNING-TABLE", f"{error.what}; create the table again with {remedy}") from None
    table = structs.replace(table, rows=tuple(structs.replace(row, numel=table.provenance.numel) for row in table.rows))
    for row in table.rows:
        if wrong := row_problem(row):
            raise RecordError("E-LEARNING-TABLE", f"{what}: {wrong}")
    return table


def written(table: LearningTable) -> bytes:
    """Encodes the table as a file with one line per row, for readable diffs."""
    head = encode(table.provenance).decode()
    lines = ",\n".join(encode(structs.replace(row, numel=0)).decode().replace(',"numel":0', "") for row in table.rows)
    return f'{{"version": {table.version}, "provenance": {head}, "rows": [\n{lines}\n]}}\n'.encode()


def rows_in(path: Path) -> tuple[LearningRow, ...]:
    """Rows of a table that `python -m bench.own_learning` wrote. Repeated calls return the same object."""
    return table_in(path).rows


@functools.cache
def table_in(path: Path) -> LearningTable:
    """Reads a table with its provenance; repeated calls return the same object."""
    try:
        table = read(path)
    except OSError as error:
        problem = f"{error.strerror}; `python -m bench.own_learning TASK {path}` writes one"
        raise InvalidInput("E-LEARNING-TABLE", f"learning table {path}: {problem}") from None
    if not table.rows:
        raise InvalidInput("E-LEARNING-TABLE",
                           f"learning table {path}: no rows; `python -m bench.own_learning TASK {path}` measures some")
    return table


@functools.cache
def shipped() -> LearningTable:
    return read(SHIPPED)


def rows() -> tuple[LearningRow, ...]:
    """Rows of the shipped table. Repeated calls return the same object."""
    return shipped().rows
