"""Sites obtain certificates with invitations, over real sockets, and every known attack on the enrolment fails."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import re
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from support.coordinators import WAIT_S, Failures, quick, until
from support.internals import port_of, rendezvous_of
from support.keys import DAY, another_day

pytest.importorskip("cryptography", reason="cryptography is not installed")
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from commlayer.cli import main
from commlayer.cluster.calls import messages
from commlayer.cluster.keys import authority, enrolment, enrolment_client, enrolment_messages, home_keys, invitations
from commlayer.cluster.keys.enrolment import EnrolmentServer
from commlayer.cluster.keys.enrolment_messages import MAGIC, EnrolmentChallenge, EnrolmentReply, EnrolmentRequest
from commlayer.cluster.keys.home_keys import HomeLine, Token
from commlayer.cluster.membership import client
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.doctor import machine
from commlayer.doctor.machine import Torch
from commlayer.doctor.server import ServerCheck
from commlayer.errors import CommError, DeadlineExceeded, InvalidInput, NotYet, Refused
from commlayer.transport import handshake
from commlayer.transport.flow.fair_share import MinuteCounts
from commlayer.transport.keys.key_folder import Keys, enrolling_context

SECRET = "correct-horse-battery"


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's keys are stored."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / "commlayer"


class Server(NamedTuple):
    """A CA in `ca`, and a coordinator that accepts its invitations."""

    ca: Path
    keys: Path
    coordinator: Coordinator

    @property
    def address(self) -> str:
        return self.coordinator.address

    def line(self, name: str = "home-1", **options: Any) -> HomeLine:
        (token,) = invitations.invite(self.ca, [name], **options).values()
        return HomeLine(name, self.address, token)

    def joined(self, folder: Path) -> str:
        """Joins with the keys in a folder, over mutual TLS, and leaves."""
        request, config = messages.worker_request("job", 0, 1), quick(keys=str(folder), token=SECRET)
        member = client.join(self.address, request, config, Failures())
        member.close()
        return member.name

    @property
    def certificates(self) -> list[tuple[str, bool]]:
        return [(one.name, one.revoked) for one in authority.list_issued(self.ca) if one.name != "server"]


@pytest.fixture(name="server")
def made_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)  # tests outlive no power failure
        keys, new = invitations.server_keys(tmp_path / "keys")
        assert new
        coordinator = Coordinator(quick(keys=str(keys), token=SECRET), workers=1, ca=str(tmp_path / "keys"))
        yield Server(tmp_path / "keys", keys, coordinator)
        coordinator.close()


def soon() -> float:
    return time.monotonic() + WAIT_S


def request_of(name: str, key: Any, *extensions: x509.ExtensionType) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
    for one in extensions:
        builder = builder.add_extension(one, critical=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def token_of(home: HomeLine) -> Token:
    assert home.token is not None
    return home.token


@contextlib.contextmanager
def dialled(address: str, token: Token) -> Iterator[tuple[ssl.SSLSocket, bytes, bytes]]:
    """A connection on which the server awaits the request, its nonce, and the fingerprint of its certificate."""
    with socket.create_connection(tuple(address.rsplit(":", 1)), WAIT_S) as sock:
        sock.sendall(MAGIC)
        ca = enrolment_client.receive_authority(sock, token, soon())
        with enrolment_messages.secured(enrolling_context(ca), sock, soon(), server=False) as tls:
            nonce = enrolment_messages.receive_record(tls, EnrolmentChallenge, 4096, soon()).nonce
            yield tls, nonce, hashlib.sha256(tls.getpeercert(binary_form=True) or b"").digest()


def attempt(home: HomeLine, csr: bytes, name: str = "", secret: bytes = b"",
            binding: Sequence[bytes] | None = None) -> EnrolmentReply:
    """The server's reply to a request, which is signed as the line requires unless arguments differ."""
    with dialled(home.address, token_of(home)) as (tls, nonce, fingerprint):
        signed = invitations.statement(name or home.name, csr, binding or (nonce, fingerprint))
        proof = invitations.signing_key(secret or token_of(home).secret).sign(signed)
        enrolment_messages.send_record(tls, EnrolmentRequest(name or home.name, csr, proof), soon())
        return enrolment_messages.receive_record(tls, EnrolmentReply, 1 << 20, soon())


