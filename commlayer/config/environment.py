"""The environment of this process: its launcher's variables, its cores and folders, and the environment of child processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from commlayer.config.settings import PREFIX, Config
from commlayer.errors import RecordError

MOST_CODEC_THREADS = 4
"""Upper limit of the default for codec_threads: with more threads, memory bandwidth limits encoding."""
JOINS = "@"
"""Separator in the setting `home`, between the site's name and the number of its first worker; present only if the site joins a
running job."""
JOIN_AGAIN = 75
"""Exit code of a training script whose home was too late: the job ended, or had no place left, before the home joined.
`commlayer join` then joins again."""


class Launch(NamedTuple):
    """Rank, world size and node of this process, from its process group or launcher. A process started by hand is rank 0 of 1.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node: int = 0
    agent: int = -1
    """Number of the torchrun agent that started this process; different agents count as different nodes. -1: unknown."""
    home: str = ""
    """Name of this process's site; empty unless `commlayer join` started the process. A process of this kind reaches ranks on
    other machines only through the coordinator."""
    joins: int = -1
    """Number that this worker will have in the running job that its site joins; -1: the site does not join a running job."""


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Reads rank and world size from the process group if there is one, else from the variables of torchrun or Slurm."""
    group = None if environ is not None else _process_group_rank()
    environ = os.environ if environ is None else environ

    def number(name: str, default: int) -> int:
        text = environ.get(name, "")
        if text and not text.isdecimal():
            raise RecordError("E-LAUNCH-ENVIRONMENT",
                              f"{name}: got {text!r} from the environment, but it must be a whole number, 0 or more")
        return int(text) if text else default

    if group is not None:
        rank, world = group
    elif bool(environ.get("RANK")) != bool(environ.get("WORLD_SIZE")):
        present, missing = ("RANK", "WORLD_SIZE") if environ.get("RANK") else ("WORLD_SIZE", "RANK")
        raise RecordError("E-LAUNCH-ENVIRONMENT",
                          f"{present} is set in the environment but {missing} is not, and there is no process group: set "
                          "both (torchrun does) or none, or call init_process_group first (Lightning does when fit() "
                          "begins)")
    elif not environ.get("RANK") and environ.get("SLURM_PROCID"):
        rank, world = number("SLURM_PROCID", 0), number("SLURM_STEP_NUM_TASKS", number("SLURM_NTASKS", 1))
        if world > 1 and not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
            raise RecordError(
                "E-LAUNCH-ENVIRONMENT",
                f"Slurm says that this is task {rank} of {world}, but there is no process group: export MASTER_ADDR=$(scontrol "
                "show hostnames $SLURM_JOB_NODELIST | head -n1) and a free MASTER_PORT before srun, or start with torchrun; "
                "to train alone, unset SLURM_PROCID")
    else:
        rank, world = number("RANK", 0), number("WORLD_SIZE", 1)
    local_world, local_rank = number("LOCAL_WORLD_SIZE", 1), number("LOCAL_RANK", 0)
    node = number("GROUP_RANK", rank // max(local_world, 1))
    agent_known = environ.get("GROUP_RANK") or environ.get("LOCAL_WORLD_SIZE")
    if group is not None and not environ.get("LOCAL_WORLD_SIZE"):
        local_rank = 0  # launchers that set no LOCAL_WORLD_SIZE are not trusted with LOCAL_RANK
    home, _, first = environ.get(PREFIX + "HOME", "").partition(JOINS)
    joins = int(first) + number("LOCAL_RANK", 0) if first.isdecimal() else -1
    launch = Launch(rank, world, local_rank, local_world, node, node if agent_known else -1, home, joins)
    if launch.rank >= launch.world:
        raise RecordError("E-LAUNCH-ENVIRONMENT",
                          f"RANK: got {launch.rank} from the environment, but it must be below WORLD_SIZE, which is "
                          f"{launch.world}")
    if launch.local_rank >= local_world:
        raise RecordError("E-LAUNCH-ENVIRONMENT",
                          f"LOCAL_RANK: got {launch.local_rank} from the environment, but it must be below "
                          f"LOCAL_WORLD_SIZE, which is {local_world}")
    return launch


def _process_group_rank() -> tuple[int, int] | None:
    """Rank and world size of torch's process group, or None if there is none yet."""
    dist = sys.modules.get("torch.distributed")
    return (dist.get_rank(), dist.get_world_size()) if dist and dist.is_available() and dist.is_initialized() else None


