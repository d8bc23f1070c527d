"""A link that is cut for seconds, between hosts of the lab: nobody is told, only silence says so, and the exchange goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab_kit import needs_lab

from bench.lab import Lab

ROOT = Path(__file__).parents[1]
STEPS, UNHEARD_S, CUT_S = 40, 2.0, 5.0

SERVER = """
import json, sys, time
from collections import Counter
from commlayer.transport.hello import Hello
from commlayer.transport.protocol import SERVER_BASE, Kind
from commlayer.transport.tcp import Settings, TcpTransport
server = TcpTransport(Hello("job", SERVER_BASE), settings=Settings(resume=True, user_timeout_s=float(sys.argv[1])))
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
from commlayer.transport.hello import Hello
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, key
from commlayer.transport.resumed import Resumed, Waits
from commlayer.transport.tcp import Settings, TcpTransport
carrier = TcpTransport(Hello("job", 0, session=b"one process here"), settings=Settings(
    resume=True, user_timeout_s=float(sys.argv[1])))
worker = Resumed(carrier, carrier, Waits(50.0))
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


def told(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


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
        while told(worker) < 5:
            pass
        lab.set(1, cut=True)
        time.sleep(CUT_S)
        lab.set(1, cut=False)
        while isinstance(said := told(worker), int):
            pass
        breaks, kept_nbytes = said
        assert breaks >= 1
        assert kept_nbytes == 0
        assert len(told(server)) == STEPS
        assert (worker.wait(30), server.wait(30)) == (0, 0)