def code_in(text: str) -> str:
    return re.findall(r"\[(E-[A-Z-]+)\]$", text)[0]


def refusal(call: Callable[[], Any], kind: type[CommError] = Refused) -> str:
    """The code of the error that the call raises, in one line."""
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert caught.value.peer.startswith("server 127.0.0.1:")
    return caught.value.code


def test_site_enrols_joins_over_mutual_tls_and_needs_no_token_later(server: Server, user: Path) -> None:
    home = server.line()
    folder = enrolment_client.enrol(home, WAIT_S)
    assert server.joined(folder) == "worker 0"
    keys = Keys(folder)
    assert (keys.own.name, keys.own.dials_only) == ("home-1", True), "a home can never be a server"
    assert folder.parent == user
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["ca.pem", "crl.pem", "home", "node.key", "node.pem", "token"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert [path.name for path in user.iterdir()] == [folder.name], "the draft of the key is gone"
    assert home.stored() == HomeLine(home.name, home.address).stored() == folder
    assert home_keys.stored_lines() == [HomeLine(home.name, home.address)]


@pytest.mark.parametrize("command", ["join", "doctor"])
def test_check_obtains_the_certificate_without_registering(
    server: Server, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    script, line = tmp_path / "train.py", server.line()
    script.write_text("raise SystemExit(9)")
    monkeypatch.setattr(machine, "own_torch", lambda: Torch(torch="2.13"))  # these two are slow, and not tested here
    monkeypatch.setattr(ServerCheck, "link", lambda *_: ())
    words = ["join", str(line), str(script), "--check"] if command == "join" else ["doctor", "--join", str(line)]
    monkeypatch.setattr("sys.argv", ["commlayer", *words])
    with pytest.raises(SystemExit, match="^0$"):
        main.run()
    assert server.certificates == [("home-1", False)]
    assert rendezvous_of(server.coordinator).homes() == {}
    server.joined(line.folder)
    out = capsys.readouterr().out
    looked_at = ["keys", *["script"] * (command == "join"), "server"]
    assert re.findall(r"^ok +(keys|server|script) ", out, re.M) == looked_at


def test_check_with_an_invalid_token_names_the_reason(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machine, "own_torch", lambda: Torch(torch="2.13"))
    monkeypatch.setattr("sys.argv", ["commlayer", "join", str(other_secret(server)), "--check"])
    with pytest.raises(SystemExit, match="^2$"):
        main.run()
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("fail ") == 1
    assert "E-INVITATION" in out.partition("fail keys")[2]


def test_private_keys_and_secrets_of_a_site_never_reach_the_server(server: Server) -> None:
    home = server.line()
    folder = enrolment_client.enrol(home, WAIT_S)
    key, secret = (folder / "node.key").read_bytes(), token_of(home).secret
    forms = (secret, secret.hex().encode(), str(token_of(home)).encode())
    for path in (path for path in server.ca.rglob("*") if path.is_file()):
        data = path.read_bytes()
        assert not any(form in data for form in forms), path
        assert key.splitlines()[1] not in data, path
    assert not (server.ca / "nodes" / "home-1").exists()
    assert all(str(token_of(home)) not in path.read_text() for path in folder.iterdir()), "nor is the token kept at the home"


def test_restarted_server_keeps_invitations_and_its_address(server: Server) -> None:
    home = server.line()
    invitations.set_address(server.ca, server.address)
    assert invitations.invite(server.ca, ["home-1", "home-2"], keep=True).keys() == {"home-2"}
    again = EnrolmentServer(server.ca, Keys(server.keys), SECRET)
    port_of(server.coordinator).enrolment = again
    enrolment_client.enrol(home, WAIT_S)
    assert invitations.read_book(server.ca).address == server.address
    assert invitations.pending(server.ca).keys() == {"home-2"}
    lines = invitations.commands(server.ca, ["home-1", "home-2"], {}, server.address)
    assert lines[0] == f"commlayer join home-1@{server.address} train.py"
    assert re.match(r"# home-2: .* UTC; .*commlayer keys invite --dir \S+ home-2$", lines[1])


def test_retry_with_the_same_key_after_a_lost_reply_gets_the_same_certificate(server: Server) -> None:
    home, csr = server.line(), request_of("home-1", new_key())
    first, second = attempt(home, csr), attempt(home, csr)
    assert first.certificate == second.certificate != b""
    assert server.certificates == [("home-1", False)]


def test_interrupted_site_retries_with_the_same_key(server: Server, monkeypatch: pytest.MonkeyPatch, user: Path) -> None:
    home = server.line()
    with monkeypatch.context() as patch:
        patch.setattr(authority, "make_folder", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            enrolment_client.enrol(home, WAIT_S)
    (draft,) = user.iterdir()
    assert stat.S_IMODE(draft.stat().st_mode) == 0o600
    server.joined(enrolment_client.enrol(home, WAIT_S))
    assert server.certificates == [("home-1", False)]


def test_new_invitation_replaces_certificate_and_stored_keys(server: Server) -> None:
    first = Keys(enrolment_client.enrol(server.line(), WAIT_S)).own.serial
    with pytest.raises(ValueError, match="--again"):
        server.line()
    home = server.line(again=True)
    assert home.stored() is None, "keys of another token"
    folder = enrolment_client.enrol(home, WAIT_S)
    assert Keys(folder).revoked() == {first}
    server.joined(folder)
    assert server.certificates == [("home-1", True), ("home-1", False)]


def test_certificate_missing_in_its_invitation_is_revoked(server: Server) -> None:
    """As if the server had died between the writes of the two files."""
    home = server.line()
    book = (server.ca / invitations.FILE).read_bytes()
    attempt(home, request_of("home-1", new_key()))
    (server.ca / invitations.FILE).write_bytes(book)
    assert attempt(home, request_of("home-1", new_key())).certificate
    assert server.certificates == [("home-1", True), ("home-1", False)]


def test_site_waits_for_a_server_that_starts_later(server: Server) -> None:
    home, said = server.line(), list[str]()
    home = home._replace(address="127.0.0.1:1")
    assert refusal(lambda: enrolment_client.enrol(home, 0.3, said.append), DeadlineExceeded) == "E-DEADLINE"
    assert len(said) == 1


def test_locked_ca_is_an_error_within_a_deadline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    home = server.line()
    monkeypatch.setattr(authority, "LOCK_S", 0.1)
    with authority.locked(server.ca):
        for act in (server.line, lambda: invitations.withdraw(server.ca, "home-1")):
            with pytest.raises(InvalidInput, match="E-KEYS"):
                act()
        assert code_in(attempt(home, request_of("home-1", new_key())).error) == "E-KEYS"
    assert attempt(home, request_of("home-1", new_key())).certificate


def test_sites_cannot_replace_the_server_certificate(server: Server) -> None:
    with pytest.raises(InvalidInput, match="E-CLI-OPTION"):
        server.line(invitations.SERVER, again=True)


def expired(server: Server) -> HomeLine:
    return server.line(hours=1e-9)


def used(server: Server) -> HomeLine:
    home = server.line()
    assert attempt(home, request_of("home-1", new_key())).certificate
    return home


def replaced(server: Server) -> HomeLine:
    home = server.line()
    server.line()
    return home


def withdrawn(server: Server) -> HomeLine:
    home = server.line()
    assert invitations.withdraw(server.ca, "home-1")
    return home


def other_secret(server: Server) -> HomeLine:
    home = server.line()
    return home._replace(token=token_of(home)._replace(secret=bytes(16)))


def of_another_home(server: Server) -> HomeLine:
    server.line("home-2")
    return server.line()._replace(name="home-2")


def never_invited(server: Server) -> HomeLine:
    return server.line()._replace(name="stranger")


def for_the_server(server: Server) -> HomeLine:
    return server.line()._replace(name="server")


def of_another_ca(server: Server) -> HomeLine:
    home = server.line()
    return home._replace(token=token_of(home)._replace(fingerprint=bytes(32)))


INVALID = [(expired, "E-INVITATION-EXPIRED"), (used, "E-INVITATION-USED"), (replaced, "E-INVITATION"),
           (withdrawn, "E-INVITATION"), (other_secret, "E-INVITATION"), (of_another_home, "E-INVITATION"),
           (never_invited, "E-INVITATION"),
           (for_the_server, "E-INVITATION"), (of_another_ca, "E-CERTIFICATE-CA")]


@pytest.mark.parametrize(("made", "code"), INVALID, ids=lambda case: getattr(case, "__name__", case))
def test_invalid_invitation_is_refused_with_its_reason(
    server: Server, made: Callable[[Server], HomeLine], code: str, user: Path,
) -> None:
    home = made(server)
    before = server.certificates
    assert refusal(lambda: enrolment_client.enrol(home, WAIT_S)) == code
    assert server.certificates == before
    assert home.stored() is None


def test_invitation_of_a_revoked_site_is_void(server: Server) -> None:
    home, csr = server.line(), request_of("home-1", new_key())
    assert attempt(home, csr).certificate
    authority.revoke(server.ca, "home-1")
    assert code_in(attempt(home, csr).error) == "E-INVITATION-USED"


def test_invitation_replaced_during_its_request_is_void(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    home, locked = server.line(), authority.locked

    @contextlib.contextmanager
    def late(folder: Path) -> Iterator[None]:
        monkeypatch.setattr(authority, "locked", locked)
        server.line()
        with locked(folder):
            yield

    monkeypatch.setattr(authority, "locked", late)
    assert code_in(attempt(home, request_of("home-1", new_key())).error) == "E-INVITATION"
    assert server.certificates == []


def test_concurrent_uses_of_a_token_yield_one_certificate(server: Server) -> None:
    home = server.line()
    requests = [request_of("home-1", new_key()) for _ in range(6)]
    with ThreadPoolExecutor(len(requests)) as threads:
        replies = list(threads.map(lambda csr: attempt(home, csr), requests))
    assert len([reply for reply in replies if reply.certificate]) == 1
    assert {code_in(reply.error) for reply in replies if reply.error} == {"E-INVITATION-USED"}
    assert server.certificates == [("home-1", False)]
    assert all(not reply.secret for reply in replies if reply.error)


def test_request_must_have_the_invited_name(server: Server) -> None:
    home = server.line()
    reply = attempt(home, request_of("home-2", new_key()))
    assert (code_in(reply.error), reply.certificate, server.certificates) == ("E-INVITATION", b"", [])
    assert attempt(home, request_of("home-1", new_key())).certificate, "the invitation was not used up"


REQUESTS: list[Callable[[], bytes]] = [
    lambda: b"", lambda: b"\x30\x82\xff\xff" + bytes(60), lambda: bytes(3000),
    lambda: request_of("home-1", ec.generate_private_key(ec.SECP384R1())),
    lambda: request_of("home-1", rsa.generate_private_key(65537, 2048)),
    lambda: request_of("home-1", new_key())[:-1] + b"\0",
    lambda: request_of("home-1\nforged: line", new_key()),
]


@pytest.mark.parametrize("csr", REQUESTS)
def test_invalid_request_is_refused(server: Server, csr: Callable[[], bytes]) -> None:
    home = server.line()
    assert code_in(attempt(home, csr()).error) == "E-INVITATION"
    assert server.certificates == []
    assert attempt(home, request_of("home-1", new_key())).certificate


def test_requested_extensions_are_ignored(server: Server) -> None:
    wishes = (x509.BasicConstraints(ca=True, path_length=None), x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
              x509.SubjectAlternativeName([x509.DNSName("server")]))
    certificate = x509.load_pem_x509_certificate(attempt(server.line(), request_of("home-1", new_key(), *wishes)).certificate)
    found = {type(one.value): one.value for one in certificate.extensions}
    assert not found[x509.BasicConstraints].ca
    assert list(found[x509.ExtendedKeyUsage]) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert "server" not in found[x509.SubjectAlternativeName].get_values_for_type(x509.DNSName)
    assert certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC) < 366 * DAY


def test_request_signed_for_another_connection_is_refused(server: Server) -> None:
    """A replay has the nonce of its original connection."""
    home, csr = server.line(), request_of("home-1", new_key())
    with dialled(home.address, token_of(home)) as (_, nonce, fingerprint):
        assert code_in(attempt(home, csr, binding=(nonce, fingerprint)).error) == "E-INVITATION"
    assert server.certificates == []


def test_signature_for_another_request_or_name_is_refused(server: Server) -> None:
    home = server.line()
    with dialled(home.address, token_of(home)) as (tls, nonce, fingerprint):
        signed = invitations.statement("home-1", request_of("home-1", new_key()), (nonce, fingerprint))
        proof = invitations.signing_key(token_of(home).secret).sign(signed)
        enrolment_messages.send_record(tls, EnrolmentRequest("home-1", request_of("home-1", new_key()), proof), soon())
        assert code_in(enrolment_messages.receive_record(tls, EnrolmentReply, 1 << 20, soon()).error) == "E-INVITATION"
    assert server.certificates == []


class Middle:
    """A hostile listener that a site reaches instead of the server.

    `received` collects what arrives after the site's MAGIC, decrypted if the site trusts it.
    """

    def __init__(self, ca: bytes, keys: Path, act: Callable[[Any], None] = lambda _: None, nonce: bytes = bytes(16)) -> None:
        self.received = bytearray()
        self._nonce, self._act = nonce, act
        self._ca, self._context = ca, Keys(keys).enrolment_context()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        sock.settimeout(WAIT_S)
        with contextlib.suppress(CommError, OSError):
            assert enrolment_messages.receive(sock, len(MAGIC), soon()) == MAGIC
            sock.sendall(MAGIC + enrolment_messages.framed(self._ca))
            with enrolment_messages.secured(self._context, sock, soon(), server=True) as tls:
                enrolment_messages.send_record(tls, EnrolmentChallenge(self._nonce), soon())
                self._act(tls)
                while piece := tls.recv(4096):
                    self.received += piece
        sock.close()

    def close(self) -> None:
        self._listener.close()
        self._thread.join(WAIT_S)


def test_server_of_another_ca_receives_nothing(server: Server, tmp_path: Path) -> None:
    keys, _ = invitations.server_keys(tmp_path / "other")
    middle = Middle(invitations.certificate_authority(tmp_path / "other"), keys)
    assert refusal(lambda: enrolment_client.enrol(server.line()._replace(address=middle.address), WAIT_S)) == "E-CERTIFICATE-CA"
    middle.close()
    assert middle.received == b""


@pytest.mark.parametrize(("which", "code"), [("other", "E-CERTIFICATE-CA"), ("dials", "E-CERTIFICATE-USE"),
                                             ("expired", "E-CERTIFICATE-DATE"), ("early", "E-CERTIFICATE-DATE")])
def test_right_ca_without_a_server_certificate_is_refused(
    server: Server, tmp_path: Path, which: str, code: str,
) -> None:
    """`expired` and `early` are also what a site sees whose clock is wrong."""
    day = {"expired": -2, "early": 2}.get(which)
    with another_day(day) if day else contextlib.nullcontext():
        keys = invitations.server_keys(tmp_path / "other")[0] if which == "other" else authority.add(
            server.ca, "gpu-1", dials_only=which == "dials")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keys, "__init__", _bare_keys)
        middle = Middle(invitations.certificate_authority(server.ca), keys)
    assert refusal(lambda: enrolment_client.enrol(server.line("home-9")._replace(address=middle.address), WAIT_S)) == code
    middle.close()
    assert middle.received == b""


def _bare_keys(self: Keys, folder: Path) -> None:
    """Skips the check of validity dates."""
    self.folder = folder
    self.certificate, self.key = ((folder / name).read_bytes() for name in ("node.pem", "node.key"))


def test_another_server_of_the_job_cannot_relay_a_request(server: Server) -> None:
    """It has a certificate that sites trust, forwards the real server's nonce, and then the site's request."""
    home, replies = server.line(), list[EnrolmentReply]()
    with dialled(home.address, token_of(home)) as (tls, nonce, _):

        def relay(inner: Any) -> None:
            request = enrolment_messages.receive_record(inner, EnrolmentRequest, 4096, soon())
            enrolment_messages.send_record(tls, request, soon())
            replies.append(enrolment_messages.receive_record(tls, EnrolmentReply, 1 << 20, soon()))
            enrolment_messages.send_record(inner, replies[0], soon())

        middle = Middle(invitations.certificate_authority(server.ca), authority.add(server.ca, "gpu-1"), relay, nonce)
        assert refusal(lambda: enrolment_client.enrol(home._replace(address=middle.address), WAIT_S)) == "E-INVITATION"
        middle.close()
    assert [code_in(reply.error) for reply in replies] == ["E-INVITATION"]
    assert server.certificates == [("gpu-1", False)]


def test_another_server_of_the_job_cannot_issue_false_keys(server: Server) -> None:
    """It fabricates a certificate and a secret."""
    key = new_key()
    ca = x509.load_pem_x509_certificate((server.ca / "ca.pem").read_bytes())
    false = authority.renew(server.ca, key, ca, "home-1", new_key().public_key(), dials_only=True)

    def reply(inner: Any) -> None:
        enrolment_messages.receive_record(inner, EnrolmentRequest, 4096, soon())
        revoked = (server.ca / "crl.pem").read_bytes()
        enrolment_messages.send_record(inner, EnrolmentReply("", authority.pem(false), revoked, "a-false-secret"), soon())

    home = server.line()
    middle = Middle(invitations.certificate_authority(server.ca), authority.add(server.ca, "gpu-1"), reply)
    home = home._replace(address=middle.address)
    assert refusal(lambda: enrolment_client.enrol(home, WAIT_S)) == "E-CERTIFICATE-CA"
    middle.close()
    assert home.stored() is None


def raw(server: Server, source: str = "") -> socket.socket:
    host, port = server.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), WAIT_S, (source, 0))


