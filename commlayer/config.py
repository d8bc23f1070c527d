"""The one reader of environment and TOML. Knows names, allowed values and where a value came from; not what it is for."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from commlayer import setting_kinds as kinds
from commlayer.errors import InvalidInput, RecordError
from commlayer.records import Record
from commlayer.setting_sources import PREFIX, checked, from_argument, from_environment, from_file

KEYS_TOKEN = "token"
"""The file of a node's keys that holds the job's secret."""
LEAST_UNHEARD_S = 5.0
MOST_CODEC_THREADS = 4
"""Unless asked for more: beyond it memory is the limit."""


class Config(Record, frozen=True):
    """Settings of one process. The first source that names a field wins: argument, environment, TOML file, default."""

    join: Annotated[str, msgspec.Meta(description="host:port of a coordinator, or empty to start one")] = ""
    bind: Annotated[str, msgspec.Meta(min_length=1, description="an address of this machine to listen on")] = "127.0.0.1"
    """Servers that a job on several machines starts listen elsewhere, unless told: on the address that leads to MASTER_ADDR."""
    advertise: Annotated[str, msgspec.Meta(description="the host name or address under which others reach this one")] = ""
    port: kinds.Port = 0
    """Where a coordinator listens; a summation server in the same process takes the next one, one with `join` this one.

    Further servers that training processes start take any free port.
    """
    carrier: kinds.Carrier = "auto"
    """What data travels on; gRPC is for networks that pass HTTP/2 alone. "auto": to a server gRPC where TCP does not get
    through, at a server both."""
    insecure: kinds.Flag = False
    token: kinds.Secret = ""
    """The job's secret: who does not know it is refused. Processes of one torchrun make and share one by themselves."""
    token_file: kinds.Text = ""
    """A file that holds it."""
    keys: kinds.Text = ""
    """This node's folder of those that `commlayer keys` makes: all connections are TLS then, with certificates on both ends."""
    audit: kinds.Text = ""
    """A file to which coordinator and servers append a line of JSON for who joins, is refused or leaves, and for each plan."""
    servers: kinds.Servers = "one"
    node: kinds.Node = -1
    """Which machine a server of this process shares, -1: the one whose host name it has, else one of its own; workers under
    torchrun count their own."""
    home: kinds.Text = ""
    """Set by `commlayer launch`: how the coordinator knows this machine, whose ranks reach the others through it alone."""
    batch: kinds.Weight = 1.0
    """What `session.weight(n)` counts as one: the batch that each worker is planned to have. The same on all workers."""
    ranks_per_node: kinds.Count = 0
    """0: those that share a machine, and an agent where torchrun started them."""
    deadline_s: kinds.Seconds = 600.0
    """For one that lives but is slow (evaluates, compiles). The dead are noticed by their heartbeats, long before."""
    join_deadline_s: kinds.Seconds = 60.0
    heartbeat_s: kinds.Seconds = 1.0
    dead_after_s: kinds.Seconds = 10.0
    """Silence after which a peer is dead. A training thread may hold the GIL, and so the heartbeats, for seconds."""
    reconnect_s: kinds.Window = 60.0
    """How long a broken connection is tried to be made again before its peer counts as lost; deadline_s bounds it."""
    min_workers: kinds.Count = 0
    """Of a job of homes, said where `commlayer serve` runs: while so many workers are left, they go on without those that die
    or leave. 0: all must stay."""
    journal: kinds.Text = ""
    """A folder in which a summation server writes down what it owes and has answered, so that one that was killed goes on when
    it is started again. Empty: then its end is the job's."""
    journal_required: kinds.Flag = False
    """What a server does without room for its journal: refuses to serve, or goes on and says so."""
    fuse_nbytes: kinds.Bytes = 1 << 20
    cut_nbytes: kinds.CutBytes = 4 << 20
    ratio_over: kinds.RatioOver = "bucket"
    """Whether a sparse codec's ratio is that of each bucket, or of all of a plan together, with one threshold for all. "bucket"
    leaves it to the plan."""
    warmup: kinds.Count = 0
    """Steps over which the ratios of sparse codecs come down from 25 %. 0 leaves it to the plan."""
    backend: kinds.Backend = "auto"
    codec_threads: kinds.Threads = 0
    """Threads that share the coding of a large bucket; 0: the cores of this machine by its ranks, at most 4."""
    trace: kinds.Text = ""
    """A file for a trace of a few steps, once the plan stands: predicted and measured. Empty for none."""
    max_loss: kinds.Budget = 0.0
    """How much larger the loss may get than dense training's, relative to it: what plan="auto" and the guard keep to."""
    guard: kinds.GuardMode = "auto"
    """What watches that budget does when it is exceeded: "auto" acts where the plan was left to commlayer and else warns, if
    there is a budget; "warn" and "act" do it for any plan, within 5 % where no budget is named."""
    drift: kinds.DriftMode = "resync"
    """What is done where ranks no longer have the same parameters: "resync" takes them and the optimizer's state of them from
    rank 0, "end" ends the job, "warn" says so. The same on all ranks."""
    drift_steps: kinds.Spacing = -1
    """Steps in which all parameters are compared once, 0: never, -1: as many as it takes to cost no more than 0.1 % of the
    time. The same on all ranks."""
    loss: kinds.Text = ""
    """A loss model that `commlayer tune` wrote: what codecs cost, for plan="auto"."""
    learning: kinds.Text = ""
    """A table that `commlayer tune --learning` wrote: what ways cost in steps on your own task, in place of the shipped one."""
    """Whether servers refuse a contribution whose norm is far out of what the others' are ("norms"), and also one that is not
    finite ("all": not with a GradScaler, which lives by seeing those). The same on all ranks."""
    shape: kinds.Text = ""
    """Link shaping inside the process, for the demo; empty for none."""


