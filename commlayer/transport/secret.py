"""HMAC proofs that a process knows the job's secret, without sending the secret."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable

NONCE_NBYTES = 16
PROOF_NBYTES = hashlib.sha256().digest_size
REMEDY = ("set COMMLAYER_TOKEN, or COMMLAYER_TOKEN_FILE to a file that contains it (setting token or token_file), to the same "
          "secret on `commlayer serve` and on every worker; or set COMMLAYER_KEYS on each to keys of one CA, which contain it")


def new_nonce() -> bytes:
    """Returns random bytes that make each proof valid only once."""
    return secrets.token_bytes(NONCE_NBYTES)


def new_secret() -> str:
    """Returns a new random secret for a job."""
    return secrets.token_hex(32)


def make_proof(secret: str, *parts: bytes) -> bytes:
    """Returns a proof that this process knows the secret. The proof is valid only for these parts in this order; the first
    part names its purpose."""
    mac = hmac.new(secret.encode(), digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "little") + part)  # the length prevents moving bytes between parts
    return mac.digest()


def verify(given: bytes, secret: str, *parts: bytes) -> bool:
    """Returns whether `given` equals make_proof(secret, *parts). The comparison takes constant time."""
    return hmac.compare_digest(given, make_proof(secret, *parts))


def wrong_secret(secret: str) -> str:
    """Returns the error line, with the remedy, for a process that was refused. `secret`: that process's secret; "" if it has
    none."""
    held = "has a different secret than the job" if secret else "has no secret, but the job has one"
    return f"this process {held}: {REMEDY}"


# ---- Mutual authentication of calls to the coordinator: both ends prove that they know the job's secret. The coordinator
# derives its challenge from the connection's name, so unauthenticated clients use none of its memory. The proof of a call
# covers the challenge, the method, the body and the caller's certificate, if any. A relay has another certificate, so it cannot
# use the proof. The proof of the reply covers the call's proof.

CHALLENGE = "Challenge"
CHALLENGE_RETRIES = 3
"""How often a refused call is repeated with a new challenge, since gRPC may have replaced the connection in the meantime."""
Call = Callable[[str, bytes, float], bytes]
"""A function that makes a call: its arguments are method, body and timeout in seconds; it returns the reply."""


class AuthenticationFailed(Exception):
    """Raised when the other end does not know the secret, or knows a different one."""


class CallVerifier:
    """The coordinator's end of authenticated calls: verifies calls and proves replies."""

    def __init__(self, secret: str) -> None:
        self._secret, self._key = secret, new_nonce()

    def challenge(self, peer: str) -> bytes:
        """Returns the challenge of the connection that gRPC calls `peer`."""
        return hmac.digest(self._key, peer.encode(), "sha256")[:NONCE_NBYTES]

    def opened(self, peer: str, method: str, data: bytes, channel: bytes = b"") -> bytes:
        """Verifies a call and returns its body; raises AuthenticationFailed if the proof is wrong. `channel`: fingerprint of
        the caller's certificate, b"" without TLS."""
        given, body = data[:PROOF_NBYTES], data[PROOF_NBYTES:]
        if not verify(given, self._secret, b"ask", method.encode(), self.challenge(peer), body, *bound(channel)):
            raise AuthenticationFailed
        return body

    def sealed(self, data: bytes, answer: bytes) -> bytes:
        """Returns the reply to the call `data`, preceded by its proof."""
        return make_proof(self._secret, b"answer", data[:PROOF_NBYTES], answer) + answer


class CallAuthenticator:
    """A client's end of authenticated calls over one channel. `refused`: returns whether an error of `call` means that the
    proof was refused."""

    def __init__(self, secret: str, call: Call, refused: Callable[[Exception], bool], channel: bytes = b"") -> None:
        self._secret, self._call, self._refused, self._channel = secret, call, refused, channel
        self._challenge = b""

    def ask(self, method: str, body: bytes, timeout_s: float) -> bytes:
        """Makes a call and returns its verified reply. Thread-safe.

        A new connection has a new challenge, so a refused call is repeated with a new challenge. If the challenge is still the
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
    """Returns the last part of a proof that is valid only on a channel with this binding; no part if the binding is empty."""
    return (channel,) if channel else ()