def ends(sock: socket.socket) -> bytes:
    """Data received until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while piece := sock.recv(4096):
            data += piece
    return data


def test_tls_without_the_magic_still_needs_a_certificate(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    for protocol in ("h2", "commlayer-enrolment"):
        context = enrolling_context(invitations.certificate_authority(server.ca))
        context.set_alpn_protocols([protocol])
        with raw(server) as sock, context.wrap_socket(sock) as tls:
            assert ends(tls) == b""
    until(lambda: sum("it sent no certificate" in line for line in caplog.messages) == 2, "the refusals are logged")


def test_nothing_reaches_grpc_after_the_magic(server: Server) -> None:
    (token,) = invitations.invite(server.ca, ["home-1"]).values()
    with dialled(server.address, token) as (tls, *_):
        tls.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64))
        assert ends(tls) == b"", "no settings of HTTP/2"
    context = enrolling_context(invitations.certificate_authority(server.ca))
    context.set_alpn_protocols(["h2"])
    with raw(server) as sock:
        sock.sendall(MAGIC)
        enrolment_client.receive_authority(sock, token, soon())
        with context.wrap_socket(sock) as tls:
            tls.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert ends(tls) == b""


@pytest.mark.parametrize("data", [
    (4097).to_bytes(4, "little"), (0xFFFFFFFF).to_bytes(4, "little") + bytes(100), enrolment_messages.framed(b"\xc1\xc1"),
    enrolment_messages.framed(msgspec.msgpack.encode({"name": "home-1", "csr": bytes(5000), "proof": bytes(64)})),
    enrolment_messages.framed(msgspec.msgpack.encode({"name": "x" * 3000, "csr": b"", "proof": b"", "more": 1})),
], ids=["too long", "far too long", "not msgpack", "an oversize request", "a field too many"])
def test_malformed_messages_end_the_connection(
    server: Server, data: bytes, caplog: pytest.LogCaptureFixture,
) -> None:
    home = server.line()
    with dialled(home.address, token_of(home)) as (tls, *_):
        tls.sendall(data)
        assert ends(tls) == b""
    until(lambda: any("E-FRAME" in line for line in caplog.messages), "logged")
    enrolment_client.enrol(home, WAIT_S)


@pytest.mark.parametrize("data", [b"C", MAGIC, b"CONNECT example.org:443 HTTP/1.1\r\n\r\n", b"COMMLAYER ENROL 2\n"])
def test_incomplete_enrolments_time_out(server: Server, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "ENROL_S", 0.5)
    with raw(server) as sock:
        sock.sendall(data)
        begin = time.monotonic()
        ends(sock)
        assert time.monotonic() - begin < WAIT_S / 2
    server.joined(enrolment_client.enrol(server.line(), WAIT_S))


def test_silent_enrolments_block_no_site_and_the_oldest_are_evicted(
    server: Server, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From ten addresses, because one address may not open that many."""
    monkeypatch.setattr(enrolment, "ENROL_S", 10 * WAIT_S)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(raw(server, f"127.0.0.{2 + number % 10}")) for number in range(handshake.MAX_PENDING + 8)]
        for number, sock in enumerate(socks):
            sock.sendall(MAGIC[: 1 + number % 3])
        assert ends(socks[0]) == b"", "or the time limit of this socket ends the test"
        home = server.line()
        begin = time.monotonic()
        server.joined(enrolment_client.enrol(home, WAIT_S))
        assert time.monotonic() - begin < WAIT_S


