"""HMAC proofs that an end knows the job's secret, without sending the secret."""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE_NBYTES = 16
PROOF_NBYTES = hashlib.sha256().digest_size
REMEDY = ("set COMMLAYER_TOKEN, or COMMLAYER_TOKEN_FILE to a file that holds it (setting token or token_file), to the same "
          "secret on `commlayer serve` and on every worker; or set COMMLAYER_KEYS on each to keys of one CA, which hold it")


def nonce() -> bytes:
    """Random, so that no proof is valid twice."""
    return secrets.token_bytes(NONCE_NBYTES)


def new() -> str:
    """A secret for one job."""
    return secrets.token_hex(32)


def proof(secret: str, *parts: bytes) -> bytes:
    """Proves knowledge of the secret for these parts in this order. The first part names the purpose."""
    mac = hmac.new(secret.encode(), digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "little") + part)  # the length prevents moving bytes between parts
    return mac.digest()


def proves(given: bytes, secret: str, *parts: bytes) -> bool:
    """Whether `given` is that proof, in constant time."""
    return hmac.compare_digest(given, proof(secret, *parts))


def unproved(secret: str) -> str:
    """The error line, with the remedy, for a process that was refused and holds `secret`, or none."""
    held = "has another secret than the job" if secret else "has no secret, and the job has one"
    return f"this process {held}: {REMEDY}"
