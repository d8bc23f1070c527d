"""A peer without the job's secret is not admitted, learns nothing, delays no member and costs little."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.attached import assert_refused, mlp, outcome
from support.coordinators import WAIT_S, Failures, quick
from support.internals import config_from_options
from support.jobs import distributed_job
from support.mailbox import InboxTransport
from support.meshes import PATIENCE_S, exchange_pair, soon
from support.rank_pool import pool
from support.rank_pool import quick as small

import commlayer
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.call_proofs import AuthenticationFailed, CallAuthenticator, CallVerifier
from commlayer.cluster.membership import client
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.processes.child_processes import EmbeddedServer
from commlayer.config import read_config
from commlayer.errors import RecordError, Refused
from commlayer.transport import handshake
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.framing import Reader
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE

SECRET = "correct-horse-battery"
WRONG = [("", "no secret.*COMMLAYER_TOKEN.*E-SECRET"),
         ("wrong-donkey-battery", "a different secret.*COMMLAYER_TOKEN.*E-SECRET")]


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    hub = Coordinator(quick(token=SECRET))
    yield hub
    hub.close()


def request(rank: int, job: str = "jobA") -> messages.Join:
    return messages.worker_request(job, rank, 2, plan=b"a plan")


def join_both(address: str) -> list[client.Membership]:
    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(client.join, address, request(r), quick(token=SECRET), Failures()) for r in range(2)]
        return [one.result(WAIT_S) for one in joining]


@pytest.mark.parametrize(("token", "line"), WRONG)
def test_join_without_the_secret_registers_nothing_and_reveals_nothing(coordinator: Coordinator, token: str, line: str) -> None:
    with pytest.raises(Refused, match=line) as caught:
        client.join(coordinator.address, request(1, "jobB"), quick(token=token), Failures())
    assert "\n" not in str(caught.value)
    assert not re.search("jobA|jobB|worker", str(caught.value).replace("every worker", ""))
    members = join_both(coordinator.address)
    assert [m.rank for m in members] == [0, 1]
    for member in members:
        member.leave()


def test_proof_is_valid_for_one_connection_method_and_body() -> None:
    judge, sent = CallVerifier(SECRET), []

    def call(method: str, data: bytes, _: float) -> bytes:
        sent.append((method, data))
        return judge.challenge("here") if method == "Challenge" else judge.sealed(data, judge.opened("here", method, data))

    asker = CallAuthenticator(SECRET, call, lambda error: isinstance(error, AuthenticationFailed))
    assert asker.ask("Join", b"body", 1.0) == b"body"
    method, data = sent[-1]
    assert judge.opened("here", method, data) == b"body"
    others = [("there", method, data), ("here", "Leave", data), ("here", method, data + b"!"), ("here", method, b"")]
    for peer, name, bytes_ in others:
        with pytest.raises(AuthenticationFailed):
            judge.opened(peer, name, bytes_)
    assert all(SECRET.encode() not in data for _, data in sent)
    judge = CallVerifier(SECRET)  # another connection: a new challenge is fetched by itself
    assert asker.ask("Join", b"again", 1.0) == b"again"
    judge = CallVerifier("another secret")
    with pytest.raises(AuthenticationFailed):
        asker.ask("Join", b"body", 1.0)


class Spoiled(CallAuthenticator):
    """Another thread, whose proof for an older connection is refused, resets what this one keeps."""

    _known = property(lambda self: None, lambda self, value: None)  # type: ignore[assignment]


def test_proofs_stay_valid_with_concurrent_threads_and_reconnects() -> None:
    judge, connection, again = CallVerifier(SECRET), ["old"], iter(["new", "newer", "newest"])

    def call(method: str, data: bytes, _: float) -> bytes:
        if method == "Challenge":
            return judge.challenge(connection[0])
        connection[0] = next(again, connection[0])
        return judge.sealed(data, judge.opened(connection[0], method, data))

    for kind in (CallAuthenticator, Spoiled):
        assert kind(SECRET, call, lambda error: isinstance(error, AuthenticationFailed)).ask("Join", b"body", 1.0) == b"body"


def test_coordinator_without_the_secret_is_refused() -> None:
    asker = CallAuthenticator(SECRET, lambda method, data, _: b"0" * 16 if method == "Challenge" else b"0" * 32 + b"\x80",
                              lambda _: False)
    with pytest.raises(AuthenticationFailed):
        asker.ask("Join", b"", 1.0)


def test_calls_of_strangers_cost_the_coordinator_little() -> None:
    child = EmbeddedServer.start(quick(token=SECRET), workers=2, servers=0, number=None)
    try:
        before = peak_nbytes(child.pid)
        channel = grpc.insecure_channel(child.control, options=[("grpc.max_send_message_length", -1)])
        join, body = channel.unary_unary(f"/{messages.SERVICE}/Join"), bytes(24 << 20)
        codes = [one.exception(timeout=WAIT_S).code() for one in [join.future(body, timeout=WAIT_S) for _ in range(8)]]
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        # The bytes in flight of one connection; the bytes sent are eight times 24 MiB.
        assert peak_nbytes(child.pid) - before < 72 << 20
        for member in join_both(child.control):
            member.leave()
        channel.close()
    finally:
        child.close()


def peak_nbytes(pid: int) -> int:
    results = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert results is not None
    return int(results[1]) << 10


def test_incomplete_calls_block_no_member(coordinator: Coordinator) -> None:
    channel, never = grpc.insecure_channel(coordinator.address), threading.Event()

    def silent() -> Iterator[bytes]:
        never.wait()
        yield b""

    calls = [channel.stream_unary(f"/{messages.SERVICE}/Join").future(silent(), timeout=WAIT_S) for _ in range(32)]
    try:
        for member in join_both(coordinator.address):
            member.leave()
        assert not any(call.done() for call in calls), "they were there all the time"
    finally:
        for call in calls:
            call.cancel()
        never.set()
        channel.close()


def server(**settings: Any) -> StreamTransport:
    return InboxTransport(Hello("jobA", SERVER_BASE), settings=Settings(secret=SECRET, **settings))


def dialled(address: tuple[str, int], token: str = SECRET, job: str = "jobA") -> StreamTransport:
    peer = InboxTransport(Hello(job, 1), settings=Settings(secret=token))
    try:
        peer.dial(SERVER_BASE, address, soon())
    except BaseException:
        peer.close()
        raise
    return peer


@pytest.mark.parametrize(("token", "line"), WRONG)
def test_client_without_the_secret_is_refused_before_the_job_is_named(token: str, line: str) -> None:
    end = server()
    with pytest.raises(Refused, match=f"server 0: .*{line}") as caught:
        dialled(end.listen(), token, "jobB")
    assert "jobA" not in str(caught.value)
    worker = dialled(end.listen())
    assert exchange_pair(worker, end)
    for transport in (worker, end):
        transport.close()


class Recorded:
    """A socket that keeps all bytes of both directions."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.bytes = sock, bytearray()
        self.settimeout = sock.settimeout

    def sendall(self, data: bytes) -> None:
        self.bytes += data
        self._sock.sendall(data)

    def recv_into(self, into: memoryview) -> int:
        n = self._sock.recv_into(into)
        self.bytes += into[:n]
        return n


