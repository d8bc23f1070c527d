"""The files of a node's keys, and what they prove: who it is, who signed it, who has been revoked. Knows no sockets.

`commlayer keys` makes the folder; docs/security.md says what each file is for.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import ssl
import threading
from pathlib import Path
from typing import Any, NamedTuple

from commlayer.config import KEYS_TOKEN
from commlayer.errors import RecordError

log = logging.getLogger("commlayer")

CA, CERTIFICATE, KEY, REVOKED, TOKEN = "ca.pem", "node.pem", "node.key", "crl.pem", KEYS_TOKEN
SERVICE = "commlayer"
"""A name in the certificates of all nodes that others may dial: which of them one reaches is up to addresses."""
Stamp = tuple[int, int, int]


class Certified(NamedTuple):
    """Whose certificate it is."""

    name: str
    serial: int
    fingerprint: bytes


class Keys:
    """Of one node. The list of the revoked is read anew whenever its file has changed; all else once."""

    def __init__(self, folder: str | Path) -> None:
        """RecordError, in a line, if the folder does not let this node take part."""
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._contexts: dict[tuple[bool, str], tuple[Stamp | None, ssl.SSLContext]] = {}
        self._stamp: Stamp | None = None
        self._revoked: frozenset[int] = frozenset()
        self.ca, self.certificate, self.key = (self._read(name) for name in (CA, CERTIFICATE, KEY))
        self.me = self._own()
        self.revoked()
        self.context(SERVICE, server=False)  # what does not go together is said now, not by the first connection
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
            raise RecordError(f"keys: {path} cannot be read: {error.strerror}; {remedy}") from None

    def _own(self) -> Certified:
        # Here and below, since it takes a tenth of a second to load and a job on loopback does without.
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding

        try:
            mine = x509.load_pem_x509_certificate(self.certificate)
        except ValueError as error:
            raise RecordError(f"keys: {self.folder / CERTIFICATE} is no certificate: {error}") from None
        name = str(mine.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)
        now = datetime.datetime.now(datetime.UTC)
        if not mine.not_valid_before_utc <= now <= mine.not_valid_after_utc:
            raise RecordError(f"keys: the certificate of {name} in {self.folder} is good from "
                              f"{_day(mine.not_valid_before_utc)} to {_day(mine.not_valid_after_utc)}, and this machine's "
                              f"clock says {_day(now)}: mend the clock, or make a new one with `commlayer keys add {name} "
                              "--again`")
        return certified(mine.public_bytes(Encoding.DER), name, mine.serial_number)

    def revoked(self) -> frozenset[int]:
        """Serial numbers. A file that is damaged, or not of this CA, changes nothing."""
        from cryptography import x509

        path = self.folder / REVOKED
        with self._lock:
            stamp = _stamp(path)
            if self._stamp is not None and stamp in (None, self._stamp):
                return self._revoked
            try:
                listed = x509.load_pem_x509_crl(path.read_bytes())
                authority = x509.load_pem_x509_certificate(self.ca).public_key()
                if not listed.is_signature_valid(authority):  # type: ignore[arg-type]
                    raise ValueError("it is not signed by the job's CA")
            except (OSError, ValueError, TypeError) as error:
                if self._stamp is None:
                    raise RecordError(f"keys: {path} is no list of revoked certificates that {CA} signed ({error}): copy it "
                                      "anew from the folder where `commlayer keys` made it") from None
                log.warning("keys: %s is left unread: %s; what it said before still holds", path, error)
                self._stamp = stamp
                return self._revoked
            self._stamp = stamp
            self._revoked = frozenset(one.serial_number for one in listed)
            return self._revoked

    def context(self, protocol: str, *, server: bool) -> ssl.SSLContext:
        """TLS 1.3, both ends with a certificate of this CA that nobody has revoked."""
        self.revoked()
        with self._lock:
            stamp, made = self._contexts.get((server, protocol), (None, None))
            if made is None or stamp != self._stamp:
                try:
                    made = self._context(protocol, server)
                except RecordError:
                    if made is None:
                        raise
                    # The former one stands in: who has been revoked is looked up behind each handshake, too.
                self._contexts[server, protocol] = self._stamp, made
            return made

    def _context(self, protocol: str, server: bool) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.check_hostname = False  # nodes are known by their names, which no name service has
        made.verify_mode = ssl.CERT_REQUIRED
        made.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        made.set_alpn_protocols([protocol])
        if server:
            made.num_tickets = 0  # no connection takes up a former one
        try:
            made.load_verify_locations(self.folder / CA)
            made.load_verify_locations(self.folder / REVOKED)
            made.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY)
        except (ssl.SSLError, OSError) as error:
            raise RecordError(f"keys: {self.folder} holds files that do not go together: {error.strerror or error}") from None
        return made


def certified(der: bytes, name: str, serial: int) -> Certified:
    return Certified(name, serial, hashlib.sha256(der).digest())


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
