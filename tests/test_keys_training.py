"""A job over TLS trains the bits that one in plain text trains. One setting is all that the job is told of it."""

from __future__ import annotations

import hashlib

import torch
from attach_kit import data, mlp
from keys_kit import Folders, made_folders  # noqa: F401  (a fixture)
from pool_kit import pool, quick
from torch import nn

import commlayer
from commlayer.transport.tls import TlsSocket

STEPS = 4


def trained(rank: int, fields: dict[str, str], plan: str) -> tuple[str, bool]:
    """A digest of the parameters, and whether what went to the server went in TLS."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlayer.attach(model, optimizer, plan=plan, config=quick(**fields)) as session:
        link = session.inspect.connection.uplink
        secured = [isinstance(c._sock, TlsSocket) for c in link.transport._inner._connections.values()]
        for step in range(STEPS):
            x, y = data(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return digest, bool(secured) and all(secured)


def test_over_tls_the_same_bits_are_trained(folders: Folders) -> None:
    plain, secured = (pool(2).call(trained, fields, "topk(ratio=0.1)") for fields in ({}, {"keys": str(folders.worker)}))
    assert {tls for _, tls in plain} == {False}
    assert {tls for _, tls in secured} == {True}
    assert len({digest for digest, _ in (*plain, *secured)}) == 1
