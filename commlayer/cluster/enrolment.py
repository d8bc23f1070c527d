"""Enrolment: a home that has an invitation fetches a certificate of its own, over the coordinator's port.

The home sends MAGIC in plain text, and the server answers with MAGIC and the CA's certificate. The home continues only if the
certificate has the fingerprint in its token. Then the home verifies the server in a TLS 1.3 handshake without a certificate of
its own. Inside TLS the server sends a nonce; the home sends a certificate request, signed with the invitation's key over that
nonce and the fingerprint of the server's certificate; and the server sends the certificate. The connection ends there.

The first byte decides: a TLS record begins with 0x16, MAGIC does not. So a connection that requests no certificate is never one
that reaches gRPC, and mutual TLS is as strict as without invitations.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

from commlayer.cluster import authority, invitations
from commlayer.cluster.home_keys import LINE, HomeLine, Token
from commlayer.config import Secret, host_port, user_folder
from commlayer.errors import (
    Coded,
    CommError,
    DeadlineExceeded,
    InvalidInput,
    NotYet,
    PeerLost,
    Refused,
    coded,
    one_line,
    short_line,
)
from commlayer.files import write_whole
from commlayer.records import MALFORMED, Record
from commlayer.transport.connection import track
from commlayer.transport.fair_share import source_of
from commlayer.transport.key_folder import CA, CERTIFICATE, ENROLMENT, KEY, REVOKED, TOKEN, Keys, enrolling_context
from commlayer.transport.reconnect import Backoff
from commlayer.transport.secret import new_nonce
from commlayer.transport.tls import bad_certificate

log = logging.getLogger("commlayer")

NAME = b"COMMLAYER ENROL "
MAGIC = NAME + b"1\n"
MAX_REQUEST_NBYTES, MAX_AUTHORITY_NBYTES, MAX_REPLY_NBYTES = 4096, 8192, 1 << 20
"""Largest messages: of an unauthenticated home; the CA's certificate; and the reply, which contains the revocation list."""
MAX_ERROR_CHARACTERS = 400
ENROL_S = 10.0
"""Seconds that one enrolment may take."""
MAX_FAILED, MAX_ADDRESSES = 10, 1024
"""Failed attempts that one address may make per minute, and the number of addresses that are counted. Secrets of 128 bits
cannot be guessed; the limit saves work and log lines."""
T = TypeVar("T", bound=Record)


class EnrolmentChallenge(Record, frozen=True):
    nonce: bytes


class EnrolmentRequest(Record, frozen=True):
    name: str
    csr: bytes
    """Certificate request as DER."""
    proof: bytes
    """Signature with the invitation's key: see invitations.statement()."""


class EnrolmentReply(Record, frozen=True):
    """Contains an error with its code, or all else."""

    error: str = ""
    certificate: bytes = b""
    revoked: bytes = b""
    secret: str = ""


# ---- the server's end


class EnrolmentServer:
    """Serves homes that have an invitation of the CA in `folder`. `keys`: this server's own keys, of the same CA. `secret`: the
    job's secret."""

    def __init__(self, folder: Path, keys: Keys, secret: str) -> None:
        self._folder, self._context, self._fingerprint = folder, keys.enrolment_context(), keys.own.fingerprint
        self._secret = secret
        self._authority = invitations.certificate_authority(folder)
        self._failed = Failures()

    @staticmethod
    def is_meant(sock: socket.socket, deadline: float) -> bool:
        """Returns whether the other end wants to enrol: whether its first byte is that of MAGIC. Reads nothing."""
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            return sock.recv(1, socket.MSG_PEEK) == MAGIC[:1]
        except OSError:
            return False  # the TLS handshake reports the reason

    def serve(self, sock: socket.socket, where: str) -> str:
        """Runs one enrolment on a connection. Returns the reason of a refusal; "" if the home has its certificate."""
        host, deadline = source_of(where.rpartition(":")[0]), time.monotonic() + ENROL_S
        try:
            if _receive(sock, len(MAGIC), deadline) != MAGIC:
                return "it began with an unknown request"
            busy = self._failed.exceeded(host, time.monotonic())
            _send(sock, MAGIC + _framed(b"" if busy else self._authority), deadline)
            if busy:
                return f"more than {MAX_FAILED} failed enrolments of this address within a minute"
            reason = self._serve(sock, where, deadline)
        except Refused as error:
            reason = str(error)
        except (CommError, OSError) as error:  # a home on a bad line tries again: lost connections are not failed attempts
            return str(error) or "it sent no request in time"
        if reason:
            self._failed.add(host, time.monotonic())
        return reason

    def _serve(self, sock: socket.socket, where: str, deadline: float) -> str:
        with _secured(self._context, sock, deadline, server=True) as tls:
            nonce = new_nonce()
            _send_record(tls, EnrolmentChallenge(nonce), deadline)
            request = _receive_record(tls, EnrolmentRequest, MAX_REQUEST_NBYTES, deadline)
            name = one_line(request.name[:80])
            try:
                granted = invitations.redeem(self._folder, request.name, request.csr, request.proof, (nonce, self._fingerprint))
            except (Coded, OSError) as error:
                known = isinstance(error, Refused)
                reason = str(error) if known else coded("E-KEYS", "the server cannot issue certificates now: see its log")
                _send_record(tls, EnrolmentReply(reason), deadline)
                return f"enrolment of {name}: {error}"
            _send_record(tls, EnrolmentReply("", granted.certificate, granted.revoked, self._secret), deadline)
        log.info("%s at %s has fetched its certificate", name, where)
        return ""


