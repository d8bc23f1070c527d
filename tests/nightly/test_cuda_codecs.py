"""Codecs on a device: payloads, residuals and results equal those of the host, bit for bit."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.codecs import noise, room
from support.cuda import CUDA, DEVICE, KERNEL, octets, running
from support.native_builds import numbers

from commlayer.compressors import (
    bf16,
    error_feedback,
    fp16,
    identity,
    int4,
    int8,
    kernels,
    place,
    restore,
    seed,
    selection,
    snapshot,
    topk,
)
from commlayer.compressors.codec import Codec, State
from commlayer.compressors.entries import BLOCKS
from commlayer.compressors.payload import HEADER_NBYTES
from commlayer.errors import CorruptFrame, InvalidInput
from commlayer.gpu import launch
from commlayer.gpu.launch import OPTIONS
from commlayer.records import Spec

PLAIN: list[Codec] = [
    identity(), fp16(), bf16(), int8(), int8(block=48),
    topk(ratio=0.01), topk(ratio=0.03, values="fp16"), topk(ratio=0.2, values="fp32"),
    topk(ratio=1.0), topk(ratio=0.05, values="fp32", exact=True),
    topk(ratio=0.02, values="bf16"), topk(ratio=0.02, values="int4"),
    int4(), int4(block=8),
]  # fmt: skip
CODECS: list[Codec] = PLAIN + [error_feedback(codec) for codec in PLAIN]
SIZES = (0, 1, 33, 257, 4097, 20_011)


class Both:
    """A worker's codec on the host and its twin on the device."""

    def __init__(self, codec: Codec, n: int) -> None:
        self.codec, self.n, self.spec = codec, n, Spec((n,))
        self.host, self.there = codec.init(self.spec), codec.init(self.spec)
        for state in (self.host, self.there):
            seed(state, "job", 3, 1)
        place(self.there, DEVICE)
        self.out, self.memory = room(codec, self.spec), octets(codec.bound(self.spec)).to(DEVICE)

    def start(self, x: torch.Tensor) -> tuple[bytes, list[str]]:
        """The payload, after checking that both made the same; and the kernels that made it."""
        self.x = x
        with kernels.use(kernels.BACKENDS["native"]):
            nbytes = self.codec.start(x, self.host, self.out)
        with running(self.n) as launcher:
            got = self.codec.start(x.to(DEVICE), self.there, self.memory)
        payload = bytes(self.out[:nbytes])
        assert bytes(self.memory[:got].cpu().numpy()) == payload
        self.check()
        return payload, launcher.launched

    def decode(self, payload: bytes) -> torch.Tensor:
        mine, theirs = torch.full((self.n,), 7.0), torch.full((self.n,), 7.0, device=DEVICE)
        finite = self.codec.decode(payload, self.host, mine)
        with running(self.n):
            assert self.codec.decode(on_device(payload), self.there, theirs) == finite
        assert same_bits(mine, theirs)
        return mine

    def undo(self) -> None:
        self.codec.undo(self.host, self.x)
        with running(self.n):
            self.codec.undo(self.there, self.x.to(DEVICE))
        self.check()

    def check(self) -> None:
        mine, theirs = snapshot(self.host), snapshot(self.there)
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.tobytes() == theirs[name].tobytes(), name


def on_device(payload: bytes) -> torch.Tensor:
    memory = octets(len(payload))
    memory.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    return memory.to(DEVICE)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.nan_to_num(nan=math.pi), b.cpu().nan_to_num(nan=math.pi)
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_payloads_residuals_and_results_equal_those_of_the_host(codec: Codec) -> None:
    for n in SIZES:
        both = Both(codec, n)
        for step in range(4):
            payload, _ = both.start(noise(n, step) * (1 + step))
            both.decode(payload)
        both.undo()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_special_and_non_finite_numbers(codec: Codec) -> None:
    for n in (257, 20_011 if "topk" in str(codec) else 2003):
        for kind in ("special", "tiny", "equal", "spike", "wild", "normal"):
            both = Both(codec, n)
            for step in range(2):
                payload, _ = both.start(torch.from_numpy(numbers(n, step, kind=kind)))
                both.decode(payload)
            both.undo()


