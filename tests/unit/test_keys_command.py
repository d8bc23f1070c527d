"""`commlayer keys`: files, permissions, and atomic writes."""

from __future__ import annotations

import datetime
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("cryptography", reason="cryptography is not installed")
from cryptography import x509

from commlayer.cli.main import app
from commlayer.cluster.keys import authority
from commlayer.errors import RecordError
from commlayer.transport.keys.key_folder import Keys


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    authority.init(tmp_path / "keys")
    return tmp_path / "keys"


def said(*command: object) -> str:
    done = CliRunner().invoke(app, ["keys", *map(str, command)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_printed_commands_work_in_sequence(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert f"next: commlayer keys add NAME --dir {folder}" in said("init", "--dir", folder)
    place = folder / "nodes" / "gpu-2"
    copy = f"scp -rp {place} gpu-2:commlayer-keys; then set COMMLAYER_KEYS=commlayer-keys"
    assert copy in said("add", "gpu-2", "--dir", folder)
    assert f"copy {folder}/crl.pem" in said("revoke", "gpu-2", "--dir", folder)
    assert "gpu-2 was already revoked" in said("revoke", "gpu-2", "--dir", folder)
    home = said("add", "gpu-2", "--dir", folder, "--dials-only")
    assert f"tar -czf gpu-2.tgz -C {folder / 'nodes'} gpu-2" in home, "nothing can be copied into a home"
    assert "scp" not in home
    states = [line.split()[3:] for line in said("list", "--dir", folder).splitlines()]
    assert states == [["revoked"], ["good,", "dials", "only"]]


def test_secrets_are_readable_by_their_owner_only_and_no_other_file_remains(ca: Path) -> None:
    place = authority.add(ca, "gpu-1")
    for path in (ca / "ca.key", ca / "token", place / "node.key", place / "token"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for path in (ca, ca / "nodes", place):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert sorted(os.listdir(place)) == ["ca.pem", "crl.pem", "node.key", "node.pem", "token"]
    assert sorted(os.listdir(ca)) == ["ca.key", "ca.pem", "crl.pem", "issued", "nodes", "token"]
    assert os.listdir(ca / "nodes") == ["gpu-1"]
    assert os.listdir(ca.parent) == ["keys"]


def test_revoked_name_is_on_every_list_and_its_next_certificate_is_not(ca: Path) -> None:
    places = [authority.add(ca, name) for name in ("gpu-1", "gpu-2")]
    first = Keys(places[0])
    other = Keys(places[1])
    assert other.revoked() == frozenset()
    assert authority.revoke(ca, "gpu-1") == 1
    assert other.revoked() == first.revoked() == {first.own.serial}, "read again, since the file has changed"
    again = Keys(authority.add(ca, "gpu-1"))
    assert again.own.name == "gpu-1"
    assert again.own.serial not in again.revoked()
    newest = Keys(authority.add(ca, "gpu-1", again=True))
    assert newest.revoked() == {first.own.serial, again.own.serial}


def test_damaged_or_foreign_revocation_list_has_no_effect(ca: Path, tmp_path: Path) -> None:
    place = authority.add(ca, "gpu-1")
    gone, older = Keys(authority.add(ca, "gpu-2")).own.serial, (place / "crl.pem").read_bytes()
    authority.revoke(ca, "gpu-2")
    keys, good = Keys(place), (place / "crl.pem").read_bytes()
    before = keys.revoked()
    assert before == {gone}
    (place / "crl.pem").write_bytes(older)
    assert keys.revoked() == before, "a list that is older than the last one readmits no node"
    authority.init(tmp_path / "other")
    for data in (b"", good[:-100], (tmp_path / "other" / "crl.pem").read_bytes()):
        (place / "crl.pem").write_bytes(data)
        assert keys.revoked() == before
        with pytest.raises(RecordError, match=f"{place}/crl.pem .*E-KEYS"):
            Keys(place)
    (place / "crl.pem").unlink()
    assert keys.revoked() == before


def test_concurrent_commands_lose_nothing(ca: Path) -> None:
    names = [f"n{i}" for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: authority.add(ca, name), names))
        list(threads.map(lambda name: authority.revoke(ca, name), names))
    assert [(one.name, one.revoked) for one in authority.list_issued(ca)] == [(name, True) for name in names]
    assert len(Keys(ca / "nodes" / "n0").revoked()) == len(names)


def test_interrupted_command_leaves_the_old_files(ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = authority.add(ca, "gpu-1")
    before = {path: path.read_bytes() for path in place.iterdir()}

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for call in (lambda: authority.add(ca, "gpu-2"), lambda: authority.add(ca, "gpu-1", again=True),
                     lambda: authority.init(ca.parent / "more")):
            with pytest.raises(OSError, match="No space left"):
                call()
    assert os.listdir(ca / "nodes") == ["gpu-1"]
    assert {path: path.read_bytes() for path in place.iterdir()} == before
    assert os.listdir(ca.parent) == ["keys"]
    assert not [name for name in os.listdir(ca / "issued") if not name.endswith(".pem")]


BAD = [
    (("init", "--dir", "{ca}"), "/keys: .*--dir.*`commlayer keys add NAME`.*E-KEYS"),
    (("init", "--dir", "{new}", "--days", "0"), r"days: .*\b0, .*1 to 3650.*E-CLI-OPTION"),
    (("add", "../x", "--dir", "{ca}"), r"'\.\./x'.*1 to 63 .*E-CLI-OPTION"),
    (("add", "gpu-1", "--dir", "{ca}"), "^gpu-1 .*/keys/nodes/gpu-1; --again .*E-KEYS"),
    (("add", "gpu-2", "--dir", "{new}"), "/new .*`commlayer keys init --dir.*E-KEYS"),
    (("revoke", "gpu-9", "--dir", "{ca}"), "^gpu-9: .*/keys .*: gpu-1 .*E-KEYS"),
    (("list", "--dir", "{new}"), "/new .*`commlayer keys init`.*E-KEYS"),
]


@pytest.mark.parametrize(("command", "line"), BAD)
def test_user_error_is_one_line(ca: Path, command: tuple[str, ...], line: str) -> None:
    authority.add(ca, "gpu-1")
    before = sorted(map(str, ca.rglob("*")))
    words = [word.format(ca=ca, new=ca.parent / "new") for word in command]
    with pytest.raises(ValueError, match=line) as caught:
        CliRunner().invoke(app, ["keys", *words], catch_exceptions=False)
    assert "\n" not in str(caught.value)
    assert sorted(map(str, ca.rglob("*"))) == before
    assert not (ca.parent / "new").exists()


DAMAGED = [
    ("crl.pem", "list", "does not contain a revocation list.*/nodes/NAME/crl.pem"),
    ("crl.pem", "revoke gpu-1", "does not contain a revocation list.*/nodes/NAME/crl.pem"),
    ("ca.pem", "add gpu-9", "does not contain a certificate.*/nodes/NAME/ca.pem"),
    ("ca.key", "add gpu-9", "does not contain a key.* backup of that folder"),
    ("issued/gpu-1", "list", "does not contain a certificate.* from a backup, "),
]
MISSING = [("crl.pem", "list"), ("crl.pem", "add gpu-9"), ("ca.pem", "revoke gpu-1"), ("token", "add gpu-9")]


def told(ca: Path, command: str) -> str:
    """The error line; nothing has changed."""
    before = sorted(map(str, ca.rglob("*")))
    with pytest.raises(ValueError, match=r".") as caught:
        CliRunner().invoke(app, ["keys", *command.split(), "--dir", str(ca)], catch_exceptions=False)
    assert sorted(map(str, ca.rglob("*"))) == before
    line = str(caught.value)
    assert "\n" not in line
    assert "cryptography.io" not in line
    return line


@pytest.mark.parametrize(("file", "command", "line"), DAMAGED)
def test_damaged_file_is_named_with_a_remedy(ca: Path, file: str, command: str, line: str) -> None:
    authority.add(ca, "gpu-1")
    (damaged,) = ca.glob(f"{file}*")
    damaged.write_text("-----BEGIN CERTIFICATE-----\nrubbish\n")
    assert re.match(f"{damaged} .*{line}.*E-KEYS", told(ca, command))


@pytest.mark.parametrize(("file", "command"), MISSING)
def test_missing_file_is_named_with_a_remedy(ca: Path, file: str, command: str) -> None:
    authority.add(ca, "gpu-1")
    (ca / file).unlink()
    assert re.match(f"{ca / file} .*No such file or directory; .*/nodes/NAME/{file}.*E-KEYS", told(ca, command))


@pytest.mark.parametrize(("file", "named"), [("node.pem", "/node.pem "), ("ca.pem", "/ca.pem "), ("node.key", " .*node.key ")])
def test_damaged_node_file_is_named_with_a_remedy(ca: Path, file: str, named: str) -> None:
    place = authority.add(ca, "gpu-1")
    (place / file).write_text("-----BEGIN CERTIFICATE-----\nrubbish\n")
    with pytest.raises(RecordError, match=f"keys: {place}{named}.*`commlayer keys`.*E-KEYS"):
        Keys(place)


def test_folder_without_node_keys_is_refused_with_a_hint(ca: Path) -> None:
    place = authority.add(ca, "gpu-1")
    with pytest.raises(RecordError, match=rf"{ca}/node.pem .*{ca}/nodes/\* \[E-KEYS"):
        Keys(ca)
    with pytest.raises(RecordError, match=rf"{ca.parent}/ca.pem .*No such file.*`commlayer keys add NAME`.*E-KEYS"):
        Keys(ca.parent)
    (place / "node.pem").write_bytes(b"nothing")
    with pytest.raises(RecordError, match=rf"{place}/node.pem .*E-KEYS"):
        Keys(place)


def test_expired_certificates_and_lists_are_reported_with_their_date(ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = authority.add(ca, "gpu-1", days=1)
    result = x509.load_pem_x509_certificate((place / "node.pem").read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    assert result.not_valid_before_utc < now < result.not_valid_after_utc < now + datetime.timedelta(days=1)
    for days in (-2, 2):  # it is over; it is not there yet
        start = now + datetime.timedelta(days=days)
        monkeypatch.setattr(authority, "_times", lambda _, start=start: (start, start + datetime.timedelta(days=1)))
        place = authority.add(ca, f"gpu{abs(days)}{days > 0}")
        with pytest.raises(RecordError, match=rf"gpu{abs(days)}{days > 0} .*E-CERTIFICATE-DATE"):
            Keys(place)
