"""Tensors and states that are not what a codec's state was made for: ValueError naming both sides, and nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import codecs as kit

from commlayer.compressors import Codec, parse, restore, snapshot
from commlayer.records import Spec

SPEC = Spec((64, 50))
WRONG: dict[str, torch.Tensor] = {
    "float64 of shape (3200,)": torch.zeros(3200, dtype=torch.float64),
    "bfloat16 of shape (3200,)": torch.zeros(3200, dtype=torch.bfloat16),
    "float32 of shape (3100,)": torch.zeros(3100),
    "float32 of shape (3300,)": torch.zeros(3300),
    "float32 of shape (64, 50)": torch.zeros(64, 50),
    "not contiguous": torch.zeros(6400)[::2],
    "on meta": torch.zeros(3200, device="meta"),
}
FEEDBACK = [parse(text) for text in (
    "error_feedback(int8())", "error_feedback(fp16())", "error_feedback(topk(ratio=0.1))", "error_feedback(powersgd(rank=2))",
    "momentum(error_feedback(int8()))",
)]
PLAIN = [parse(text) for text in (
    "topk(ratio=0.1)", "topk(ratio=0.1, exact=True)", "block_threshold(ratio=0.1)", "randomk(ratio=0.1)", "powersgd(rank=2)",
)]


def copies(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in snapshot(state).items()}


WITH_DEVICE = [(codec, told) for codec in FEEDBACK for told in WRONG]
WITHOUT = [(codec, told) for codec in PLAIN for told in WRONG if told != "on meta"]
"""What has no tensor in its state leaves the device to the kernels."""


@pytest.mark.parametrize(("codec", "told"), WITH_DEVICE + WITHOUT, ids=str)
def test_input_of_another_kind(codec: Codec, told: str) -> None:
    state, out = codec.init(SPEC), kit.room(codec, SPEC)
    codec.start(kit.noise(3200), state, out)
    before = copies(state)
    with pytest.raises(ValueError, match="x is .*of 3200 elements.*E-CODEC-INPUT") as caught:
        codec.start(WRONG[told], state, out)
    assert told in str(caught.value)
    after = snapshot(state)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("told", WRONG)
@pytest.mark.parametrize("codec", FEEDBACK, ids=str)
def test_output_of_another_kind(codec: Codec, told: str) -> None:
    cluster = kit.Cluster(codec, SPEC, 1)
    cluster.step([kit.noise(3200)])
    with pytest.raises(ValueError, match="out is .*of 3200 elements.*E-CODEC-INPUT") as caught:
        codec.decode(cluster.result, cluster.states[0], WRONG[told])
    assert told in str(caught.value)


@pytest.mark.parametrize("codec", FEEDBACK, ids=str)
def test_a_state_of_another_spec_or_type_is_refused(codec: Codec) -> None:
    state, other = codec.init(SPEC), codec.init(Spec((32, 101)))
    with pytest.raises(ValueError, match=r"codec state \S+: shape \(.*\).* \(.*\).*E-CODEC-STATE"):
        restore(other, snapshot(state))
    for name, value in snapshot(state).items():
        wrong = torch.float64 if value.dtype != torch.float64 else torch.float32
        with pytest.raises(ValueError, match=rf"codec state {name}: {wrong}.* {value.dtype}.*E-CODEC-STATE"):
            restore(codec.init(SPEC), {**snapshot(state), name: value.to(wrong)})
