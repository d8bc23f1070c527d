"""Jobs on hosts of the lab: links that are cut for seconds or for good, and torchrun's line on two machines. Run as a script:
a rank."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support import ROOT
from support.lab import needs_lab
from support.processes import clean_environment
from support.scripts.broken_worker import digest, gradients, plan
from support.workers import Rig, on_ranks, step

from bench.lab import Lab

STEPS = 40
TOKEN = "a-job's-secret"
SETTINGS = {"heartbeat_s": 0.5, "token": TOKEN}
END_S = 30.0
"""The longest end of a job after a cut: `reconnect_s`, the time to notice, and room for a loaded machine."""


def next_line(process: subprocess.Popen[str]) -> Any:
    """The next line of JSON that the process prints."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


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


HOSTS = 2


def main() -> None:
    import torch
    from support.attached import data, mlp

    import commlayer

    model = mlp()
    with commlayer.attach(model, compression=commlayer.compressors.identity(), config={"join_deadline_s": 60.0}) as session:
        model(data(session.inspect.context.rank, 0)[0]).sum().backward()
        gradient = float(torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None]).double().norm())
        report = {"norm": gradient, "world": session.inspect.context.world, "said": session.inspect.decisions()}
        print(json.dumps(report), flush=True)


def launched(lab: Lab, port: int, settings: list[dict[str, str]]) -> list[tuple[int, str, str]]:
    """As two people would start it; how each host's torchrun ended and what it said."""
    children = []
    for host, mine in enumerate(settings):
        line = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={HOSTS}", f"--node-rank={host}", "--nproc-per-node=1",
                f"--master-addr={lab.addresses[0]}", f"--master-port={port}", __file__]
        children.append(lab.popen(host, line, env=clean_environment() | mine, text=True, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    ended = []
    for child in children:
        out, errors = child.communicate(timeout=90)
        ended.append((child.returncode, out, errors))
    return ended


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(hosts=HOSTS, up_bps=1e9, down_bps=1e9, delay_s=0.002) as running:
        yield running


@needs_lab
def test_two_machines_need_no_more_than_leave_to_talk_in_plain_text(lab: Lab) -> None:
    ended = launched(lab, 29500, [{"COMMLAYER_INSECURE": "1"}] * HOSTS)
    assert [code for code, _, _ in ended] == [0, 0], ended
    lines = [json.loads(out.splitlines()[-1]) for _, out, _ in ended]
    assert [s["world"] for s in lines] == [HOSTS] * HOSTS
    assert lines[0]["norm"] == lines[1]["norm"] > 0
    listening = [line for line in lines[0]["said"] if "listen" in line]
    assert listening == [f"step 0: the servers of this node listen on {lab.addresses[0]}, the address of this machine on the "
                         "route to MASTER_ADDR; the setting bind overrides it"]


@needs_lab
def test_leave_that_one_machine_lacks_is_a_line_on_both_at_once(lab: Lab) -> None:
    begin = time.monotonic()
    ended = launched(lab, 29501, [{}, {"COMMLAYER_INSECURE": "1"}])
    assert time.monotonic() - begin < 50.0, "below the deadline of joining"
    for code, _, errors in ended:
        assert code == 1
        assert re.search(r"insecure: .* rank 0 \(.*COMMLAYER_INSECURE=1 .*\[E-PLAIN-TEXT\]$", errors, re.MULTILINE), errors


if __name__ == "__main__":
    main()
