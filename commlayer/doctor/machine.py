"""Checks a machine: versions, cores, shared memory, open files, disks, torch and GPUs."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from commlayer import native
from commlayer.cluster import messages
from commlayer.cluster.server_journal import LOCK, NAME
from commlayer.doctor.report import Finding, at_least, fail, ok, warn
from commlayer.errors import RecordError
from commlayer.records import Record
from commlayer.transport import framing

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
OTHER_FOLDER = "choose a folder that this user can write to"


def own_version() -> str:
    return f"commlayer {messages.version()} (control protocol {messages.PROTOCOL}, wire format {framing.VERSION})"


def check_versions(python: str, isa: str) -> Iterator[Finding]:
    """`isa`: the instruction set of the native core; empty without a core."""
    versions = f"{own_version()}, Python {python}"
    if python.rpartition(".")[0] == TESTED_PYTHON:
        yield ok("version", versions)
    else:
        yield warn("version", versions, f"tested with Python {TESTED_PYTHON} only: use it if anything fails")
    if isa:
        yield ok("core", f"native, with {isa} code")
    else:
        yield warn("core", "no native core: codecs run on the fallback in numpy, which is slow",
                   "install a C++ compiler, then `pip install --force-reinstall --no-deps commlayer`")


def own_versions() -> tuple[str, str]:
    return platform.python_version(), native.core.isa() if native.core is not None else ""


def check_processor(cores: int, limit: float, architecture: str, flags: Collection[str]) -> Iterator[Finding]:
    """`limit`: cores that the control group allows."""
    wide = [name for name in ("avx2", "avx512f", "asimd") if name in flags]
    line = f"{cores} core{'s' if cores != 1 else ''} of {architecture}" + (f" with {', '.join(wide)}" if wide else "")
    if limit < cores:
        yield warn("cpu", f"{line}, but its control group allows the time of {limit:g}",
                   "raise the container's limit (docker run --cpus, or limits.cpu), or codecs are throttled in bursts")
    elif architecture in ("x86_64", "AMD64") and "avx2" not in flags and cores > 1:
        yield warn("cpu", f"{line} without AVX2", "codecs run portable code, several times slower: run them on the GPU")
    else:
        yield at_least("cpu", line, "give it 2 or more cores: training, codecs and sockets share this one", cores, 2,
                       cores=cores)


def own_processor() -> tuple[int, float, str, tuple[str, ...]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    line = next((row for row in _text(Path("/proc/cpuinfo")).splitlines() if row.startswith(("flags", "Features"))), "")
    return cores, core_limit(), platform.machine(), tuple(line.partition(":")[2].split())


def core_limit(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that control groups of version 2, else of version 1, allow; infinite for no limit."""
    most, _, period = _text(cgroup / "cpu.max").partition(" ")
    if not most:
        most, period = _text(cgroup / "cpu/cpu.cfs_quota_us"), _text(cgroup / "cpu/cpu.cfs_period_us")
    most, period = most.strip(), period.strip()
    return int(most) / int(period) if most.isdecimal() and period.isdecimal() and int(period) else math.inf


def check_file_limits(soft: int, hard: int) -> Iterator[Finding]:
    most = {resource.RLIM_INFINITY: math.inf}
    can = most.get(hard, hard) >= FEW_FILES
    remedy = "ulimit -n 4096" if can else "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=4096"
    yield at_least("files", f"{'any number' if soft in most else soft} open files allowed", remedy, most.get(soft, soft),
                   FEW_FILES, TOO_FEW_FILES)


