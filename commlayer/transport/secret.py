"""HMAC proofs that an end knows the job's secret, without sending the secret."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable

NONCE_NBYTES = 16
PROOF_NBYTES = hashlib.sha256().digest_size
REMEDY = ("set COMMLAYER_TOKEN, or COMMLAYER_TOKEN_FILE to a file that holds it (setting token or token_file), to the same "
          "secret on `commlayer serve` and on every worker; or set COMMLAYER_KEYS on each to keys of one CA, which hold it")


def new_nonce() -> bytes:
    """Random, so that no proof is valid twice."""
    return secrets.token_bytes(NONCE_NBYTES)


def new_secret() -> str:
    """A secret for one job."""
    return secrets.token_hex(32)


def make_proof(secret: str, *parts: bytes) -> bytes:
    """Proves knowledge of the secret for these parts in this order. The first part names the purpose."""
    mac = hmac.new(secret.encode(), digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "little") + part)  # the length prevents moving bytes between parts
    return mac.digest()


def verify(given: bytes, secret: str, *parts: bytes) -> bool:
    """Whether `given` is that proof, in constant time."""
    return hmac.compare_digest(given, make_proof(secret, *parts))


def wrong_secret(secret: str) -> str:
    """The error line, with the remedy, for a process that was refused and holds `secret`, or none."""
    held = "has another secret than the job" if secret else "has no secret, and the job has one"
    return f"this process {held}: {REMEDY}"


# ---- Mutual authentication of calls to the coordinator: both ends prove that they know the job's secret.
#
# The coordinator derives its challenge from the connection's name, so unauthenticated clients cost it no memory. The proof of a
# call covers the challenge, the method, the body and the caller's certificate, if any: a relay has another certificate, so it
# cannot use the proof. The proof of the reply covers the call's proof.

CHALLENGE = "Challenge"
CHALLENGE_RETRIES = 3
"""How often a refused call is repeated with a new challenge, since the connection may have been replaced in the meantime."""
Call = Callable[[str, bytes, float], bytes]
"""Method, body, timeout in seconds: returns the reply."""


class AuthenticationFailed(Exception):
    """The other end does not know the secret, or knows another one."""


class CallVerifier:
    """The coordinator's end."""

    def __init__(self, secret: str) -> None:
        self._secret, self._key = secret, new_nonce()

    def challenge(self, peer: str) -> bytes:
        """The challenge of the connection that the transport calls `peer`."""
        return hmac.digest(self._key, peer.encode(), "sha256")[:NONCE_NBYTES]

    def opened(self, peer: str, method: str, data: bytes, channel: bytes = b"") -> bytes:
        """Verifies a call and returns its body, or raises Unproved. `channel`: fingerprint of the caller's certificate."""
        given, body = data[:PROOF_NBYTES], data[PROOF_NBYTES:]
        if not verify(given, self._secret, b"ask", method.encode(), self.challenge(peer), body, *bound(channel)):
            raise AuthenticationFailed
        return body

    def sealed(self, data: bytes, answer: bytes) -> bytes:
        """The reply to the call `data`, with its proof."""
        return make_proof(self._secret, b"answer", data[:PROOF_NBYTES], answer) + answer


class CallAuthenticator:
    """A client's end of one channel. `refused`: whether an error of `call` means that the proof was refused."""

    def __init__(self, secret: str, call: Call, refused: Callable[[Exception], bool], channel: bytes = b"") -> None:
        self._secret, self._call, self._refused, self._channel = secret, call, refused, channel
        self._challenge = b""

    def ask(self, method: str, body: bytes, timeout_s: float) -> bytes:
        """Makes a call and returns its verified reply. Thread-safe.

        A new connection has a new challenge, so a refused call is repeated with a fresh one. If the challenge is still the
        same, the secret is wrong.
        """
        challenge, refused, why = self._challenge, b"", None
        for _ in range(1 + CHALLENGE_RETRIES):
            if not challenge:
                challenge = self._challenge = self._call(CHALLENGE, b"", timeout_s)
            if challenge == refused:
                break
            mine = make_proof(self._secret, b"ask", method.encode(), challenge, body, *bound(self._channel))
            try:
                data = self._call(method, mine + body, timeout_s)
            except Exception as error:
                if not self._refused(error):
                    raise
                challenge, refused, why = b"", challenge, error
                continue
            answer = data[PROOF_NBYTES:]
            if not verify(data[:PROOF_NBYTES], self._secret, b"answer", mine, answer):
                raise AuthenticationFailed
            return answer
        raise AuthenticationFailed from why


def bound(channel: bytes) -> tuple[bytes, ...]:
    """The last part of a proof that is valid only on a channel with this binding."""
    return (channel,) if channel else ()
