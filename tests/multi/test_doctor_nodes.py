"""`commlayer doctor --nodes`: what is made of nodes that differ, and commands that tell each other what they are."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.processes import clean_environment

from commlayer import plan_file
from commlayer.config import Config
from commlayer.doctor import checks
from commlayer.doctor import nodes as comparison
from commlayer.doctor.machine import Software
from commlayer.doctor.nodes import NodeFacts
from commlayer.records import Bucket, Plan, Slice

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0
HERE = Software("0.1.0", 1, 4, "3.11.7", "avx2")


def nodes(*others: dict[str, Any], count: int = 2) -> list[NodeFacts]:
    """So many alike, the last of them with these fields."""
    made = [NodeFacts(host, "", HERE, "2.13.0+cpu", "abc", ((100.0, 100.5), (101.0, 101.01))) for host in "abcde"[:count]]
    first = count - len(others)
    return made[:first] + [msgspec.structs.replace(node, **own) for node, own in zip(made[first:], others, strict=True)]


def but(**fields: Any) -> dict[str, Any]:
    return {"software": msgspec.structs.replace(HERE, **fields)}


def at(*clock: tuple[float, float]) -> dict[str, Any]:
    return {"clock": clock}


B = "node 1 \\(b\\)"
A = "node 0 \\(a\\)"
ALIKE: list[tuple[list[NodeFacts], list[tuple[str, str, str]]]] = [
    (nodes(), [("ok", "the same versions and the same plan on all 2", "")]),
    (nodes({"plan": ""}, {"plan": ""}), [("ok", "the same versions on all 2", "")]),
    (nodes(but(commlayer="0.2.0")),
     [("fail", f"commlayer 0.1.0 .* on {A}, commlayer 0.2.0 .* on {B}; links are not", "same version of commlayer")]),
    (nodes(but(wire=5)), [("fail", f"wire format 4\\) on {A}, .*wire format 5\\) on {B}", "same version of commlayer")]),
    (nodes({"software": None}), [("fail", "another commlayer on", ""), ("fail", "another Python on", "")]),
    (nodes({"torch": "2.12.1"}), [("fail", f"torch 2.13.0 on {A}, torch 2.12.1 on {B}", "same version of torch")]),
    (nodes({"torch": "2.13.0+cu126"}), [("ok", "", "")]),
    (nodes(but(python="3.12.1")), [("fail", f"Python 3.11 on {A}, Python 3.12 on {B}", "same version of Python")]),
    (nodes(but(python="3.11.9")), [("ok", "", "")]),
    (nodes({"plan": "xyz"}), [("fail", f"hash abc on {A}, plan with hash xyz on {B}", "same plan file")]),
    (nodes({"plan": ""}), [("fail", f"hash abc on {A}, no plan on {B}", "same plan file")]),
    (nodes({"plan": "xyz"}, {"plan": ""}, count=5),
     [("fail", "xyz on node 3 \\(d\\), no plan on node 4 \\(e\\), plan with hash abc on the 3 others$", "same plan file")]),
]
CLOCKS: list[tuple[list[NodeFacts], bool, list[tuple[str, str]]]] = [
    (nodes(), False, [("ok", f"within 0.01 s of that of {A}")]),
    (nodes(at((107.0, 107.5), (108.0, 108.01))), False, [("warn", f"{B} 7 s ahead of {A}")]),
    (nodes(at((92.0, 92.5), (93.0, 93.01))), False, [("warn", f"{A} 8 s ahead of {B}")]),
    (nodes(at((7300.0, 7300.5), (7301.0, 7301.01))), True, [("fail", f"{B} 2.0 hours ahead of {A}")]),
    (nodes(at((7300.0, 7300.5), (7301.0, 7301.01))), False, [("warn", f"{B} 2.0 hours ahead of {A}")]),
    # Of three the one that is alone is wrong, whichever is first.
    (nodes(*[at((7300.0, 7300.5), (7301.0, 7301.01))] * 2, count=3), False,
     [("warn", f"clocks: {A} 2.0 hours behind {B}")]),
    # Who was held up for 20 s in all meetings may be right: the moment of meeting was somewhere in them.
    (nodes(at((100.0, 120.0), (101.0, 121.0))), False, [("ok", "within")]),
    # One meeting that nothing held up is enough.
    (nodes(at((100.0, 220.0), (108.0, 108.01))), False, [("warn", f"{B} 7 s ahead of {A}")]),
    (nodes(at()), False, []),
]


@pytest.mark.parametrize("number", range(len(ALIKE)))
def test_nodes_that_differ_are_named(number: int) -> None:
    told, expected = ALIKE[number]
    found = [*comparison.check_alike(told)]
    assert [one.verdict for one in found] == [verdict for verdict, _, _ in expected], found
    for one, (_, seen, remedy) in zip(found, expected, strict=True):
        assert re.search(seen, one.seen), one
        assert re.search(remedy, one.remedy), one
        assert bool(one.remedy) == (one.verdict != "ok")


@pytest.mark.parametrize("number", range(len(CLOCKS)))
def test_clocks_are_wrong_only_beyond_what_meeting_took(number: int) -> None:
    told, keys, expected = CLOCKS[number]
    found = [*comparison.check_clocks(told, keys=keys)]
    assert [one.verdict for one in found] == [verdict for verdict, _ in expected], found
    for one, (_, seen) in zip(found, expected, strict=True):
        assert re.search(seen, one.seen), one
        assert bool(one.remedy) == (one.verdict != "ok")


# ---- the command


def started(out: Path, odd: str, *words: str) -> subprocess.Popen[str]:
    """`commlayer doctor` on a node where that program was run first."""
    program = f"{odd}\nimport sys; from commlayer.cli.main import run; sys.argv = ['commlayer', *sys.argv[1:]]; run()"
    line = [sys.executable, "-c", program, "doctor", *words, "--nodes", "2", "--json", str(out)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                            env=clean_environment() | {"COMMLAYER_CONFIG": "", "COLUMNS": "200"})


def of_both(tmp_path: Path, odd: str, plans: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """What both nodes have written, the second of which is odd. `plans`: which of two plan files each has."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file, codec in zip(files, ("fp16()", "bf16()"), strict=True):
        file.write_text(plan_file.written(Plan("job", (Bucket(0, (Slice(0, 0, 8),), "service", codec, 0),), 1)))
    named = [["--plan", str(files[which])] for which in plans] if plans else [[], []]
    outs = [tmp_path / f"{i}.json.out" for i in range(2)]
    both = [started(out, what, "--master", where, *own) for out, what, own in zip(outs, ("", odd), named, strict=True)]
    try:
        said = [each.communicate(timeout=LIMIT_S) for each in both]
    finally:
        for each in both:
            each.kill()
    assert [errors for _, errors in said] == ["", ""]
    return [json.loads(out.read_text()) for out in outs]