def master() -> str:
    """The launcher's rendezvous host (MASTER_ADDR); "" if it is not set."""
    return launcher_variable("MASTER_ADDR")


def launcher_variable(name: str) -> str:
    """The value of an environment variable that torchrun or another launcher sets, such as MASTER_PORT; "" if it is not set."""
    return os.environ.get(name, "")


def user_folder() -> Path:
    """The folder of this user's keys and settings: `$XDG_CONFIG_HOME/commlayer`, by default `~/.config/commlayer`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "commlayer"


def leave_reason_file(launcher: int) -> Path:
    """The file in which a home's launcher writes why its workers leave, before it interrupts them. `launcher`: process id."""
    return user_folder() / f"leaves-{launcher}"


def cache_folder() -> Path:
    """The folder of what can be learned again: `$XDG_CACHE_HOME/commlayer`, by default `~/.cache/commlayer`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "commlayer"


def visible_gpus() -> str:
    """The GPUs that this process may use, as in CUDA_VISIBLE_DEVICES; empty: all GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def has_proxy() -> bool:
    """True: environment variables configure a proxy that gRPC uses. A proxy resolves host names itself."""
    return any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy"))


def use_interface(name: str) -> None:
    """Makes Gloo listen on the network interface `name`, unless the user chose one. By default Gloo uses the address that the
    host name resolves to. "" changes nothing."""
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def codec_threads(config: Config, launch: Launch) -> int:
    """Number of threads that encode one bucket together. All ranks of a node together use at most the node's cores."""
    return config.codec_threads or max(1, min(MOST_CODEC_THREADS, own_cores() // max(launch.local_world, 1)))


def own_cores() -> int:
    """Number of cores that this process may use; outside of Linux, that the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def child_environment(config: Config) -> dict[str, str]:
    """Environment variables for a child process with exactly these settings, except the secret."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    # Other processes of this user can read the environment and children inherit it, so secrets are left out.
    fields = {name: getattr(config, name) for name in config.__struct_fields__ if not name.startswith("token")}
    # An empty CONFIG keeps the child from reading a commlayer.toml of its own.
    return environment | {PREFIX + "CONFIG": ""} | {PREFIX + name.upper(): str(value) for name, value in fields.items()}


def home_environment(launch: Launch, nodes: int, settings: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a worker of a site: torchrun's variables, and these settings as COMMLAYER_* variables."""
    launcher = {"RANK": launch.rank, "WORLD_SIZE": launch.world, "LOCAL_RANK": launch.local_rank,
                "LOCAL_WORLD_SIZE": launch.local_world, "GROUP_RANK": launch.node, "GROUP_WORLD_SIZE": nodes,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    environment = os.environ | {name: str(value) for name, value in launcher.items()}
    first = f"{JOINS}{launch.joins - launch.local_rank}" if launch.joins >= 0 else ""
    environment |= {PREFIX + "HOME": launch.home + first} | {
        PREFIX + name.upper(): value for name, value in settings.items() if value}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # for process groups within this machine
    if launch.local_world > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    return environment


def quiet_grpc() -> None:
    """Sets gRPC's environment variables; call it before importing grpc. gRPC's fork handlers hang forked children (DataLoader
    workers) that exit while a channel is open. gRPC's own log lines about a refused handshake would hide commlayer's
    explanation."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
