"""Each feature in each kind of job: the table of docs/reference/support.md.

Every worker must have used the feature, and all end with equal weights. Where homes come and go, one is killed in the middle of
a step, and another one joins. A feature that REFUSED names is refused with that code instead.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import features, rank_pool
from support.attached import mlp
from support.features import STEPS, Part
from support.matrix import KINDS, REFUSED
from support.rank_pool import Pool
from support.site_job import digest
from support.sites import KILLED, Sites, ended, joined

pytestmark = pytest.mark.timeout(300)
VICTIM = 1
TORCHRUN, LEAVE, GPUS = ("collectives", "servers"), ("leave", "gpus_leave"), ("gpus", "gpus_leave")
CELLS = [pytest.param(name, kind, id=f"{name}-{kind}",
                      marks=pytest.mark.nightly if feature.package or kind not in TORCHRUN else ())
         for name, feature in features.FEATURES.items() for kind in KINDS]


@pytest.fixture(scope="module")
def framework_ranks() -> Iterator[Pool]:
    """Separate processes: frameworks change the behaviour of a process in many places."""
    pool = Pool(2)
    yield pool
    pool.close()


def under_torchrun(part: Part, pool: Pool) -> tuple[list[dict[str, Any]], list[str]]:
    """The reports of all workers, and their errors."""
    results = pool.call(features.train, part)
    return [row for row in results if "error" not in row], [row["error"] for row in results if "error" in row]


def of_homes(part: Part, homes: int, sites: Sites) -> tuple[list[dict[str, Any]], list[str]]:
    ranks = part.world // homes
    sites.set(COMMLAYER_JOIN_DEADLINE_S="90", HF_HUB_OFFLINE="1")
    sites.serve(part.world, *(["--min-workers", "2"] if part.kind in LEAVE else []))

    def start(home: int, **place: Any) -> Any:
        mine = msgspec.structs.replace(part, dies=part.kind in LEAVE and home == VICTIM)
        return sites.launch(features.__file__, msgspec.json.encode(mine).decode(), options=("--nproc-per-node", str(ranks)),
                            **place)

    processes = [start(home, rank=home) for home in range(homes)]
    ends = []
    if part.kind in LEAVE and (part.feature, part.kind) not in REFUSED:
        dead = ended(processes.pop(VICTIM))
        assert dead.code == KILLED, dead.errors
        if features.FEATURES[part.feature].joins:
            ends.append(joined(lambda: start(homes)))
            assert ends[0].code == 0, ends[0].errors
    ends += [ended(process) for process in processes]
    return [row for end in ends for row in end.rows], [end.errors for end in ends if end.code not in (0, KILLED)]


@pytest.mark.parametrize(("feature", "kind"), CELLS)
def test_feature_in_kind_of_job(feature: str, kind: str, sites: Sites, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    package, refusal = features.FEATURES[feature].package, REFUSED.get((feature, kind))
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, which `make recipes` installs")
    ranks = 2 if feature == "gpus" or kind in GPUS else 1
    homes = 3 if ranks == 1 and (kind == "leave" or feature == "resume") else 2
    for again in range(2 if feature == "resume" else 1):
        part = Part(feature, kind, str(tmp_path), homes * ranks)
        if kind in TORCHRUN:
            pool = request.getfixturevalue("framework_ranks") if package else rank_pool.pool(part.world)
            reports, errors = under_torchrun(part, pool)
        else:
            reports, errors = of_homes(part, homes, sites)
        if refusal is not None:
            assert errors
            assert all(f"[{refusal.code}]" in error for error in errors), errors
            assert not reports
            return
        assert not errors, "\n".join(errors)
        gone = ranks if kind in LEAVE and not features.FEATURES[feature].joins else 0
        assert [row["world"] for row in reports] == [part.world - gone] * (part.world - gone)
        assert {row["sha"] for row in reports} == {reports[0]["sha"]} != {digest(mlp().parameters())}
        assert all(row["used"] for row in reports), reports
        assert {row["step"] for row in reports} == {reports[0]["step"]}
        assert reports[0]["step"] >= STEPS * (1 + again)
        if homes > 1 and (feature, kind) != ("auto", "servers"):  # on one machine it begins with all-reduce
            assert {row["servers"] > 0 for row in reports} == {kind != "collectives"}
        if kind in GPUS:
            assert {row["per_node"] for row in reports} == {2}
        if feature == "resume":
            assert {row["resumed"] for row in reports} == {STEPS * again}
            homes -= kind not in LEAVE
