"""Error feedback: fused equals general, an abandoned step leaves no trace, a restored state goes on bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import codecs as kit

from commlayer.compressors import Codec, error_feedback, identity, int8, restore, snapshot, topk, wrap
from commlayer.records import Spec

WRAPPED = [error_feedback(codec) for codec in kit.PLAIN]


@pytest.mark.parametrize("codec", WRAPPED, ids=str)
@pytest.mark.parametrize("n", [1, 700, 20_011])
def test_undo_leaves_what_was_owed_before_and_only_once(codec: Codec, n: int) -> None:
    state = codec.init(Spec((n,)))
    out = kit.room(codec, Spec((n,)))
    codec.undo(state, torch.zeros(n))
    assert not kit.residual(state).any()
    for step in range(4):
        codec.start(kit.noise(n, 20 + step), state, out)
        x, wanted = kit.noise(n, step), kit.residual(state)
        codec.start(x, state, out)
        codec.undo(state, x)
        torch.testing.assert_close(kit.residual(state), wanted, rtol=1e-6, atol=1e-6)
        once = kit.residual(state)
        codec.undo(state, x)
        assert torch.equal(kit.residual(state), once)


def test_a_sum_that_overflows_leaves_the_server_as_it_was() -> None:
    codec = error_feedback(topk(ratio=0.5, values="fp32"))
    cluster = kit.Cluster(codec, Spec((100,)), 2)
    cluster.step([kit.noise(100), kit.noise(100, 1)])
    before = kit.residual(cluster.server)
    huge = torch.full((100,), 3e38)
    cluster.step([huge, huge])
    assert cluster.finite == [False, False]
    cluster.undo()
    assert torch.equal(kit.residual(cluster.server), before)
    assert bool(kit.residual(cluster.states[0]).isfinite().all())
    assert not bool((kit.residual(cluster.states[0]) > 1.0).any()), "nothing enormous stays behind"


def test_restore_names_what_does_not_fit() -> None:
    codec = error_feedback(topk())
    state = codec.init(Spec((10,)))
    good = snapshot(state)
    with pytest.raises(ValueError, match=r"\['residual'\].*\['rest'\].*E-CODEC-STATE"):
        restore(state, {**{k: v for k, v in good.items() if k != "residual"}, "rest": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"residual: .*\(11,\).*\(10,\).*E-CODEC-STATE"):
        restore(state, {**good, "residual": torch.ones(11)})
    assert not kit.residual(state).any()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("residual", float("nan"), "not finite"),
        ("residual", float("inf"), "not finite"),
        ("inner.slope", 0.0, "is 0.0.*0.5 to 40.0"),
        ("inner.slope", -4.0, "is -4.0.*0.5 to 40.0"),
        ("inner.slope", float("nan"), "not finite"),
        ("inner.threshold", -1.0, "is -1.0.*0.0 to 3.4"),
        ("inner.trend", 100.0, "is 100.0.*-0.5 to 0.5"),
        ("inner.doubt", -1.0, "is -1.0.*0.0 to 0.25"),
        ("inner.step", -1, "is -1.* 0 to"),
    ],
)
def test_restore_refuses_numbers_that_no_step_makes(name: str, value: float, words: str) -> None:
    codec = error_feedback(topk())
    state = codec.init(Spec((20_000,)))
    kit.encode(codec, kit.noise(20_000), state)
    before, bad = snapshot(state), snapshot(state)
    bad[name] = np.zeros_like(bad[name])
    bad[name].reshape(-1)[-1] = value
    with pytest.raises(ValueError, match=f"codec state {name}: .*{words}.*E-CODEC-STATE"):
        restore(state, bad)
    assert all(np.array_equal(value, before[path]) for path, value in snapshot(state).items())


def test_wrap_adds_feedback_where_it_is_needed() -> None:
    assert wrap(topk()) == error_feedback(topk())
    assert wrap(int8()) == error_feedback(int8())
    assert wrap(identity()) == identity()
    assert wrap(error_feedback(topk())) == error_feedback(topk())
    with pytest.raises(ValueError, match="error_feedback: inner is error_feedback.*E-CODEC-ARGUMENT"):
        error_feedback(error_feedback(topk()))
    with pytest.raises(ValueError, match="error_feedback: inner is topk, .*E-CODEC-ARGUMENT"):
        error_feedback("topk")  # type: ignore[arg-type]
