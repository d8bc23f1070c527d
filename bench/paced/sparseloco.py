"""SparseLoCo (Sarfi, Therien, Lidin, Belilovsky: Communication Efficient LLM Pre-training with SparseLoCo, 2025), implemented
from the paper for comparison.

Every `every` steps of the inner optimizer, a rank adds its change since the last exchange to an error-feedback buffer that
decays. Of each chunk of 4096, it sends the `entries` largest values with two bits each and subtracts them from the buffer. All
ranks continue from the parameters of the last exchange, minus `lr` times the mean of all sent values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bench.paced.demo import Gather

CHUNK = 4096
PLACE_BITS = 12


def encode(x: torch.Tensor, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes rows of chunks: 12-bit places with two bits of value in an int16, and two float16 levels per chunk."""
    places = x.abs().topk(min(entries, x.shape[1]), dim=1).indices
    values = x.gather(1, places)
    size = values.abs()
    large = size > size.mean(1, keepdim=True)
    levels = torch.stack([_mean(size, ~large), _mean(size, large)], 1).half()
    bits = large.short() | ((values < 0).short() << 1)
    return places.short() | (bits << PLACE_BITS), levels


def decode(sent: torch.Tensor, levels: torch.Tensor, size: int) -> torch.Tensor:
    places, bits = (sent & ((1 << PLACE_BITS) - 1)).long(), (sent >> PLACE_BITS).long()
    values = levels.float().gather(1, bits & 1) * (1 - (bits & 2)).float()
    return torch.zeros(len(sent), size).scatter_(1, places, values)


def _mean(size: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    return (size * which).sum(1) / which.sum(1).clamp(min=1)


class SparseLoCo:
    """Exchanges after every `every` steps of `inner`. `sent` is the bytes that this rank sent in the last exchange."""

    def __init__(self, params: Sequence[nn.Parameter], inner: torch.optim.Optimizer, gather: Gather, every: int, *,
                 entries: int = 64, decay: float = 0.95, lr: float = 1.0) -> None:
        self._params, self._gather, self._every, self._entries = list(params), gather, every, entries
        self._decay, self._lr, self._steps, self.sent = decay, lr, 0, 0
        count = sum(p.numel() for p in self._params)
        self._start = torch.zeros(-(-count // CHUNK), CHUNK)
        self._residual = torch.zeros_like(self._start)
        self._flat(self._start)
        inner.register_step_post_hook(self._after)

    def _flat(self, into: torch.Tensor) -> torch.Tensor:
        flat = torch.cat([p.detach().flatten() for p in self._params])
        into.view(-1)[: len(flat)] = flat
        return into

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        self._steps += 1
        if self._steps % self._every:
            return
        self._residual.mul_(self._decay).add_(self._start - self._flat(torch.zeros_like(self._start)))
        sent, levels = encode(self._residual, self._entries)
        self._residual.sub_(decode(sent, levels, CHUNK))
        own = torch.cat([sent.flatten(), levels.view(torch.int16).flatten()])
        self.sent = own.numel() * 2
        payloads = self._gather(own)
        for body in payloads:
            theirs, rest = body[: sent.numel()].view(sent.shape), body[sent.numel() :].view(torch.float16).view(levels.shape)
            self._start.sub_(decode(theirs, rest, CHUNK), alpha=self._lr / len(payloads))
        at = 0
        for p in self._params:
            p.copy_(self._start.view(-1)[at : at + p.numel()].view(p.shape))
            at += p.numel()
