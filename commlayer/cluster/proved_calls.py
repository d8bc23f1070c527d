"""Calls to the coordinator, each proved: who asks knows the job's secret, and so does who answers. Knows bytes; no gRPC.

The coordinator's challenge belongs to one connection and is computed again for each call, so that whoever has proved nothing
costs it no memory. A call's proof covers the challenge, the method, the body and, where there is one, the asker's certificate:
who passes on what another proved shows a certificate of its own. The answer's covers the call's.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from commlayer.transport.secret import NONCE_NBYTES, PROOF_NBYTES, nonce, proof, proves

CHALLENGE = "Challenge"
FRESH = 3
"""So often a refused proof is made again with a fresh challenge: the connection may have been made anew meanwhile."""
Call = Callable[[str, bytes, float], bytes]
"""Method, body, seconds: the answer."""


class Unproved(Exception):
    """The other end does not know the secret, or not this one."""


class Judge:
    """The coordinator's end."""

    def __init__(self, secret: str) -> None:
        self._secret, self._key = secret, nonce()

    def challenge(self, peer: str) -> bytes:
        """Of that connection, as the carrier names it."""
        return hmac.digest(self._key, peer.encode(), "sha256")[:NONCE_NBYTES]

    def opened(self, peer: str, method: str, data: bytes, channel: bytes = b"") -> bytes:
        """The body of a call that is proved, else Unproved. `channel`: the fingerprint of the asker's certificate."""
        given, body = data[:PROOF_NBYTES], data[PROOF_NBYTES:]
        if not proves(given, self._secret, b"ask", method.encode(), self.challenge(peer), body, *_bound(channel)):
            raise Unproved
        return body

    def sealed(self, data: bytes, answer: bytes) -> bytes:
        """What goes back for the call that came as `data`."""
        return proof(self._secret, b"answer", data[:PROOF_NBYTES], answer) + answer


class Asker:
    """A client's end of one channel. `refused` says whether an error of `call` means that a proof was not taken."""

    def __init__(self, secret: str, call: Call, refused: Callable[[Exception], bool], channel: bytes = b"") -> None:
        self._secret, self._call, self._refused, self._channel = secret, call, refused, channel
        self._challenge = b""

    def ask(self, method: str, body: bytes, timeout_s: float) -> bytes:
        """The proved answer. Any number of threads may ask at once.

        A connection that was made anew has another challenge, so a refused proof is tried again with a fresh one; where that
        is the one that was refused, it is the secret that does not fit.
        """
        challenge, refused, why = self._challenge, b"", None
        for _ in range(1 + FRESH):
            if not challenge:
                challenge = self._challenge = self._call(CHALLENGE, b"", timeout_s)
            if challenge == refused:
                break
            mine = proof(self._secret, b"ask", method.encode(), challenge, body, *_bound(self._channel))
            try:
                data = self._call(method, mine + body, timeout_s)
            except Exception as error:
                if not self._refused(error):
                    raise
                challenge, refused, why = b"", challenge, error
                continue
            answer = data[PROOF_NBYTES:]
            if not proves(data[:PROOF_NBYTES], self._secret, b"answer", mine, answer):
                raise Unproved
            return answer
        raise Unproved from why


def _bound(channel: bytes) -> tuple[bytes, ...]:
    return (channel,) if channel else ()
