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
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import structs

from commlayer import native
from commlayer.cluster import messages
from commlayer.cluster.server_journal import LOCK, NAME
from commlayer.doctor.report import Finding, fail, ok, warn
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


def check_software(f: Software) -> Iterator[Finding]:
    versions = f"commlayer {f.commlayer}, control protocol {f.protocol}, wire format {f.wire}, Python {f.python}"
    if f.python.rpartition(".")[0] == TESTED_PYTHON:
        yield ok("version", versions)
    else:
        yield warn("version", versions, f"tested with Python {TESTED_PYTHON} only: use it if anything fails")
    if f.native:
        yield ok("core", f"native, with {f.native} code")
    else:
        yield warn("core", "no native core: codecs run on the fallback in numpy, which is slow",
                   "install a C++ compiler, then `pip install --force-reinstall --no-deps commlayer`")


def check_processor(f: Processor) -> Iterator[Finding]:
    wide = [name for name in ("avx2", "avx512f", "asimd") if name in f.flags]
    line = f"{f.cores} core{'s' if f.cores != 1 else ''} of {f.architecture}" + (f" with {', '.join(wide)}" if wide else "")
    if f.quota < f.cores:
        yield warn("cpu", f"{line}, but its control group allows the time of {f.quota:g}",
                   "raise the container's limit (docker run --cpus, or limits.cpu), or codecs are throttled in bursts")
    elif f.cores < 2:
        yield warn("cpu", line, "give it 2 or more cores: training, codecs and sockets share this one")
    elif f.architecture in ("x86_64", "AMD64") and "avx2" not in f.flags:
        yield warn("cpu", f"{line} without AVX2", "codecs run portable code, several times slower: run them on the GPU")
    else:
        yield ok("cpu", line)


def check_folder(f: Folder) -> Iterator[Finding]:
    if f.error:
        yield fail("disk", f"{f.what} {f.path}: {f.error}", "choose a folder that this user can write to")
    elif f.free_nbytes < NO_DISK:
        yield fail("disk", f"{f.what} {f.path}: {size(f.free_nbytes)} free", "free space, or choose another folder")
    elif f.free_nbytes < SMALL_DISK:
        yield warn("disk", f"{f.what} {f.path}: {size(f.free_nbytes)} free",
                   "a checkpoint holds weights, optimizer and residuals: free space, or choose another folder")
    else:
        yield ok("disk", f"{f.what} {f.path}: {size(f.free_nbytes)} free")


def check_journal(f: JournalFacts, *, required: bool) -> Iterator[Finding]:
    """`required`: a server without space for its journal refuses to serve; otherwise it continues without a journal."""
    path = f.folder.path
    if f.folder.error:
        yield fail("journal", f"{path}: {f.folder.error}", "choose a folder that this user can write to")
        return
    if f.held:
        yield fail("journal", f"{path} is in use by a running server", "stop that server, or choose another folder")
    elif f.left:
        yield warn("journal", f"{path} holds the journal of an earlier job, which `commlayer serve` resumes",
                   f"to start another job, delete it: rm -r {path}")
    free = f.folder.free_nbytes
    room = f"{path}: {size(free)} free, enough for about {free / JOURNAL_NBYTES / 1e6:.0f} M parameters"
    if free >= SMALL_DISK:
        yield ok("journal", room)
    elif required and free < NO_DISK:
        yield fail("journal", room, "free space, or set journal_required to false")
    elif required:
        yield warn("journal", room, "free space: without it a server refuses to serve a larger model")
    else:
        yield warn("journal", room, "free space: with too little, a job runs without a journal")


def check_shared_memory(f: Shared) -> Iterator[Finding]:
    if f.error:
        yield warn("shm", f"/dev/shm: {f.error}", "mount a tmpfs there: DataLoader workers and NCCL use it")
    elif f.free_nbytes < SMALL_SHARED:
        yield warn("shm", f"/dev/shm: {size(f.free_nbytes)} free of {size(f.total_nbytes)}",
                   "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm: DataLoader workers and NCCL use it")
    else:
        yield ok("shm", f"/dev/shm: {size(f.free_nbytes)} free of {size(f.total_nbytes)}")


def check_file_limits(f: Files) -> Iterator[Finding]:
    soft = "any number" if f.soft == resource.RLIM_INFINITY else str(f.soft)
    line = f"{soft} open files allowed"
    can = f.hard == resource.RLIM_INFINITY or f.hard >= FEW_FILES
    remedy = "ulimit -n 4096" if can else "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=4096"
    if f.soft != resource.RLIM_INFINITY and f.soft < TOO_FEW_FILES:
        yield fail("files", line, remedy)
    elif f.soft != resource.RLIM_INFINITY and f.soft < FEW_FILES:
        yield warn("files", line, remedy)
    else:
        yield ok("files", line)


def check_torch(f: Torch) -> Iterator[Finding]:
    if not f.torch:
        yield fail("torch", f.error or "not installed", "pip install torch, then check `python -c 'import torch'`")
        return
    release = f.torch.partition("+")[0]
    number = tuple(int(part) for part in release.split(".")[:2] if part.isdecimal())
    if number < LEAST_TORCH:
        yield fail("torch", f"{f.torch}", f"commlayer needs {'.'.join(map(str, LEAST_TORCH))} or later: pip install -U torch")
    elif not release.startswith(f"{TESTED_TORCH}."):
        yield warn("torch", f"{f.torch}, untested", f"tested with {TESTED_TORCH}: pip install 'torch=={TESTED_TORCH}.*' if "
                   "anything fails")
    else:
        yield ok("torch", f"{f.torch}, tested")
    yield from _gpu(f)


