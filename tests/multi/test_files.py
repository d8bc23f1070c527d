"""Atomic file writes: a file appears complete or not at all, and concurrent writers never mix."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from commlayer.files import write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_files_are_replaced_together(durable: bool, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b"
    first.write_bytes(b"old")
    write_whole({first: b"new", second: b""}, durable=durable)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.json": b"new", "b": b""}


def test_secret_is_private_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "a", list[int]()
    path.with_name(f"a.{os.getpid()}.part").write_bytes(b"left by a former process of that number")
    monkeypatch.setattr("commlayer.files.sync", lambda p: seen.append(p.stat().st_mode & 0o777))
    before = os.umask(0)
    try:
        write_whole({path: b"new"}, durable=True, mode=0o600)
        write_whole({tmp_path / "b": b"new"})
    finally:
        os.umask(before)
    assert seen[0] == 0o600
    assert [p.stat().st_mode & 0o777 for p in (path, tmp_path / "b")] == [0o600, 0o666]


def test_failed_write_is_named_and_writes_none(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "none" / "b"
    first.write_bytes(b"old")
    with pytest.raises(FileNotFoundError) as raised:
        write_whole({first: b"new", second: b"new"})
    assert (raised.value.filename, raised.value.strerror) == (str(second), "No such file or directory")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def test_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole({tmp_path / "a": b"new"})
    assert [path.is_dir() for path in tmp_path.iterdir()] == [True]


def rewrite(path: Path, times: int) -> None:
    for _ in range(times):
        write_whole({path: str(os.getpid()).encode() * 4096})


def test_concurrent_writers_of_a_file_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        for done in [processes.submit(rewrite, path, 200) for _ in range(2)]:
            done.result()
    complete = path.read_bytes()
    assert complete == complete[: len(complete) // 4096] * 4096
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
