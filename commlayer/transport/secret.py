"""Proofs that one knows the job's secret, which itself never travels. Knows keys and bytes; not who asks, nor by what way."""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE_NBYTES = 16
PROOF_NBYTES = hashlib.sha256().digest_size
REMEDY = ("set COMMLAYER_TOKEN, or COMMLAYER_TOKEN_FILE to a file that holds it (setting token or token_file), to the same "
          "secret on `commlayer serve` and on every worker; or set COMMLAYER_KEYS on each to keys of one CA, which hold it")


def nonce() -> bytes:
    """Random, so that no proof fits twice."""
    return secrets.token_bytes(NONCE_NBYTES)


def new() -> str:
    """A secret for one job."""
    return secrets.token_hex(32)


def proof(secret: str, *parts: bytes) -> bytes:
    """That who made it knows the secret, for these parts in this order. Its first part says what it is for."""
    mac = hmac.new(secret.encode(), digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "little") + part)  # or bytes could move from one part to the next
    return mac.digest()


def proves(given: bytes, secret: str, *parts: bytes) -> bool:
    """Whether `given` is that proof; takes as long for a nearly right one as for any other."""
    return hmac.compare_digest(given, proof(secret, *parts))


def unproved(secret: str) -> str:
    """Why somebody was refused, for who holds `secret`, or nothing: one line with the remedy."""
    held = "has another secret than the job" if secret else "has no secret, and the job has one"
    return f"this process {held}: {REMEDY}"
