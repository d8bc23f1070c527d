"""Reads the settings of one process from arguments, environment variables and a TOML file."""

from __future__ import annotations

import difflib
import ipaddress
import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec

from commlayer.errors import InvalidInput, RecordError
from commlayer.records import MAX_BUCKET_NBYTES, Record

# ---- types of settings: allowed values, and their description for errors

DAY_S = 86400.0
MOST_LOSS = 1.0
"""Upper limit of the setting `max_loss`: loss increase relative to the loss of dense training."""

# `description` lists the allowed values for error messages and `describe`.
Text = Annotated[str, msgspec.Meta(description="text")]
Secret = Annotated[str, msgspec.Meta(pattern=r"^([!-~]{8,})?$", description="8 or more visible characters, no spaces")]
Flag = Annotated[bool, msgspec.Meta(description="true or false")]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=DAY_S, description="a number of seconds above 0, at most 86400")]
Window = Annotated[float, msgspec.Meta(ge=0, le=DAY_S, description="a number of seconds from 0 (disabled) to 86400")]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 16, description="a whole number from 0 to 65536")]
Node = Annotated[int, msgspec.Meta(ge=-1, le=1 << 16, description="a whole number from 0 to 65536, -1: by host name")]
Weight = Annotated[float, msgspec.Meta(gt=0, le=1e12, description="a number above 0")]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_BUCKET_NBYTES, description=f"a number of bytes from 0 to {MAX_BUCKET_NBYTES}")]
Servers = Annotated[Literal["one", "each"], msgspec.Meta(description='"one" (on rank 0\'s node) or "each" (one on every node)')]
Carrier = Annotated[Literal["auto", "tcp", "grpc"], msgspec.Meta(description='"auto", "tcp" or "grpc"')]
Backend = Annotated[Literal["auto", "native", "fallback"], msgspec.Meta(description='"auto", "native" or "fallback"')]
RatioOver = Annotated[Literal["bucket", "plan"], msgspec.Meta(description='"bucket" or "plan"')]
CutBytes = Annotated[int, msgspec.Meta(ge=4096, le=MAX_BUCKET_NBYTES,
                                       description=f"a number of bytes from 4096 to {MAX_BUCKET_NBYTES}")]
Threads = Annotated[int, msgspec.Meta(ge=0, le=16, description="a whole number from 0 to 16")]
Budget = Annotated[float, msgspec.Meta(ge=0, le=MOST_LOSS,
                                       description="a fraction of the loss from 0 (no limit) to 1; 0.005 is 0.5 %")]
DriftMode = Annotated[Literal["resync", "end", "warn"], msgspec.Meta(description='"resync", "end" or "warn"')]
Spacing = Annotated[int, msgspec.Meta(ge=-1, le=1 << 16, description="a whole number from 0 (never) to 65536; -1: automatic, "
                                      "which costs at most 0.1 % of the time")]
GuardMode = Annotated[Literal["auto", "off", "warn", "act"], msgspec.Meta(description='"auto", "off", "warn" or "act"')]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535, description="a port number from 0 to 65535, 0 for any free one")]


# ---- settings

KEYS_TOKEN = "token"
"""Name of the file with the job's secret, inside a node's key folder."""
LEAST_UNHEARD_S = 5.0
MOST_CODEC_THREADS = 4
"""Upper limit of the default for codec_threads: with more threads, memory bandwidth limits encoding."""