def _gpu(f: Torch) -> Iterator[Finding]:
    if f.error:
        yield fail("gpu", f.error, "check `nvidia-smi`; reinstall the driver or torch if it fails")
        return
    if not f.gpus:
        if f.driver and not (f.cuda or f.hip):
            yield warn("gpu", f"the system has NVIDIA's driver, but torch {f.torch} is built without CUDA",
                       "install torch with CUDA from https://pytorch.org")
        elif f.driver:
            yield warn("gpu", f"torch with CUDA {f.cuda} finds no GPU, but a driver is loaded",
                       "check `nvidia-smi`: the driver may be too old, the container may have no GPU, or "
                       "CUDA_VISIBLE_DEVICES may hide it")
        else:
            yield ok("gpu", "none: training, codecs and servers use the CPU")
        return
    names: dict[str, int] = {}
    for name, nbytes, _ in f.gpus:
        label = f"{name} ({nbytes / GIB:.0f} GiB)"
        names[label] = names.get(label, 0) + 1
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


CHILD_S = 12.0
"""Limit of a process that loads torch and queries its GPUs: a broken driver may hang the process."""
DRIVER = Path("/proc/driver/nvidia/version")
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


class Software(Record, frozen=True):
    """`native`: the instruction set that the core uses; empty without a core."""

    commlayer: str
    protocol: int
    wire: int
    python: str
    native: str


class Processor(Record, frozen=True):
    """`cores`: cores that this process may use. `quota`: the CPU limit of its control group, infinite for none."""

    cores: int
    quota: float = math.inf
    architecture: str = "x86_64"
    flags: tuple[str, ...] = ()


class Folder(Record, frozen=True):
    """A folder for output. `error`: why it cannot be written."""

    what: str
    path: str
    free_nbytes: int = 0
    error: str = ""


class JournalFacts(Record, frozen=True):
    """A server's folder for its journal. `held`: a running server uses it. `left`: it holds a journal of an earlier run."""

    folder: Folder
    held: bool = False
    left: bool = False


class Shared(Record, frozen=True):
    """/dev/shm: DataLoader workers pass batches through it, and NCCL its traffic inside a machine."""

    free_nbytes: int = 0
    total_nbytes: int = 0
    error: str = ""


class Files(Record, frozen=True):
    """Open files allowed per process: the soft and the hard limit."""

    soft: int
    hard: int


class Torch(Record, frozen=True):
    """Facts from a separate process that loads torch. `driver`: whether the system has NVIDIA's driver."""

    torch: str = ""
    cuda: str = ""
    hip: str = ""
    gpus: tuple[tuple[str, int, str], ...] = ()
    archs: tuple[str, ...] = ()
    nccl: str = ""
    cupy: str = ""
    cupy_from: str = ""
    driver: bool = False
    error: str = ""


def read_software() -> Software:
    return Software(messages.version(), messages.PROTOCOL, framing.VERSION, platform.python_version(),
                    native.core.isa() if native.core is not None else "")


def read_processor(cgroup: Path = Path("/sys/fs/cgroup"), info: Path = Path("/proc/cpuinfo")) -> Processor:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    line = next((row for row in _text(info).splitlines() if row.startswith(("flags", "Features"))), "")
    return Processor(cores, _quota(cgroup), platform.machine(), tuple(line.partition(":")[2].split()))


def _quota(cgroup: Path) -> float:
    """The CPU limit of control groups version 2, else of version 1."""
    most, _, period = _text(cgroup / "cpu.max").partition(" ")
    if not most:
        most, period = _text(cgroup / "cpu/cpu.cfs_quota_us"), _text(cgroup / "cpu/cpu.cfs_period_us")
    most, period = most.strip(), period.strip()
    return int(most) / int(period) if most.isdecimal() and period.isdecimal() and int(period) else math.inf


def read_folder(what: str, path: Path) -> Folder:
    """Facts of the folder, or of the existing parent in which it would be made."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        if not place.is_dir():
            return Folder(what, str(path), error="it is a file")
        if not os.access(place, os.W_OK | os.X_OK):
            return Folder(what, str(path), error="it may not be written to")
        disk = os.statvfs(place)
    except OSError as error:
        return Folder(what, str(path), error=error.strerror or str(error))
    return Folder(what, str(path), disk.f_bavail * disk.f_frsize)


def read_journal(path: Path) -> JournalFacts:
    place, is_locked = read_folder("journal in", path), False
    try:
        with (path / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a server that starts at this moment tries again
    except BlockingIOError:
        is_locked = True
    except FileNotFoundError:
        pass  # no server has used this folder
    except OSError as error:
        place = structs.replace(place, error=place.error or error.strerror or str(error))
    return JournalFacts(place, is_locked, (path / NAME).exists())


def read_shared_memory(path: Path = Path("/dev/shm")) -> Shared:
    try:
        disk = os.statvfs(path)
    except OSError as error:
        return Shared(error=error.strerror or str(error))
    return Shared(disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize)


def read_file_limits() -> Files:
    return Files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def read_torch(limit_s: float = CHILD_S, program: str = LOOK_AT_TORCH) -> Torch:
    """Facts from a separate process. After `limit_s` the process is ended and an error is returned."""
    driver = DRIVER.exists()
    try:
        process = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=limit_s,
                                 stdin=subprocess.DEVNULL)
        facts = json.loads(process.stdout.splitlines()[-1])
        return msgspec.convert(facts | {"driver": driver}, Torch)
    except subprocess.TimeoutExpired:
        return Torch(driver=driver, error=f"torch and its GPUs did not answer within {limit_s:g} s")
    except (IndexError, ValueError, RecordError):
        last = (process.stderr.strip().splitlines() or ["no output"])[-1]
        return Torch(driver=driver, error=f"a process that loads torch ended with exit code {process.returncode}: {last}")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
