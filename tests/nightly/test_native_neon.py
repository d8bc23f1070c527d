"""All bodies of all kernels give the same bytes: vectors and portable code, on this CPU and on 64-bit ARM under emulation."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
ARM, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
HERE = shutil.which("g++") or shutil.which("clang++")


def built(compiler: str, folder: Path, *flags: str) -> Path:
    """native/tests/agree.cc and the kernels, two files at a time."""
    sources = [p for p in sorted((NATIVE / "src").glob("*.cc")) if not p.name.startswith(("module", "arguments", "glue"))]
    sources.append(NATIVE / "tests" / "agree.cc")

    def compiled(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE / 'include'}"]
        result = subprocess.run([*command, "-c", source, "-o", out], capture_output=True, text=True, timeout=100, check=False)
        assert result.returncode == 0, result.stderr
        return out

    folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    linked = subprocess.run([compiler, *flags, *objects, "-o", folder / "agree"], capture_output=True, timeout=60, check=False)
    assert linked.returncode == 0, linked.stderr
    return folder / "agree"


def digests(*command: str | Path) -> dict[str, dict[str, str]]:
    """{body: {kernel: digest}}."""
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    results: dict[str, dict[str, str]] = {}
    for line in ran.stdout.splitlines():
        body, rest = line.split(": ")
        kernel, digest = rest.rsplit(" ", 1)
        results.setdefault(body, {})[kernel] = digest
    return results


@pytest.mark.timeout(200)
def test_neon_gives_the_bytes_of_every_other_body(tmp_path: Path) -> None:
    if ARM is None or EMULATOR is None or HERE is None:
        pytest.skip("needs aarch64-linux-gnu-g++, qemu-aarch64 and a C++ compiler for this CPU")
    local = digests(built(HERE, tmp_path / "here"))
    arm = digests(EMULATOR, built(ARM, tmp_path / "arm", "-static"))
    assert set(arm) == {"neon", "portable"}
    for body, result in {**{f"{name} here": d for name, d in local.items()}, **arm}.items():
        differ = [kernel for kernel, digest in local["portable"].items() if result.get(kernel) != digest]
        assert not differ, f"{body} differs from portable code on this CPU in {', '.join(differ)}"


def test_every_kernel_is_digested() -> None:
    """A kernel that the header declares and the driver does not call would pass unseen."""
    header = (NATIVE / "include" / "commlayer.h").read_text()
    driver = (NATIVE / "tests" / "agree.cc").read_text()
    declared = set(re.findall(r"^\w[\w *]* \**(cml_\w+)\(", header, re.MULTILINE))
    assert len(declared) > 40
    one_body = {"cml_error_name", "cml_flat_positions", "cml_coordinates",
                *(f"cml_schedule_{what}" for what in ("run", "sweep", "scratch", "chains"))}
    assert {name for name in declared if name not in driver} == one_body