class Config(Record, frozen=True):
    """Settings of one process. For each field, the first source that sets it wins: argument, environment, TOML file, default.
    """

    join: Annotated[str, msgspec.Meta(description="host:port of a coordinator, or empty to start one")] = ""
    """Address of `commlayer serve`, as host:port. Empty: rank 0 starts the coordinator and the servers."""
    bind: Annotated[str, msgspec.Meta(min_length=1, description="an address of this machine to listen on")] = "127.0.0.1"
    """Address on which coordinator and servers listen. In a job of several machines the default is this machine's address on
    the route to MASTER_ADDR."""
    advertise: Annotated[str, msgspec.Meta(description="the host name or address under which others reach this one")] = ""
    """Host name or address that other processes use to reach this one, if it differs from `bind`, as behind a router or in a
    cloud. Empty: the same as `bind`."""
    port: Port = 0
    """Port of the coordinator; 0: any free port. A summation server in the same process uses the next port; a server with
    `join` uses this port. Further servers that training processes start use any free port."""
    carrier: Carrier = "auto"
    """Transport protocol of gradient data. gRPC is for networks that pass only HTTP/2. With "auto" a worker uses gRPC where TCP
    fails, and a server accepts both."""
    insecure: Flag = False
    """True: unencrypted traffic to other machines is allowed."""
    token: Secret = ""
    """The job's secret; peers without it are refused. The processes of one torchrun job agree on a secret by themselves."""
    token_file: Text = ""
    """Path of a file that contains the job's secret. Empty: the setting `token`, or the key folder, provides it."""
    keys: Text = ""
    """Path of this node's key folder, made by `commlayer keys`. With keys all connections use mutual TLS. Empty: no TLS."""
    servers: Servers = "one"
    """Number of summation servers that a job starts: "one" in total, or one on "each" node. A plan's number of servers
    overrides this setting."""
    node: Node = -1
    """Number of the machine that runs a server in this process. -1: the machine with the same host name, else a separate
    machine. Workers under torchrun derive the number from torchrun's variables."""
    home: Text = ""
    """The coordinator's name for this site, set by `commlayer join`. Ranks of a site reach other sites only through the
    coordinator. Empty: not started by `commlayer join`."""
    batch: Weight = 1.0
    """The planned batch size per worker. `session.weight(n)` is divided by it, so n = batch has weight 1."""
    ranks_per_node: Count = 0
    """Number of ranks per node. 0: ranks that share a machine and a torchrun agent form a node."""
    deadline_s: Seconds = 600.0
    """Seconds to wait for a peer that is alive but slow. After that the job fails; with `min_workers` it continues without the
    peer."""
    join_deadline_s: Seconds = 60.0
    """Seconds that ranks wait for each other at the start of a job."""
    heartbeat_s: Seconds = 1.0
    """Seconds between two heartbeats that a process sends to the coordinator."""
    dead_after_s: Seconds = 10.0
    """Seconds without a heartbeat, and without data at a server, after which a process counts as dead, unless its connection
    can still be restored (`reconnect_s`). At least two heartbeat intervals."""
    reconnect_s: Window = 60.0
    """Seconds for which a worker tries to restore a broken connection before its peer counts as lost; at most deadline_s."""
    min_workers: Count = 0
    """Smallest number of workers with which training begins, and continues after others are lost; 0: every worker is required.
    For jobs of sites, set where `commlayer serve` runs."""
    last_call_s: Window = 5.0
    """Seconds that a job with `min_workers` waits for further workers before it begins with fewer than its largest number,
    counted from the last arrival."""
    journal: Text = ""
    """Folder of a summation server's journal, from which a restarted server resumes. Empty: no journal, and a killed server
    ends the job."""
    journal_required: Flag = False
    """True: a server refuses to run without disk space for its journal. False: it logs a warning and runs without a journal."""
    fuse_nbytes: Bytes = 1 << 20
    """Size in bytes up to which small tensors are grouped into one bucket."""
    cut_nbytes: CutBytes = 4 << 20
    """Size in bytes of the buckets into which larger tensors are split."""
    ratio_over: RatioOver = "bucket"
    """What the ratio of a sparse codec refers to. "bucket": the elements of each bucket, unless the plan sets "plan". "plan":
    the elements of all buckets, selected with one threshold."""
    warmup: Count = 0
    """Number of steps during which the ratios of sparse codecs decrease from 25 %. 0: the plan decides."""
    backend: Backend = "auto"
    """Implementation of codecs on CPUs: "native" is compiled C++, "fallback" is numpy. "auto" uses the native one if it was
    compiled."""
    codec_threads: Threads = 0
    """Number of threads that encode or decode one large bucket together. 0: the cores of this machine divided by its ranks, at
    most 4."""
    trace: Text = ""
    """Path of a trace file with predicted and measured times of a few steps after the plan is chosen. Empty: no trace."""
    max_loss: Budget = 0.0
    """Loss budget: allowed increase of the loss, relative to the loss of dense training. Automatic plans and the quality guard
    keep to this budget. 0: no limit."""
    guard: GuardMode = "auto"
    """What the quality guard does when the loss budget is exceeded. "auto": with a budget, it changes automatic plans and warns
    about other plans. "warn" and "act" apply to any plan, with a budget of 5 % if none is set."""
    drift: DriftMode = "resync"
    """What happens when parameters differ between ranks. "resync" copies parameters and optimizer state from rank 0, "end" ends
    the job, "warn" logs a warning."""
    drift_steps: Spacing = -1
    """Number of steps within which every parameter is compared between ranks once. 0: never. -1: chosen so that comparisons
    take at most 0.1 % of the time."""
    loss: Text = ""
    """Path of a loss model written by `commlayer tune`: the loss penalty of each codec, for an automatic plan. Empty: none."""
    learning: Text = ""
    """Path of a table written by `python -m bench.own_learning`: convergence factors measured on the user's task. Empty: the
    built-in table."""
    events: Text = ""
    """Folder in which each rank writes its events, as rank-N.jsonl; for `commlayer serve`, those of the job, as events.jsonl.
    `commlayer top` shows them. Empty: none."""


