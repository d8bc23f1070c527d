"""Gathers facts of a machine: cores, shared memory, open files, disks, GPUs, versions."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
from msgspec import structs

from commlayer import native
from commlayer.cluster import messages
from commlayer.cluster.journal import LOCK, NAME
from commlayer.errors import RecordError
from commlayer.records import Record
from commlayer.transport import framing

CHILD_S = 12.0
"""Limit of a process that loads torch and queries its GPUs: a broken driver may hang the process."""
DRIVER = Path("/proc/driver/nvidia/version")
LOOK_AT_TORCH = """
import importlib.metadata, json
told = {}
for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy"):
    try:
        told["cupy"], told["cupy_from"] = importlib.metadata.version(name), name
        break
    except importlib.metadata.PackageNotFoundError:
        pass
try:
    import torch
    told |= {"torch": torch.__version__, "cuda": torch.version.cuda or "", "hip": torch.version.hip or ""}
    if torch.cuda.is_available():
        told["archs"] = torch.cuda.get_arch_list()
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            told.setdefault("gpus", []).append([p.name, p.total_memory, f"sm_{p.major}{p.minor}"])
        told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    told["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(told))
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


class Journal(Record, frozen=True):
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


def software() -> Software:
    return Software(messages.version(), messages.PROTOCOL, framing.VERSION, platform.python_version(),
                    native.core.isa() if native.core is not None else "")


def processor(cgroup: Path = Path("/sys/fs/cgroup"), info: Path = Path("/proc/cpuinfo")) -> Processor:
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


def folder(what: str, path: Path) -> Folder:
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


def journal(path: Path) -> Journal:
    place, held = folder("journal in", path), False
    try:
        with (path / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a server that starts at this moment tries again
    except BlockingIOError:
        held = True
    except FileNotFoundError:
        pass  # no server has used this folder
    except OSError as error:
        place = structs.replace(place, error=place.error or error.strerror or str(error))
    return Journal(place, held, (path / NAME).exists())


def shared(path: Path = Path("/dev/shm")) -> Shared:
    try:
        disk = os.statvfs(path)
    except OSError as error:
        return Shared(error=error.strerror or str(error))
    return Shared(disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize)


def files() -> Files:
    return Files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def torch(limit_s: float = CHILD_S, program: str = LOOK_AT_TORCH) -> Torch:
    """Facts from a separate process. After `limit_s` the process is ended and an error is returned."""
    driver = DRIVER.exists()
    try:
        done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=limit_s,
                              stdin=subprocess.DEVNULL)
        facts = json.loads(done.stdout.splitlines()[-1])
        return msgspec.convert(facts | {"driver": driver}, Torch)
    except subprocess.TimeoutExpired:
        return Torch(driver=driver, error=f"torch and its GPUs did not answer within {limit_s:g} s")
    except (IndexError, ValueError, RecordError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Torch(driver=driver, error=f"a process that loads torch ended with exit code {done.returncode}: {last}")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
