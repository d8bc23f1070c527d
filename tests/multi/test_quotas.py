"""Members that send, connect or ask too much are named and told, and the others go on; what is no offence is not noted."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.coordinators import WAIT_S, quick
from support.keys import Folders, made_folders  # noqa: F401  (a fixture)
from support.summation import VALUES, Doubles, push, service

from commlayer.cluster import messages
from commlayer.cluster.client import CoordinatorChannel
from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.summation import OVERHEAD_NBYTES, REPEAT_EVERY_S, REPEATS
from commlayer.errors import CommError, CorruptFrame
from commlayer.transport.endpoint import shut_down
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import Flag

SECRET = "correct-horse-battery"


# ---- bytes of a step


def test_a_member_may_say_its_part_again_but_not_for_ever() -> None:
    core, ops = service()
    for step in range(3):
        for _ in range(REPEATS):
            core.push(push(1, VALUES[1], step), 0.0)
        for member in (0, 1, 2):
            core.push(push(member, VALUES[member], step), 0.0)
    for _ in range(REPEATS + 1):
        core.push(push(1, VALUES[1], 3), 0.0)
    with pytest.raises(CorruptFrame, match=rf"worker 1: .* {(REPEATS + 1) * (8 + OVERHEAD_NBYTES)} .*step 3\b.*E-FRAME"):
        core.push(push(1, VALUES[1], 3), 0.0)
    ops.added.clear()
    for member in (0, 2):
        core.push(push(member, VALUES[member], 3), 0.0)
    assert ops.added == VALUES, "what it had said counts, and the others go on"


def test_a_step_that_waits_long_lets_members_repeat_themselves_for_as_long() -> None:
    core, ops = service()
    beats = 4 * REPEATS  # a connection that breaks every second, while member 2 is waited for
    for second in range(beats):
        core.push(push(1, VALUES[1]), 100.0 + second * REPEAT_EVERY_S)
    for _ in range(REPEATS):
        core.push(push(1, VALUES[1]), 100.0 + (beats - 1) * REPEAT_EVERY_S)
    with pytest.raises(CorruptFrame, match=f" {(REPEATS + beats) * (8 + OVERHEAD_NBYTES) * ops.rounds} .*E-FRAME"):
        core.push(push(1, VALUES[1]), 100.0 + (beats - 1) * REPEAT_EVERY_S)


def test_results_that_are_asked_for_again_and_again_are_an_offence_too() -> None:
    core, _ = service(1)
    core.push(push(0, 1.0), 0.0)
    for _ in range(REPEATS + 1):
        assert core.push(push(0, 1.0), 0.0)
    with pytest.raises(CorruptFrame, match=f" {(REPEATS + 1) * (8 + OVERHEAD_NBYTES)} .*E-FRAME"):
        core.push(push(0, 1.0), 0.0)


def test_who_codes_again_since_another_one_changed_its_weight_uses_up_no_quota() -> None:
    ops = Doubles()
    ops.in_means = True
    core, _ = service(ops=ops)
    report = 99.0
    for again in range(2 * REPEATS):
        weights = [1.0, 2.0, 3.0 + again % 2]  # the last one's is another one each time
        flags = Flag.AGAIN if again else Flag.NONE
        for sender, value in enumerate(VALUES):
            replies = core.push(push(sender, value, total=report, weight=weights[sender], flags=flags), 0.0)
        assert {reply.header.flags & Flag.AGAIN for reply in replies} == {Flag.AGAIN}
        report = sum(weights)


def audited(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit").read_text().splitlines()]


# ---- what is no offence


def test_a_member_whose_connection_was_made_anew_is_not_noted_as_refused(folders: Folders, tmp_path: Path) -> None:
    coordinator = Coordinator(quick(token=SECRET, audit=str(tmp_path / "audit"), keys=str(folders.server)), workers=1)
    link = CoordinatorChannel(coordinator.address, SECRET, Keys(folders.worker))
    request = messages.Heartbeat("unknown")
    assert link.call("Heartbeat", request, messages.HeartbeatReply, WAIT_S).unknown_token
    for connection in list(coordinator._port._known.values()):
        shut_down(connection.sock)
    until = time.monotonic() + WAIT_S
    while True:
        try:
            assert link.call("Heartbeat", request, messages.HeartbeatReply, WAIT_S).unknown_token
            break
        except CommError:
            assert time.monotonic() < until
    assert [line for line in audited(tmp_path) if line["event"] == "refused"] == []
    # A connection that goes on without proof is noted once.
    forged = bytes(40)
    for _ in range(2):
        with pytest.raises(Exception, match="does not prove"):
            link._send("Heartbeat", forged, WAIT_S)
    link.close()
    coordinator.close()
    assert [line["where"].split()[0] for line in audited(tmp_path) if line["event"] == "refused"] == ["gpu-1"]
