"""The libFuzzer target over the C header's decoders: what is kept, and a short run from there. `make fuzz` runs longer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support import fuzz_build


@pytest.mark.timeout(300)
def test_no_bytes_lead_a_decoder_astray(tmp_path: Path) -> None:
    try:
        target = fuzz_build.fuzzer(tmp_path / "kernels")
    except fuzz_build.CannotBuild as reason:
        if "\n" in str(reason):
            raise
        pytest.skip(str(reason))
    corpus = fuzz_build.unpack(tmp_path / "corpus")
    assert any(corpus.iterdir())
    command = [target, "-runs=30000", "-max_len=400", "-seed=7", "-verbosity=0", f"-artifact_prefix={tmp_path}/",
               "-print_final_stats=1", corpus]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "number_of_executed_units: 3" in ran.stderr
