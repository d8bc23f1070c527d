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
from typing import Literal

import msgspec
from msgspec import structs

from commlayer.codec_spec import parse_spec
from commlayer.errors import InvalidInput, RecordError
from commlayer.planner.convergence import LearningRow, row_problem
from commlayer.planner.data import FOLDER, NotNegative, Positive, load
from commlayer.planner.data.codec_sizes import bytes_per_element
from commlayer.planner.model import Cluster, CodecCost, LinearCost, Link, Node, Profile
from commlayer.records import Record, Timing, Work, decode, encode


class Cpu(Record, frozen=True):
    speed: Positive
    """Training speed relative to a V100."""
    tflops: Positive
    stream_bytes_s: Positive
    """Bytes per second that elementwise operations of one core read and write."""


class Gpu(Record, frozen=True):
    """A row of data/machines.toml, which says what the fields mean."""

    fp32_tflops: Positive
    memory_gbytes_s: Positive
    memory_gbytes: Positive
    watts: Positive
    half_tflops: NotNegative = 0.0
    bf16: bool = True
    published_speed: NotNegative = 0.0

    @property
    def speed(self) -> float:
        """Training speed relative to a V100."""
        if self.published_speed:
            return self.published_speed
        v100 = gpus()["v100"]
        return math.sqrt(self.fp32_tflops / v100.fp32_tflops * self.memory_gbytes_s / v100.memory_gbytes_s)

    @property
    def peak_tflops(self) -> float:
        return self.half_tflops or self.fp32_tflops

    @property
    def precision(self) -> str:
        return "FP32" if not self.half_tflops else "bf16" if self.bf16 else "fp16"


class Machines(Record, frozen=True):
    cpu: Cpu
    gpus: dict[str, Gpu]


def gpus() -> Mapping[str, Gpu]:
    return load("machines", Machines).gpus


def cpu() -> Cpu:
    return load("machines", Machines).cpu


class Intra(Record, frozen=True):
    """Bandwidth in each direction between two ranks of a node, and seconds per message."""

    bps: Positive
    alpha_s: NotNegative


class Links(Record, frozen=True):
    home_alpha_s: NotNegative
    fiber_alpha_s: NotNegative
    rack_alpha_s: NotNegative
    intra: dict[str, Intra]


def links() -> Links:
    return load("links", Links)


GPU_SHARE = 0.7
"""Fraction of a GPU's memory bandwidth that elementwise kernels reach."""
LAUNCH_S = 10e-6
"""Seconds in which the host starts a GPU's kernel."""
CPU_FLOOR_S, GPU_FLOOR_S = 10e-6, 3 * LAUNCH_S
"""Seconds per codec call on a CPU and on a GPU; a GPU codec is about three kernels."""

BUCKET_S = 100e-6
SERVER_BYTE_S = 0.2e-9
"""Seconds per byte that a server needs for reading and framing, in addition to the codec's decoding."""
PCIE_COPY = LinearCost(10e-6, 1 / 12e9)

DEFAULT_CODECS = (
    "identity()", "fp16()", "int8()", "int4()", "topk(ratio=0.1)", "topk(ratio=0.01)", "topk(ratio=0.001)",
)


def gpu(name: str) -> Gpu:
    sheet = gpus().get(name.lower())
    if sheet is None:
        near = sorted(difflib.get_close_matches(name.lower(), gpus(), 6, 0.5),
                      key=lambda each: sorted(each) != sorted(name.lower()))[:3]  # swapped digits are the likeliest mistake
        what = "similar names" if near else "known GPUs"
        raise InvalidInput("E-GPU-NAME", f"GPU {name!r} is unknown; {what}: {', '.join(near or gpus())}; "
                                         "or measure it with `commlayer profile`")
    return sheet


def speed(device: str, *, half: bool = False) -> float:
    """A device's training speed relative to a V100: both in FP32, or with `half` each in its fastest precision."""
    if half:
        return peak_tflops(device) / gpus()["v100"].peak_tflops
    return cpu().speed if device == "cpu" else gpu(device).speed


