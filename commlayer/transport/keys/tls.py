"""TLS socket: behaves like a plain socket, with mutual TLS from a node's keys.

OpenSSL works on memory buffers, and the socket sends OpenSSL's output. One thread can therefore read while another one writes.
Two threads must not use one SSL object, and a lock around a blocking read would block the writer. Nonblocking sends and socket
options still work.
"""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from commlayer.errors import CommError, Damaged, DeadlineExceeded, HandshakeLost, NotYet, PeerLost, Refused, SentNothing
from commlayer.transport.keys.key_folder import (
    PROTOCOLS,
    Keys,
    PeerCertificate,
    parse_peer_certificate,
    peer_certificate_from_tls,
    signature_arguments,
)
from commlayer.transport.protocol import NO_SIGNAL, limit_wait

DATA, CONTROL = PROTOCOLS
CHUNK_NBYTES = 128 << 10
"""Bytes that are encrypted at once and sent before the next ones, so they stay in the cache."""
LEAST_RAW_NBYTES, RAW_NBYTES = 8 << 10, 256 << 10
"""Initial and largest size of the receive buffer. It grows when a full buffer arrives after the handshake, so unauthenticated
peers use little memory."""
LINGER_S = 0.5
"""Seconds for which data of a refused dialer is still read. Closing a connection with unread bytes would lose the reason."""
_LATE, _EARLY, _REVOKED, _PURPOSE, _LIST = 10, 9, 23, 26, 3
_VERIFIED = {
    _LATE: ("E-CERTIFICATE-DATE", "its certificate has expired according to this machine's clock ({now}): create a new one "
                                  "with `commlayer keys add NAME --again`, or correct the clock"),
    _EARLY: ("E-CERTIFICATE-DATE",
             "its certificate is not valid yet according to this machine's clock ({now}): correct the clock, here or on the "
             "machine of the CA"),
    _REVOKED: ("E-CERTIFICATE-REVOKED", "its certificate was revoked"),
    _PURPOSE: ("E-CERTIFICATE-USE", "its certificate is not valid for servers (made with --dials-only)"),
    _LIST: ("E-CERTIFICATE-CA", "its certificate was issued by a different CA than this job's"),
}
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it sent no certificate: set keys (COMMLAYER_KEYS) on its machine",
    "HTTP_REQUEST": "it uses plaintext, but this end uses TLS: set keys (COMMLAYER_KEYS) on its machine, too",
    "WRONG_VERSION_NUMBER": "it uses plaintext, but this end uses TLS: set keys (COMMLAYER_KEYS) on its machine, too",
    "UNSUPPORTED_PROTOCOL": "it uses a TLS version before 1.3",
}
_FOR = {DATA: "data", CONTROL: "control calls"}
_NO_TLS = frozenset(_REASONS) - {"PEER_DID_NOT_RETURN_A_CERTIFICATE"}
_ALERTS = {
    "CERTIFICATE_REQUIRED": ("E-TLS", "it requires a certificate: set keys (COMMLAYER_KEYS) on this machine"),
    "CERTIFICATE_EXPIRED": ("E-CERTIFICATE-DATE", "{me} has expired according to its clock: create a new one with `commlayer "
                                                  "keys add NAME --again`, or correct the clock"),
    "CERTIFICATE_REVOKED": ("E-CERTIFICATE-REVOKED", "{me} was revoked: to take part again, ask the owner of the job's CA for "
                                                     "a new line (`commlayer keys invite`) or folder (`commlayer keys add`)"),
    "UNKNOWN_CA": ("E-CERTIFICATE-CA", "{me} was issued by a different CA than the job's: copy the folder of keys from the "
                                       "job's CA"),
    "BAD_CERTIFICATE": ("E-CERTIFICATE-DATE", "{me} is not valid according to its clock: correct the clock, there or here"),
    "UNSUPPORTED_CERTIFICATE": ("E-CERTIFICATE-USE", "{me} is not valid for servers (made with --dials-only)"),
}


def bad_certificate(error: ssl.SSLCertVerificationError) -> Refused:
    """Returns the error for the other end's certificate, which OpenSSL did not accept."""
    return _refused(error.verify_code, "" if error.verify_code in _VERIFIED else f" ({error.verify_message})")


