"""A descriptor for attributes that are stored in a component of their object."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Forwarded(Generic[T]):
    """`x: Forwarded[int] = Forwarded("part", "y")` in a class: `object.x` is `object.part.y`."""

    def __init__(self, part: str, name: str) -> None:
        self._part, self._name = attrgetter(part), name

    def __get__(self, instance: Any, owner: type) -> T:
        return getattr(self._part(instance), self._name)  # type: ignore[no-any-return]

    def __set__(self, instance: Any, value: T) -> None:
        setattr(self._part(instance), self._name, value)
