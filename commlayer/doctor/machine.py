"""Checks a machine: versions, cores, limits, disks, keys, the plan file, torch and GPUs."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import resource
import stat
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from commlayer import last_run, planner, records
from commlayer.cluster.calls import messages
from commlayer.config import Config, host_port, is_loopback, split_port
from commlayer.doctor.findings import Finding, fail, failure_from_error, judge, ok, warn
from commlayer.errors import RecordError
from commlayer.plan_file import plan_in
from commlayer.records import Plan, Record, complete
from commlayer.transport import framing
from commlayer.transport.keys.key_folder import KEY, TOKEN, Keys

TESTED_TORCH, LEAST_TORCH = "2.13", (2, 6)
"""Version of torch in constraints.txt, with which commlayer is tested, and the oldest supported one."""
TESTED_PYTHON = "3.11"
GIB, MIB = 1 << 30, 1 << 20
FEW_FILES, TOO_FEW_FILES = 1024, 256
"""Limits of open files below which a check warns, and fails. A server has two sockets per worker. A training process needs some
dozens of files in addition to those of its data."""
SMALL_SHARED = 512 * MIB
"""Bytes of shared memory below which a check warns. Containers start with 64 MiB, too little for a few batches or one NCCL
channel."""
JOURNAL_NBYTES = 24
"""Journal bytes per parameter of a server: two slots, each with the residual, the partial sum and the last result."""
SMALL_DISK, NO_DISK = 2 * GIB, 64 * MIB
SOON_S = 30 * 86400.0
"""Seconds of remaining validity below which a check warns: a run may take weeks, and after its certificate expires a node
cannot reconnect."""
CA_KEY = "ca.key"


def own_version() -> str:
    return f"commlayer {messages.version()} (control protocol {messages.PROTOCOL}, wire format {framing.VERSION})"


def check_versions(python: str, isa: str) -> Iterator[Finding]:
    """Checks versions. `isa`: the instruction set of the native core; empty if the core is not installed."""
    yield judge("version", f"{own_version()}, Python {python}",
                f"tested with Python {TESTED_PYTHON} only: use it if anything fails",
                doubtful=python.rpartition(".")[0] != TESTED_PYTHON)
    yield judge("core", f"native, with {isa} code" if isa else "no native core: codecs run in numpy, which is slow",
                "install a C++ compiler, then `pip install --force-reinstall --no-deps commlayer`", doubtful=not isa)


def check_processor(cores: int, limit: float) -> Finding:
    """Checks the number of CPU cores. `limit`: number of cores that the control group allows."""
    line = f"{cores} core{'s' if cores != 1 else ''}"
    if limit < cores:
        return warn("cpu", f"{line}, but the control group allows only {limit:g} cores' time", "raise the container's limit "
                    "(docker run --cpus, or limits.cpu), or codecs are throttled in bursts", cores=cores)
    return judge("cpu", line, "provide 2 or more cores: training, codecs and sockets share this one", doubtful=cores < 2,
                 cores=cores)


def check_last_runs(folder: Path | None) -> Iterator[Finding]:
    """Says what the next run of a job would start with."""
    if files := last_run.list_remembered(folder):
        days = last_run.age(files[0]) / 86400
        yield ok("last runs", f"{folder} has plan and link of {len(files)} job{'s' if len(files) > 1 else ''}, the latest "
                 f"{days:.0f} days old; `commlayer doctor --forget` deletes them", jobs=len(files))


def core_limit(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Number of cores that the control group allows; infinite without a limit."""
    try:
        most, period = (cgroup / "cpu.max").read_text().split()
        return int(most) / int(period)
    except (OSError, ValueError):
        return math.inf


def check_file_limits(soft: float, hard: float) -> Finding:
    """Checks the limits of open files. `soft`, `hard`: the process limits; -1 for no limit."""
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    remedy = ("ulimit -n 4096" if hard >= FEW_FILES else
              "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=4096")
    return judge("files", f"{'any number' if soft == math.inf else soft} open files allowed", remedy,
                 failed=soft < TOO_FEW_FILES, doubtful=soft < FEW_FILES)


def check_shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Checks shared memory: DataLoader workers pass batches in it, and NCCL uses it inside a machine."""
    free = free_space(path) if path.exists() else "no such folder"
    seen = f"{path}: {free}" if isinstance(free, str) else f"{path}: {format_nbytes(free)} free"
    return judge("shm", seen, "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm: DataLoader workers and NCCL use "
                 "it", doubtful=isinstance(free, str) or free < SMALL_SHARED)


def check_folder(what: str, path: Path, free: int | str) -> Finding:
    """Checks the disk space of a folder. `free`: free bytes, or the reason why the folder cannot be written."""
    if isinstance(free, str):
        return fail("disk", f"{what} {path}: {free}", "choose a folder that this user can write to")
    return judge("disk", f"{what} {path}: {format_nbytes(free)} free", "free space, or choose another folder",
                 failed=free < NO_DISK,
                 doubtful=free < SMALL_DISK)


def free_space(path: Path) -> int | str:
    """Free bytes in the folder, or in the existing parent in which the folder would be created; or the reason why it cannot be
    written."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        if not place.is_dir():
            return "it is a file"
        if not os.access(place, os.W_OK | os.X_OK):
            return "no permission to write"
        disk = os.statvfs(place)
    except OSError as error:
        return error.strerror or str(error)
    return disk.f_bavail * disk.f_frsize


