"""Judges the facts of a machine: pure functions over machine_facts."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from commlayer.doctor.finding import Finding, fail, ok, warn
from commlayer.doctor.machine_facts import Files, Folder, Journal, Processor, Shared, Software, Torch

TESTED_TORCH = "2.13"
"""The version that constraints.txt pins."""
LEAST_TORCH = (2, 6)
TESTED_PYTHON = "3.11"
GIB, MIB = 1 << 30, 1 << 20
FEW_FILES, TOO_FEW_FILES = 1024, 256
"""A server has two sockets per worker. A training process has some dozens, in addition to those of its data."""
SMALL_SHARED = 512 * MIB
"""Containers start with 64 MiB, which is too small for a few batches or for one channel of NCCL."""
JOURNAL_NBYTES = 24
"""Journal bytes per parameter of a server: two slots, each with the residual, the partial sum and the last result."""
SMALL_DISK, NO_DISK = 2 * GIB, 64 * MIB


def software(f: Software) -> Iterator[Finding]:
    versions = f"commlayer {f.commlayer}, control protocol {f.protocol}, wire format {f.wire}, Python {f.python}"
    if f.python.rpartition(".")[0] == TESTED_PYTHON:
        yield ok("version", versions)
    else:
        yield warn("version", versions, f"tested on Python {TESTED_PYTHON} alone: use it where anything is odd")
    if f.native:
        yield ok("core", f"native, with {f.native} code")
    else:
        yield warn("core", "no native core: codecs run on the reference backend, which is slow",
                   "install a C++ compiler, then `pip install --force-reinstall --no-deps commlayer`")


def processor(f: Processor) -> Iterator[Finding]:
    wide = [name for name in ("avx2", "avx512f", "asimd") if name in f.flags]
    seen = f"{f.cores} core{'s' if f.cores != 1 else ''} of {f.architecture}" + (f" with {', '.join(wide)}" if wide else "")
    if f.quota < f.cores:
        yield warn("cpu", f"{seen}, but its control group allows the time of {f.quota:g}",
                   "raise the container's limit (docker run --cpus, or limits.cpu), or codecs are throttled in bursts")
    elif f.cores < 2:
        yield warn("cpu", seen, "give it 2 or more: training, codecs and sockets share this one")
    elif f.architecture in ("x86_64", "AMD64") and "avx2" not in f.flags:
        yield warn("cpu", f"{seen} without AVX2", "codecs run portable code, several times slower: have them run on the GPU")
    else:
        yield ok("cpu", seen)


def folder(f: Folder) -> Iterator[Finding]:
    if f.error:
        yield fail("disk", f"{f.what} {f.path}: {f.error}", "name a folder that this user may write to")
    elif f.free_nbytes < NO_DISK:
        yield fail("disk", f"{f.what} {f.path}: {size(f.free_nbytes)} free", "free some, or name another folder")
    elif f.free_nbytes < SMALL_DISK:
        yield warn("disk", f"{f.what} {f.path}: {size(f.free_nbytes)} free",
                   "a checkpoint holds weights, optimizer and residuals: free some, or name another folder")
    else:
        yield ok("disk", f"{f.what} {f.path}: {size(f.free_nbytes)} free")


def journal(f: Journal, *, required: bool) -> Iterator[Finding]:
    """`required`: a server without space for its journal refuses to serve; otherwise it continues without a journal."""
    path = f.folder.path
    if f.folder.error:
        yield fail("journal", f"{path}: {f.folder.error}", "name a folder that this user may write to")
        return
    if f.held:
        yield fail("journal", f"{path} is in use by a server that runs", "end that one, or name another folder")
    elif f.left:
        yield warn("journal", f"{path} holds the journal of a job, which `commlayer serve` takes up",
                   f"to begin another job, remove it: rm -r {path}")
    free = f.folder.free_nbytes
    room = f"{path}: {size(free)} free, room for some {free / JOURNAL_NBYTES / 1e6:.0f} M parameters"
    if free >= SMALL_DISK:
        yield ok("journal", room)
    elif required and free < NO_DISK:
        yield fail("journal", room, "make room, or set journal_required to false")
    elif required:
        yield warn("journal", room, "make room for more than that: a server without it refuses to serve")
    else:
        yield warn("journal", room, "make room: with too little of it a job goes on without a journal")


def shared(f: Shared) -> Iterator[Finding]:
    if f.error:
        yield warn("shm", f"/dev/shm: {f.error}", "mount a tmpfs there: DataLoader workers and NCCL use it")
    elif f.free_nbytes < SMALL_SHARED:
        yield warn("shm", f"/dev/shm: {size(f.free_nbytes)} free of {size(f.total_nbytes)}",
                   "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm: DataLoader workers and NCCL use it")
    else:
        yield ok("shm", f"/dev/shm: {size(f.free_nbytes)} free of {size(f.total_nbytes)}")


def files(f: Files) -> Iterator[Finding]:
    soft = "any number" if f.soft == resource.RLIM_INFINITY else str(f.soft)
    seen = f"{soft} open files allowed"
    can = f.hard == resource.RLIM_INFINITY or f.hard >= FEW_FILES
    remedy = "ulimit -n 4096" if can else "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=4096"
    if f.soft != resource.RLIM_INFINITY and f.soft < TOO_FEW_FILES:
        yield fail("files", seen, remedy)
    elif f.soft != resource.RLIM_INFINITY and f.soft < FEW_FILES:
        yield warn("files", seen, remedy)
    else:
        yield ok("files", seen)


def torch(f: Torch) -> Iterator[Finding]:
    if not f.torch:
        yield fail("torch", f.error or "not installed", "pip install torch, and see that `python -c 'import torch'` works")
        return
    release = f.torch.partition("+")[0]
    number = tuple(int(part) for part in release.split(".")[:2] if part.isdecimal())
    if number < LEAST_TORCH:
        yield fail("torch", f"{f.torch}", f"commlayer needs {'.'.join(map(str, LEAST_TORCH))} or later: pip install -U torch")
    elif not release.startswith(f"{TESTED_TORCH}."):
        yield warn("torch", f"{f.torch}, untested", f"tested with {TESTED_TORCH}: pip install 'torch=={TESTED_TORCH}.*' where "
                   "anything is odd")
    else:
        yield ok("torch", f"{f.torch}, tested")
    yield from _gpu(f)


def _gpu(f: Torch) -> Iterator[Finding]:
    if f.error:
        yield fail("gpu", f.error, "see that `nvidia-smi` works, and reinstall driver or torch where it does not")
        return
    if not f.gpus:
        if f.driver and not (f.cuda or f.hip):
            yield warn("gpu", f"the system has NVIDIA's driver, but torch {f.torch} is built without CUDA",
                       "install torch with CUDA from https://pytorch.org")
        elif f.driver:
            yield warn("gpu", f"torch with CUDA {f.cuda} finds no GPU, though there is a driver",
                       "see what `nvidia-smi` says: a driver too old for it, no GPU given to the container, or "
                       "CUDA_VISIBLE_DEVICES")
        else:
            yield ok("gpu", "none: this machine trains, codes and serves on the CPU")
        return
    names: dict[str, int] = {}
    for name, nbytes, _ in f.gpus:
        label = f"{name} ({nbytes / GIB:.0f} GiB)"
        names[label] = names.get(label, 0) + 1
    kind = f"ROCm {f.hip}" if f.hip else f"CUDA {f.cuda}"
    seen = f"{', '.join(f'{count} x {name}' for name, count in names.items())}, {kind}"
    unfit = sorted({arch for _, _, arch in f.gpus if f.archs and not _runs(arch, f.archs)})
    if unfit:
        yield fail("gpu", f"{seen}: torch has no code for {', '.join(unfit)}, only {', '.join(f.archs)}",
                   "install a build of torch for this GPU")
    else:
        yield ok("gpu", seen)
    yield ok("nccl", f.nccl) if f.nccl else warn("nccl", "torch is built without it", "ranks of one machine then use Gloo")
    if f.hip:
        return
    extra = f"gpu{f.cuda.partition('.')[0]}"
    want = f"cupy-cuda{f.cuda.partition('.')[0]}x"
    if not f.cupy:
        yield warn("cupy", "not installed: codecs run on the CPU", f"pip install 'commlayer[{extra}]'")
    elif f.cupy_from.startswith("cupy-cuda") and f.cupy_from != want:
        yield warn("cupy", f"{f.cupy_from} {f.cupy}, but torch has CUDA {f.cuda}",
                   f"pip uninstall {f.cupy_from}, then pip install 'commlayer[{extra}]'")
    else:
        yield ok("cupy", f"{f.cupy_from} {f.cupy}")


def _runs(arch: str, archs: tuple[str, ...]) -> bool:
    """Whether the GPU runs code of its major version, or PTX of an earlier one, which the driver compiles at load time."""
    number = int(arch.removeprefix("sm_"))
    have = [(kind, int(text)) for kind, _, text in (a.partition("_") for a in archs) if text.isdecimal()]
    return any(n <= number and (kind == "compute" or n // 10 == number // 10) for kind, n in have)


def size(nbytes: float) -> str:
    """
    >>> size(64 << 20), size(3.5 * (1 << 30))
    ('64 MiB', '3.5 GiB')
    """
    return f"{nbytes / MIB:.0f} MiB" if nbytes < GIB else f"{nbytes / GIB:.1f} GiB"
