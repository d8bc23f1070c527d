"""The home's end of enrolment: fetches a certificate with an invitation."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

from commlayer.callbacks import ignore
from commlayer.cluster.keys import authority, invitations
from commlayer.cluster.keys.enrolment_messages import (
    ENROL_S,
    MAGIC,
    MAX_AUTHORITY_NBYTES,
    MAX_ERROR_CHARACTERS,
    MAX_REPLY_NBYTES,
    MAX_REQUEST_NBYTES,
    NAME,
    EnrolmentChallenge,
    EnrolmentReply,
    EnrolmentRequest,
    receive,
    receive_framed,
    receive_record,
    secured,
    send,
    send_record,
)
from commlayer.cluster.keys.home_keys import LINE, HomeLine, Token
from commlayer.config import Secret, host_port, user_folder
from commlayer.errors import (
    CommError,
    DeadlineExceeded,
    InvalidInput,
    NotYet,
    PeerLost,
    Refused,
    short_line,
)
from commlayer.files import write_whole
from commlayer.records import complete
from commlayer.transport.backoff import Backoff
from commlayer.transport.connection import connect_socket
from commlayer.transport.keys.key_folder import CA, CERTIFICATE, KEY, REVOKED, TOKEN, enrolling_context


def enrol(home: HomeLine, wait_s: float, say: Callable[[str], None] = ignore) -> Path:
    """Fetches this home's certificate and stores the keys. Returns their folder. Raises Refused, or DeadlineExceeded if the
    server does not answer for `wait_s`.

    The private key is stored before the request, so a home that is interrupted can repeat the request with the same key.
    """
    assert home.token is not None
    place, draft = home.folder, home.folder.with_name(f".{home.folder.name}-{home.token.digest[:16]}.key")
    key = _draft_key(draft)
    request = x509.CertificateSigningRequestBuilder().subject_name(authority.common_name(home.name))
    csr = request.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)
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
            send(sock, MAGIC, deadline)
            ca = receive_authority(sock, token, deadline)
            with secured(enrolling_context(ca), sock, deadline, server=False) as tls:
                shown = tls.getpeercert(binary_form=True)
                assert shown is not None
                challenge = receive_record(tls, EnrolmentChallenge, MAX_REQUEST_NBYTES, deadline)
                signed = invitations.statement(home.name, csr, (challenge.nonce, hashlib.sha256(shown).digest()))
                proof = invitations.signing_key(token.secret).sign(signed)
                send_record(tls, EnrolmentRequest(home.name, csr, proof), deadline)
                reply = receive_record(tls, EnrolmentReply, MAX_REPLY_NBYTES, deadline)
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
        return connect_socket(host, deadline)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            raise
        raise Refused(f"its host name {host[0]!r} cannot be resolved ({error.strerror}): correct the address, or use an IP "
                      "address", code="E-ADDRESS") from None


def receive_authority(sock: socket.socket, token: Token, deadline: float) -> bytes:
    """Receives the CA's certificate, and returns it if it is the token's."""
    try:
        start = receive(sock, len(MAGIC), deadline)
    except PeerLost:
        start = b""  # a server that knows no enrolment closes the connection; a busy one resets it
    if start != MAGIC:
        if start.startswith(NAME):
            raise Refused("it has another version of commlayer: install the same version on all machines", code="E-VERSION")
        raise Refused("no invitations are accepted there: check the port, and that a tunnel there is connected; a server "
                      "that was started with --keys or --insecure needs `commlayer join --keys`, or its own way",
                      code="E-INVITATION")
    ca = receive_framed(sock, MAX_AUTHORITY_NBYTES, deadline)
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
        msgspec.convert(reply.secret, complete(Secret))
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
