"""Homes that share nothing but a server train one model: the same script as under torchrun. Run as a script: that training."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from support.site_training import in_a_rack, main
from support.sites import WAIT_S, Homes


def launch(homes: Homes, how: str, *options: str) -> subprocess.Popen[str]:
    return homes.run("launch", "--join", homes.address, *options, __file__, how, "--for-the", "script")


def ended(process: subprocess.Popen[str], code: int = 0) -> tuple[list[Any], str]:
    out, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == code, errors
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], errors


@pytest.mark.commit(1)
def test_homes_of_two_and_one_train_the_bits_of_one_rack(homes: Homes) -> None:
    """Through DDP, with the group that the script makes."""
    server = homes.serve(3)
    second = launch(homes, "ddp", "--node-rank", "1", "--nproc-per-node", "2")
    first = launch(homes, "ddp", "--node-rank", "0")
    told = [one for home in (first, second) for one in ended(home)[0]]
    told.sort(key=lambda one: one["rank"])
    assert [(one["rank"], one["world"], one["local"], one["sum"]) for one in told] == [
        (0, 3, "0", 3.0), (1, 3, "0", 3.0), (2, 3, "1", 3.0)]
    assert [one["nodes"] for one in told] == [[3]] * 3, "the server is none of the homes, though it has their host's name"
    assert {one["sha"] for one in told} == set(in_a_rack("ddp", 3))
    _, said = ended(server)
    assert re.search(r"on each other machine run: commlayer launch --join 127.0.0.1:\d+ --token-file \S+ SCRIPT", said)


def test_workers_of_one_home_sum_among_themselves_first(homes: Homes) -> None:
    homes.serve(2)
    told, _ = ended(launch(homes, "inside", "--nproc-per-node", "2"))
    assert [one["nodes"] for one in told] == [[1]] * 2
    assert {one["sha"] for one in told} == set(in_a_rack("inside", 2))


def test_collectives_behind_training_work_as_in_a_rack_and_the_server_ends_with_the_last_home(homes: Homes) -> None:
    server = homes.serve(2)
    both = [launch(homes, "evaluation") for _ in range(2)]
    assert [one["sum"] for home in both for one in ended(home)[0]] == [10.0, 10.0]
    ended(server)


@pytest.mark.parametrize("who", ["a home", "a launcher", "the server"])
def test_ctrl_c_on_one_home_and_the_end_of_its_launcher_or_the_server_end_all_with_a_name(homes: Homes, who: str) -> None:
    server = homes.serve(2)
    both = [launch(homes, "on and on", "--node-rank", str(place)) for place in range(2)]
    for home in both:
        assert home.stdout is not None
        home.stdout.readline()
    if who == "the server":
        server.kill()
        for home in both:
            assert re.search(r"^commlayer: server 0: .*\[E-PEER-LOST\]$", ended(home, 1)[1], re.MULTILINE)
        return
    if who == "a launcher":
        both[1].kill()
    else:
        both[1].send_signal(signal.SIGINT)
        _, said = ended(both[1], 130)
        assert "commlayer launch: this home was interrupted; the other homes end with it" in said
    _, said = ended(both[0], 1)
    # Whichever of the two is heard first.
    pattern = r"^commlayer: worker 1: .*(KeyboardInterrupt|reports that it has ended).*\[E-PEER-LOST\]$"
    assert re.search(pattern, said, re.MULTILINE)


@pytest.mark.parametrize(("script", "told"), [
    ("", ["commlayer: found", "commlayer: slow"]),
    ("logging.basicConfig()", ["WARNING:commlayer:slow"]),
    ("logging.basicConfig(level=logging.INFO)", ["INFO:commlayer:found", "WARNING:commlayer:slow"]),
    ("logging.getLogger('commlayer').addHandler(logging.StreamHandler())", ["found", "slow"]),
    ("logging.getLogger('commlayer').setLevel(logging.WARNING)", ["commlayer: slow"]),
])
def test_what_is_decided_is_seen_once_and_a_script_that_configures_logs_has_its_way(script: str, told: list[str]) -> None:
    line = (f"import logging; from commlayer.engine.start import tell; tell(); {script or 'pass'}; "
            "log = logging.getLogger('commlayer'); log.info('found'); log.warning('slow')")
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stderr.splitlines() == told


if __name__ == "__main__":
    main(*sys.argv[1:])