def seen(told: dict[str, Any]) -> list[str]:
    return [f"{one['verdict']} {one['seen']}" for one in told["findings"] if one["check"] == "nodes"]


def test_another_plan_another_python_and_a_wrong_clock_are_told_on_both(tmp_path: Path) -> None:
    odd = ("import platform, time; platform.python_version = lambda: '3.99.4'\n"
           "import commlayer.doctor.nodes as facts; from types import SimpleNamespace\n"
           "facts.time = SimpleNamespace(time=lambda: time.time() - 7200.0, monotonic=time.monotonic)")
    told = of_both(tmp_path, odd, (0, 1))
    assert seen(told[0]) == seen(told[1])
    lines = "\n".join(seen(told[0]))
    assert re.search(r"^fail Python 3.\d+ on node 0 \(\S+\), Python 3.\d+ on node 1", lines, re.MULTILINE)
    assert re.search(r"^fail plan with hash \w+ on node 0 \(\S+\), plan with hash \w+ on node 1", lines, re.MULTILINE)
    assert re.search(r"^warn clocks: node \d \(\S+\) 2.0 hours ahead of node \d", lines, re.MULTILINE)
    assert [pair["error"] for pair in told[0]["links"]] == [""], "and links are measured all the same"


@pytest.mark.nightly
def test_another_commlayer_is_told_and_nothing_is_measured(tmp_path: Path) -> None:
    told = of_both(tmp_path, "from commlayer.cluster import messages; messages.version = lambda: '9.9.9'")
    for each in told:
        (line,) = seen(each)
        assert re.search(r"^fail commlayer \S+ \(control protocol \d+, .*\) on node 0", line)
        assert "commlayer 9.9.9" in line
        assert each["links"] == []


# ---- how long it may take


def test_all_looks_of_one_machine_are_over_in_time() -> None:
    config = Config(join="hub:7000", keys="keys", journal="journal", audit="audit/log")
    doctor = checks.Doctor(checks.Options(config, plan=Path("plan.json")))
    every = [*doctor.checks()]
    facts = checks.server.ServerFacts("hub:7000", status=checks.messages.StatusReply("0.1.0", 1, 4, 0.0, 2, 0))
    doctor.facts["server"] = [facts]
    last = doctor.link_check()
    assert last is not None
    assert max(check.deadline_s for check in every) + last.deadline_s <= checks.ALONE_S
    page = (ROOT / "docs" / "how-to" / "diagnose.md").read_text("utf-8")
    assert f"over in {checks.ALONE_S:g} s" in " ".join(page.split())


def test_the_look_at_other_nodes_has_a_deadline_too() -> None:
    most_s = checks.Doctor(checks.Options(Config(join_deadline_s=60.0), nodes=4)).node_check().deadline_s
    assert most_s >= comparison.limit_s(4, 60.0), "what is late is named by who waits for it"
    assert most_s + checks.ALONE_S <= 150.0, "docs/how-to/diagnose.md: two and a half minutes"
