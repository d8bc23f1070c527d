"""Kernels on the host's shim: it reports what hardware would leave undefined, and paths encode on it as on the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT
from support.cuda import COMPILER, DEVICE, SHIM, Shim, build, running
from support.rank_pool import pool
from support.residuals import slices_of
from support.workers import job, step

from commlayer.cluster.processes.collectives import Groups
from commlayer.compressors import parse, wrap
from commlayer.engine.worker.worker import Worker
from commlayer.records import Bucket, Plan, Slice

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

FAULTS = {
    "diverging_barrier": (1, r"diverge.*waits at the barrier of line \d+.*waits at the barrier of line \d+"),
    "barrier_after_exit": (1, r"diverge.*thread 7 has exited|diverge.*waits at the barrier"),
    "shuffle_from_exited": (1, r"lane 5, which is not there any more"),
    "shuffle_outside_mask": (1, r"lane 20, which is not in the mask"),
    "waits_for_later_block": (9, r"wait for each other without end"),
}


def shim(*flags: str, seed: int = 0, resident: int = 2) -> Shim:
    return Shim(build([SHIM / "faults.cu"], *flags), seed, resident)


@needs_compiler
@pytest.mark.parametrize("kernel", FAULTS)
def test_undefined_behaviour_is_reported(kernel: str) -> None:
    grid, message = FAULTS[kernel]
    with pytest.raises(RuntimeError, match=message):  # the seed is one with which the last block does not start first
        shim(seed=3).launch("faults", kernel, grid, 64, [torch.zeros(64, dtype=torch.int32)])


@needs_compiler
@pytest.mark.parametrize("seed", range(8))
def test_correct_kernels_give_equal_results_under_every_schedule(seed: int) -> None:
    out = torch.zeros(11, dtype=torch.int32)
    shim(seed=seed, resident=1 + seed).launch("faults", "sum_of_block", 11, 256, [out])
    assert out.tolist() == [255 * 128] * 11


@needs_compiler
def test_wrong_number_of_arguments_is_refused() -> None:
    with pytest.raises(RuntimeError, match="takes 1 arguments, got 2"):
        shim().launch("faults", "sum_of_block", 1, 32, [torch.zeros(1), 5])


SANITIZED = """
import ctypes, sys
call = getattr(ctypes.CDLL(sys.argv[1]), "shim_" + sys.argv[2])
call.restype = ctypes.c_char_p
out = ctypes.c_void_p(ctypes.addressof((ctypes.c_uint32 * 64)()))
print(call(2, 64, 2, ctypes.c_uint64(1), 1, (ctypes.c_void_p * 1)(ctypes.addressof(out))))
"""


def run_sanitized(kernel: str) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    requested = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    runtime = requested.stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("the compiler has no sanitizer runtime")
    library = build([SHIM / "faults.cu"], "-fsanitize=address", "-g1")
    environment = {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-c", SANITIZED, str(library), kernel]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@needs_compiler
def test_sanitizer_detects_access_beyond_shared_memory() -> None:
    right, wrong = run_sanitized("sum_of_block"), run_sanitized("outside_of_shared")
    assert right.stdout == "b''\n", right.stderr[-2000:]
    assert "heap-buffer-overflow" in wrong.stderr


WORLD, PER_NODE = 4, 2
SHAPES: list[tuple[int, ...]] = [(64, 33), (64,), (5, 3, 3, 3), (1,), (3,), (4001,), (7,)]
PATHS = [
    "encode@gpu all.allgather decode@gpu",
    "encode@gpu all.allgather decode@cpu",
    "encode@cpu all.alltoall decode@gpu all.allgather",
    "node.reduce_scatter encode@gpu net.alltoall decode@gpu encode@cpu net.allgather decode@gpu node.allgather",
    "node.reduce encode@gpu net.gather decode@cpu encode@gpu net.broadcast decode@gpu node.broadcast",
]
CODECS = ["int8(block=64)", "topk(ratio=0.1, values='int8')"]
STEPS = 3


def plan(text: str, codec: str) -> Plan:
    """Buckets of several tensors, of parts of one, and the rest."""
    tensors = job(SHAPES)
    slices = [tuple(Slice(t, 0, tensors.tensors[t].numel) for t in (6, 4, 3, 2)), (Slice(5, 0, 1500),),
              (Slice(5, 1500, 4001), Slice(1, 0, 64)), (Slice(0, 0, 64 * 33),)]
    buckets = tuple(Bucket(i, s, text, codec, owner=i % PER_NODE) for i, s in enumerate(slices))
    return Plan(tensors.digest(), buckets, ranks_per_node=PER_NODE)


def gradients(rank: int, number: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    results: list[torch.Tensor | None] = [torch.randn(shape, generator=generator) for shape in SHAPES]
    results[3] = None if rank == 1 else results[3]
    results[6] = None
    return results


def rows_of(rank: int, cases: list[tuple[str, str]], present: bool) -> list[Any]:
    """For each path and codec: averages of all steps, residuals, and whether any kernel was launched."""
    if not present:
        return [trained(rank, text, codec, torch.device("cpu")) for text, codec in cases]
    with running(resident=2) as launcher:
        results = []
        for text, codec in cases:
            launcher.launched.clear()
            results.append((*trained(rank, text, codec, DEVICE), bool(launcher.launched)))
        return results


def trained(rank: int, text: str, codec: str, device: torch.device) -> tuple[list[Any], list[torch.Tensor]]:
    groups, wanted = Groups(PER_NODE, 60.0, torch.device("cpu")), plan(text, codec)
    worker = Worker(job(SHAPES), wanted, {b.id: wrap(parse(codec)) for b in wanted.buckets}, device, rank=rank, groups=groups)
    try:
        averages = []
        for number in range(STEPS):
            put = gradients(rank, number)
            if number == 1 and rank == 2:
                assert put[5] is not None
                put[5][7] = float("nan")
            mine = [None if g is None else g.to(device) for g in put]
            averages.append([None if t is None else t.cpu() for t in step(worker, mine, 60.0, device)])
        return averages, [torch.as_tensor(residual.values).cpu().clone() for residual in slices_of(worker)]
    finally:
        worker.close()
        groups.close()


@pytest.mark.commit(1)
@pytest.mark.parametrize("codec", CODECS)
def test_path_results_do_not_depend_on_the_encoding_device(codec: str) -> None:
    with running():
        pass  # compiled once, before the ranks start
    cases = [(text, codec) for text in PATHS]
    hosts, devices = (pool(WORLD).call(rows_of, cases, present) for present in (False, True))
    for host, device in zip(hosts, devices, strict=True):
        for (text, _), (averages, debts), (theirs, owed, launched) in zip(cases, host, device, strict=True):
            assert launched, f"{text}: nothing ran on the device"
            for one, other in zip(averages, theirs, strict=True):
                for a, b in zip(one, other, strict=True):
                    assert (a is None) == (b is None)
                    if a is not None:
                        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True, msg=lambda m, t=text: f"{t}: {m}")
            for a, b in zip(debts, owed, strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=0, msg=lambda m, t=text: f"{t}: residual: {m}")
