"""Sharded parameters (DTensors of FSDP2) as the engine sees them: as the local tensors of this rank, with their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from commlayer.config import read_launch
from commlayer.errors import InvalidInput
from commlayer.planner.shards import Shards, intervals
from commlayer.records import chunk_with

WHICH_MESH = ("pass fully_shard() a mesh of the ranks of one site: init_device_mesh(device, (sites, ranks), "
              "mesh_dim_names=('site', 'shard'))['shard']. Under Accelerate and Trainers, whose own setting shards, use "
              "parallelism_config=SiteParallelism(dp_replicate_size=sites, dp_shard_size=ranks) from "
              "commlayer.integrations.accelerate; under Lightning, strategy=CommlayerModelParallelStrategy()")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Returns True for a DTensor. Importing the class to check it would take seconds."""
    return hasattr(tensor, "_local_tensor")


def local_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's elements of a DTensor; other tensors unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def original_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the parameter as model and optimizer know it."""
    return getattr(parameter, "original", parameter)


def sharded_like(p: Any, shard: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor of the shape of `p` from this rank's shard."""
    whole: torch.Tensor = type(p).from_local(shard, p.device_mesh, p.placements, run_check=False, shape=p.shape,
                                             stride=p.stride())
    return whole


def gather_whole_tensor(tensor: Any) -> torch.Tensor:
    """Returns all elements of a DTensor, on the CPU; other tensors unchanged. All ranks of the site call it together."""
    return tensor.full_tensor().cpu() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def take_shard(p: Any, whole: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a tensor that this rank has of parameter `p`; the whole tensor if `p` is not sharded."""
    if not is_sharded(p):
        return whole
    start, end = Shards(p.device_mesh.size()).elements(p.shape, p.device_mesh.get_local_rank())
    return whole.reshape(-1)[start:end].view(local_elements(p).shape)


class TensorPart(NamedTuple):
    """Rows of a sharded tensor that one rank of each site has, or a whole tensor that all ranks have."""

    tensor: int
    first: int = 0
    end: int = 0
    rows: int = 0
    """Number of rows of the tensor; 0: it is not sharded."""

    def own_piece(self, own: torch.Tensor, shards: Shards) -> torch.Tensor | None:
        """Returns this part of a rank's own elements of the tensor. Returns None if another rank of the site has the part."""
        if not self.rows:
            return own
        if chunk_with(self.first, self.rows, shards.ranks) != shards.local:
            return None
        start = shards.elements((self.rows,), shards.local)[0]
        return own[self.first - start : self.end - start]

    def empty_piece(self, own: torch.Tensor) -> torch.Tensor:
        """Returns a tensor without memory of this part's size. `own`: a rank's own elements of the tensor."""
        return torch.empty((self.end - self.first, *own.shape[1:]), dtype=own.dtype, device="meta")


def comparable_parts(tensors: Sequence[torch.Tensor], sharded: Collection[int],
                     sites: Sequence[Sequence[int]]) -> list[TensorPart]:
    """Splits sharded tensors into ranges of rows that sites of all sizes have in common; other tensors stay whole. `sharded`:
    numbers of the sharded tensors."""
    sizes = {*map(len, sites)}
    parts = [[TensorPart(n, *rows, t.shape[0]) for rows in intervals(t.shape[0], sizes)] if n in sharded else [TensorPart(n)]
             for n, t in enumerate(tensors)]
    return [part for each in parts for part in each]


class ShardParameter(nn.Parameter):
    """This rank's shard of a parameter. It has the memory and the version of the DTensor's local tensor, and its gradient is
    that of the DTensor."""

    original: nn.Parameter

    @staticmethod
    def of(original: Any) -> ShardParameter:
        shard: ShardParameter = torch.Tensor._make_subclass(ShardParameter, local_elements(original).detach(),
                                                            original.requires_grad)
        shard.original = original
        return shard

    @property
    def grad(self) -> torch.Tensor | None:
        whole = self.original.grad
        return None if whole is None else local_elements(whole)

    @grad.setter
    def grad(self, shard: torch.Tensor | None) -> None:
        if shard is None:
            self.original.grad = None
        elif shard is not self.grad:
            self.original.grad = sharded_like(self.original, shard)

    @property
    def _post_accumulate_grad_hooks(self) -> Any:  # type: ignore[override]
        return self.original._post_accumulate_grad_hooks

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        return self.original.register_post_accumulate_grad_hook(_for_shard(weakref.ref(self), hook))

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """Registers a hook that FSDP never calls, so that it can only keep an object alive."""
        return self.original.register_hook(hook)


def _for_shard(shard: weakref.ref[ShardParameter], hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Returns the hook for a DTensor that calls `hook` with the shard. Torch does not show the garbage collector what such
    hooks refer to."""

    def call(_original: torch.Tensor) -> None:
        if (found := shard()) is not None:
            hook(found)

    return call


def engine_parameters(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [ShardParameter.of(p) if is_sharded(p) else p for p in parameters]


def _fsdp_states(model: nn.Module) -> list[tuple[Any, Any]]:
    """Returns the modules that FSDP2 shards, outermost first, and FSDP's state of each."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    return [(module, module._get_fsdp_state()) for module in modules]


def reshard(model: nn.Module) -> None:
    """Makes the model's parameters shards: after a forward pass without a backward pass, FSDP keeps some of them whole."""
    for module, _ in _fsdp_states(model):
        module.reshard()


def find_shards(model: nn.Module, process_group: Any) -> Shards:
    """Returns how a model is sharded. Raises ValueError for a kind of sharding that is not supported. `process_group`: the
    ranks that train together; None: all ranks."""
    for _, state in _fsdp_states(model):
        if state._is_root is None:
            state._lazy_init()  # as the first forward pass does; it can give shards other memory
    reshard(model)
    named = [*model.named_parameters()]
    sharded: list[tuple[str, Any]] = [(name, p) for name, p in named if is_sharded(p)]
    for name, p in sharded:
        _check(name, p, sharded[0][1])
    if not sharded:
        return Shards()
    mesh, world = sharded[0][1].device_mesh, dist.get_process_group_ranks(process_group or dist.group.WORLD)
    ranks = mesh.mesh.flatten().tolist()
    first = world.index(ranks[0]) if ranks[0] in world else 0
    if world[first : first + len(ranks)] != ranks:
        raise InvalidInput("E-SHARDED", f"the model is sharded over ranks {ranks}, but a site must have consecutive ranks of "
                                        f"the job: {WHICH_MESH}")
    if len(world) == 1:
        return Shards()
    if len(world) == len(ranks) and not read_launch().home:  # a job of homes can begin with one of them
        raise InvalidInput("E-SHARDED", f"the model is sharded over all {len(ranks)} ranks, so there is no other site to "
                                        f"average with: {WHICH_MESH}")
    if mesh.device_type == "cuda":  # NCCL connects with its first call, through a store that is closed when members change
        dist.all_reduce(torch.zeros(1, device="cuda"), group=mesh.get_group())
    trained = [p for _, p in named if p.requires_grad]
    return Shards(len(ranks), mesh.get_local_rank(), frozenset(n for n, p in enumerate(trained) if is_sharded(p)))


def make_all_reduce_check(model: nn.Module) -> Callable[[], bool]:
    """Returns a function that returns False for a backward pass before which the script has called
    set_requires_all_reduce(False): such a pass averages inside the site only, to accumulate gradients."""
    groups = [group for _, state in _fsdp_states(model)
              for group in vars(state).get("_fsdp_param_groups") or [state._fsdp_param_group] if group is not None]
    return lambda: all(group.all_reduce_grads for group in groups)


def _check(name: str, p: Any, first: Any) -> None:
    kinds = [type(placement).__name__ for placement in p.placements]
    if p.device_mesh.ndim > 1:
        raise InvalidInput("E-SHARDED", f"{name} is a DTensor on a mesh of {p.device_mesh.ndim} dimensions with placements "
                                        f"{p.placements}: HSDP and tensor parallelism are not supported: {WHICH_MESH}")
    if kinds != ["Shard"] or p.placements[0].dim != 0:
        raise InvalidInput("E-SHARDED", f"{name} has placements {p.placements}, but fully_shard() must divide the first "
                                        "dimension of each parameter: leave shard_placement_fn out, and use no tensor "
                                        "parallelism")
    if p.device_mesh != first.device_mesh:
        raise InvalidInput("E-SHARDED", f"{name} is sharded over another mesh than the first parameter: use one mesh for all "
                                        "modules")
