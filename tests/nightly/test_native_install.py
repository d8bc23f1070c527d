"""Without a compiler the package installs all the same, and says once that it runs on the fallback."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("scikit_build_core", "nanobind", "pip")

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
def test_an_install_without_a_compiler_is_complete_and_says_so_once(tmp_path: Path) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
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
    install = subprocess.run(
        [*command, "--target", str(target), str(source)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert install.returncode == 0, install.stderr[-3000:]
    assert not list(target.rglob("_core*.so"))
    assert (target / "commlayer" / "py.typed").is_file(), "users' type checkers read the package's annotations"
    assert (target / "commlayer" / "native.py").exists()
    # -S and an explicit path: an editable install in this environment must not answer for the one under test.
    packages = [p for p in sys.path if p.endswith("-packages")]
    environment["PYTHONPATH"] = os.pathsep.join([str(target), *packages])
    ran = subprocess.run(
        [sys.executable, "-S", "-c", CHECK, str(target)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    logged = [line for line in ran.stdout.splitlines() if line.startswith("LOGGED")]
    assert len(logged) == 1, ran.stdout
    assert "slower fallback" in logged[0]
