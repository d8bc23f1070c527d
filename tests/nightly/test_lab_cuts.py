"""A link between hosts of the lab is cut for seconds: only silence shows it, and the exchange continues."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.lab import TOKEN, needs_lab, next_line
from support.scripts.broken_worker import digest, gradients, plan
from support.workers import Rig, on_ranks, step

from bench.lab import Lab

ROOT = Path(__file__).parents[2]
STEPS, UNHEARD_S, CUT_S = 40, 2.0, 5.0

SERVER = """
import json, sys, time
from collections import Counter
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE, Kind
from commlayer.transport.endpoint import Settings, StreamTransport
server = StreamTransport(Hello("job", SERVER_BASE), settings=Settings(resume=True, user_timeout_s=float(sys.argv[1])))
server.listen("0.0.0.0", 7000)
print("listening", flush=True)
seen = Counter()
while (got := server.wait(server.recv(0), time.monotonic() + 60)).header.kind == Kind.PUSH:
    seen[got.header.step] += 1
    server.send(0, got.header._replace(kind=Kind.RESULT), bytes(got.body))
print(json.dumps(sorted(seen.values())), flush=True)
server.close()
"""
WORKER = """
import json, sys, time
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, key
from commlayer.transport.reconnect import ReconnectingTransport, ReconnectPolicy
from commlayer.transport.endpoint import Settings, StreamTransport
carrier = StreamTransport(Hello("job", 0, session=b"one process here"), settings=Settings(
    resume=True, user_timeout_s=float(sys.argv[1])))
worker = ReconnectingTransport(carrier, carrier, ReconnectPolicy(50.0))
worker.connect(SERVER_BASE, lambda until: carrier.dial(SERVER_BASE, (sys.argv[2], 7000), until), time.monotonic() + 20)
for step in range(int(sys.argv[3])):
    push = Header(Kind.PUSH, 1, step, 7, sender=0)
    answer = worker.recv(SERVER_BASE, key(push._replace(kind=Kind.RESULT)))
    worker.send(SERVER_BASE, push, bytes([step]) * 5000)
    assert bytes(worker.wait(answer, time.monotonic() + 60).body) == bytes([step]) * 5000
    print(json.dumps(step), flush=True)
    time.sleep(0.05)
print(json.dumps([worker.breaks, worker.kept_nbytes]), flush=True)
worker.wait(worker.send(SERVER_BASE, Header(Kind.DATA)), time.monotonic() + 20)
worker.close()
"""


@needs_lab
def test_a_link_that_is_cut_for_seconds_costs_no_step() -> None:
    with Lab(hosts=2, delay_s=0.01) as lab:
        def started(host: int, program: str, *args: object) -> subprocess.Popen[str]:
            argv = [sys.executable, "-P", "-c", program, *map(str, args)]
            return lab.popen(host, argv, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)})

        server = started(0, SERVER, UNHEARD_S)
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        worker = started(1, WORKER, UNHEARD_S, lab.addresses[0], STEPS)
        while next_line(worker) < 5:
            pass
        lab.set(1, cut=True)
        time.sleep(CUT_S)
        lab.set(1, cut=False)
        while isinstance(text := next_line(worker), int):
            pass
        breaks, kept_nbytes = text
        assert breaks >= 1
        assert kept_nbytes == 0
        assert len(next_line(server)) == STEPS
        assert (worker.wait(30), server.wait(30)) == (0, 0)


SETTINGS = {"heartbeat_s": 0.5, "token": TOKEN}
END_S = 30.0
"""The longest end of a job after a cut: `reconnect_s`, the time to notice, and room for a loaded machine."""


def job(lab: Lab, steps: int, **settings: float) -> list[subprocess.Popen[str]]:
    """A coordinator with a server on host 0, and two workers on the others that have made some steps."""
    own = SETTINGS | settings
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "COMMLAYER_CONFIG": ""}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    served = {f"COMMLAYER_{name.upper()}": str(value) for name, value in own.items()}
    serve = [sys.executable, "-m", "commlayer.cli.main", "serve", "--bind", lab.addresses[0], "--port", "7000", "--insecure"]
    server = lab.popen(0, serve, env=paths | served, **pipes)
    assert next_line(server)["control"] == f"{lab.addresses[0]}:7000"
    given = json.dumps(own | {"join": f"{lab.addresses[0]}:7000", "insecure": True})
    script = [sys.executable, str(ROOT / "tests" / "support" / "scripts" / "broken_worker.py")]
    workers = [lab.popen(1 + rank, [*script, str(rank), "2", str(steps), given], env=paths, **pipes) for rank in range(2)]
    while next_line(workers[0]) < 5:
        pass
    return [server, *workers]


@needs_lab
def test_a_site_that_is_away_for_longer_than_dead_after_s_trains_on() -> None:
    """Also longer than a connection may be silent, a quarter of `reconnect_s`."""
    with Lab(hosts=3, delay_s=0.01) as lab:
        server, *workers = job(lab, STEPS, deadline_s=60.0, reconnect_s=20.0, dead_after_s=3.0)
        lab.set(1, cut=True)
        time.sleep(7.0)
        lab.set(1, cut=False)
        ends: list[Any] = []
        for worker in workers:
            while isinstance(end := next_line(worker), int):
                pass
            ends.append(end)
        assert ends[0]["reconnects"] >= 1
        assert [process.wait(30) for process in (*workers, server)] == [0, 0, 0]
    with Rig(2, "", plan=plan()) as rig:
        plain = on_ranks(2, lambda rank: [step(rig.workers[rank], gradients(rank, n)) for n in range(STEPS)])
    assert [end["digest"] for end in ends] == [digest(result) for result in plain]


@needs_lab
def test_a_cut_for_good_ends_all_and_each_names_the_silent_peer() -> None:
    with Lab(hosts=3, delay_s=0.01) as lab:
        server, *workers = job(lab, 100_000, deadline_s=300.0, reconnect_s=5.0, dead_after_s=2.0)
        lab.set(1, cut=True)
        begin = time.monotonic()
        cut_off, other = (worker.communicate(timeout=2 * END_S)[1].strip().splitlines()[-1] for worker in workers)
        server.terminate()  # it waits for another job
        assert "worker 0: no heartbeat for" in server.communicate(timeout=2 * END_S)[1]
        assert time.monotonic() - begin < END_S, "far below the deadline"
        # The worker that is cut off names what it does not reach.
        assert cut_off.startswith(("commlayer.errors.PeerLost: server 0: ", "commlayer.errors.PeerLost: the coordinator"))
        assert other.startswith("commlayer.errors.PeerLost: worker 0: ")
        assert all(line.endswith(" [E-PEER-LOST]") for line in (cut_off, other))
        assert all(worker.returncode for worker in workers)