def test_failed_attempts_of_an_address_are_limited_and_members_are_not(server: Server) -> None:
    home, bad = server.line(), other_secret(server)
    folder = enrolment_client.enrol(server.line("home-2"), WAIT_S)
    failures = port_of(server.coordinator).enrolment._failed
    for _ in range(enrolment.MAX_FAILED):
        assert refusal(lambda: enrolment_client.enrol(bad, WAIT_S)) == "E-INVITATION"
    assert refusal(lambda: enrolment_client.enrol(home, WAIT_S), NotYet) == "E-INVITATION"
    server.joined(folder)
    assert not failures.count("127.0.0.1", time.monotonic() + 60)
    assert not failures.count("127.0.0.2", time.monotonic())


def test_lost_connections_are_not_failed_attempts(server: Server) -> None:
    home = server.line()
    for _ in range(enrolment.MAX_FAILED + 1):
        with dialled(home.address, token_of(home)):
            pass
    server.joined(enrolment_client.enrol(home, WAIT_S))


def test_address_table_is_bounded() -> None:
    failures = MinuteCounts(enrolment.MAX_ADDRESSES)
    for number in range(enrolment.MAX_ADDRESSES + 5):
        failures.add(str(number), 0.0)
    assert [failures.count(str(number), 0.0) for number in range(7)] == [0] * 5 + [1] * 2, "the oldest are forgotten"


