"""A node's folder of keys: reads its certificate, CA and revocation list, and builds TLS contexts.

`commlayer keys` creates the folder; docs/how-to/keys.md explains each file.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import logging
import os
import ssl
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from commlayer.config import KEYS_TOKEN
from commlayer.errors import InvalidInput, RecordError, without_code

if TYPE_CHECKING:
    from cryptography import x509

log = logging.getLogger("commlayer")

CA, CERTIFICATE, KEY, REVOKED, TOKEN = "ca.pem", "node.pem", "node.key", "crl.pem", KEYS_TOKEN
SERVICE = "commlayer"
"""A name in the certificates of all nodes that accept connections. Addresses, not names, determine which node is reached."""
PROTOCOLS = "commlayer-data", "h2"
"""ALPN names of the two kinds of connection (data, control). With them neither end mistakes one kind for the other."""
ENROLMENT = "commlayer-enrolment"
"""ALPN name of connections on which homes fetch their certificates."""
COPY_AGAIN = "copy it again from the folder where `commlayer keys` created it"
Stamp = tuple[int, int, int]


class PeerCertificate(NamedTuple):
    """A certificate and the node that it identifies. `fingerprint`: SHA-256 of the certificate."""

    name: str
    serial: int
    fingerprint: bytes
    dials_only: bool = False
    """True: the certificate is valid only for dialers, so a server cannot use it."""


class RevocationList(NamedTuple):
    """A revocation list that the job's CA has signed."""

    data: bytes
    number: int
    """Sequence number, which grows with each list of the CA."""
    serials: frozenset[int]


class Keys:
    """The keys of one node.

    The revocation list is read again when its file has changed. Everything else is read only once. The TLS contexts and the
    fingerprint therefore belong to one certificate, even if files in the folder are replaced.
    """

    def __init__(self, folder: str | Path) -> None:
        """Reads the folder. Raises RecordError, in one line, if the folder cannot be used."""
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self.ca, self.certificate, self.key = (self._read(name) for name in (CA, CERTIFICATE, KEY))
        self.der = b""
        """This node's certificate in DER."""
        self.own = self._read_own()
        self._stamp = _stamp(self.folder / REVOKED)
        try:
            self._revocations = self._list()
        except (OSError, ValueError) as error:
            raise RecordError("E-KEYS",
                              f"keys: {self.folder / REVOKED} is not a revocation list that {CA} signed ({error}): "
                              f"{COPY_AGAIN}") from None
        # Created now, so that files that do not match are reported before the first connection.
        self._contexts = self._make_contexts(self._revocations)
        if (self.folder / KEY).stat().st_mode & 0o077:
            log.warning("keys: other users of this machine can read %s: run chmod 600 on it", self.folder / KEY)

    def _read(self, name: str) -> bytes:
        path = self.folder / name
        try:
            return path.read_bytes()
        except OSError as error:
            if (self.folder / "nodes").is_dir():
                remedy = f"this is the folder of the CA; the folder of a node is one of {self.folder / 'nodes'}/*"
            else:
                remedy = "create a folder for each node with `commlayer keys init` and `commlayer keys add NAME`"
            raise RecordError("E-KEYS", f"keys: {path} cannot be read: {error.strerror}; {remedy}") from None

    def _read_own(self) -> PeerCertificate:
        # Imported here and below: the import takes 0.1 s, and a job on loopback does not need it.
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding

        for path, data in ((self.folder / CA, self.ca), (self.folder / CERTIFICATE, self.certificate)):
            try:
                mine = x509.load_pem_x509_certificate(data)
            except ValueError:
                raise RecordError("E-KEYS",
                                  f"keys: {path} is not a certificate: it is damaged, or another file; {COPY_AGAIN}") from None
        own, now = parse_peer_certificate(mine), datetime.datetime.now(datetime.UTC)
        if not mine.not_valid_before_utc <= now <= mine.not_valid_after_utc:
            raise RecordError("E-CERTIFICATE-DATE", f"keys: the certificate of {own.name} in {self.folder} is valid from "
                                                    f"{_day(mine.not_valid_before_utc)} to {_day(mine.not_valid_after_utc)}, "
                                                    f"but this machine's clock shows {_day(now)}: correct the clock, or create "
                                                    f"a new certificate with `commlayer keys add {own.name} --again`")
        self.der = mine.public_bytes(Encoding.DER)
        return own

    def revoked(self) -> frozenset[int]:
        """Returns the serial numbers of revoked certificates. A list that is damaged, older than the current one or of another
        CA is ignored with a warning."""
        path = self.folder / REVOKED
        with self._lock:
            stamp = _stamp(path)
            if stamp is not None and stamp != self._stamp:
                try:
                    listed = self._list()
                    if listed.number < self._revocations.number:
                        raise InvalidInput("E-KEYS",
                                           f"the file has list {listed.number} of the CA, older than list "
                                           f"{self._revocations.number}, which is in use")
                    self._contexts, self._revocations = self._make_contexts(listed), listed
                except (OSError, ValueError) as error:
                    log.warning("keys: %s was not loaded: %s; the previous list stays in use", path, without_code(error))
                self._stamp = stamp
            return self._revocations.serials

    @property
    def list_number(self) -> int:
        """Sequence number of the revocation list in use: see RevocationList."""
        with self._lock:
            return self._revocations.number

    def sign(self, message: bytes) -> bytes:
        """Signs a message with this node's private key. Costs some 50 us."""
        key = self._private_key
        signature: bytes = key.sign(message, *signature_arguments(key.public_key()))
        return signature

    @functools.cached_property
    def _private_key(self) -> Any:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        return load_pem_private_key(self.key, None)

    def context(self, protocol: str, *, server: bool) -> ssl.SSLContext:
        """Returns a TLS 1.3 context that requires a certificate of the job's CA, not revoked, at both ends. `protocol`: one of
        PROTOCOLS."""
        self.revoked()
        with self._lock:
            return self._contexts[server, protocol]

    def enrolment_context(self) -> ssl.SSLContext:
        """Returns a TLS 1.3 context for a server that requests no certificate, for homes that have none yet
        (keys/enrolment.py). Data and control connections use context() instead."""
        context = _tls13(server=True)
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols([ENROLMENT])
        with _file(self.certificate) as certificate, _file(self.key) as key:
            context.load_cert_chain(certificate, key)
        return context

    def _list(self) -> RevocationList:
        """Reads the revocation list from its file. Raises OSError or ValueError if the list is invalid."""
        from cryptography import x509

        data = (self.folder / REVOKED).read_bytes()
        try:
            crl = x509.load_pem_x509_crl(data)
            authority: Any = x509.load_pem_x509_certificate(self.ca).public_key()
            if not crl.is_signature_valid(authority):
                raise InvalidInput("E-KEYS", "the list is not signed by the job's CA")
            number = crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            return RevocationList(data, number, frozenset(one.serial_number for one in crl))
        except Exception as error:  # the parser raises many types of errors, and the calling threads must continue
            raise InvalidInput("E-KEYS", str(error) or type(error).__name__) from None

    def _make_contexts(self, listed: RevocationList) -> dict[tuple[bool, str], ssl.SSLContext]:
        return {(server, protocol): self._context(protocol, server, listed)
                for protocol in PROTOCOLS for server in (False, True)}

    def _context(self, protocol: str, server: bool, listed: RevocationList) -> ssl.SSLContext:
        context = _tls13(server)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        context.set_alpn_protocols([protocol])
        try:
            with _file(self.ca + b"\n" + listed.data) as trust, _file(self.certificate) as certificate, _file(self.key) as key:
                context.load_verify_locations(trust)
                context.load_cert_chain(certificate, key)
        except (ssl.SSLError, OSError) as error:
            raise RecordError("E-KEYS", f"keys: {self.folder} contains files that do not match, or a damaged {KEY} "
                                        f"({error.strerror or error}): copy the folder again from where `commlayer "
                                        "keys` created it") from None
        return context


