"""Subgroups of ranks: one for every stage and scope of a path. Calls of different groups need no common order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from commlayer.cluster.processes import site_process_group
from commlayer.cluster.processes.bounded_calls import PendingCollective, torch_errors
from commlayer.cluster.processes.process_groups import Members, destroy
from commlayer.errors import InvalidInput

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch's all-gather into one tensor, which newer versions of torch call all_gather_single."""


class Channel:
    """Collectives of one process group. Members are numbered from 0 within the group."""

    def __init__(self, group: Any, what: str) -> None:
        self.group, self._what = group, what

    def allreduce(self, x: torch.Tensor, *, largest: bool = False) -> PendingCollective:
        """Starts an all-reduce of `x` in place: a sum, or with `largest` an elementwise maximum."""
        return self._start("all-reduce", dist.all_reduce, x, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)

    def alltoall(self, out: torch.Tensor, x: torch.Tensor, out_sizes: list[int] | None,
                 sizes: list[int] | None) -> PendingCollective:
        """Starts an all-to-all: sends the i-th slice of `x` to member i. `sizes` and `out_sizes`: slice lengths of `x` and
        `out`; None: equal slices."""
        return self._start("all-to-all", dist.all_to_all_single, out, x, out_sizes, sizes)

    def allgather(self, out: torch.Tensor, x: torch.Tensor) -> PendingCollective:
        """Starts an all-gather that fills `out` with every member's `x`, in member order."""
        return self._start("all-gather", _all_gather, out, x)

    def reduce(self, x: torch.Tensor, root: int) -> PendingCollective:
        """Starts a sum of `x` into member `root`, in place. On other members `x` is undefined afterwards."""
        return self._start("reduce", dist.reduce, x, group_dst=root)

    def gather(self, x: torch.Tensor, rows: list[torch.Tensor] | None, root: int) -> PendingCollective:
        """Starts a gather of every member's `x` into `rows` of member `root`. `rows` is None on other members."""
        return self._start("gather", dist.gather, x, rows, group_dst=root)

    def broadcast(self, x: torch.Tensor, root: int) -> PendingCollective:
        return self._start("broadcast", dist.broadcast, x, group_src=root)

    def allow(self, timeout_s: float) -> None:
        """Sets the timeout of collectives that begin from now on."""
        site_process_group.set_timeout(self.group, timeout_s)

    def close(self) -> None:
        """Ends the process group. Its connections close with its last reference. A peer with a pending collective would
        otherwise wait for this rank's connections to close when it closes its own."""
        destroy(self.group)
        self.group = None

    def _start(self, name: str, call: Callable[..., Any], x: torch.Tensor, *args: Any, **root: int) -> PendingCollective:
        what = f"{name} {self._what}"
        with torch_errors(what):
            return PendingCollective(call(x, *args, group=self.group, async_op=True, **root), what, on_device=x.is_cuda)


class Channels:
    """Process groups for all stages of a staged path (an all-reduce that first sums inside nodes), keyed by (stage, scope). All
    ranks create and close them together."""

    def __init__(self, wanted: Iterable[tuple[int, str]], members: Members, per_node: int, timeout_s: float) -> None:
        """Creates the groups; a collective call. `wanted`: pairs (stage, scope); a scope is "all", "node" (ranks of one node)
        or "net" (ranks with the same local rank)."""
        self._channels: dict[tuple[int, str], Channel] = {}
        world = members.world
        scopes = {
            "all": ([list(range(world))], "over all ranks"),
            "node": (node_ranks(world, per_node), "inside the node"),
            "net": ([list(range(local, world, per_node)) for local in range(per_node)], "between nodes"),
        }
        for stage, scope in sorted(set(wanted)):
            lists, what = scopes[scope]
            for numbers in lists:
                group = members.group(numbers, timeout_s=timeout_s)
                if group is not None:
                    self._channels[stage, scope] = Channel(group, what)

    def __getitem__(self, place: tuple[int, str]) -> Channel:
        return self._channels[place]

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def node_ranks(world: int, per_node: int) -> list[list[int]]:
    """Returns the members of every node, as one list of consecutive member numbers per node."""
    if world % per_node:
        raise InvalidInput("E-PROCESS-GROUP", f"ranks_per_node {per_node} does not divide the world of {world} ranks")
    return [list(range(first, first + per_node)) for first in range(0, world, per_node)]
