"""Tensors whose gradients are mostly zeros: priced by what nonzero_numel, in buckets of their own, where zeros stay zeros."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.learning import learnt
from support.loopback import Hub
from support.planner import at

from commlayer.autotune.measuring import filled_of
from commlayer.compressors import codec_of
from commlayer.engine.worker import Worker
from commlayer.planner.buckets import default_plan
from commlayer.planner.model import Policy
from commlayer.planner.search import plan
from commlayer.planner.simulation import simulate
from commlayer.planner.tensors import keeps_zeros, sent_numel
from commlayer.records import Bucket, Job, Plan, Slice, TensorInfo, Timing

EXACT, FREE = Policy(optimizer="adam", exact=True), Policy(optimizer="adam", exact=False)
ROWS, WIDTH, DENSE = 1 << 16, 64, 1 << 20
SOME = 0.02


def job(filled: tuple[float, ...] = ()) -> Job:
    """An embedding, and something behind it."""
    return Job((TensorInfo("words", (ROWS, WIDTH)), TensorInfo("behind", (DENSE,)), TensorInfo("bias", (64,))),
               timing=Timing((0.1, 0.05, 0.05), (0.0, 0.02, 0.02), 0.1, 0.05, 0.005, filled=filled))


THIN = job((SOME, 1.0, 1.0))


def bucket(codec: str = "fp16()", path: str = "service", down: str = "", tensor: int = 0) -> Bucket:
    numel = THIN.tensors[tensor].numel
    return Bucket(0, (Slice(tensor, 0, numel),), path, codec, down=down)


def test_a_thin_tensor_has_buckets_of_its_own_and_goes_over_servers_as_zeros_stay_zeros() -> None:
    machines = at(100e6)
    result = plan(THIN, machines, learnt(machines), EXACT)
    of_words = [b for b in result.buckets if any(s.tensor == 0 for s in b.slices)]
    assert of_words
    assert all({s.tensor for s in b.slices} == {0} and keeps_zeros(b) for b in of_words), of_words
    assert all(b.why is not None and "zeros are not sent" in b.why.reason for b in of_words)
    assert sum(b.why.nbytes for b in of_words if b.why) < 4 * 4 * ROWS * WIDTH * SOME


def test_what_is_known_of_zeros_shortens_the_step_and_the_way_to_a_loss() -> None:
    machines = at(100e6)
    blind, seeing = (plan(each, machines, learnt(machines), EXACT) for each in (job(), THIN))
    assert seeing.step_s * seeing.steps_high < 0.8 * blind.step_s * blind.steps_high


def test_changes_of_weights_are_no_zeros_so_local_steps_are_priced_in_full() -> None:
    machines = at(2e6)
    result = plan(THIN, machines, learnt(machines), FREE)
    assert result.local_steps > 1
    assert any(not keeps_zeros(b) for b in result.buckets if b.slices[0].tensor == 0), "zeros are no reason to send it as it is"
    assert simulate(result, THIN, machines, learnt(machines), FREE) == simulate(result, job(), machines, learnt(machines), FREE)


@pytest.mark.parametrize(("codec", "path", "down", "codes", "every", "thin"), [
    ("fp16()", "service", "", "gradients", 1, True),
    ("identity()", "service", "", "gradients", 1, True),
    ("bf16()", "encode@cpu net.push net.pull decode@cpu", "", "gradients", 1, True),
    ("int4()", "service", "", "gradients", 1, False),  # keeps back, and sends it later
    ("error_feedback(int4())", "service", "", "gradients", 1, False),
    ("fp16()", "service", "int4()", "gradients", 1, False),
    ("identity()", "allreduce", "", "gradients", 1, False),  # a collective sends zeros
    ("fp16()", "service", "", "updates", 1, False),
    ("fp16()", "service", "", "updates", 4, False),
])
def test_elements_that_a_bucket_sends(codec: str, path: str, down: str, codes: str, every: int, thin: bool) -> None:
    one = bucket(codec, path, down)
    result = Plan(THIN.digest(), (one,), 1, 1, every, codes)  # type: ignore[arg-type]
    assert sent_numel(result, one, THIN) == (round(SOME * ROWS * WIDTH) if thin else ROWS * WIDTH)
    assert sent_numel(result, one, job()) == ROWS * WIDTH
    dense = bucket(codec, path, down, tensor=1)
    assert sent_numel(result, dense, THIN) == DENSE


@pytest.mark.parametrize("filled", [(1.0,), (1.5, 1.0, 1.0), (-0.1, 1.0, 1.0), (float("nan"), 1.0, 1.0)])
def test_parts_that_cannot_be_are_one_line(filled: tuple[float, ...]) -> None:
    machines = at(1e9)
    with pytest.raises(ValueError, match=rf"timing\.filled has {len(filled)} .*E-PLAN-INPUT"):
        plan(job(filled), machines, learnt(machines), EXACT)


WORDS = (TensorInfo("words", (256, 64)), TensorInfo("behind", (4096,)))


def after_a_step(codec: str, gradients: Sequence[torch.Tensor], weight: float = 1.0) -> Worker:
    """A worker that has sent its gradients and has no results yet."""
    plan = default_plan(Job(WORDS), codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=1, cut_nbytes=1 << 24)
    worker = Worker(Job(WORDS), plan, {b.id: codec_of(b) for b in plan.buckets}, torch.device("cpu"),
                    transport=Hub().transport(0))
    for each in worker.buckets:
        each.sources = [gradients[s.tensor] for s in each.slices]
        each.gather(1.0, weight)
    worker.close()
    return worker


def rows(*named: int) -> tuple[torch.Tensor, torch.Tensor]:
    gradients = torch.zeros(256, 64), torch.ones(4096)
    gradients[0][list(named)] = 1.0
    return gradients


def test_what_no_row_named_is_seen_in_gradients() -> None:
    """Two of 256 rows for this rank, at most eight for all four."""
    assert filled_of(after_a_step("error_feedback(int4())", rows(3, 77)), 4) == pytest.approx(((2 / 256 + 8 / 256) / 2, 1.0))
    assert filled_of(after_a_step("error_feedback(int4())", rows(*range(256))), 4) == ()


@pytest.mark.parametrize("codec", ["identity()", "fp16()"])
def test_where_an_answer_lies_in_the_place_of_the_gradient_it_is_of_all(codec: str) -> None:
    """Eight rows of all four are two of each: as much as was seen when what a rank gave was still there."""
    answered = after_a_step(codec, rows(1, 3, 50, 77, 100, 130, 200, 255))
    assert all(bucket.x.data_ptr() == bucket.y.data_ptr() for bucket in answered.buckets)
    assert filled_of(answered, 4) == pytest.approx(((2 / 256 + 8 / 256) / 2, 1.0))
