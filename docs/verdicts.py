"""Writes the table of docs/explanation/should-i-use-it.md: the verdict of `commlayer estimate` for usual models and machines.

    python docs/verdicts.py docs/explanation/should-i-use-it.md
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from commlayer.files import replace_between_marks
from commlayer.planner.baselines import times_text

HEADER = '| training | machines | `sync="auto"` | cautious | `sync="step"` | command |'
BEGIN, END = "<!-- verdicts: begin -->", "<!-- verdicts: end -->"


class Case(NamedTuple):
    training: str
    machines: str
    model: str
    option: str


CASES = (
    Case("GPT-2, 124 M", "2 homes, RTX 3060, 100/20 Mb/s", "gpt2", "--homes 2xrtx3060@100/20Mb"),
    Case("GPT-2, 124 M", "3 homes, RTX 3060, 100/20 Mb/s", "gpt2", "--homes 3xrtx3060@100/20Mb"),
    Case("GPT-2, 124 M", "4 homes, RTX 4090, 100/20 Mb/s", "gpt2", "--homes 4xrtx4090@100/20Mb"),
    Case("Llama 3.2, 1 B", "3 homes, RTX 5090, 250/40 Mb/s", "llama3.2-1b", "--homes 3xrtx5090@250/40Mb"),
    Case("LoRA rank 16 of Llama 3.1, 8 B", "3 homes, RTX 4090, 100/20 Mb/s", "llama3.1-8b-lora16",
         "--homes 3xrtx4090@100/20Mb"),
    Case("ResNet-50", "3 homes, RTX 3060, 100/20 Mb/s", "resnet50", "--homes 3xrtx3060@100/20Mb"),
    Case("ViT-B/16", "3 homes, RTX 3060, 100/20 Mb/s", "vit-b16", "--homes 3xrtx3060@100/20Mb"),
    Case("Whisper small", "3 homes, RTX 3060, 100/20 Mb/s", "whisper-small", "--homes 3xrtx3060@100/20Mb"),
    Case("LoRA of SDXL", "3 homes, RTX 4090, 100/20 Mb/s", "sdxl-lora16", "--homes 3xrtx4090@100/20Mb"),
    Case("ResNet-50", "4 machines, RTX 3060, 1 Gb/s Ethernet", "resnet50", "--nodes 4xrtx3060@1Gb"),
    Case("GPT-2, 124 M", "4 machines, RTX 4090, 10 Gb/s Ethernet", "gpt2", "--nodes 4xrtx4090@10Gb"),
    Case("GPT-2, 124 M", "3 homes, an RTX 3090 and two RTX 3060", "gpt2", "--homes rtx3090@100/20Mb,2xrtx3060@100/20Mb"),
    Case("GPT-2, 124 M", "2 homes, RTX 4090 and RTX 3060", "gpt2", "--homes rtx4090@100/20Mb,rtx3060@100/20Mb"),
    Case("GPT-2, 124 M", "3 homes, RTX 3060, 5/1 Mb/s", "gpt2", "--homes 3xrtx3060@5/1Mb"),
)


def table() -> str:
    lines = [HEADER, "| --- | --- | ---: | ---: | ---: | --- |"]
    command = Path(sys.executable).with_name("commlayer")
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            file = Path(folder) / "verdict.json"
            subprocess.run([command, "estimate", case.model, *case.option.split(), "--json", file], check=True,
                           stdout=subprocess.DEVNULL, timeout=300)
            verdict = json.loads(file.read_text())
            lines.append(f"| {case.training} | {case.machines} | {' | '.join(_gains(verdict))} "
                         f"| `estimate {case.model} {case.option}` |")
    return "\n".join(lines)


def _gains(verdict: Mapping[str, Any]) -> tuple[str, str, str]:
    """The gain of sync="auto" and its cautious estimate, and the gain of sync="step". If the noise scale is unknown, the first
    is a range that has no cautious estimate."""
    low, high, step = (verdict[f"gain_over_alone{name}"] for name in ("", "_high", "_step"))
    if not low:
        return verdict["verdict"].partition(":")[0].lower(), "", ""
    if high <= 1:
        return "stay alone", "", times_text(step)
    return times_text(low, high), times_text(verdict["gain_over_alone_cautious"]) if low == high else "", times_text(step)


def main() -> None:
    page = Path(sys.argv[1])
    page.write_text(replace_between_marks(page.read_text(), BEGIN, END, f"\n{table()}\n"))


if __name__ == "__main__":
    main()
