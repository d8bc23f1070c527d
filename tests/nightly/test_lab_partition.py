"""A worker is cut off for good in both directions: all processes end within a bound and name the peer that is silent."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from support.lab import TOKEN, needs_lab, told

from bench.lab import Lab

ROOT = Path(__file__).parents[2]
SETTINGS = {"deadline_s": 300.0, "reconnect_s": 5.0, "heartbeat_s": 0.5, "dead_after_s": 2.0}
END_S = 30.0
"""Of what is left: `reconnect_s`, what it takes to notice, and room for a loaded machine. Far below the deadline."""


@needs_lab
def test_a_partition_for_good_ends_all_and_names_who_is_cut_off() -> None:
    with Lab(hosts=3, delay_s=0.01) as lab:
        paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "COMMLAYER_CONFIG": ""}
        served = {f"COMMLAYER_{name.upper()}": str(value) for name, value in (SETTINGS | {"token": TOKEN}).items()}
        serve = [sys.executable, "-m", "commlayer.cli.main", "serve", "--bind", lab.addresses[0], "--port", "7000",
                 "--insecure"]
        server = lab.popen(0, serve, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=paths | served)
        assert told(server)["control"] == f"{lab.addresses[0]}:7000"
        settings = json.dumps(SETTINGS | {"join": f"{lab.addresses[0]}:7000", "token": TOKEN, "insecure": True})
        script = [sys.executable, str(ROOT / "tests" / "support" / "scripts" / "broken_worker.py")]
        workers = [lab.popen(1 + rank, [*script, str(rank), "2", "100000", settings], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, env=paths) for rank in range(2)]
        while told(workers[0]) < 5:
            pass
        lab.set(1, cut=True)
        begin = time.monotonic()
        cut_off, other = (worker.communicate(timeout=2 * END_S)[1] for worker in workers)
        server.terminate()  # it waits for another job
        serving = server.communicate(timeout=2 * END_S)[1]
        assert time.monotonic() - begin < END_S
        # The worker that is cut off names what it does not reach.
        assert last(cut_off).startswith(("commlayer.errors.PeerLost: server 0: ", "commlayer.errors.PeerLost: the coordinator"))
        assert last(other).startswith("commlayer.errors.PeerLost: worker 0: ")
        assert all(last(errors).endswith(" [E-PEER-LOST]") for errors in (cut_off, other))
        assert all(worker.returncode for worker in workers)
        assert "worker 0: no heartbeat for" in serving


def last(errors: str) -> str:
    return errors.strip().splitlines()[-1]
