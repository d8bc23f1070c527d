"""The settings of one process: their types, defaults and groups."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from commlayer.records import MAX_BUCKET_NBYTES, Record

PREFIX = "COMMLAYER_"
"""Prefix of the environment variables of commlayer."""
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


class Config(Record, frozen=True):
    """Settings of one process. For each field, the first source that sets it wins: argument, environment, TOML file, default.
    """

    join: Annotated[str, msgspec.Meta(description="host:port of a coordinator, or empty to start one")] = ""
    """Address of `commlayer serve`, as host:port. Empty: rank 0 starts the coordinator and the servers."""
    bind: Annotated[str, msgspec.Meta(min_length=1, description="an address of this machine to listen on")] = "127.0.0.1"
    """Address on which coordinator and servers listen. In a job of several machines the default is this machine's address on
    the route to MASTER_ADDR."""
    advertise: Annotated[str, msgspec.Meta(description="HOST or HOST:PORT by which others reach this machine")] = ""
    """Host name or address that other processes use to reach this process, if it differs from `bind`, as behind a router or in
    a cloud. Empty: the same as `bind`. With a port, others reach everything of `commlayer serve` through this one port, over
    gRPC; a tunnel forwards it to the coordinator's port."""
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
    monthly: Text = ""
    """Cap on what this home sends and receives in a calendar month, such as 200GB; set by `commlayer join --monthly`."""
    upload_share: Text = ""
    """Share of its measured uplink that this home may use, such as 60%; set by `commlayer join --upload-share`."""
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
    cache: Text = "auto"
    """Folder in which this machine remembers plan and link rates of jobs with automatic plans, for the next run of each, and
    `commlayer serve` the bytes of the month. "auto": the user's cache folder. Empty: nothing is remembered."""
    events: Text = ""
    """Folder in which each rank writes its events, as rank-N.jsonl; for `commlayer serve`, those of the job, as events.jsonl.
    `commlayer top` shows them. Empty: none."""


GROUPS = {
    "Network": ("join", "bind", "advertise", "port"),
    "Security": ("keys", "insecure", "token", "token_file"),
    "Fault tolerance": ("min_workers", "last_call_s", "deadline_s", "reconnect_s", "dead_after_s", "journal"),
    "Training": ("max_loss", "servers", "drift", "trace", "cache", "events"),
}
GROUPS["Expert"] = tuple(name for name in Config.__struct_fields__ if all(name not in group for group in GROUPS.values()))
"""Names of settings by subject; few users need those of the last group."""
ALIKE = ("servers", "batch", "ranks_per_node", "max_loss", "guard", "drift", "drift_steps",
         "min_workers")
"""Names of settings that must be equal on all ranks, because they determine what ranks do together."""
ALIKE_SET = ("join", "trace", "loss", "learning")
"""Names of settings that must be set on all ranks or on none; their values can differ between ranks."""


def settings_to_match(config: Config) -> dict[str, str]:
    """Maps the names of settings that must agree on all ranks to the texts that ranks compare. See ALIKE and ALIKE_SET."""
    values = {name: str(getattr(config, name)) for name in ALIKE}
    return values | {name: "set" if getattr(config, name) else "not set" for name in ALIKE_SET}
