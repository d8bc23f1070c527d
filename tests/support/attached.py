"""One training script, run as a single process on the union of the batches, attached, and through DDP by module or hook."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import structs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlayer.records import Plan
from support import rank_pool


class Setting(NamedTuple):
    """How a script is to be run. `how`: "module", "ddp" (attach on a DDP module) or "hook" (DDP's own registration)."""

    how: str
    addresses: tuple[str, ...] = ()
    """Of one coordinator for each model that the script attaches."""
    codec: str = "identity()"
    ranks_per_node: int = 1
    servers: int = 1
    plan: str = "codec"
    """"codec": that codec for everything; "auto": the default."""
    fields: tuple[tuple[str, Any], ...] = ()
    """Further settings of the session."""


class Run:
    """A script's environment. A single process works on the parts of all ranks; a rank works on its own."""

    def __init__(self, rank: int, world: int, setting: Setting | None) -> None:
        self.rank, self.world, self.setting = rank, world, setting
        self.alone = setting is None
        self.parts: Sequence[int] = range(world) if setting is None else [rank]
        self.sessions: list[Any] = []
        self._addresses = list(setting.addresses) if setting else []

    def wrap(
        self, model: nn.Module, *, scaler: Any = None, optimizer: Any = None, sync: Any = None, **ddp: Any,
    ) -> Any:
        """Returns the model to call; in a single process, the model itself."""
        if self.setting is None:
            return model
        import commlayer

        servers = "each" if self.setting.servers > 1 else "one"
        config = rank_pool.quick(ranks_per_node=self.setting.ranks_per_node, servers=servers) | dict(self.setting.fields)
        if self._addresses:
            config["join"] = self._addresses.pop(0)
        codec = None if self.setting.plan == "auto" else self.setting.codec
        if self.setting.how == "module":
            self.sessions.append(commlayer.attach(model, optimizer, compression=codec, sync=sync, grad_scaler=scaler,
                                                  config=config))
            return model
        wrapped = DistributedDataParallel(model, **{"bucket_cap_mb": 0.002} | ddp)
        if self.setting.how == "ddp":
            self.sessions.append(commlayer.attach(wrapped, optimizer, compression=codec, config=config, grad_scaler=scaler))
        else:
            state = commlayer.HookState(compression=codec, config=config, grad_scaler=scaler)
            wrapped.register_comm_hook(state, commlayer.comm_hook)
            self.sessions.append(state)
        return wrapped

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        if self.setting is None:
            return contextlib.nullcontext()
        return model.no_sync() if self.setting.how == "hook" else self.sessions[0].no_sync()

    def weight(self, n: float) -> None:
        if self.setting is not None:
            self.sessions[0].weight(n)

    def close(self) -> None:
        for session in self.sessions:
            session.context.close() if hasattr(session, "context") else session.close()


def play(rank: int, world: int, script: Any, setting: Setting | None, *args: Any) -> dict[str, Any]:
    """Runs a script and returns its result."""
    torch.manual_seed(7)
    run = Run(rank, world, setting)
    try:
        result: dict[str, Any] = script(run, *args)
    finally:
        run.close()
    return result


@contextlib.contextmanager
def coordinators(models: int, world: int, servers: int, **fields: Any) -> Iterator[list[rank_pool.Servers]]:
    """One for each model; none for plans without servers."""
    models = models if servers else 0
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(rank_pool.Servers(world, servers, **fields)) for _ in range(models)]


def outcome(act: Callable[[], object]) -> str:
    """What act() raised, as "Type: message"; "" if it returned."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_refused(line: str, code: str, *names: str) -> None:
    """An error is one line that ends with its code and contains these names and values."""
    assert line.endswith(f"[{code}]"), line
    assert "\n" not in line
    assert [name for name in names if name not in line] == [], line


@contextlib.contextmanager
def log_lines(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The package's log lines of that level or above, while the block runs."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("commlayer")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def plan_of(model: nn.Module, codec: str = "identity()", path: str = "service", *, servers: int = 1, ranks_per_node: int = 1,
            nbytes: tuple[int, int] = (2048, 4096), bucket: dict[str, Any] | None = None, **fields: Any) -> Plan:
    """One codec and one path for all buckets, also a path of stages. `bucket` and `fields` change the buckets and the plan."""
    from commlayer.engine.model.model_tensors import describe_model
    from commlayer.planner import default_plan

    staged = path not in ("service", "allreduce")
    plan = default_plan(describe_model(model), codec=codec, path="service" if staged else path,
                        servers=0 if path == "allreduce" else servers, ranks_per_node=ranks_per_node, fuse_nbytes=nbytes[0],
                        cut_nbytes=nbytes[1])
    changes = ({"path": path, "server": 0} if staged else {}) | (bucket or {})
    buckets = tuple(structs.replace(b, **changes) for b in plan.buckets)
    return structs.replace(plan, **{"buckets": buckets} | ({"servers": 0} if staged else {}) | fields)


def plan_or_codec(value: Any) -> dict[str, Any]:
    """The argument `plan` for a Plan or a path, `compression` for a codec, none for "auto" or None."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return {}
    return {"plan": value} if isinstance(value, Plan | Path) else {"compression": value}


def sync_of(
    every: int | None = None, codes: str | None = None, overlap: str | None = None, fragments: int | None = None,
    outer: Any = None,
) -> Any:
    """The argument `sync`, from the fields of a plan."""
    if overlap == "forward":
        return "forward"
    if every is None and codes is None:
        return None
    import commlayer

    return commlayer.LocalSteps(every or 1, overlap=overlap == "round", fragments=fragments, outer=outer)


Tensors = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]


def same(one: Tensors, other: Tensors) -> bool:
    """Equal bit for bit."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train_step(model: Any, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    x, y = data(rank, number)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def mlp(seed: int = 0, width: int = 40) -> nn.Sequential:
    """Buckets of all kinds: the middle weight is cut in two, the small ones are fused."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def sharded(model: nn.Module, world: int, sites: int = 2) -> nn.Module:
    """Shards the model over the ranks of each site, on CPUs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (sites, world // sites), mesh_dim_names=("site", "shard"))["shard"]
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(p: Any) -> torch.Tensor:
    """Returns a parameter's elements, with those of other ranks of the site."""
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(12, 16), nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, branches: str) -> torch.Tensor:
        x = self.body(x).tanh()
        return torch.stack([{"l": self.left, "r": self.right}[b](x) for b in branches]).sum(0)


class Raises(torch.autograd.Function):
    """In its backward pass, if `now` is set."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, now: bool) -> torch.Tensor:
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.now:
            raise ArithmeticError("no more memory, say")
        return grad, None


def data(part: int, step: int, n: int = 6, width: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """That rank's samples of that step."""
    generator = torch.Generator().manual_seed(97 * step + part)
    x = torch.randn(n, width, generator=generator)
    return x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs(), x.sum(1).sin()], dim=1)


def loss_of(run: Run, model: Any, step: int, **kwargs: Any) -> torch.Tensor:
    """Mean over the parts of this run of the mean over the samples of each."""
    losses = []
    for part in run.parts:
        x, y = data(part, step, **kwargs)
        losses.append(nn.functional.mse_loss(model(x), y))
    return torch.stack(losses).mean()


def weights(*models: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters by name."""
    return {f"{i}.{name}": p.detach().clone() for i, model in enumerate(models) for name, p in model.named_parameters()}