def job_speed(device: str, timing: Timing | None) -> float:
    """The speed relative to a V100 at which a device computes this step: by its precision, and by what limits it on both."""
    if timing is None or timing.work is None:
        return speed(device, half=timing is not None and timing.half)
    return float(max(structs.astuple(timing.work))) / max(_limits_s(device, timing.work, half=timing.half).values())


def job_limit(device: str, timing: Timing) -> str:
    """The field of `Work` that limits this step on a device; empty if it is unknown."""
    limits_s = {"": 0.0} if timing.work is None else _limits_s(device, timing.work, half=timing.half)
    return max(limits_s, key=limits_s.__getitem__)


def _limits_s(device: str, work: Work, *, half: bool) -> dict[str, float]:
    memory = stream_bytes_s(device) / stream_bytes_s("v100")
    return {"product_s": work.product_s / speed(device, half=half), "stream_s": work.stream_s / memory,
            "launch_s": work.launch_s}


def stream_bytes_s(device: str) -> float:
    """Bytes per second that elementwise operations read and write."""
    return cpu().stream_bytes_s if device == "cpu" else gpu(device).memory_gbytes_s * 1e9 * GPU_SHARE


def peak_tflops(device: str) -> float:
    return cpu().tflops if device == "cpu" else gpu(device).peak_tflops


def with_job_speeds(nodes: Sequence[Node], timing: Timing | None) -> tuple[Node, ...]:
    """Switches node speeds to those for this step, unless a node's speed differs from the table's FP32 speed."""
    known = ("cpu", *gpus())
    return tuple(structs.replace(node, speed=job_speed(node.device, timing))
                 if node.device in known and node.speed == speed(node.device) else node for node in nodes)


def device_named(text: str) -> str:
    """The tables' name for a GPU, given its driver's name; empty if unknown.

    >>> device_named("NVIDIA GeForce RTX 3060"), device_named("Tesla V100-SXM2-16GB"), device_named("NVIDIA B200")
    ('rtx3060', 'v100', '')
    """
    words = re.findall(r"[a-z0-9]+", text.lower())
    runs = ("".join(words[i : i + n]) for n in (3, 2, 1) for i in range(len(words)))
    return next((run for run in runs if run in gpus()), "")


VENDORS = re.compile(r"nvidia|geforce|tesla|amd|instinct|[^a-z0-9]")


def gpu_named(text: str) -> str:
    """The tables' name for a GPU or "cpu", as a user writes it; an unknown name as it is, in lower case.

    >>> gpu_named("RTX 3060 Ti"), gpu_named("NVIDIA GeForce rtx-4090"), gpu_named("3060"), gpu_named("CPU")
    ('rtx3060ti', 'rtx4090', 'rtx3060', 'cpu')
    """
    name = VENDORS.sub("", text.lower())
    return next((known for known in (name, f"rtx{name}", f"gtx{name}") if known in ("cpu", *gpus())), text.lower())


def link(name: str) -> Link:
    """A link by name: "home-100/20" (down/up, Mb/s), "fiber-1000" (Mb/s in each direction), "25g", "100m" (in one room)."""
    if match := re.fullmatch(r"home-(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)", name):
        result = Link(float(match[2]) * 1e6, float(match[1]) * 1e6, links().home_alpha_s)
    elif match := re.fullmatch(r"fiber-(\d+(?:\.\d+)?)", name):
        result = Link(float(match[1]) * 1e6, float(match[1]) * 1e6, links().fiber_alpha_s)
    elif match := re.fullmatch(r"(\d+(?:\.\d+)?)([gm])", name):
        bps = float(match[1]) * (1e9 if match[2] == "g" else 1e6)
        result = Link(bps, bps, links().rack_alpha_s)
    else:
        raise InvalidInput("E-LINK-NAME", f'link {name!r}: allowed are "home-DOWN/UP" and "fiber-BOTH" in Mb/s, "10g", "100m"')
    if not min(result.up_bps, result.down_bps) > 0:
        raise InvalidInput("E-LINK-NAME", f"link {name!r}: rates must be above 0")
    return result


