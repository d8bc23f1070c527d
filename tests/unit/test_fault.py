"""Whom a worker names in the end, of what it met itself and what it was told."""

from __future__ import annotations

from typing import Any

import pytest

from commlayer.cluster.process_groups import ANY_PEER
from commlayer.engine.step import FaultVerdict
from commlayer.errors import CommError, DeadlineExceeded, PeerLost

MET = PeerLost("connection lost", peer="server 1", step=4, bucket=2)
TOLD = PeerLost(f"left the job: PeerLost: {MET}", peer="worker 2")
DEAD = PeerLost("no heartbeat for 10.0 s", peer="server 1")
LINK: Any = object()
"""There is one, and it is not asked."""


@pytest.mark.parametrize(("met", "told", "named"), [
    (MET, TOLD, MET), (MET, DEAD, DEAD), (TOLD, TOLD, TOLD),
    (MET, PeerLost("left the job: ValueError: no room", peer="worker 2"), None),
    (DeadlineExceeded("no answer", peer="worker 3"), TOLD, TOLD), (CommError("timed out", peer=ANY_PEER), TOLD, TOLD),
    (CommError("the session is closed"), TOLD, TOLD), (ValueError("a mistake"), TOLD, None)])
def test_the_first_cause_is_named(met: Exception, told: CommError, named: CommError | None) -> None:
    verdict = FaultVerdict()
    verdict.fall(told)
    verdict.fall(PeerLost("came later", peer="worker 9"))
    expected = named if named is not None else told if isinstance(met, CommError) else met
    assert verdict.explain(met, LINK, notice_s=0.0, verdict_s=0.0) is expected
