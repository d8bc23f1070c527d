"""Release artifacts: the source archive, the wheel, the container's steps, and files for contributors."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.processes import ROOT, clean_environment

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def run(*line: str | Path, cwd: Path, timeout_s: float = 200.0, **environment: str) -> str:
    done = subprocess.run([*map(str, line)], cwd=cwd, env=clean_environment() | {"PYTHONPATH": ""} | environment, text=True,
                          capture_output=True, timeout=timeout_s)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive of the files that git knows, and the wheel that is built of the archive."""
    # A folder named build is found as a package, too.
    if importlib.util.find_spec("build") is None or importlib.util.find_spec("build.__main__") is None or \
            shutil.which("git") is None:
        pytest.skip("needs build and git, to build")
    folder = tmp_path_factory.mktemp("release")
    run("git", "clone", "-q", "--no-hardlinks", ROOT, folder / "clone", cwd=folder)
    run(sys.executable, "-m", "build", "-q", "--no-isolation", "-o", folder / "dist", folder / "clone", cwd=folder,
        COMMLAYER_REQUIRE_NATIVE="1", timeout_s=600)
    return folder / "dist"


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


@pytest.mark.timeout(700)
def test_source_archive_has_exactly_what_a_build_needs(built: Path) -> None:
    archive = only(built, f"commlayer-{VERSION}.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2].partition("/")[0] for name in opened.getnames()}
    assert {"commlayer", "native", "cuda", "CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"} <= names
    assert not {".ci", ".github", "bench", "tests"} & names
    assert archive.stat().st_size < 2e6


def test_wheel_is_complete_and_runs_on_older_systems(built: Path) -> None:
    wheel = only(built, "*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert {"commlayer/py.typed", "commlayer/demo/digits.npz", "commlayer/planner/data/learning.json"} <= names
    assert {f"commlayer/planner/data/{table}.toml" for table in ("codecs", "links", "machines", "models", "noise")} <= names
    assert {f"commlayer/observe/pages/{name}" for name in (
        "page.html", "vendor/LICENSE", "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css")} <= names
    assert any(name.startswith("commlayer/_core.") for name in names)
    assert any(name.startswith("commlayer/_cuda/") for name in names)
    assert {name.partition("/")[0] for name in names} == {"commlayer", f"commlayer-{VERSION}.dist-info"}
    if importlib.util.find_spec("auditwheel") is None:
        pytest.skip("auditwheel is not installed")
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel, cwd=built)
    assert re.search(r'"manylinux_2_(\d+)_', shown.replace("\n", " ")), shown


@pytest.mark.timeout(400)
def test_wheel_runs_in_a_separate_environment(built: Path, tmp_path: Path) -> None:
    """With this environment's torch and other dependencies, but without its commlayer."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    packages = tmp_path / "venv" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    with zipfile.ZipFile(only(built, "*.whl")) as opened:
        opened.extractall(packages)
    (packages / "base.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    python = tmp_path / "venv" / "bin" / "python"
    program = "import commlayer, commlayer.native as n; print(n.core.__file__, commlayer.__version__)"
    where = run(python, "-c", program, cwd=tmp_path)
    assert where.startswith(str(packages))
    assert where.split()[1] == VERSION
    assert run(python, "-m", "commlayer", "--version", cwd=tmp_path).strip() == f"commlayer {VERSION}"
    out = run(python, "-m", "commlayer", "demo", "--homes", "2", "--seconds", "10", cwd=tmp_path, timeout_s=300)
    assert "\nResult: seconds to loss " in out


COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_dockerfile_copies_existing_files() -> None:
    lines = re.findall(r"^COPY (?!--from)(?:--chown=\S+ )?(.*) \S+$", DOCKERFILE, re.MULTILINE)
    copied = [name for line in lines for name in line.split()]
    kept = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(kept)
    assert all((ROOT / name).exists() for name in copied)
    assert 'ENTRYPOINT ["commlayer"]' in DOCKERFILE


def test_image_runs_as_a_user_with_pinned_packages() -> None:
    """A package that the constraints lack could have any version that an index serves on that day."""
    assert re.search(r"^ARG BASE=python:\d+\.\d+\.\d+-\S+$", DOCKERFILE, re.MULTILINE), "an exact version"
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    (user,) = re.findall(r"^USER (\S+)$", last, re.MULTILINE)
    assert user not in ("root", "0")
    assert last.index("\nUSER ") < last.index("\nENTRYPOINT ")
    runs = [run for run in re.findall(r"^RUN (?:.*\\\n)*.*$", DOCKERFILE, re.MULTILINE) if "pip " in run]
    assert [run for run in runs if "constraints.txt" not in run] == []
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert closure("commlayer", "scikit-build-core", "nanobind", "cmake", "ninja") - {"commlayer"} <= pinned


def closure(*names: str) -> set[str]:
    """These packages and what they need, as installed here."""
    seen, left = set[str](), [*names]
    while left:
        name = canonicalize_name(left.pop())
        if name not in seen:
            seen.add(name)
            needs = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
            left += [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
    return seen


def test_each_service_mounts_only_its_own_keys() -> None:
    """The CA's key can admit any machine; only the service that creates keys, and ends, has it."""
    mounts = {name: [(one["source"], one["target"], one.get("read_only"), one.get("volume", {}).get("subpath"))
                     for one in service["volumes"]] for name, service in COMPOSE["services"].items()}
    assert mounts.pop("keys") == [("keys", "/keys", None, None)]
    assert mounts == {name: [("keys", "/keys", True, f"job/nodes/{name}")] for name in ("server", "home-1", "home-2")}


@pytest.mark.timeout(200)
def test_compose_file_trains(tmp_path: Path) -> None:
    """Each service's command, on this machine: with a folder for the volume, and this machine for the server's name."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "commlayer").write_text(f'#!/bin/sh\nexec {sys.executable} -m commlayer "$@"\n')
    (bin_ / "commlayer").chmod(0o755)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environment = clean_environment() | {"PATH": f"{bin_}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    port = 20000 + os.getpid() % 10000

    def start(service: str) -> subprocess.Popen[str]:
        entry = COMPOSE["services"][service].get("entrypoint", ["commlayer"])
        (mount,) = COMPOSE["services"][service]["volumes"]
        keys = tmp_path / "volume" / mount.get("volume", {}).get("subpath", "")
        line = [re.sub(r"/keys\b", str(keys), word).replace("0.0.0.0:7000", f"127.0.0.1:{port}")
                .replace("server:7000", f"127.0.0.1:{port}") for word in (*entry, *COMPOSE["services"][service]["command"])]
        line = ["127.0.0.1" if word == "server" else word for word in line]
        folder = tmp_path / service
        folder.mkdir()
        (folder / "examples").symlink_to(tmp_path / "examples")
        return subprocess.Popen(line, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    (tmp_path / "volume").mkdir()
    assert start("keys").wait(60) == 0
    server = start("server")
    try:
        assert server.stdout is not None
        server.stdout.readline()
        homes = [start(name) for name in COMPOSE["services"] if name.startswith("home")]
        outs = [home.communicate(timeout=120)[0] for home in homes]
        assert [home.returncode for home in homes] == [0, 0], outs
        assert sum("epoch 2: loss" in out for out in outs) == 1
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("name", ["CITATION.cff", ".pre-commit-config.yaml", "compose.yaml",
                                  *(f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "estimate", "config"))])
def test_yaml_files_parse(name: str) -> None:
    assert isinstance(yaml.safe_load((ROOT / name).read_text()), dict)


def test_version_is_defined_in_one_place() -> None:
    line = ["git", "grep", "-liE", rf"version\W{{0,6}}{re.escape(VERSION)}\b", "--", ":!tests"]
    assert subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split() == ["pyproject.toml"]


def test_cibuildwheel_builds_both_wheels_for_both_processors(tmp_path: Path) -> None:
    if importlib.util.find_spec("cibuildwheel") is None:
        pytest.skip("cibuildwheel is not installed")
    for arch in ("x86_64", "aarch64"):
        names = run(sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--archs", arch, "--print-build-identifiers",
                    ROOT, cwd=tmp_path).split()
        assert names == [f"cp311-manylinux_{arch}", f"cp312-manylinux_{arch}"]
