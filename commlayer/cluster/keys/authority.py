"""The job's certificate authority (CA): issues certificates for nodes, and keeps the revocation list.

The CA's folder contains the CA's private key (`ca.key`), all certificates ever issued (`issued/`) and one folder per node
(`nodes/NAME/`), to be copied to that node. Folders are created under a temporary name and then renamed, and files are replaced
atomically. A crash therefore leaves no incomplete file.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from commlayer.cluster.keys.home_keys import ALLOWED_NAMES, NAME
from commlayer.errors import InvalidInput
from commlayer.files import sync, try_lock, write_whole
from commlayer.transport.keys.key_folder import CA, CERTIFICATE, KEY, REVOKED, SERVICE, TOKEN, parse_peer_certificate

CA_KEY, ISSUED, NODES = "ca.key", "issued", "nodes"
CA_DAYS, NODE_DAYS, MOST_DAYS = 3650, 365, 3650
EARLIER = datetime.timedelta(hours=1)
"""A new certificate is valid from this long before its time of issue, because a node's clock may be slow."""
LOCK_S = 30.0
"""Seconds to wait for another process that uses the folder. Many homes may fetch certificates at
once from a slow disk; a home whose connection has ended meanwhile tries again."""
T = TypeVar("T")


class Issued(NamedTuple):
    """A certificate that this CA has issued."""

    name: str
    serial: int
    until: datetime.datetime
    revoked: bool
    dials_only: bool


def init(folder: Path, days: int = CA_DAYS) -> datetime.datetime:
    """Creates a CA in a new or empty folder. Returns when the CA's certificate expires."""
    _check_days(days)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        obstacle = "the folder already contains a CA" if (folder / CA_KEY).exists() else "the folder is not empty"
        raise InvalidInput("E-KEYS",
                           f"{folder}: {obstacle}; name another folder with --dir, or add nodes to this CA with `commlayer "
                           "keys add NAME`")
    if folder.resolve() == Path.cwd():
        raise InvalidInput("E-KEYS",
                           f"{folder}: the current directory cannot be replaced; name a folder to be created, for example "
                           "--dir keys")
    key = ec.generate_private_key(ec.SECP256R1())
    name, (start, end) = common_name(f"commlayer job {secrets.token_hex(4)}"), _times(days)
    public = key.public_key()
    own_id = x509.SubjectKeyIdentifier.from_public_key(public)
    certificate = _signed(key, name, name, public, start, end, own_id, authority=True)
    contents = {CA_KEY: private(key), CA: pem(certificate), TOKEN: secrets.token_hex(32).encode() + b"\n",
                REVOKED: _list(key, certificate, {}, 1)}
    make_folder(folder, contents, (ISSUED, NODES), new=True)
    return end


def add(folder: Path, name: str, days: int = NODE_DAYS, *, dials_only: bool = False, again: bool = False) -> Path:
    """Issues a certificate for node `name`. Creates and returns the node's folder. `dials_only`: the certificate is not valid
    for servers. `again`: replaces and revokes the node's present certificate."""
    check_name(name)
    _check_days(days)
    with locked(folder):
        key, authority = load(folder)
        shared = {one: read(folder / one) for one in (CA, TOKEN)}  # read before any file is written
        have = valid(folder, name)
        if have and not again:
            raise InvalidInput("E-KEYS",
                               f"{name} already has a certificate, valid until {have[-1].until:%Y-%m-%d}, in "
                               f"{folder / NODES / name}; --again replaces and revokes it")
        own = ec.generate_private_key(ec.SECP256R1())
        certificate = renew(folder, key, authority, name, own.public_key(), days, dials_only=dials_only)
        # The CA records the certificate before handing it out, because an unrecorded certificate could not be revoked.
        write_whole({issued_file_path(folder, certificate): pem(certificate)}, durable=True)
        place = folder / NODES / name
        contents = {KEY: private(own), CERTIFICATE: pem(certificate), REVOKED: read(folder / REVOKED)} | shared
        make_folder(place, contents, ())
        return place


