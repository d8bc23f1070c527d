"""What every measurement prints and writes, and how `python -m bench` refuses."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest
from support import codecs as kit

import bench.__main__ as front
from bench import (
    Unmeasurable,
    check,
    codecs,
    codecs_figures,
    energy,
    energy_models,
    fuzz,
    report,
    transport,
    transport_sums,
)
from bench.fuzz_targets import CODECS, Target, targets
from commlayer.cluster import messages
from commlayer.compressors import parse, wrap
from commlayer.compressors.payload import CODEC_IDS
from commlayer.errors import CorruptFrame
from commlayer.records import Record

RESULT: report.Result = {
    "rows": [{"what": "first", "gain": 1.5, "steps": 3}, {"what": "second", "extra": True}],
    "summary": {"best": 1.5, "note": "[none]"},
}


def measurement(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    module = ModuleType("a_measurement")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_measurement", module)
    monkeypatch.setitem(front.MEASUREMENTS, "trial", "a_measurement")


def test_the_file_holds_name_machine_rows_and_summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = []
    measurement(monkeypatch, lambda quick: results.append(quick) or RESULT)
    file = tmp_path / "out.json"
    assert front.main(["trial", "--quick", "--json", str(file)]) == 0
    assert results == [True]
    written = json.loads(file.read_text())
    assert list(written) == ["name", "machine", "rows", "summary"]
    assert written["name"] == "trial"
    assert written["rows"] == RESULT["rows"]
    assert written["summary"] == RESULT["summary"]
    assert set(written["machine"]) == {"cpu", "cores", "memory_gb", "kernel", "python", "torch", "commit"}
    assert all(written["machine"][key] for key in ("cpu", "cores", "memory_gb", "kernel", "python", "torch"))
    assert list(tmp_path.iterdir()) == [file]


def test_an_unknown_name_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main(["speed"]) == 2
    errors = capsys.readouterr().err
    assert errors == f"bench: no measurement is called 'speed'; there are: {', '.join(front.MEASUREMENTS)}\n"


def test_what_cannot_be_measured_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(quick: bool) -> report.Result:
        raise Unmeasurable(f"needs root (quick: {quick})")

    measurement(monkeypatch, run)
    assert front.main(["trial", "--json", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err == "bench: trial cannot be measured here: needs root (quick: False)\n"
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measurement(monkeypatch, lambda _quick: pytest.fail("measured for nothing"))
    assert front.main(["trial", "--json", str(tmp_path / "missing" / "out.json")]) == 2
    assert "does not exist" in capsys.readouterr().err


# ---- `make bench-check` passes on what is stored, and fails where one ratio is beyond its limit

STORED = json.loads(check.EXPECTED.read_text())


def test_what_is_stored_passes() -> None:
    results = {name: each["ratio"] for name, each in STORED.items()}
    assert check.compared(results, STORED)["code"] == 0


def test_one_that_is_worse_fails_and_is_named() -> None:
    for name, each in STORED.items():
        limit = each["ratio"] * (1 + each["tolerance"])
        result = check.compared({name: limit * 1.01}, STORED)
        assert result["code"] == 1
        assert result["summary"]["worse"] == [name]
        assert check.compared({name: limit * 0.99}, STORED)["code"] == 0


# ---- The measurement of where entries go: on all its models one threshold keeps more of the energy, in as many byte

SETTLED = 3
"""Steps after which counts have found their place; the first has the plain ones."""


@pytest.mark.parametrize("model", energy_models.MODELS)
def test_one_threshold_keeps_more_than_sorting_each_bucket(model: str) -> None:
    _, sent, down = energy.train(model, "sgd", "plan", seed=1, steps=SETTLED + 4)
    plain, settled = sent[: energy.WORKERS], sent[SETTLED * energy.WORKERS :]
    assert all(s.kept == pytest.approx(s.alike, rel=1e-3) for s in plain)
    assert fmean(s.kept for s in settled) > 1.02 * fmean(s.alike for s in settled)
    assert max(s.nbytes for s in settled) <= 1.02 * plain[0].nbytes
    assert max(down[SETTLED:]) <= 1.02 * down[0]


# ---- `bench transport`: its summary, and equal sums of servers and Gloo

def row(where: str, *, body: str = transport.BODY, void: bool = False, **more: float) -> dict[str, object]:
    return {"where": where, "body": body, "void": void, "plain_gb_s": 0.01, "socket_gb_s": 0.0115, "vs_socket": 0.9} | more


def test_void_rows_say_nothing() -> None:
    assert transport.summarised([row("1 Gb/s", void=True), {"where": "100 Mb/s, 150 ms", "void": True, "why": "no root"}]) == {}


def test_sums_agree_and_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_sums, "RANKS", (2,))
    rows, summary = transport_sums.run(quick=True)
    assert [r["body"] for r in rows] == list(transport_sums.IN_QUICK)
    assert summary.keys() == {"tcp_vs_gloo_n2", "small_roundtrip_vs_gloo"}


# ---- The measurement of codecs: every codec is in it, its rows are checked before they are timed, its picture is dr

def test_every_codec_is_measured() -> None:
    assert {parse(text).id for text in codecs.CODECS} == set(CODEC_IDS.values())


@pytest.mark.parametrize("backend", codecs.BACKENDS)
def test_a_row_says_what_was_sent(backend: str) -> None:
    x = kit.noise(1024)
    row = codecs.row("int8()", backend, x, quick=True)
    assert row["bits_per_element"] == pytest.approx(8 * (16 + 4 + 1024) / 1024, abs=1e-3)
    assert 0.004 < row["relative_error"] < 0.01
    assert row["encode_gb_per_s"] == pytest.approx(4096 / row["encode_us"] / 1e3, abs=0.001, rel=0.05)
    if backend == "fallback":
        return  # it has no powersgd
    two = codecs.row("powersgd(2)", backend, x, quick=True)
    assert two["bits_per_element"] == 8 * 2 * (16 + 4 * 2 * 32) / 1024


def test_figures_of_sparse_payloads() -> None:
    result = codecs_figures.figures(quick=True)
    assert result["bits_per_entry_1pct_int8"] <= 17.5
    assert all(result[f"position_bits_over_entropy_{share}"] <= 1.15 for share in ("01pct", "1pct", "10pct"))
    assert 0.9 < result["threshold_recall_1pct"] <= 1.0
    assert 0.9 <= result["entries_over_k_1pct"] <= 1.1


# ---- Whatever reads bytes of others refuses damaged ones by its own error

def test_damage_is_refused_or_read_by_every_reader() -> None:
    results = targets()
    for target in results:
        for example in target.examples:
            try:
                target.read(example, random.Random(1))
            except target.refusals:
                assert "greeting" in target.name, f"{target.name}: a valid example is refused"
    result = fuzz.fuzz(targets(), 4000, seed=20261122)
    reply = result["rows"][: len(results)]
    assert result["rows"][len(results) :] == []
    assert all(row["refused"] for row in reply)


def test_every_codec_and_every_control_record_is_there() -> None:
    names = {target.name for target in targets()}
    assert {wrap(parse(text)).id for text in CODECS} == set(CODEC_IDS.values())
    own = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Record)]
    kinds = {kind.__name__ for kind in own if kind.__module__ == messages.__name__}
    assert {f"control {name}" for name in kinds} <= names


def test_what_a_reader_must_not_do_is_a_finding() -> None:
    def read(data: bytes, _: random.Random) -> None:
        if data[0] & 1:
            raise KeyError("a crash")
        raise CorruptFrame("as it should be")

    result = fuzz.fuzz([Target("careless", [bytes(20)], read)], 200)
    assert result["summary"]["findings"] > 0
    assert result["rows"][1]["finding"].startswith("KeyError")


@pytest.mark.parametrize(("text", "shown"), [(b"\xff", "invalid start byte"), (b"\n", r"unknown field `\\n`")])
def test_what_strangers_write_is_refused_in_one_line(text: bytes, shown: str) -> None:
    """Found so: bytes that are no text ended the reader's thread, and line breaks made lines of their own in logs."""
    with pytest.raises(CorruptFrame, match=f"{shown}.*E-FRAME") as caught:
        messages.unpack(b"\x81\xa1" + text + b"\xc0", messages.Heartbeat, "worker 1")
    assert "\n" not in str(caught.value)
