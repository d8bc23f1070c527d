"""Kernels of the lazy optimizers in torch operations, for any device: slow, with results equal bit for bit to the native
kernels'.
"""

from __future__ import annotations

import torch

from commlayer.errors import CorruptFrame

MASK = 0xFFFFFFFF
GROUP = 16
"""Number of elements per stamp, as in native/include/commlayer.h."""


def check_positions(idx: torch.Tensor, n: int) -> torch.Tensor:
    """Returns positions as int64. Raises CorruptFrame unless they increase and are below n."""
    at = idx.to(torch.int64) & MASK
    if at.numel() and (int(at[-1]) >= n or not bool((at[1:] > at[:-1]).all())):
        raise CorruptFrame("sparse gradient: positions must increase and be inside the parameter")
    return at


def _groups(at: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the groups of these elements, and all elements of those groups."""
    groups = torch.div(at, GROUP, rounding_mode="floor").unique()
    every = (groups[:, None] * GROUP + torch.arange(GROUP, device=at.device)).view(-1)
    return groups, every[every < n]


def _rows(rows: torch.Tensor, stamp: torch.Tensor, now: int, width: int, groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns, for each of these groups, the columns of the table row that makes up for its missed steps."""
    behind = (now - stamp[groups].to(torch.int64)) & 255
    return rows.view(-1, width)[behind].unbind(1)


def _spread(g: torch.Tensor, at: torch.Tensor, every: torch.Tensor) -> torch.Tensor:
    """Returns the gradients of all elements in the groups: 0 where the sparse gradient has none."""
    spread = torch.zeros(every.numel(), device=g.device)
    spread[torch.searchsorted(every, at)] = g
    return spread


def _caught_up_sgd(
    w: torch.Tensor, v: torch.Tensor | None, p: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if v is None:
        return w + p[0] * w, None
    return w + (p[0] * w + p[1] * v), p[2] * w + p[3] * v


def sgd_sparse(
    w: torch.Tensor, v: torch.Tensor | None, stamp: torch.Tensor | None, now: int, rows: torch.Tensor, idx: torch.Tensor,
    g: torch.Tensor, rate: float, momentum: float, gain: float, decay: float, nesterov: bool,
) -> int:
    at = check_positions(idx, w.numel())
    if stamp is not None:
        groups, every = _groups(at, w.numel())
        at, g = every, _spread(g, at, every)
    x, y = w[at], None if v is None else v[at]
    if stamp is not None:
        x, y = _caught_up_sgd(x, y, _rows(rows, stamp, now, 4, at // GROUP))
        stamp[groups] = now + 1 & 255
    u = g if _float(decay) == 0 else g + _float(decay) * x
    if v is not None and y is not None:
        y = _float(momentum) * y + _float(gain) * u
        u = u + _float(momentum) * y if nesterov else y
        v[at] = y
    w[at] = x - _float(rate) * u
    return idx.numel()


def sgd_catch_up(w: torch.Tensor, v: torch.Tensor | None, stamp: torch.Tensor, now: int, rows: torch.Tensor) -> None:
    x, y = _caught_up_sgd(w, v, _rows(rows, stamp, now, 4, _group_of_each(w)))
    w.copy_(x)
    if v is not None and y is not None:
        v.copy_(y)
    stamp.fill_(now & 255)


def _group_of_each(w: torch.Tensor) -> torch.Tensor:
    return torch.arange(w.numel(), device=w.device) // GROUP


def _caught_up_adam(w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, p: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    q = _root(v)
    return w + (p[0] * w - m * (p[3] / (q + p[4]) + p[5] / (q + p[6]))), p[1] * m, p[2] * v


def adam_sparse(
    w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, stamp: torch.Tensor | None, now: int, rows: torch.Tensor,
    idx: torch.Tensor, g: torch.Tensor, step: torch.Tensor,
) -> int:
    at = check_positions(idx, w.numel())
    keep, lerp, beta2, gain, root, eps, rate = step.unbind()
    if stamp is not None:
        groups, every = _groups(at, w.numel())
        at, g = every, _spread(g, at, every)
    x, y, z = w[at], m[at], v[at]
    if stamp is not None:
        x, y, z = _caught_up_adam(x, y, z, _rows(rows, stamp, now, 8, at // GROUP))
        stamp[groups] = now + 1 & 255
    y = y + lerp * (g - y)
    z = beta2 * z + (gain * g) * g
    w[at] = keep * x - rate * (y / (_root(z) / root + eps))
    m[at] = y
    v[at] = z
    return idx.numel()


def adam_catch_up(
    w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, stamp: torch.Tensor, now: int, rows: torch.Tensor
) -> None:
    made_up = _caught_up_adam(w, m, v, _rows(rows, stamp, now, 8, _group_of_each(w)))
    for memory, current in zip((w, m, v), made_up, strict=True):
        memory.copy_(current)
    stamp.fill_(now & 255)


def huge_pages(x: torch.Tensor) -> None:
    """Does nothing, because only the native core uses huge pages."""


def flat_positions(idx: torch.Tensor, at: torch.Tensor, shape: tuple[int, ...]) -> None:
    flat = torch.zeros(idx.numel(), dtype=torch.int64, device=at.device)
    inside = True
    for row, most in zip(at, shape, strict=True):
        inside = inside and bool(((row >= 0) & (row < most)).all())
        flat = flat * most + row
    if not inside or not bool((flat[1:] > flat[:-1]).all()):
        raise CorruptFrame("sparse gradient: positions must increase and be inside the parameter")
    idx.copy_(flat.to(torch.int32))


def coordinates(at: torch.Tensor, idx: torch.Tensor, shape: tuple[int, ...]) -> None:
    left = idx.to(torch.int64) & MASK
    for d in range(len(shape) - 1, -1, -1):
        at[d] = left if d == 0 else left % shape[d]
        left = left // max(shape[d], 1)


def _root(x: torch.Tensor) -> torch.Tensor:
    """Returns the correctly rounded square root. torch's own square root in single precision is not correctly rounded."""
    return x.double().sqrt().float()


def _float(x: float) -> float:
    """Rounds to float32, as the native kernels' arguments are."""
    return float(torch.tensor(x, dtype=torch.float32))