def renew(folder: Path, key: ec.EllipticCurvePrivateKey, authority: x509.Certificate, name: str,
          public: ec.EllipticCurvePublicKey, days: int = NODE_DAYS, *, dials_only: bool) -> x509.Certificate:
    """Revokes the node's present certificates, if any, and makes another one. The caller holds the CA's lock, and must record
    the certificate before handing it out."""
    if former := {one.serial for one in valid(folder, name)}:
        revoke_serials(folder, key, authority, former)
    start, end = _times(days)
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([] if dials_only else [ExtendedKeyUsageOID.SERVER_AUTH])
    return _signed(key, authority.subject, common_name(name), public, start, min(end, authority.not_valid_after_utc),
                   x509.ExtendedKeyUsage(purposes), x509.SubjectAlternativeName([x509.DNSName(SERVICE), x509.DNSName(name)]))


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidInput("E-CLI-OPTION", f"node name: got {name!r}, {ALLOWED_NAMES}, for example gpu-2")


def issued_file_path(folder: Path, certificate: x509.Certificate) -> Path:
    """Returns the file in which the CA records this certificate."""
    return folder / ISSUED / f"{parse_peer_certificate(certificate).name}-{certificate.serial_number:x}.pem"


def revoke(folder: Path, name: str) -> int:
    """Permanently revokes all certificates of node `name`. Returns the number of certificates that were not revoked before."""
    with locked(folder):
        key, authority = load(folder)
        certificates = list_issued(folder)
        have = [one for one in certificates if one.name == name]
        if not have:
            names = ", ".join(sorted({one.name for one in certificates})) or "none"
            raise InvalidInput("E-KEYS", f"{name}: the CA in {folder} has issued no certificate for this node; nodes with "
                                         f"certificates: {names}")
        new = {one.serial for one in have if not one.revoked}
        # Written even if no certificate is newly revoked: an earlier call may have failed before it reached a node's folder.
        revoke_serials(folder, key, authority, new)
        return len(new)


def list_issued(folder: Path) -> list[Issued]:
    """Returns all certificates that the CA has issued, sorted by node name; for each node, revoked certificates come first."""
    _, listed = _revocations(folder)
    rows = [parsed(path, lambda data: _issued(data, listed), "certificate that `commlayer keys add` made")
            for path in (folder / ISSUED).glob("*.pem")]
    return sorted(rows, key=lambda one: (one.name, not one.revoked, one.until))


def valid(folder: Path, name: str) -> list[Issued]:
    """Returns the node's certificates that are not revoked."""
    return [one for one in list_issued(folder) if one.name == name and not one.revoked]


def _issued(data: bytes, listed: Mapping[int, datetime.datetime]) -> Issued:
    one = x509.load_pem_x509_certificate(data)
    own = parse_peer_certificate(one)
    return Issued(own.name, own.serial, one.not_valid_after_utc, own.serial in listed, own.dials_only)


def revoke_serials(folder: Path, key: ec.EllipticCurvePrivateKey, authority: x509.Certificate, serials: set[int]) -> None:
    number, listed = _revocations(folder)
    now = datetime.datetime.now(datetime.UTC)
    data = _list(key, authority, listed | dict.fromkeys(serials, now), number + 1)
    nodes = [path for path in (folder / NODES).glob("[!.]*") if path.is_dir()]
    write_whole({path / REVOKED: data for path in (folder, *nodes)}, durable=True)


def _revocations(folder: Path) -> tuple[int, dict[int, datetime.datetime]]:
    def listed(data: bytes) -> tuple[int, dict[int, datetime.datetime]]:
        revocation_list = x509.load_pem_x509_crl(data)
        number = revocation_list.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        return number, {one.serial_number: one.revocation_date_utc for one in revocation_list}

    return parsed(folder / REVOKED, listed, "revocation list")