def seen_and_unseen(seen: float, unseen: float, *, equal: bool = False) -> torch.Tensor:
    """What the first step samples is `seen` times noise, the rest `unseen` times: so the first cut is wrong as wanted."""
    n, k = 120_000, 1200
    larger = selection.sample_sizes(n, selection.target_count(n, k))[1]
    x = noise(n, 5) * unseen if not equal else torch.full((n,), unseen)
    sample = torch.arange(larger)
    places = (sample // 4 * n // ((larger + 3) // 4 | 1) + sample % 4) % n
    x[places] = noise(n, 6)[places] * seen
    return x


AMISS = {
    "too little": (seen_and_unseen(1.0, 0.001), 2),
    "a little too much": (seen_and_unseen(1.0, 1.1), 1),
    "far too much": (seen_and_unseen(1.0, 30.0), 1),
    "too much, of equals": (seen_and_unseen(1.0, 30.0, equal=True), 1),
}


@pytest.mark.parametrize("fed", [True, False])
@pytest.mark.parametrize("values", ["int8", "int4", "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("what", AMISS)
def test_threshold_corrections_equal_those_of_the_host(what: str, values: str, fed: bool) -> None:
    x, scans = AMISS[what]
    codec = topk(ratio=0.01, values=values)
    both = Both(error_feedback(codec) if fed else codec, x.numel())
    payload, launched = both.start(x)
    assert launched.count("select_over") == scans
    assert entries(payload) == 1200  # trimmed: all of the cases find too much in the end
    both.decode(payload)
    both.start(noise(x.numel(), 7))


def entries(payload: bytes) -> int:
    return int.from_bytes(payload[8:12], "little")


@pytest.mark.parametrize("values", ["int8", "int4", "bf16", "fp16", "fp32"])
def test_clustered_positions_are_sent_as_blocks(values: str) -> None:
    x = noise(50_000, 1) * 0.01
    x.view(-1, 50)[::20, :16] *= 1000
    both = Both(error_feedback(topk(ratio=0.01, values=values)), x.numel())
    for _ in range(3):
        payload, _ = both.start(x)
        assert payload[3] & 15 == BLOCKS
        both.decode(payload)
    both.undo()


@pytest.mark.parametrize("fed", [True, False])
@pytest.mark.parametrize("values", ["bf16", "fp16"])
def test_values_too_large_for_their_cast(values: str, fed: bool) -> None:
    x = noise(50_000, 1)
    x[777] = 3.4e38
    codec = topk(ratio=0.01, values=values)
    both = Both(error_feedback(codec) if fed else codec, x.numel())
    payload, _ = both.start(x)
    assert (len(payload) == HEADER_NBYTES) == (not fed)
    both.decode(payload)


def test_regular_step_waits_once_and_launches_a_fixed_number_of_kernels() -> None:
    both = Both(error_feedback(topk(ratio=0.01)), 100_000)
    launches = [both.start(noise(100_000, step) * 0.1)[1] for step in range(4)]
    search = ["sample_abs", "cut_begin", "select_over", "trim_count", "trim_count", "trim_count", "trim", "rotate"]
    assert launches[-1] == [*search, "count_blocks", "settle", "pack_values", "clear_positions", "pack_positions"]


def test_checkpoints_move_between_device_and_host() -> None:
    codec, n = error_feedback(topk(ratio=0.01)), 20_011
    both = Both(codec, n)
    both.start(noise(n, 1))
    restore(both.host, snapshot(both.there))
    restore(both.there, snapshot(both.host))
    both.start(noise(n, 2))


BODY = {
    "int8": int8(), "int4": int4(),
    "topk": topk(ratio=0.05), "fp16 values": topk(ratio=0.05, values="fp16"), "bitmap": topk(ratio=0.5, values="int4"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODY)
def test_malformed_bytes_are_refused_without_effect(name: str) -> None:
    codec, n = BODY[name], 3000
    both = Both(codec, n)
    payload, _ = both.start(noise(n))
    generator = torch.Generator().manual_seed(1)
    refused = 0
    for case in range(60):
        broken = bytearray(payload)
        if case == 0:
            broken[HEADER_NBYTES : HEADER_NBYTES + 4] = b"\xff" * 4  # a scale, or a value where there are none
        else:
            at = int(torch.randint(HEADER_NBYTES, len(payload), (), generator=generator))
            broken[at] ^= 1 << int(torch.randint(8, (), generator=generator))
        verdicts = [verdict(codec, both.host, bytes(broken), n)]
        with running():
            verdicts.append(verdict(codec, both.there, on_device(bytes(broken)), n))
        assert verdicts[0] == verdicts[1]
        refused += verdicts[0] is None
    assert refused


def verdict(codec: Codec, state: State, payload: bytes | torch.Tensor, n: int) -> bytes | None:
    """What comes out, or None for bytes that were refused with nothing written."""
    out = torch.full((n,), 7.0, device=payload.device if isinstance(payload, torch.Tensor) else None)
    try:
        codec.decode(payload, state, out)
    except CorruptFrame:
        assert bool((out == 7.0).all())
        return None
    return out.cpu().numpy().tobytes()


NVCC = shutil.which("nvcc")
TARGETS = os.environ.get("COMMLAYER_CUDA_TARGETS", "75 120").split()
FAMILIES = sorted(file.stem for file in CUDA.glob("*.cu"))


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
def test_every_family_compiles_for_the_target(target: str, tmp_path: Path) -> None:
    """With the source text and options used at run time, headers included; no register is spilled.

    177: a family does not use every function of its headers.
    """

    def compile_one(family: str) -> str:
        source = tmp_path / f"{family}.cu"
        source.write_text(launch.source_text(family))
        command = [str(NVCC), *OPTIONS, f"-arch=sm_{target}", "-cubin", "-Xptxas=-v"]
        command += ["-Werror=all-warnings", "-diag-suppress=177", "-o", str(tmp_path / f"{family}.cubin"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        spills = [line for line in done.stderr.splitlines() if "spill" in line and " 0 bytes spill stores" not in line]
        return done.stderr if done.returncode else "\n".join(spills)

    with ThreadPoolExecutor(2) as pool:
        problems = dict(zip(FAMILIES, pool.map(compile_one, FAMILIES), strict=True))
    assert {family: text for family, text in problems.items() if text} == {}


def test_sources_are_found_in_editable_and_plain_installs(tmp_path: Path) -> None:
    assert launch.source_folder() == CUDA
    installed = tmp_path / "_cuda"
    installed.mkdir()
    with pytest.raises(InvalidInput, match="_cuda.*E-GPU-CODE"):
        launch.source_folder((tmp_path / "cuda", installed))
    (installed / "common.cuh").write_text("")
    assert launch.source_folder((tmp_path / "cuda", installed)) == installed


@pytest.mark.parametrize("family", FAMILIES)
def test_family_source_includes_every_header_once(family: str) -> None:
    text = launch.source_text(family)
    assert "#include" not in text
    assert text.count("#define CML_COMMON\n") == 1
    assert KERNEL.findall(text)


def test_kernel_names_are_unique() -> None:
    names = [name for file in CUDA.glob("*.cu") for name in KERNEL.findall(file.read_text())]
    assert len(names) == len(set(names)) > 20