def check_journal(path: Path, free: int | str, *, present: bool, required: bool) -> Iterator[Finding]:
    """Checks the journal folder. `present`: True if it contains the journal of an earlier job. `required`: True if a server
    without space for its journal refuses to run."""
    if isinstance(free, str):
        yield fail("journal", f"{path}: {free}", "choose a folder that this user can write to")
        return
    if present:
        yield warn("journal", f"{path} contains the journal of an earlier job, which `commlayer serve` resumes",
                   f"to start another job, delete it: rm -r {path}")
    yield judge("journal",
                f"{path}: {format_nbytes(free)} free, enough for about {free / JOURNAL_NBYTES / 1e6:.0f} M parameters",
                "free space: without it a server refuses to serve a larger model, unless journal_required is false" if required
                else "free space: with too little, a job runs without a journal", failed=required and free < NO_DISK,
                doubtful=free < SMALL_DISK)


def check_keys(folder: Path, now_s: float, *, serves: bool) -> Iterator[Finding]:
    """Checks the key folder. `now_s`: seconds since 1970. `serves`: True if other nodes connect to this node."""
    from cryptography import x509

    try:
        mine = Keys(folder)
    except (RecordError, OSError, ValueError) as error:
        yield failure_from_error("keys", str(error).removeprefix("keys: "))
        return
    name, revoked = mine.own.name, mine.revoked()
    again = f"commlayer keys add {name} --again"
    if mine.own.serial in revoked:
        yield fail("keys", f"the certificate of {name} is revoked", f"create a new one: {again}")
        return
    certificates = [x509.load_pem_x509_certificate(data) for data in (mine.certificate, mine.ca)]
    ends = [one.not_valid_after_utc.timestamp() - now_s for one in certificates]
    yield judge("keys", f"{name} in {folder}, valid for {min(ends) / 86400:.0f} days; list {mine.list_number}, {len(revoked)} "
                "revoked", again if ends[0] <= ends[1] else "create a new CA: commlayer keys init --dir",
                doubtful=min(ends) < SOON_S)
    if readable := [file for file in (KEY, TOKEN, CA_KEY) if _is_open(folder / file)]:
        yield warn("keys", f"other users of this machine can read {', '.join(readable)}",
                   f"chmod 600 {' '.join(f'{folder}/{file}' for file in readable)}")
    if (folder / CA_KEY).exists():
        yield warn("keys", "the CA's private key is in this folder; its owner can admit any node",
                   "keep it on one machine: copy only the folder nodes/NAME")
    if mine.own.dials_only and serves:
        yield fail("keys", f"{name} was made with --dials-only, but other nodes must connect to it",
                   f"{again}, without --dials-only; or --join a server elsewhere")


def _is_open(path: Path) -> bool:
    return path.exists() and bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def check_settings(config: Config) -> Iterator[Finding]:
    """Checks the security settings of a node that connects to other machines or accepts connections."""
    hosts = (config.bind, split_port(config.advertise, "advertise")[0], host_port(config.join)[0] if config.join else "")
    if all(is_loopback(host) for host in hosts if host):
        return
    if config.insecure and not config.keys:
        yield warn("secure", "traffic is unencrypted: anyone on the path can read and change it",
                   "commlayer keys init, then COMMLAYER_KEYS on every machine (docs/how-to/keys.md)")
    elif config.join and not config.token:
        yield fail("secure", "no secret, but joining a job needs one", "set COMMLAYER_KEYS or COMMLAYER_TOKEN_FILE")


@functools.cache
def own_plan(path: Path | None) -> Plan | str:
    """The plan in the file, or the reason why it cannot be used."""
    if path is None:
        return "no plan"
    try:
        plan = plan_in(path)
        return next(iter(planner.verify_alone(plan, 0)), plan)
    except ValueError as error:
        return str(error)


def own_digest(path: Path | None) -> str:
    """Digest of the plan in the file; empty if there is no usable plan."""
    plan = own_plan(path)
    return "" if isinstance(plan, str) else records.digest(plan)


def check_plan(path: Path, plan: Plan | str) -> Finding:
    if isinstance(plan, str):
        return failure_from_error("plan", plan, "create it again: commlayer plan create --out FILE")
    return ok("plan", f"{path}: hash {records.digest(plan)}, {len(plan.buckets)} buckets, {plan.servers} servers")


