"""Gathers what a machine has: cores, memory to share, files, disks, GPUs, versions. Judges nothing; knows no network."""

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
"""For a process that loads torch and asks for its GPUs: a broken driver may hang it."""
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
    """`native`: which instructions the core was built for and found; empty without a core."""

    commlayer: str
    protocol: int
    wire: int
    python: str
    native: str


class Processor(Record, frozen=True):
    """`cores` may be used by this process; `quota` is what its control group allows of them, infinite for no limit."""

    cores: int
    quota: float = math.inf
    architecture: str = "x86_64"
    flags: tuple[str, ...] = ()


class Folder(Record, frozen=True):
    """A folder that something is to be written to. `error`: why it cannot be."""

    what: str
    path: str
    free_nbytes: int = 0
    error: str = ""


class Journal(Record, frozen=True):
    """A server's folder for what outlasts it. `held`: by a server that runs. `left`: what one of a job has left lies there."""

    folder: Folder
    held: bool = False
    left: bool = False


class Shared(Record, frozen=True):
    """/dev/shm: DataLoader workers hand batches over there, and NCCL what it sends inside a machine."""

    free_nbytes: int = 0
    total_nbytes: int = 0
    error: str = ""


class Files(Record, frozen=True):
    """How many a process may have open: now, and if it asks."""

    soft: int
    hard: int


class Torch(Record, frozen=True):
    """What a process of its own found out. `driver`: that the system has one for NVIDIA's."""

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
    """Of the second version of control groups, then of the first."""
    most, _, period = _text(cgroup / "cpu.max").partition(" ")
    if not most:
        most, period = _text(cgroup / "cpu/cpu.cfs_quota_us"), _text(cgroup / "cpu/cpu.cfs_period_us")
    most, period = most.strip(), period.strip()
    return int(most) / int(period) if most.isdecimal() and period.isdecimal() and int(period) else math.inf


def folder(what: str, path: Path) -> Folder:
    """The folder itself, or the one that it would be made in."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        if not place.is_dir():
            return Folder(what, str(path), error="it is a file")
        if not os.access(place, os.W_OK | os.X_OK):
            return Folder(what, str(path), error="it may not be written to")
        found = os.statvfs(place)
    except OSError as error:
        return Folder(what, str(path), error=error.strerror or str(error))
    return Folder(what, str(path), found.f_bavail * found.f_frsize)


def journal(path: Path) -> Journal:
    found, held = folder("journal in", path), False
    try:
        with (path / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a server that starts meanwhile tries again
    except BlockingIOError:
        held = True
    except FileNotFoundError:
        pass  # nobody has served from there
    except OSError as error:
        found = structs.replace(found, error=found.error or error.strerror or str(error))
    return Journal(found, held, (path / NAME).exists())


def shared(path: Path = Path("/dev/shm")) -> Shared:
    try:
        found = os.statvfs(path)
    except OSError as error:
        return Shared(error=error.strerror or str(error))
    return Shared(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def files() -> Files:
    return Files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def torch(limit_s: float = CHILD_S, program: str = LOOK_AT_TORCH) -> Torch:
    """What is not known after that time is an error; the process is ended then."""
    driver = DRIVER.exists()
    try:
        done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=limit_s,
                              stdin=subprocess.DEVNULL)
        told = json.loads(done.stdout.splitlines()[-1])
        return msgspec.convert(told | {"driver": driver}, Torch)
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
