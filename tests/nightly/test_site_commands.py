"""`commlayer serve` and `commlayer join` on several sites: training as under torchrun, log lines, restarts.

Run as a script: the training of sites that are switched off, or whose coordinator restarts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import site_training
from support.coordinators import until
from support.keys import Folders
from support.site_training import torchrun_digests
from support.sites import KILLED, WAIT_S, Process, Sites, all_ended, ended, next_row, suspend, switch_off

pytestmark = pytest.mark.timeout(300)
SCRIPT = site_training.__file__


def launch(sites: Sites, how: str, *arguments: str, rank: int | None = None, options: tuple[str, ...] = ()) -> Process:
    return sites.launch(SCRIPT, how, *arguments, rank=rank, options=options)


@pytest.mark.commit(1)
def test_sites_of_two_workers_and_one_train_as_under_torchrun_bit_for_bit(sites: Sites) -> None:
    """Through DDP, with the process group that the script creates."""
    server = sites.serve(3)
    ends = all_ended([launch(sites, "ddp", rank=1, options=("--nproc-per-node", "2")), launch(sites, "ddp", rank=0)])
    reports = sorted((row for end in ends for row in end.rows), key=lambda row: row["rank"])
    assert [(one["rank"], one["world"], one["local"], one["sum"]) for one in reports] == [
        (0, 3, "0", 3.0), (1, 3, "0", 3.0), (2, 3, "1", 3.0)]
    assert [one["nodes"] for one in reports] == [[3]] * 3, "the server is a separate node, although it has the sites' host name"
    assert {one["sha"] for one in reports} == set(torchrun_digests("ddp", 3))
    assert re.search(r"COMMLAYER_TOKEN_FILE=\S+ commlayer join 127.0.0.1:\d+ SCRIPT", all_ended([server])[0].errors)


def test_workers_of_a_site_sum_locally_first(sites: Sites) -> None:
    sites.serve(2)
    (end,) = all_ended([launch(sites, "inside", options=("--nproc-per-node", "2"))])
    assert [one["nodes"] for one in end.rows] == [[1]] * 2
    assert {one["sha"] for one in end.rows} == set(torchrun_digests("inside", 2))


def test_collectives_work_after_training_and_the_server_ends_with_the_last_site(sites: Sites) -> None:
    server = sites.serve(2)
    ends = all_ended([launch(sites, "evaluation") for _ in range(2)])
    assert [end.rows[0]["sum"] for end in ends] == [10.0, 10.0]
    all_ended([server])


@pytest.mark.parametrize("who", ["a site", "a launcher", "the server"])
def test_end_of_a_site_launcher_or_server_is_named_at_other_sites(sites: Sites, who: str) -> None:
    server = sites.serve(2)
    first, second = (launch(sites, "endless", rank=rank) for rank in range(2))
    for process in (first, second):
        next_row(process)
    if who == "the server":
        server.kill()
        for end in all_ended([first, second], 1, 1):
            assert re.search(r"^commlayer: server 0: .*\[E-PEER-LOST\]$", end.errors, re.MULTILINE)
        return
    if who == "a launcher":
        second.kill()
    else:
        second.send_signal(signal.SIGINT)
        assert "commlayer join: this home was interrupted" in all_ended([second], 130)[0].errors
    # One of the two is reported first.
    pattern = r"^commlayer: worker 1: .*(KeyboardInterrupt|reports that it has ended).*\[E-PEER-LOST\]$"
    assert re.search(pattern, all_ended([first], 1)[0].errors, re.MULTILINE)


@pytest.mark.parametrize(("how", "codes", "line"), [
    ("rate", {1, 2}, r"\blr .*0\.01 on rank 0 \(.*0\.02 on rank 1 \(.*\[E-RANKS-DIFFER\]$"),
    ("resumed", {0}, "the optimizer's state of 0.weight, 0.bias, 2.weight and 3 more differs on rank 1"),
    ("nan", {0}, "gradients of rank 1, first in 4.bias, are not finite: the step is dropped on all ranks"),
])
def test_sites_that_train_differently_are_named_at_every_site(sites: Sites, how: str, codes: set[int], line: str) -> None:
    """2: the other site left before the job started, which the launcher may learn first."""
    sites.serve(2)
    ends = [ended(process) for process in [launch(sites, how) for _ in range(2)]]
    assert {end.code for end in ends} <= codes, [end.errors for end in ends]
    assert all(re.search(line, end.errors, re.MULTILINE) for end in ends)
    if codes == {0}:
        assert ends[0].rows[0]["sha"] == ends[1].rows[0]["sha"]
        assert all(sum(line in decision for decision in end.rows[0]["decisions"]) == 1 for end in ends)


def named_sites(sites: Sites, folders: Folders, *how: str) -> list[Process]:
    """Two sites with a certificate each."""
    sites.set(COMMLAYER_JOIN_DEADLINE_S="100")
    sites.serve(2, "--keys", str(folders.server))
    return [launch(sites, *how, rank=rank, options=("--keys", str(keys)))
            for rank, keys in enumerate((folders.worker, folders.second))]


def test_interrupted_site_is_named_at_the_site_that_waits_for_it(
    sites: Sites, folders: Folders, tmp_path: Path,
) -> None:
    first, second = named_sites(sites, folders, "slow", str(tmp_path / "go"))
    lines = list[str]()
    assert first.stderr is not None
    read = iter(first.stderr.readline, "")
    reader = threading.Thread(target=lambda: lines.extend(line.rstrip() for line in read), daemon=True)
    reader.start()

    until(lambda: any("waiting for worker 1" in line for line in lines), "the wait is logged", 1.5 * WAIT_S)
    (tmp_path / "go").touch()
    until(lambda: any("continues after" in line for line in lines), "its end is logged", 1.5 * WAIT_S)
    second.send_signal(signal.SIGINT)
    (end,) = all_ended([second], 130)
    reader.join(WAIT_S)
    assert first.wait(WAIT_S) == 1
    for errors in (end.errors, "\n".join(lines)):
        assert "Traceback" not in errors
        assert len(re.findall(r"^commlayer: begins with plan [0-9a-f]{16}: ", errors, re.M)) == 1
    assert "waiting for worker" not in end.errors
    name = r"worker 1 \(gpu-2\)"
    for line in (rf"commlayer: waiting for {name}: \d+ s, up to 600 s \(60 s without a sign of life\)",
                 rf"commlayer: continues after \d+ s of waiting for {name}",
                 rf"commlayer: {name}: left the job: KeyboardInterrupt.*\[E-PEER-LOST\]"):
        assert any(re.fullmatch(line, each) for each in lines), line


@pytest.mark.parametrize(("how", "pattern"), [
    ("refused", r"^commlayer: sync: got 'never', .*\[E-SYNC-MODE\]$"),
    ("mistaken", "^LookupError: a mistake in the script$"),
])
def test_refusal_is_one_line_and_script_errors_keep_their_traceback(
    sites: Sites, folders: Folders, how: str, pattern: str,
) -> None:
    first, second = named_sites(sites, folders, how)
    end = ended(second)
    first.send_signal(signal.SIGINT)
    ended(first)
    assert end.code in (1, 2), "2: the launcher learns of the other site's end first"
    assert re.search(pattern, end.errors, re.MULTILINE)
    assert ("Traceback" in end.errors) == (how == "mistaken")


@pytest.mark.parametrize(("script", "lines"), [
    ("", ["commlayer: plan", "commlayer: slow"]),
    ("logging.basicConfig()", ["WARNING:commlayer:slow"]),
    ("logging.basicConfig(level=logging.INFO)", ["INFO:commlayer:plan", "WARNING:commlayer:slow"]),
    ("logging.getLogger('commlayer').addHandler(logging.StreamHandler())", ["plan", "slow"]),
    ("logging.getLogger('commlayer').setLevel(logging.WARNING)", ["commlayer: slow"]),
])
def test_log_lines_appear_once_unless_the_script_configures_logging(script: str, lines: list[str]) -> None:
    code = ("import logging; from commlayer.cluster.processes.script_host import show_log_lines; show_log_lines(); "
            f"{script or 'pass'}; "
            "log = logging.getLogger('commlayer'); log.info('plan'); log.warning('slow')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stderr.splitlines() == lines


SWITCHED_OFF_STEPS, PAUSE_S, MOST = 5, 0.05, 6000
"""Steps that sites make together before one is switched off, least seconds of each, and the last step if no site returns."""


def main(how: str, *arguments: str) -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(session: Any) -> None:
        x = torch.randn(8, 12)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x[:, :3])
        loss.backward()
        optimizer.step()

    {"switched off": switched_off, "coordinator": over_a_coordinator}[how](model, optimizer, train, *arguments)


def switched_off(model: Any, optimizer: Any, train: Callable[[Any], None], start: str) -> None:
    import commlayer

    with commlayer.attach(model, optimizer, compression="identity()") as session:
        first, worlds = session.step, [session.world_size]
        for step in range(first, MOST):
            train(session)
            worlds.append(session.world_size)
            if step == first + SWITCHED_OFF_STEPS:
                print(json.dumps({"first": first, "world": session.world_size}), flush=True)
            if ((start == "again" and step == SWITCHED_OFF_STEPS) or (first and step == first + SWITCHED_OFF_STEPS)
                    or (start == "joins" and min(worlds) < worlds[-1] == 2)):
                break
            time.sleep(PAUSE_S)
    print(json.dumps({"first": first, "worlds": sorted(set(worlds))}), flush=True)


@pytest.fixture(name="start")
def launcher(sites: Sites, folders: Folders) -> Callable[[int, str], Process]:
    """Starts one of two sites with a certificate each. Within a test, silence alone frees no rank."""
    sites.set(COMMLAYER_DEAD_AFTER_S="300", COMMLAYER_RECONNECT_S="300", COMMLAYER_DEADLINE_S="300")
    keys = [folders.worker, folders.second]
    return lambda site, how: sites.launch(__file__, "switched off", how, options=("--keys", str(keys[site])))


@pytest.mark.parametrize(("least", "gap_s"), [("0", 0.0), ("1", 0.0), ("1", 1.0)])
def test_same_commands_start_a_new_job_after_all_sites_were_killed(
    sites: Sites, folders: Folders, start: Callable[[int, str], Process], least: str, gap_s: float,
) -> None:
    """The first may join what is left of the old job, which ends when the second comes. Both then train in the next job."""
    keys = ("--keys", str(folders.server))
    server = sites.serve(2, "--min-workers", least, "--servers", "2", *keys)
    other = sites.run("serve", "--join", sites.address, *keys)
    both = [start(site, "first") for site in range(2)]
    assert [next_row(process)["world"] for process in both] == [2, 2]
    for process in both:
        switch_off(process)
    again = [start(0, "again")]
    time.sleep(gap_s)
    for end in all_ended([*again, start(1, "again")]):
        assert end.rows[-1] == {"first": 0, "worlds": [2]}
    assert [end.errors.count("the job failed") for end in all_ended([other, server])] == [1, 1]


def test_restarted_site_resumes_its_registration_immediately(
    sites: Sites, folders: Folders, start: Callable[[int, str], Process],
) -> None:
    server = sites.serve(2, "--min-workers", "1", "--keys", str(folders.server))
    both = [start(site, "joins") for site in range(2)]
    assert [next_row(process)["world"] for process in both] == [2, 2]
    switch_off(both[1])
    (new,) = all_ended([start(1, "joins")])
    assert new.rows[-1]["first"] > 0, "it joins the running job"
    (old,) = all_ended([both[0]])
    assert old.rows[-1]["worlds"] == [1, 2]
    all_ended([server])


def test_suspended_site_joins_again_by_itself(sites: Sites) -> None:
    sites.set(COMMLAYER_RECONNECT_S="3")
    server = sites.serve(2, "--min-workers", "1")
    both = [sites.launch(__file__, "switched off", "joins") for _ in range(2)]
    assert [next_row(process)["world"] for process in both] == [2, 2]
    pids = suspend(both[1])
    assert server.stderr is not None
    assert any("continuing with 1 workers" in line for line in server.stderr)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    old, new = all_ended(both)
    assert old.rows[-1]["worlds"] == [1, 2]
    assert new.rows[-1]["first"] > 0, "it joins the running job"
    assert re.search(r"^commlayer: .* dead: no heartbeat .*\[E-EPOCH-ENDED\]$", new.errors, re.MULTILINE)
    assert "this home is not in that job: joining again" in new.errors
    all_ended([server])


LOST = """
import json, os, signal, sys
import torch
import commlayer

