"""The files of a node's keys, and what they prove: who it is, who signed it, who has been revoked. Knows no sockets.

`commlayer keys` makes the folder; docs/security.md says what each file is for.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import os
import ssl
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from commlayer.config import KEYS_TOKEN
from commlayer.errors import InvalidInput, RecordError, without_code

log = logging.getLogger("commlayer")

CA, CERTIFICATE, KEY, REVOKED, TOKEN = "ca.pem", "node.pem", "node.key", "crl.pem", KEYS_TOKEN
SERVICE = "commlayer"
"""A name in the certificates of all nodes that others may dial: which of them one reaches is up to addresses."""
PROTOCOLS = "commlayer-data", "h2"
"""What the two kinds of connection say that they speak; none takes the other for its own."""
ANEW = "copy it anew from the folder where `commlayer keys` made it"
Stamp = tuple[int, int, int]


class Certified(NamedTuple):
    """Whose certificate it is."""

    name: str
    serial: int
    fingerprint: bytes
    dials_only: bool = False
    """Whether it is for diallers alone, so that nobody takes what is served with it."""


class Listed(NamedTuple):
    """A list of the revoked that this CA signed."""

    data: bytes
    number: int
    """It grows with each list that the CA makes."""
    serials: frozenset[int]


class Keys:
    """Of one node. The list of the revoked is read anew whenever its file has changed; all else once, so that contexts and
    fingerprint are of one certificate, whatever is copied into the folder meanwhile."""

    def __init__(self, folder: str | Path) -> None:
        """RecordError, in a line, if the folder does not let this node take part."""
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self.ca, self.certificate, self.key = (self._read(name) for name in (CA, CERTIFICATE, KEY))
        self.dials_only = False
        """Whether its certificate is for diallers alone, so that nobody takes what is served with it."""
        self.me = self._own()
        self._stamp = _stamp(self.folder / REVOKED)
        try:
            self._listed = self._list()
        except (OSError, ValueError) as error:
            raise RecordError(f"keys: {self.folder / REVOKED} is no list of revoked certificates that {CA} signed ({error}): "
                              f"{ANEW}", "E-KEYS") from None
        self._contexts = self._made(self._listed)  # what does not go together is said now, not by the first connection
        if (self.folder / KEY).stat().st_mode & 0o077:
            log.warning("keys: others of this machine may read %s: chmod 600 it", self.folder / KEY)

    def _read(self, name: str) -> bytes:
        path = self.folder / name
        try:
            return path.read_bytes()
        except OSError as error:
            if (self.folder / "nodes").is_dir():
                remedy = f"this is the folder of the CA, a node's is one of {self.folder / 'nodes'}/*"
            else:
                remedy = "`commlayer keys init` and `commlayer keys add NAME` make a folder for each node"
            raise RecordError(f"keys: {path} cannot be read: {error.strerror}; {remedy}", "E-KEYS") from None

    def _own(self) -> Certified:
        # Here and below, since it takes a tenth of a second to load and a job on loopback does without.
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding

        for path, data in ((self.folder / CA, self.ca), (self.folder / CERTIFICATE, self.certificate)):
            try:
                mine = x509.load_pem_x509_certificate(data)
            except ValueError:
                raise RecordError(f"keys: {path} is no certificate: it is damaged, or another file; {ANEW}", "E-KEYS") from None
        name = str(mine.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)
        now = datetime.datetime.now(datetime.UTC)
        if not mine.not_valid_before_utc <= now <= mine.not_valid_after_utc:
            raise RecordError(f"keys: the certificate of {name} in {self.folder} is good from "
                              f"{_day(mine.not_valid_before_utc)} to {_day(mine.not_valid_after_utc)}, and this machine's "
                              f"clock says {_day(now)}: mend the clock, or make a new one with `commlayer keys add {name} "
                              "--again`", "E-CERTIFICATE-DATE")
        made = certified(mine.public_bytes(Encoding.DER), name, mine.serial_number)
        self.dials_only = made.dials_only
        return made

    def revoked(self) -> frozenset[int]:
        """Serial numbers. A file that is damaged, older than the one before, or not of this CA, changes nothing."""
        path = self.folder / REVOKED
        with self._lock:
            stamp = _stamp(path)
            if stamp is not None and stamp != self._stamp:
                try:
                    listed = self._list()
                    if listed.number < self._listed.number:
                        raise InvalidInput("E-KEYS",
                                           f"it is list {listed.number} of the CA, and list {self._listed.number} is known "
                                           "here")
                    self._contexts, self._listed = self._made(listed), listed
                except (OSError, ValueError) as error:
                    log.warning("keys: %s is left unread: %s; what it said before still holds", path, without_code(error))
                self._stamp = stamp
            return self._listed.serials

    @property
    def list_number(self) -> int:
        """Of the list in force: see Listed."""
        with self._lock:
            return self._listed.number

    def context(self, protocol: str, *, server: bool) -> ssl.SSLContext:
        """TLS 1.3, both ends with a certificate of this CA that nobody has revoked."""
        self.revoked()
        with self._lock:
            return self._contexts[server, protocol]

    def _list(self) -> Listed:
        """What the file holds now; OSError or ValueError if it is no list."""
        from cryptography import x509

        data = (self.folder / REVOKED).read_bytes()
        try:
            read = x509.load_pem_x509_crl(data)
            authority: Any = x509.load_pem_x509_certificate(self.ca).public_key()
            if not read.is_signature_valid(authority):
                raise InvalidInput("E-KEYS", "it is not signed by the job's CA")
            number = read.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            return Listed(data, number, frozenset(one.serial_number for one in read))
        except Exception as error:  # whatever the parser makes of such a file: threads that ask for the list must go on
            raise InvalidInput("E-KEYS", str(error) or type(error).__name__) from None

    def _made(self, listed: Listed) -> dict[tuple[bool, str], ssl.SSLContext]:
        return {(server, protocol): self._context(protocol, server, listed)
                for protocol in PROTOCOLS for server in (False, True)}

    def _context(self, protocol: str, server: bool, listed: Listed) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.check_hostname = False  # nodes are known by their names, which no name service has
        made.verify_mode = ssl.CERT_REQUIRED
        made.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        made.set_alpn_protocols([protocol])
        if server:
            made.num_tickets = 0  # no connection takes up a former one
        try:
            with _file(self.ca + b"\n" + listed.data) as trust, _file(self.certificate) as certificate, _file(self.key) as key:
                made.load_verify_locations(trust)
                made.load_cert_chain(certificate, key)
        except (ssl.SSLError, OSError) as error:
            raise RecordError(f"keys: {self.folder} holds files that do not go together, or a damaged {KEY} "
                              f"({error.strerror or error}): copy the folder anew from where `commlayer keys` made "
                              "it", "E-KEYS") from None
        return made


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[str]:
    """A path to these bytes, for OpenSSL, which takes no others: in memory, where the system can."""
    with open(os.memfd_create("keys"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        file.seek(0)
        yield f"/dev/fd/{file.fileno()}"


def certified(der: bytes, name: str, serial: int) -> Certified:
    from cryptography import x509

    dials_only = False
    with contextlib.suppress(x509.ExtensionNotFound):  # one that others made: OpenSSL takes it for both ends
        purposes = x509.load_der_x509_certificate(der).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        dials_only = x509.oid.ExtendedKeyUsageOID.SERVER_AUTH not in purposes
    return Certified(name, serial, hashlib.sha256(der).digest(), dials_only)


def of_peer(tls: ssl.SSLObject) -> Certified:
    """Of the other end, which has been verified."""
    der = tls.getpeercert(binary_form=True)
    told: Any = tls.getpeercert()
    assert der is not None
    subject = {key: value for part in told["subject"] for key, value in part}
    return certified(der, subject.get("commonName", "?"), int(told["serialNumber"], 16))


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _day(when: datetime.datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"
