"""Writes the table of docs/reference/codecs.md from the entries below and from the codecs.

`python docs/codec_table.py docs/reference/codecs.md` rewrites the table between the page's two marks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch

from commlayer.compressors.codec import Codec
from commlayer.compressors.feedback import wrap
from commlayer.compressors.plan_codecs import parse
from commlayer.files import replace_between_marks
from commlayer.records import Spec

BEGIN, END = "<!-- codecs: begin -->", "<!-- codecs: end -->"
SIDE = 512
"""Bits are measured on a square matrix of normal numbers with this side: all payloads of a worker's first step."""


class Entry(NamedTuple):
    """`example` is the spelling in a plan. Arguments that are not the defaults are part of what the row describes."""

    example: str
    what: str
    when: str
    paper: str


CATALOGUE: dict[str, Entry] = {
    "identity": Entry("identity()", "float32 as it is", "fast links; the measure of all others", "-"),
    "fp16": Entry("fp16()", "half precision", "halves the bytes at hardly any cost; gradients between 6e-8 and 65504", "-"),
    "bf16": Entry("bf16()", "bfloat16", "as fp16, for gradients of any scale", "-"),
    "int8": Entry("int8()", "whole numbers of 8 bits, a scale per block", "first choice where 4 x fewer bytes will do",
                  "Dettmers et al. 2022"),
    "int4": Entry("int4()", "whole numbers of 4 bits, a scale per block", "7.5 x fewer bytes, no sparsity",
                  "Dettmers et al. 2022"),
    "qsgd": Entry("qsgd()", "linear dithering, by the maximum or the norm of a block", "where no residual may be kept",
                  "Alistarh et al. 2017"),
    "onebit": Entry("onebit()", "sign and mean magnitude of a block", "30 x fewer bytes at the speed of a copy",
                    "Karimireddy et al. 2019, Zheng et al. 2019"),
    "topk": Entry("topk(ratio=0.01)", "the largest entries by a tracked threshold, int8 values, coded positions",
                  "where bytes are nearly all of a step; needs 2.1 to 2.5 x the steps", "Strom 2015, Aji and Heafield 2017"),
    "block_threshold": Entry("block_threshold(ratio=0.01)", "runs of 16 neighbours of largest sum",
                             "large entries lie together", "StellaTrain, Lim et al. 2024"),
    "randomk": Entry("randomk(ratio=0.01)", "the same entries of all workers, drawn by a shared seed",
                     "sums without decoding; no selection; bears less momentum than topk", "Stich et al. 2018"),
    "powersgd": Entry("powersgd(rank=4)", "two thin factors of a matrix, warm start", "large matrices; also by all-reduce",
                      "Vogels et al. 2019"),
    "error_feedback": Entry("error_feedback(int8(), lr_correction=True)", "keeps what was not sent for the next step",
                            "around biased codecs; a plan adds it", "Seide et al. 2014, Zheng et al. 2019"),
    "momentum": Entry("momentum(topk(ratio=0.01))", "momentum before coding", "the optimizer's own momentum is 0", "-"),
}


def bits_per_element(codec: Codec) -> float:
    """Bits per element of a first step, headers included."""
    spec, last = Spec((SIDE, SIDE)), len(codec.rounds) - 1
    state, server = codec.init(spec), codec.init_server(spec)
    out, room = (memoryview(bytearray(codec.bound(spec))) for _ in range(2))
    nbytes = total = codec.start(torch.randn(spec.numel, generator=torch.Generator().manual_seed(1)), state, out)
    for r in range(last):
        acc = codec.new_accumulator(spec, r)
        codec.add(r, out[:nbytes], acc, first=True)
        nbytes = codec.next(r, bytes(room[: codec.emit(r, acc, server, room)]), state, out)
        total += nbytes
    return 8 * total / spec.numel


def table() -> str:
    lines = [
        "| codec | what it sends | id | bits | alone | combines by | when to use | paper |",
        "| --- | --- | ---: | ---: | --- | --- | --- | --- |",
    ]
    for name, entry in CATALOGUE.items():
        codec = parse(entry.example)
        alone = "biased" if codec.biased else "keeps a residual" if codec.needs_undo else "unbiased"
        rounds = ", ".join(kind.name for kind in codec.rounds)
        bits = f"{bits_per_element(wrap(codec)):.3g}"
        lines.append(f"| `{name}` | {entry.what} | {codec.id} | {bits} | {alone} | {rounds} | {entry.when} | {entry.paper} |")
    return "\n".join(lines)


def renewed(page: str) -> str:
    """The page with a current table."""
    return replace_between_marks(page, BEGIN, END, table())


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python docs/codec_table.py docs/reference/codecs.md", file=sys.stderr)
        return 2
    page = Path(arguments[0])
    page.write_text(renewed(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
