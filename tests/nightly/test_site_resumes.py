"""Three homes save a checkpoint, one is killed, and two or five resume: each gradient is applied or kept exactly once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import resuming_site
from support.resuming_site import Script
from support.site_job import DEADLINE_S
from support.sites import Sites, ended

pytestmark = pytest.mark.timeout(300)
SAVED, STEPS, DIES = 6, 11, 2
Rows = dict[str, list[dict[str, Any]]]


def rows_of(script: Script, count: int, *, leaves: bool, ended_well: list[bool]) -> Rows:
    """Runs a job to its end. Returns what its homes have written, by moment."""
    sites, given, rows = Sites(), msgspec.json.encode(script).decode(), Rows()
    sites.set(COMMLAYER_DEADLINE_S=DEADLINE_S)
    try:
        sites.serve(count, *(["--min-workers", "2"] if leaves else []))
        homes = [sites.launch(resuming_site.__file__, str(site), given, rank=site) for site in range(count)]
        ends = [ended(home) for home in homes]
    finally:
        sites.close()
    assert [end.code == 0 for end in ends] == ended_well, "\n".join(end.errors for end in ends)
    files = sorted(Path(script.rows).parent.glob(f"{Path(script.rows).name}-*"))
    for row in (json.loads(line) for file in files for line in file.read_text().splitlines()):
        rows.setdefault(row["what"], []).append(row)
    return rows


def total(rows: list[dict[str, Any]], what: str) -> torch.Tensor:
    return torch.tensor([row[what] for row in rows], dtype=torch.float64).sum(0)


@pytest.mark.parametrize(("mode", "codec", "leaves", "world"), [
    ("step", "topk(ratio=0.3)", True, 2), ("step", "int4(block=64)", False, 5), ("late", "onebit(block=64)", True, 5),
    ("late", "topk(ratio=0.3)", False, 2), ("forward", "topk(ratio=0.3)", True, 2), ("whole", "onebit(block=64)", False, 5),
    ("whole", "topk(ratio=0.3)", True, 2), ("fragments", "topk(ratio=0.3)", True, 5),
    ("fragments", "int4(block=64)", False, 2),
])
def test_other_homes_continue_a_job(mode: str, codec: str, leaves: bool, world: int, tmp_path: Path) -> None:
    """`leaves`: the home dies before the checkpoint, and the others save it; otherwise it dies after, and the job ends."""
    script = Script(str(tmp_path / "save"), str(tmp_path / "before"), mode, codec, SAVED + (1 if leaves else 3), SAVED,
                    killed=2, kill_at=DIES if leaves else SAVED + 1)
    before = rows_of(script, 3, leaves=leaves, ended_well=[leaves, leaves, False])["saved"]
    assert [row["world"] for row in before] == [2 if leaves else 3] * len(before)
    script = Script(str(tmp_path / "save"), str(tmp_path / "after"), mode, codec, STEPS)
    after = rows_of(script, world, leaves=leaves, ended_well=[True] * world)
    assert [row["step"] for row in after["resumed"]] == [SAVED] * world
    for row in after["resumed"]:
        assert row["weights"] == before[0]["weights"]
        assert row["outer"] == before[0]["outer"]
    assert total(before, "kept").abs().max() > 0.01
    torch.testing.assert_close(total(after["resumed"], "kept"), total(before, "kept"), atol=1e-4, rtol=1e-4)
    for row in after["ended"]:
        assert row["weights"] == after["ended"][0]["weights"]
    applied = torch.tensor(before[0]["weights"]).double() - torch.tensor(after["ended"][0]["weights"]).double()
    torch.testing.assert_close(applied + total(after["ended"], "kept") - total(before, "kept"), total(after["ended"], "put"),
                               atol=1e-4, rtol=1e-4)
