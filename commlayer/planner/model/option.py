"""The planner's decision for a bucket: path and codecs."""

from __future__ import annotations

from typing import NamedTuple

from commlayer.records import over_server

DENSE = "identity()"


class Option(NamedTuple):
    """What a plan decides for a bucket, except its server and owner."""

    path: str
    codec: str = DENSE
    down: str = ""
    by_node: tuple[str, ...] = ()

    @property
    def served(self) -> bool:
        """Whether a summation server takes part."""
        return over_server(self.path)

    def __str__(self) -> str:
        extra = [f"down {self.down}"] if self.down else []
        extra += [f"by node {', '.join(self.by_node)}"] if self.by_node else []
        return " ".join([self.codec, "over", self.path, *(f"({e})" for e in extra)])
