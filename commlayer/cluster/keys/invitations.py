"""Invitations: each lets one home fetch a certificate of its own, once. Invitations are stored in the CA's folder.

An invitation is a pair of Ed25519 keys. The one-time secret in a home's line is the private key; the CA's folder contains only
the public key. A copy of the folder's `invitations.json` thus admits no home, and the secret itself is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from commlayer.cluster.keys import authority
from commlayer.cluster.keys.home_keys import HomeLine, Token, new_token
from commlayer.errors import InvalidInput, Refused
from commlayer.files import write_whole
from commlayer.records import MALFORMED, Record, complete
from commlayer.transport.keys.key_folder import CA, REVOKED

FILE = "invitations.json"
VALID_HOURS, MOST_HOURS = 24.0, 24.0 * 30
SERVER, SCRIPT = "server", "train.py"
PURPOSE = b"commlayer enrolment 1"
UNKNOWN = ("the invitation is not valid here: its name or secret is wrong, or a newer one replaced it; copy the complete line, "
           "or ask for a new one (`commlayer keys invite NAME`)")


class InvitationRecord(Record, frozen=True):
    """The record of an invitation that the CA stores. `until`: seconds since 1970."""

    public: bytes
    """Ed25519 public key. The private key is derived from the secret in the home's line."""
    until: float
    used: float = 0.0
    """When the certificate was issued, in seconds since 1970; 0: not yet."""
    serial: str = ""
    """Serial number of that certificate, in hex."""


class Book(Record, frozen=True):
    """All invitations of a CA by the home's name, and the address that its server was last reached at."""

    address: str = ""
    homes: dict[str, InvitationRecord] = msgspec.field(default_factory=dict)


def signing_key(secret: bytes) -> Ed25519PrivateKey:
    """Returns the private key of the invitation with this one-time secret."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(PURPOSE + secret).digest())


def _public_key(secret: bytes) -> bytes:
    return signing_key(secret).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


NO_INVITATION = _public_key(secrets.token_bytes(16))
"""Public key that belongs to no invitation."""


def statement(name: str, csr: bytes, binding: Sequence[bytes]) -> bytes:
    """Returns the bytes that a home signs. `binding`: the server's nonce and the fingerprint of its certificate, so a signature
    is valid only on one connection to one server."""
    parts = (PURPOSE, name.encode(), csr, *binding)
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def check_name(name: str) -> None:
    """Raises InvalidInput unless a home can have this name."""
    authority.check_name(name)
    if name == SERVER:
        raise InvalidInput("E-CLI-OPTION", f"the name {SERVER!r} is the server's own: give the home another one")


def read_book(folder: Path) -> Book:
    path = folder / FILE
    if not path.exists():
        return Book()
    try:
        return msgspec.json.decode(authority.read(path), type=complete(Book))
    except MALFORMED:
        raise InvalidInput("E-KEYS", f"{path} is damaged: restore it from a backup, or delete it and invite homes that have no "
                                     "keys yet again with `commlayer keys invite NAME`") from None


def invite(folder: Path, names: Sequence[str], hours: float = VALID_HOURS, *, again: bool = False, keep: bool = False
           ) -> dict[str, Token]:
    """Makes an invitation for each name, which replaces the name's previous one. Returns the tokens by name.

    `again`: invite homes that have a certificate, too; the old certificate is revoked when the new one is issued. `keep`: skip
    homes that have a certificate or a valid invitation, instead of raising InvalidInput.
    """
    if not 0 < hours <= MOST_HOURS:
        raise InvalidInput("E-CLI-OPTION", f"hours: got {hours:g}, allowed: above 0 to {MOST_HOURS:g}")
    for name in names:
        check_name(name)
    with authority.locked(folder):
        _, ca = authority.load(folder)
        book, now = read_book(folder), time.time()
        good = {one.name for one in authority.list_issued(folder) if not one.revoked and one.until.timestamp() > now}
        if not again and not keep and (known := [name for name in names if name in good]):
            raise InvalidInput("E-KEYS", f"{known[0]} already has a certificate; --again makes an invitation that replaces and "
                                         "revokes it")
        fresh = [name for name in dict.fromkeys(names) if not (keep and (name in good or name in _open(book, now)))]
        tokens = {name: new_token(ca.public_bytes(Encoding.DER)) for name in fresh}
        new = {name: InvitationRecord(_public_key(token.secret), now + 3600 * hours) for name, token in tokens.items()}
        _save(folder, msgspec.structs.replace(book, homes={**book.homes, **new}))
        return tokens


def pending(folder: Path) -> dict[str, float]:
    """Maps the names of homes whose invitation is valid and not used yet to its end, in seconds since 1970."""
    return _open(read_book(folder), time.time())


def _open(book: Book, now: float) -> dict[str, float]:
    return {name: one.until for name, one in book.homes.items() if not one.used and one.until > now}


def set_address(folder: Path, address: str) -> None:
    """Remembers the server's address for `commlayer keys invite`."""
    with authority.locked(folder):
        book = read_book(folder)
        if book.address != address:
            _save(folder, msgspec.structs.replace(book, address=address))


