"""A home's line, `NAME@HOST:PORT#TOKEN`, and the folder in which the home stores its keys.

The token is the SHA-256 fingerprint of the job's CA certificate and a one-time secret. `commlayer serve` prints the line, and
enrolment.py exchanges the secret for a certificate. Later the same line, with or without its token, finds the stored keys.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from commlayer.config import host_port, user_folder
from commlayer.errors import InvalidInput
from commlayer.transport.keys.key_folder import CERTIFICATE

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
ALLOWED_NAMES = "allowed: 1 to 63 letters, digits, '.', '_' and '-', starting with a letter or digit"
FINGERPRINT_NBYTES, SECRET_NBYTES = hashlib.sha256().digest_size, 16
TOKEN_CHARACTERS = 4 * (FINGERPRINT_NBYTES + SECRET_NBYTES) // 3
LINE = "home"
"""Name of the file with a home's line in its folder of keys. The file has the digest of the token, not the token."""
COPY = "copy the complete line that `commlayer serve` or `commlayer keys invite` printed"


class Token(NamedTuple):
    """Information about the job that a home has before it has a certificate."""

    fingerprint: bytes
    """SHA-256 of the CA's certificate."""
    secret: bytes

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(self.fingerprint + self.secret).decode()

    @property
    def digest(self) -> str:
        return hashlib.sha256(str(self).encode()).hexdigest()


class HomeLine(NamedTuple):
    """A home's name, the server's address, and the token. The token is None if the line has none."""

    name: str
    address: str
    token: Token | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.address}" + (f"#{self.token}" if self.token else "")

    @property
    def folder(self) -> Path:
        """Where this home stores its keys: outside of working directories, which people copy and publish."""
        host, port = host_port(self.address)
        return user_folder() / f"{re.sub('[^A-Za-z0-9._-]', '_', host)}-{port}-{self.name}"

    def stored(self) -> Path | None:
        """Returns the folder if it has keys and, if this line has a token, they were fetched with that token. Otherwise returns
        None."""
        if not (self.folder / CERTIFICATE).is_file():
            return None
        if self.token is None:
            return self.folder
        try:
            digest = (self.folder / LINE).read_text("ascii").split()[-1]
        except (OSError, ValueError, IndexError):
            return None
        return self.folder if digest == self.token.digest else None


def new_token(authority: bytes) -> Token:
    """Returns a token with a new secret. `authority`: the CA's certificate as DER."""
    return Token(hashlib.sha256(authority).digest(), secrets.token_bytes(SECRET_NBYTES))


def parse(text: str) -> HomeLine:
    """Parses a home's line. Raises InvalidInput, whose message does not contain the token."""
    head, mark, token = text.partition("#")
    name, at, address = head.partition("@")
    if not at or not NAME.fullmatch(name):
        raise InvalidInput("E-INVITATION", f"home's name: got {name[:80]!r}, {ALLOWED_NAMES}; {COPY}")
    host_port(address)
    return HomeLine(name, address, _token(token) if mark else None)


def _token(text: str) -> Token:
    try:
        data = base64.b64decode(text, b"-_", validate=True) if len(text) == TOKEN_CHARACTERS else b""
    except (ValueError, binascii.Error):
        data = b""
    if not data:
        raise InvalidInput("E-INVITATION", f"token after '#': got {len(text)} characters, allowed: {TOKEN_CHARACTERS} letters, "
                                           f"digits, '-' and '_'; {COPY}")
    return Token(data[:FINGERPRINT_NBYTES], data[FINGERPRINT_NBYTES:])


def is_invitation(address: str) -> bool:
    """Returns whether the address of `commlayer join` is an invitation, NAME@HOST:PORT#TOKEN with or without its token. A
    plain HOST:PORT is not."""
    return "@" in address or "#" in address


def stored_lines() -> list[HomeLine]:
    """Returns the line NAME@HOST:PORT of each home whose keys this user has stored. Tokens are left out."""
    result = []
    for path in sorted(user_folder().glob(f"*/{LINE}")):
        try:
            home = parse(path.read_text("ascii").split()[0])
        except (OSError, ValueError, IndexError):
            continue
        if home.folder == path.parent:
            result.append(home)
    return result
