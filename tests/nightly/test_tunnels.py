"""A server behind a tunnel: homes reach it through one port, at one address, over a line that breaks again and again.

Run as a script: the training of a home.
"""

from __future__ import annotations

import getpass
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.coordinators import until
from support.engines import free_port
from support.keys import Folders
from support.sites import WAIT_S, Ended, Process, Sites, all_ended, next_row
from support.tunnels import Tunnel

from commlayer.doctor import network

pytestmark = pytest.mark.timeout(600)
STEPS, WIDTH, LARGE = 6, 512, 1440
"""Width of the model, and of one with 16 MB of gradients in several buckets."""
CUT_NBYTES = 10 << 20
"""Bytes between two cuts, both ways: all that passes in a step, and a little more."""
LOST_NBYTES = 4 << 20
"""Less than this passes again after a cut, for each home. It was 10 MB when buckets were sent again from their beginning."""
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")


def main(steps: int, width: int) -> None:
    import torch
    from support.jobs import distributed_job
    from support.site_job import digest

    import commlayer

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with commlayer.attach(model, optimizer, compression="identity()") as session:
        generator = torch.Generator().manual_seed(session.rank)
        for step in range(steps):
            x = torch.randn(8, width, generator=generator)
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
            print(json.dumps({"step": step}), flush=True)
        transport = distributed_job(session).uplink.transport
        print(json.dumps({"sha": digest(model.parameters()), "breaks": transport.breaks, "resent": transport.resent_nbytes}),
              flush=True)


def started(sites: Sites, folders: Folders, steps: int, width: int = WIDTH) -> list[Process]:
    return [sites.launch(__file__, str(steps), str(width), rank=rank, options=("--keys", str(keys)))
            for rank, keys in enumerate((folders.worker, folders.second))]


def sha_of(ends: list[Ended]) -> str:
    (sha,) = {end.rows[-1]["sha"] for end in ends}
    return str(sha)


@pytest.fixture(scope="module", name="direct")
def direct_digest(folders: Folders) -> str:
    """Weights after the same steps without a tunnel."""
    sites = Sites()
    try:
        sites.serve(2, "--keys", str(folders.server))
        return sha_of(all_ended(started(sites, folders, STEPS)))
    finally:
        sites.close()


def test_job_through_a_tunnel_that_breaks_equals_the_direct_one(sites: Sites, folders: Folders, direct: str) -> None:
    port = free_port()
    with Tunnel(port, 20e6) as tunnel, tunnel.cut_every(CUT_NBYTES, 0.5):
        server = sites.serve(2, "--keys", str(folders.server), "--bind", f"127.0.0.1:{port}", "--advertise",
                             f"127.0.0.1:{tunnel.port}")
        assert sites.address == f"127.0.0.1:{tunnel.port}"
        ends = all_ended([*started(sites, folders, STEPS), server])
        print(f"{tunnel.cuts} cuts, {tunnel.nbytes} bytes, {[end.rows[-1] for end in ends[:2]]}")
    assert sha_of(ends[:2]) == direct
    assert all("connected to server 0 over gRPC" in end.errors for end in ends[:2])
    assert min(end.rows[-1]["breaks"] for end in ends[:2]) >= 2


def test_large_buckets_continue_where_the_tunnel_cut_them(sites: Sites, folders: Folders) -> None:
    port, steps = free_port(), 4
    with Tunnel(port, 200e6) as tunnel, tunnel.cut_every(6 * CUT_NBYTES, 0.1):
        server = sites.serve(2, "--keys", str(folders.server), "--bind", f"127.0.0.1:{port}", "--advertise",
                             f"127.0.0.1:{tunnel.port}")
        ends = all_ended([*started(sites, folders, steps, LARGE), server])
        least_nbytes = 2 * 2 * steps * 4 * 2 * LARGE * LARGE
        print(f"{tunnel.cuts} cuts, {tunnel.nbytes - least_nbytes} of {tunnel.nbytes} bytes more, "
              f"{[end.rows[-1] for end in ends[:2]]}")
    assert tunnel.cuts >= 3
    assert tunnel.nbytes - least_nbytes < (1 + tunnel.cuts) * 2 * LOST_NBYTES
    sha_of(ends[:2])


class Ssh:
    """An SSH server on loopback, and the client that the owner of the summation server runs: `ssh -N -R`."""

    def __init__(self, folder: Path, target: int) -> None:
        assert SSHD is not None
        self.port, number = free_port(25000), free_port(26000)
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        (folder / "config").write_text(f"ListenAddress 127.0.0.1:{number}\nHostKey {folder}/host\nPidFile none\nUsePAM no\n"
                                       f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\n")
        Path("/run/sshd").mkdir(exist_ok=True)
        self._server = subprocess.Popen([SSHD, "-D", "-f", str(folder / "config")], stderr=subprocess.DEVNULL)
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "ExitOnForwardFailure=yes", "LogLevel=ERROR")
        self._line = ["ssh", "-N", "-R", f"127.0.0.1:{self.port}:127.0.0.1:{target}", "-p", str(number), "-i",
                      str(folder / "user"), "-F", "none", *(word for option in options for word in ("-o", option)),
                      f"{getpass.getuser()}@127.0.0.1"]
        self._client = self._connect()

    def _connect(self) -> subprocess.Popen[bytes]:
        end = time.monotonic() + WAIT_S
        while True:
            client = subprocess.Popen(self._line)
            while client.poll() is None:
                if not network.dial("127.0.0.1", self.port):
                    return client
                time.sleep(0.1)
            assert time.monotonic() < end, "ssh cannot connect"
            time.sleep(0.2)  # sshd has not begun

    def break_and_restart(self) -> None:
        self._client.kill()
        self._client.wait()
        until(lambda: bool(network.dial("127.0.0.1", self.port)), "sshd has closed the port")
        self._client = self._connect()

    def close(self) -> None:
        for process in (self._client, self._server):
            process.kill()
            process.wait()


@contextmanager
def ssh(folder: Path, target: int) -> Iterator[Ssh]:
    tunnel = Ssh(folder, target)
    try:
        yield tunnel
    finally:
        tunnel.close()


@pytest.mark.skipif(SSHD is None, reason="sshd is not installed")
def test_job_through_ssh_whose_client_is_killed_equals_the_direct_one(
    sites: Sites, folders: Folders, direct: str, tmp_path: Path,
) -> None:
    port = free_port()
    with ssh(tmp_path, port) as tunnel:
        server = sites.serve(2, "--keys", str(folders.server), "--bind", f"127.0.0.1:{port}", "--advertise",
                             f"127.0.0.1:{tunnel.port}")
        both = started(sites, folders, STEPS)
        for process in both:
            next_row(process)
        tunnel.break_and_restart()
        ends = all_ended([*both, server])
    assert sha_of(ends[:2]) == direct
    assert all("connected to server 0 over gRPC" in end.errors for end in ends[:2])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