ALIKE = ("servers", "batch", "ranks_per_node", "max_loss", "guard", "drift", "drift_steps",
         "min_workers")
"""Settings that all ranks of a job must have alike: they decide what all do together, or what a sum means."""
ALIKE_SET = ("join", "trace", "loss", "learning")
"""Settings that must be there on all ranks or on none, whatever they are."""


JOINS = "@"
"""In the setting home, ahead of the number of the first worker of a home that joins a running job."""


class Launch(NamedTuple):
    """Who this process is, as its process group or its launcher says; a process started by hand is rank 0 of 1."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node: int = 0
    agent: int = -1
    """Which of its launcher's agents started it; processes of several are on several nodes. -1: nobody says."""
    home: str = ""
    """Not empty: `commlayer launch` started it, and it reaches ranks on other machines through a coordinator alone."""
    joins: int = -1
    """Not -1: its home joins a job that runs, and this is the worker's number there."""


_TYPES = get_type_hints(Config, include_extras=True)


def read_config(argument: Config | Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None,
                cwd: str | Path = ".") -> Config:
    """The settings in force, checked; a RecordError names the field, its source, what was got and what is allowed."""
    environ = os.environ if environ is None else environ
    if isinstance(argument, Config):
        argument = {name: getattr(argument, name) for name in argument.__struct_fields__}
    settings = from_file(environ, Path(cwd), _TYPES) | from_environment(environ, _TYPES) | from_argument(argument or {}, _TYPES)
    fields = {name: checked(name, setting, _TYPES) for name, setting in settings.items()}
    config = Config(**fields)

    def source(name: str) -> str:
        return settings[name].source if name in settings else "default"

    if config.dead_after_s < 2 * config.heartbeat_s:
        raise RecordError(f"dead_after_s: got {config.dead_after_s:g} from {source('dead_after_s')}, allowed: at least twice "
                          f"heartbeat_s, which is {config.heartbeat_s:g} from {source('heartbeat_s')}", "E-SETTING")
    if config.join:
        try:
            host_port(config.join)
        except ValueError as error:
            raise RecordError(f"join: {error} (from {source('join')})", "E-ADDRESS") from None
    _check_plain_text(config)
    return _with_token(config, source)


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Rank and world as the process group says where there is one, else as the variables of torchrun or Slurm do."""
    group = None if environ is not None else _of_group()
    environ = os.environ if environ is None else environ

    def number(name: str, default: int) -> int:
        text = environ.get(name, "")
        if text and not text.isdecimal():
            raise RecordError(f"{name}: got {text!r} from the environment, allowed: a whole number, 0 or more",
                              "E-LAUNCH-ENVIRONMENT")
        return int(text) if text else default

    if group is not None:
        rank, world = group
    elif bool(environ.get("RANK")) != bool(environ.get("WORLD_SIZE")):
        there, missing = ("RANK", "WORLD_SIZE") if environ.get("RANK") else ("WORLD_SIZE", "RANK")
        raise RecordError(f"{there} is in the environment but {missing} is not, and there is no process group: set both "
                          "(torchrun does) or none, or call init_process_group first (Lightning does when fit() "
                          "begins)", "E-LAUNCH-ENVIRONMENT")
    elif not environ.get("RANK") and environ.get("SLURM_PROCID"):
        rank, world = number("SLURM_PROCID", 0), number("SLURM_STEP_NUM_TASKS", number("SLURM_NTASKS", 1))
        if world > 1 and not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
            raise RecordError(
                f"Slurm says that this is task {rank} of {world}, but there is no process group: export MASTER_ADDR=$(scontrol "
                "show hostnames $SLURM_JOB_NODELIST | head -n1) and a free MASTER_PORT ahead of srun, or start with torchrun; "
                "to train alone, unset SLURM_PROCID", "E-LAUNCH-ENVIRONMENT")
    else:
        rank, world = number("RANK", 0), number("WORLD_SIZE", 1)
    local_world, local_rank = number("LOCAL_WORLD_SIZE", 1), number("LOCAL_RANK", 0)
    node = number("GROUP_RANK", rank // max(local_world, 1))
    said = environ.get("GROUP_RANK") or environ.get("LOCAL_WORLD_SIZE")
    if group is not None and not environ.get("LOCAL_WORLD_SIZE"):
        local_rank = 0  # a launcher that says no more than that is not asked
    home, _, first = environ.get(PREFIX + "HOME", "").partition(JOINS)
    joins = int(first) + number("LOCAL_RANK", 0) if first.isdecimal() else -1
    found = Launch(rank, world, local_rank, local_world, node, node if said else -1, home, joins)
    if found.rank >= found.world:
        raise RecordError(f"RANK: got {found.rank} from the environment, allowed: below WORLD_SIZE, which is {found.world}",
                          "E-LAUNCH-ENVIRONMENT")
    if found.local_rank >= local_world:
        raise RecordError(f"LOCAL_RANK: got {found.local_rank} from the environment, allowed: below LOCAL_WORLD_SIZE, "
                          f"which is {local_world}", "E-LAUNCH-ENVIRONMENT")
    return found


def _of_group() -> tuple[int, int] | None:
    """Rank and world of torch's process group, if somebody has made one."""
    dist = sys.modules.get("torch.distributed")
    return (dist.get_rank(), dist.get_world_size()) if dist and dist.is_available() and dist.is_initialized() else None


