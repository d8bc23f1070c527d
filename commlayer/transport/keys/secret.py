"""HMAC proofs that a process knows the job's secret, without sending the secret; and signatures of the same parts."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from commlayer.errors import Refused
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.keys.tls import SigningCertificate

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
    return hmac.digest(secret.encode(), _joined(*parts), "sha256")


def _joined(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)  # the length prevents moving bytes between parts


def verify(given: bytes, secret: str, *parts: bytes) -> bool:
    """Returns whether `given` equals make_proof(secret, *parts). The comparison takes constant time."""
    return hmac.compare_digest(given, make_proof(secret, *parts))


def wrong_secret(secret: str) -> str:
    """Returns the error line, with the remedy, for a process that was refused. `secret`: that process's secret; "" if it has
    none."""
    held = "has a different secret than the job" if secret else "has no secret, but the job has one"
    return f"this process {held}: {REMEDY}"


def sign(keys: Keys, *parts: bytes) -> bytes:
    return keys.sign(_joined(*parts))


def check_signature(signer: SigningCertificate | None, signature: bytes, *parts: bytes) -> None:
    """Raises Refused unless `signer`, if any, has signed these parts."""
    if signer is not None and not signer.has_signed(signature, _joined(*parts)):
        raise Refused(f"it presents the certificate of {signer.certificate.name}, but cannot sign with that certificate's key: "
                      "another machine answers at this address", code="E-CERTIFICATE-KEY")


def bound(channel: bytes) -> tuple[bytes, ...]:
    """Returns the last part of a proof that is valid only on a channel with this binding; no part if the binding is empty."""
    return (channel,) if channel else ()
