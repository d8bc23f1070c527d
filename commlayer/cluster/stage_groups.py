"""Collectives within subgroups of the ranks; staged paths have one group for every stage and scope.

All ranks of a group make its calls in the same order. Calls of different groups need no common order, so the stages of several
buckets overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commlayer.cluster.members import Members
from commlayer.transport.pending import Pending, named

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Newer versions of torch renamed it."""


class Channel:
    """One process group; members are numbered from 0 within it."""

    def __init__(self, group: Any, ranks: Sequence[int], what: str) -> None:
        self._group, self._ranks, self._what = group, ranks, what

    def allreduce(self, x: torch.Tensor, *, largest: bool = False) -> Pending:
        """Sums, or takes elementwise maxima, in place."""
        return self._start("all-reduce", dist.all_reduce, x, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)

    def alltoall(self, out: torch.Tensor, x: torch.Tensor, out_sizes: list[int] | None, sizes: list[int] | None) -> Pending:
        """Sends the i-th run of `x` to member i; without sizes all runs are equal."""
        return self._start("all-to-all", dist.all_to_all_single, out, x, out_sizes, sizes)

    def allgather(self, out: torch.Tensor, x: torch.Tensor) -> Pending:
        """Fills `out` with every member's `x`, in member order."""
        return self._start("all-gather", _all_gather, out, x)

    def reduce(self, x: torch.Tensor, root: int) -> Pending:
        """Sums into member `root`; elsewhere `x` is undefined afterwards."""
        return self._start("reduce", dist.reduce, x, self._ranks[root])

    def gather(self, x: torch.Tensor, rows: list[torch.Tensor] | None, root: int) -> Pending:
        """Gathers every member's `x` into the root's `rows`; None elsewhere."""
        return self._start("gather", dist.gather, x, rows, self._ranks[root])

    def broadcast(self, x: torch.Tensor, root: int) -> Pending:
        return self._start("broadcast", dist.broadcast, x, self._ranks[root])

    def close(self) -> None:
        self._group = None  # as in RowChannel.close

    def _start(self, name: str, call: Callable[..., Any], x: torch.Tensor, *args: Any) -> Pending:
        what = f"{name} {self._what}"
        with named(what):
            return Pending(call(x, *args, group=self._group, async_op=True), what, on_device=x.is_cuda)


class Channels:
    """The channels of all stages. All ranks make it together."""

    def __init__(self, wanted: Iterable[tuple[int, str]], members: Members, per_node: int, timeout_s: float) -> None:
        """`wanted`: pairs (stage, scope)."""
        self._groups: list[Any] = []
        self._channels: dict[tuple[int, str], Channel] = {}
        world = members.world
        scopes = {
            "all": ([list(range(world))], "over all ranks"),
            "node": (node_ranks(world, per_node), "inside the node"),
            "net": ([list(range(local, world, per_node)) for local in range(per_node)], "between nodes"),
        }
        for stage, scope in sorted(set(wanted)):
            lists, what = scopes[scope]
            for chosen in lists:
                group = members.group(chosen, timeout_s=timeout_s)
                if group is not None:
                    self._groups.append(group)
                    self._channels[stage, scope] = Channel(group, [members.ranks[m] for m in chosen], what)

    def __getitem__(self, place: tuple[int, str]) -> Channel:
        return self._channels[place]

    def close(self) -> None:
        for group in self._groups:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._groups.clear()
        for channel in self._channels.values():
            channel.close()


def node_ranks(world: int, per_node: int) -> list[list[int]]:
    """The members of every node."""
    return [list(range(first, first + per_node)) for first in range(0, world, per_node)]
