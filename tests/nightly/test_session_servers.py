"""Servers that training processes start are stopped or killed: every rank names server and node, long before the deadline."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from support.rank_pool import END_S, SETTINGS, gone, last_line, tree

SCRIPT = str(Path(__file__).with_name("test_session_processes.py"))
FAR = {"deadline_s": 300.0}
"""So that only heartbeats can have told."""


@pytest.mark.parametrize(("server", "sent"), [(0, signal.SIGSTOP), (0, signal.SIGKILL), (1, signal.SIGSTOP)],
                         ids=["stopped, with the coordinator", "killed, with the coordinator", "stopped, elsewhere"])
def test_a_server_that_is_stopped_or_killed_is_named_with_its_node(server: int, sent: signal.Signals) -> None:
    servers = {"servers": "each"} if server else {}
    with tree(SCRIPT, 2, args=("module", "-1"), settings=SETTINGS | FAR | servers) as run:
        said = [json.loads(run.until(rank, "{")) for rank in range(2)]
        pids = [pid for line in said for pid in line["embedded"]]
        os.kill(said[server]["embedded"][0], sent)
        results = run.ended(END_S)
        for code, errors in results:
            assert code == 1
            line = rf"commlayer.errors.PeerLost: server {server}: .* on node {server}\b.*E-PEER-LOST"
            assert re.match(line, last_line(errors)), results
        assert all(gone(pid, END_S) for pid in pids)
