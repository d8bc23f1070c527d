"""The measurement of codecs: every codec is in it, its rows are checked before they are timed, its picture is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import codecs as kit

from bench import codecs, codecs_figures, codecs_plot
from commlayer.compressors import parse
from commlayer.compressors.payload import CODEC_IDS


def test_every_codec_is_measured() -> None:
    assert {parse(text).id for text in codecs.CODECS} == set(CODEC_IDS.values())


@pytest.mark.parametrize("backend", kit.AVAILABLE)
def test_a_row_says_what_was_sent(backend: str) -> None:
    x = kit.noise(1024)
    row = codecs.row("int8()", backend, x, quick=True)
    assert row["bits_per_element"] == pytest.approx(8 * (16 + 4 + 1024) / 1024, abs=1e-3)
    assert 0.004 < row["relative_error"] < 0.01
    assert row["encode_gb_per_s"] == pytest.approx(4096 / row["encode_us"] / 1e3, abs=0.001, rel=0.05)
    two = codecs.row("powersgd(2)", backend, x, quick=True)
    assert two["bits_per_element"] == 8 * 2 * (16 + 4 * 2 * 32) / 1024


def test_figures_of_sparse_payloads() -> None:
    found = codecs_figures.figures(quick=True)
    assert found["bits_per_entry_1pct_int8"] <= 17.5
    assert all(found[f"position_bits_over_entropy_{share}"] <= 1.15 for share in ("01pct", "1pct", "10pct"))
    assert 0.9 < found["threshold_recall_1pct"] <= 1.0
    assert 0.9 <= found["entries_over_k_1pct"] <= 1.1


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    x = kit.noise(1024)
    table = [{**codecs.row(text, kit.AVAILABLE[-1], x, quick=True)} for text in codecs.CODECS]
    table += [{"codec": name, "backend": "torch", "elements": 1024, "bits_per_element": bits, "relative_error": error,
               "encode_gb_per_s": 1.0} for name, (_, bits, error) in codecs.rivals(x).items()]
    assert {codecs_plot.family(row) for row in table} == set(codecs_plot.FAMILIES)
    file = tmp_path / "codecs.json"
    file.write_text(json.dumps({"rows": table}))
    target = file.with_suffix(".png")
    assert codecs.draw(file) == f"drawn: {target}"
    assert target.read_bytes()[:4] == b"\x89PNG"
