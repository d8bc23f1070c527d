"""Plans whose buckets go down otherwise than up, or up otherwise from each node, through real servers."""

from __future__ import annotations

import msgspec
import pytest
import torch
from support.attached import assert_refused, outcome
from support.rank_pool import Servers, pool, quick
from support.workers import Rig, job, on_ranks, step

import commlayer
from commlayer.codec_spec import parse_spec
from commlayer.compressors import codec_of, error_feedback, int8, topk, two_way
from commlayer.planner import default_plan
from commlayer.records import Bucket, Plan, Slice

WORLD = 3
STEPS = 30


def plan(codec: str, **fields: object) -> Plan:
    layout = default_plan(job(), codec=codec, path="service", servers=2, ranks_per_node=1, fuse_nbytes=2048, cut_nbytes=4096)
    return msgspec.structs.replace(layout, buckets=tuple(msgspec.structs.replace(b, **fields) for b in layout.buckets))


def gradients(rank: int, number: int) -> list[torch.Tensor | None]:
    """The same every step, so that with error feedback the results' mean tends to theirs."""
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(info.shape, generator=draw) for info in job().tensors]


@pytest.mark.parametrize(("codec", "fields"), [
    ("topk(ratio=0.2)", {"down": "int8(block=64)"}),
    ("topk(ratio=0.2)", {"down": "topk(ratio=1.0, values='fp16')"}),
    ("int8(block=64)", {"down": "identity()"}),
    ("identity()", {"down": "topk(ratio=0.2)"}),
    ("topk(ratio=0.5)", {"by_node": ("topk(ratio=0.5)", "topk(ratio=0.2)", "topk(ratio=0.1)")}),
    ("topk(ratio=0.5)", {"by_node": ("topk(ratio=0.5)", "topk(ratio=0.2)", "topk(ratio=0.1)"), "down": "int8(block=64)"}),
])
def test_the_mean_over_steps_tends_to_the_plain_mean(codec: str, fields: dict[str, object]) -> None:
    with Rig(WORLD, codec, servers=2, plan=plan(codec, **fields)) as rig:
        results = on_ranks(WORLD, lambda rank: [step(rig.workers[rank], gradients(rank, n)) for n in range(STEPS)])
    for result in results:
        assert not isinstance(result, BaseException), result
    for tensor, parts in enumerate(zip(*(gradients(rank, 0) for rank in range(WORLD)), strict=True)):
        if job().tensors[tensor].numel == 0:
            continue
        mean = sum(p for p in parts if p is not None) / WORLD
        over_steps = sum(results[0][n][tensor] for n in range(STEPS)) / STEPS
        assert all(torch.equal(r[n][tensor], results[0][n][tensor]) for r in results for n in range(STEPS))
        assert isinstance(mean, torch.Tensor)
        # The residual is bounded, whatever the number of steps: about 1 / ratio of a gradient.
        assert (over_steps - mean).norm() <= 0.35 * mean.norm() + 1e-6


def attached(rank: int, address: str, text: str) -> tuple[set[tuple[str, str]], torch.Tensor, torch.Tensor]:
    """What the plan has, this rank's gradient, and what came back."""
    model = torch.nn.Linear(64, 8, bias=False)
    with commlayer.attach(model, compression=text, config=quick(join=address)) as session:
        torch.manual_seed(rank)
        x = torch.randn(4, 64)
        model(x).sum().backward()
        assert model.weight.grad is not None
        ways = {(str(parse_spec(b.codec).core), str(parse_spec(b.down).core)) for b in session.inspect.connection.plan.buckets}
        return ways, x.sum(0).expand(8, 64), model.weight.grad


def test_a_script_may_ask_for_a_codec_for_each_way() -> None:
    with Servers(2, 1) as servers:
        results = pool(2).call(attached, servers.address, "two_way(fp16(), bf16())")
    mean = sum(own for _, own, _ in results) / 2
    for ways, _, got in results:
        assert ways == {("fp16()", "bf16()")}
        assert torch.equal(got, got.to(torch.bfloat16).float()), "as it came down"
        torch.testing.assert_close(got, mean, rtol=2**-7, atol=1e-3)


def test_each_part_is_checked() -> None:
    bucket = Bucket(0, (Slice(0, 0, 8),), "service", "topk(ratio=0.5)", down="int8()")
    assert str(codec_of(bucket)) == str(two_way(error_feedback(topk(0.5)), error_feedback(int8())))
    line = outcome(lambda: two_way(topk(0.5), two_way(topk(0.5), int8())))
    assert_refused(line, "E-CODEC-ARGUMENT", "two_way: down is two_way")
