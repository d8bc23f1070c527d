"""`commlayer plan` with a budget of loss: what it keeps out, and which budget would do."""

from __future__ import annotations

import json
import re
from pathlib import Path

from support.commands import commlayer_called  # noqa: F401  (a fixture)


def test_a_budget_that_keeps_a_better_plan_out_names_it_and_the_budget_that_would_do(commlayer) -> None:
    asked = ("plan", "make", "lstm", "--nodes", "4xrtx3060@10Mb", "--exact", "--optimizer", "sgd")
    points = [{"codec": "topk", "ratio": 0.01, "penalty": 0.2}, {"codec": "int8", "ratio": 1.0, "penalty": 0.1}]
    Path("loss.json").write_text(json.dumps({"points": points}))
    _, out, _ = commlayer(*asked, "--max-loss", "0.01", "--loss", "loss.json")
    assert "but max_loss would not be kept" in " ".join(out.split())
    _, out, _ = commlayer(*asked, "--max-loss", "0.01")
    assert re.search(r"; only no --max-loss, since it loses [1-9][0-9.]* of the loss and 1 is the most to be named, allows it",
                     " ".join(out.split())), "no budget is named that none may be"
    asked = (*asked, "--codec", "int8()", "--codec", "topk(ratio=0.1)")
    _, out, _ = commlayer(*asked, "--max-loss", "0.01")
    told = re.search(r"--max-loss is what holds it up: plain steps with topk\S+ would take (\S+) ms .*; --max-loss (\S+) ",
                     " ".join(out.split()))
    assert told is not None
    _, out, _ = commlayer(*asked, "--max-loss", told[2])
    assert "holds it up" not in out
    assert told[1] in out, "that plan"
    _, out, _ = commlayer(*asked, "--max-loss", f"{100 * float(told[2]):g}%")
    assert told[1] in out, "the same in per cent"


def test_a_sweep_says_what_the_budget_of_its_plan_keeps_out_and_what_latencies_alone_take(commlayer) -> None:
    made = ("plan", "make", "lstm", "--nodes", "4xrtx3060@10Mb", "--exact", "--optimizer", "sgd", "--codec", "int8()",
            "--codec", "topk(ratio=0.1)", "--out", "plan.json")
    _, out, _ = commlayer(*made, "--max-loss", "0.01")
    told = re.search(r"would take (\S+) ms to a loss instead of (\S+); (--max-loss \S+) allows it", " ".join(out.split()))
    floor = re.search(r"its latencies alone .* ([0-9,.]+)\s+\S+ x", out)
    assert told is not None
    assert floor is not None
    _, out, _ = commlayer("plan", "whatif", "--nodes", "4")
    said = " ".join(out.split())
    assert (f"the plan's --max-loss is what holds it up: {told[1]} ms in place of {told[2]}, which {told[3]} allows (4 nodes); "
            "`commlayer plan make` sets it") in said
    assert f"latencies alone, if links and codecs took no time, ms to a loss: {floor[1]} (4 nodes)" in said
    assert commlayer(*made)[0] == 0
    _, out, _ = commlayer("plan", "whatif", "--nodes", "4")
    assert "holds it up" not in out


def test_what_a_budget_keeps_out_is_said_in_whole_words(commlayer) -> None:
    """Seconds of four digits have a comma of their own."""
    commlayer("plan", "make", "resnet50", "--nodes", "4xrtx3060@100Mb", "--optimizer", "adamw", "--max-loss", "0.001",
              "--codec", "topk(ratio=0.01)", "--exact", "--objective", "step", "--json", "told.json")
    reasons = {bucket["why"]["reason"] for bucket in json.loads(Path("told.json").read_text())["buckets"]}
    kept_out = "coded, the step would be ([0-9,.]+) ms shorter, but max_loss would not be kept"
    assert any("," in told[1] for reason in reasons if (told := re.fullmatch(kept_out, reason)))
    assert all(re.fullmatch(kept_out, reason) for reason in reasons if "max_loss" in reason)
