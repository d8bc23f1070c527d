"""Defines the placeholder in `.grad` for a pending average: a tensor without contents whose use raises an error or waits.

The placeholder has the gradient's shape, type and device, so that `.grad` accepts it, and `zero_grad()` can clear it. If the
script requested overlap, any other use raises an error instead of exposing part of an average. If the script did not request
overlap, a use waits for the average. Such a script can keep the placeholder like any gradient, even over later steps.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from commlayer.errors import InvalidInput

NOT_FINAL = (
    "the gradient of {} is not final: under sync='forward' averages arrive after backward(), up to the next forward pass. "
    "Call session.synchronize() before gradients are read or changed; clip with attach(..., clip_grad_norm=), and name a "
    "GradScaler with attach(..., grad_scaler=)"
)
_aten = torch.ops.aten
_KEEPS = {_aten.detach_.default}


class GradientMark(torch.Tensor):
    """The placeholder in one parameter's `.grad` for a pending average. `zeroed`: True if the script has set it to zeros since
    `fresh()`. `final`: see `of`."""

    owner: str
    zeroed: bool
    final: Callable[[GradientMark], torch.Tensor] | None
    value: torch.Tensor | None
    """The average, once it has arrived; None before."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # all uses arrive in __torch_dispatch__

    @staticmethod
    def of(name: str, p: torch.Tensor, final: Callable[[GradientMark], torch.Tensor] | None = None) -> GradientMark:
        """Creates the placeholder of parameter `p`. `final` waits for the average and returns it, for a script that did not
        request overlap. None: each use raises an error."""
        mark: GradientMark = torch.Tensor._make_wrapper_subclass(
            GradientMark, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device)
        mark.owner, mark.zeroed, mark.final, mark.value = name, False, final, None
        return mark

    def fresh(self) -> GradientMark:
        """Resets the placeholder for the next step and returns it."""
        self.zeroed = False
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _aten.zero_.default and args[0].value is None:
            args[0].zeroed = True
            return args[0]
        if func is _aten._foreach_zero_.default:
            marks = [t for t in args[0] if isinstance(t, GradientMark) and t.value is None]
            for mark in marks:
                mark.zeroed = True
            if others := [_final(t) for t in args[0] if not any(t is mark for mark in marks)]:
                torch._foreach_zero_(others)
            return None
        if func in _KEEPS:
            return args[0]
        return func(*(_final(arg) for arg in args), **{name: _final(arg) for name, arg in (kwargs or {}).items()})

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"<the gradient of {self.owner} is not final>" if self.final is None else repr(_final(self))


def _past_dispatch(name: str) -> Callable[..., Any]:
    def use(self: GradientMark, *args: Any, **kwargs: Any) -> Any:
        return getattr(_final(self), name)(*args, **kwargs)

    return use


for _name in ("numpy", "tolist", "data_ptr", "storage", "untyped_storage", "is_shared", "share_memory_", "__dlpack__",
              "__array__", "__reduce_ex__", "__deepcopy__"):
    # These methods access memory directly and bypass __torch_dispatch__.
    setattr(GradientMark, _name, _past_dispatch(_name))


def _final(value: Any) -> Any:
    if isinstance(value, GradientMark):
        if value.final is None:
            raise InvalidInput("E-GRADIENT-PENDING", NOT_FINAL.format(value.owner))
        return value.final(value)
    return type(value)(map(_final, value)) if isinstance(value, list | tuple) else value


class GradientMarks:
    """The placeholders for pending averages in the `.grad` of all parameters, by parameter number."""

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], final: Callable[[int, GradientMark], torch.Tensor] | None,
    ) -> None:
        """`final` receives a parameter's number and its placeholder, waits for the average and returns it. None: each use
        raises an error."""
        self._lasts = final is not None
        self._all = [GradientMark.of(name, p, None if final is None else functools.partial(final, number))
                     for number, (name, p) in enumerate(named)]
        self._unheld = self._names()

    def __getitem__(self, number: int) -> GradientMark:
        return self._all[number]

    def __iter__(self) -> Iterator[GradientMark]:
        return iter(self._all)

    def store_average(self, number: int, average: torch.Tensor | None) -> None:
        """Stores the arrived average in the parameter's placeholder, so that references that a script has kept can read it."""
        if self._lasts:
            self._all[number].value = average

    def reset(self) -> None:
        """Prepares all placeholders for the next step. Placeholders that a script still references keep their values and are
        replaced by new ones."""
        is_held = [now > alone for now, alone in zip(self._names(), self._unheld, strict=True)]
        for number, mark in enumerate(self._all):
            if is_held[number] and mark.value is not None:
                self._all[number] = GradientMark.of(mark.owner, mark, mark.final)
            else:
                mark.value = None

    def _names(self) -> list[int]:
        return [sys.getrefcount(mark) for mark in self._all]
