"""The C++ driver over the C header, under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def build(out: Path, *flags: str) -> Path:
    assert COMPILER is not None
    sources = [str(p) for p in sorted((NATIVE / "src").glob("*.cc")) if not p.name.startswith(("module", "arguments", "glue"))]
    command = [COMPILER, "-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", *flags]
    command += [f"-I{NATIVE / 'include'}", *sources, str(NATIVE / "tests" / "driver.cc"), "-o", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("driver")
    probe = folder / "probe.cc"
    probe.write_text("int main() { return 0; }\n")
    command = [COMPILER, *SANITIZE, str(probe), "-o", str(folder / "probe")]
    if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode != 0:
        pytest.skip("the compiler has no sanitizer runtime")
    return build(folder / "driver", *SANITIZE)


@pytest.mark.timeout(200)
def test_no_kernel_touches_memory_that_is_not_its_own(sanitized: Path) -> None:
    ran = subprocess.run([sanitized], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert "portable ran" in ran.stdout