class Failures:
    """Counts failed attempts of each address in the current minute. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, tuple[int, int]] = {}

    def exceeded(self, host: str, now: float) -> bool:
        with self._lock:
            minute, count = self._counts.get(host, (0, 0))
            return minute == int(now // 60) and count >= MAX_FAILED

    def add(self, host: str, now: float) -> None:
        with self._lock:
            minute, count = self._counts.pop(host, (0, 0))
            self._counts[host] = int(now // 60), count + 1 if minute == int(now // 60) else 1
            while len(self._counts) > MAX_ADDRESSES:
                del self._counts[next(iter(self._counts))]


# ---- the home's end


def enrol(home: HomeLine, wait_s: float, say: Callable[[str], None] = lambda _: None) -> Path:
    """Fetches this home's certificate and stores the keys. Returns their folder. Raises Refused, or DeadlineExceeded if the
    server does not answer for `wait_s`.

    The private key is stored before the request, so a home that is interrupted can repeat the request with the same key.
    """
    assert home.token is not None
    place, draft = home.folder, home.folder.with_name(f".{home.folder.name}-{home.token.digest[:16]}.key")
    key = _draft_key(draft)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, home.name)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256()).public_bytes(Encoding.DER)
    deadline = time.monotonic() + wait_s
    backoff, waiting = Backoff(deadline), False
    while True:
        try:
            ca, reply = _fetch(home, home.token, csr, min(deadline, time.monotonic() + ENROL_S))
            break
        except (PeerLost, DeadlineExceeded) as error:
            if not waiting:
                say(f"waiting up to {wait_s:g} s for the server at {home.address} to answer: {error.what}")
            waiting = True
            if not backoff.wait():
                raise DeadlineExceeded(f"did not answer within {wait_s:g} s ({error.what}): check that `commlayer serve` is "
                                       "running at this address, and that firewalls allow connections to it",
                                       peer=f"server {home.address}") from None
        except CommError as error:
            raise error.located(peer=f"server {home.address}") from None
    _check(home, key, ca, reply)
    contents = {KEY: authority.private(key), CERTIFICATE: reply.certificate, CA: ssl.DER_cert_to_PEM_cert(ca).encode(),
                REVOKED: reply.revoked, TOKEN: reply.secret.encode() + b"\n",
                LINE: f"{HomeLine(home.name, home.address)} {home.token.digest}\n".encode()}
    authority.make_folder(place, contents, ())
    with contextlib.suppress(OSError):
        draft.unlink()
    return place


def _fetch(home: HomeLine, token: Token, csr: bytes, deadline: float) -> tuple[bytes, EnrolmentReply]:
    """Runs one enrolment. Returns the CA's certificate as DER, and the reply."""
    try:
        with contextlib.closing(_connect(home.address, deadline)) as sock:
            _send(sock, MAGIC, deadline)
            ca = _authority(sock, token, deadline)
            with _secured(enrolling_context(ca), sock, deadline, server=False) as tls:
                shown = tls.getpeercert(binary_form=True)
                assert shown is not None
                challenge = _receive_record(tls, EnrolmentChallenge, MAX_REQUEST_NBYTES, deadline)
                signed = invitations.statement(home.name, csr, (challenge.nonce, hashlib.sha256(shown).digest()))
                proof = invitations.signing_key(token.secret).sign(signed)
                _send_record(tls, EnrolmentRequest(home.name, csr, proof), deadline)
                reply = _receive_record(tls, EnrolmentReply, MAX_REPLY_NBYTES, deadline)
    except TimeoutError:
        raise DeadlineExceeded("no answer in time") from None
    except ssl.SSLError as error:
        raise PeerLost(f"connection lost: {error.reason or error}") from None
    except OSError as error:
        raise PeerLost(f"not reachable: {error.strerror or error}") from None
    if reply.error:
        raise Refused(short_line(reply.error, MAX_ERROR_CHARACTERS))
    return ca, reply


def _connect(address: str, deadline: float) -> socket.socket:
    host = host_port(address)
    try:
        return track(socket.create_connection(host, max(0.001, deadline - time.monotonic())))
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            raise
        raise Refused(f"its host name {host[0]!r} cannot be resolved ({error.strerror}): correct the address, or use an IP "
                      "address", code="E-ADDRESS") from None


