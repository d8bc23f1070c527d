"""What ranks wait for, one thing after the other, in a change of plans: collectives, and groups that are made for them.

On a link of 80 ms each is a good part of a second, so they are counted, in real ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from support import rank_pool
from support.rank_pool import Servers, pool
from support.sync_modes import Training

WORLD = 2
_ranks = rank_pool.ranks_first(WORLD)
CALLS = ("new_group", "all_gather", "all_to_all_single", "broadcast", "all_reduce", "barrier")


@contextmanager
def counted() -> Iterator[list[str]]:
    """What is asked of torch.distributed meanwhile."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            def called(*args: Any, _name: str = name, _call: Any = getattr(dist, name), **how: Any) -> Any:
                made.append(_name)
                return _call(*args, **how)

            patch.setattr(dist, name, called)
        yield made


def changes(rank: int, _world: int, address: str) -> dict[str, Any]:
    """Changes of plans under AdamW, whose local steps tell each other lengths of changes."""
    training, found = Training(rank, address, "gradients", optimizer="adamw"), {}
    training.train(2)
    for name, way in (("into", "every"), ("between", "round"), ("again", "whole round")):
        with counted() as found[name]:
            training.switch(way)
        training.train(4)
    local = training.connection.local
    told = local is not None and local._lengths is not None
    training.session.flush()
    training.session.close()
    return {**found, "told": told}


def test_a_change_of_plans_asks_little_of_the_network_and_makes_no_group() -> None:
    with Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(changes, WORLD, servers.address)
    for result in results:
        assert result["told"], "ranks under Adam tell each other how long their changes are"
        for name in ("into", "between", "again"):
            assert "new_group" not in result[name], name
        # Where all stand; the plan; that it fits; and that servers have it.
        assert len(result["into"]) == 4, result["into"]
        # Besides: what the round before has left, with its lengths by fragment, and that it is over on all ranks.
        assert len(result["between"]) <= 4 + 2, result["between"]
        assert len(result["again"]) <= 4 + 1 + 2 * 2, result["again"]
