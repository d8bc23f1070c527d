"""A numpy replacement for the part of torch that a server's codecs use, so a server runs without torch.

Names, arguments and results (bit for bit) are those of torch, for host memory only. Codec functions that only workers call are
not supported. Codecs import this module through tensors.py, as `torch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

float32, float64 = np.dtype(np.float32), np.dtype(np.float64)
int32, int64 = np.dtype(np.int32), np.dtype(np.int64)


class Device(NamedTuple):
    type: str

    def __str__(self) -> str:
        return self.type


class Tensor(np.ndarray[Any, np.dtype[Any]]):
    """A numpy array with torch's methods. If all operands have one dtype, numpy's arithmetic and slices equal torch's."""

    device: Any = Device("cpu")

    def numel(self) -> int:
        return self.size

    def dim(self) -> int:
        return self.ndim

    def is_contiguous(self) -> bool:
        return self.flags.c_contiguous

    def is_floating_point(self) -> bool:
        return self.dtype.kind == "f"

    def data_ptr(self) -> int:
        return int(self.ctypes.data)

    def numpy(self) -> npt.NDArray[Any]:
        return self.view(np.ndarray)

    def to(self, device: Device) -> Tensor:
        return self

    def clone(self) -> Tensor:
        return _tensor(self.copy())

    def isfinite(self) -> Tensor:
        return isfinite(self)

    def clamp(self, least: float, most: float) -> Tensor:
        return _tensor(self.clip(least, most))

    def split(self, sizes: Sequence[int]) -> list[Tensor]:
        return [_tensor(self[start:stop]) for start, stop in pairwise(np.cumsum([0, *sizes]))]

    def fill_(self, value: float) -> Tensor:
        self.fill(value)
        return self

    def zero_(self) -> Tensor:
        return self.fill_(0)

    def copy_(self, source: Tensor) -> Tensor:
        np.copyto(self, source)
        return self

    def add_(self, other: Tensor | float) -> Tensor:
        return _tensor(np.add(self, other, out=self))

    def sub_(self, other: Tensor | float) -> Tensor:
        return _tensor(np.subtract(self, other, out=self))

    def mul_(self, other: Tensor | float) -> Tensor:
        return _tensor(np.multiply(self, other, out=self))

    def div_(self, other: Tensor | float) -> Tensor:
        return _tensor(np.divide(self, other, out=self))

    def clamp_(self, least: float, most: float) -> Tensor:
        return clamp(self, least, most, out=self)

    def nan_to_num_(self) -> Tensor:
        np.nan_to_num(self, copy=False)
        return self


def empty(count: int, dtype: Any = float32, device: Any = None) -> Tensor:
    return np.empty(count, dtype).view(Tensor)


def zeros(count: int, dtype: Any = float32) -> Tensor:
    return np.zeros(count, dtype).view(Tensor)


def empty_like(x: Tensor) -> Tensor:
    return _tensor(np.empty_like(x))


def zeros_like(x: Tensor) -> Tensor:
    return _tensor(np.zeros_like(x))


def tensor(value: float, dtype: Any) -> Tensor:
    return np.array(value, dtype).view(Tensor)


def from_numpy(array: npt.NDArray[Any]) -> Tensor:
    return array.view(Tensor)


def cat(parts: Sequence[Tensor]) -> Tensor:
    return np.concatenate(parts).view(Tensor)


def add(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
    return _tensor(np.add(x, y, out=out))


def sub(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
    return _tensor(np.subtract(x, y, out=out))


def clamp(x: Tensor, least: float, most: float, *, out: Tensor) -> Tensor:
    return np.clip(x, least, most, out=out)


def isfinite(x: Tensor) -> Tensor:
    return _tensor(np.isfinite(x))


def where(condition: Tensor, x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
    np.copyto(out, np.where(condition, x, y))
    return out


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """Casts the type for type checkers: numpy functions return a Tensor when their input is a Tensor."""
    return cast(Tensor, array)
