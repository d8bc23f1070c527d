"""Paths: the ops of one bucket, and their spelling in a plan. grammar.py defines which paths are legal.

    encode@cpu net.push net.pull decode@cpu                                    summed by a server, compressed both ways
    node.reduce_scatter encode@gpu net.allgather decode@cpu node.allgather     two-level, compressed between nodes

A collective carries payloads between an encode and the next decode, and floats elsewhere.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from commlayer.errors import InvalidInput

Scope = Literal["all", "node", "net"]
"""Ranks that take part: all; the ranks of one node; between nodes, the ranks of one local number (or one rank of each
node)."""

Device = Literal["gpu", "cpu"]

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "alltoall", "reduce", "gather", "broadcast")
SERVICE = ("push", "pull", "forward")
"""Ops of a summation server (scope net). `pull`: the server encodes the sum again. `forward`: it sends the merged sum as
it is."""

CODING = ("encode", "decode")

ALIASES = {
    "allreduce": "all.allreduce",
    "service": "encode@cpu net.push net.pull decode@cpu",
}
"""Short names. On nodes of several ranks, "service" adds node.reduce before and node.broadcast after."""


class Op(NamedTuple):
    """One op: a collective in a scope, or an encode or decode on a device."""

    name: str
    where: str
    """Scope of a collective, device of an encode or decode."""

    def __str__(self) -> str:
        return f"{self.name}@{self.where}" if self.name in CODING else f"{self.where}.{self.name}"


Path = tuple[Op, ...]


def spell(path: Path) -> str:
    return " ".join(map(str, path))


@lru_cache(maxsize=1024)
def parse(text: str, ranks_per_node: int = 1) -> Path:
    """Parses a path, short names included."""
    if text == "service" and ranks_per_node > 1:
        text = f"node.reduce {ALIASES[text]} node.broadcast"
    return tuple(_op(word, text) for word in ALIASES.get(text, text).split())


def _op(word: str, text: str) -> Op:
    coding, _, device = word.partition("@")
    if coding in CODING:
        if device not in get_args(Device):
            raise InvalidInput("E-PLAN-PATH", f"path {text!r}: {word!r} is on no device, allowed: {coding}@gpu, {coding}@cpu")
        return Op(coding, device)
    scope, _, name = word.partition(".")
    if scope not in get_args(Scope) or name not in COLLECTIVES + SERVICE or (name in SERVICE and scope != "net"):
        raise InvalidInput("E-PLAN-PATH",
            f"path {text!r}: {word!r} is no op, allowed: encode@DEVICE, decode@DEVICE, "
            f"(all|node|net).({'|'.join(COLLECTIVES)}), "
            f"net.({'|'.join(SERVICE)}); or the whole path as {' or '.join(ALIASES)}"
        )
    return Op(name, scope)
