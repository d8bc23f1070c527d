"""Enrolment: a home that has an invitation fetches a certificate of its own, over the coordinator's port.

The home sends MAGIC in plain text, and the server answers with MAGIC and the CA's certificate. The home continues only if the
certificate has the fingerprint in its token. Afterwards the home verifies the server in a TLS 1.3 handshake in which the home
has no certificate yet. Inside TLS the server sends a nonce; the home sends a certificate request, signed with the invitation's
key over that nonce and the fingerprint of the server's certificate; and the server sends the certificate. The connection ends
there.

The first byte decides: a TLS record begins with 0x16, MAGIC does not. A connection that requests no client certificate
therefore never reaches gRPC, and mutual TLS is as strict as without invitations.
"""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

from commlayer.cluster.keys import invitations
from commlayer.cluster.keys.enrolment_messages import (
    ENROL_S,
    MAGIC,
    MAX_REQUEST_NBYTES,
    EnrolmentChallenge,
    EnrolmentReply,
    EnrolmentRequest,
    framed,
    receive,
    receive_record,
    secured,
    send,
    send_record,
)
from commlayer.errors import (
    Coded,
    CommError,
    Refused,
    append_code,
    one_line,
)
from commlayer.transport.flow.fair_share import MinuteCounts, address_source
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.keys.secret import new_nonce
from commlayer.transport.protocol import limit_wait

log = logging.getLogger("commlayer")
MAX_FAILED, MAX_ADDRESSES = 10, 1024
"""Failed attempts that one address may make per minute, and the number of addresses that are counted. Secrets of 128 bits
cannot be guessed; the limit saves work and log lines."""


class EnrolmentServer:
    """Serves homes that have an invitation of the CA in `folder`. `keys`: this server's own keys, of the same CA. `secret`: the
    job's secret."""

    def __init__(self, folder: Path, keys: Keys, secret: str) -> None:
        self._folder, self._context, self._fingerprint = folder, keys.enrolment_context(), keys.own.fingerprint
        self._secret = secret
        self._authority = invitations.certificate_authority(folder)
        self._failed = MinuteCounts(MAX_ADDRESSES)

    @staticmethod
    def is_meant(sock: socket.socket, deadline: float) -> bool:
        """Returns whether the other end wants to enrol: whether its first byte is that of MAGIC. Reads nothing."""
        try:
            limit_wait(sock, deadline)
            return sock.recv(1, socket.MSG_PEEK) == MAGIC[:1]
        except OSError:
            return False  # the TLS handshake reports the reason

    def serve(self, sock: socket.socket, where: str) -> str:
        """Runs one enrolment on a connection. Returns the reason of a refusal; "" if the home has its certificate."""
        host, deadline = address_source(where.rpartition(":")[0]), time.monotonic() + ENROL_S
        try:
            if receive(sock, len(MAGIC), deadline) != MAGIC:
                return "it began with an unknown request"
            busy = self._failed.count(host, time.monotonic()) >= MAX_FAILED
            send(sock, MAGIC + framed(b"" if busy else self._authority), deadline)
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
        with secured(self._context, sock, deadline, server=True) as tls:
            nonce = new_nonce()
            send_record(tls, EnrolmentChallenge(nonce), deadline)
            request = receive_record(tls, EnrolmentRequest, MAX_REQUEST_NBYTES, deadline)
            name = one_line(request.name[:80])
            try:
                certificate, revoked = invitations.redeem(self._folder, request.name, request.csr, request.proof,
                                                          (nonce, self._fingerprint))
            except (Coded, OSError) as error:
                known = isinstance(error, Refused)
                reason = str(error) if known else append_code("E-KEYS", "the server cannot issue certificates now: see its log")
                send_record(tls, EnrolmentReply(reason), deadline)
                return f"enrolment of {name}: {error}"
            send_record(tls, EnrolmentReply("", certificate, revoked, self._secret), deadline)
        log.info("%s at %s has fetched its certificate", name, where)
        return ""