def withdraw(folder: Path, name: str) -> bool:
    """Deletes the invitation of this name, used or not. Returns whether there was one."""
    with authority.locked(folder):
        book = read_book(folder)
        if name in book.homes:
            _save(folder, msgspec.structs.replace(book, homes={one: book.homes[one] for one in book.homes if one != name}))
        return name in book.homes


def redeem(folder: Path, name: str, csr: bytes, proof: bytes, binding: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Issues the certificate of an invited home. Returns it and the CA's revocation list, as PEM. Raises Refused. A repeated
    request for the same public key gets the same certificate, because the reply may have been lost.

    The server verifies the signature before it reads anything else in the request. An attacker therefore reaches no parser, and
    cannot find out which homes were invited or have joined.
    """
    invitation = read_book(folder).homes.get(name)
    # The signature is verified for unknown names, too, so that the time of a refusal does not depend on the name.
    verified = _verified(invitation.public if invitation else NO_INVITATION, proof, statement(name, csr, binding))
    if invitation is None or not verified:
        raise Refused(UNKNOWN, code="E-INVITATION")
    public = _requested_key(name, csr)
    with authority.locked(folder):
        key, ca = authority.load(folder)
        book = read_book(folder)
        if book.homes.get(name) is None or not hmac.compare_digest(book.homes[name].public, invitation.public):
            raise Refused(UNKNOWN, code="E-INVITATION")
        invitation, now = book.homes[name], time.time()
        if invitation.used:
            certificate = _issued_before(folder, name, invitation, public)
        elif invitation.until < now:
            raise Refused(f"the invitation of {name} expired on {_when(invitation.until)}: ask for a new one (`commlayer keys "
                          f"invite {name}`)", code="E-INVITATION-EXPIRED")
        else:
            certificate = authority.renew(folder, key, ca, name, public, dials_only=True)
            used = msgspec.structs.replace(invitation, used=now, serial=f"{certificate.serial_number:x}")
            # One call: if the process dies between the two files, the certificate is recorded and the invitation still valid.
            book = msgspec.structs.replace(book, homes={**book.homes, name: used})
            write_whole({authority.issued_file_path(folder, certificate): authority.pem(certificate),
                         folder / FILE: msgspec.json.encode(book)}, durable=True, mode=0o600)
        return authority.pem(certificate), authority.read(folder / REVOKED)


def certificate_authority(folder: Path) -> bytes:
    """Returns the CA's certificate as DER."""
    ca = authority.parsed(folder / CA, x509.load_pem_x509_certificate, "certificate")
    return ca.public_bytes(Encoding.DER)


def server_keys(folder: Path) -> tuple[Path, bool]:
    """Returns the server's folder of keys, and whether this call has created the CA. Creates what is missing."""
    if new := not (folder / authority.CA_KEY).exists():
        authority.init(folder)
    place = folder / authority.NODES / SERVER
    return place if place.is_dir() else authority.add(folder, SERVER), new


def commands(folder: Path, names: Sequence[str], tokens: Mapping[str, Token], address: str) -> list[str]:
    """Returns the command to paste at each home. A home that was invited earlier gets a comment instead, because the folder
    does not contain its token."""
    earlier = {name: until for name, until in pending(folder).items() if name not in tokens}
    again = command(folder)
    return [f"# {name}: its earlier line is valid until {_when(earlier[name])}; for a new one: {again} {name}"
            if name in earlier else f"commlayer join {HomeLine(name, address, tokens.get(name))} {SCRIPT}" for name in names]


def command(folder: Path) -> str:
    """Returns the command that invites a home, which needs only the home's name."""
    return "commlayer keys invite" + ("" if folder.absolute() == Path("keys").absolute() else f" --dir {folder}")


def _issued_before(folder: Path, name: str, invitation: InvitationRecord,
                   public: ec.EllipticCurvePublicKey) -> x509.Certificate:
    """Returns the certificate that the invitation was used for, if it has this public key and is not revoked."""
    path = folder / authority.ISSUED / f"{name}-{invitation.serial}.pem"
    certificate = authority.parsed(path, x509.load_pem_x509_certificate, "certificate")
    revoked = {f"{one.serial:x}" for one in authority.list_issued(folder) if one.revoked}
    if invitation.serial in revoked or certificate.public_key() != public:
        raise Refused(f"the invitation of {name} was already used on {_when(invitation.used)}: join with the line without its "
                      f"token on the machine that used it, or ask for a new one (`commlayer keys invite {name} --again`)",
                      code="E-INVITATION-USED")
    return certificate


def _requested_key(name: str, csr: bytes) -> ec.EllipticCurvePublicKey:
    """Returns the public key of a request. Everything else in the request, such as extensions, is ignored."""
    try:
        request = x509.load_der_x509_csr(csr)
        public, names = request.public_key(), request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        good = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise Refused("the certificate request is malformed", code="E-INVITATION") from None
    if not good or not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise Refused("the certificate request is not signed by its own key on the curve P-256", code="E-INVITATION")
    if [one.value for one in names] != [name]:
        raise Refused(f"the certificate request has another name than the invited {name}", code="E-INVITATION")
    return public


def _verified(public: bytes, proof: bytes, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(proof, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _save(folder: Path, book: Book) -> None:
    write_whole({folder / FILE: msgspec.json.encode(book)}, durable=True, mode=0o600)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