def master() -> str:
    """The machine where the ranks meet, as far as the launcher says."""
    return launcher_says("MASTER_ADDR")


def launcher_says(name: str) -> str:
    """A variable of a launcher, or of what it starts, such as MASTER_PORT."""
    return os.environ.get(name, "")


def has_proxy() -> bool:
    """Whether gRPC may go through a proxy, which then resolves host names."""
    return any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy"))


def use_interface(name: str) -> None:
    """Gloo, which would go by what the host name resolves to, goes by this network interface, unless somebody has chosen."""
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def alike(config: Config) -> dict[str, str]:
    """What must be the same on all ranks, as text."""
    told = {name: str(getattr(config, name)) for name in ALIKE}
    return told | {name: "set" if getattr(config, name) else "not set" for name in ALIKE_SET}


NOTICE_HEARTBEATS = 3
"""After an error servers stay as long as it takes the others to hear from the coordinator who left or died."""


def reconnect_window_s(config: Config) -> float:
    """reconnect_s, as far as deadline_s leaves time for it."""
    return min(config.reconnect_s, config.deadline_s)


def notice_s(config: Config) -> float:
    """By then a worker has the coordinator's word on what it knows."""
    return NOTICE_HEARTBEATS * config.heartbeat_s


def verdict_s(config: Config) -> float:
    """The same of who has fallen silent: the silence after which it counts as dead comes first."""
    return config.dead_after_s + notice_s(config)


def judged_s(config: Config) -> float:
    """Behind its own deadline a worker that others may leave waits so long: by then the coordinator has judged who has fallen
    silent, or hangs, and this worker has heard of it."""
    return reconnect_window_s(config) + verdict_s(config)


def unheard_s(config: Config) -> float:
    """After so long without a word of the other machine's kernel a data connection is broken. Where it can be made again that
    costs little, also where the other end had only been slow to make room."""
    window_s = reconnect_window_s(config)
    return min(config.deadline_s, max(LEAST_UNHEARD_S, window_s / 4)) if window_s else config.deadline_s


def codec_threads(config: Config, launch: Launch) -> int:
    """How many threads may share the coding of a bucket: a node's ranks together do not outnumber its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.codec_threads or max(1, min(MOST_CODEC_THREADS, cores // max(launch.local_world, 1)))


def child_environment(config: Config) -> dict[str, str]:
    """The environment for a child process that is to have exactly these settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    # The environment of a process is not for secrets: others of the same user read it, and children inherit it.
    fields = {name: getattr(config, name) for name in config.__struct_fields__ if not name.startswith("token")}
    # An empty file setting keeps the child from reading a commlayer.toml of its own.
    return kept | {PREFIX + "CONFIG": ""} | {PREFIX + name.upper(): str(value) for name, value in fields.items()}


