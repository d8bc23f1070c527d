"""Keys for tests: a CA with good nodes, one made earlier or later, one that is revoked, and a CA of another job."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed")
from cryptography import x509

from commlayer.cluster.keys import authority
from commlayer.transport.keys.key_folder import PeerCertificate, parse_peer_certificate

DAY = datetime.timedelta(days=1)


@contextmanager
def another_day(days: int) -> Iterator[None]:
    """Certificates created inside are valid for one day, that many days from now."""
    start = datetime.datetime.now(datetime.UTC) + days * DAY
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(authority, "_times", lambda _: (start, start + DAY))
        yield


class Folders:
    """Key folders of all kinds of nodes, created once."""

    def __init__(self, root: Path) -> None:
        self.ca, other = root / "job", root / "other"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.fsync", lambda _: None)  # tests outlive no power failure
            authority.init(self.ca)
            authority.init(other)
            self.server, self.worker = authority.add(self.ca, "server-1"), authority.add(self.ca, "gpu-1")
            self.second, self.dials = authority.add(self.ca, "gpu-2"), authority.add(self.ca, "gpu-3", dials_only=True)
            self.foreign = authority.add(other, "gpu-1")
            with another_day(-2):
                self.expired = authority.add(self.ca, "gpu-old")
            with another_day(2):
                self.early = authority.add(self.ca, "gpu-early")
            self.revoked = authority.add(self.ca, "gpu-gone")
            authority.revoke(self.ca, "gpu-gone")


@pytest.fixture(scope="module", name="folders")
def made_folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("keys"))


class RawKeys:
    """Keys without any check: shows any certificate, or none."""

    def __init__(self, trust: Path, folder: Path | None, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> None:
        self.trust, self.folder, self._newest = trust, folder, newest
        self.own = PeerCertificate("nobody", 0, b"")
        if folder is not None:
            mine = x509.load_pem_x509_certificate((folder / "node.pem").read_bytes())
            self.own = parse_peer_certificate(mine)

    def revoked(self) -> frozenset[int]:
        return frozenset()

    def context(self, protocol: str, *, server: bool) -> ssl.SSLContext:
        result = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        result.check_hostname = False
        result.load_verify_locations(self.trust / "ca.pem")
        result.maximum_version = self._newest
        result.set_alpn_protocols([protocol])
        if self.folder is not None:
            result.load_cert_chain(self.folder / "node.pem", self.folder / "node.key")
        return result