def _list(key: ec.EllipticCurvePrivateKey, authority: x509.Certificate, listed: Mapping[int, datetime.datetime],
          number: int) -> bytes:
    # The list is valid as long as the CA: an expired list must not end a job.
    builder = (x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
               .last_update(authority.not_valid_before_utc).next_update(authority.not_valid_after_utc)
               .add_extension(x509.CRLNumber(number), critical=False))
    for serial, when in listed.items():
        builder = builder.add_revoked_certificate(
            x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when).build())
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def load(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    ca = parsed(folder / CA, x509.load_pem_x509_certificate, "certificate")
    now = datetime.datetime.now(datetime.UTC)
    if not ca.not_valid_before_utc <= now <= ca.not_valid_after_utc:
        raise InvalidInput("E-KEYS", f"the CA in {folder} is valid from {ca.not_valid_before_utc:%Y-%m-%d} to "
                                     f"{ca.not_valid_after_utc:%Y-%m-%d}, but this machine's clock shows {now:%Y-%m-%d}: "
                                     "correct the clock, or create another CA with `commlayer keys init --dir`")
    key = parsed(folder / CA_KEY, lambda data: serialization.load_pem_private_key(data, None), "key")
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise InvalidInput("E-KEYS", f"{folder / CA_KEY} is not the key of {folder / CA}; {_remedy(folder / CA_KEY)}")
    return key, ca


def parsed(path: Path, parse: Callable[[bytes], T], what: str) -> T:
    data = read(path)
    try:
        return parse(data)
    except Exception:  # parsers raise many types, and their messages do not help users
        raise InvalidInput("E-KEYS", f"{path} is damaged: it does not contain a {what}; {_remedy(path)}") from None


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput("E-KEYS", f"{path} cannot be read: {error.strerror}; {_remedy(path)}") from None


def _remedy(path: Path) -> str:
    """Returns advice for the user if the CA's file `path` is damaged or missing. Every node's folder has copies of the CA's
    public files. An older revocation list would admit revoked certificates."""
    if path.name == CA_KEY:
        return ("restore it from a backup of that folder; without one create a new CA with `commlayer keys init --dir`, and "
                "new keys for every node")
    if path.parent.name == ISSUED:
        return (f"restore it from a backup, or copy the node's {CERTIFICATE} to this name: a certificate that is missing here "
                "cannot be revoked")
    newest = " that has the newest version" if path.name == REVOKED else ""
    return f"copy it from a node's folder{newest}, for example {path.parent / NODES / 'NAME' / path.name}"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the CA's folder against other processes and threads. Raises InvalidInput after LOCK_S."""
    try:
        descriptor = os.open(folder / CA_KEY, os.O_RDONLY)
    except OSError as error:
        raise InvalidInput("E-KEYS",
                           f"{folder} contains no CA ({error.strerror}): create one with `commlayer keys init --dir "
                           f"{folder}`, or name another folder with --dir") from None
    try:
        if not try_lock(descriptor, LOCK_S):
            raise InvalidInput("E-KEYS", f"{folder}: another process has used this folder for {LOCK_S:g} s; end it: look for a "
                                         "stopped `commlayer keys`")
        yield
    finally:
        os.close(descriptor)


def make_folder(place: Path, contents: Mapping[str, bytes], folders: tuple[str, ...], *, new: bool = False) -> None:
    """Creates a folder atomically, readable by its owner only. After a failure the previous folder is still in place. `new`:
    fails if the folder exists and is not empty."""
    part = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    former = place.with_name(f".{place.name}.{secrets.token_hex(4)}.former")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir(mode=0o700)
    except OSError as error:
        raise InvalidInput("E-KEYS",
                           f"{place} cannot be created in {place.parent.absolute()}: {error.strerror}; choose a "
                           "writable folder") from None
    try:
        for name in folders:
            (part / name).mkdir(mode=0o700)
        write_whole({part / name: data for name, data in contents.items()}, durable=True, mode=0o600)
        if not new and place.exists() and any(place.iterdir()):
            place.rename(former)
        try:
            part.rename(place)  # fails over a folder that is not empty
        except OSError:
            if former.exists():
                former.rename(place)
            elif new and place.exists():
                raise InvalidInput("E-KEYS",
                                   f"{place}: another process created this folder in the meantime; name another "
                                   "folder") from None
            raise
        sync(place.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _signed(key: ec.EllipticCurvePrivateKey, issuer: x509.Name, subject: x509.Name, public: ec.EllipticCurvePublicKey,
            start: datetime.datetime, end: datetime.datetime, *extensions: x509.ExtensionType,
            authority: bool = False) -> x509.Certificate:
    """Makes a certificate. `authority`: that of a CA, which signs certificates and revocation lists."""
    usage = x509.KeyUsage(
        digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False)
    builder = (x509.CertificateBuilder().issuer_name(issuer).subject_name(subject).public_key(public)
               .serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(end)
               .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
               .add_extension(usage, critical=True))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, hashes.SHA256())


def _times(days: int) -> tuple[datetime.datetime, datetime.datetime]:
    now = datetime.datetime.now(datetime.UTC)
    return now - EARLIER, now + datetime.timedelta(days=days)


def _check_days(days: int) -> None:
    if not 1 <= days <= MOST_DAYS:
        raise InvalidInput("E-CLI-OPTION", f"days: got {days}, allowed: 1 to {MOST_DAYS}")


def private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
