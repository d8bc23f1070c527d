"""Output of servers and sites: text of members is short, and the job's secret never appears. Access by a page's token."""

from __future__ import annotations

import contextlib
import http.client
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.coordinators import WAIT_S, until
from support.hostile import ROOT, SECRET, HonestMember, HostileMember, Victim, joined
from support.keys import Folders
from support.sites import QUICK

from commlayer.cluster.calls import messages
from commlayer.cluster.keys import authority
from commlayer.errors import MAX_PEER_TEXT_CHARS
from commlayer.observe.pages.web import read_token
from commlayer.transport.protocol import Header, Kind

LONG = "Q" * 5000 + "\n\x1b[31mforged line"
"""Text of a member. Nothing else has many Qs."""


@pytest.fixture(name="victim", scope="module")
def made_victim() -> Iterator[Victim]:
    with Victim("--workers", "2") as victim:
        yield victim


@pytest.mark.commit(1)
def test_member_text_in_log_lines_is_short_and_one_line(victim: Victim) -> None:
    with contextlib.ExitStack() as stack:
        honest, hostile = joined(stack, victim, HonestMember, HostileMember)
        sites = [msgspec.structs.replace(messages.site_request(1), token=f"{name}-{LONG}", **{name: LONG})
                 for name in ("name", "version", "job", "plan_digest", "address", "streams", "meeting", "leave", "certificate")]
        workers = [msgspec.structs.replace(messages.worker_request("job", 0, 2), **{name: LONG})
                   for name in ("token", "name", "version", "job", "plan_digest", "address")]
        workers.append(msgspec.structs.replace(workers[0], token="x", must_match={LONG: LONG}))
        gone, put = messages.PeerExit("worker 0", LONG), (((LONG, messages.ANY), b""),)
        requests = [*sites, *workers, messages.KvRequest(LONG, put=put), messages.Heartbeat("x", dropped=(gone,)),
                    messages.Heartbeat(hostile.token, events=(LONG.encode()[:900],), time_s=1.0),
                    messages.KvRequest(hostile.home, put=put), messages.Leave(hostile.token, LONG),
                    msgspec.structs.replace(hostile.lease.request, leave=LONG)]
        for request in requests:
            with contextlib.suppress(Exception):
                hostile.call(type(request).__name__, request, 5.0)
            with contextlib.suppress(Exception):  # fields that no record has
                hostile.call(type(request).__name__, msgspec.msgpack.encode({LONG: LONG}), 5.0)
        until(lambda: sum("Q" * 200 in line for line in victim.lines) >= 2, "its reasons are logged, of worker and home")
        honest.call()
    assert [line for line in victim.lines if "Q" * (MAX_PEER_TEXT_CHARS + 1) in line or "\x1b" in line] == []
    assert [line for line in victim.lines if line.startswith(("\x1b", "[31m"))] == []


def test_protocol_violation_is_logged_in_a_short_line(victim: Victim) -> None:
    with contextlib.ExitStack() as stack:
        victim = stack.enter_context(Victim("--workers", "2"))
        _, hostile = joined(stack, victim, HonestMember, HostileMember)
        with hostile.data() as data:
            data.send(Header(Kind.PLAN, 2, sender=1), msgspec.json.encode({LONG: LONG}))
            assert data.read() is not None, "the reason"
            data.send(Header(Kind.PLAN, 3, sender=1, flags=2), msgspec.msgpack.encode({LONG: LONG}))
            until(lambda: any("dropped" in line for line in victim.lines), "it is dropped")
    assert [line for line in victim.lines if "Q" * (MAX_PEER_TEXT_CHARS + 1) in line] == []


def told(victim: Victim, *options: str, token: str = "") -> str:
    """Everything that `commlayer join` prints at a site, whose script does nothing."""
    environment = QUICK | {"PATH": "/usr/bin:/bin", "COMMLAYER_CONFIG": "", "PYTHONPATH": str(ROOT)} | \
        ({"COMMLAYER_TOKEN": token} if token else {})
    line = [sys.executable, "-m", "commlayer.cli.main", "join", "--wait", "20", *options, victim.address]
    done = subprocess.run([*line, "tests/support/lab.py"], cwd=ROOT, env=environment, text=True, capture_output=True,
                          timeout=2 * WAIT_S)
    return done.stdout + done.stderr


@pytest.mark.commit(1)
@pytest.mark.parametrize("given", [True, False])
def test_insecure_server_warns_first_and_logs_no_secret(given: bool) -> None:
    """It prints a generated secret once, on standard output: without it no worker could join."""
    with Victim("--workers", "1", secret=SECRET if given else "", environment={"COMMLAYER_INSECURE": "1"}) as victim:
        secret = SECRET if given else victim.told["token"]
        home = told(victim, "--insecure", token=secret)
        until(lambda: any("registered" in line for line in victim.lines), "the home has come")
    assert "insecure is set" in victim.lines[0]
    assert "nothing of this job is encrypted" in victim.lines[0]
    assert ("token" in victim.told) == (not given)
    assert secret not in "".join(victim.lines) + home


def test_secret_is_not_printed_with_keys_and_insecure_concerns_only_the_page(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    with Victim("--workers", "1", "--page", "0", folders=folders, environment={"COMMLAYER_INSECURE": "1"}) as victim:
        home = told(victim, "--keys", str(folders.worker))
        until(lambda: any("registered" in line for line in victim.lines), "the home has come")
    assert "insecure is set" in victim.lines[0]
    assert "the job is" in victim.lines[0]
    assert (folders.server / "token").read_text().strip() not in f"{victim.told} {''.join(victim.lines)} {home}"


def test_secure_server_prints_no_warning(victim: Victim) -> None:
    assert not any("insecure" in line for line in victim.lines)


def status(address: str, token: str) -> int:
    link = http.client.HTTPConnection(address, timeout=WAIT_S)
    with contextlib.closing(link):
        link.request("GET", f"/?token={token}")
        return link.getresponse().status


def pages(victim: Victim) -> list[tuple[str, str]]:
    """Addresses and tokens that the server has printed."""
    return [(found[1], found[2]) for line in victim.lines if (found := re.search(r"page: http://(.*)/\?token=(\w+)", line))]


def test_revocation_invalidates_the_page_token(tmp_path: Path) -> None:
    """A site with the page's address reads it until it is revoked, and no site can compute a token."""
    folders = Folders(tmp_path)
    with Victim("--workers", "2", "--page", "0", folders=folders) as victim:
        until(lambda: pages(victim) != [], "the page's address")
        ((address, token),) = pages(victim)
        known = (folders.second / "token").read_bytes().strip(), (folders.second / "node.key").read_bytes()
        assert status(address, token) == 200
        assert {status(address, read_token(secret, number)) for secret in known for number in range(4)} == {401}
        stream = http.client.HTTPConnection(address, timeout=WAIT_S)
        with contextlib.closing(stream):
            stream.request("GET", f"/updates?token={token}")
            updates = stream.getresponse()
            assert updates.readline().startswith(b"data: ")
            authority.revoke(folders.ca, "gpu-2")
            until(lambda: status(address, token) == 401, "the former token is void")
            while updates.readline():  # until the server ends it; the connection's timeout bounds this
                pass
        until(lambda: len(pages(victim)) == 2, "the new address is printed")
        assert status(*pages(victim)[1]) == 200


def test_page_token_is_constant_without_keys(tmp_path: Path) -> None:
    with Victim("--workers", "2", "--page", "0") as victim:
        until(lambda: pages(victim) != [], "the page's address")
        assert pages(victim)[0][1] == read_token(SECRET.encode())
