"""The .cu files under NVIDIA's compiler, where it is installed, and the finding of them. No GPU is needed.

COMMLAYER_CUDA_TARGETS="75 80 86 89 90 100 120" compiles for all that the project names; `make cuda` does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.cuda import CUDA, KERNEL

from commlayer.errors import InvalidInput
from commlayer.gpu import launch
from commlayer.gpu.launch import OPTIONS

NVCC = shutil.which("nvcc")
TARGETS = os.environ.get("COMMLAYER_CUDA_TARGETS", "75 120").split()
FAMILIES = sorted(file.stem for file in CUDA.glob("*.cu"))


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
def test_every_family_compiles_for_the_target(target: str, tmp_path: Path) -> None:
    """As the text that is compiled at run time, headers in it, with the options used there; no register is spilled.

    177: a family does not use every function of its headers.
    """

    def compile_one(family: str) -> str:
        source = tmp_path / f"{family}.cu"
        source.write_text(launch.source_text(family))
        command = [str(NVCC), *OPTIONS, f"-arch=sm_{target}", "-cubin", "-Xptxas=-v"]
        command += ["-Werror=all-warnings", "-diag-suppress=177", "-o", str(tmp_path / f"{family}.cubin"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        spills = [line for line in done.stderr.splitlines() if "spill" in line and " 0 bytes spill stores" not in line]
        return done.stderr if done.returncode else "\n".join(spills)

    with ThreadPoolExecutor(2) as pool:
        problems = dict(zip(FAMILIES, pool.map(compile_one, FAMILIES), strict=True))
    assert {family: text for family, text in problems.items() if text} == {}


def test_sources_are_found_beside_an_editable_install_and_in_the_package(tmp_path: Path) -> None:
    assert launch.source_folder() == CUDA
    installed = tmp_path / "_cuda"
    installed.mkdir()
    with pytest.raises(InvalidInput, match="_cuda.*E-GPU-CODE"):
        launch.source_folder((tmp_path / "cuda", installed))
    (installed / "common.cuh").write_text("")
    assert launch.source_folder((tmp_path / "cuda", installed)) == installed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_one_text_with_every_header_once(family: str) -> None:
    text = launch.source_text(family)
    assert "#include" not in text
    assert text.count("#define CML_COMMON\n") == 1
    assert KERNEL.findall(text)


def test_kernels_have_names_of_their_own() -> None:
    names = [name for file in CUDA.glob("*.cu") for name in KERNEL.findall(file.read_text())]
    assert len(names) == len(set(names)) > 20