GROUPS = {
    "Network": ("join", "bind", "advertise", "port"),
    "Security": ("keys", "insecure", "token", "token_file"),
    "Fault tolerance": ("min_workers", "last_call_s", "deadline_s", "reconnect_s", "dead_after_s", "journal"),
    "Training": ("max_loss", "servers", "drift", "trace", "events"),
}
GROUPS["Expert"] = tuple(name for name in Config.__struct_fields__ if all(name not in group for group in GROUPS.values()))
"""Names of settings by subject; few users need those of the last group."""
ALIKE = ("servers", "batch", "ranks_per_node", "max_loss", "guard", "drift", "drift_steps",
         "min_workers")
"""Names of settings that must be equal on all ranks, because they determine what ranks do together."""
ALIKE_SET = ("join", "trace", "loss", "learning")
"""Names of settings that must be set on all ranks or on none; their values can differ between ranks."""


JOINS = "@"
"""Separator in the setting `home`, between the site's name and the number of its first worker; present only if the site joins a
running job."""
JOIN_AGAIN = 75
"""Exit code of a training script if the job ended, or had no place left, before this home had joined it. `commlayer join` then
joins again."""


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
    """Name of this process's site; empty unless `commlayer join` started the process. Such a process reaches ranks on other
    machines only through the coordinator."""
    joins: int = -1
    """Number that this worker will have in the running job that its site joins; -1: the site does not join a running job."""


_TYPES = get_type_hints(Config, include_extras=True)