def check_script(path: Path) -> Finding:
    """Checks that a training script can be read and compiled. Runs none of it."""
    try:
        with tokenize.open(path) as file:
            compile(file.read(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        return fail("script", f"{path}: {error.strerror or error}", "give the path of the training script on this machine")
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return fail("script", f"{path}{line}: {error.args[0]}", "correct the script; it must run with Python "
                                                                f"{platform.python_version()}")
    return ok("script", f"{path} compiles")


class Torch(Record, frozen=True):
    """Facts about torch from a separate process that loads it. `driver`: True if the system has NVIDIA's driver."""

    torch: str = ""
    cuda: str = ""
    gpus: tuple[str, ...] = ()
    cupy: str = ""
    driver: bool = False
    error: str = ""


def check_torch(f: Torch) -> Iterator[Finding]:
    if not f.torch:
        yield fail("torch", f.error or "not installed", "check `python -c 'import torch'`: if it works but is slow, run this "
                                                        "again on a less busy machine; else pip install torch")
        return
    release = f.torch.partition("+")[0]
    least = ".".join(map(str, LEAST_TORCH))
    if tuple(int(part) for part in release.split(".")[:2] if part.isdecimal()) < LEAST_TORCH:
        yield fail("torch", f.torch, f"commlayer needs {least} or later: pip install -U torch")
    else:
        yield judge("torch", f.torch, f"tested with {TESTED_TORCH}: pip install 'torch=={TESTED_TORCH}.*' if anything fails",
                    doubtful=not release.startswith(f"{TESTED_TORCH}."))
    if f.error:
        yield fail("gpu", f.error, "check `nvidia-smi`; reinstall the driver or torch if it fails")
    elif not f.gpus:
        yield judge("gpu", f"the system has NVIDIA's driver, but torch {f.torch} finds no GPU" if f.driver else
                    "none: training, codecs and servers use the CPU", "check `nvidia-smi`, CUDA_VISIBLE_DEVICES and the "
                    "container's GPUs; or install torch with CUDA from https://pytorch.org", doubtful=f.driver)
    else:
        yield ok("gpu", ", ".join(f"{count} x {name}" for name, count in Counter(f.gpus).items()))
        major = f.cuda.partition(".")[0]
        if major:  # not ROCm
            package = f.cupy.partition(" ")[0]
            other = package.startswith("cupy-cuda") and package != f"cupy-cuda{major}x"
            yield judge("cupy", f"{f.cupy or 'not installed: codecs run on the CPU'}, torch has CUDA {f.cuda}",
                        f"{f'pip uninstall {package}, then ' if other else ''}pip install 'commlayer[gpu{major}]'",
                        doubtful=other or not f.cupy)


CHILD_S = 15.0
"""Seconds for a process that loads torch and queries its GPUs, since a broken driver can hang this process."""
TORCH_FACTS = """
import importlib.metadata, json
facts = {}
for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy"):
    try:
        facts["cupy"] = f"{name} {importlib.metadata.version(name)}"
        break
    except importlib.metadata.PackageNotFoundError:
        pass
try:
    import torch
    facts |= {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    if torch.cuda.is_available():
        every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        facts["gpus"] = [f"{one.name} ({one.total_memory / 2 ** 30:.0f} GiB)" for one in every]
except Exception as error:
    facts["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(facts))
"""


def own_torch(limit_s: float = CHILD_S, program: str = TORCH_FACTS) -> Torch:
    """Loads torch in a separate process and returns its facts. After `limit_s` the process is ended and the facts contain an
    error."""
    driver = Path("/proc/driver/nvidia/version").exists()
    try:
        process = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=limit_s,
                                 stdin=subprocess.DEVNULL)
        return msgspec.convert(json.loads(process.stdout.splitlines()[-1]) | {"driver": driver}, complete(Torch))
    except subprocess.TimeoutExpired:
        return Torch(driver=driver, error=f"torch and its GPUs did not answer within {limit_s:g} s")
    except (IndexError, ValueError, RecordError):
        last = (process.stderr.strip().splitlines() or ["no output"])[-1]
        return Torch(driver=driver, error=f"a process that loads torch ended with exit code {process.returncode}: {last}")


def check_system(release: str, *, container: bool, serves: bool) -> Iterator[Finding]:
    """Checks what hides this machine's addresses. `release`: the kernel's release. `serves`: True if other machines connect to
    this one."""
    if "microsoft" in release.lower():
        if "wsl2" not in release.lower() and release.endswith("Microsoft"):
            yield fail("wsl", "WSL 1, which has no Linux kernel", "use WSL 2: wsl --set-version DISTRIBUTION 2")
        else:
            yield judge("wsl", "WSL 2" + (": by default other machines cannot reach its address" if serves else
                                          ": connections to a server work; it has half of the memory by default"),
                        "set networkingMode=mirrored in .wslconfig and open the ports in Windows' firewall, or serve elsewhere",
                        doubtful=serves)
    if container and serves:
        yield warn("container", "this is a container, whose address other machines usually cannot reach",
                   "docker run --network host; or publish both ports (-p 7000-7001:7000-7001) and set advertise to the host's "
                   "address")


def format_nbytes(nbytes: float) -> str:
    """
    >>> format_nbytes(64 << 20), format_nbytes(3.5 * (1 << 30))
    ('64 MiB', '3.5 GiB')
    """
    return f"{nbytes / MIB:.0f} MiB" if nbytes < GIB else f"{nbytes / GIB:.1f} GiB"
