"""Peak memory of a rank beyond plain training, for GPT-2 small on two ranks over loopback.

Each configuration runs in fresh processes. Sizes are in multiples of the model's bytes (float32 parameters). A peak is VmHWM
over the whole life of a process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.ranks import as_rank, launch_hosts, program
from bench.report import Result

RANKS = 2
MODES: dict[str, dict[str, Any]] = {
    "plain": {}, "ddp": {}, "identity": {"compression": "identity"}, "int4": {"compression": "int4"},
    "topk": {"compression": "topk(ratio=0.01)"}, "int4 under DDP": {"compression": "int4"},
    "every=16": {"compression": "int4", "local": 16}, "step": {"sync": "step"},
    "auto": {"sync": "auto"},
}
"""Arguments of attach()."""
STEPS = {"every=16": 18, "step": 30, "auto": 60}
SIZES = {"gpt2": (768, 12, 50257), "small": (384, 6, 20000), "tiny": (128, 2, 4000)}
"""Width, layers and vocabulary. GPT-2 small has 498 MB, the others 74 and 4 MB."""


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", default=",".join(mode for mode in MODES if mode != "plain"), help=f"of: {','.join(MODES)}")


def measured(mode: str, size: str, steps: int = 8, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The rank with the largest peak, and the peak of the server."""
    replies = launch_hosts(None, RANKS, program("bench.memory", mode, size, steps), deadline_s=900, env=env)
    return max(replies, key=lambda t: int(t["peak"])) | {"server": max(t["server"] for t in replies)}


def run(quick: bool, args: argparse.Namespace) -> Result:
    size = "small" if quick else "gpt2"
    base, rows, summary = measured("plain", size), [], {}
    for mode in args.modes.split(","):
        worst = measured(mode, size, STEPS.get(mode, 8))
        unit = worst["nbytes"]
        row = {"mode": mode, "x_model": (worst["peak"] - base["peak"]) / unit,
               "at_end_x": (worst["resident"][-1] - base["resident"][-1]) / unit,
               "server_x": worst["server"] / unit, "attach_s": worst["attach_s"], "attach_x": worst["attached"] / unit,
               "exchange_s": worst["longest_s"] - base["longest_s"], "close_s": worst["close_s"]}
        rows.append({name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()})
        print(rows[-1], file=sys.stderr, flush=True)  # so that a later crash loses no row
        summary[mode] = row["x_model"]
    return {"rows": rows, "summary": summary}


def peak(pid: int | str = "self", field: str = "VmHWM") -> int:
    line = next(text for text in Path(f"/proc/{pid}/status").read_text().splitlines() if text.startswith(field))
    return int(line.split()[1]) * 1024


class GPT(nn.Module):
    """The loss of a model of GPT-2's shape."""

    def __init__(self, wide: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, wide), nn.Embedding(1024, wide)
        layer = partial(nn.TransformerEncoderLayer, wide, wide // 64, 4 * wide, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks, self.norm = nn.ModuleList(layer() for _ in range(layers)), nn.LayerNorm(wide)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.words(tokens) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        logits = self.norm(x) @ self.words.weight.T
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def rank(mode: str, size: str, count: str) -> dict[str, Any]:
    """One rank: its memory and times."""
    steps, vocabulary = int(count), SIZES[size][-1]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT(*SIZES[size])
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    module = DistributedDataParallel(model) if "ddp" in mode.lower() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session, before, begin = None, peak(field="VmRSS"), time.perf_counter()
    if options := dict(MODES[mode]):
        if every := options.pop("local", 0):
            options["sync"] = commlayer.LocalSteps(every, overlap=False)
        session = commlayer.attach(module, optimizer, config={"ranks_per_node": 1}, **options)
    attach_s, attached = time.perf_counter() - begin, peak(field="VmRSS") - before
    generator, times, resident = torch.Generator().manual_seed(dist.get_rank()), list[float](), []
    for step in range(steps):
        dist.barrier()
        start = time.perf_counter()
        module(torch.randint(0, vocabulary, (1, 64), generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        if step in (steps // 10, steps - 1):
            resident.append(peak(field="VmRSS"))
    children = [] if session is None else session.inspect.context.embedded
    server = max((peak(child.pid) for child in children), default=0)
    start = time.perf_counter()
    if session is not None:
        session.close()
    return {"peak": peak(), "resident": resident, "nbytes": nbytes, "server": server, "attach_s": attach_s,
            "attached": attached, "longest_s": max(times[2:]), "close_s": time.perf_counter() - start}


if __name__ == "__main__":
    as_rank(rank)
