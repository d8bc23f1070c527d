"""Codecs inside codecs, as a plan may spell them: each nesting is refused in one line, or works as its parts do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support import codecs as kit

from commlayer.compressors import Codec, codec_of, parse, seed, two_way, wrap
from commlayer.compressors.state import SERVER
from commlayer.records import Bucket, Slice, Spec

SPEC = Spec((700,))
WORKERS = 2
LEAVES = (
    "identity()", "fp16()", "int8(block=64)", "qsgd(block=64, levels=127)", "onebit(block=64)", "topk(ratio=0.1)",
    "topk(ratio=0.1, values='fp32')", "block_threshold(ratio=0.2)", "randomk(ratio=0.2)", "powersgd(rank=2)",
    "powersgd(rank=2, shapes=((20, 30), (10, 10)))",
)
WRAPPERS = (
    "error_feedback({})", "momentum({})",
)


def spellings(depth: int) -> list[str]:
    inner = spellings(depth - 1) if depth else []
    return [*LEAVES, *(wrapper.format(text) for wrapper in WRAPPERS for text in inner)]


def refusal(text: str) -> str:
    """Why a spelling is refused; empty if it is not."""
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    return ""


WHY = {text: refusal(text) for text in spellings(2)}
ACCEPTED = {str(codec): codec for codec in (wrap(parse(text)) for text, why in WHY.items() if not why)}


def residuals(state: Mapping[str, Any]) -> torch.Tensor:
    parts = [residuals(part) for part in state.values() if isinstance(part, dict)]
    mine = [kit.residual(state).double()] if "residual" in state else []
    return sum([*parts, *mine], torch.zeros(SPEC.numel, dtype=torch.float64))


def seeded(codec: Codec) -> kit.Cluster:
    cluster = kit.Cluster(codec, SPEC, WORKERS)
    for rank, state in enumerate(cluster.states):
        seed(state, "job", 0, rank)
    seed(cluster.server, "job", 0, SERVER)
    return cluster


def owed_after(codec: Codec, steps: int = 4, bad: int = 2) -> torch.Tensor:
    """What the steps put in, less what came out and what is kept; step `bad` is not finite, undone, and puts in nothing."""
    cluster, put, got = seeded(codec), torch.zeros(700, dtype=torch.float64), torch.zeros(700, dtype=torch.float64)
    for step in range(steps):
        xs = [kit.noise(700, 10 * step + i) * (1 + i) for i in range(WORKERS)]
        if step == bad:
            xs[1][5] = float("nan")
        else:
            put += sum(x.double() for x in xs)
        sums = cluster.step(xs)
        assert cluster.finite == [step != bad] * WORKERS
        if step == bad:
            cluster.undo()
        else:
            assert all(torch.equal(sums[0], one) for one in sums)
            got += sums[0].double()
    return put - got - sum((residuals(state) for state in [*cluster.states, cluster.server]), torch.zeros(700))


@pytest.mark.parametrize("codec", ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_accepted_sums_and_skips(codec: Codec) -> None:
    assert parse(str(codec)) == codec
    assert not codec.biased
    lost = owed_after(codec)
    if str(codec).startswith("error_feedback"):
        assert float(lost.abs().max()) < 2e-3


@pytest.mark.parametrize("down", ["int8(block=64)", "topk(ratio=1.0, values='fp32')", "topk(ratio=0.3)"])
@pytest.mark.parametrize("up", ["topk(ratio=0.2)", "momentum(int8(block=64))"])
def test_wrapped_codecs_up_and_another_down(up: str, down: str) -> None:
    lost = owed_after(two_way(wrap(parse(up)), wrap(parse(down))))
    if "momentum" not in up and "dgc" not in up:
        assert float(lost.abs().max()) < 1e-4


@pytest.mark.parametrize(("up", "down", "says"), [
    ("randomk()", "int8()", "up is error_feedback.randomk"),
    ("int8()", "randomk()", "down is error_feedback.randomk"),
])
def test_what_cannot_be_two_way_is_refused(up: str, down: str, says: str) -> None:
    with pytest.raises(ValueError, match=rf"two_way: {says}\b.*E-CODEC-ARGUMENT"):
        two_way(wrap(parse(up)), wrap(parse(down)))


@pytest.mark.parametrize(("by_node", "says"), [
    (("topk(ratio=0.1)", "topk(ratio=0.2)"), "ratio=0.2.* larger .*ratio=0.1"),
    (("topk(ratio=0.1)", "topk(ratio=0.05, values='fp16')"), "'fp16'.* does not read"),
    (("topk(ratio=0.1)", "int8()"), "does not read"),
    (("topk(ratio=0.1)", "error_feedback(topk(ratio=0.1), lr_correction=True)"), "does not read"),
])
def test_a_server_must_read_every_nodes_codec(by_node: tuple[str, ...], says: str) -> None:
    bucket = Bucket(3, (Slice(0, 0, 700),), "service", "topk(ratio=0.1)", by_node=by_node)
    for node in (None, 0, 1):
        with pytest.raises(ValueError, match=f"bucket 3: by_node has .*{says}.*E-PLAN-BY-NODE"):
            codec_of(bucket, node)
