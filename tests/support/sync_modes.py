"""A training that changes between all sync modes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from msgspec import structs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.epochs import plan_switch
from commlayer.engine.model.model_tensors import describe_model
from commlayer.optim import OuterSGD
from commlayer.planner import default_plan
from commlayer.records import Job, Plan
from support import rank_pool
from support.attached import data, sync_of
from support.residuals import by_tensor, slices_of

WORLD = 2
MODES: dict[str, dict[str, Any]] = {
    "gradients": {},
    "forward": {"overlap": "forward"},
    "updates": {"codes": "updates"},
    "every": {"local_steps": 2},
    "round": {"local_steps": 4, "overlap": "round", "fragments": 2},
    "whole round": {"local_steps": 3, "overlap": "round"},
    "late": {},
}
LOCAL = {name for name, fields in MODES.items() if "local_steps" in fields or "codes" in fields}


def plan(job: Job, mode: str, codec: str = "identity()", per_node: int = 1, servers: int = 1, **changes: Any) -> Plan:
    """Results come down whole, so that only workers have residuals."""
    layout = default_plan(job, codec=codec, path="service", servers=servers, ranks_per_node=per_node, fuse_nbytes=2048,
                          cut_nbytes=4096)
    late = [mode == "late" and not job.tensors[b.slices[0].tensor].buffer for b in layout.buckets]
    buckets = tuple(structs.replace(b, down="identity()", stale=stale) for b, stale in zip(layout.buckets, late, strict=True))
    return structs.replace(layout, buckets=buckets, **MODES[mode] | changes)


class Net(nn.Module):
    """With running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.BatchNorm1d(40), nn.Linear(40, 40), nn.Tanh())
        self.head = nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


OPTIMIZERS: dict[str, Any] = {
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
}


class Training:
    """One rank's."""

    def __init__(self, rank: int, address: str, mode: str, *, optimizer: str = "plain", codec: str = "identity()",
                 how: str = "", model: nn.Module | None = None, servers: int = 1, outer: OuterSGD | None = None,
                 **fields: Any) -> None:
        self.rank, self.how, self.codec, self.model = rank, how, codec, model or Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled="scaled" in how)
        self.step, self.per_node = 0, 2 if "node" in how else 1
        self.called: Any = self.model
        if "ddp" in how:
            self.called = DistributedDataParallel(self.model, bucket_cap_mb=0.002, static_graph="static" in how,
                                                  gradient_as_bucket_view="view" in how)
        fields |= {"servers": "each"} if servers > 1 else {}
        layout = plan(describe_model(self.model), mode, codec, self.per_node, servers)
        every = layout.local_steps if layout.local_steps > 1 else None
        self.session = commlayer.attach(
            self.called, self.optimizer, plan=layout,
            grad_scaler=self.scaler if "scaled" in how else None,
            sync=sync_of(every, layout.codes, layout.overlap, layout.fragments, outer) if outer else None,
            config=rank_pool.quick(join=address, ranks_per_node=self.per_node, **fields) if address else None)

    @property
    def connection(self) -> Any:
        return self.session.inspect.context

    def switch(self, mode: str, **changes: Any) -> None:
        wanted = plan(self.connection.worker.job, mode, self.codec, self.per_node, **changes)
        if "by itself" in self.how:
            plan_switch.switch(self.connection, wanted, by_itself=True)
        else:
            self.session.switch(wanted)

    def loss(self, number: int) -> torch.Tensor:
        dtype = next(self.model.parameters()).dtype
        x, y = (t.to(dtype) for t in data(self.rank, number))
        return nn.functional.mse_loss(self.called(x), y)

    def train(self, steps: int, *, infinite: int = -1) -> float:
        """The last loss. In step `infinite` rank 1 has an infinite gradient."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            if "weighed" in self.how:
                self.session.weight(1.0 + self.rank + self.step % 2)
            if "gathered" in self.how:
                with self.session.no_sync():
                    self.scaler.scale(self.loss(1000 + self.step)).backward()
            loss = self.loss(self.step)
            if self.step == infinite and self.rank == 1:
                loss = loss + float("inf") * next(self.model.parameters()).sum()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.step += 1
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """What a script saves by itself."""
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                              "scaler": self.scaler.state_dict(), "step": self.step})

    def load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self.step = state["step"]
        for name in ("model", "optimizer", "scaler"):
            getattr(self, name).load_state_dict(state[name])

    def tensors(self, *, buffers: bool = True) -> list[torch.Tensor]:
        tensors = [*self.model.parameters(), *(self.model.buffers() if buffers else ())]
        return [t.detach().clone() for t in tensors if t.is_floating_point()]

    def residuals(self) -> torch.Tensor:
        return torch.cat(by_tensor(slices_of(self.connection.worker), [p.numel() for p in self.model.parameters()]))
