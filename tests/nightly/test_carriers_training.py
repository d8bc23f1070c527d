"""A job trains the same bits over every carrier. One setting is all that the job is told of it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from support.attached import data, mlp
from support.meshes import keys
from support.rank_pool import pool, quick
from torch import nn

import commlayer

STEPS = 4


def trained(rank: int, fields: dict[str, Any], plan: str) -> tuple[str, set[str]]:
    """A digest of the parameters, and what went to the server travelled on."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlayer.attach(model, optimizer, plan=plan, config=quick(**fields)) as session:
        link: Any = session.inspect.connection.uplink
        channels = {type(c._sock).__name__ for c in link.transport._inner._connections.values()}
        for step in range(STEPS):
            x, y = data(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return digest, channels


def test_over_every_carrier_the_same_bits_are_trained() -> None:
    secured = {"keys": str(keys().folder)}
    told: list[tuple[dict[str, Any], str]] = [
        ({}, "socket"), (secured, "TlsSocket"), ({"carrier": "grpc", "servers": "each", "ranks_per_node": 1}, "GrpcStream"),
    ]
    digests = set()
    for fields, channel in told:
        for digest, channels in pool(2).call(trained, fields, "topk(ratio=0.1)"):
            assert channels == {channel}
            digests.add(digest)
    assert len(digests) == 1