def read_config(argument: Config | Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None,
                cwd: str | Path = ".") -> Config:
    """Reads and checks all settings. A RecordError names the setting, its source, the value and the allowed values."""
    environ = os.environ if environ is None else environ
    if isinstance(argument, Config):
        argument = {name: getattr(argument, name) for name in argument.__struct_fields__}
    settings = from_file(environ, Path(cwd), _TYPES) | from_environment(environ, _TYPES) | from_argument(argument or {}, _TYPES)
    fields = {name: checked(name, setting, _TYPES) for name, setting in settings.items()}
    config = Config(**fields)

    def source(name: str) -> str:
        return settings[name].source if name in settings else "default"

    if config.dead_after_s < 2 * config.heartbeat_s:
        raise RecordError("E-SETTING",
                          f"dead_after_s: got {config.dead_after_s:g} from {source('dead_after_s')}, but it must be at "
                          f"least twice heartbeat_s, which is {config.heartbeat_s:g} from {source('heartbeat_s')}")
    if config.join:
        try:
            host_port(config.join)
        except ValueError as error:
            raise RecordError("E-ADDRESS", f"join: {error} (from {source('join')})") from None
    _check_plain_text(config)
    return _with_token(config, source)


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Reads rank and world size from the process group if there is one, else from the variables of torchrun or Slurm."""
    group = None if environ is not None else _of_group()
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


def _of_group() -> tuple[int, int] | None:
    """Rank and world size of torch's process group, or None if there is none yet."""
    dist = sys.modules.get("torch.distributed")
    return (dist.get_rank(), dist.get_world_size()) if dist and dist.is_available() and dist.is_initialized() else None


def master() -> str:
    """The launcher's rendezvous host (MASTER_ADDR); "" if it is not set."""
    return launcher_says("MASTER_ADDR")


def launcher_says(name: str) -> str:
    """The value of an environment variable that torchrun or another launcher sets, such as MASTER_PORT; "" if it is not set."""
    return os.environ.get(name, "")


def user_folder() -> Path:
    """The folder of this user's keys and settings: `$XDG_CONFIG_HOME/commlayer`, by default `~/.config/commlayer`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "commlayer"


def has_proxy() -> bool:
    """True: environment variables configure a proxy that gRPC uses. A proxy resolves host names itself."""
    return any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy"))


def use_interface(name: str) -> None:
    """Makes Gloo listen on the network interface `name`, unless the user chose one. By default Gloo uses the address that the
    host name resolves to. "" changes nothing."""
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def alike(config: Config) -> dict[str, str]:
    """Maps the names of settings that must agree on all ranks to the texts that ranks compare. See ALIKE and ALIKE_SET."""
    values = {name: str(getattr(config, name)) for name in ALIKE}
    return values | {name: "set" if getattr(config, name) else "not set" for name in ALIKE_SET}


NOTICE_HEARTBEATS = 3
"""Number of heartbeat intervals that servers keep running after an error, so other workers learn from the coordinator which
worker left or died."""


def reconnect_window_s(config: Config) -> float:
    return min(config.reconnect_s, config.deadline_s)


def notice_s(config: Config) -> float:
    """Seconds within which every worker has received news from the coordinator with its heartbeats."""
    return NOTICE_HEARTBEATS * config.heartbeat_s


def verdict_s(config: Config) -> float:
    """Seconds from a peer's last heartbeat until a worker has the coordinator's decision whether this peer is dead."""
    return config.dead_after_s + notice_s(config)


def judged_s(config: Config) -> float:
    """Additional seconds that a worker waits after its own deadline if it can continue without others. Within this time the
    coordinator decides whether silent peers are dead and sends the decision."""
    return reconnect_window_s(config) + verdict_s(config)


def unheard_s(config: Config) -> float:
    """Seconds without a TCP acknowledgement after which a data connection counts as broken. If connections can be restored, the
    time is short, since a wrong decision about a slow receiver costs little."""
    window_s = reconnect_window_s(config)
    return min(config.deadline_s, max(LEAST_UNHEARD_S, window_s / 4)) if window_s else config.deadline_s


def codec_threads(config: Config, launch: Launch) -> int:
    """Number of threads that encode one bucket together. All ranks of a node together use at most the node's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.codec_threads or max(1, min(MOST_CODEC_THREADS, cores // max(launch.local_world, 1)))


