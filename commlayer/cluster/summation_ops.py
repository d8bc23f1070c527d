"""The interface between the summation service and codecs, for each bucket."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


class Ops(Protocol):
    """A bucket's codec operations and its server state."""

    @property
    def rounds(self) -> int: ...

    @property
    def codec(self) -> int: ...

    @property
    def bound(self) -> int: ...

    @property
    def in_means(self) -> bool:
        """Whether payloads must be coded for the total weight of all workers: see `Header.total`."""
        ...

    @property
    def means(self) -> bool:
        """Whether payloads are averaged with `weigh`, instead of summed with `add`."""
        ...

    def zeros(self, r: int) -> Any: ...

    def add(self, r: int, payload: memoryview, acc: Any, first: bool) -> None: ...

    def weigh(self, payload: memoryview, weight: float, first: bool) -> None:
        """Used instead of `add` if `means`: adds the payload with this weight to the mean that `emit` returns."""
        ...

    def emit(self, r: int, acc: Any, out: memoryview) -> int: ...

    def undo(self, slices: int) -> None: ...

    def skip(self) -> None: ...

    def snapshot(self) -> bytes: ...

    def restore(self, data: bytes | memoryview) -> None: ...


@runtime_checkable
class GivesBack(Protocol):
    """Ops whose sums can be computed again from the payloads."""

    def worth_giving_back(self, members: int) -> bool:
        """Whether the payloads of that many members take at most half the memory of their sum. `undo` needs one of the two
        until the next step."""
        ...

    def give_back(self, acc: Any) -> None:
        """Frees the memory of a sum, which is computed again if needed."""
        ...


class Lasting(Ops, Protocol):
    """Ops whose state can be journaled."""

    @property
    def memory_nbytes(self) -> int: ...

    def remember(self) -> bytes: ...

    def recall(self, data: bytes, sent: memoryview) -> None: ...

    def begin_anew(self) -> None: ...