def _refused(verify_code: int, more: str = "") -> Refused:
    code, text = _VERIFIED.get(verify_code, _VERIFIED[_LIST])
    return Refused(text.format(now=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC") + more, code=code)


class SigningCertificate(NamedTuple):
    """A server's certificate and its public key, which verifies what the server signs."""

    certificate: PeerCertificate
    public: Any

    def has_signed(self, signature: bytes, message: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            self.public.verify(signature, message, *signature_arguments(self.public))
        except InvalidSignature:
            return False
        return True

    def check_revoked(self, keys: Keys) -> None:
        if self.certificate.serial in keys.revoked():
            raise Refused(f"its certificate ({self.certificate.name}) was revoked", code="E-CERTIFICATE-REVOKED")


def signing_certificate(der: bytes, keys: Keys) -> SigningCertificate:
    """Reads a server's certificate, in DER. Raises Refused if the certificate is not of the job's CA, not valid now, not valid
    for servers, or revoked. `der`: b"" if the server has sent none."""
    if not der:
        raise Refused("its reply is not signed, so it runs another version of commlayer: install the same version on all "
                      "machines", code="E-VERSION")
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        theirs = x509.load_der_x509_certificate(der)
        issuers = [ca for ca in x509.load_pem_x509_certificates(keys.ca) if ca.subject == theirs.issuer]
        theirs.verify_directly_issued_by(issuers[0])
        result = SigningCertificate(parse_peer_certificate(theirs), theirs.public_key())
    except (ValueError, TypeError, IndexError, InvalidSignature):
        raise _refused(_LIST) from None
    now = datetime.datetime.now(datetime.UTC)
    failure = _LATE if now > theirs.not_valid_after_utc else _EARLY if now < theirs.not_valid_before_utc else \
        _PURPOSE if result.certificate.dials_only else 0
    if failure:
        raise _refused(failure)
    result.check_revoked(keys)
    return result


class TlsSocket(socket.socket):
    """A TLS connection over a connected socket, which it replaces. One thread at a time may read and one may write. If sendmsg
    returns less than all bytes, the caller must pass the rest again."""

    def __init__(self, sock: socket.socket, keys: Keys, protocol: str, *, server: bool) -> None:
        family, kind, proto = sock.family, sock.type, sock.proto
        super().__init__(family, kind, proto, fileno=sock.detach())
        self.settimeout(None)
        self.peer: PeerCertificate | None = None
        self._keys, self._protocol, self._server = keys, protocol, server
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = keys.context(protocol, server=server).wrap_bio(self._in, self._out, server_side=server)
        self._lock = threading.Lock()
        self._raw = memoryview(bytearray(LEAST_RAW_NBYTES))
        self._cipher = memoryview(b"")  # encrypted bytes that are not sent yet
        self._plain = 0  # number of plain bytes in them
        self._failed: CommError | None = None
        self._answered = False
        """True: this end has sent a message of the handshake."""
        self._received = not server
        """True: at least one byte has arrived from the dialer. Always True at the dialer's end."""

    def handshake(self, deadline: float) -> PeerCertificate:
        """Runs the handshake and returns the other end's certificate. Raises Refused, DeadlineExceeded, PeerLost or Damaged,
        without the peer's name."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._flush(deadline)
                    self._receive(deadline)
            self._flush(deadline)
        except ssl.SSLError as error:
            reason = self._reason(error)
            self._send_alert(deadline)
            raise reason from None
        except TimeoutError:
            raise DeadlineExceeded("the TLS handshake did not finish before the deadline") from None
        except OSError as error:
            if not self._received:
                raise SentNothing() from None
            raise self._lost(f"connection lost during the TLS handshake ({error.strerror or error})") from None
        self.peer = peer_certificate_from_tls(self._tls)
        if self._tls.selected_alpn_protocol() != self._protocol:
            self._send_alert(deadline)
            what = _FOR.get(self._protocol, self._protocol)
            raise Refused(f"{self.peer.name} accepts TLS on this port, but not for {what}: check the port "
                          "(`commlayer serve` prints both; the data port is the coordinator's port plus 1)", code="E-ADDRESS")
        if self.peer.serial in self._keys.revoked():
            self._send_alert(deadline)
            raise _refused(_REVOKED)
        return self.peer

    @property
    def channel(self) -> bytes:
        """Bytes that identify this connection: fingerprints of both ends' certificates, the dialer's first."""
        assert self.peer is not None
        ends = (self.peer.fingerprint, self._keys.own.fingerprint)
        return b"".join(ends if self._server else reversed(ends))

    def _flush(self, deadline: float) -> None:
        if data := self._out.read():
            limit_wait(self, deadline)
            super().sendall(data)  # the timeout covers the whole call
            self._answered = True

    def _receive(self, deadline: float) -> None:
        limit_wait(self, deadline)
        self._pull()

    def _pull(self) -> None:
        n = super().recv_into(self._raw)
        with self._lock:
            if n:
                self._received = True
                self._in.write(self._raw[:n])
            else:
                self._in.write_eof()
        if n == len(self._raw) < RAW_NBYTES and self.peer is not None:
            self._raw = memoryview(bytearray(2 * n))

    def _send_alert(self, deadline: float) -> None:
        """Sends the TLS alert, then reads and drops what the other end still sends. Unread bytes could make the other end lose
        the alert."""
        try:
            self._flush(deadline)
            self.shutdown(socket.SHUT_WR)
            end = min(deadline, time.monotonic() + LINGER_S)
            while time.monotonic() < end:
                limit_wait(self, end)
                if not super().recv_into(self._raw):
                    break
        except OSError:
            pass  # the peer is gone

    def _reason(self, error: ssl.SSLError) -> CommError:
        if isinstance(error, ssl.SSLEOFError):
            if not self._received:
                return SentNothing()
            return self._lost("connection closed during the TLS handshake")
        if isinstance(error, ssl.SSLCertVerificationError):
            return bad_certificate(error)
        if line := _REASONS.get(error.reason or ""):
            # A byte corrupted in transit gives the same error, so a dialer that has been connected there tries again.
            return (NotYet if error.reason in _NO_TLS else Refused)(line, code="E-TLS")
        return self._alert_reason(error) or Damaged("received bytes that violate TLS in its handshake "
                                                    f"({error.reason or error})")

    def _lost(self, what: str) -> PeerLost:
        """A dialer whose first message this end has answered uses TLS, so it has keys."""
        if self._server and self._answered:
            return HandshakeLost(f"{what}: the dialer's network failed, or the dialer stopped waiting")
        return PeerLost(f"{what}: check that keys (COMMLAYER_KEYS) are set on both machines, and that a tunnel between them is "
                        "connected")

    def _alert_reason(self, error: ssl.SSLError) -> CommError | None:
        """Returns the reason in the other end's TLS alert. Returns None if there is no known alert."""
        alert_parts = (error.reason or "").partition("_ALERT_")
        mine = f"the certificate of {self._keys.own.name} in {self._keys.folder}"
        if alert_parts[2] not in _ALERTS:
            return None
        code, text = _ALERTS[alert_parts[2]]
        return Refused(text.format(me=mine), code=code)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Reads like a socket; `flags` are ignored. Returns 0 at the end of the stream."""
        room = memoryview(buffer)
        if nbytes:
            room = room[:nbytes]
        limit_s = self.gettimeout()
        deadline = None if not limit_s else time.monotonic() + limit_s
        while True:
            if self._failed is not None:
                raise self._failed
            got = 0
            with self._lock:
                try:
                    while got < len(room):
                        n: Any = self._tls.read(len(room) - got, room[got:])
                        if n == 0:
                            return got
                        got += n
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return got
                except ssl.SSLError as error:
                    self._failed = self._alert_reason(error) or Damaged("received bytes that violate TLS "
                                                                        f"({error.reason or error})")
            if got:
                return got
            if self._failed is None:
                if deadline is None:
                    self._pull()
                    continue
                try:
                    limit_wait(self, deadline)  # one deadline for all pieces of a record
                    self._pull()
                finally:
                    self.settimeout(limit_s)

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None) -> int:
        """Encrypts and sends bytes like a socket. Returns how many plain bytes were sent; 0 until a complete encrypted chunk is
        sent, after which the caller passes the same bytes again."""
        if not self._cipher:
            with self._lock:
                self._plain = self._encrypt(buffers)
                self._cipher = memoryview(self._out.read())
        sent = super().send(self._cipher, flags)
        self._cipher = self._cipher[sent:]
        if self._cipher:
            return 0
        return self._plain

    def _encrypt(self, buffers: Sequence[memoryview]) -> int:
        taken = 0
        for one in buffers:
            piece = memoryview(one)[: CHUNK_NBYTES - taken]
            if piece:
                taken += self._tls.write(piece)
        return taken

    def sendall(self, data: Any, flags: int = 0) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.sendmsg([rest], [], flags | NO_SIGNAL) :]
