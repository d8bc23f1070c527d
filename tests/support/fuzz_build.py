"""Builds what fuzzing runs under sanitizers: the libFuzzer target over the C header, and the Python module with its kernels."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

from support import ROOT

NATIVE = ROOT / "native"
CORPUS = ROOT / "tests" / "corpus" / "kernels.txt"
"""One input of the libFuzzer target a line, in hex: together they reach what fuzzing has reached."""
NEARLY = (
    "0003000206",  # Elias-Fano: the same position twice, without low bits
    "00400002210006",  # with low bits
    "00400002220006",  # falling within one upper part
    "000300010102",  # a position that is n
    "0103000108",  # bitmap: a bit past n
    "02400002010000000103",  # blocks: a mask cut short
    "024000000100000001" + "0000",  # a block without a position
    "021400010100000002" + "2000",  # a position past n in the last block
)
"""Hand-made seeds: input that a slightly too wide check would accept. Coverage alone does not find it."""

CLANG = shutil.which("clang++")
GCC = shutil.which("g++")
FUZZER = ["-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


class CannotBuild(RuntimeError):
    """The reason in one line, followed by the compiler's output."""


def sources() -> list[Path]:
    """The kernels, without the glue to Python."""
    return [p for p in sorted((NATIVE / "src").glob("*.cc")) if not p.name.startswith(("module", "arguments", "glue"))]


def compile_to(out: Path, command: list[str], timeout_s: float) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    result = subprocess.run([*command, "-o", str(out)], capture_output=True, text=True, timeout=timeout_s, check=False)
    if result.returncode:
        raise CannotBuild(f"{command[0]} cannot build {out.name}:\n{result.stderr[-4000:]}")
    return out


def fuzzer(out: Path, timeout_s: float = 170.0) -> Path:
    """The libFuzzer target."""
    if CLANG is None:
        raise CannotBuild("there is no clang++, which libFuzzer comes with")
    empty = out.with_name("empty.cc")
    empty.parent.mkdir(parents=True, exist_ok=True)
    empty.write_text('extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n')
    try:
        compile_to(out.with_name("empty"), [CLANG, *FUZZER, str(empty)], 60.0)
    except CannotBuild:
        raise CannotBuild("this clang++ has no libFuzzer or no sanitizer runtime") from None
    common = [CLANG, "-std=c++17", "-O1", "-g1", "-ffp-contract=off", *FUZZER, f"-I{NATIVE / 'include'}"]
    return compile_to(out, [*common, *map(str, sources()), str(NATIVE / "tests" / "fuzz.cc")], timeout_s)


def unpack(folder: Path) -> Path:
    """The corpus as the files that libFuzzer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, line in enumerate([*NEARLY, *CORPUS.read_text().split()]):
        (folder / f"{number:04}").write_bytes(bytes.fromhex(line))
    return folder


def pack(target: Path, folder: Path, scratch: Path) -> int:
    """Minimizes a folder to the inputs needed for its coverage. Returns their number."""
    scratch.mkdir(parents=True)
    subprocess.run([target, "-merge=1", "-max_len=200", "-verbosity=0", scratch, folder], capture_output=True, check=True)
    lines = sorted(p.read_bytes().hex() for p in scratch.iterdir())
    CORPUS.write_text("".join(f"{line}\n" for line in lines if line))
    return len(lines)


def module(out: Path, timeout_s: float = 600.0) -> Path:
    """The Python module under the address and undefined-behaviour sanitizers, which replaces the installed one."""
    import nanobind

    if GCC is None:
        raise CannotBuild("there is no g++")
    nano = Path(nanobind.include_dir())
    includes = [sysconfig.get_path("include"), nano, nano.parent / "ext" / "robin_map" / "include", NATIVE / "include"]
    glue = [p for p in sorted((NATIVE / "src").glob("*.cc")) if p not in sources()]
    command = [GCC, "-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", *SANITIZE]
    command += [f"-I{path}" for path in includes]
    return compile_to(out, [*command, *map(str, [*sources(), *glue]), str(nano.parent / "src" / "nb_combined.cpp")], timeout_s)


def preload() -> str:
    """LD_PRELOAD value with which a Python without sanitizers can load the module."""
    assert GCC is not None
    results = [subprocess.run([GCC, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
               for name in ("libasan.so", "libubsan.so")]
    return " ".join(results)
