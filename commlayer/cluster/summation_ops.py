"""What the summation service asks of whoever knows codecs, for each bucket. Knows no codec itself."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


class Ops(Protocol):
    """What the codec side does for one bucket. One instance belongs to one bucket and holds its server state."""

    @property
    def rounds(self) -> int: ...

    @property
    def codec(self) -> int: ...

    @property
    def bound(self) -> int: ...

    @property
    def in_means(self) -> bool:
        """Whether payloads must be coded as parts of all workers' weight: see `Header.total`."""
        ...

    @property
    def means(self) -> bool:
        """Whether payloads count in a mean, by `weigh`, in place of being parts of a sum."""
        ...

    def zeros(self, r: int) -> Any: ...

    def add(self, r: int, payload: memoryview, acc: Any, first: bool) -> None: ...

    def weigh(self, payload: memoryview, weight: float, first: bool) -> None:
        """In place of `add`, where it is of `means`: counts so much in the mean that `emit` gives then."""
        ...

    def emit(self, r: int, acc: Any, out: memoryview) -> int: ...

    def undo(self, slices: int) -> None: ...

    def skip(self) -> None: ...

    def snapshot(self) -> bytes: ...

    def restore(self, data: bytes | memoryview) -> None: ...


@runtime_checkable
class GivesBack(Protocol):
    """Ops whose sums can be made again of the payloads."""

    def worth_giving_back(self, members: int) -> bool:
        """Whether the payloads of so many take half as much as their sum at most, which `undo` needs until the next step."""
        ...

    def give_back(self, acc: Any) -> None:
        """The memory of a sum, which is made again if it is needed."""
        ...


class Lasting(Ops, Protocol):
    """Ops whose state outlasts the process."""

    @property
    def memory_nbytes(self) -> int: ...

    def remember(self) -> bytes: ...

    def recall(self, data: bytes, sent: memoryview) -> None: ...

    def begin_anew(self) -> None: ...
