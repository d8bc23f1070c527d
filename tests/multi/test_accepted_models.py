"""Models that are taken and models that are refused: sharded, attached twice, with sparse gradients; and a hook's state."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.attached import coordinators, data, mlp
from support.rank_pool import Servers, pool, quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.config import read_config

WORLD = 2
TOPK = "topk(ratio=0.1)"


def raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# ---- sharded models

def sharded(rank: int, how: str) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model: nn.Module = mlp()
    if how == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif how == "FSDP1 inside":
        model[0] = FullyShardedDataParallel(model[0], device_id=torch.device("cpu"))
    elif how == "FSDP2":
        fully_shard(model)
    else:
        from torch.distributed.tensor import distribute_module, init_device_mesh

        distribute_module(model[0], init_device_mesh("cpu", (WORLD,)))
    return raised(lambda: commlayer.attach(model, config=quick()))


@pytest.mark.commit(1)
@pytest.mark.parametrize(("how", "what"), [
    ("FSDP1", "the model is under FullyShardedDataParallel"), ("FSDP1 inside", "0 is under FullyShardedDataParallel"),
    ("FSDP2", "the model is under fully_shard()"), ("DTensor", "0.weight is a DTensor"),
])
def test_a_sharded_model_is_refused_by_name(how: str, what: str) -> None:
    for said in pool(WORLD).call(sharded, how):
        assert what in said
        assert said.endswith("[E-MODEL-UNSUPPORTED]")


# ---- attached once

ATTACHED_TWICE = "[E-ATTACHED-TWICE]"


def twice(rank: int) -> list[str]:
    model = mlp()
    ddp = DistributedDataParallel(model)
    first = commlayer.attach(model, config=quick())
    said = [raised(lambda m=m: commlayer.attach(m, config=quick())) for m in (model, ddp, nn.Sequential(model))]
    said.append(raised(lambda: ddp(data(0, 0)[0])))
    first.close()
    second = commlayer.attach(ddp, config=quick())
    said += [raised(lambda m=m: commlayer.attach(m, config=quick())) for m in (model, ddp)]
    second.close()
    commlayer.attach(model, config=quick()).close()
    return said


def test_a_model_is_attached_once_and_again_after_closing() -> None:
    for said in pool(WORLD).call(twice):
        inside = said.pop(3)
        assert inside.endswith(ATTACHED_TWICE), inside
        assert "inside a DistributedDataParallel module" in inside
        assert [s.endswith(ATTACHED_TWICE) for s in said] == [True] * 5, said


def accumulated(rank: int, address: str) -> list[torch.Tensor]:
    """As Accelerate and others tell DDP that the next backward pass is not the last one of a step."""
    model: Any = mlp()
    seen = []
    with commlayer.attach(model, plan=commlayer.compressors.identity(), config=quick(join=address)) as session:
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            model(data(rank, micro)[0]).sum().backward()
            seen.append(model[0].weight.grad.clone())
        assert session.stats()["steps"] == 1
    return seen


def test_require_backward_grad_sync_is_heard_on_a_plain_module() -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(accumulated, servers.address)
    assert not torch.equal(first[0], second[0])
    torch.testing.assert_close(first[1], second[1], rtol=0, atol=0)


@pytest.mark.parametrize("lazy", [nn.LazyLinear(8), nn.LazyBatchNorm1d()], ids=lambda module: type(module).__name__)
def test_a_lazy_module_without_shapes_is_refused_by_name(lazy: nn.Module) -> None:
    model = nn.Sequential(lazy)
    said = raised(lambda: commlayer.attach(model))
    assert "0.weight has no shape" in said
    assert said.endswith("[E-MODEL-UNSUPPORTED]")
    model(torch.ones(4, 5))
    commlayer.attach(model).close()


# ---- DDP's hook

def joined(rank: int, address: str, own: bool) -> tuple[list[torch.Tensor], str]:
    """Rank 1 has one batch less. With torch's own averaging or ours: the gradients of the last step on rank 0."""
    model = mlp()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
    said = "nothing"
    state = commlayer.HookState(commlayer.compressors.identity(), config=quick(join=address))
    if own:
        ddp.register_comm_hook(state, commlayer.comm_hook)
    with ddp.join():
        for step in range(3 - 2 * rank):
            model.zero_grad()
            said = raised(lambda step=step: ddp(data(rank, step)[0]).sum().backward())
    state.connection.close()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], said