def _authority(sock: socket.socket, token: Token, deadline: float) -> bytes:
    """Receives the CA's certificate, and returns it if it is the token's."""
    try:
        start = _receive(sock, len(MAGIC), deadline)
    except PeerLost:
        start = b""  # a server that knows no enrolment closes the connection; a busy one resets it
    if start != MAGIC:
        if start.startswith(NAME):
            raise Refused("it has another version of commlayer: install the same version on all machines", code="E-VERSION")
        raise Refused("no invitations are accepted there: check the port; a server that was started with --keys or --insecure "
                      "needs `commlayer join --keys`, or its own way", code="E-INVITATION")
    ca = _receive_framed(sock, MAX_AUTHORITY_NBYTES, deadline)
    if not ca:
        raise NotYet("too many attempts from this address failed: wait a minute, and check the line", code="E-INVITATION")
    if hashlib.sha256(ca).digest() != token.fingerprint:
        raise Refused("its CA is not the one in this home's line, so it is another job's server, or an attacker intercepts "
                      "the connection; nothing was sent to it: check the address, and copy the complete line again",
                      code="E-CERTIFICATE-CA")
    return ca


def _check(home: HomeLine, key: ec.EllipticCurvePrivateKey, authority_der: bytes, reply: EnrolmentReply) -> None:
    """Raises Refused unless the certificate and the revocation list are of the CA, and the certificate is for this key and
    name. Only the CA's owner can make such a certificate, so the reply did not come from another server of the job."""
    try:
        ca = x509.load_der_x509_certificate(authority_der)
        certificate = x509.load_pem_x509_certificate(reply.certificate)
        certificate.verify_directly_issued_by(ca)
        names = [one.value for one in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        public = ca.public_key()
        good = (certificate.public_key() == key.public_key() and names == [home.name]
                and isinstance(public, ec.EllipticCurvePublicKey)
                and x509.load_pem_x509_crl(reply.revoked).is_signature_valid(public))
        msgspec.convert(reply.secret, Secret)
    except (ValueError, TypeError, InvalidSignature, msgspec.ValidationError):
        good = False
    if not good or not reply.secret:
        raise Refused("it sent a certificate, a revocation list or a secret that is not of this job's CA",
                      peer=f"server {home.address}", code="E-CERTIFICATE-CA")


def _draft_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Returns the private key of an earlier attempt with this token, or makes and stores a new one."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key
    except (OSError, ValueError):
        pass
    key = ec.generate_private_key(ec.SECP256R1())
    try:
        user_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole({path: authority.private(key)}, durable=True, mode=0o600)
    except OSError as error:
        raise InvalidInput("E-KEYS", f"keys cannot be stored in {path.parent}: {error.strerror}; set XDG_CONFIG_HOME to a "
                                     "writable folder") from None
    return key


# ---- messages: four bytes of length, then the bytes; records are msgpack


@contextlib.contextmanager
def _secured(context: ssl.SSLContext, sock: socket.socket, deadline: float, *, server: bool) -> Iterator[ssl.SSLSocket]:
    """Context manager that gives the TLS connection over a connected socket, after its handshake."""
    sock.settimeout(_left_s(deadline))
    try:
        tls = context.wrap_socket(sock, server_side=server)
    except ssl.SSLCertVerificationError as error:
        raise bad_certificate(error) from None
    try:
        if tls.selected_alpn_protocol() != ENROLMENT:
            raise Refused("the other end's TLS connection is not for enrolment", code="E-ADDRESS")
        yield tls
    finally:
        tls.close()


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def _left_s(deadline: float) -> float:
    if (left_s := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left_s


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(_left_s(deadline))
    sock.sendall(data)


def _receive(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        sock.settimeout(_left_s(deadline))
        piece = sock.recv(nbytes - len(data))
        if not piece:
            raise PeerLost("the connection was closed")
        data += piece
    return data


def _receive_framed(sock: socket.socket, most: int, deadline: float) -> bytes:
    nbytes = int.from_bytes(_receive(sock, 4, deadline), "little")
    if nbytes > most:
        raise Refused(f"got a message of {nbytes} bytes, allowed: {most}", code="E-FRAME")
    return _receive(sock, nbytes, deadline)


def _send_record(sock: socket.socket, record: Record, deadline: float) -> None:
    _send(sock, _framed(msgspec.msgpack.encode(record)), deadline)


def _receive_record(sock: socket.socket, kind: type[T], most: int, deadline: float) -> T:
    try:
        return msgspec.msgpack.decode(_receive_framed(sock, most, deadline), type=kind)
    except MALFORMED as error:
        raise Refused(f"got a malformed {kind.__name__.lower()}: {short_line(error, 200)}", code="E-FRAME") from None