def child_environment(config: Config) -> dict[str, str]:
    """Environment variables for a child process with exactly these settings, except the secret."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    # Other processes of this user can read the environment and children inherit it, so secrets are left out.
    fields = {name: getattr(config, name) for name in config.__struct_fields__ if not name.startswith("token")}
    # An empty CONFIG keeps the child from reading a commlayer.toml of its own.
    return environment | {PREFIX + "CONFIG": ""} | {PREFIX + name.upper(): str(value) for name, value in fields.items()}


def home_environment(launch: Launch, nodes: int, settings: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a worker of a site: torchrun's variables, and these settings as COMMLAYER_* variables."""
    launcher = {"RANK": launch.rank, "WORLD_SIZE": launch.world, "LOCAL_RANK": launch.local_rank, "GROUP_RANK": launch.node,
            "LOCAL_WORLD_SIZE": launch.local_world, "GROUP_WORLD_SIZE": nodes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    environment = os.environ | {name: str(value) for name, value in launcher.items()}
    first = f"{JOINS}{launch.joins - launch.local_rank}" if launch.joins >= 0 else ""
    environment |= {PREFIX + "HOME": launch.home + first} | {
        PREFIX + name.upper(): value for name, value in settings.items() if value}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # for process groups within this machine
    if launch.local_world > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    return environment


def _with_token(config: Config, source: Callable[[str], str]) -> Config:
    """Fills in the token from token_file, or else from the key folder if no other secret is set. The path `keys` becomes
    absolute."""
    if config.keys:
        # The process may change its working directory later.
        config = msgspec.structs.replace(config, keys=str(Path(config.keys).expanduser().absolute()))
    if not config.token_file:
        if not config.keys or config.token:
            return config
        path = Path(config.keys) / KEYS_TOKEN
        return msgspec.structs.replace(config, token=_secret_in(path, f"keys: {path} from {source('keys')}", KEYS_REMEDY))
    where = f"token_file: {config.token_file} from {source('token_file')}"
    if config.token:
        raise RecordError("E-SECRET", f"token_file: got {config.token_file} from {source('token_file')} and token from "
                                      f"{source('token')}, allowed: one of them")
    return msgspec.structs.replace(config, token=_secret_in(Path(config.token_file), where), token_file="")


KEYS_REMEDY = "; `commlayer keys add NAME` creates a folder of keys to copy to the node"


def _secret_in(path: Path, where: str, remedy: str = "") -> str:
    """Reads a secret from a file. Error messages begin with `where` and end with `remedy`."""
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RecordError("E-SETTING", f"{where} cannot be read: {why}{remedy}") from None
    try:
        token: str = msgspec.convert(text, _TYPES["token"])
    except msgspec.ValidationError:
        token = ""
    if not token:
        raise RecordError("E-SECRET",
                          f"{where}: the file's text of {len(text)} characters is not a secret; it must be 8 or more visible "
                          "characters, without spaces")
    return token


def quiet_grpc() -> None:
    """Sets gRPC's environment variables; call it before importing grpc. gRPC's fork handlers hang forked children (DataLoader
    workers) that exit while a channel is open. gRPC's own log lines about a refused handshake would hide commlayer's
    explanation."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def host_port(address: str) -> tuple[str, int]:
    """Splits an address "host:port" or "[IPv6 address]:port" into host and port."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare and bare == host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidInput("E-ADDRESS",
                           f"got {address!r}, but it must be host:port with a port from 1 to 65535, as in "
                           "10.0.0.1:7000 or [::1]:7000")
    return bare, int(port)