def test_uneven_inputs_under_join_are_averaged_as_ddp_does() -> None:
    with Servers(WORLD, 1) as servers:
        ours = pool(WORLD).call(joined, servers.address, True)
        theirs = pool(WORLD).call(joined, "", False)
    for (got, said), (expected, _) in zip(ours, theirs, strict=True):
        assert said == "nothing"
        torch.testing.assert_close(got, expected)


def sparse(rank: int) -> list[str]:
    model = nn.Sequential(nn.Embedding(40, 8, sparse=True), nn.Linear(8, 3))
    ddp = DistributedDataParallel(model)
    with commlayer.attach(ddp, config=quick()):
        return [raised(lambda: ddp(torch.tensor([3, 4])).sum().backward()) for _ in range(2)]


def test_sparse_gradients_under_ddp_are_refused_by_name() -> None:
    for first, second in pool(WORLD).call(sparse):
        assert "gradient of 0.weight has layout torch.sparse_coo" in first
        assert first.endswith("[E-GRADIENT-LAYOUT]")
        assert second != "nothing"


def shared(rank: int, later: bool) -> str:
    """One state for two models, both from the start or the second one later."""
    state = commlayer.HookState(config=quick())
    models = [DistributedDataParallel(mlp(seed)) for seed in range(2)]
    models[0].register_comm_hook(state, commlayer.comm_hook)
    if not later:
        models[1].register_comm_hook(state, commlayer.comm_hook)
    said = raised(lambda: models[0](data(0, 0)[0]).sum().backward())
    if later:
        assert said == "nothing"
        models[1].register_comm_hook(state, commlayer.comm_hook)
        said = raised(lambda: models[1](data(0, 0)[0]).sum().backward())
    state.connection.close()
    return said


@pytest.mark.parametrize("later", [False, True])
def test_a_hook_state_serves_one_model(later: bool) -> None:
    for said in pool(WORLD).call(shared, later):
        assert said.endswith("[E-DDP-HOOK]"), said
        assert ("2 DistributedDataParallel modules" in said) is not later


def step(ddp: Any, rank: int, number: int) -> torch.Tensor:
    ddp.zero_grad()
    ddp(data(rank, number)[0]).sum().backward()
    return torch.cat([p.grad.view(-1) for p in ddp.parameters()])


def owed(state: commlayer.HookState) -> torch.Tensor:
    """What this worker keeps back."""
    tensors = state.state_dict()["tensors"]
    return torch.cat([tensors[name].view(-1) for name in sorted(tensors) if name.endswith("residual")])


def resumed(rank: int, how: str, addresses: list[str]) -> list[torch.Tensor]:
    """What is owed after a third step by who made the first two, by one that takes up what those left, and by a new one."""
    state = commlayer.HookState(commlayer.compressors.parse(TOPK), config=quick(join=addresses[0]))
    ddp = DistributedDataParallel(mlp())
    ddp.register_comm_hook(state, commlayer.comm_hook)
    for number in range(2):
        step(ddp, rank, number)
    saved = copy.deepcopy(state.state_dict())
    kept = io.BytesIO()
    torch.save(ddp, kept)
    pickled, copied = pickle.dumps(state), copy.deepcopy(state)
    step(ddp, rank, 2)
    results = [owed(state)]
    state.connection.close()

    new = commlayer.HookState(commlayer.compressors.parse(TOPK), config=quick())
    if how == "state_dict":
        new.load_state_dict(saved)
    elif how == "pickle":
        new = pickle.loads(pickled)
    elif how == "a copy":
        new = copied
    elif how == "a saved DDP module":
        kept.seek(0)
        (_, new), = torch.load(kept, weights_only=False)._comm_hooks
    assert how == "nothing" or new.state_dict().keys() == saved.keys(), "what is to be loaded is not lost in another save"
    new._config = read_config(quick(join=addresses[1]))
    again = DistributedDataParallel(mlp())
    again.register_comm_hook(new, commlayer.comm_hook)
    step(again, rank, 2)
    results.append(owed(new))
    new.connection.close()
    return results


@pytest.mark.commit(2)
@pytest.mark.parametrize("how", ["state_dict", "pickle", "a copy", "a saved DDP module", "nothing"])
def test_a_hook_state_can_be_saved_and_goes_on_with_its_residuals(how: str) -> None:
    with coordinators(2, WORLD, 1) as made:
        results = pool(WORLD).call(resumed, how, [m.address for m in made])
    for first, second in results:
        assert torch.equal(first, second) == (how != "nothing")
