"""Kernels of other builds: under sanitizers and libFuzzer, for 64-bit ARM under emulation, and an install without a compiler.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.fuzz_build import NATIVE, ROOT, SANITIZE, CannotBuild, compile_to, fuzzer, sources, unpack

ARM, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
HERE = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
STRICT = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE / 'include'}"]


def built(compiler: str, folder: Path, program: str, *flags: str) -> Path:
    """native/tests/PROGRAM and the kernels, two files at a time."""
    folder.mkdir()

    def compiled(source: Path) -> str:
        return str(compile_to(folder / f"{source.stem}.o", [compiler, *STRICT, *flags, "-c", str(source)], 100))

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, [*sources(), NATIVE / "tests" / f"{program}.cc"]))
    return compile_to(folder / program, [compiler, *flags, *objects], 60)


def output(*command: str | Path) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    return ran.stdout


@pytest.mark.timeout(200)
def test_kernels_stay_inside_their_buffers(tmp_path: Path) -> None:
    if HERE is None:
        pytest.skip("no C++ compiler")
    probe = tmp_path / "probe.cc"
    probe.write_text("int main() { return 0; }\n")
    try:
        compile_to(tmp_path / "probe", [HERE, *SANITIZE, str(probe)], 60)
    except CannotBuild:
        pytest.skip("the compiler has no sanitizer runtime")
    assert "portable ran" in output(built(HERE, tmp_path / "sanitized", "driver", "-g1", *SANITIZE))


@pytest.mark.timeout(300)
def test_decoders_survive_malformed_bytes(tmp_path: Path) -> None:
    """Starts from the stored corpus. `make fuzz` runs longer."""
    try:
        target = fuzzer(tmp_path / "kernels")
    except CannotBuild as reason:
        if "\n" in str(reason):
            raise
        pytest.skip(str(reason))
    corpus = unpack(tmp_path / "corpus")
    assert any(corpus.iterdir())
    command = [target, "-runs=30000", "-max_len=400", "-seed=7", "-verbosity=0", f"-artifact_prefix={tmp_path}/",
               "-print_final_stats=1", corpus]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "number_of_executed_units: 3" in ran.stderr


@pytest.mark.parametrize(("required", "status"), [("", 0), ("1", 1)])
def test_fuzzing_without_its_tools_reports_what_is_skipped(
    required: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    spec = importlib.util.spec_from_file_location("nightly_fuzz", ROOT / "tests" / "nightly" / "fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    monkeypatch.setattr(fuzz.fuzz_build, "CLANG", None)
    monkeypatch.setattr(fuzz.fuzz_build, "GCC", None)
    monkeypatch.setattr(fuzz.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0))
    monkeypatch.setenv("REQUIRE_TOOLS", required)
    assert fuzz.both(argparse.Namespace(seconds=2, seed=1, write_corpus="")) == status
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["kernels", "codecs"]
    assert all("skipped" in line or "without sanitizers" in line for line in lines)


def digests(*command: str | Path) -> dict[str, dict[str, str]]:
    """{body: {kernel: digest}}."""
    results: dict[str, dict[str, str]] = {}
    for line in output(*command).splitlines():
        body, rest = line.split(": ")
        kernel, digest = rest.rsplit(" ", 1)
        results.setdefault(body, {})[kernel] = digest
    return results


@pytest.mark.timeout(200)
def test_neon_bytes_equal_those_of_every_other_body(tmp_path: Path) -> None:
    if ARM is None or EMULATOR is None or HERE is None:
        pytest.skip("needs aarch64-linux-gnu-g++, qemu-aarch64 and a C++ compiler for this CPU")
    local = digests(built(HERE, tmp_path / "here", "agree"))
    arm = digests(EMULATOR, built(ARM, tmp_path / "arm", "agree", "-static"))
    assert set(arm) == {"neon", "portable"}
    for body, result in {**{f"{name} here": d for name, d in local.items()}, **arm}.items():
        differ = [kernel for kernel, digest in local["portable"].items() if result.get(kernel) != digest]
        assert not differ, f"{body} differs from portable code on this CPU in {', '.join(differ)}"


def test_every_kernel_is_compared() -> None:
    """Otherwise a kernel that the header declares and the driver does not call would go unnoticed."""
    header = (NATIVE / "include" / "commlayer.h").read_text()
    driver = (NATIVE / "tests" / "agree.cc").read_text()
    declared = set(re.findall(r"^\w[\w *]* \**(cml_\w+)\(", header, re.MULTILINE))
    assert len(declared) > 40
    one_body = {"cml_error_name", "cml_flat_positions", "cml_coordinates",
                *(f"cml_schedule_{what}" for what in ("run", "sweep", "scratch", "chains"))}
    assert {name for name in declared if name not in driver} == one_body


CHECK = """
import logging, sys
logging.basicConfig(level=logging.WARNING, format="LOGGED %(message)s", stream=sys.stdout)
import commlayer
import commlayer.native, importlib
from commlayer import native
assert native.core is None
import torch
from commlayer.compressors import parse
from commlayer.records import Spec
for name in ("identity()", "fp16()", "bf16()", "error_feedback(int8())", "error_feedback(topk(ratio=0.1))"):
    codec, spec, x, y = parse(name), Spec((1000,)), torch.linspace(-1, 1, 1000), torch.empty(1000)
    state, room = codec.init(spec), memoryview(bytearray(codec.bound(spec)))
    assert codec.decode(room[: codec.start(x, state, room)], state, y), name
    assert float((x * y).sum()) > 0.2 * float((x * x).sum()), name
assert str(commlayer.__file__).startswith(sys.argv[1]), commlayer.__file__
"""


@pytest.mark.timeout(150)
def test_install_without_a_compiler_works_and_logs_the_fallback_once(tmp_path: Path) -> None:
    missing = [name for name in ("scikit_build_core", "nanobind", "pip") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} to build")
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("commlayer", "native", "cuda"):
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    environment = {k: v for k, v in os.environ.items() if k != "COMMLAYER_REQUIRE_NATIVE" and not k.startswith("SKBUILD")}
    environment |= {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    install = subprocess.run([*command, "--target", str(target), str(source)], env=environment, capture_output=True, text=True,
                             timeout=120, check=False)
    assert install.returncode == 0, install.stderr[-3000:]
    assert not list(target.rglob("_core*.so"))
    assert (target / "commlayer" / "py.typed").is_file(), "users' type checkers read the package's annotations"
    assert (target / "commlayer" / "native.py").exists()
    # -S and an explicit path: an editable install in this environment must not answer for the one under test.
    environment["PYTHONPATH"] = os.pathsep.join([str(target), *(p for p in sys.path if p.endswith("-packages"))])
    ran = subprocess.run([sys.executable, "-S", "-c", CHECK, str(target)], cwd=tmp_path, env=environment, capture_output=True,
                         text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    logged = [line for line in ran.stdout.splitlines() if line.startswith("LOGGED")]
    assert len(logged) == 1, ran.stdout
    assert "slower fallback" in logged[0]