def join_host(host: str, port: int) -> str:
    """Joins host and port to "host:port"; the inverse of host_port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True: the host is this machine's loopback. Names are never resolved: any name except "localhost" counts as remote."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_plain_text(name: str, host: str, config: Config) -> None:
    """Raises an error if unencrypted traffic to or from `host` is not allowed; the error names the setting `name`."""
    if not is_loopback(host) and not config.insecure and not config.keys:
        line = "give the home's line, NAME@HOST:PORT#TOKEN, or " if name == "join" else ""
        raise RecordError("E-PLAIN-TEXT",
                          f"{name}: {host} is another machine and traffic is not encrypted: {line}set keys ({PREFIX}KEYS) to a "
                          "folder that `commlayer keys init` and `commlayer keys add NAME` create, or set insecure "
                          f"(insecure=True, --insecure, {PREFIX}INSECURE=1) if you trust the complete network between the "
                          "machines")


def _check_plain_text(config: Config) -> None:
    """Checks the settings bind, advertise and join: unencrypted traffic leaves the machine only with the user's consent."""
    remote = [(name, host) for name, host in (("bind", config.bind), ("advertise", config.advertise)) if host]
    remote += [("join", host_port(config.join)[0])] if config.join else []
    for name, host in remote:
        check_plain_text(name, host, config)
    setting = "advertise" if config.advertise else "bind"
    if getattr(config, setting) in ("0.0.0.0", "::"):
        raise RecordError("E-SETTING",
                          f"{setting}: {getattr(config, setting)} is not an address that other machines can connect to: set "
                          f"advertise (--advertise, {PREFIX}ADVERTISE) to this machine's address")


# ---- sources: arguments, environment variables, a TOML file

PREFIX = "COMMLAYER_"
Types = Mapping[str, Any]
"""Type of each setting by its name; the type's description names the allowed values."""
REMOVED = {"quarantine": "remove it: servers no longer judge contributions by their size"}
"""Settings that earlier versions had, with what to do instead."""


class Setting(NamedTuple):
    value: Any
    source: str
    text: bool
    """True: the value is text from the environment, to be converted. False: the value must have the right type."""


def from_argument(argument: Mapping[str, Any], types: Types) -> dict[str, Setting]:
    return {_known(name, f"argument {name}", types): Setting(value, f"argument {name}", False)
            for name, value in argument.items()}


def from_environment(environ: Mapping[str, str], types: Types) -> dict[str, Setting]:
    # Kubernetes sets variables of this form for a service named commlayer.
    linked = {n for n, v in environ.items() if PREFIX + "SERVICE_HOST" in environ
              and (n.startswith((PREFIX + "SERVICE_", PREFIX + "PORT_")) or (n == PREFIX + "PORT" and "://" in v))}
    names = [n for n in sorted(environ) if n.startswith(PREFIX) and n != PREFIX + "CONFIG" and n not in linked]
    return {_known(n.removeprefix(PREFIX).lower(), f"environment variable {n}", types):
            Setting(environ[n], f"environment variable {n}", True) for n in names}


def from_file(environ: Mapping[str, str], cwd: Path, types: Types) -> dict[str, Setting]:
    config_path = environ.get(PREFIX + "CONFIG")
    path = cwd / (config_path or "commlayer.toml")
    if config_path == "" or (config_path is None and not path.is_file()):
        return {}
    try:
        fields = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RecordError("E-SETTING", f"{PREFIX}CONFIG: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecordError("E-SETTING", f"{path} is not TOML: {error}") from None
    return {_known(name, f"{path}:{name}", types): Setting(value, f"{path}:{name}", False) for name, value in fields.items()}


def _known(name: str, source: str, types: Types) -> str:
    if name in REMOVED:
        raise RecordError("E-SETTING", f"{name}: this setting was removed ({source}); {REMOVED[name]}")
    if name not in types:
        near = difflib.get_close_matches(name, types, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(types)}"
        raise RecordError("E-SETTING", f"{name}: no such setting ({source}); {hint}")
    return name


def checked(name: str, setting: Setting, types: Types) -> Any:
    try:
        return msgspec.convert(setting.value, types[name], strict=not setting.text)
    except msgspec.ValidationError:
        allowed = next(m.description for m in types[name].__metadata__)
        value = "a text" if name == "token" else repr(setting.value)
        raise RecordError("E-SETTING", f"{name}: got {value} from {setting.source}, but it must be {allowed}") from None
