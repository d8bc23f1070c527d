"""What stands in `.grad` while its average is on its way: a tensor without contents that refuses to be used.

It has the gradient's shape, type and device, so that it can stand there, and can be cleared as `zero_grad()` does it. Whatever
else reads or writes it gets one line that says why there is nothing yet, instead of half an average; or waits for all of it,
where the script did not ask for overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

NOT_FINAL = (
    "the gradient of {} is not final: with overlap='forward' averages come in behind backward(), up to the next forward pass. "
    "Call session.synchronize() before gradients are read or changed; clip with attach(..., max_norm=), and name a GradScaler "
    "with attach(..., scaler=)"
)
_aten = torch.ops.aten
_KEEPS = {_aten.detach_.default}


class GradientMark(torch.Tensor):
    """Of one parameter. `zeroed`: somebody has set it to zeros since `fresh()`."""

    owner: str
    zeroed: bool
    final: Callable[[], torch.Tensor] | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # all that it is used for comes by __torch_dispatch__

    @staticmethod
    def of(name: str, p: torch.Tensor, final: Callable[[], torch.Tensor] | None = None) -> GradientMark:
        """`final` waits for what is to stand there, for a script that knows nothing of all this; None refuses."""
        mark: GradientMark = torch.Tensor._make_wrapper_subclass(
            GradientMark, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device)
        mark.owner, mark.zeroed, mark.final = name, False, final
        return mark

    def fresh(self) -> GradientMark:
        """For another step."""
        self.zeroed = False
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _aten.zero_.default:
            args[0].zeroed = True
            return args[0]
        if func is _aten._foreach_zero_.default:
            marks = [t for t in args[0] if isinstance(t, GradientMark)]
            for mark in marks:
                mark.zeroed = True
            if others := [t for t in args[0] if not isinstance(t, GradientMark)]:
                torch._foreach_zero_(others)
            return None
        if func in _KEEPS:
            return args[0]
        flat = [*args, *(each for arg in args if isinstance(arg, list | tuple) for each in arg), *(kwargs or {}).values()]
        if (mark := next(t for t in flat if isinstance(t, GradientMark))).final is None:
            mark._refuse()
        return func(*(_final(arg) for arg in args), **{name: _final(arg) for name, arg in (kwargs or {}).items()})

    def numpy(self, *, force: bool = False) -> NoReturn:
        del force
        self._refuse()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<the gradient of {self.owner} is not final>"

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        self._refuse()

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(NOT_FINAL.format(self.owner))


def _final(value: Any) -> Any:
    if isinstance(value, GradientMark) and value.final is not None:
        return value.final()
    return type(value)(map(_final, value)) if isinstance(value, list | tuple) else value