def own_file_limits() -> tuple[int, int]:
    """The soft and the hard limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def check_shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """DataLoader workers pass batches through it, and NCCL its traffic inside a machine."""
    try:
        disk = os.statvfs(path)
    except OSError as error:
        yield warn("shm", f"{path}: {error.strerror}", "mount a tmpfs there: DataLoader workers and NCCL use it")
        return
    free = disk.f_bavail * disk.f_frsize
    yield at_least("shm", f"{path}: {size(free)} free of {size(disk.f_blocks * disk.f_frsize)}",
                   "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm: DataLoader workers and NCCL use it", free,
                   SMALL_SHARED, free_nbytes=free)


def check_folder(what: str, path: Path, free: int | str) -> Iterator[Finding]:
    """`free`: bytes, or why the folder cannot be written."""
    if isinstance(free, str):
        yield fail("disk", f"{what} {path}: {free}", OTHER_FOLDER)
    else:
        yield at_least("disk", f"{what} {path}: {size(free)} free",
                       "a checkpoint holds weights, optimizer and residuals: free space, or choose another folder", free,
                       SMALL_DISK, NO_DISK, free_nbytes=free)


def free_space(path: Path) -> int | str:
    """Free bytes in the folder, or in the existing parent in which it would be made; or why it cannot be written."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        if not place.is_dir():
            return "it is a file"
        if not os.access(place, os.W_OK | os.X_OK):
            return "it may not be written to"
        disk = os.statvfs(place)
    except OSError as error:
        return error.strerror or str(error)
    return disk.f_bavail * disk.f_frsize


def check_journal(path: Path, free: int | str, in_use: bool, left: bool, *, required: bool) -> Iterator[Finding]:
    """`left`: it holds the journal of an earlier job. `required`: a server without space for its journal refuses to serve."""
    if isinstance(free, str):
        yield fail("journal", f"{path}: {free}", OTHER_FOLDER)
        return
    if in_use:
        yield fail("journal", f"{path} is in use by a running server", "stop that server, or choose another folder")
    elif left:
        yield warn("journal", f"{path} holds the journal of an earlier job, which `commlayer serve` resumes",
                   f"to start another job, delete it: rm -r {path}")
    remedy = ("free space: with too little, a job runs without a journal" if not required else
              "free space: without it a server refuses to serve a larger model, unless journal_required is false")
    yield at_least("journal", f"{path}: {size(free)} free, enough for about {free / JOURNAL_NBYTES / 1e6:.0f} M parameters",
                   remedy, free, SMALL_DISK, NO_DISK if required else 0, free_nbytes=free)


