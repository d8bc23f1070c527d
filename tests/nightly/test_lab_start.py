"""Two machines with torchrun's line on each and nothing else but what plain text demands. Run as a script: the training."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from support.lab import needs_lab
from support.processes import clean_environment

from bench.lab import Lab

pytestmark = needs_lab
HOSTS = 2


def main() -> None:
    import torch
    from support.attached import data, mlp

    import commlayer

    model = mlp()
    with commlayer.attach(model, compression=commlayer.compressors.identity(), config={"join_deadline_s": 60.0}) as session:
        model(data(session.inspect.connection.rank, 0)[0]).sum().backward()
        gradient = float(torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None]).double().norm())
        report = {"norm": gradient, "world": session.inspect.connection.world, "said": session.inspect.decisions()}
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


def test_two_machines_need_no_more_than_leave_to_talk_in_plain_text(lab: Lab) -> None:
    ended = launched(lab, 29500, [{"COMMLAYER_INSECURE": "1"}] * HOSTS)
    assert [code for code, _, _ in ended] == [0, 0], ended
    lines = [json.loads(out.splitlines()[-1]) for _, out, _ in ended]
    assert [s["world"] for s in lines] == [HOSTS] * HOSTS
    assert lines[0]["norm"] == lines[1]["norm"] > 0
    listening = [line for line in lines[0]["said"] if "listen" in line]
    assert listening == [f"step 0: the servers of this node listen on {lab.addresses[0]}, the address of this machine on the "
                         "route to MASTER_ADDR; the setting bind overrides it"]


def test_leave_that_one_machine_lacks_is_a_line_on_both_at_once(lab: Lab) -> None:
    begin = time.monotonic()
    ended = launched(lab, 29501, [{}, {"COMMLAYER_INSECURE": "1"}])
    assert time.monotonic() - begin < 50.0, "below the deadline of joining"
    for code, _, errors in ended:
        assert code == 1
        assert re.search(r"insecure: .* rank 0 \(.*COMMLAYER_INSECURE=1 .*\[E-PLAIN-TEXT\]$", errors, re.MULTILINE), errors


if __name__ == "__main__":
    main()
