"""Espresso's six experiments (testbeds, compression costs, models), with computed and published speed-ups.

Costs are those of its published program: microseconds for 2^20 elements on a V100, Gb/s on CPUs. The message latency follows
from its 150 us for an all-reduce among eight machines. Nothing is fitted to the speed-ups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs
from oracle.espresso import KEEP, cpu_pass, gpu_pass
from oracle.fifo import Played, play, timed
from oracle.ugatit import ugatit

from commlayer.planner.buckets import cut_tensor
from commlayer.planner.costs import Prices
from commlayer.planner.data import models
from commlayer.planner.data.tables import PCIE_COPY, links
from commlayer.planner.model import Cluster, CodecCost, LinearCost, Link, Node, Profile
from commlayer.planner.problem import Task
from commlayer.planner.tree import Path, encodes, usable_paths
from commlayer.records import Job, TensorInfo

MACHINES, GPUS_EACH = 8, 8
HOP_S = 150e-6 / (2 * (MACHINES - 1))
DENSE = "identity()"


TESTBEDS = {"nvlink-100g": (100e9, "nvlink"), "pcie-25g": (25e9, "pcie3")}
"""Network rate in bit/s, and the interconnect inside a machine."""


def cluster_of(name: str, link_share: float = 1.0) -> Cluster:
    """`link_share` is the achievable fraction of the network's nominal rate."""
    net_bps, intra = TESTBEDS[name]
    link = Link(net_bps * link_share, net_bps * link_share, HOP_S / 2)
    nodes = (Node(f"m{i}", GPUS_EACH, "v100", link, links().intra[intra].bps, HOP_S / 2, server=False) for i in range(MACHINES))
    return Cluster(tuple(nodes))


MEBI = 1 << 20


class _Published(NamedTuple):
    """Published costs of one compressor."""

    whole_us: float
    """Time to compress 2^20 elements on a GPU and decompress the payloads of all machines (one level)."""
    decode_us: float
    """Part of `whole_us` for decompression."""
    cpu_encode_gbps: float
    cpu_decode_gbps: float
    nbytes: float
    """Bytes sent per element of the tensor: index and value of the chosen entries, or signs."""


# The paper's DGC sends the 1 % of largest magnitude, which is topk here.
COMPRESSORS = {
    "randomk(ratio=0.01)": _Published(88, 34, 28, 56, 0.08),
    "topk(ratio=0.01)": _Published(390, 34, 16, 56, 0.08),
    "onebit()": _Published(270, 140, 31, 92, 0.125),
}


def _costs(codec: str, *, free: bool) -> tuple[CodecCost, CodecCost]:
    """Costs on GPU and CPU. GPU time is flat up to 2^20 elements, then linear; the line used here is within a factor of 2."""
    was = COMPRESSORS[codec]
    nbytes = LinearCost(16.0, was.nbytes)

    def on_gpu(us: float) -> LinearCost:
        return LinearCost(0.0) if free else LinearCost(us * 0.5e-6, us * 1e-6 / MEBI, error=0.5)

    def on_cpu(gbps: float) -> LinearCost:
        return LinearCost(0.0) if free else LinearCost(20e-6, 32 / (gbps * 1e9))

    return (
        CodecCost(codec, "gpu", on_gpu(was.whole_us - was.decode_us), on_gpu(was.decode_us / MACHINES), nbytes),
        CodecCost(codec, "cpu", on_cpu(was.cpu_encode_gbps), on_cpu(was.cpu_decode_gbps), nbytes),
    )


def profile(codec: str, *, free: bool = False) -> Profile:
    """With `free`, compression takes no time: a bound for all strategies."""
    dense = CodecCost(DENSE, "cpu", LinearCost(0.0), LinearCost(0.0), LinearCost(0.0, 4.0), sums=True)
    return Profile((dense, *_costs(codec, free=free)), LinearCost(0.0), copy=LinearCost(0.0) if free else PCIE_COPY,
                   source="Espresso")


def published(name: str) -> Job:
    return ugatit() if name == "ugatit" else models.published_job(name)


class Case(NamedTuple):
    """One experiment, with Espresso's published speed-ups in percent."""

    model: str
    codec: str
    testbed: str
    over_dense_pct: float | None
    """Over BytePS with FP32."""
    over_all_pct: float
    """Over HiPress, which compresses large tensors on GPUs."""