def test_secret_is_never_sent_and_proofs_never_repeat() -> None:
    end, seen = server(), []
    for rank in range(2):
        with socket.create_connection(end.listen(), PATIENCE_S) as sock:
            recorded: Any = Recorded(sock)
            handshake.dial_handshake(recorded, Reader(), Hello("jobA", rank), SECRET, SERVER_BASE, soon())
            assert SECRET.encode() not in recorded.bytes
            seen.append(bytes(recorded.bytes[-40:]))  # of WELCOME, whose body ends with the acceptor's proof
    assert seen[0] != seen[1]
    end.close()


def test_listener_without_the_secret_is_refused() -> None:
    end = StreamTransport(Hello("jobA", SERVER_BASE), settings=Settings(secret="another secret"))
    assert_refused(outcome(lambda: dialled(end.listen())), "E-SECRET")
    end.close()


def test_secret_is_not_on_the_command_line_or_environment_of_a_child() -> None:
    child = EmbeddedServer.start(quick(token=SECRET), workers=2, servers=0, number=None)
    try:
        for what in ("cmdline", "environ"):
            assert SECRET.encode() not in Path(f"/proc/{child.pid}/{what}").read_bytes()
        with pytest.raises(Refused):
            client.join(child.control, request(0), quick(), Failures())
    finally:
        child.close()


def attached(rank: int) -> str:
    with commlayer.attach(mlp(), compression=commlayer.compressors.identity(), config=small()) as session:
        link: Any = distributed_job(session).uplink
        return str(config_from_options(link).token)


def test_ranks_of_a_group_create_and_share_a_secret() -> None:
    tokens = [pool(2).call(attached) for _ in range(2)]
    assert all(one == two for one, two in tokens)
    assert tokens[0] != tokens[1]
    assert len(tokens[0][0]) == 64


BAD = [
    ({"token": "short"}, "^token: .*argument token, .*8 or more.*E-SETTING"),
    ({"token": "with blanks in it"}, "^token: .*argument token, .*8 or more.*E-SETTING"),
    ({"token_file": "missing"}, "^token_file: .*missing .*argument token_file .*E-SETTING"),
    ({"token_file": "empty"}, "^token_file: .*empty .*argument token_file: .*0 characters .*E-SECRET"),
    ({"token_file": "good", "token": SECRET}, "^token_file: .*good .*argument token_file .*argument token, .*E-SECRET"),
]


@pytest.mark.parametrize(("fields", "line"), BAD)
def test_invalid_secret_is_one_line_without_the_secret(fields: dict[str, str], line: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "good").write_text(f"{SECRET}\n")
    fields = {name: str(tmp_path / value) if name == "token_file" else value for name, value in fields.items()}
    with pytest.raises(RecordError, match=line) as caught:
        read_config(fields, environ={}, cwd=tmp_path)
    assert "token" not in fields or fields["token"] not in str(caught.value)


def test_secret_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    assert read_config({}, environ={"COMMLAYER_TOKEN_FILE": str(tmp_path / "secret")}, cwd=tmp_path).token == SECRET