@pytest.mark.parametrize("kind", ["keys", "plain", "silent"])
def test_server_without_invitations_is_named(server: Server, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = server.line()
    if kind == "silent":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            monkeypatch.setattr(enrolment, "ENROL_S", 0.2)
            home = home._replace(address=f"127.0.0.1:{listener.getsockname()[1]}")
            assert refusal(lambda: enrolment_client.enrol(home, 0.5), DeadlineExceeded) == "E-DEADLINE"
        return
    other = Coordinator(quick(token=SECRET, keys=str(server.keys) if kind == "keys" else ""), workers=1)
    assert refusal(lambda: enrolment_client.enrol(home._replace(address=other.address), WAIT_S)) == "E-INVITATION"
    other.close()


def test_log_lines_about_strangers_have_no_line_breaks_or_secrets(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "commlayer")
    home = server.line()
    attempt(home, b"", name="x\nforged line")
    enrolment_client.enrol(home, WAIT_S)
    until(lambda: any("has fetched its certificate" in line for line in caplog.messages), "logged")
    assert all("\n" not in line and str(token_of(home)) not in line for line in caplog.messages)


def test_read_only_user_folder_consumes_no_invitation(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    home = server.line()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", "/proc/nowhere")
        with pytest.raises(ValueError, match="XDG_CONFIG_HOME.*E-KEYS"):
            enrolment_client.enrol(home, WAIT_S)
    server.joined(enrolment_client.enrol(home, WAIT_S))
