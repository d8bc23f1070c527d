"""Mutual authentication of calls to the coordinator: both ends prove that they know the job's secret.

The coordinator derives its challenge from the connection's name, so unauthenticated clients use none of its memory. The proof
of a call covers the challenge, the method, the body and the caller's certificate, if any. A relay has another certificate, so
it cannot use the proof. The response MAC also covers the request MAC, which binds the two.

With keys the coordinator also signs its challenge and every reply with the key of its certificate. gRPC checks the CA of each
connection, but has no revocation list and does not report the certificate that it saw. A node whose certificate was revoked
still knows the secret; it cannot sign for another certificate, and the coordinator does not sign for a relay's.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import NamedTuple

from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.keys.secret import (
    NONCE_NBYTES,
    PROOF_NBYTES,
    bound,
    check_signature,
    make_proof,
    new_nonce,
    sign,
    verify,
)
from commlayer.transport.keys.tls import SigningCertificate, signing_certificate

CHALLENGE = "Challenge"
CHALLENGE_RETRIES = 3
"""How often a refused call is repeated with a new challenge, since gRPC may have replaced the connection in the meantime."""
Call = Callable[[str, bytes, float], bytes]
"""A function that makes a call: its arguments are method, body and timeout in seconds; it returns the reply."""
LENGTH_NBYTES = 2
"""Size of the number before a signature: its length."""


class AuthenticationFailed(Exception):
    """Raised when the other end does not know the secret, or knows a different one."""


class CallVerifier:
    """The coordinator's end of authenticated calls: verifies calls and proves replies."""

    def __init__(self, secret: str, keys: Keys | None = None) -> None:
        self._secret, self._keys, self._key = secret, keys, new_nonce()

    def challenge(self, peer: str) -> bytes:
        """Returns the challenge of the connection that gRPC calls `peer`."""
        return hmac.digest(self._key, peer.encode(), "sha256")[:NONCE_NBYTES]

    def greeting(self, peer: str, nonce: bytes, channel: bytes = b"") -> bytes:
        """Returns the reply to a call for the challenge; with keys, signed and followed by this node's certificate. `channel`:
        fingerprint of the caller's certificate, b"" without TLS."""
        challenge = self.challenge(peer)
        return challenge + self._signature(b"challenge", nonce, challenge, channel) + (self._keys.der if self._keys else b"")

    def opened(self, peer: str, method: str, data: bytes, channel: bytes = b"") -> bytes:
        """Verifies a call and returns its body; raises AuthenticationFailed if the proof is wrong. `channel`: see
        `greeting`."""
        given, body = data[:PROOF_NBYTES], data[PROOF_NBYTES:]
        if not verify(given, self._secret, b"ask", method.encode(), self.challenge(peer), body, *bound(channel)):
            raise AuthenticationFailed
        return body

    def sealed(self, data: bytes, answer: bytes) -> bytes:
        """Returns the reply to the call `data`, preceded by its proof and, with keys, a signature."""
        parts = b"answer", data[:PROOF_NBYTES], answer
        return make_proof(self._secret, *parts) + self._signature(*parts) + answer

    def _signature(self, *parts: bytes) -> bytes:
        if self._keys is None:
            return b""
        signature = sign(self._keys, *parts)
        return len(signature).to_bytes(LENGTH_NBYTES, "little") + signature


class ServerChallenge(NamedTuple):
    """What a client knows about its connection: the coordinator's challenge and, with keys, the coordinator's certificate."""

    challenge: bytes
    signer: SigningCertificate | None


class CallAuthenticator:
    """A client's end of authenticated calls over one channel. `refused`: returns whether an error of `call` means that the
    proof was refused. With `keys`, replies must be signed with a certificate of the job that was not revoked."""

    def __init__(self, secret: str, call: Call, refused: Callable[[Exception], bool], keys: Keys | None = None) -> None:
        self._secret, self._call, self._refused, self._keys = secret, call, refused, keys
        self._channel = keys.own.fingerprint if keys else b""
        self._known: ServerChallenge | None = None

    def ask(self, method: str, body: bytes, timeout_s: float) -> bytes:
        """Makes a call and returns its verified reply. Thread-safe. Raises Refused if the coordinator's certificate is not of
        this job or was revoked.

        A new connection has a new challenge, so a refused call is repeated with a new challenge. If the challenge is still the
        same, the secret is wrong.
        """
        deadline = time.monotonic() + timeout_s
        known, refused, why = self._known, b"", None
        for _ in range(1 + CHALLENGE_RETRIES):
            if known is None:
                known = self._known = self._greet(deadline - time.monotonic())
            if known.challenge == refused:
                break
            if known.signer is not None and self._keys is not None:
                known.signer.check_revoked(self._keys)
            mine = make_proof(self._secret, b"ask", method.encode(), known.challenge, body, *bound(self._channel))
            try:
                data = self._call(method, mine + body, deadline - time.monotonic())
            except Exception as error:
                if not self._refused(error):
                    raise
                refused, why = known.challenge, error
                known = None
                continue
            given, signature, answer = self._split(data, PROOF_NBYTES)
            if not verify(given, self._secret, b"answer", mine, answer):
                raise AuthenticationFailed
            check_signature(known.signer, signature, b"answer", mine, answer)
            return answer
        raise AuthenticationFailed from why

    def forget(self) -> None:
        """Ends the use of the current challenge: the next call fetches one first, and with keys checks who signs it."""
        self._known = None

    def _greet(self, timeout_s: float) -> ServerChallenge:
        nonce = new_nonce() if self._keys else b""
        challenge, signature, der = self._split(self._call(CHALLENGE, nonce, timeout_s), NONCE_NBYTES)
        if self._keys is None:
            return ServerChallenge(challenge, None)
        signer = signing_certificate(der, self._keys)
        check_signature(signer, signature, b"challenge", nonce, challenge, self._keys.own.fingerprint)
        return ServerChallenge(challenge, signer)

    def _split(self, data: bytes, head_nbytes: int) -> tuple[bytes, bytes, bytes]:
        """Splits a reply into its first bytes, the signature (b"" without keys) and the rest."""
        head, rest = data[:head_nbytes], data[head_nbytes:]
        end = LENGTH_NBYTES + int.from_bytes(rest[:LENGTH_NBYTES], "little") if self._keys else 0
        return head, rest[LENGTH_NBYTES:end], rest[end:]
