"""docs/how-to/slurm.md on a Slurm of this machine: a controller and two nodes, from which jobs are preempted."""

from __future__ import annotations

import getpass
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import ROOT
from support.engines import SCRIPT, WAIT_S, environment_of, free_port, until

pytestmark = pytest.mark.timeout(900)
PAGE = (ROOT / "docs" / "how-to" / "slurm.md").read_text("utf-8")
HOST = socket.gethostname()
SMALL = ("--gpus-per-node=1", "--cpus-per-task=1", "--mem=0")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:1
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
"""Two nodes whose names lead to this machine, each with a device that jobs take for a GPU."""


class Cluster:
    """The commands of a user whose home folder is `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(SCRIPT, folder / "train.py")
        self.environment = environment_of(folder) | {"SLURM_CONF": str(folder / "slurm" / "slurm.conf")}
        self.ports = {"7000": str(free_port()), "29500": str(free_port(23000))}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        (place := self.folder / "slurm").mkdir()
        ports = [free_port(start) for start in (25000, 27000, 29000)]
        text = CONFIGURATION.format(host=HOST, user=getpass.getuser(), folder=place, ports=ports)
        (place / "slurm.conf").write_text(text)
        (place / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/null\n")
        for line in (["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", HOST], ["slurmd", "-D", "-N", "localhost"]):
            if line[0] == "slurmd":
                (place / line[-1]).mkdir()
            with (place / f"{line[-1]}.log").open("wb") as log:
                self._daemons.append(subprocess.Popen(line, env=self.environment, stdout=log, stderr=log))
        self.until(lambda: self.run("sinfo", "--noheader", "--format", "%T %D") == "idle 2\n", "both nodes are idle")

    def close(self) -> None:
        if self._daemons:
            self.run("scancel", "--user", getpass.getuser(), check=False)
            self.until(lambda: not self.run("squeue", "--noheader", check=False), "all jobs have ended")
        for daemon in self._daemons:
            daemon.terminate()
            daemon.wait(WAIT_S)

    def run(self, *line: str, check: bool = True) -> str:
        done = subprocess.run(line, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=WAIT_S)
        assert not check or done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout

    def sbatch(self, name: str, *options: str, text: str) -> str:
        """Submits a script of the page on free ports; returns the job's number. Its output: files that begin with `name`."""
        for port, free in self.ports.items():
            text = text.replace(port, free)
        (self.folder / f"{name}.sbatch").write_text(text)
        return self.run("sbatch", "--parsable", *options, f"{name}.sbatch").strip()

    def output(self, name: str) -> str:
        path = self.folder / f"{name}.out"
        return path.read_text() if path.exists() else ""

    def until(self, ready: Callable[[], object], what: str) -> None:
        until(ready, what, self.folder)

    def preempt(self) -> None:
        """A job with priority takes a node from one of lower priority, and gives it back."""
        self.run("sbatch", "--partition=high", "--gpus-per-node=1", "--output=taken.out", "--wrap", "echo taken")
        self.until(lambda: self.output("taken"), "the other job has run")
        waiting = "squeue", "--noheader", "--states=PENDING", "--format=%i"
        self.until(lambda: self.run(*waiting), "the preempted job waits")
        # Slurm waits two minutes before it starts a requeued job.
        self.run("scontrol", "update", f"JobId={self.run(*waiting).strip()}", "StartTime=now")

    def state(self, job: str) -> list[str]:
        """State and exit code of each task of a job."""
        return re.findall(r"JobState=(\w+)|ExitCode=(\d+:\d+)", self.run("scontrol", "show", "job", job))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if missing := [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]:
        pytest.skip(f"needs {missing[0]}: Debian's package slurm-wlm")
    if HOST == "localhost" or socket.gethostbyname(HOST) not in ("127.0.0.1", "127.0.1.1"):
        pytest.skip(f"needs a host name that leads to loopback, but {HOST} does not")
    result = Cluster(tmp_path)
    try:
        result.start()
        yield result
    finally:
        result.close()


@pytest.fixture
def scripts() -> dict[str, str]:
    texts = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return dict(zip(("train", "server", "home"), texts, strict=True))


def keys(cluster: Cluster) -> None:
    """As the page says."""
    (lines,) = re.findall(r"^```\n(commlayer keys init\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    cluster.run("sh", "-ec", lines)


def completed(cluster: Cluster, *jobs: str) -> None:
    for job in jobs:
        cluster.until(lambda job=job: "RUNNING" not in str(cluster.state(job)), f"job {job} has ended")
        assert {value for pair in cluster.state(job) for value in pair} <= {"COMPLETED", "0:0", ""}, job


def test_one_job_continues_from_its_checkpoint_after_a_preemption(cluster: Cluster, scripts: dict[str, str]) -> None:
    keys(cluster)
    (cluster.folder / "keys" / "nodes" / "server").rename(cluster.folder / "commlayer-keys")
    # `commlayer doctor` rightly refuses nodes whose names lead to loopback.
    text = scripts["train"].replace("doctor || exit 2", "doctor || test $? = 2")
    job = cluster.sbatch("train", "--nodes=2", "--output=train.out", *SMALL, text=text)
    cluster.until(lambda: "saved 10 of 2\n" in cluster.output("train"), "ten steps on two nodes")
    cluster.preempt()
    cluster.until(lambda: cluster.output("train").count("first ") == 4, "both ranks have started again")
    assert all(int(first) >= 10 for first in re.findall(r"^first (\d+) of 2$", cluster.output("train"), re.MULTILINE)[2:])
    (cluster.folder / "stop").touch()
    completed(cluster, job)
    # Without torchrun ranks come from Slurm's variables.
    cluster.environment |= {"MASTER_ADDR": HOST, "MASTER_PORT": cluster.ports["29500"]}
    lines = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "train.py").splitlines()
    assert len([line for line in lines if re.fullmatch(r"first \d+ of 2", line)]) == 2


def test_preempted_site_returns_to_the_running_job(cluster: Cluster, scripts: dict[str, str]) -> None:
    keys(cluster)
    least = scripts["server"].replace("--min-workers 8", "--min-workers 1")
    server = cluster.sbatch("server", "--partition=high", "--output=server.out", "--cpus-per-task=1", "--mem=0", text=least)
    cluster.until(lambda: '"control"' in cluster.output("server"), "the server has started")
    homes = cluster.sbatch("home", "--array=1-2", "--output=home-%a.out", *SMALL, text=scripts["home"])
    names = "home-1", "home-2"
    together = re.compile(r"^saved \d+ of 2$", re.MULTILINE)
    cluster.until(lambda: all(together.search(cluster.output(name)) for name in names), "both train")
    cluster.preempt()
    lost, kept = sorted(names, key=lambda name: "DUE TO PREEMPTION" not in cluster.output(name))
    cluster.until(lambda: cluster.output(lost).count("first ") == 2, "it is back")
    worlds = re.findall(r"^saved \d+ of (\d)$", cluster.output(kept), re.MULTILINE)
    assert "1" in worlds, "the other one has trained on"
    assert cluster.output(kept).count("first ") == 1
    *_, (first, world) = re.findall(r"^first (\d+) of (\d)$", cluster.output(lost), re.MULTILINE)
    assert int(first) > 0
    assert world == "2"
    (cluster.folder / "stop").touch()
    completed(cluster, homes, server)