def enrolling_context(authority: bytes) -> ssl.SSLContext:
    """Returns a TLS 1.3 context for a home without a certificate. The context accepts a server of the CA with this certificate
    (DER)."""
    context = _tls13(server=False)
    context.load_verify_locations(cadata=authority)
    context.set_alpn_protocols([ENROLMENT])
    return context


def _tls13(server: bool) -> ssl.SSLContext:
    """Returns a context that requires a certificate of the other end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # nodes are identified by names that DNS does not have
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # no session resumption
    return context


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[str]:
    """Context manager that gives a file path to these bytes, because OpenSSL loads only files. The file is in memory where the
    system supports that."""
    with open(os.memfd_create("keys"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        file.seek(0)
        yield f"/dev/fd/{file.fileno()}"


def parse_peer_certificate(certificate: x509.Certificate) -> PeerCertificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    dials_only = False
    with contextlib.suppress(x509.ExtensionNotFound):  # a certificate made by other tools: OpenSSL accepts it for both ends
        purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        dials_only = x509.oid.ExtendedKeyUsageOID.SERVER_AUTH not in purposes
    names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return PeerCertificate(str(names[0].value) if names else "?", certificate.serial_number,
                           hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest(), dials_only)


def signature_arguments(public: Any) -> tuple[Any, ...]:
    """Returns what `sign` and `verify` of keys of this kind take after the message. commlayer makes elliptic curve keys; other
    tools also make RSA and Ed25519 keys."""
    from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
    from cryptography.hazmat.primitives.hashes import SHA256

    if isinstance(public, ec.EllipticCurvePublicKey):
        return (ec.ECDSA(SHA256()),)
    return (padding.PKCS1v15(), SHA256()) if isinstance(public, rsa.RSAPublicKey) else ()


def peer_certificate_from_tls(tls: ssl.SSLObject) -> PeerCertificate:
    """Returns the certificate of the other end, which OpenSSL has already verified."""
    from cryptography import x509

    return parse_peer_certificate(x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b""))


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _day(when: datetime.datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"