def own_journal(path: Path) -> tuple[int | str, bool, bool]:
    """(free space or an error, whether a running server uses it, whether it holds a journal)."""
    free, in_use = free_space(path), False
    try:
        with (path / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a server that starts at this moment tries again
    except BlockingIOError:
        in_use = True
    except FileNotFoundError:
        pass  # no server has used this folder
    except OSError as error:
        free = free if isinstance(free, str) else error.strerror or str(error)
    return free, in_use, (path / NAME).exists()


class Torch(Record, frozen=True):
    """Facts from a separate process that loads torch. `driver`: whether the system has NVIDIA's driver."""

    torch: str = ""
    cuda: str = ""
    hip: str = ""
    gpus: tuple[tuple[str, int, str], ...] = ()
    """Name, bytes and architecture."""
    archs: tuple[str, ...] = ()
    nccl: str = ""
    cupy: str = ""
    cupy_from: str = ""
    driver: bool = False
    error: str = ""


def check_torch(f: Torch) -> Iterator[Finding]:
    if not f.torch:
        yield fail("torch", f.error or "not installed", "pip install torch, then check `python -c 'import torch'`")
        return
    release = f.torch.partition("+")[0]
    if tuple(int(part) for part in release.split(".")[:2] if part.isdecimal()) < LEAST_TORCH:
        yield fail("torch", f.torch, f"commlayer needs {'.'.join(map(str, LEAST_TORCH))} or later: pip install -U torch")
    elif not release.startswith(f"{TESTED_TORCH}."):
        yield warn("torch", f"{f.torch}, untested",
                   f"tested with {TESTED_TORCH}: pip install 'torch=={TESTED_TORCH}.*' if anything fails")
    else:
        yield ok("torch", f"{f.torch}, tested")
    if f.error:
        yield fail("gpu", f.error, "check `nvidia-smi`; reinstall the driver or torch if it fails")
    elif f.gpus:
        yield from _gpus(f)
    elif not f.driver:
        yield ok("gpu", "none: training, codecs and servers use the CPU")
    elif f.cuda or f.hip:
        yield warn("gpu", f"torch with CUDA {f.cuda} finds no GPU, but a driver is loaded", "check `nvidia-smi`: the driver "
                   "may be too old, the container may have no GPU, or CUDA_VISIBLE_DEVICES may hide it")
    else:
        yield warn("gpu", f"the system has NVIDIA's driver, but torch {f.torch} is built without CUDA",
                   "install torch with CUDA from https://pytorch.org")


def _gpus(f: Torch) -> Iterator[Finding]:
    names = Counter(f"{name} ({nbytes / GIB:.0f} GiB)" for name, nbytes, _ in f.gpus)
    kind = f"ROCm {f.hip}" if f.hip else f"CUDA {f.cuda}"
    line = f"{', '.join(f'{count} x {name}' for name, count in names.items())}, {kind}"
    unfit = sorted({arch for _, _, arch in f.gpus if f.archs and not _runs(arch, f.archs)})
    if unfit:
        yield fail("gpu", f"{line}: torch has no code for {', '.join(unfit)}, only {', '.join(f.archs)}",
                   "install a build of torch for this GPU")
    else:
        yield ok("gpu", line)
    yield ok("nccl", f.nccl) if f.nccl else warn("nccl", "torch is built without it", "ranks on one machine use Gloo")
    if f.hip:
        return
    major = f.cuda.partition(".")[0]
    if not f.cupy:
        yield warn("cupy", "not installed: codecs run on the CPU", f"pip install 'commlayer[gpu{major}]'")
    elif f.cupy_from.startswith("cupy-cuda") and f.cupy_from != f"cupy-cuda{major}x":
        yield warn("cupy", f"{f.cupy_from} {f.cupy}, but torch has CUDA {f.cuda}",
                   f"pip uninstall {f.cupy_from}, then pip install 'commlayer[gpu{major}]'")
    else:
        yield ok("cupy", f"{f.cupy_from} {f.cupy}")


def _runs(arch: str, archs: Sequence[str]) -> bool:
    """Whether the GPU runs code of its major version, or PTX of an earlier one, which the driver compiles at load time."""
    number = int(arch.removeprefix("sm_"))
    have = [(kind, int(text)) for kind, _, text in (a.partition("_") for a in archs) if text.isdecimal()]
    return any(n <= number and (kind == "compute" or n // 10 == number // 10) for kind, n in have)


CHILD_S = 12.0
"""Limit of a process that loads torch and queries its GPUs: a broken driver may hang the process."""
LOOK_AT_TORCH = """
import importlib.metadata, json
facts = {}
for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy"):
    try:
        facts["cupy"], facts["cupy_from"] = importlib.metadata.version(name), name
        break
    except importlib.metadata.PackageNotFoundError:
        pass
try:
    import torch
    facts |= {"torch": torch.__version__, "cuda": torch.version.cuda or "", "hip": torch.version.hip or ""}
    if torch.cuda.is_available():
        facts["archs"] = torch.cuda.get_arch_list()
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            facts.setdefault("gpus", []).append([p.name, p.total_memory, f"sm_{p.major}{p.minor}"])
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    facts["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(facts))
"""


def own_torch(limit_s: float = CHILD_S, program: str = LOOK_AT_TORCH) -> Torch:
    """Facts from a separate process. After `limit_s` the process is ended and an error is returned."""
    driver = Path("/proc/driver/nvidia/version").exists()
    try:
        process = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=limit_s,
                                 stdin=subprocess.DEVNULL)
        return msgspec.convert(json.loads(process.stdout.splitlines()[-1]) | {"driver": driver}, Torch)
    except subprocess.TimeoutExpired:
        return Torch(driver=driver, error=f"torch and its GPUs did not answer within {limit_s:g} s")
    except (IndexError, ValueError, RecordError):
        last = (process.stderr.strip().splitlines() or ["no output"])[-1]
        return Torch(driver=driver, error=f"a process that loads torch ended with exit code {process.returncode}: {last}")


def size(nbytes: float) -> str:
    """
    >>> size(64 << 20), size(3.5 * (1 << 30))
    ('64 MiB', '3.5 GiB')
    """
    return f"{nbytes / MIB:.0f} MiB" if nbytes < GIB else f"{nbytes / GIB:.1f} GiB"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