CASES = (
    Case("bert-base", "randomk(ratio=0.01)", "nvlink-100g", None, 40),
    Case("gpt2", "onebit()", "nvlink-100g", None, 33),
    Case("ugatit", "topk(ratio=0.01)", "nvlink-100g", 149, 35),
    Case("lstm", "onebit()", "pcie-25g", 77, 77),
    Case("vgg16", "randomk(ratio=0.01)", "pcie-25g", 269, 55),
    Case("resnet101", "topk(ratio=0.01)", "pcie-25g", 20, 24),
)
"""LSTM over FP32: +101 % over BytePS-Compress, which is 12 % below FP32."""


class Steps(NamedTuple):
    """Step times in seconds."""

    dense_s: float
    all_s: float
    """All tensors on the same GPU path, the best one."""
    gpu_s: float
    """After algorithm 1."""
    espresso_s: float
    """After algorithm 2."""
    free_s: float
    """After algorithm 1, if compression took no time."""
    compressed: int
    on_cpu: int

    @property
    def over_dense_pct(self) -> float:
        return 100 * (self.dense_s / self.espresso_s - 1)

    @property
    def over_all_pct(self) -> float:
        return 100 * (self.all_s / self.espresso_s - 1)


class Model:
    """One job on one testbed with one compressor: options per tensor, and the price of a strategy."""

    def __init__(self, job: Job, cluster: Cluster, costs: Profile, codec: str) -> None:
        timing = job.timing
        assert timing is not None
        self._rest_s = timing.forward_s + timing.update_s
        order = sorted(range(len(job.tensors)), key=lambda i: (timing.ready_s[i], -i))
        ready = [timing.ready_s[i] for i in order]
        self._work_s = [after - before for before, after in zip([0.0, *ready], ready, strict=False)]
        self.sizes = [job.tensors[i].numel for i in order]
        self._prices, self._codec = Prices(cluster, costs, ()), codec
        self._played: tuple[tuple[int, ...], Played] | None = None
        dense = usable_paths(cluster, max_encodes=0)
        coded = usable_paths(cluster, devices=("gpu",), dense=False)
        self.uniform: list[Path] = list(unbeaten(self._prices, coded, codec, min(self.sizes), max(self.sizes)))
        self._dense = min(dense, key=lambda path: self._uniform_s(path))
        self.ways = {size: self._ways(coded, size) for size in set(self.sizes)}
        self._tasks = {(size, o): timed(self._prices, way, size, codec if encodes(way) else DENSE)
                       for size, ways in self.ways.items() for o, way in enumerate(ways)}

    def _ways(self, coded: Sequence[Path], size: int) -> list[Path]:
        """Options by number: uncompressed, then those on GPUs, then the same on CPUs in the same order."""
        on_gpu = unbeaten(self._prices, coded, self._codec, size, size)
        return [self._dense, *on_gpu, *(tuple(op._replace(where="cpu") if op.where == "gpu" else op for op in path)
                                        for path in on_gpu)]

    def options(self) -> list[int]:
        """Number of options per tensor for the GPU pass."""
        return [1 + len(self.ways[size]) // 2 for size in self.sizes]

    def cpu_of(self, tensor: int, option: int) -> int | None:
        return option + len(self.ways[self.sizes[tensor]]) // 2

    def played(self, strategy: Sequence[int]) -> Played:
        key = tuple(strategy)
        if self._played is None or self._played[0] != key:
            tasks = [self._tasks[size, option] for size, option in zip(self.sizes, strategy, strict=True)]
            self._played = (key, play(self._work_s, tasks))
        return self._played[1]

    def price(self, strategy: Sequence[int]) -> float:
        return self._rest_s + self.played(strategy).done_s

    def before_bubbles(self, strategy: Sequence[int]) -> frozenset[int]:
        return self.played(strategy).before_bubbles

    def _uniform_s(self, path: Path) -> float:
        codec = self._codec if encodes(path) else DENSE
        tasks = {size: timed(self._prices, path, size, codec) for size in set(self.sizes)}
        return self._rest_s + play(self._work_s, [tasks[size] for size in self.sizes]).done_s

    def all_s(self) -> float:
        return min(map(self._uniform_s, self.uniform))


def in_parts(job: Job, most: int) -> Job:
    """The job with tensors of at most `most` elements: parts of a larger one become ready together."""
    parts = [(i, cut.numel) for i, tensor in enumerate(job.tensors)
             for cut in cut_tensor(i, tensor.numel, -(-tensor.numel // most))]
    timing = structs.replace(job.timed, ready_s=tuple(job.timed.ready_s[i] for i, _ in parts),
                             needed_s=tuple(job.timed.needed_s[i] for i, _ in parts))
    return structs.replace(job, timing=timing, tensors=tuple(
        TensorInfo(f"{job.tensors[i].name}.{number}", (numel,)) for number, (i, numel) in enumerate(parts)))


def run(case: Case, link_share: float = 1.0, *, most: int = 0) -> Steps:
    """Step times of a case after both passes. `most`: the largest tensor in elements, 0: any."""
    job, cluster = published(case.model), cluster_of(case.testbed, link_share)
    job = in_parts(job, most) if most else job
    model = Model(job, cluster, profile(case.codec), case.codec)
    kept = [KEEP] * len(model.sizes)
    on_gpu = gpu_pass(model.sizes, model.options(), model.price, model.before_bubbles)
    final = cpu_pass(model.sizes, on_gpu, model.cpu_of, model.price, most=500)
    free = Model(job, cluster, profile(case.codec, free=True), case.codec)
    at_best = gpu_pass(free.sizes, free.options(), free.price, free.before_bubbles)
    return Steps(
        model.price(kept), model.all_s(), model.price(on_gpu), model.price(final), free.price(at_best),
        sum(o != KEEP for o in final), sum(a != b for a, b in zip(on_gpu, final, strict=True)),
    )


def lines(link_share: float = 1.0) -> list[str]:
    """The table as text: computed speed-ups, with the published ones in parentheses."""
    rows = ["model      codec                 test-bed     over dense      over compress-all  above free  compressed (on CPU)"]
    for case in CASES:
        steps = run(case, link_share)
        published = "-" if case.over_dense_pct is None else f"{case.over_dense_pct:+.0f} %"
        rows.append(
            f"{case.model:10} {case.codec:21} {case.testbed:12} {steps.over_dense_pct:+5.0f} % ({published:>6}) "
            f"{steps.over_all_pct:+9.0f} % ({case.over_all_pct:+.0f} %) {100 * (steps.espresso_s / steps.free_s - 1):8.1f} % "
            f"{steps.compressed:6} ({steps.on_cpu})"
        )
    return rows


def unbeaten(
    prices: Prices, paths: Sequence[Path], codec: str, smallest: int, largest: int,
) -> tuple[Path, ...]:
    """The paths that may be best for some bucket of smallest to largest elements, in their order."""
    weighed = [_weights(prices.template(path, codec).tasks, (smallest, largest)) for path in paths]
    # Cheap paths first: they beat most others. The first of equal paths stays.
    order = sorted(range(len(paths)), key=lambda i: (sum(weighed[i].values()), i))
    kept: list[int] = []
    for i in order:
        if not any(_beats(weighed[j], weighed[i]) for j in kept):
            kept.append(i)
    return tuple(paths[i] for i in sorted(kept))


Weights = dict[tuple[str, int], float]
"""Seconds at each size: of each lane, and of the path alone (lane "")."""


def _beats(a: Weights, b: Weights) -> bool:
    return all(seconds <= b.get(key, 0.0) for key, seconds in a.items())


def _lanes(steps: Sequence[Task]) -> dict[str, LinearCost]:
    lanes: dict[str, LinearCost] = {}
    for step in steps:
        for lane, line in step.lanes:
            lanes[lane] = lanes[lane] + line if lane in lanes else line
    return lanes


def _weights(steps: Sequence[Task], sizes: Sequence[int]) -> Weights:
    lanes = _lanes(steps)
    weights = {(lane, size): line(size) for size in sizes for lane, line in lanes.items()}
    for size in sizes:
        weights["", size] = alone_s(steps, size)
    return weights


def alone_s(steps: Sequence[Task], numel: int) -> float:
    """Seconds of the path on idle lanes, where steps wait for each other only on shared lanes."""
    ends: list[float] = []
    free: dict[str, float] = {}
    for step in steps:
        start = max([0.0, *(ends[i] for i in step.after), *(free.get(lane, 0.0) for lane, _ in step.lanes)])
        longest = 0.0
        for lane, line in step.lanes:
            seconds = line(numel)
            free[lane] = start + seconds
            longest = max(longest, seconds)
        ends.append(start + longest + step.latency(numel))
    return max(ends, default=0.0)
