"""overlap="forward": in which order things happen, and what becomes of weights and gradients in between. Real ranks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import rank_pool
from support.forward import Held, Net, Training, batch
from support.rank_pool import pool
from torch import nn

from commlayer.errors import code_of

WORLD = 2
_ranks = rank_pool.ranks_first(WORLD)


def in_order(rank: int, address: str) -> list[str]:
    """What happens in the second forward pass, if the results for the hidden layer come once the embedding has run."""
    training = Training(rank, address, "forward", codec="int8()")
    training.train(0, 1)
    training.session.drain()
    training.optimizer.zero_grad()
    held = Held(training.worker, ["hidden.2.weight"])
    training.backward(1)
    before = training.model.hidden[2].weight.detach().clone()
    training.step()
    events = ["stepped"]

    def ran(name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            events.append(name)
            if name == "convolution":
                held.release()

        return note

    training.model.words.register_forward_hook(ran("embedding"))
    training.model.conv.register_forward_hook(ran("convolution"))
    training.model.hidden[2].register_forward_hook(ran("hidden"))
    training.model.hidden[2].register_forward_pre_hook(
        lambda module, _: events.append("applied" if not torch.equal(module.weight, before) else "stale"))
    training.model(batch(rank, 2)[0])
    training.session.close()
    return events


def test_the_first_layers_run_before_the_last_result_has_arrived() -> None:
    with rank_pool.Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(in_order, servers.address)
    assert results == [["stepped", "embedding", "convolution", "applied", "hidden"]] * WORLD


# ---- reading weights between the step and the forward pass

def by_module(t: Training) -> torch.Tensor:
    with torch.no_grad():
        return t.model(batch(0, 99)[0])


def by_part(t: Training) -> torch.Tensor:
    with torch.inference_mode():
        return t.model.hidden(torch.ones(3, 12)).clone()


def by_function(t: Training) -> torch.Tensor:
    return nn.functional.linear(torch.ones(3, 40), t.model.hidden[2].weight).detach()


def by_state(t: Training) -> torch.Tensor:
    return t.model.state_dict()["hidden.2.weight"].clone()


def by_copy(t: Training) -> torch.Tensor:
    twin = copy.deepcopy(t.model)
    assert type(twin.hidden[2].weight) is nn.Parameter
    return twin.hidden[2].weight.detach()


def by_file(t: Training) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(t.model.state_dict(), file)
    file.seek(0)
    return torch.load(file)["hidden.2.weight"]


def by_average(t: Training) -> torch.Tensor:
    from torch.optim.swa_utils import AveragedModel

    average = AveragedModel(Net())
    average.update_parameters(t.model)
    return average.module.hidden[2].weight.detach()


def by_optimizer(t: Training) -> torch.Tensor:
    state = t.optimizer.state_dict()["state"]
    return torch.cat([v.flatten() for _, values in sorted(state.items()) for v in values.values()])


def by_statistics(t: Training) -> torch.Tensor:
    return t.model.norm.running_mean.clone()


def by_data(t: Training) -> torch.Tensor:
    return t.model.hidden[2].weight.data.clone()


def by_change(t: Training) -> torch.Tensor:
    with torch.no_grad():
        t.model.hidden[2].weight.clamp_(-0.1, 0.1)
    return t.model.hidden[2].weight.detach().clone()


def by_drain(t: Training) -> torch.Tensor:
    assert not t.session.drain()
    assert t.overlap is None or t.overlap._out is None
    return t.model.hidden[2].weight.detach().clone()


READINGS = [by_module, by_part, by_function, by_state, by_copy, by_file, by_average, by_optimizer, by_statistics, by_data,
            by_change, by_drain]


def read(rank: int, address: str, overlap: str | None) -> list[torch.Tensor]:
    training, found = Training(rank, address, overlap, optimizer="adamw"), []
    training.train(-1, 0)
    held = Held(training.worker, until_awaited=True) if overlap == "forward" else None
    for number, reading in enumerate(READINGS):
        training.train(2 * number, 2 * number + 2)
        found.append(reading(training))
        training.model.train()
    assert held is None or held.count > len(READINGS)
    training.session.close()
    return found


def test_whoever_reads_weights_reads_those_of_the_last_step() -> None:
    results = []
    for overlap in (None, "forward"):
        with rank_pool.Servers(WORLD, 1) as servers:
            results.append(pool(WORLD).call(read, servers.address, overlap))
    for waited, overlapped in zip(*results, strict=True):
        wrong = [reading.__name__ for reading, a, b in zip(READINGS, waited, overlapped, strict=True) if not torch.equal(a, b)]
        assert wrong == []


# ---- using gradients that are not final

def clip(t: Training) -> None:
    nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)


def clip_one_by_one(t: Training) -> None:
    nn.utils.clip_grad_norm_(t.model.parameters(), 1.0, foreach=False)


def clip_values(t: Training) -> None:
    nn.utils.clip_grad_value_(t.model.parameters(), 1.0)


def norm(t: Training) -> None:
    t.model.head.weight.grad.norm()


def scale(t: Training) -> None:
    t.model.head.weight.grad.mul_(0.5)


def unscale(t: Training) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(t.optimizer)


def copied(t: Training) -> None:
    t.model.head.weight.grad.clone()


def other_optimizer(t: Training) -> None:
    torch.optim.SGD(t.model.parameters(), lr=0.1).step()


USES = [clip, clip_one_by_one, clip_values, norm, scale, unscale, copied, other_optimizer]


def used(rank: int, address: str) -> list[str]:
    training, said = Training(rank, address, "forward"), []
    for step, use in enumerate(USES):
        training.optimizer.zero_grad(set_to_none=bool(step % 2))
        training.backward(step)
        with pytest.raises(ValueError) as raised:
            use(training)
        said.append(str(raised.value))
        training.step()
    training.optimizer.zero_grad()
    training.backward(99)
    training.session.synchronize()
    clip(training)
    training.step()
    training.session.close()
    return said


def test_gradients_that_are_not_final_cannot_be_used() -> None:
    with rank_pool.Servers(WORLD, 1) as servers:
        for said in pool(WORLD).call(used, servers.address):
            for line in said:
                assert code_of(line) == "E-GRADIENT-PENDING"
                assert "session.synchronize()" in line
                assert "max_norm=" in line
                assert "\n" not in line


# ---- what looks on