if sys.argv[1] == "lost":
    os.kill(os.getpid(), signal.SIGKILL)
model = torch.nn.Linear(4, 2)
with commlayer.attach(model) as session:
    model(torch.ones(1, 4)).sum().backward()
    print(json.dumps({"world": session.world_size}), flush=True)
"""


def test_site_joins_again_by_itself_if_another_is_lost_before_the_job_began(sites: Sites, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(LOST)
    server = sites.serve(2, "--min-workers", "1")
    kept, lost = (sites.launch(str(script), how) for how in ("kept", "lost"))
    assert ended(lost).code == KILLED
    first, second = all_ended([kept, sites.launch(str(script), "kept")])
    assert [one.rows for one in (first, second)] == [[{"world": 2}]] * 2
    assert "[E-RENDEZVOUS-ENDED]" in first.errors
    assert "this home is not in that job: joining again" in first.errors
    all_ended([server])


KILLS, BETWEEN = 2, 3
"""How often the coordinator is killed, and the least steps before the first kill and after each."""


def over_a_coordinator(model: Any, optimizer: Any, train: Callable[[Any], None], trained: str, met: str) -> None:
    """Trains until the first file exists, with a collective in each step; then calls collectives until the second one does."""
    import torch
    import torch.distributed as dist
    from support.site_job import digest

    import commlayer

    def exists(flag: str) -> bool:
        """Alike at all sites."""
        present = torch.tensor([float(Path(flag).exists())])
        dist.all_reduce(present)
        return present.item() > 0

    step, left = 0, BETWEEN
    with commlayer.attach(model, optimizer, compression="topk(ratio=0.1)") as session:
        while left:
            train(session)
            step += 1
            left -= exists(trained)
            print(json.dumps({"step": step}), flush=True)
    while not exists(met):
        print(json.dumps({"after": True}), flush=True)
    total = torch.tensor([float(os.environ["RANK"])])
    dist.all_reduce(total)
    dist.barrier()
    print(json.dumps({"sha": digest(model.parameters()), "sum": total.item(), "steps": step}), flush=True)


@pytest.mark.parametrize(("together", "least"), [(True, "1"), (False, "0")], ids=["with its server", "alone"])
def test_sites_continue_while_their_coordinator_is_killed_and_restarts(
    sites: Sites, tmp_path: Path, together: bool, least: str,
) -> None:
    sites.set(COMMLAYER_MIN_WORKERS=least)
    flags = [tmp_path / "trained", tmp_path / "met"]

    def serve() -> Process:
        before = sites.address
        options = () if together else ("--no-server", "--servers", "1")
        process = sites.serve(2, "--journal", str(tmp_path / "coordinator"), *options)
        assert before in ("", sites.address)
        return process

    server = serve()
    if not together:
        sites.run("serve", "--join", sites.address, "--journal", str(tmp_path / "server"))
    both = [sites.launch(__file__, "coordinator", *map(str, flags)) for _ in range(2)]
    rows: list[list[Any]] = [[], []]

    def follow(process: Process, lines: list[Any]) -> None:
        for line in process.stdout or ():
            lines.append(json.loads(line))  # noqa: PERF401  (as they come)

    threads = [threading.Thread(target=follow, args=pair) for pair in zip(both, rows, strict=True)]
    for thread in threads:
        thread.start()

    def progress(steps: int) -> None:
        targets, deadline = [len(lines) + steps for lines in rows], time.monotonic() + WAIT_S
        while any(len(lines) < target for lines, target in zip(rows, targets, strict=True)):
            assert all(process.poll() is None for process in both), [p.communicate()[1] for p in both if p.poll() is not None]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def restart() -> Process:
        server.kill()
        server.communicate(timeout=WAIT_S)
        new = serve()
        progress(BETWEEN)
        return new

    progress(BETWEEN)
    for _ in range(KILLS):
        server = restart()
    flags[0].touch()
    while not all("after" in lines[-1] for lines in rows):
        progress(1)
    server = restart()
    flags[1].touch()
    for process, thread in zip(both, threads, strict=True):
        thread.join(WAIT_S)
        assert process.wait(WAIT_S) == 0, process.stderr and process.stderr.read()
    first, second = (lines[-1] for lines in rows)
    assert first == second
    assert first["sum"] == 1.0
    assert first["steps"] >= (KILLS + 2) * BETWEEN
    assert "resumed a running job" in all_ended([server])[0].errors
    assert [path.name for path in (tmp_path / "coordinator").iterdir()] == (["lock"] if together else []), "the job is over"


if __name__ == "__main__":
    main(*sys.argv[1:])