def node(
    name: str, device: str, net: str | Link, *, ranks: int = 1, intra: str = "pcie3", server: bool = True,
    relative_speed: float = 0.0,
) -> Node:
    """A node with the tables' link and connection between its ranks. `relative_speed`: to a V100; 0: the table's value."""
    if intra not in links().intra:
        raise InvalidInput("E-LINK-NAME", f"intra {intra!r}: allowed are {', '.join(links().intra)}")
    inside, net = links().intra[intra], link(net) if isinstance(net, str) else net
    bps, alpha_s = (inside.bps, inside.alpha_s) if ranks > 1 else (0.0, 0.0)
    return Node(name, ranks, device, net, bps, alpha_s, relative_speed or speed(device), server)


def profile_from_tables(cluster: Cluster, codecs: Sequence[str] = DEFAULT_CODECS) -> Profile:
    """A profile with the tables' costs of `codecs` on every device of the cluster. An unknown codec or device is an error."""
    devices = sorted({n.device for n in cluster.nodes if n.device != "cpu"})
    costs = [_cost(name, "cpu", cpu().stream_bytes_s, CPU_FLOOR_S) for name in codecs]
    for device in devices:
        costs += [_cost(name, device, stream_bytes_s(device), GPU_FLOOR_S) for name in codecs]
    copy = PCIE_COPY if devices else LinearCost(0.0)
    return Profile(tuple(costs), LinearCost(0.0, SERVER_BYTE_S), BUCKET_S, copy, learning=learning_rows())


def learning_rows(own: str = "") -> tuple[LearningRow, ...]:
    """Measured convergence costs: from the user's table in file `own`, else the shipped table. Repeated calls return the same
    object."""
    return (table_of_file(Path(own)) if own else shipped_table()).rows


def _cost(name: str, device: str, bytes_s: float, floor_s: float) -> CodecCost:
    touched = bytes_per_element(parse_spec(name))
    return CodecCost(
        name, device, LinearCost(floor_s, touched.encode / bytes_s), LinearCost(floor_s / 2, touched.decode / bytes_s),
        LinearCost(PAYLOAD_HEADER_NBYTES, touched.sent), sums=touched.sums,
        alone=touched.alone, answers=touched.answers,
    )


PAYLOAD_HEADER_NBYTES = 16


SHIPPED = FOLDER / "learning.json"


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
    version: Literal[1]


def read_table(path: Path) -> LearningTable:
    """Reads a table of measured convergence costs; raises a one-line error for an invalid file."""
    what, data = f"learning table {path}", path.read_bytes()
    remedy = "python -m bench.learning.table" if path == SHIPPED else f"python -m bench.own_learning TASK {path}"
    try:
        table = decode(data, LearningTable, what)
    except RecordError as error:
        raise RecordError("E-LEARNING-TABLE", f"{error.what}; create the table again with {remedy}") from None
    table = structs.replace(table, rows=tuple(structs.replace(row, numel=table.provenance.numel) for row in table.rows))
    for row in table.rows:
        if wrong := row_problem(row):
            raise RecordError("E-LEARNING-TABLE", f"{what}: {wrong}")
    return table


def encoded_table(table: LearningTable) -> bytes:
    """Encodes the table as a file with one line per row, for readable diffs."""
    head = encode(table.provenance).decode()
    lines = ",\n".join(encode(structs.replace(row, numel=0)).decode().replace(',"numel":0', "") for row in table.rows)
    return f'{{"version": {table.version}, "provenance": {head}, "rows": [\n{lines}\n]}}\n'.encode()


@functools.cache
def table_of_file(path: Path) -> LearningTable:
    """Reads a table with its provenance; repeated calls return the same object."""
    try:
        table = read_table(path)
    except OSError as error:
        problem = f"{error.strerror}; `python -m bench.own_learning TASK {path}` writes one"
        raise InvalidInput("E-LEARNING-TABLE", f"learning table {path}: {problem}") from None
    if not table.rows:
        raise InvalidInput("E-LEARNING-TABLE",
                           f"learning table {path}: no rows; `python -m bench.own_learning TASK {path}` measures some")
    return table


@functools.cache
def shipped_table() -> LearningTable:
    return read_table(SHIPPED)