def take_environment(wanted: Mapping[str, str]) -> None:
    """In a process that was forked: from here on its environment has these variables, and no other settings."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    os.environ.update({PREFIX + "CONFIG": "", **wanted})


def home_environment(launch: Launch, nodes: int, settings: Mapping[str, str]) -> dict[str, str]:
    """The environment for a worker of a home: what torchrun would say to it, and these settings."""
    told = {"RANK": launch.rank, "WORLD_SIZE": launch.world, "LOCAL_RANK": launch.local_rank, "GROUP_RANK": launch.node,
            "LOCAL_WORLD_SIZE": launch.local_world, "GROUP_WORLD_SIZE": nodes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    made = os.environ | {name: str(value) for name, value in told.items()}
    first = f"{JOINS}{launch.joins - launch.local_rank}" if launch.joins >= 0 else ""
    made |= {PREFIX + "HOME": launch.home + first} | {PREFIX + name.upper(): value for name, value in settings.items() if value}
    if sys.platform == "linux":
        made.setdefault("GLOO_SOCKET_IFNAME", "lo")  # of groups within this machine
    if launch.local_world > 1:
        made.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    return made


def _with_token(config: Config, source: Callable[[str], str]) -> Config:
    """With what the file of the setting token_file holds, or, where there is no other secret, the one in the folder of keys."""
    if config.keys:
        # Whoever changes the directory later still means this folder.
        config = msgspec.structs.replace(config, keys=str(Path(config.keys).expanduser().absolute()))
    if not config.token_file:
        if not config.keys or config.token:
            return config
        path = Path(config.keys) / KEYS_TOKEN
        return msgspec.structs.replace(config, token=_secret_in(path, f"keys: {path} from {source('keys')}", KEYS_REMEDY))
    where = f"token_file: {config.token_file} from {source('token_file')}"
    if config.token:
        raise RecordError(f"token_file: got {config.token_file} from {source('token_file')} beside token from "
                          f"{source('token')}, allowed: one of both", "E-SECRET")
    return msgspec.structs.replace(config, token=_secret_in(Path(config.token_file), where), token_file="")


KEYS_REMEDY = "; `commlayer keys add NAME` makes a folder of keys for each node, to be copied there"


def _secret_in(path: Path, where: str, remedy: str = "") -> str:
    """What that file holds; errors begin with `where`."""
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RecordError(f"{where} cannot be read: {why}{remedy}", "E-SETTING") from None
    try:
        token: str = msgspec.convert(text, _TYPES["token"])
    except msgspec.ValidationError:
        token = ""
    if not token:
        raise RecordError(f"{where} holds {len(text)} characters that are no secret, allowed: 8 or more visible characters, "
                          "without blanks", "E-SECRET")
    return token


def quiet_grpc() -> None:
    """Before grpc is imported: its fork handlers hang forked children (DataLoader workers) that exit while a channel lives, and
    what it writes of a refused handshake by itself stands around the one line that says why."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def host_port(address: str) -> tuple[str, int]:
    """The two halves of "host:port" or "[v6 address]:port"."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare and bare == host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidInput("E-ADDRESS",
                           f"got {address!r}, allowed: host:port with a port from 1 to 65535, as in 10.0.0.1:7000 or "
                           "[::1]:7000")
    return bare, int(port)


def join_host(host: str, port: int) -> str:
    """The inverse of host_port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Without asking a name service: a name that is not "localhost" counts as remote."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_plain_text(name: str, host: str, config: Config) -> None:
    """Whether traffic may go to or come from `host`; the error names it by `name`."""
    if not is_loopback(host) and not config.insecure and not config.keys:
        raise RecordError(f"{name}: {host} is not loopback and traffic is plain text: set keys ({PREFIX}KEYS) to a folder that "
                          "`commlayer keys init` and `commlayer keys add NAME` make, or set insecure (insecure=True, "
                          f"--insecure, {PREFIX}INSECURE=1) if you trust every machine on the way", "E-PLAIN-TEXT")


def _check_plain_text(config: Config) -> None:
    """Plain text leaves the machine only where the user has said so, to an address that the user has named."""
    remote = [(name, host) for name, host in (("bind", config.bind), ("advertise", config.advertise)) if host]
    remote += [("join", host_port(config.join)[0])] if config.join else []
    for name, host in remote:
        check_plain_text(name, host, config)
    named = "advertise" if config.advertise else "bind"
    if getattr(config, named) in ("0.0.0.0", "::"):
        raise RecordError(f"{named}: {getattr(config, named)} names no address that others could reach: set advertise "
                          f"(--advertise, {PREFIX}ADVERTISE) to this machine's address", "E-SETTING")
