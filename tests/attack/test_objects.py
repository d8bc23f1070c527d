"""A hostile site sends pickles and sizes through torch's object collectives, and forges values of others before they are read.

Run as a script: one site. Site 2 is hostile.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.attached import assert_refused
from support.sites import WAIT_S, Sites, next_row
from torch.distributed import all_gather_object, broadcast_object_list, gather_object, scatter_object_list

from commlayer.cluster.processes import object_collectives

HOSTILE, WORLD = 2, 3
SIZES = [10**12, 8 << 30, -5]
ALLOWED_GROWTH_NBYTES = 32 << 20


def receive_zero_state() -> object:
    """What torch's ZeRO optimizer receives of the state of rank HOSTILE."""
    from torch.distributed.optim import zero_redundancy_optimizer  # imported late: it takes a second

    return zero_redundancy_optimizer._broadcast_object(None, HOSTILE, dist.group.WORLD)  # type: ignore[attr-defined]


CALLS: dict[str, Callable[[], Any]] = {
    "all_gather_object": lambda: all_gather_object([None] * WORLD, "mine"),
    "gather_object": lambda: gather_object("mine", [None] * WORLD if dist.get_rank() == 0 else None, dst=0),
    "broadcast_object_list": lambda: broadcast_object_list([None], src=HOSTILE),
    "scatter_object_list": lambda: scatter_object_list([None], None, src=HOSTILE),
    "state of ZeRO": receive_zero_state,
}


class Code:
    """Unpickling it writes a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({self._path!r}, 'w').close()",)


def attack(call: str, size: int | None, marker: str) -> None:
    """Takes part in an object collective with a pickle, or names another size."""
    data = torch.frombuffer(bytearray(pickle.dumps([Code(marker)])), dtype=torch.uint8)
    sizes = torch.tensor([len(data) if size is None else size])
    if call in ("all_gather_object", "gather_object"):
        rows = [torch.empty_like(sizes) for _ in range(WORLD)]
        dist.all_gather(rows, sizes)
        if size is None:
            group: Any = dist.group.WORLD
            group.allgather_unequal([torch.empty(int(row), dtype=torch.uint8) for row in rows], data).wait()
    else:
        dist.broadcast(sizes, HOSTILE)
        if size is None:
            dist.broadcast(data, HOSTILE)


def forge(marker: str) -> list[str]:
    """Writes the next values of rank 0 before rank 0 does, and over existing ones; the coordinator's replies."""
    from commlayer.cluster.processes import site_process_group

    kv, group, answers = site_process_group.kv_client(), dist.group.WORLD, []
    data = pickle.dumps([Code(marker)])
    for part in range(group._next - 1, group._next + 4):  # type: ignore[union-attr]
        for how in ({"put": [((f"{group.place}/{part}", 0), data)]}, {"drop": [(f"{group.place}/{part}", 0)]}):  # type: ignore[union-attr]
            try:
                kv.request(time.monotonic() + 20.0, **how)  # type: ignore[arg-type]
                answers.append("accepted")
            except Exception as error:
                answers.append(str(error))
    return answers


def main(marker: str) -> None:
    dist.init_process_group("gloo")
    importlib.import_module(object_collectives.ZERO)  # as a script that has made such an optimizer
    object_collectives.allow(0)  # as attach() does
    hostile, lines = dist.get_rank() == HOSTILE, dict[str, str]()
    every: list[Any] = [None] * WORLD
    all_gather_object(every, dist.get_rank())
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_nbytes("VmRSS")
    for call, act in CALLS.items():
        for size in (None, *SIZES):
            if hostile:
                attack(call, size, marker)
                continue
            try:
                act()
                lines[f"{call} {size}"] = ""
            except Exception as error:
                lines[f"{call} {size}"] = str(error)
    growth_nbytes = memory_nbytes("VmHWM") - before
    answers = forge(marker) if hostile else []
    dist.barrier()
    told: list[Any] = ["from rank 0", {"x": torch.arange(3)}] if dist.get_rank() == 0 else [None, None]
    broadcast_object_list(told, src=0)
    all_gather_object(every, {"text": "x" * 200_000 * dist.get_rank()})  # of different sizes, in several chunks
    print(json.dumps({"rank": dist.get_rank(), "lines": lines, "growth": growth_nbytes, "answers": answers,
                      "told": [told[0], told[1]["x"].tolist()],
                      "every": [len(row["text"]) for row in every]}), flush=True)
    time.sleep(WAIT_S)  # a home that ends before attach() would end the others


def memory_nbytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def test_code_and_sizes_of_a_hostile_site_have_no_effect(tmp_path: Path) -> None:
    marker, sites = tmp_path / "marker", Sites()
    try:
        sites.serve(WORLD)
        homes = [sites.launch(__file__, str(marker), rank=rank) for rank in range(WORLD)]
        rows = [next_row(home) for home in homes]
    finally:
        sites.close()
    assert not marker.exists()
    for row in rows:
        assert row["told"] == ["from rank 0", [0, 1, 2]]
        assert row["every"] == [200_000 * rank for rank in range(WORLD)]
        if row["rank"] != HOSTILE:
            assert len(row["lines"]) == len(CALLS) * (1 + len(SIZES))
            for name, line in row["lines"].items():
                assert_refused(line, "E-OBJECT" if name.endswith("None") else "E-SIZE", f"rank {HOSTILE}")
            assert row["growth"] < ALLOWED_GROWTH_NBYTES
    assert len(rows[HOSTILE]["answers"]) == 10
    for line in rows[HOSTILE]["answers"]:
        assert_refused(line, "E-OWNER", "worker 0")


if __name__ == "__main__":
    assert "COMMLAYER_TOKEN" in os.environ
    main(sys.argv[1])
