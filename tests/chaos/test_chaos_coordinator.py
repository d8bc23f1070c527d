"""A job whose coordinator is killed for its rest: it ends as if nothing were, and nothing stays behind. Real runs of chaos."""

from __future__ import annotations

import random
import signal
import time

import pytest

from bench.chaos import cluster
from bench.chaos.campaign import Campaign
from bench.chaos.cluster import Cluster
from bench.chaos.strikes import STRIKES
from bench.chaos.trials import Setting, Trial

APART = Setting("identity()", servers=2, apart=True)


def kill_until_the_end(result: Cluster, trial: Trial, chance: random.Random) -> int:
    """The coordinator, which is started again after the last step of its job."""
    struck, until = result.coordinator.signal(signal.SIGKILL), time.monotonic() + 20.0
    while not all((result.folder / f"applied-{rank}").exists() for rank in range(2)) and time.monotonic() < until:
        time.sleep(0.01)
    result.restart_coordinator()
    return struck


@pytest.mark.parametrize(("fault", "waits", "line"), [
    # Servers wait for it for longer than this run may take, so it is theirs to tell.
    ("kill-coordinator", cluster.PATIENT, "worker 0: ended while no coordinator was running, according to its servers"),
    ("lose-coordinator", cluster.UNTOLD, "all workers have ended: this server ends too"),
])
def test_a_job_that_ends_without_its_coordinator_leaves_nothing_behind(
    fault: str, waits: dict[str, float], line: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STRIKES, "kill-coordinator", kill_until_the_end)
    monkeypatch.setattr(cluster, "UNTOLD", waits)
    with Campaign() as campaign:
        row = campaign.one(Trial(0, fault, APART, "coordinator", 0, 5))
    assert (row.verdict.outcome, row.verdict.wrong) == ("goes on", ())
    assert line in row.evidence.lines
