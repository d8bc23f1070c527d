"""One run as a value: its fault, its job and the time of the strike. Derived from a seed, so any run can be repeated."""

from __future__ import annotations

from typing import NamedTuple

STEPS = 40
"""Steps of an undisturbed run, which takes a fraction of a second."""


class Setting(NamedTuple):
    """A job: its codec, its size, and whether the coordinator is a process of its own."""

    codec: str
    workers: int = 2
    servers: int = 1
    apart: bool = False
    carrier: str = "tcp"
    keys: bool = False
    """Whether all nodes have keys and use TLS. Results are the same."""
    least: int = 0
    """Minimum number of workers (min_workers), each of which is a home; 0: all must stay."""
    width: int = 40
    """Width of the model. One of 512 has 1.1 MB of gradients, which fill a slow line."""

    def __str__(self) -> str:
        """
        >>> str(Setting("int8()", 2, 2, apart=True))
        'int8, 2 workers, 2 servers, coordinator apart'
        """
        servers = "server" if self.servers == 1 else "servers"
        parts = [self.codec.removesuffix("()"), f"{self.workers} workers", f"{self.servers} {servers}"]
        parts += ["coordinator apart"] * self.apart + ["gRPC"] * (self.carrier == "grpc") + ["TLS"] * self.keys
        return ", ".join(parts + [f"homes of which {self.least} are enough"] * (self.least > 0))


SETTINGS = (
    Setting("topk(ratio=0.1)", workers=3),
    Setting("identity()"),
    Setting("powersgd(rank=2)", apart=True),
    Setting("topk(ratio=0.1)", servers=2, apart=True),
    Setting("int8()", carrier="grpc"),
    Setting("int8()", workers=3, apart=True),
    Setting("identity()", workers=3, least=2),
    Setting("identity()", workers=3, apart=True, least=2),
)


class Trial(NamedTuple):
    """`strikes` and `number` select the victim. The strike comes `after_s` after the first worker has finished step `at`."""

    seed: int
    fault: str
    setting: Setting
    strikes: str = "worker"
    number: int = 0
    at: int = 0
    after_s: float = 0.0
    line: str = ""
    """The hosts' links, by a name in hosts.LINES; "": no hosts, but processes and proxies on loopback."""

    @property
    def victim(self) -> str:
        """The victim's name in errors."""
        return f"{self.strikes} {self.number}"

    @property
    def victims(self) -> tuple[int, ...]:
        """The numbers of all victims."""
        return (self.number, (self.number + 1) % self.setting.workers) if self.fault == "kill-homes" else (self.number,)

    @property
    def again(self) -> str:
        """The command that repeats the run."""
        where = f" --hosts {self.line}" if self.line else ""
        return f"python -m bench chaos{where} --faults {self.fault} --seed {self.seed} --runs 1"
