"""The long fuzzing: `python tests/nightly/fuzz.py --seconds 300`, which is `make fuzz`; with sanitizers if available.

Half of the time goes to the kernels (libFuzzer), half to the codecs (fuzzing.py). A finding is printed as a line for
tests/corpus/payloads.txt, or left as a file that libFuzzer names.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from support import fuzz_build

LONGEST = 400
"""Characters of a line that is kept."""

BUILD = fuzz_build.ROOT / "build" / "fuzz"


def load_core(path: Path) -> None:
    """Puts the sanitized module where commlayer looks for its core."""
    spec = importlib.util.spec_from_file_location("commlayer._core", path)
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    sys.modules["commlayer._core"] = core
    spec.loader.exec_module(core)


def codecs(args: argparse.Namespace) -> int:
    """In this process."""
    if args.core:
        load_core(args.core)
    from support import fuzzing

    from commlayer.native import core

    print(f"codecs: the native core is {core and core.__file__}")
    keep: dict[str, str] = {}
    result = fuzzing.run(args.seed, seconds=args.seconds, keep=keep)
    readers = len(fuzzing.targets())
    print(f"codecs: {result} attacks on {readers} readers, seed {args.seed}, {len(keep)} refusals, nothing found")
    if args.write_corpus:
        known = {} if args.write_corpus == "replace" else {line: line for line in fuzzing.CORPUS.read_text().splitlines()}
        results = {line: line for line in keep.values() if len(line) <= LONGEST}
        fuzzing.CORPUS.write_text("".join(f"{line}\n" for line in sorted(known | results)))
    return 0


def both(args: argparse.Namespace) -> int:
    """Each half in a separate process."""
    half_s, failures = max(1, args.seconds // 2), 0
    try:
        target = fuzz_build.fuzzer(BUILD / "kernels")
        corpus = fuzz_build.unpack(BUILD / "corpus")
        command = [target, f"-max_total_time={half_s}", "-max_len=600", f"-seed={args.seed % 2**32}", "-verbosity=0",
                   f"-artifact_prefix={BUILD}/", "-print_final_stats=1", corpus]
        failures += subprocess.run(command, check=False).returncode != 0
        if args.write_corpus:
            shutil.rmtree(BUILD / "merged", ignore_errors=True)
            print(f"kernels: {fuzz_build.pack(target, corpus, BUILD / 'merged')} inputs kept")
    except fuzz_build.CannotBuild as reason:
        failures += _skipped("kernels: skipped, nothing fuzzed", reason)
    again = [sys.executable, __file__, "--codecs", f"--seconds={half_s}", f"--seed={args.seed}"]
    again += ["--write-corpus", args.write_corpus] * bool(args.write_corpus)
    environment = dict(os.environ)
    try:
        again += ["--core", str(fuzz_build.module(BUILD / "_core.so"))]
        environment |= {"LD_PRELOAD": fuzz_build.preload(), "ASAN_OPTIONS": "detect_leaks=0"}
    except fuzz_build.CannotBuild as reason:
        failures += _skipped("codecs: fuzzed without sanitizers", reason)
    failures += subprocess.run(again, env=environment, check=False).returncode != 0
    return 1 if failures else 0


def _skipped(what: str, reason: fuzz_build.CannotBuild) -> bool:
    """Reports what a missing tool prevents. Returns whether that is a failure, as it is if all tools are required."""
    required = bool(os.environ.get("REQUIRE_TOOLS"))
    print(f"{what}: {reason}" + " (REQUIRE_TOOLS is set, so this is a failure)" * required)
    return required


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--codecs", action="store_true", help="only the codecs, in this process")
    parser.add_argument("--core", type=Path, help="the native module to run with")
    parser.add_argument("--write-corpus", choices=["more", "replace"], default="", help="keep the shortest of each refusal")
    args = parser.parse_args()
    return codecs(args) if args.codecs else both(args)


if __name__ == "__main__":
    sys.exit(main())
