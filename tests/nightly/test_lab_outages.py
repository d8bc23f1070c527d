"""Homes over a link of 40 ms stay members, whatever interrupts them: a cut line, or a server that is restarted later."""

from __future__ import annotations

import pytest
from support.lab import needs_lab

from tests.chaos import outages
from tests.chaos.outages import Job, Outage


@pytest.mark.timeout(400)
@needs_lab
@pytest.mark.parametrize("job", [Job("40ms", outages.IDLE), Job("40ms", outages.FILLED)], ids=["idle", "filled"])
def test_a_cut_and_a_restart_of_20_s_end_no_membership(job: Job) -> None:
    """Twice the silence after which a process counts as dead if nothing else is known."""
    rows = outages.suffered([[Outage(0, 20.0), Outage(-1, 20.0)]], [job])
    assert [row.stays for row in rows] == [True, True], [row.told() for row in rows]
    assert [row.refusals for row in rows] == [[], []], "nobody did anything wrong"
